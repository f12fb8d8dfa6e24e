"""Expert products of a routed block on CUDA, and what adds their results to the residual stream.

Routers are in _route.py, with the norm and the product before them in _router.py. Few tokens go through one matvec per
(token, slot) pair ("rows"); more are sorted by expert, so that each expert's weights are read once for a tile of its
tokens: of up to 16 by lanes of a warp ("lanes"), of up to 128 in shared memory ("grouped").
"""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._activations import gated, round_activations
from penstock.backends.cuda._chosen import chosen_gate_up
from penstock.backends.cuda._few_rows import expert_products, expert_tiles, refused, takes
from penstock.backends.cuda._grouped import group_pairs, grouped_down_sum, grouped_gate_up, grouped_mlp, grouped_product
from penstock.backends.cuda._launch import clamped_swiglu, flat_rows, pdl_options, sigmoid, wait_for_previous
from penstock.backends.cuda._matvec import passes_over, same_codes
from penstock.backends.cuda._matvec_experts import (
    alike,
    clamped_gate_up_rows,
    expert_down_rows,
    expert_down_sum_rows,
    expert_gate_up_rows,
    expert_rows,
    mixed_down,
    mixed_down_sum,
    mixed_gate_up,
)
from penstock.backends.cuda._route import Routing, router
from penstock.backends.cuda._routed import MOST_EXPERTS, routed_tiles
from penstock.backends.cuda._router import moe_norm_route, router_logits
from penstock.backends.cuda._rows import adds, rounded
from penstock.backends.cuda._staged import staged_products, stages
from penstock.backends.cuda._tuning import FEW_EXPERTS, MOE_CHOOSES, MOE_GROUPED, MOE_IN_TURN, MOE_NORMED
from penstock.backends.cuda.elementwise import sum_of_chosen
from penstock.backends.cuda.linear import gate_up, product
from penstock.backends.cuda.norm import rms_norm
from penstock.errors import BackendError
from penstock.ops.op import deterministic, kernel
from penstock.quant import QuantizedTensor

VARIANTS = ("rows", "grouped")
BLOCKS = ("rows", "lanes", "grouped")  # of gate, up and down together
_PAIRS = 65535  # of one launch: the second axis of a grid ends there
_EXACT = 4096  # pairs up to which the products of experts stay in float32 on their way to the sum of a block

# -- experts ---------------------------------------------------------------------------------------------------------


def _count(stack: Any, slot_of: torch.Tensor | None) -> int:
    """Experts to choose from, of which the stack may hold some: what a call does depends on them, not on the stack."""
    return max(1, stack.shape[0] if slot_of is None else slot_of.numel())


def _by_rows(variant: str | None, T: int, k: int, experts: int) -> bool:
    """Whether pairs are taken one by one."""
    if variant is not None:
        return variant == "rows"
    return deterministic() or T * k <= MOE_GROUPED * experts


def _by_lanes(
    variant: str | None, x: torch.Tensor, stacks: list[Any], ids: torch.Tensor, experts: int, soon: bool = False
) -> bool:  # fmt: skip
    """Whether pairs go through lanes, in tiles of one expert: several tokens, few of them for each expert.

    soon: from as many tokens on where experts have more than MOE_GROUPED pairs as where they have fewer.
    """
    fit = takes(x, *stacks) and same_codes(*stacks[:-1])
    if variant == "lanes" and not fit:
        raise refused(x, *stacks)
    (T, k), (spread, crowded, most) = ids.shape, FEW_EXPERTS
    least = spread if soon or T * k <= MOE_GROUPED * experts else crowded
    return variant == "lanes" or (variant is None and fit and least <= T and T * k <= most * experts)


def _rounded(op: str, rows: torch.Tensor, stacks: list[Any], activations: str) -> torch.Tensor:
    """Activations as a quantized product reads them: rounded to 8 bits per group for "int8"."""
    sizes = {w.group_size for w in stacks if isinstance(w, QuantizedTensor)}
    if activations == "float32" or not sizes:
        return rows
    if len(sizes) > 1 or not all(isinstance(w, QuantizedTensor) for w in stacks):
        raise BackendError(f"{op}: up_w has another group size than gate_w, expected one for int8 on cuda")
    return round_activations(rows, sizes.pop())


