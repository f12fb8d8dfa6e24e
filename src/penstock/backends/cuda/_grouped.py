"""Products of many tokens with their experts: (token, slot) pairs sorted by expert on the device, then tiles of pairs.

`group_pairs` makes the plan: the pairs in the order of their experts' slots, and for every tile of at most BM pairs of
one expert where it starts. Its sizes follow from the shapes alone: P pairs and S slots need at most
P / BM + S + 1 tiles (slot S stands for pairs without an expert, whose rows are 0). Tiles that are not needed return.
"""

import functools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.backends.cuda._activations import gated
from penstock.backends.cuda._blocks import is_blocks
from penstock.backends.cuda._floats import global_factor, groups_of, is_float, kernel_arrays, kind_of
from penstock.backends.cuda._gemm import (
    Constants,
    accumulate,
    accumulate_both,
    blocks_config,
    dot_dtype,
    dot_order,
    ordered,
    ordering,
    pairs_of,
    plainly,
    stages_for,
    units,
    weight_starts,
    words_fit,
)
from penstock.backends.cuda._launch import (
    INTERPRETED,
    TL_DTYPES,
    activation,
    capability,
    compiled_for,
    shared_memory,
)
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import (
    GEMM_WIDE,
    GROUPED,
    GROUPED_LONG,
    GROUPED_ROWS,
    PLAN_COLUMNS,
    PLAN_COUNTS,
    PLAN_MANY,
)
from penstock.backends.cuda.elementwise import sum_of_chosen
from penstock.errors import BackendError
from penstock.quant import GgufTensor, QuantizedTensor

# Arrays of a product: as those of `_gemm`, and a plan.
_Arrays = namedtuple("_Arrays", "x w out order tiles")
# What it is compiled for besides `Constants`: pairs of a row of x, act of gate and up (None: one product), codes per
# unit of the weight that reads out in dot order (0: out as it is), rows of a short tile (0: none), whether a tile may
# have so many rows more.
_Grouping = namedtuple("_Grouping", "SHARE ACT OUT TAIL LONG")


@dataclass(frozen=True)
class Plan:
    """Pairs by slot: `order` [P] names them, `tiles` [3, tiles] has slot, first place and end of each tile."""

    order: torch.Tensor
    tiles: torch.Tensor
    rows: int  # pairs in a tile at most, but for
    more: int = 0  # so many


@triton.jit
def _key(ids_ptr, slot_of_ptr, p, P, S, experts, MAPPED: tl.constexpr):
    """The slot of pair p; S if it has none, S + 1 beyond the pairs."""
    key = tl.load(ids_ptr + p, mask=p < P, other=-1)
    if MAPPED:
        key = tl.load(slot_of_ptr + key, mask=(key >= 0) & (key < experts), other=-1)
    key = tl.where((key >= 0) & (key < S), key, S)
    return tl.where(p < P, key, S + 1)


