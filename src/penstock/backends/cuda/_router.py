"""A router with the norm and the product before it, in one launch for a token: whichever program ends last chooses.

No program waits for another, so nothing has to run at once: each one adds to a counter once its logits are written, and
the one that finds all others there takes the next step alone.
"""

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock import ops
from penstock.backends.cuda import _tuning
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
    row_rinv,
)
from penstock.backends.cuda._launch import (
    FETCHED,
    TL_DTYPES,
    compiled_for,
    counters,
    flat_rows,
    multiprocessors,
    pdl_options,
    prefetch_l2,
    prefetch_lines,
    wait_for_previous,
)
from penstock.backends.cuda._matvec import NO_WEIGHT, config, dense_product, is_new, passes_over, wait_if, weight_parts
from penstock.backends.cuda._route import Routing, choose, moe_group_route, moe_route, router
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda.linear import product
from penstock.backends.cuda.norm import rms_norm
from penstock.ops.op import deterministic, kernel
from penstock.quant import GgufTensor, QuantizedTensor

# What the kernels write besides logits, each None where it is not asked for; counter: None, the router is another
# launch.
Made = namedtuple("Made", "normed scores counter")
# What comes to the L2 cache meanwhile: codes, scales and biases of a weight (or itself, and None) and bytes of them.
Fetched = namedtuple("Fetched", "w scales biases nbytes scale_bytes")
_NOTHING = Fetched(None, None, None, 0, 0)


@triton.jit
def _fetch(f, program, programs, LANES: tl.constexpr, PDL: tl.constexpr):
    """All that a program does which has no rows."""
    if PDL:
        prefetch_l2(f.w, f.nbytes, program, programs, LANES)
        if f.scales is not None:
            prefetch_l2(f.scales, f.scale_bytes, program, programs, LANES)
            if f.biases is not None:
                prefetch_l2(f.biases, f.scale_bytes, program, programs, LANES)
    wait_for_previous(PDL)


@triton.jit
def _norm(a, made, T, n, C: tl.constexpr, WIDTH: tl.constexpr):
    """1 / rms of the rows of x; this program writes WIDTH columns of them, normed."""
    K: tl.constexpr = C.G * C.GS
    rinv = 0.0
    if a.norm is not None:
        rinv = row_rinv(a.x, 0, n.x_step, T, n.eps, K, C.TP, C.S)
        if made.normed is not None:
            token = tl.arange(0, C.TP)[:, None]
            column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
            live = (token < T) & (column < K)
            x = tl.load(a.x + token * n.x_step + column, mask=live, other=0.0).to(tl.float32)
            norm = tl.load(a.norm + column, mask=column < K, other=0.0).to(tl.float32)
            y = x * rinv[:, None] * norm
            tl.store(made.normed + token * K + column, rounded(y, made.normed.dtype.element_ty), mask=live)
    return rinv


@triton.jit
def _end(a, made, r, y, first, T, n, C: tl.constexpr, ROUTER: tl.constexpr):
    """Write the products of rows first …; the last program that has some chooses the experts of all tokens."""
    row = first + tl.arange(0, C.R)[:, None]
    token = tl.arange(0, C.TP)[None, :]
    E = n.y_step
    if a.bias is not None:
        y += tl.load(a.bias + row, mask=row < E, other=0.0).to(tl.float32)
    tl.store(a.y + token * E + row, y, mask=(token < T) & (row < E))
    if made.scores is not None:
        more = (token < T) & (row >= E) & (row < n.N)
        tl.store(made.scores + token * (n.N - E) + row - E, y, mask=more)
    if made.counter is not None:
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(made.counter, 1, sem="acq_rel") == tl.cdiv(n.N, C.R) - 1:
            tl.store(made.counter, 0)  # for the next launch
            for t in range(T):
                choose(a.y + t * E, r, t, ROUTER)