def _parts(T: int, k: int) -> list[slice]:
    """Tokens of each launch, where there are more pairs than one takes."""
    step = max(1, _PAIRS // k)
    return [slice(t, t + step) for t in range(0, T, step)]


def _gate_up(op, x, gate_w, up_w, ids, slot_of, act, activations, out, plan) -> None:
    """`out` [T, k, N]; `plan` None: pair by pair."""
    x = _rounded(op, x, [gate_w] if up_w is None else [gate_w, up_w], activations)
    if plan is not None:
        grouped_gate_up(x, gate_w, up_w, ids, slot_of, act, out, plan=plan)
    elif ids.numel() <= _PAIRS:
        expert_gate_up_rows(x, gate_w, up_w, ids, slot_of, act, out)
    else:
        for part in _parts(*ids.shape):
            expert_gate_up_rows(x[part], gate_w, up_w, ids[part], slot_of, act, out[part])


def _down_sum(op, h, down_w, ids, weights, slot_of, activations, out, plan, after_gate_up=False) -> None:
    """`out` [T, dim]; after_gate_up: `_gate_up` with the same ids was the last to launch anything."""
    rounded = _rounded(op, flat_rows(h), [down_w], activations).view(h.shape)
    after_gate_up, h = after_gate_up and rounded.data_ptr() == h.data_ptr(), rounded
    if plan is not None:
        grouped_down_sum(h, down_w, ids, weights, slot_of, out, plan=plan)
    elif ids.numel() <= _PAIRS:
        expert_down_sum_rows(h, down_w, ids, weights, slot_of, out, after_gate_up)
    else:
        for part in _parts(*ids.shape):
            expert_down_sum_rows(h[part], down_w, ids[part], weights[part], slot_of, out[part])


def _plan(variant: str | None, ids: torch.Tensor, stack: Any, slot_of: torch.Tensor | None) -> Any:
    """The pairs of ids [T, k] sorted by expert, or None to take them one by one."""
    if _by_rows(variant, *ids.shape, _count(stack, slot_of)):
        return None
    return group_pairs(ids, stack.shape[0], slot_of)


@kernel(ops.expert_gate_up, device="cuda", variants=VARIANTS, composed=True)
def expert_gate_up(x, gate_w, up_w, ids, slot_of, act, activations, *, out, variant):
    if out.numel() == 0:
        return
    ids = flat_rows(ids)
    plan = _plan(variant, ids, gate_w, slot_of)
    h = out.view(*ids.shape, out.shape[-1])
    _gate_up("expert_gate_up", flat_rows(x), gate_w, up_w, ids, slot_of, act, activations, h, plan)


@kernel(ops.expert_down_sum, device="cuda", variants=VARIANTS, composed=True)
def expert_down_sum(h, down_w, ids, weights, slot_of, activations, *, out, variant):
    if out.numel() == 0:
        return
    ids = flat_rows(ids)
    plan = _plan(variant, ids, down_w, slot_of)
    h = h.view(*ids.shape, h.shape[-1])
    _down_sum("expert_down_sum", h, down_w, ids, flat_rows(weights), slot_of, activations, flat_rows(out), plan)


def _mlp(op, x, ids, gate_w, up_w, down_w, slot_of, act, activations, each, leave=False) -> None:
    """`each` [T, k, dim], sorted by expert; leave: rows of absent experts stay as they are."""
    between = None if activations == "float32" else lambda h: _rounded(op, h, [down_w], activations)
    x = _rounded(op, x, [gate_w] if up_w is None else [gate_w, up_w], activations)
    grouped_mlp(x, gate_w, up_w, down_w, ids, slot_of, act, each, leave, between)


@kernel(ops.expert_mlp, device="cuda", composed=True)
def expert_mlp(expert_out, x, ids, gate_w, up_w, down_w, slot_of, act, activations):
    ids = flat_rows(ids)
    each = expert_out.view(*ids.shape, expert_out.shape[-1])
    _mlp("expert_mlp", flat_rows(x), ids, gate_w, up_w, down_w, slot_of, act, activations, each, leave=True)


def _lanes_mlp(
    x, k, tiles, gate_w, up_w, down_w, act, common=(None, None, None), weights=None, score=None
) -> torch.Tensor:  # fmt: skip
    """float32 [T, k, dim] = down · (act(gate · x) · (up · x)) for each pair, times weights; 0 for an absent expert.
    With a common expert k + 1, the last of them its own, times the sigmoid of score.
    """
    T, every, (dim, width) = len(x), k + tiles.shared, down_w.shape[-2:]
    h = torch.empty((T, every, width), dtype=x.dtype, device=x.device)
    each = torch.empty((T, every, dim), dtype=torch.float32, device=x.device)
    products = staged_products if stages(x, width, tiles, act, gate_w, up_w, *common[:2]) else expert_products
    products(x, gate_w, up_w, tiles, every, act, h, common[0], common[1])
    products = staged_products if stages(h, dim, tiles, None, down_w, common[2]) else expert_products
    products(h, down_w, None, tiles, 1, None, each, common[2], None, weights, score)
    return each


@kernel(ops.moe_forward, device="cuda", variants=BLOCKS, composed=True)
def moe_forward(x, ids, weights, gate_w, up_w, down_w, slot_of, act, activations, expert_out, *, out, variant):
    if out.numel() == 0:
        return
    x, ids, weights, y = map(flat_rows, (x, ids, weights, out))
    name = "moe_forward"
    if variant == "lanes" and activations != "float32":
        raise BackendError(f"{name}: activations is {activations!r}, expected 'float32' for variant 'lanes' on cuda")
    stacks, count = [w for w in (gate_w, up_w, down_w) if w is not None], _count(gate_w, slot_of)
    if expert_out is None and activations == "float32" and _by_lanes(variant, x, stacks, ids, count):
        tiles = expert_tiles(ids, gate_w.shape[0], slot_of, count, False)
        each = _lanes_mlp(x, ids.shape[1], tiles, gate_w, up_w, down_w, act)
        sum_of_chosen(each, weights, ids, slot_of, y)
        return
    if expert_out is None and _by_rows(variant, *ids.shape, _count(gate_w, slot_of)):
        h = torch.empty((*ids.shape, down_w.shape[-1]), dtype=x.dtype, device=x.device)
        _gate_up(name, x, gate_w, up_w, ids, slot_of, act, activations, h, None)
        _down_sum(name, h, down_w, ids, weights, slot_of, activations, y, None, True)
        return
    if expert_out is None:
        expert_out = torch.empty((*ids.shape, y.shape[1]), dtype=y.dtype, device=x.device)
        _mlp(name, x, ids, gate_w, up_w, down_w, slot_of, act, activations, expert_out)
    sum_of_chosen(expert_out.view(*ids.shape, y.shape[1]), weights, ids, slot_of, y)


# clamped   h[p] = g · σ(alpha · g) · (u + 1), g = min(gate[p] + gate_bias[e], limit), u = up[p] + up_bias[e] between
#           −limit and limit, e = ids[p]; 0 for id −1
# shapes    gate, up float32 [P, N], h [P, N] of any float; biases float32 [E, N]; ids int32 [P]
# grid      (P, ceil(N / BLOCK)): a program has BLOCK columns of a pair
# bytes     gate, up and h once, biases from L2
# limits    none
@triton.jit
def _clamped_kernel(
    gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, ids_ptr, h_ptr, experts, N, limit, alpha, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < N
    e = tl.load(ids_ptr + pair).to(tl.int64)
    known = column < tl.where((e >= 0) & (e < experts), N, 0)
    gate = tl.load(gate_ptr + pair * N + column, mask=known, other=0.0)
    up = tl.load(up_ptr + pair * N + column, mask=known, other=0.0)
    gate += tl.load(gate_bias_ptr + e * N + column, mask=known, other=0.0)
    up += tl.load(up_bias_ptr + e * N + column, mask=known, other=0.0)
    h = tl.where(known, clamped_swiglu(gate, up, limit, alpha), 0.0)
    tl.store(h_ptr + pair * N + column, rounded(h, h_ptr.dtype.element_ty), mask=live)


# add_bias  y[p] += bias[ids[p]]; nothing for id −1
# shapes    y float32 [P, N], bias float32 [E, N], ids int32 [P]
# grid      (P, ceil(N / BLOCK))
# bytes     y twice, bias from L2
# limits    none
@triton.jit
def _add_bias_kernel(y_ptr, bias_ptr, ids_ptr, experts, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(ids_ptr + pair).to(tl.int64)
    known = column < tl.where((e >= 0) & (e < experts), N, 0)
    at = y_ptr + pair * N + column
    y = tl.load(at, mask=known, other=0.0) + tl.load(bias_ptr + e * N + column, mask=known, other=0.0)
    tl.store(at, y, mask=known)


def _pair_products(x, stacks: list[Any], ids, slot_of, per_x: int, plan) -> list[torch.Tensor]:
    """float32 [pairs, N] of each stack: the product of x [pairs / per_x, K] with the expert of every pair."""
    made = []
    for w in stacks:
        y = torch.empty((ids.numel(), w.shape[-2]), dtype=torch.float32, device=x.device)
        if plan is not None:
            grouped_product(x, w, plan, per_x, y)
        else:
            for start in range(0, len(y), _PAIRS // per_x * per_x):
                part = slice(start, min(len(y), start + _PAIRS // per_x * per_x))
                rows = x[part.start // per_x : -(-part.stop // per_x)]
                expert_rows(rows, w, ids.view(-1)[part], slot_of, per_x, y[part])
        made.append(y)
    return made


@kernel(ops.moe_biased_forward, device="cuda", variants=BLOCKS, composed=True)
def moe_biased_forward(
    x, ids, weights, gate_w, up_w, down_w, gate_bias, up_bias, down_bias, slot_of, limit, alpha, activations, residual,
    *, out, variant,
):  # fmt: skip
    """Pair by pair two launches: gate, up, biases and what is made of them, then all from there to the sum. Where
    tokens choose the same experts, pairs come in the turn of these, and the sum is a launch of its own. By lanes tiles
    of pairs, the same two products, and the sum.
    """
    if out.numel() == 0:
        return
    name = "moe_biased_forward"
    x, ids, weights, y = map(flat_rows, (x, ids, weights, out))
    if variant == "lanes" and activations != "float32":
        raise BackendError(f"{name}: activations is {activations!r}, expected 'float32' for variant 'lanes' on cuda")
    count = _count(gate_w, slot_of)
    if activations == "float32" and _by_lanes(variant, x, [gate_w, up_w, down_w], ids, count, soon=True):
        tiles = expert_tiles(ids, gate_w.shape[0], slot_of, count, False)
        h = torch.empty((*ids.shape, gate_w.shape[-2]), dtype=x.dtype, device=x.device)
        each = torch.empty((*ids.shape, y.shape[1]), dtype=torch.float32, device=x.device)
        biases, clamp = (gate_bias, up_bias), (limit, alpha)
        expert_products(x, gate_w, up_w, tiles, ids.shape[1], "clamped", h, biases=biases, ids=ids, clamp=clamp)
        expert_products(h, down_w, None, tiles, 1, None, each, weights=weights, biases=(down_bias, None), ids=ids)
        _combine(None if residual is None else flat_rows(residual), each, None, None, None, y)
        return
    plan = _plan(variant, ids, gate_w, slot_of)
    rows = _rounded(name, x, [gate_w, up_w], activations)
    if plan is None and ids.numel() <= _PAIRS and alike(gate_w, up_w):
        before = None if residual is None else flat_rows(residual)
        sorts = len(ids) > 1 and _in_turn(*ids.shape, _count(gate_w, slot_of))
        order = group_pairs(ids, gate_w.shape[0], slot_of).order if sorts else None
        h = torch.empty((*ids.shape, gate_w.shape[-2]), dtype=x.dtype, device=x.device)
        clamped_gate_up_rows(rows, gate_w, up_w, gate_bias, up_bias, ids, slot_of, limit, alpha, h, order)
        ready = _rounded(name, flat_rows(h), [down_w], activations).view(h.shape)
        at_once = ready.data_ptr() == h.data_ptr()
        if order is None:
            expert_down_sum_rows(ready, down_w, ids, weights, slot_of, y, at_once, down_bias, before)
        else:
            each = torch.empty((*ids.shape, y.shape[1]), dtype=torch.float32, device=x.device)
            expert_down_rows(ready, down_w, ids, weights, slot_of, order, each, at_once, down_bias)
            _combine(before, each, None, None, None, y)
        return
    if residual is not None:
        total, y = y, torch.empty(y.shape, dtype=torch.float32, device=y.device)
    gate, up = _pair_products(rows, [gate_w, up_w], ids, slot_of, ids.shape[1], plan)
    h = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(gate.shape[1]))
    _clamped_kernel[(ids.numel(), triton.cdiv(gate.shape[1], block))](
        gate, up, gate_bias, up_bias, ids, h, len(gate_bias), gate.shape[1], limit, alpha, BLOCK=block, **pdl_options()
    )
    (each,) = _pair_products(_rounded(name, h, [down_w], activations), [down_w], ids, slot_of, 1, plan)
    block = min(1024, triton.next_power_of_2(each.shape[1]))
    _add_bias_kernel[(ids.numel(), triton.cdiv(each.shape[1], block))](
        each, down_bias, ids, len(down_bias), each.shape[1], BLOCK=block, **pdl_options()
    )
    sum_of_chosen(each.view(*ids.shape, -1), weights, ids, slot_of, y)
    if residual is not None:
        torch.add(flat_rows(residual), y, out=total)


def expert_room(pairs: tuple[int, int], experts: int, x: torch.Tensor, block: bool) -> torch.Tensor | None:
    """See `ExpertMemory.expert_room`: rows of the dtype that products have where all experts are present."""
    if _by_rows(None, *pairs, experts):
        return None
    exact = block and pairs[0] * pairs[1] <= _EXACT
    return torch.empty((*pairs, x.shape[-1]), dtype=torch.float32 if exact else x.dtype, device=x.device)


# -- combination -----------------------------------------------------------------------------------------------------


# combine   out[t] = (h[t] + sum_i weights[t, i] * experts[t, i]) + shared[t] * sigmoid(scores[t]), slots in order;
#           without scores shared is added as it is; slots of ids below 0, and other ranks' experts, add nothing
# shapes    h, shared (each or None), out [T, dim], experts [T, k, dim] of any float; weights float32 [T, k], None: 1;
#           scores [T] of any float; ids int32 [T, k] or None: all add, slot_of int32 [known] or None: none is another
#           rank's; out may be h, shared or the experts if k = 1; counts int32 [ended] or None: set to 0
# grid      (T, ceil(dim / BLOCK)): a program has BLOCK columns of a token
# bytes     (k + 3) * T * dim * itemsize, each once
# limits    none
@triton.jit(do_not_specialize=["known", "ended"])
def _combine_kernel(
    h_ptr, experts_ptr, weights_ptr, ids_ptr, slot_of_ptr, shared_ptr, scores_ptr, out_ptr, counts_ptr, known, ended,
    dim, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if counts_ptr is not None:  # noqa: SIM102
        if row == 0:
            for start in range(tl.program_id(1) * BLOCK, ended, tl.num_programs(1) * BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(counts_ptr + at, tl.zeros([BLOCK], tl.int32), mask=at < ended)
    live = column < dim
    total = tl.zeros([BLOCK], tl.float32)
    if h_ptr is not None:
        h = tl.load(h_ptr + row * dim + column, mask=live, other=0.0).to(tl.float32)
    for i in tl.range(K, num_stages=1, loop_unroll_factor=8):
        e = tl.load(experts_ptr + (row * K + i) * dim + column, mask=live, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            e *= tl.load(weights_ptr + row * K + i)
        if ids_ptr is not None:  # all is read, not to wait for the id
            e = tl.where(adds(ids_ptr + row * K + i, slot_of_ptr, known, True), e, 0.0)
        total += e
    if h_ptr is not None:
        total += h
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + row * dim + column, mask=live, other=0.0).to(tl.float32)
        total += shared if scores_ptr is None else shared * sigmoid(tl.load(scores_ptr + row).to(tl.float32))
    tl.store(out_ptr + row * dim + column, rounded(total, out_ptr.dtype.element_ty), mask=live)


def _combine(h, experts, weights, shared, scores, out: torch.Tensor, ids=None, slot_of=None, counts=None) -> None:
    """Launch `combine`: experts [T, k, dim], out [T, dim]."""
    T, dim = out.shape
    block = min(1024, triton.next_power_of_2(dim))
    known, ended = (0 if each is None else each.numel() for each in (slot_of, counts))
    _combine_kernel[(T, triton.cdiv(dim, block))](
        h, experts, weights, ids, slot_of, shared, scores, out, counts, known, ended, dim,
        K=experts.shape[1], BLOCK=block, num_warps=max(1, block // 256), **pdl_options(),
    )  # fmt: skip


@kernel(ops.moe_combine_residual, device="cuda")
def moe_combine_residual(
    h_mid: torch.Tensor | None,
    expert_out: torch.Tensor | None,
    weights: torch.Tensor | None,
    shared_out: torch.Tensor | None,
    shared_gate: torch.Tensor | float | None = None,
    moe_sum: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> None:
    if out.numel() == 0:
        return
    T, dim = flat_rows(out).shape
    experts = expert_out if moe_sum is None else moe_sum
    if isinstance(shared_gate, float | int):
        shared_gate = torch.full((T,), shared_gate, dtype=torch.float32, device=out.device)
    k = 1 if weights is None else weights.shape[-1]
    _combine(h_mid, experts.view(T, k, dim), weights, shared_out, shared_gate, flat_rows(out))


# -- a whole block -----------------------------------------------------------------------------------------------------


def _halves(w: Any) -> tuple[Any, Any]:
    """Gate and up rows of one weight, on its memory."""
    half = w.shape[0] // 2
    if isinstance(w, QuantizedTensor):
        return w.rows(slice(half)), w.rows(slice(half, None))
    return w[:half], w[half:]


def _joins(experts: list[Any], shared: list[Any]) -> bool:
    """Whether the shared expert goes through the launches of the others: weights of one format and width."""
    return (
        all(isinstance(w, QuantizedTensor) for w in (*experts, *shared))
        and same_codes(*experts[:-1], *shared[:-1])
        and same_codes(experts[-1], shared[-1])
    )


def _in_turn(T: int, k: int, experts: int) -> bool:
    """Whether sorting pairs by expert pays where they are taken one by one."""
    return T * k * MOE_IN_TURN >= experts and not deterministic()


def _shared_hidden(x: torch.Tensor, gate_w: Any, up_w: Any, act: str, activations: str) -> torch.Tensor:
    """act(gate_w · x) · (up_w · x) in x's dtype: [T, N]."""
    h = torch.empty((len(x), gate_w.shape[0]), dtype=x.dtype, device=x.device)
    coded = all(isinstance(w, QuantizedTensor) for w in (gate_w, up_w))
    if coded and same_codes(gate_w, up_w):
        gate_up(x, gate_w, up_w, act, activations, h, None)
        return h
    both = torch.empty((2, *h.shape), dtype=torch.float32, device=x.device)
    for w, y in zip((gate_w, up_w), both, strict=True):
        product(_rounded("moe_shared_forward", x, [w], activations), w, y, None, half=True)
    gated(both[0], both[1], act, h)
    return h


@kernel(ops.moe_shared_forward, device="cuda", variants=BLOCKS, composed=True)
def moe_shared_forward(
    residual, x, ids, weights, gate_w, up_w, down_w, shared_gate_w, shared_up_w, shared_down_w, shared_score, slot_of,
    act, activations, norm_weight, eps, expert_out, *, out, variant,
):  # fmt: skip
    if out.numel() == 0:
        return
    x, ids, weights, y = map(flat_rows, (x, ids, weights, out))
    residual = None if residual is None else flat_rows(residual)
    own, own_up = _halves(shared_gate_w) if shared_up_w is None else (shared_gate_w, shared_up_w)
    T, k = ids.shape
    experts, count = [w for w in (gate_w, up_w, down_w) if w is not None], _count(gate_w, slot_of)
    plain = expert_out is None and activations == "float32" and _joins(experts, [own, own_up, shared_down_w])
    if plain and takes(x, own, own_up, shared_down_w) and _by_lanes(variant, x, experts, ids, count):
        if norm_weight is not None:
            x, before = torch.empty_like(x), x
            rms_norm(before, norm_weight, eps, out=x)
        common, scores = (own, own_up, shared_down_w), None if shared_score is None else shared_score.view(T)
        tiles = expert_tiles(ids, gate_w.shape[0], slot_of, count, True)
        each = _lanes_mlp(x, k, tiles, gate_w, up_w, down_w, act, common, weights, scores)
        _combine(residual, each, None, None, None, y)
        return
    joint = (
        expert_out is None
        and _by_rows(variant, T, k, count)
        and T * (k + 1) <= _PAIRS
        and activations == "float32"
        and _joins(experts, [own, own_up, shared_down_w])
    )
    sorts = joint and _in_turn(T, k, count)
    if norm_weight is not None and not (joint and not sorts and x.shape[1] <= MOE_NORMED):
        x, plain = torch.empty_like(x), x
        rms_norm(plain, norm_weight, eps, out=x)
        norm_weight = None
    if joint:
        h = torch.empty((T, k + 1, down_w.shape[-1]), dtype=x.dtype, device=x.device)
        scores = None if shared_score is None else shared_score.view(T)
        order = group_pairs(ids, gate_w.shape[0], slot_of).order if sorts else None
        mixed_gate_up(x, gate_w, up_w, own, own_up, ids, slot_of, act, h, norm_weight, eps, order)
        down = (h, down_w, shared_down_w, ids, weights, scores, slot_of)
        if order is None:
            mixed_down_sum(*down, residual, y)
        else:
            each = torch.empty((T, k + 1, y.shape[1]), dtype=torch.float32, device=x.device)
            mixed_down(*down, order, each)
            _combine(residual, each, None, None, None, y)
        return
    # One rounding, except that rows of many tokens on their way to the sum are worth their memory in half precision.
    kind = torch.float32 if ids.numel() <= _EXACT else x.dtype
    shared = torch.empty(y.shape, dtype=kind, device=y.device)
    h = _shared_hidden(x, own, own_up, act, activations)
    product(_rounded("moe_shared_forward", h, [shared_down_w], activations), shared_down_w, shared, None, half=True)
    score = None if shared_score is None else shared_score.view(T)
    lanes = expert_out is None and activations == "float32" and _by_lanes(variant, x, experts, ids, count)
    if lanes or variant == "lanes" or (expert_out is None and _by_rows(variant, T, k, count)):
        routed = torch.empty(y.shape, dtype=kind, device=y.device)
        routing = (x, ids, weights, gate_w, up_w, down_w, slot_of, act, activations, expert_out)
        moe_forward(*routing, out=routed, variant=variant)
        _combine(residual, routed.view(T, 1, -1), None, shared, score, y)
        return
    if expert_out is None:
        expert_out = torch.empty((T, k, y.shape[1]), dtype=kind, device=y.device)
        _mlp("moe_shared_forward", x, ids, gate_w, up_w, down_w, slot_of, act, activations, expert_out)
    _combine(residual, expert_out.view(T, k, y.shape[1]), weights, shared, score, y, ids, slot_of)


@kernel(ops.moe_route_forward, device="cuda", composed=True)
def moe_route_forward(
    residual, x, norm_weight, w, per_expert_scale, top_k, gate_w, up_w, down_w, shared_gate_w, shared_up_w,
    shared_down_w, scored, eps, propagate_nan, active, act, fetch, dtype, *, out,
):  # fmt: skip
    """Three launches for few tokens: norm and logits; gate and up, which choose; down, weights, sum and residual. For
    more the norm, if there is one, the logits, the choice with tiles of pairs, gate and up, down, and the sum.
    """
    y, ids, weights = out
    if y.numel() == 0:
        return
    E = w.shape[0] - scored
    own, own_up = _halves(shared_gate_w) if shared_up_w is None else (shared_gate_w, shared_up_w)
    experts = [each for each in (gate_w, up_w, down_w) if each is not None]
    normed = x
    if norm_weight is not None:
        normed = torch.empty_like(x, dtype=x.dtype if dtype is None else getattr(torch, dtype))
    T, joins = ids.numel() // top_k, not deterministic() and _joins(experts, [own, own_up, shared_down_w])
    joint = joins and min(MOE_CHOOSES, passes_over(normed.dtype, w)) >= T and _by_rows(None, T, top_k, E)
    common, before = (own, own_up, shared_down_w), None if residual is None else flat_rows(residual)
    lanes = joins and not joint and E <= MOST_EXPERTS and takes(normed, *common)
    if lanes and _by_lanes(None, normed, experts, ids.view(T, top_k), E):
        if norm_weight is not None:
            rms_norm(x, norm_weight, eps, out=normed)
        rows, routing = flat_rows(normed), (per_expert_scale, top_k, propagate_nan, active)
        _routed_lanes(before, rows, w, scored, routing, (gate_w, up_w, down_w), common, act, ids, weights, y)
        return
    score = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) if scored else None
    chooses = router(E, top_k, 0, 0, -1.0, propagate_nan)
    if chooses is None or not joint:
        has_norm = norm_weight is not None
        routing = (per_expert_scale, top_k, int(scored), eps, propagate_nan, active, has_norm, fetch, dtype, None)
        moe_norm_route(x, norm_weight, w, *routing, out=(normed if has_norm else None, ids, weights, score))
        moe_shared_forward(
            residual, normed, ids, weights, gate_w, up_w, down_w, shared_gate_w, shared_up_w, shared_down_w, score,
            None, act, "float32", None, eps, None, out=y, variant=None,
        )  # fmt: skip
        return
    logits = router_logits(x, norm_weight, w, eps, fetch, normed, score, E)
    rows, h = flat_rows(normed), torch.empty((T, top_k + 1, down_w.shape[-1]), dtype=normed.dtype, device=x.device)
    routing = Routing(per_expert_scale, active, ids, weights, 1.0)
    chosen_gate_up(rows, gate_w, up_w, own, own_up, logits, routing, chooses, act, h)
    score = None if score is None else score.view(T)
    down = (h, down_w, shared_down_w, flat_rows(ids), flat_rows(weights), score, None)
    mixed_down_sum(*down, before, flat_rows(y))


def _routed_lanes(residual, x, w, scored: bool, routing, experts, common, act: str, ids, weights, y) -> None:
    """What `moe_route_forward` makes of normed rows x [T, K], by lanes."""
    (scale, k, nan, active), T = routing, len(x)
    logits = torch.empty((T, w.shape[0]), dtype=torch.float32, device=x.device)
    score = torch.empty(T, dtype=torch.float32, device=x.device) if scored else None
    product(x, w, logits, None)
    tiles = routed_tiles(logits, scale, k, nan, active, ids, weights, score)
    try:
        each = _lanes_mlp(x, k, tiles, *experts, act, common, flat_rows(weights), score)
        _combine(residual, each, None, None, None, flat_rows(y), counts=tiles.counts)
    except BaseException:
        if tiles.counts is not None:  # the next launch expects none
            tiles.counts.zero_()
        raise


# accumulate total[token_idx[b]] += bucket[b] * weights[b], all rows of a token in order, rounded once for each token
# shapes    bucket [B, dim], total [T, dim] of one dtype; token_idx int32, weights float32 [B]
# grid      (B, ceil(dim / BLOCK)): the program of a token's first row takes all rows of that token, the others leave
# bytes     3 * B * dim * itemsize, and B * 4 of token_idx for each program (from L2)
# limits    none
@triton.jit
def _accumulate_kernel(
    total_ptr, bucket_ptr, token_ptr, weights_ptr, T, B, dim, LOOK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0)
    token = tl.load(token_ptr + first)
    offset = tl.arange(0, LOOK)
    before = 0
    for start in range(0, first, LOOK):
        b = start + offset
        other = tl.load(token_ptr + b, mask=b < first, other=-1)
        before += tl.sum((other == token).to(tl.int32))
    if (before == 0) & (token >= 0) & (token < T):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = column < dim
        at = total_ptr + token.to(tl.int64) * dim + column
        total = tl.load(at, mask=live, other=0.0).to(tl.float32)
        for start in range(first, B, LOOK):
            b = start + offset
            same = tl.load(token_ptr + b, mask=b < B, other=-1) == token
            last = -1
            for _ in range(tl.sum(same.to(tl.int32))):
                last = tl.min(tl.where(same & (b > last), b, B))
                x = tl.load(bucket_ptr + last.to(tl.int64) * dim + column, mask=live, other=0.0).to(tl.float32)
                total += x * tl.load(weights_ptr + last)
        tl.store(at, total.to(total_ptr.dtype.element_ty), mask=live)


@kernel(ops.moe_bucket_accumulate, device="cuda")
def moe_bucket_accumulate(
    out_sum: torch.Tensor, bucket_out: torch.Tensor, token_idx: torch.Tensor, weights: torch.Tensor
) -> None:
    if bucket_out.numel() == 0 or out_sum.numel() == 0:
        return
    T, dim = out_sum.shape
    B = token_idx.shape[0]
    block = min(2048, triton.next_power_of_2(dim))
    look = min(1024, max(32, triton.next_power_of_2(B)))
    _accumulate_kernel[(B, triton.cdiv(dim, block))](
        out_sum, bucket_out, token_idx, weights, T, B, dim, LOOK=look, BLOCK=block, num_warps=4
    )