# plan      order = the pairs by slot, those of a slot in their own order; tiles[:, i] = slot, first place, end of tile
# shapes    ids int32 [P]; slot_of int32 [experts], or ids are slots; order int32 [P]; tiles int32 [3, P / BM + S + 1]
# grid      (S + 1,): a program counts and places the pairs of its slot; the last one those without a slot, which have
#           no tiles with LEAVE: their rows stay as they are
# bytes     8 · P per program, from L2
# limits    a slot whose pairs start at place b has its tiles from b / BM + slot on, which is room enough for every
#           slot before it; a tile in between that no slot needs has slot −1
@triton.jit(do_not_specialize=["P", "S", "experts", "NT"])
def _plan_kernel(
    ids_ptr, slot_of_ptr, order_ptr, tiles_ptr, P, S, experts, NT, MAPPED: tl.constexpr, LEAVE: tl.constexpr,
    BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    less = tl.zeros([BLOCK], tl.int32)
    same = tl.zeros([BLOCK], tl.int32)
    for first in range(0, P, BLOCK):
        key = _key(ids_ptr, slot_of_ptr, first + i, P, S, experts, MAPPED)
        less += (key < slot).to(tl.int32)
        same += (key == slot).to(tl.int32)
    begin = tl.sum(less)
    end = begin + tl.sum(same)
    place = begin
    for first in range(0, P, BLOCK):
        own = (_key(ids_ptr, slot_of_ptr, first + i, P, S, experts, MAPPED) == slot).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(own) - 1, first + i, mask=own > 0)
        place += tl.sum(own)
    for first in range(begin // BM + slot, end // BM + slot + 1, BLOCK):
        tile = first + i
        start = begin + (tile - begin // BM - slot) * BM
        live = tile < end // BM + slot + 1
        needed = (start < end) & (slot < S) if LEAVE else start < end
        tl.store(tiles_ptr + tile, tl.where(needed, slot, -1), mask=live)
        tl.store(tiles_ptr + NT + tile, start, mask=live)
        tl.store(tiles_ptr + 2 * NT + tile, end, mask=live)


# count     counts[b, s] = pairs of slot s in block b
# shapes    ids int32 [P]; slot_of int32 [experts], or ids are slots; counts int32 [P / BLOCK, BINS]
# grid      (P / BLOCK,)
# bytes     4 · P in, 4 · BINS for each block out
# limits    BINS ≥ S + 2, a power of two: S for pairs without a slot, S + 1 beyond the pairs
@triton.jit(do_not_specialize=["P", "S", "experts"])
def _count_kernel(
    ids_ptr, slot_of_ptr, counts_ptr, P, S, experts, MAPPED: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    block = tl.program_id(0)
    key = _key(ids_ptr, slot_of_ptr, block * BLOCK + tl.arange(0, BLOCK), P, S, experts, MAPPED)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), tl.histogram(key, BINS))


# place     as `plan`, for many pairs, from the counts of their blocks
# shapes    as `plan`, and counts int32 [blocks, BINS]
# grid      (blocks,): a program adds up all counts, has the places of its BLOCK pairs, each behind those of its slot
#           in the blocks before and among its own, and its share of the tiles
# bytes     8 · P, and the counts for each program, from L2
# limits    as `plan`, and BINS as `count`; COUNTS blocks are added up at a time, pairs compared with COLUMNS others
@triton.jit(do_not_specialize=["P", "S", "experts", "NT"])
def _place_kernel(
    ids_ptr, slot_of_ptr, counts_ptr, order_ptr, tiles_ptr, P, S, experts, NT, MAPPED: tl.constexpr,
    LEAVE: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, COUNTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    block, blocks = tl.program_id(0), tl.num_programs(0)
    p = block * BLOCK + tl.arange(0, BLOCK)
    key = _key(ids_ptr, slot_of_ptr, p, P, S, experts, MAPPED)
    rank = tl.zeros([BLOCK], tl.int32)
    for first in tl.static_range(0, BLOCK, COLUMNS):
        q = block * BLOCK + first + tl.arange(0, COLUMNS)
        other = _key(ids_ptr, slot_of_ptr, q, P, S, experts, MAPPED)
        rank += tl.sum(((key[:, None] == other[None, :]) & (q[None, :] < p[:, None])).to(tl.int32), axis=1)
    slot = tl.arange(0, BINS)
    before = tl.zeros([COUNTS, BINS], tl.int32)
    every = tl.zeros([COUNTS, BINS], tl.int32)
    for first in tl.range(0, blocks, COUNTS, loop_unroll_factor=4):  # as many loads under way
        b = first + tl.arange(0, COUNTS)[:, None]
        count = tl.load(counts_ptr + b * BINS + slot[None, :], mask=b < blocks, other=0)
        before += tl.where(b < block, count, 0)
        every += count
    total = tl.sum(every, axis=0)
    end = tl.cumsum(total)
    begin = end - total
    place = tl.gather(begin + tl.sum(before, axis=0), key, axis=0) + rank
    tl.store(order_ptr + place, p, mask=p < P)
    more = tl.where(slot <= S, end // BM - begin // BM, -1)
    for j in range(block, tl.max(more) + 1, blocks):
        start = begin + j * BM
        needed = (start < end) & (slot < S) if LEAVE else start < end
        at = tiles_ptr + begin // BM + slot + j
        tl.store(at, tl.where(needed, slot, -1), mask=j <= more)
        tl.store(at + NT, start, mask=j <= more)
        tl.store(at + 2 * NT, end, mask=j <= more)


@triton.jit
def _starts(up, slot, N, rows, n, G: tl.constexpr, C: tl.constexpr):
    """Where rows n … of the expert in this slot start: codes, scales, biases; with ACT half of gate, half of up."""
    WIDTH: tl.constexpr = C.BN if G.ACT is None else C.BN // 2
    row = slot.to(tl.int64) * rows + tl.minimum(n + tl.arange(0, C.BN) % WIDTH, N - 1)
    w_start, s_start = weight_starts(row, C)
    b_start = s_start
    if G.ACT is not None:
        is_up = (tl.arange(0, C.BN) // WIDTH).to(tl.int64)
        w_start += is_up * up[0]
        s_start += is_up * up[1]
        b_start += is_up * up[2]
    return w_start, s_start, b_start


@triton.jit
def _store(a, up, acc, pair, live, slot, N, n, G: tl.constexpr, BM: tl.constexpr, C: tl.constexpr):
    """Sums [BN, BM] of the columns n … of these pairs on their way to out."""
    WIDTH: tl.constexpr = C.BN if G.ACT is None else C.BN // 2
    if is_float(C.BITS) and a.w[2] is not None:
        which = slot + tl.zeros([C.BN], tl.int64)
        if G.ACT is not None:
            which += (tl.arange(0, C.BN) // WIDTH).to(tl.int64) * up[2]
        acc *= global_factor(a.w[2], which, None)[:, None]
    if G.ACT is not None:
        gate, above = tl.split(tl.permute(tl.reshape(acc, [2, WIDTH, BM]), [1, 2, 0]))
        acc = activation(gate, G.ACT) * above
    y = rounded(tl.trans(acc), a.out.dtype.element_ty)
    if G.OUT > 0:
        y = dot_order(y, BM, WIDTH, G.OUT)
    col = n + tl.arange(0, WIDTH)
    at = a.out + pair.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(at, y, mask=live[:, None] & (col[None, :] < N))


@triton.jit
def _pairs(a, first, end, BM: tl.constexpr):
    """The pairs at places first … end, at most BM of them, and which there are."""
    place = first + tl.arange(0, BM)
    return tl.load(a.order + place, mask=place < end, other=0), place < end


@triton.jit
def _tile(a, up, slot, first, end, N, rows, n, G: tl.constexpr, BM: tl.constexpr, C: tl.constexpr):
    """Columns n … of the pairs at places first … end, at most BM of them, of the expert in this slot."""
    pair, live = _pairs(a, first, end, BM)
    w_start, s_start, b_start = _starts(up, slot, N, rows, n, G, C)
    acc = tl.zeros([C.BN, BM], tl.float32)
    acc = accumulate(acc, a, (pair // G.SHARE).to(tl.int64) * C.K, live, w_start, s_start, b_start, 0, C.K, C)
    _store(a, up, acc, pair, live, slot, N, n, G, BM, C)


@triton.jit
def _long_tile(a, up, slot, first, end, N, rows, n, G: tl.constexpr, C: tl.constexpr):
    """As `_tile` of BM + TAIL pairs: weights are made dense once for both."""
    pair, live = _pairs(a, first, end, C.BM)
    more, there = _pairs(a, first + C.BM, end, G.TAIL)
    one = tl.zeros([C.BN, C.BM], tl.float32)
    two = tl.zeros([C.BN, G.TAIL], tl.float32)
    x_start, more_start = (pair // G.SHARE).to(tl.int64) * C.K, (more // G.SHARE).to(tl.int64) * C.K
    starts = _starts(up, slot, N, rows, n, G, C)
    one, two = accumulate_both(one, two, a, x_start, live, more_start, there, starts, C)
    _store(a, up, one, pair, live, slot, N, n, G, C.BM, C)
    _store(a, up, two, more, there, slot, N, n, G, G.TAIL, C)


@triton.jit
def _zeros(a, first, end, N, n, BM: tl.constexpr, WIDTH: tl.constexpr):
    """0 in the columns n … of the pairs at places first … end, at most BM of them."""
    pair, live = _pairs(a, first, end, BM)
    col = n + tl.arange(0, WIDTH)
    zeros = tl.zeros([BM, WIDTH], a.out.dtype.element_ty)
    tl.store(a.out + pair.to(tl.int64)[:, None] * N + col[None, :], zeros, mask=live[:, None] & (col[None, :] < N))


# grouped   out[p] = W[e] · x[p // SHARE]ᵀ for the pairs p of expert e; with ACT: act(gate · x) · (up · x)
# shapes    x [P / SHARE, K]; W stacks [S, rows, K]; out [P, N], in the dot order of OUT codes per unit if not 0; tiles
#           of up to BM pairs, with LONG of up to BM + TAIL;
#           ACT: half the rows of a weight tile are of gate, half of up, whose row n is `up_*` elements behind that of
#           gate in each array of the weight
# grid      (tiles · N tiles,), N first, so that an expert's tiles run together and its weights are read once
# bytes     the weights of the chosen experts once, x rows per N tile from L2, out once
# limits    K a multiple of 32 if the weight is quantized
@triton.jit(do_not_specialize=["NT", "S"])
def _grouped_kernel(
    a, up_w: tl.int64, up_s: tl.int64, up_b: tl.int64, NT, N, S, rows, G: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    WIDTH: tl.constexpr = C.BN if G.ACT is None else C.BN // 2
    across = tl.cdiv(N, WIDTH)
    tile = tl.program_id(0) // across
    n = tl.program_id(0) % across * WIDTH
    slot = tl.load(a.tiles + tile)
    if slot < 0:
        return
    first = tl.load(a.tiles + NT + tile)
    end = tl.load(a.tiles + 2 * NT + tile)
    if slot >= S:
        _zeros(a, first, end, N, n, C.BM, WIDTH)
        if G.LONG:
            _zeros(a, first + C.BM, end, N, n, G.TAIL, WIDTH)
    elif G.LONG and end - first > C.BM:
        _long_tile(a, (up_w, up_s, up_b), slot, first, end, N, rows, n, G, C)
    elif end - first > G.TAIL:
        _tile(a, (up_w, up_s, up_b), slot, first, end, N, rows, n, G, C.BM, C)
    elif G.TAIL > 0:
        _tile(a, (up_w, up_s, up_b), slot, first, end, N, rows, n, G, G.TAIL, C)


# -- launches --------------------------------------------------------------------------------------------------------


@functools.cache
def _tile_rows(pairs: int, slots: int) -> int:
    """Pairs per tile: about the mean per expert, so that most weights are read and made dense once."""
    return next(rows for most, rows in GROUPED_ROWS if pairs / slots <= most)


@functools.cache
def _config(rows: int, bits: int, wide: bool, even: bool, shared: int) -> tuple[int, ...]:
    """Rows of a short tile (0: none), BN, BK, warps, stages; even: groups of K come in pairs of 4 bytes and more."""
    tail, BN, BK, warps, stages = (0, *GEMM_WIDE) if wide else GROUPED[rows]
    if is_blocks(bits):
        BN, BK, warps, stages = blocks_config(wide)
        return tail, BN, BK, warps, stages
    BK = BK if even else min(BK, 64)
    return tail, BN, max(BK, 4 * units(bits)) if bits else BK, warps, stages_for(stages, bits, shared)


def _blocks(pairs: int) -> int:
    """Pairs of a block: about 128 blocks, whose counts each of them reads. A program compares all pairs of its block,
    and the code for it grows with their square: more blocks beyond 65,536 pairs.
    """
    return min(512, max(256, triton.next_power_of_2(pairs) // 128))


def group_pairs(
    ids: torch.Tensor, slots: int, slot_of: torch.Tensor | None = None, rows: int | None = None, leave: bool = False,
    long: bool = False,
) -> Plan:  # fmt: skip
    """Sort the pairs of ids [T, k] by the slot of their expert in a stack of `slots`; leave: those without stay; long:
    a tile may have the rows of a short one more.
    """
    P, mapped = ids.numel(), slot_of is not None
    rows = rows or _tile_rows(P, max(1, slots if slot_of is None else slot_of.numel()))
    more = GROUPED[rows][0] if long and rows in GROUPED_LONG else 0
    NT = P // (rows + more) + slots + 1
    made = torch.empty(P + 3 * NT, dtype=torch.int32, device=ids.device)
    order, tiles = made[:P], made[P:]
    mapping, experts = (slot_of, slot_of.numel()) if slot_of is not None else (ids, 0)
    if P >= PLAN_MANY:
        block, bins = _blocks(P), triton.next_power_of_2(slots + 2)
        counts = torch.empty((triton.cdiv(P, block), bins), dtype=torch.int32, device=ids.device)
        grid, by = (len(counts),), max(1, min(64, PLAN_COUNTS // bins))
        _count_kernel[grid](ids, mapping, counts, P, slots, experts, mapped, block, bins, num_warps=4)
        _place_kernel[grid](
            ids, mapping, counts, order, tiles, P, slots, experts, NT, mapped, leave, rows + more, block, bins, by,
            min(block, PLAN_COLUMNS), num_warps=8,
        )  # fmt: skip
        return Plan(order, tiles, rows, more)
    block = min(4096, max(256, triton.next_power_of_2(P)))
    _plan_kernel[(slots + 1,)](
        ids, mapping, order, tiles, P, slots, experts, NT, mapped, leave, rows + more, block,
        num_warps=block // 512 or 1,
    )  # fmt: skip
    return Plan(order, tiles, rows, more)


def _takes_long(x: torch.Tensor, *stacks: Any) -> bool:
    """Whether products of x with these experts may have long tiles, whose sums fill the registers: of codes that are
    made dense two at a time, with Hopper's tensor cores.
    """
    if x.dtype is torch.float32 or (INTERPRETED and x.dtype is torch.bfloat16) or capability(x)[0] != 9:
        return False
    coded = [w for w in stacks if isinstance(w, QuantizedTensor) and w.mode == "affine"]
    return len(coded) == len(stacks) and all(
        pairs_of(w, x.dtype) is not None or (INTERPRETED and w.bits in (2, 4)) for w in coded
    )


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> int:
    """Elements from one array to another of its dtype."""
    return 0 if one is None or other is None else (other.data_ptr() - one.data_ptr()) // one.element_size()


def _grouped(
    x: torch.Tensor, w: Any, up: Any, plan: Plan, pairs_per_x: int, act: str | None, out: torch.Tensor,
    is_ordered: bool = False, out_unit: int = 0,
) -> None:  # fmt: skip
    """Launch the product of x rows with their experts; act None: one plain product."""
    S, rows, K = w.shape
    N, NT = out.shape[-1], plan.tiles.numel() // 3
    quantized = isinstance(w, QuantizedTensor)
    arrays, bits, gs = (kernel_arrays(w), kind_of(w), groups_of(w)) if quantized else ((w, w, w), 0, 1)
    dtype = dot_dtype(x, w, x)
    words = quantized and words_fit(w)
    apart = (0, 0, 0)
    if up is not None:
        if quantized and up.key != w.key:
            raise BackendError(f"expert_gate_up: up_w is {up!r}, expected the format of gate_w ({w!r}) on cuda")
        others = kernel_arrays(up) if quantized else (up, up, up)
        apart = tuple(_apart(a, b) for a, b in zip(arrays, others, strict=True))
        words = words and words_fit(up)
    elif act is not None:
        apart = tuple(0 if a is None or a.ndim == 1 else N * a.shape[-1] for a in arrays)
    if not is_ordered and ordering(x.shape[0], K, bits):
        x, is_ordered = ordered(x, bits), True
    plain, even = plainly(dtype, bits, is_ordered), K % (2 * gs) == 0
    tail, BN, BK, warps, stages = _config(plan.rows, bits, plain, even, shared_memory(x))
    assert plan.more in (0, tail)
    C = Constants(K, bits, gs, words, pairs_of(w, dtype), is_ordered, TL_DTYPES[dtype], plan.rows, BN, BK)
    G = _Grouping(pairs_per_x, act, out_unit, tail, plan.more > 0)
    a = _Arrays(x, arrays, out, plan.order, plan.tiles)
    _grouped_kernel[(NT * triton.cdiv(N, BN // 2 if act else BN),)](
        a, *apart, NT, N, S, rows, G=compiled_for(G), C=compiled_for(C), num_warps=warps, num_stages=stages
    )


def grouped_product(x: torch.Tensor, w: Any, plan: Plan, pairs_per_x: int, out: torch.Tensor) -> None:
    """out [P, N] = w[e] · x[p // pairs_per_x] for the pairs of a plan."""
    assert x.is_contiguous() and out.is_contiguous()
    _grouped(x, w, None, plan, pairs_per_x, None, out)


def grouped_gate_up(
    x: torch.Tensor, gate_w: Any, up_w: Any, ids: torch.Tensor, slot_of: torch.Tensor | None, act: str,
    out: torch.Tensor, plan: Plan | None = None, out_unit: int = 0,
) -> None:  # fmt: skip
    """out [T, k, N] = act(gate · x) · (up · x) for the experts ids [T, k]; up_w None: gate_w holds both.

    out_unit: codes per unit of the weight that reads out in dot order; 0: out as it is.
    """
    assert x.is_contiguous() and ids.is_contiguous() and out.is_contiguous()
    if ids.numel() == 0:
        return
    plan = plan or group_pairs(ids, gate_w.shape[0], slot_of)
    if isinstance(gate_w, GgufTensor) or isinstance(up_w, GgufTensor):
        _apart_gate_up(x, gate_w, up_w, plan, ids.shape[1], act, out)
        return
    _grouped(x, gate_w, up_w, plan, ids.shape[1], act, out, out_unit=out_unit)


def _apart_gate_up(
    x: torch.Tensor, gate_w: Any, up_w: Any, plan: Plan, pairs_per_x: int, act: str, out: torch.Tensor
) -> None:
    """`grouped_gate_up` by a product for each weight: of blocks, which may be of different types."""
    (*_, N), P = out.shape, plan.order.numel()
    stacks = [gate_w] if up_w is None else [gate_w, up_w]
    made = [torch.empty((P, w.shape[1]), dtype=torch.float32, device=x.device) for w in stacks]
    for w, y in zip(stacks, made, strict=True):
        _grouped(x, w, None, plan, pairs_per_x, None, y)
    gate, up = made if up_w is not None else (part.contiguous() for part in made[0].split(N, dim=1))
    gated(gate, up, act, out)


def _grouped_down(h: torch.Tensor, down_w: Any, plan: Plan, each: torch.Tensor, is_ordered: bool) -> None:
    """each [T, k, dim] = down_w[e] · h [T, k, I]; is_ordered: h is in dot order."""
    assert h.is_contiguous() and each.is_contiguous()
    _grouped(h.view(-1, h.shape[-1]), down_w, None, plan, 1, None, each, is_ordered)


def grouped_down_sum(
    h: torch.Tensor, down_w: Any, ids: torch.Tensor, weights: torch.Tensor, slot_of: torch.Tensor | None,
    out: torch.Tensor, plan: Plan | None = None,
) -> None:  # fmt: skip
    """out [T, dim] = Σ_i weights[t, i] · (down_w[ids[t, i]] · h[t, i])."""
    assert ids.is_contiguous() and weights.is_contiguous() and out.is_contiguous()
    if ids.numel() == 0:
        return
    each = torch.empty((*ids.shape, out.shape[1]), dtype=out.dtype, device=h.device)
    _grouped_down(h, down_w, plan or group_pairs(ids, down_w.shape[0], slot_of), each, False)
    sum_of_chosen(each, weights, ids, slot_of, out)


def grouped_mlp(
    x: torch.Tensor, gate_w: Any, up_w: Any, down_w: Any, ids: torch.Tensor, slot_of: torch.Tensor | None, act: str,
    each: torch.Tensor, leave: bool = False, between: Callable[[torch.Tensor], Any] | None = None,
) -> None:  # fmt: skip
    """each [T, k, dim] = down · (act(gate · x) · (up · x)); what is between goes in the order that the second reads.

    leave: rows of absent experts stay as they are; else they are 0. between: what happens to the rows [T · k, I] on
    their way.
    """
    if ids.numel() == 0:
        return
    h = torch.empty((*ids.shape, down_w.shape[-1]), dtype=x.dtype, device=x.device)
    coded = isinstance(down_w, QuantizedTensor) and not isinstance(down_w, GgufTensor)
    unit = units(kind_of(down_w)) if coded and between is None and not isinstance(gate_w, GgufTensor) else 0
    if unit and (4 * unit > 32 or h.shape[-1] % (4 * unit)):  # a tile is 32 columns wide or more
        unit = 0
    plan = group_pairs(ids, gate_w.shape[0], slot_of, leave=leave, long=coded and _takes_long(x, gate_w, down_w))
    grouped_gate_up(x, gate_w, up_w, ids, slot_of, act, h, plan=plan, out_unit=unit)
    rows = h if between is None else between(h.view(-1, h.shape[-1])).view(h.shape)
    _grouped_down(rows, down_w, plan, each, unit > 0)
