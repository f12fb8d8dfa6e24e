"""The last product of the experts of a few tokens, where a warp has an expert and all of them share the common one.

A warp for each expert and one more for the common expert would be a power of two of them, most of the rest idle, which
run through every instruction all the same, and registers of theirs for which the launch before leaves no room.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    load_x_blocks,
    multiplied_blocks,
)
from penstock.backends.cuda._floats import is_float
from penstock.backends.cuda._launch import INTERPRETED, compiled_for, multiprocessors, pdl_options, sigmoid
from penstock.backends.cuda._matvec import NO_WEIGHT, is_new, rows_of, wait_if, weight_parts
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import SHARED_DOWN, SHARED_DOWN_TOKENS
from penstock.ops.op import deterministic


# down      y[t] = residual[t] + sum_i weights[t, i] * (W[e] . h[t, i]) + sigmoid(score[t]) * (U . h[t, k]), e = ids[t,
#           i], by slot_of; nothing for an expert that is not there; without a score U . h[t, k] is added as it is
# shapes    w codes, scales, biases of [experts, N, K], u those of [N, K]; h [T, k + 1, K]; ids, weights [T, k]; score
#           [T]; y, residual [T, N], may be one
# grid      (ceil(N / R) * T,): a program has R rows of a token, the tokens of the same rows are neighbours; each of its
#           S warps has a block of K of an expert, and one of U, which is shorter by as much as there are warps
# bytes     the matrices that are named, those of W once for each token; h and most of U come from L2
# limits    k * blocks of an expert <= S, blocks of U <= S; R a multiple of 16
#
# PDL: all but h is older than the kernel before, which chose ids or waited for who did: so it is read before the wait.
# wait_first as in `_matvec`.
@triton.jit(do_not_specialize=["magic", "wait_first", "tokens", "known", "stack"])
def _shared_down_kernel(
    a, u, weights, score, residual, magic, wait_first, tokens, known, stack, n, C: tl.constexpr, D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_if(wait_first)
    first = tl.program_id(0) // tokens * C.R
    token = (tl.program_id(0) % tokens).to(tl.int64)
    routed = token * C.PAIRS_PER_ROW
    blocks = load_blocks(a, routed, 0, first, known, stack, n, C)
    common = load_blocks(u, 0, 0, first, 0, 1, n, D)
    at, ok = rows_of(token, first, 0, 1, n, C)
    EACH: tl.constexpr = triton.cdiv(C.G * C.GS, block_codes(C.BITS, C.GS, C.TP))
    pair = ((tl.arange(0, C.S) * 5) & (C.S - 1)) // EACH  # of the blocks that `load_blocks` gives the warps
    here = blocks[0][0] >= 0
    factor = tl.load(weights + routed + pair, mask=here, other=0.0, cache_modifier=".cg")
    before, gate = 0.0, 1.0
    if residual is not None:
        before = tl.load(residual + at, mask=ok, other=0.0, cache_modifier=".cg").to(tl.float32)
    if score is not None:
        gate = sigmoid(tl.load(score + token, cache_modifier=".cg").to(tl.float32))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    h = a.x + (routed + token) * (C.G * C.GS)
    last = h + C.PAIRS_PER_ROW * (C.G * C.GS)
    x = load_x_blocks(h, blocks, 0, 0, 1, 1, n, C)
    x_common = load_x_blocks(last, common, 0, 0, 1, 1, n, D)
    total = multiplied_blocks(a, h, blocks, 0.0, magic, 0, 0, 1, 1, n, C, x, x_common) * factor[:, None, None]
    total += multiplied_blocks(u, last, common, 0.0, magic, 0, 0, 1, 1, n, D, x_common) * gate
    y = columns_summed(total, C.S, C.ROWS, columns(C.BITS, C.GS, C.TP), C.TP)
    tl.store(a.y + at, rounded(y + before, a.y.dtype.element_ty), mask=ok)


def _warps(w: Any, h: torch.Tensor, N: int) -> tuple[int, int]:
    """Warps of a program and tokens for which blocks of the common expert are as short as they have to be; (0, 0):
    another kernel is for these sizes.
    """
    _, bits, gs, _ = weight_parts(w)
    T, slots, K = h.shape
    narrow = code_bits(bits) in (2, 4) and not is_float(bits) and not is_blocks(bits) and h.dtype == torch.bfloat16
    if T > SHARED_DOWN_TOKENS or deterministic() or not narrow or 16 * multiprocessors(h) < N:
        return 0, 0
    blocks = (slots - 1) * -(-K // block_codes(bits, gs, 1))
    wide = columns(bits, gs, 1)
    fit = [t for t in (1, 2, 4, 8) if block_codes(bits, gs, t) * blocks >= K and columns(bits, gs, t) == wide]
    return (blocks, fit[-1]) if blocks in SHARED_DOWN else (0, 0)


def shared_down_sum(
    h: torch.Tensor,
    down_w: Any,
    common: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    score: torch.Tensor | None,
    slot_of: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> bool:
    """`mixed_down_sum`, if it is for these sizes."""
    S, tokens = _warps(down_w, h, out.shape[1])
    if S == 0:
        return False
    arrays, bits, gs, G = weight_parts(down_w)
    (T, N), R = out.shape, 16 * (8 if INTERPRETED else 1)
    nothing = (NO_WEIGHT,) * 3
    a = Arrays(arrays, *nothing, h, None, None, ids, None, slot_of, None, None, out)
    u = Arrays(weight_parts(common)[0], *nothing, h, *(None,) * 7, out)
    C = Constants(G, bits, gs, 1, R, R, S, 1, h.shape[1] - 1, 0, False, None, None)
    D = C._replace(TP=tokens, PAIRS_PER_ROW=1)
    known = 0 if slot_of is None else slot_of.shape[0]
    read = [is_new(one) for one in (down_w, common)]
    _shared_down_kernel[(triton.cdiv(N, R) * T,)](
        a, u, weights, score, residual, FP_MAGIC, int(any(read)), T, known, down_w.shape[0],
        Sizes(N, down_w.shape[-2], 0, 0, 0, 0.0), C=compiled_for(C), D=compiled_for(D), num_warps=S, num_stages=1,
        **pdl_options(),
    )  # fmt: skip
    return True
