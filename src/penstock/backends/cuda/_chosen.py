"""Gate and up of the experts of a few tokens, each program with the choice of its own expert.

The launch before writes logits and nothing else: no program there has to be the last, and none here waits for ids that
another one wrote. What chooses for others, ids and weights for the product behind this one, is a program without rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
)
from penstock.backends.cuda._launch import activation, compiled_for, multiprocessors, pdl_options
from penstock.backends.cuda._matvec import config, is_new, rows_of, wait_if, weight_parts
from penstock.backends.cuda._route import Router, Routing, choose, expert_in_place
from penstock.backends.cuda._rows import rounded


@triton.jit
def _seen_by_all(LANES: tl.constexpr):
    """What this program's threads have written is there for every program that starts from here on."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [tl.arange(0, LANES)], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


# chosen    h[t, i] = act(W[e] . x[t]) * (U[e] . x[t]), e the expert in place i of `route` of logits[t]; h[t, k] that of
#           the shared expert; ids and weights of `route`. 0 for a row that is not active
# shapes    w, up, common, common_up as in `codes` of `_matvec`; x [T, K]; logits float32 [T, E]; h [T, k + 1, N]; ids
#           int32, weights float32 [T, k]
# grid      (T + ceil(N / R) * T * (k + 1),): the first T programs choose for a token each and have no rows; others
#           have R rows of a pair, of which their S warps take U blocks of K at a time, and each of its warps finds the
#           expert of that pair for itself
# bytes     the matrices that are chosen, once; x and logits stay in L2
# limits    one token in a pass; R a multiple of 8; E <= 1024
#
# PDL: those of the shared expert ask for weights, then wait for the kernel before; the others wait first. wait_first as
# in `_matvec`. Ids and weights are there before the next kernel starts, which reads ids before it waits.
@triton.jit(do_not_specialize=["magic", "wait_first", "tokens", "stack"])
def _chosen_gate_up_kernel(
    a, logits, r, magic, wait_first, tokens, stack, n,
    C: tl.constexpr, ROUTER: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_if(wait_first)
    if tl.program_id(0) < tokens:
        if PDL:
            gdc_wait()
        row = tl.program_id(0).to(tl.int64)
        choose(logits + row * ROUTER.E, r, row, ROUTER)
        if PDL:
            _seen_by_all(32 * C.S)
            gdc_launch_dependents()
        return
    program = tl.program_id(0) - tokens
    p = (program // tl.cdiv(n.N, C.R)).to(tl.int64)
    first = program % tl.cdiv(n.N, C.R) * C.R
    place = (p % C.SHARED_EVERY).to(tl.int32)
    expert = 0
    if place < C.SHARED_EVERY - 1:
        if PDL:
            gdc_wait()
        token = p // C.SHARED_EVERY
        expert = expert_in_place(logits + token * ROUTER.E, r.active, token, place, ROUTER, C.S, BLOCK_E)
    BLOCKS: tl.constexpr = triton.cdiv(C.G * C.GS, block_codes(C.BITS, C.GS, C.TP))
    blocks = load_blocks(a, p, 0, first, 0, stack, n, C, expert)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = multiplied_blocks(a, a.x, blocks, 0.0, magic, p, 0, 1, C.SHARED_EVERY, n, C)
    if BLOCKS > C.S * C.U:
        for block in range(C.S * C.U, BLOCKS, C.S * C.U):
            blocks = load_blocks(a, p, block, first, 0, stack, n, C, expert)
            total += multiplied_blocks(a, a.x, blocks, 0.0, magic, p, block, 1, C.SHARED_EVERY, n, C)
    y = columns_summed(total, C.S, C.ROWS, columns(C.BITS, C.GS, C.TP), C.TP)
    y, above = tl.split(y.reshape(2, C.R, C.TP).permute(1, 2, 0))
    at, ok = rows_of(p, first, 0, 1, n, C)
    tl.store(a.y + at, rounded(activation(y, C.ACT) * above, a.y.dtype.element_ty), mask=ok)


def chosen_gate_up(
    x: torch.Tensor,
    gate_w: Any,
    up_w: Any,
    common: Any,
    common_up: Any,
    logits: torch.Tensor,
    routing: Routing,
    chooses: Router,
    act: str,
    out: torch.Tensor,
) -> None:
    """`mixed_gate_up` of the experts that `choose` finds, for which it writes ids and weights; out [T, k + 1, N]."""
    arrays, bits, gs, G = weight_parts(gate_w)
    ups = arrays if up_w is None else weight_parts(up_w)[0]
    shared = (weight_parts(one)[0] for one in (common, common_up))
    T, slots, N = out.shape
    how = (True, False, x.dtype != torch.bfloat16, multiprocessors(x))
    TP, R, S, U, options, _ = config(bits, gs, N, G * gs, 1, T * slots, 1, *how)
    a = Arrays(arrays, ups, *shared, x, *(None,) * 7, out)
    n = Sizes(N, gate_w.shape[-2], N if up_w is None else 0, 0, 0, 0.0)
    C = Constants(G, bits, gs, TP, R, 2 * R, S, U, 1, slots, False, act, None)
    read = [is_new(one) for one in (gate_w, up_w, common, common_up) if one is not None]
    _chosen_gate_up_kernel[(T + triton.cdiv(N, R) * T * slots,)](
        a, logits, routing, FP_MAGIC, int(any(read)), T, gate_w.shape[0], n, C=compiled_for(C),
        ROUTER=compiled_for(chooses), BLOCK_E=max(32, triton.next_power_of_2(chooses.E)), **options, **pdl_options(),
    )  # fmt: skip