# router    h = rms_norm(x, norm) or x; logits[t, e] = w[e] . h[t] + bias[e] for e < E, scores[t, e - E] = w[e] . h[t]
#           for others; then ids and weights as in `route` or `group_route`
# shapes    x, normed [T, K]; w codes, scales, biases of [N, K]; logits float32 [T, E], scores float32 [T, N - E]; bias
#           [E]; counter int32, 0 before and after; ids int32, weights float32 [T, k]
# grid      (ceil(N / R) + more,): a program has R rows of w, of which its S warps take U blocks of K at a time, and
#           WIDTH columns of normed; the last one to end has the choice. Those behind fetch parts of the next weight
# bytes     w, x and normed once; x and logits stay in L2
# limits    T <= TP <= 8; R a multiple of 16
#
# PDL: it asks for its weights, then waits for the kernel before; wait_first as in `_matvec`.
@triton.jit(do_not_specialize=["magic", "wait_first", "T"])
def _router_codes_kernel(
    a, made, r, f, magic, wait_first, T, n,
    C: tl.constexpr, ROUTER: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if f.w is not None:
        rows = tl.cdiv(n.N, C.R)
        if tl.program_id(0) >= rows:
            _fetch(f, tl.program_id(0) - rows, tl.num_programs(0) - rows, 32 * C.S, PDL)
            return
    if PDL:
        wait_if(wait_first)
    first = tl.program_id(0) * C.R
    BLOCKS: tl.constexpr = triton.cdiv(C.G * C.GS, block_codes(C.BITS, C.GS, C.TP))
    blocks = load_blocks(a, 0, 0, first, 0, 1, n, C)
    if PDL:
        if a.norm is not None:
            prefetch_lines(a.norm, C.G * C.GS, triton.next_power_of_2(C.G * C.GS))
        gdc_launch_dependents()
        gdc_wait()
    rinv = _norm(a, made, T, n, C, WIDTH)
    total = multiplied_blocks(a, a.x, blocks, rinv, magic, 0, 0, T, 1, n, C)
    if BLOCKS > C.S * C.U:
        for block in range(C.S * C.U, BLOCKS, C.S * C.U):
            blocks = load_blocks(a, 0, block, first, 0, 1, n, C)
            total += multiplied_blocks(a, a.x, blocks, rinv, magic, 0, block, T, 1, n, C)
    y = columns_summed(total, C.S, C.R, columns(C.BITS, C.GS, C.TP), C.TP)
    _end(a, made, r, y, first, T, n, C, ROUTER)


# dense     as `router` for a dense w
# shapes, grid, bytes  as `router`
# limits    T <= TP <= 8
#
# PDL: it waits for the kernel before at once.
@triton.jit(do_not_specialize=["T"])
def _router_dense_kernel(
    a, made, r, f, T, n, C: tl.constexpr, ROUTER: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if f.w is not None:
        rows = tl.cdiv(n.N, C.R)
        if tl.program_id(0) >= rows:
            _fetch(f, tl.program_id(0) - rows, tl.num_programs(0) - rows, LANES, PDL)
            return
    wait_for_previous(PDL)
    first = tl.program_id(0) * C.R
    rinv = _norm(a, made, T, n, C, WIDTH)
    start = first.to(tl.int64) * 0
    y = dense_product(a.w[0], a.x, a.norm, rinv, start, start, first, T, n, C)
    _end(a, made, r, y, first, T, n, C, ROUTER)


def _fetched(w: Any, programs: int) -> Fetched:
    """What programs fetch of a weight: as much of its scales and biases as of its codes."""
    if w is None or programs == 0 or not pdl_options()["PDL"] or isinstance(w, GgufTensor):
        return _NOTHING
    (codes, scales, *_), _, _, _ = weight_parts(w)
    biases = w.biases if isinstance(w, QuantizedTensor) else None
    share = min(1.0, _tuning.ROUTER_FETCH_BYTES / codes.nbytes)
    nbytes = [int(share * part.nbytes) // FETCHED.value * FETCHED.value for part in (codes, scales) if part is not None]
    if not all(nbytes) or any(part.data_ptr() % 16 for part in (codes, scales, biases) if part is not None):
        return _NOTHING
    return Fetched(codes, scales, biases, *nbytes, *([0] if scales is None else []))


def _launch(
    x,
    norm,
    w,
    eps: float,
    kind: torch.dtype,
    made: Made,
    r: Routing | None,
    logits,
    chooses: Any,
    fetch: Any,
    bias: Any,
) -> None:
    """Launch `router` or its dense form; chooses: what `choose` is compiled for, with made.counter."""
    arrays, bits, gs, G = weight_parts(w)
    (T, K), N = x.shape, w.shape[0]
    how = (False, norm is not None, kind is not torch.bfloat16, multiprocessors(x))
    TP, R, S, U, options, _ = config(bits, gs, N, K, T, 1, 1, *how)
    nothing = (None,) * 6
    a = Arrays(arrays, NO_WEIGHT, NO_WEIGHT, NO_WEIGHT, x, norm, *nothing, logits, bias)
    n = Sizes(N, N, 0, K, logits.shape[1], eps)
    rounding = None if norm is None else TL_DTYPES[kind]
    C = compiled_for(Constants(G, bits, gs, TP, R, R, S, U, 1, 0, False, None, rounding))
    programs = triton.cdiv(N, R)
    constants = {
        "C": C,
        "ROUTER": None if chooses is None else compiled_for(chooses),
        "WIDTH": triton.next_power_of_2(triton.cdiv(K, programs)),
    }
    f = _fetched(fetch, _tuning.ROUTER_FETCH)
    grid = (programs + (0 if f.w is None else _tuning.ROUTER_FETCH),)
    if bits == 0:
        constants["LANES"] = 32 * options["num_warps"]
        _router_dense_kernel[grid](a, made, r, f, T, n, **constants, **options, **pdl_options())
        return
    wait_first = int(is_new(w))
    _router_codes_kernel[grid](a, made, r, f, FP_MAGIC, wait_first, T, n, **constants, **options, **pdl_options())


def _rows_of(w: Any, part: slice) -> Any:
    """Rows of a weight, on its memory."""
    return w.rows(part) if isinstance(w, QuantizedTensor) else w[part]


def _logits(
    x, norm, w, eps: float, kind: torch.dtype, normed: torch.Tensor | None, logits, scores: torch.Tensor | None
) -> None:
    """What is before the choice, op by op."""
    if norm is not None:
        x, plain = torch.empty_like(x, dtype=kind) if normed is None else normed, x
        rms_norm(plain, norm, eps, out=x)
    E = logits.shape[1]
    product(x, _rows_of(w, slice(E)), logits, None)
    if scores is not None:
        product(x, _rows_of(w, slice(E, None)), scores, None)


def _made_logits(
    x, norm, w, by, factor: float, eps: float, active, chooses: Any, fetch: Any, dtype: str | None, out: Any,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """The logits [T, E], with the other outputs but for the choice; None: the choice is made, too."""
    normed, ids, weights, scores = out
    x = flat_rows(x)
    normed, scores = (None if each is None else flat_rows(each) for each in (normed, scores))
    E = w.shape[0] - (0 if scores is None else scores.shape[1])
    logits = torch.empty((len(x), E), dtype=torch.float32, device=x.device)
    kind = x.dtype if dtype is None else getattr(torch, dtype)
    if deterministic() or len(x) > min(_tuning.ROUTER_FUSED, passes_over(kind, w)):
        _logits(x, norm, w, eps, kind, normed, logits, scores)
        if bias is not None:
            logits += bias
        return logits
    ended = counters(ids) if chooses is not None and len(x) <= _tuning.ROUTER_LAST else None
    made = Made(normed, scores, ended)
    if ended is None:
        _launch(x, norm, w, eps, kind, made, None, logits, None, fetch, bias)
        return logits
    _launch(x, norm, w, eps, kind, made, Routing(by, active, ids, weights, factor), logits, chooses, fetch, bias)
    return None


def router_logits(x, norm_weight, w, eps: float, fetch: Any, normed, scores, E: int) -> torch.Tensor:
    """Float32 [T, E] for a choice that another launch makes, with the normed rows and the scores of other rows of w."""
    x, normed = flat_rows(x), flat_rows(normed)
    logits = torch.empty((len(x), E), dtype=torch.float32, device=x.device)
    made = Made(normed, None if scores is None else flat_rows(scores), None)
    _launch(x, norm_weight, w, eps, normed.dtype, made, None, logits, None, fetch, None)
    return logits


@kernel(ops.moe_norm_route, device="cuda")
def moe_norm_route(
    x, norm_weight, w, per_expert_scale, top_k, scores, eps, propagate_nan, active, write_normed, fetch, dtype,
    logit_bias, *, out,
):  # fmt: skip
    if x.numel() == 0:
        return
    chooses = router(w.shape[0] - scores, top_k, 0, 0, -1.0, propagate_nan)
    how = (1.0, eps, active, chooses, fetch, dtype, out, logit_bias)
    logits = _made_logits(x, norm_weight, w, per_expert_scale, *how)
    if logits is not None:
        moe_route(logits, per_expert_scale, top_k, propagate_nan, active, out=out[1:3])


@kernel(ops.moe_norm_group_route, device="cuda")
def moe_norm_group_route(
    x, norm_weight, w, bias, n_group, topk_group, top_k, norm_topk_prob, routed_scaling_factor, scores, eps,
    propagate_nan, active, write_normed, fetch, dtype, norm_eps, *, out,
):  # fmt: skip
    if x.numel() == 0:
        return
    factor, norm = float(routed_scaling_factor), float(norm_eps) if norm_topk_prob else -1.0
    chooses = router(w.shape[0] - scores, top_k, n_group, topk_group, norm, propagate_nan)
    logits = _made_logits(x, norm_weight, w, bias, factor, eps, active, chooses, fetch, dtype, out)
    if logits is not None:
        how = (n_group, topk_group, top_k, norm_topk_prob, factor, propagate_nan)
        moe_group_route(logits, bias, *how, active, norm_eps, out=out[1:3])
