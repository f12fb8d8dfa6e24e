"""Products of a few rows with quantized or dense weights, one pass over the weights."""

import functools
import weakref
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda import _tuning
from penstock.backends.cuda._blocks import code_bits, is_blocks
from penstock.backends.cuda._codes import (
    FP_MAGIC,
    Arrays,
    Constants,
    Sizes,
    block_codes,
    columns,
    columns_summed,
    load_blocks,
    multiplied_blocks,
    place_of,
    row_rinv,
    tile_codes,
)
from penstock.backends.cuda._floats import groups_of, is_float, kernel_arrays, kind_of
from penstock.backends.cuda._launch import (
    INTERPRETED,
    TL_DTYPES,
    activation,
    clamped_swiglu,
    compiled_for,
    counters,
    multiprocessors,
    pdl_options,
)
from penstock.backends.cuda._rows import rounded
from penstock.ops.op import deterministic
from penstock.quant import QuantizedTensor


@triton.jit
def dense_product(w, x, norm_ptr, rinv, base, x_at, first, T, n, C: tl.constexpr):
    """Rows first … first + R − 1 of a dense matrix that starts at row `base`, times TP rows of x → float32 [R, TP].

    With norm_ptr x is times rinv [TP] and norm [K], rounded to NORMED.
    """
    K: tl.constexpr = C.G * C.GS
    BK: tl.constexpr = min(triton.next_power_of_2(K), max(64, 8192 // (C.R * C.TP)))
    row = first + tl.arange(0, C.R)
    token = tl.arange(0, C.TP)
    acc = tl.zeros((C.R, BK, C.TP), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        ok = (row < tl.where(base >= 0, n.N, 0))[:, None] & (k < K)[None, :]
        weight = tl.load(w + (base + row)[:, None] * K + k[None, :], mask=ok, other=0.0).to(tl.float32)
        here = (k < K)[:, None] & (token < T)[None, :]
        rows = tl.load(x + x_at + token[None, :] * n.x_step + k[:, None], mask=here, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            rows = rounded(rows * rinv[None, :] * norm[:, None], C.NORMED).to(tl.float32)
        acc += weight[:, :, None] * rows[None, :, :]
    return tl.sum(acc, 1)


@triton.jit
def wait_if(wait_first):
    """Wait for the kernel before, unless wait_first is 0."""
    if wait_first != 0:
        gdc_wait()


@triton.jit
def _in_turn(order_ptr, p, pairs, SHARED_EVERY: tl.constexpr):
    """The p-th pair of those in `order`, then of those of the shared expert."""
    if SHARED_EVERY == 0:
        q = tl.load(order_ptr + p, cache_modifier=".cg")
    else:
        routed = pairs - pairs // SHARED_EVERY
        at = tl.load(order_ptr + p, mask=p < routed, other=0, cache_modifier=".cg")
        q = tl.where(p < routed, at + at // (SHARED_EVERY - 1), (p - routed) * SHARED_EVERY + SHARED_EVERY - 1)
    return q.to(tl.int64)


@triton.jit
def _part_of(a, program, programs, T, n, C: tl.constexpr):
    """A program's pair, its first row and first token, and how many tokens there are from there on."""
    if C.MANY:
        passes = tl.cdiv(T, C.TP)
        start = (program % passes).to(tl.int64) * C.TP
        p = start * 0
        first = program // passes * C.R
        T -= start.to(tl.int32)
    else:
        start = 0
        p = (program // tl.cdiv(n.N, C.R)).to(tl.int64)
        first = program % tl.cdiv(n.N, C.R) * C.R
        if a.order is not None:
            p = _in_turn(a.order, p, programs // tl.cdiv(n.N, C.R), C.SHARED_EVERY)
    return p, first, start, T


@triton.jit
def rows_of(p, first, start, T, n, C: tl.constexpr):
    """Where the results of a program belong, [R, TP], and which of them there are."""
    row = first + tl.arange(0, C.R)[:, None]
    token = tl.arange(0, C.TP)[None, :]
    return p * n.N + start * n.y_step + token.to(tl.int64) * n.y_step + row, (row < n.N) & (token < T)


@triton.jit
def _arrived(a, x, p, at, ok, T, pairs_per_x, n, C: tl.constexpr):
    """What a program reads once the kernel before has ended: 1 / rms of its rows of x, and its part of the residual."""
    rinv, residual = 0.0, 0.0
    if a.norm is not None:
        rinv = row_rinv(x, p // pairs_per_x * (C.G * C.GS), n.x_step, T, n.eps, C.G * C.GS, C.TP, C.S)
    if a.residual is not None:
        residual = tl.load(a.residual + at, mask=ok, other=0.0).to(tl.float32)
    return rinv, residual


@triton.jit
def _bias_of(bias, a, q, first, known, stack, n, C: tl.constexpr):
    """Rows first … of the bias of pair q's expert, [R, 1], 0 if that is not there; without ids of the only one."""
    row = first + tl.arange(0, C.R)[:, None]
    if a.ids is None:
        b = tl.load(bias + row, mask=row < n.N, other=0.0)
    else:
        there = place_of(a.ids, a.slot_of, q, q >= 0, known, stack) >= 0
        expert = tl.load(a.ids + q, cache_modifier=".cg").to(tl.int64)
        b = tl.load(bias + expert * n.N + row, mask=row < tl.where(there, n.N, 0), other=0.0)
    return b.to(tl.float32)


@triton.jit
def _biases(a, pair, first, known, stack, n, C: tl.constexpr):
    """What is added to the products of a program, [R, 1] or 0: of several pairs the sum, times their weights."""
    b, above = 0.0, 0.0
    if a.bias is not None:
        if a.weights is None:
            b = _bias_of(a.bias, a, pair, first, known, stack, n, C)
        else:
            for i in tl.static_range(C.PAIRS_PER_ROW):
                one = _bias_of(a.bias, a, pair + i, first, known, stack, n, C)
                b += tl.where(one != 0.0, one * tl.load(a.weights + pair + i), 0.0)
    if a.up_bias is not None:
        above = _bias_of(a.up_bias, a, pair, first, known, stack, n, C)
    return b, above


@triton.jit
def _last_of_parts(s, y, parts_at, N, C: tl.constexpr, PARTS: tl.constexpr):
    """Keep this program's part y [R, TP] of a sum over K. The last of PARTS programs to do so gets the sum of all, in
    the order of the parts, and True.
    """
    first, part = parts_at
    at = (first + tl.arange(0, C.R)[:, None]) * C.TP + tl.arange(0, C.TP)[None, :]
    stride = tl.cdiv(N, C.R) * (C.R * C.TP)
    tl.store(s.parts + part * stride + at, y)
    tl.debug_barrier()  # all threads have written before one of them says so
    counter = s.counters + first // C.R
    last = tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1
    if last:
        tl.store(counter, 0)  # for the next launch
        y = tl.load(s.parts + at, cache_modifier=".cg")
        for i in tl.static_range(1, PARTS):
            y += tl.load(s.parts + i * stride + at, cache_modifier=".cg")
    return y, last


# codes     y[p, t] = residual[p, t] + sum_i weights[q] * (W[e] . x[q // pairs_per_x, t]), q = p * PAIRS_PER_ROW + i,
#           e = expert of q (ids, slot_of) or q itself; with ACT act(W[e] . x) * (U[e] . x); 0 for an expert that is not
#           there. norm: x is rms_norm(x, norm), PAIRS_PER_ROW 1. SHARED_EVERY: the last of so many pairs is that of the
#           shared expert, which has no id and for its weight sigmoid(score[token]), or 1. order: the turn of the pairs,
#           PAIRS_PER_ROW 1. bias: W[e] . x + bias[id of q], or bias; ACT "clamped": of that and U[e] . x + up_bias[id
#           of q] (`clamped_swiglu`)
# shapes    w, up: codes, scales, biases of rows of one format, `matrix` rows for each expert, those of up `up_row` rows
#           further; common, common_up: those of one expert; x rows of K, x_step apart for tokens; norm [K];
#           ids, weights [pairs with one]; y, residual rows of N, y_step apart, may be one; s: float32 [PARTS, rows of
#           all programs, TP] and a counter for each R rows, 0 before and after
# grid      (ceil(N / R) * p * PARTS,): a program has R rows for one p, its S warps take U blocks of (i, K) at a time;
#           MANY: p is a part of the tokens, TP of them, and programs of the same rows are neighbours. PARTS > 1 and one
#           p: neighbours share K, and the last of them to end adds up their sums
# bytes     the matrices that are named, once for all T tokens, with MANY once for TP; x stays in cache
# limits    T <= TP <= 8 tokens without MANY; R a multiple of 16, with ACT of 8; PARTS > 1 without ACT
#
# PDL: the kernel starts while the one before it ends, asks for weights, and waits for that end before it reads x or
# writes y. wait_first 1: weights or ids may be what the one before writes, so it waits before it reads anything.
@triton.jit(do_not_specialize=["magic", "wait_first", "T", "known", "stack", "pairs_per_x"])
def _matvec_codes_kernel(
    a, s, magic, wait_first, T, known, stack, pairs_per_x, n, C: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        wait_if(wait_first)
    p, first, start, T = _part_of(a, tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS, T, n, C)
    at, ok = rows_of(p, first, start, T, n, C)
    x = a.x + start * n.x_step
    pair = p * C.PAIRS_PER_ROW
    BLOCKS: tl.constexpr = C.PAIRS_PER_ROW * triton.cdiv(C.G * C.GS, block_codes(C.BITS, C.GS, C.TP))
    STEP: tl.constexpr = C.S * C.U
    EACH: tl.constexpr = triton.cdiv(triton.cdiv(BLOCKS, STEP), PARTS) * STEP
    begin = tl.program_id(0) % PARTS * EACH
    blocks = load_blocks(a, pair, begin, first, known, stack, n, C)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rinv, residual = _arrived(a, x, p, at, ok, T, pairs_per_x, n, C)
    bias, above_bias = _biases(a, pair, first, known, stack, n, C)
    total = multiplied_blocks(a, x, blocks, rinv, magic, pair, begin, T, pairs_per_x, n, C)
    if EACH > STEP:
        for block in range(begin + STEP, begin + EACH, STEP):
            blocks = load_blocks(a, pair, block, first, known, stack, n, C)
            total += multiplied_blocks(a, x, blocks, rinv, magic, pair, block, T, pairs_per_x, n, C)
    y = columns_summed(total, C.S, C.ROWS, columns(C.BITS, C.GS, C.TP), C.TP)
    if C.ACT is not None:
        y, above = tl.split(y.reshape(2, C.R, C.TP).permute(1, 2, 0))
        if C.ACT == "clamped":
            y = clamped_swiglu(y + bias, above + above_bias, n.limit, n.alpha)
        else:
            y = activation(y, C.ACT) * above
    if PARTS > 1:
        y, last = _last_of_parts(s, y, (first, tl.program_id(0) % PARTS), n.N, C, PARTS)
        ok = tl.where(last, ok, ok & False)
    if a.bias is not None:  # noqa: SIM102
        if C.ACT is None:
            y += bias
    if a.residual is not None:
        y += residual
    tl.store(a.y + at, rounded(y, a.y.dtype.element_ty), mask=ok)


# dense     as `codes` for a dense weight: BITS 0, GS 1, without a shared expert
# shapes, grid, bytes  as `codes`
# limits    T <= TP <= 8 tokens without MANY
#
# PDL: it waits for the kernel before at once.
@triton.jit(do_not_specialize=["T", "known", "stack", "pairs_per_x"])
def _matvec_dense_kernel(a, T, known, stack, pairs_per_x, n, C: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p, first, start, T = _part_of(a, tl.program_id(0), tl.num_programs(0), T, n, C)
    at, ok = rows_of(p, first, start, T, n, C)
    x = a.x + start * n.x_step
    rinv, residual = _arrived(a, x, p, at, ok, T, pairs_per_x, n, C)
    y = tl.zeros((C.R, C.TP), tl.float32)
    for q in range(p * C.PAIRS_PER_ROW, p * C.PAIRS_PER_ROW + C.PAIRS_PER_ROW):
        slot = q if a.ids is None else place_of(a.ids, a.slot_of, q, q >= 0, known, stack)
        base, x_at = slot * n.matrix, q // pairs_per_x * (C.G * C.GS)
        part = dense_product(a.w[0], x, a.norm, rinv, base, x_at, first, T, n, C)
        if C.ACT is not None:
            above = dense_product(a.up[0], x, a.norm, rinv, base + n.up_row, x_at, first, T, n, C)
            if C.ACT == "clamped":
                part += _bias_of(a.bias, a, q, first, known, stack, n, C)
                above += _bias_of(a.up_bias, a, q, first, known, stack, n, C)
                part = clamped_swiglu(part, above, n.limit, n.alpha)
            else:
                part = activation(part, C.ACT) * above
        elif a.bias is not None:
            part += _bias_of(a.bias, a, q, first, known, stack, n, C)
        if a.weights is not None:
            part *= tl.load(a.weights + q)
        if a.ids is not None:  # x of a row without an expert may be anything
            part = tl.where(slot >= 0, part, 0.0)
        y += part
    if a.residual is not None:
        y += residual
    tl.store(a.y + at, rounded(y, a.y.dtype.element_ty), mask=ok)


# -- launches --------------------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """A launch: tokens, rows and warps of a program, blocks of a warp; more tokens than there are: shorter blocks.

    parts: programs that share K.
    """

    TP: int
    R: int
    S: int
    U: int
    options: dict[str, int]
    parts: int = 1


class _Split(NamedTuple):
    """What programs that share K need: see `codes`."""

    parts: torch.Tensor | None
    counters: torch.Tensor | None


_WHOLE = _Split(None, None)


@functools.cache
def _coded(tokens: int, rows: int, warps: int, blocks: int = 1, parts: int = 1) -> Config:
    """A launch for codes, by one warp per block of K."""
    return Config(tokens, rows, warps, blocks, {"num_warps": warps, "num_stages": 1}, parts)


@functools.cache
def config(
    bits: int, gs: int, N: int, K: int, T: int, pairs: int, slots: int, gated: bool, normed: bool, wide: bool,
    processors: int,
) -> Config:  # fmt: skip
    """The launch for these sizes; `wide`: activations other than bfloat16, which take more registers."""
    tokens = triton.next_power_of_2(T)
    if bits == 0:
        least, many, few, warps = _tuning.MATVEC_DENSE
        return Config(tokens, many if N * pairs >= least * processors else few, 1, 1, {"num_warps": warps})
    blocks = slots * -(-K // block_codes(bits, gs, tokens))
    tiles = N * pairs * (1 + gated) / 16 / processors
    rows = (8 if gated else 16) * (8 if INTERPRETED else 1)  # the interpreter is slow by the program, not by its size
    narrow = code_bits(bits) in (2, 4) and not is_float(bits) and not wide  # leaves registers for twice as much
    busy, less, alone = _tuning.MATVEC_WARPS
    short = block_codes(bits, gs, tokens) if is_blocks(bits) else 0
    whole = -(-blocks * short // 512) if short else blocks  # blocks of 512 codes
    found = None
    several = pairs > 1 or (whole == busy and slots == 1 and tiles >= _tuning.MATVEC_LONG[0])
    if tokens == 1 and (narrow or (short and not wide)) and not normed and (several if whole <= busy else slots == 1):
        found = _long_rows(rows, whole, tiles, gated, pairs * slots == 1)
    if tokens == 1 and (bits == 8 or (is_float(bits) and gs == 32 and code_bits(bits) == 4)) and not (wide or normed):
        found = _wide_codes(is_float(bits), rows, blocks, tiles, gated, pairs, slots)
    if short:
        return _blocks_config(short, tokens, blocks, tiles, rows, narrow, wide, found)
    if found is not None:
        return found
    if tiles >= _tuning.MATVEC_BUSY:
        warps = min(busy, triton.next_power_of_2(blocks))
        if tokens > 1:
            return _coded(tokens, rows, warps, min(_tuning.MATVEC_AHEAD[tokens], -(-blocks // warps)) if narrow else 1)
        if normed and narrow and not gated and blocks in _tuning.MATVEC_NORMED:
            return _coded(tokens, rows, *_tuning.MATVEC_NORMED[blocks])
        many, deep = tiles >= _tuning.MATVEC_TWICE, slots > 1 and blocks > _tuning.MATVEC_BLOCKS
        twice = narrow and ((blocks <= warps and many) or deep)
        return _coded(tokens, 2 * rows if twice else rows, warps)
    if tiles <= 1 and blocks <= _tuning.MATVEC_SHORT and tokens < _tuning.MATVEC_TOKENS:
        tokens, blocks = 2 * tokens, 2 * blocks
    warps = min(alone if tiles <= 1 and slots > 1 and blocks <= alone else less, triton.next_power_of_2(blocks))
    ahead = blocks > warps and narrow and (slots == 1 or tiles <= 1)
    return _coded(tokens, rows, warps, 2 if ahead else 1)


def _blocks_config(
    codes: int, tokens: int, blocks: int, tiles: float, rows: int, narrow: bool, wide: bool, long: Config | None
) -> Config:  # fmt: skip
    """`config` for GGUF blocks, whose groups are short: a warp takes as many blocks at a time as make a long one.

    long: the launch for as many long ones.
    """
    busy, less, _ = _tuning.MATVEC_WARPS
    ahead = 1 if wide else max(1, _tuning.MATVEC_BLOCK_CODES[tokens] // codes)
    if long is not None:  # more than 2 at a time, in a loop, take minutes to compile
        return _coded(1, rows, long.S, min(ahead, 2), long.parts)
    warps = min(busy if tiles >= _tuning.MATVEC_BUSY else less, triton.next_power_of_2(blocks))
    ahead = min(ahead, -(-blocks // warps))
    once = blocks <= warps * ahead and tokens == 1
    ahead = ahead if once else min(ahead, 2)
    return _coded(tokens, 2 * rows if narrow and once and tiles >= _tuning.MATVEC_TWICE else rows, warps, ahead)


def _long_rows(rows: int, blocks: int, tiles: float, gated: bool, alone: bool) -> Config | None:
    """The launch for one token where 4 warps would go round, or for gate and up of experts; None: as for short rows.

    alone: a single matrix, whose K programs may share.
    """
    few, short, split, programs = _tuning.MATVEC_LONG
    if alone and not gated and blocks >= split and short <= tiles < 1.5 * short:
        parts = max(1, min(blocks // 4, round(programs / tiles)))
        return _coded(1, rows, 2, 1, parts)
    if tiles >= few or (gated and tiles >= _tuning.MATVEC_BUSY):
        return _coded(1, rows, 2, 1)
    if tiles >= short and blocks <= split and blocks > 4:
        return _coded(1, rows, 2, 3)
    if 1 < tiles < short and 8 < blocks <= 16:
        return _coded(1, rows, 8)
    return None


def _wide_codes(
    floats: bool, rows: int, blocks: int, tiles: float, gated: bool, pairs: int, slots: int
) -> Config | None:  # fmt: skip
    """The launch for one token of codes in bytes or mxfp4 where 4 warps would go round; None: as for others."""
    few, short, shared = _tuning.MATVEC_WIDE
    if blocks <= _tuning.MATVEC_WARPS[0]:
        return None
    if floats:
        if gated and pairs > 1 and blocks <= 12:
            return _coded(1, rows, 4, 3)
        return _coded(1, rows, 4, 3, shared) if 1 < slots <= blocks // 3 and 1 < tiles < short and pairs == 1 else None
    if gated or pairs > 1 or slots > 1:
        return None
    if tiles >= few:
        return _coded(1, 2 * rows, 2)
    return _coded(1, rows, 2) if tiles >= short else _coded(1, rows, 4, 1, 2) if tiles > 1 else None


NO_WEIGHT = (None,) * 5


def weight_parts(w: Any) -> tuple[tuple[Any, ...], int, int, int]:
    """Arrays, kind of codes, group size and groups per row of a weight; a dense one has kind 0 and groups of 1."""
    if isinstance(w, QuantizedTensor):
        return kernel_arrays(w), kind_of(w), groups_of(w), w.shape[-1] // groups_of(w)
    assert w.is_contiguous()
    return (w, None, None), 0, 1, w.shape[-1]


def same_codes(*weights: QuantizedTensor) -> bool:
    """Whether one launch can read these weights: one width of codes, one group size, scales of one dtype."""
    formats = {(*w.format, w.shape[-1], None if w.scales is None else w.scales.dtype) for w in weights}
    return len(formats) == 1 and (len(weights) == 1 or all(w.global_scale is None for w in weights))


_read: weakref.WeakSet[QuantizedTensor] = weakref.WeakSet()


def is_new(w: Any) -> bool:
    """Whether no kernel has read this weight so far: then the kernel before may have made it."""
    if not isinstance(w, QuantizedTensor) or w in _read:
        return False
    _read.add(w)
    return True


def launch(
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
    normed: torch.dtype | None = None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    clamp: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Launch `codes` or `dense`. up None with an act: the up rows follow the N gate rows of w. common: the expert
    of the last of `per_token` pairs of a token. order: the turn in which pairs come, by their ids. many: more tokens
    than one pass over the weights takes. normed: what normed rows are rounded to, None: x's dtype. biases: of w and up,
    by expert where there are ids; clamp: limit and alpha of the act "clamped".
    """
    arrays, bits, gs, G = weight_parts(w)
    ups = NO_WEIGHT if act is None else arrays if up is None else weight_parts(up)[0]
    if x.data_ptr() % 4:  # x is read by words; a part of a joined product may begin at an odd number
        x = x.clone()
    # Deterministic rows do not depend on how many there are. (Experts have one row of x each.)
    rounding = x.dtype if norm is None or normed is None else normed
    tokens, several = (passes_over(rounding, w) if ids is None else 1, 1) if deterministic() else (T, pairs)
    tokens = passes_over(rounding, w) if many else tokens
    how = (act is not None, norm is not None, rounding != torch.bfloat16, multiprocessors(x))
    TP, R, S, U, options, parts = config(bits, gs, N, G * gs, tokens, several, slots, *how)
    shared = (NO_WEIGHT if one is None else weight_parts(one)[0] for one in (common, common_up))
    a = Arrays(arrays, ups, *shared, x, norm, residual, ids, order, slot_of, weights, score, out, *biases)
    n = Sizes(N, w.shape[-2], N if up is None else 0, *steps, eps, *clamp)
    rows, kind = R if act is None else 2 * R, None if norm is None else TL_DTYPES[rounding]
    C = Constants(G, bits, gs, TP, R, rows, S, U, slots, per_token, many, act, kind)
    run_time = (T, 0 if slot_of is None else slot_of.shape[0], stack or w.shape[0], pairs_per_x)
    grid = (triton.cdiv(N, R) * pairs * parts,)
    if bits == 0:
        _matvec_dense_kernel[grid](a, *run_time, n, C=compiled_for(C), **options, **pdl_options())
        return
    read = [is_new(one) for one in (w, up, common, common_up) if one is not None]
    wait_first = any(read) or (ids is not None and not old_ids)
    split = _WHOLE
    if parts > 1:
        tiles = triton.cdiv(N, R)
        ended = counters(out, tiles)
        if ended is None:
            grid, parts = (tiles,), 1
        else:
            split = _Split(torch.empty(parts * tiles * R * TP, dtype=torch.float32, device=x.device), ended)
    _matvec_codes_kernel[grid](
        a, split, FP_MAGIC, int(wait_first), *run_time, n, C=compiled_for(C), PARTS=parts, **options, **pdl_options()
    )


@functools.cache
def _most_tokens(bits: int, gs: int, dtype: torch.dtype) -> int:
    """Rows of x that one pass over the weights takes: a thread keeps its x, in up to 3 parts, in registers."""
    parts = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[dtype]
    tokens = _tuning.MATVEC_TOKENS
    while tokens > 1 and columns(bits, gs, tokens) * tile_codes(bits, gs, tokens) * parts > 192 * 32:
        tokens //= 2
    return tokens


def passes_over(dtype: torch.dtype, w: Any) -> int:
    """Rows of activations of this dtype per pass over w."""
    if not isinstance(w, QuantizedTensor):
        return _tuning.MATVEC_TOKENS
    return _most_tokens(*weight_parts(w)[1:3], dtype)


def matvec(
    x: torch.Tensor,
    w: Any,
    out: torch.Tensor,
    up: Any = None,
    act: str | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    normed: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """out [T, N] = residual + bias + x [T, K] · w [N, K], or act(x · w) · (x · up).

    A few rows of x per pass over the weights. norm [K]: x is normed first and rounded to `normed`, or as it is. out may
    be residual.
    """
    (T, K), N = x.shape, out.shape[1]
    most = passes_over(x.dtype if norm is None or normed is None else normed, w)
    passes = triton.cdiv(T, most)
    launch(
        x, w, out, N, T, pairs=passes, many=passes > 1, steps=(K, N), up=up, act=act, residual=residual, norm=norm,
        eps=eps, normed=normed, biases=(bias, None),
    )  # fmt: skip


def batched_matvec(x: torch.Tensor, w: Any, out: torch.Tensor) -> None:
    """out [T, H, N] = x [T, H, K] · w [H, N, K] for each of H."""
    _, H, K = x.shape
    N = out.shape[2]
    most = passes_over(x.dtype, w)
    for part, into in zip(x.split(most), out.split(most), strict=True):
        launch(part, w, into, N, len(part), pairs=H, steps=(H * K, H * N))
