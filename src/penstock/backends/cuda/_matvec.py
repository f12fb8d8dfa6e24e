"""Products of a few rows with quantized or dense weights, one pass over the weights: plain, gated, and by experts."""

import functools
import weakref
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._codes import (
    FP_MAGIC,
    block_codes,
    columns,
    columns_summed,
    load_blocks,
    multiplied_blocks,
    place_of,
    row_rinv,
    tile_codes,
)
from penstock.backends.cuda._launch import INTERPRETED, activation, multiprocessors, pdl_options
from penstock.backends.cuda._rows import rounded
from penstock.ops.op import deterministic
from penstock.quant import QuantizedTensor

TOKENS = 8  # rows of x that one pass over the weights takes


@triton.jit
def _dense_product(
    w_ptr, x_ptr, norm_ptr, rinv, base, x_at, first, N, T, x_step, K: tl.constexpr, TP: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Rows first … first + R − 1 of a dense matrix that starts at row `base`, times TP rows of x → float32 [R, TP].

    With norm_ptr x is times rinv [TP] and norm [K], rounded as it was.
    """
    BK: tl.constexpr = min(triton.next_power_of_2(K), max(64, 8192 // (R * TP)))
    row = first + tl.arange(0, R)
    token = tl.arange(0, TP)
    acc = tl.zeros((R, BK, TP), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        ok = (row < tl.where(base >= 0, N, 0))[:, None] & (k < K)[None, :]
        w = tl.load(w_ptr + (base + row)[:, None] * K + k[None, :], mask=ok, other=0.0).to(tl.float32)
        here = (k < K)[:, None] & (token < T)[None, :]
        x = tl.load(x_ptr + x_at + token[None, :] * x_step + k[:, None], mask=here, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            x = rounded(x * rinv[None, :] * norm[:, None], x_ptr.dtype.element_ty).to(tl.float32)
        acc += w[:, :, None] * x[None, :, :]
    return tl.sum(acc, 1)


@triton.jit
def _wait_if(wait_first):
    if wait_first != 0:
        gdc_wait()


@triton.jit
def _in_turn(order_ptr, p, pairs, SHARED_EVERY: tl.constexpr):
    """The p-th pair of those in `order`, then of those of the common expert."""
    if SHARED_EVERY == 0:
        q = tl.load(order_ptr + p, cache_modifier=".cg")
    else:
        routed = pairs - pairs // SHARED_EVERY
        at = tl.load(order_ptr + p, mask=p < routed, other=0, cache_modifier=".cg")
        q = tl.where(p < routed, at + at // (SHARED_EVERY - 1), (p - routed) * SHARED_EVERY + SHARED_EVERY - 1)
    return q.to(tl.int64)


@triton.jit
def _arrived(
    x_ptr, norm_ptr, residual_ptr, p, at, ok, T, pairs_per_x, x_step, eps, K: tl.constexpr, TP: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """What a program reads once the kernel before has ended: 1 / rms of its rows of x, and its part of the residual."""
    rinv, residual = 0.0, 0.0
    if norm_ptr is not None:
        rinv = row_rinv(x_ptr, p // pairs_per_x * K, x_step, T, eps, K, TP, S)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
    return rinv, residual


# matvec    y[p, t] = residual[p, t] + sum_i weights[q] * (W[e] . x[q // pairs_per_x, t]), q = p * PAIRS_PER_ROW + i,
#           e = expert of q (ids, slot_of) or q itself; with ACT act(W[e] . x) * (U[e] . x); 0 for an expert that is not
#           there. norm: x is rms_norm(x, norm), PAIRS_PER_ROW 1. SHARED_EVERY: the last of so many pairs is that of the
#           shared expert, which has no id and for its weight sigmoid(score[token]), or 1. order: the turn of the pairs,
#           PAIRS_PER_ROW 1
# shapes    w, up: codes, scales, biases of rows of one format, `matrix` rows for each expert, those of up `up_row` rows
#           further; common, common_up: those of one expert; x rows of K, x_step apart for tokens; norm [K];
#           ids, weights [pairs with one]; y, residual rows of N, y_step apart, may be one; BITS 0: dense, GS 1
# grid      (ceil(N / R) * p,): a program has R rows for one p, its S warps take U blocks of (i, K) at a time; MANY: p
#           is a part of the tokens, TP of them, and programs of the same rows are neighbours
# bytes     the matrices that are named, once for all T tokens, with MANY once for TP; x stays in cache
# limits    T <= TP <= 8 tokens without MANY; codes: R a multiple of 16, with ACT of 8
#
# PDL: the kernel starts while the one before it ends, asks for weights, and waits for that end before it reads x or
# writes y. wait_first 1: weights or ids may be what the one before writes, so it waits before it reads anything.
@triton.jit(do_not_specialize=["magic", "wait_first", "T", "known", "stack", "pairs_per_x"])
def _matvec_kernel(
    w, up, common, common_up, x_ptr, norm_ptr, residual_ptr, ids_ptr, order_ptr, slot_ptr, weights_ptr, score_ptr,
    y_ptr, magic, wait_first, N, T, known, stack, matrix, up_row, pairs_per_x, x_step, y_step, eps,
    PAIRS_PER_ROW: tl.constexpr, SHARED_EVERY: tl.constexpr, MANY: tl.constexpr, ACT: tl.constexpr, G: tl.constexpr,
    BITS: tl.constexpr, GS: tl.constexpr, TP: tl.constexpr, R: tl.constexpr, S: tl.constexpr, U: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = G * GS
    p = (tl.program_id(0) // tl.cdiv(N, R)).to(tl.int64)
    first = tl.program_id(0) % tl.cdiv(N, R) * R
    if PDL:
        _wait_if(wait_first)
    if MANY:
        passes = tl.cdiv(T, TP)
        start = (tl.program_id(0) % passes).to(tl.int64) * TP
        first = tl.program_id(0) // passes * R
        x_ptr += start * x_step
        y_ptr += start * y_step
        if residual_ptr is not None:
            residual_ptr += start * y_step
        T -= start.to(tl.int32)
        p = start * 0
    if order_ptr is not None:
        p = _in_turn(order_ptr, p, tl.num_programs(0) // tl.cdiv(N, R), SHARED_EVERY)
    row = first + tl.arange(0, R)[:, None]
    token = tl.arange(0, TP)[None, :]
    at = p * N + token.to(tl.int64) * y_step + row
    ok = (row < N) & (token < T)
    if BITS == 0:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        rinv, residual = _arrived(x_ptr, norm_ptr, residual_ptr, p, at, ok, T, pairs_per_x, x_step, eps, K, TP, S)
        y = tl.zeros((R, TP), tl.float32)
        for q in range(p * PAIRS_PER_ROW, p * PAIRS_PER_ROW + PAIRS_PER_ROW):
            slot = q if ids_ptr is None else place_of(ids_ptr, slot_ptr, q, q >= 0, known, stack)
            base, x_at = slot * matrix, q // pairs_per_x * K
            part = _dense_product(w[0], x_ptr, norm_ptr, rinv, base, x_at, first, N, T, x_step, K, TP, R)
            if ACT is not None:
                base += up_row
                above = _dense_product(up[0], x_ptr, norm_ptr, rinv, base, x_at, first, N, T, x_step, K, TP, R)
                part = activation(part, ACT) * above
            if weights_ptr is not None:
                part *= tl.where(slot >= 0, tl.load(weights_ptr + q), 0.0)
            y += part
    else:
        ROWS: tl.constexpr = R if ACT is None else 2 * R
        COLS: tl.constexpr = columns(BITS, GS, TP)
        END: tl.constexpr = PAIRS_PER_ROW * triton.cdiv(K, block_codes(BITS, GS, TP))
        bases, words, scales, biases = load_blocks(
            w, up, common, common_up, ids_ptr, slot_ptr, p * PAIRS_PER_ROW, 0, first, N, known, stack, matrix, up_row,
            PAIRS_PER_ROW, SHARED_EVERY, G, BITS, GS, TP, ROWS, S, U,
        )  # fmt: skip
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        rinv, residual = _arrived(x_ptr, norm_ptr, residual_ptr, p, at, ok, T, pairs_per_x, x_step, eps, K, TP, S)
        total = multiplied_blocks(
            bases, words, scales, biases, x_ptr, norm_ptr, rinv, weights_ptr, score_ptr, magic, p * PAIRS_PER_ROW, 0, T,
            pairs_per_x, x_step, SHARED_EVERY, G, BITS, GS, TP, ROWS, S, U,
        )  # fmt: skip
        if END > S * U:
            for start in range(S * U, END, S * U):
                bases, words, scales, biases = load_blocks(
                    w, up, common, common_up, ids_ptr, slot_ptr, p * PAIRS_PER_ROW, start, first, N, known, stack,
                    matrix, up_row, PAIRS_PER_ROW, SHARED_EVERY, G, BITS, GS, TP, ROWS, S, U,
                )  # fmt: skip
                total += multiplied_blocks(
                    bases, words, scales, biases, x_ptr, norm_ptr, rinv, weights_ptr, score_ptr, magic,
                    p * PAIRS_PER_ROW, start, T, pairs_per_x, x_step, SHARED_EVERY, G, BITS, GS, TP, ROWS, S, U,
                )  # fmt: skip
        y = columns_summed(total, S, ROWS, COLS, TP)
        if ACT is not None:
            y, above = tl.split(y.reshape(2, R, TP).permute(1, 2, 0))
            y = activation(y, ACT) * above
    if residual_ptr is not None:
        y += residual
    tl.store(y_ptr + at, rounded(y, y_ptr.dtype.element_ty), mask=ok)


# gated     y[i] = act(gate[i]) * up[i]
# shapes    gate, up float32, y any float, all of one size
# grid      (ceil(size / BLOCK),)
# bytes     each once
# limits    none
@triton.jit
def _gated_kernel(gate_ptr, up_ptr, y_ptr, size, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < size, other=0.0)
    up = tl.load(up_ptr + at, mask=at < size, other=0.0)
    tl.store(y_ptr + at, rounded(activation(gate, ACT) * up, y_ptr.dtype.element_ty), mask=at < size)


# round     y[t, g * gs + j] = rint(x / d) * d with d = max |x| / 127 of the group, in float32; 0 where d = 0
# shapes    x, y [groups, GS]
# grid      (ceil(groups / ROWS),)
# bytes     x once, y once
# limits    none
@triton.jit
def _round_kernel(x_ptr, y_ptr, groups, GS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = row * GS + tl.arange(0, GS)[None, :]
    x = tl.load(x_ptr + at, mask=row < groups, other=0.0).to(tl.float32)
    delta = tl.div_rn(tl.max(tl.abs(x), 1), 127.0)[:, None]
    ratio = tl.div_rn(x, tl.where(delta == 0, 1.0, delta))
    # Adding and taking away 1.5 · 2^23 rounds to the nearest even integer.
    whole = tl.minimum(tl.maximum((ratio + 12582912.0) - 12582912.0, -127.0), 127.0)
    tl.store(y_ptr + at, whole * delta, mask=row < groups)


# -- launches --------------------------------------------------------------------------------------------------------


@functools.cache
def config(tokens: int, rows: int, warps: int, blocks: int = 1) -> dict[str, int]:
    """A launch for codes: rows and warps of a program, blocks of a warp; more tokens than there are: shorter blocks."""
    return {"TP": tokens, "R": rows, "S": warps, "U": blocks, "num_warps": warps, "num_stages": 1}


@functools.cache
def _config(
    bits: int, gs: int, N: int, K: int, T: int, pairs: int, slots: int, gated: bool, normed: bool, wide: bool,
    processors: int,
) -> dict[str, int]:  # fmt: skip
    """The launch for these sizes; `wide`: activations other than bfloat16, which take more registers."""
    tokens = triton.next_power_of_2(T)
    if bits == 0:
        return {"TP": tokens, "R": 8 if N * pairs >= 16 * processors else 2, "S": 1, "U": 1, "num_warps": 4}
    blocks = slots * -(-K // block_codes(bits, gs, tokens))
    tiles = N * pairs * (1 + gated) / 16 / processors
    rows = (8 if gated else 16) * (8 if INTERPRETED else 1)  # the interpreter is slow by the program, not by its size
    narrow = bits in (2, 4) and not wide  # leaves registers for twice as much
    if tiles >= 2.5:
        warps = min(4, triton.next_power_of_2(blocks))
        if tokens > 1:  # blocks are short: several at once, so that enough is on its way
            return config(tokens, rows, warps, min(4 if tokens == TOKENS else 2, -(-blocks // warps)) if narrow else 1)
        if normed and narrow and not gated and blocks in (3, 4):
            # Every program norms x: smaller ones of fewer warps. [9216, 2048] 6.2 µs, with 32 rows and 4 warps 7.8.
            return config(tokens, rows, 2, 2)
        # Many slots are many steps: with twice the rows more is on its way. DeepSeek's down 28 µs instead of 37.
        twice = narrow and ((blocks <= warps and tiles >= 5.5) or (slots > 1 and blocks > 16))
        return config(tokens, 2 * rows if twice else rows, warps)
    if tiles <= 1 and blocks <= 4 and tokens < TOKENS:
        tokens, blocks = 2 * tokens, 2 * blocks
    warps = min(16 if tiles <= 1 and slots > 1 and blocks <= 16 else 8, triton.next_power_of_2(blocks))
    return config(tokens, rows, warps, 2 if blocks > warps and narrow else 1)


_NO_WEIGHT = (None, None, None)


def _parts(w: Any) -> tuple[tuple[Any, Any, Any], int, int, int]:
    """Arrays, bits, group size and groups per row of a weight; a dense one has bits 0 and groups of 1."""
    if isinstance(w, QuantizedTensor):
        return w.arrays, w.bits, w.group_size, w.scales.shape[-1]
    assert w.is_contiguous()
    return (w, None, None), 0, 1, w.shape[-1]


def same_codes(*weights: QuantizedTensor) -> bool:
    """Whether one launch can read these weights: one width of codes, one group size, scales of one dtype."""
    return len({(w.bits, w.group_size, w.shape[-1], w.scales.dtype) for w in weights}) == 1


_read: weakref.WeakSet[QuantizedTensor] = weakref.WeakSet()


def _is_new(w: Any) -> bool:
    """Whether no kernel has read this weight so far: then the kernel before may have made it."""
    if not isinstance(w, QuantizedTensor) or w in _read:
        return False
    _read.add(w)
    return True


def _matvec(
    x: torch.Tensor,
    w: Any,
    out: torch.Tensor,
    N: int,
    T: int = 1,
    pairs: int = 1,
    slots: int = 1,
    pairs_per_x: int = 1,
    steps: tuple[int, int] = (0, 0),
    ids: torch.Tensor | None = None,
    slot_of: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    up: Any = None,
    act: str | None = None,
    stack: int = 0,
    old_ids: bool = False,
    order: torch.Tensor | None = None,
    many: bool = False,
    common: Any = None,
    common_up: Any = None,
    per_token: int = 0,
    score: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    config: dict[str, int] | None = None,
    alike: int = 0,
) -> None:
    """One launch of `matvec`. up None with an act: the up rows follow the N gate rows of w. common: the expert of the
    last of `per_token` pairs of a token. order: the turn in which pairs come, by their ids. many: more tokens than one
    pass over the weights takes. alike: pairs of all the launches that this one is a part of, which shall add up alike.
    """
    arrays, bits, gs, G = _parts(w)
    ups = _NO_WEIGHT if act is None else arrays if up is None else _parts(up)[0]
    if config is None:
        # Deterministic rows do not depend on how many there are. (Experts have one row of x each.)
        tokens, several = (_passes(x, w) if ids is None else 1, 1) if deterministic() else (T, alike or pairs)
        tokens = _passes(x, w) if many else tokens
        kind = (act is not None, norm is not None, x.dtype != torch.bfloat16, multiprocessors(x))
        config = _config(bits, gs, N, G * gs, tokens, several, slots, *kind)
    read = [_is_new(one) for one in (w, up, common, common_up) if one is not None]
    wait_first = any(read) or (ids is not None and not old_ids)
    _matvec_kernel[(triton.cdiv(N, config["R"]) * pairs,)](
        arrays, ups, _parts(common)[0] if common is not None else _NO_WEIGHT,
        _parts(common_up)[0] if common_up is not None else _NO_WEIGHT, x, norm, residual, ids, order, slot_of, weights,
        score, out, FP_MAGIC, int(wait_first), N, T, 0 if slot_of is None else slot_of.shape[0], stack or w.shape[0],
        w.shape[-2], N if up is None else 0, pairs_per_x, *steps, eps, PAIRS_PER_ROW=slots, SHARED_EVERY=per_token,
        MANY=many, ACT=act, G=G, BITS=bits, GS=gs, **config, **pdl_options(),
    )  # fmt: skip


@functools.cache
def _most_tokens(bits: int, gs: int, dtype: torch.dtype) -> int:
    """Rows of x that one pass over the weights takes: a thread keeps its x, in up to 3 parts, in registers."""
    parts = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[dtype]
    tokens = TOKENS
    while tokens > 1 and columns(bits, gs, tokens) * tile_codes(bits, gs, tokens) * parts > 192 * 32:
        tokens //= 2
    return tokens


def _passes(x: torch.Tensor, w: Any) -> int:
    """Rows of x per pass over w."""
    return _most_tokens(w.bits, w.group_size, x.dtype) if isinstance(w, QuantizedTensor) else TOKENS


def matvec(
    x: torch.Tensor,
    w: Any,
    out: torch.Tensor,
    up: Any = None,
    act: str | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """out [T, N] = residual + x [T, K] · w [N, K], or act(x · w) · (x · up); a few rows of x per pass over the weights.

    norm [K]: x is normed first. out may be residual.
    """
    (T, K), N = x.shape, out.shape[1]
    most = _passes(x, w)
    passes = triton.cdiv(T, most)
    _matvec(
        x, w, out, N, T, pairs=passes, many=passes > 1, steps=(K, N), up=up, act=act, residual=residual, norm=norm,
        eps=eps,
    )  # fmt: skip


def batched_matvec(x: torch.Tensor, w: Any, out: torch.Tensor) -> None:
    """out [T, H, N] = x [T, H, K] · w [H, N, K] for each of H."""
    _, H, K = x.shape
    N = out.shape[2]
    most = _passes(x, w)
    for part, into in zip(x.split(most), out.split(most), strict=True):
        _matvec(part, w, into, N, len(part), pairs=H, steps=(H * K, H * N))


def expert_rows(
    x: torch.Tensor,
    experts: Any,
    ids: torch.Tensor | None,
    slot_of: torch.Tensor | None,
    pairs_per_x: int,
    out: torch.Tensor,
    stack: int = 0,
) -> None:
    """out [pairs, N] = x[p // pairs_per_x] · experts[ids[p]]; ids None: expert p; 0 for an expert that is not there."""
    pairs, N = out.shape
    _matvec(x, experts, out, N, pairs=pairs, pairs_per_x=pairs_per_x, ids=ids, slot_of=slot_of, stack=stack)


def expert_gate_up_rows(
    x: torch.Tensor,
    gate_w: Any,
    up_w: Any,
    ids: torch.Tensor,
    slot_of: torch.Tensor | None,
    act: str,
    out: torch.Tensor,
    tokens: int = 0,
) -> None:
    """out [T, k, N] = act(gate_w[e] · x[t]) · (up_w[e] · x[t]), e = ids[t, i]; up_w None: gate_w is [S, 2N, K].

    All chosen experts of a token in one launch; 0 for an expert that is not there. tokens: those of all launches that
    this one is a part of.
    """
    T, k, N = out.shape
    if up_w is not None and _parts(gate_w)[3:] != _parts(up_w)[3:]:  # one kernel reads one format
        gate, up = (torch.empty((T * k, N), dtype=torch.float32, device=x.device) for _ in range(2))
        expert_rows(x, gate_w, ids, slot_of, k, gate)
        expert_rows(x, up_w, ids, slot_of, k, up)
        gated(gate, up, act, out)
        return
    _matvec(x, gate_w, out, N, pairs=T * k, pairs_per_x=k, ids=ids, slot_of=slot_of, up=up_w, act=act, alike=tokens * k)


def expert_down_sum_rows(
    h: torch.Tensor,
    down_w: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    slot_of: torch.Tensor | None,
    out: torch.Tensor,
    after_gate_up: bool = False,
    tokens: int = 0,
) -> None:
    """out [T, dim] = Σ_i weights[t, i] · (down_w[ids[t, i]] · h[t, i]) in one launch, without atomics.

    after_gate_up: the kernel before this one on the stream is that of `expert_gate_up_rows` with the same ids.
    """
    T, k, _ = h.shape
    _matvec(
        h, down_w, out, out.shape[1], pairs=T, slots=k, ids=ids, slot_of=slot_of, weights=weights,
        old_ids=after_gate_up, alike=tokens,
    )  # fmt: skip


def mixed_gate_up(
    x: torch.Tensor,
    gate_w: Any,
    up_w: Any,
    common: Any,
    common_up: Any,
    ids: torch.Tensor,
    slot_of: torch.Tensor | None,
    act: str,
    out: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    order: torch.Tensor | None = None,
    tokens: int = 0,
) -> None:
    """out [T, k + 1, N]: as `expert_gate_up_rows`, and in the last place the common expert, all in one launch.

    common, common_up [N, K] of the form of gate_w and up_w; norm [K]: x is normed first. order [T · k]: pairs by their
    experts, so that weights which several tokens chose come from memory once.
    """
    T, slots, N = out.shape
    _matvec(
        x, gate_w, out, N, pairs=T * slots, pairs_per_x=slots, ids=ids, slot_of=slot_of, up=up_w, act=act,
        common=common, common_up=common_up, per_token=slots, norm=norm, eps=eps, order=order, alike=tokens * slots,
    )  # fmt: skip


def mixed_down_sum(
    h: torch.Tensor,
    down_w: Any,
    common: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    score: torch.Tensor | None,
    slot_of: torch.Tensor | None,
    residual: torch.Tensor,
    out: torch.Tensor,
    tokens: int = 0,
) -> None:
    """out [T, dim] = residual + Σ_i weights[t, i] · (down_w[ids[t, i]] · h[t, i]) + σ(score[t]) · (common · h[t, k]).

    One launch, straight after `mixed_gate_up` with the same ids; slots in order, no atomics; out may be residual.
    """
    T, slots, _ = h.shape
    _matvec(
        h, down_w, out, out.shape[1], pairs=T, slots=slots, ids=ids, slot_of=slot_of, weights=weights, old_ids=True,
        common=common, per_token=slots, score=score, residual=residual, alike=tokens,
    )  # fmt: skip


def mixed_down(
    h: torch.Tensor,
    down_w: Any,
    common: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    score: torch.Tensor | None,
    slot_of: torch.Tensor | None,
    order: torch.Tensor,
    out: torch.Tensor,
    tokens: int = 0,
) -> None:
    """The terms of `mixed_down_sum`'s sum, out [T, k + 1, dim], pairs in the turn of `order`."""
    T, slots, _ = h.shape
    _matvec(
        h, down_w, out, out.shape[2], pairs=T * slots, ids=ids, slot_of=slot_of, weights=weights, old_ids=True,
        order=order, common=common, per_token=slots, score=score, alike=tokens * slots,
    )  # fmt: skip


def gated(gate: torch.Tensor, up: torch.Tensor, act: str, out: torch.Tensor) -> None:
    """out = act(gate) · up; gate and up float32."""
    _gated_kernel[(triton.cdiv(out.numel(), 1024),)](gate, up, out, out.numel(), ACT=act, BLOCK=1024)


def round_activations(x: torch.Tensor, gs: int) -> torch.Tensor:
    """x [T, K] rounded to 8 bits per group of gs, as float32: what a product with activations="int8" reads."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    groups = x.numel() // gs
    if groups:
        _round_kernel[(triton.cdiv(groups, 8),)](x, y, groups, GS=gs, ROWS=8, num_warps=1)
    return y
