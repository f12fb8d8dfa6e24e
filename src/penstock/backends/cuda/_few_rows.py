"""Products of 2 to 32 rows with coded weights, and of the pairs of tokens and experts, in one launch each.

The lanes of `_lanes` do the work. Of experts the pairs are sorted by expert on the device first (`expert_tiles`): a
tile is up to 8 or 16 pairs of one expert, whose weights then come from memory once. As many programs as run at once
take tiles and rows in turn.
"""

import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._codes import factor_of, place_of
from penstock.backends.cuda._lane_blocks import FIVE, SIX
from penstock.backends.cuda._lane_floats import GROUP, LANE_FLOATS, scale_bytes
from penstock.backends.cuda._lanes import (
    MAGIC,
    Constants,
    codes_offset,
    five,
    floats,
    four,
    high_offset,
    lane_words,
    load_block,
    multiplied,
    quarter,
    row_tiles,
    scale_step,
    six,
    steps,
    summed,
    warps,
)
from penstock.backends.cuda._launch import (
    INTERPRETED,
    activation,
    clamped_swiglu,
    compiled_for,
    counters,
    multiprocessors,
    pdl_options,
    wait_for_previous,
)
from penstock.backends.cuda._matvec import NO_WEIGHT, is_new, wait_if
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import (
    FEW_BLOCK_GROUPS,
    FEW_BLOCKS,
    FEW_FOUR,
    FEW_GROUPS,
    FEW_PROGRAMS,
    FEW_TILES,
    FEW_WORDS,
    TILES_PAIRS,
    FewRows,
)
from penstock.errors import BackendError
from penstock.ops.op import deterministic
from penstock.quant import GgufPlanes, GgufTensor, QuantizedTensor

# Arrays of a launch. w, up, common, common_up: codes, scales and biases, each None where there are none. counts: of
# pairs in buckets (`routed` of `_routed`), None: order has them one slot after the other. bias, up_bias [experts, N] of
# the experts that ids has for the pairs, and clamp, limit and alpha of the ACT "clamped", or None.
_Arrays = namedtuple(
    "_Arrays",
    "w up common common_up x residual order tiles weights score y counts bias up_bias ids clamp",
    defaults=(None,) * 5,
)


@triton.jit
def _start(arrays, row, q, C: tl.constexpr):
    """Addresses of the codes, scales and biases of a lane's first row in a weight, or of its planes."""
    GROUPS: tl.constexpr = C.K // C.GS * 2
    codes = arrays[0].to(tl.int64) + row * (C.K * C.BITS // 8) + codes_offset(q, C)
    if six(C):
        sub, high = arrays[2].to(tl.int64) + row * (C.K // 16), arrays[1].to(tl.int64) + row * (C.K // 4)
        starts = codes, sub, high + high_offset(q, C), arrays[3].to(tl.int64) + row * (C.K // 128)
    elif four(C):
        HIGH: tl.constexpr = 1 if five(C) else 0  # a plane more before the others
        sub, more = arrays[1 + HIGH].to(tl.int64) + row * (C.K // 32), arrays[2 + HIGH].to(tl.int64) + row * (C.K // 64)
        starts = codes, sub, more, arrays[3 + HIGH].to(tl.int64) + row * (C.K // 64)
        if five(C):
            starts += (arrays[1].to(tl.int64) + row * (C.K // 8) + high_offset(q, C),)
    elif floats(C):
        scales = arrays[1].to(tl.int64) + row * (steps(C) * scale_step(C))
        starts = codes, scales, scales  # which have no biases
    else:
        starts = codes, arrays[1].to(tl.int64) + row * GROUPS, arrays[2].to(tl.int64) + row * GROUPS
    return starts


@triton.jit
def _either(this, other, choice):
    """Pointers: those of `other` where there are some and the choice is true."""
    if other[0] is not None:
        chosen = ()
        for i in tl.static_range(len(this)):
            if this[i] is None:
                chosen += (None,)
            else:
                chosen += (tl.where(choice, other[i], this[i]),)
        this = chosen
    return this


@triton.jit
def _tile_count(a, NT, stack):
    """How many tiles there are."""
    at = a.tiles + 3 * NT
    if a.counts is not None:
        at = a.counts + stack + 2
    return tl.load(at, cache_modifier=".cg")


@triton.jit
def _tile_places(a, tile, slot, NT, C: tl.constexpr):
    """The first place of a tile in the order, and where it ends."""
    start = tl.load(a.tiles + NT + tile, cache_modifier=".cg")
    end = tl.load(a.tiles + 2 * NT + tile, cache_modifier=".cg")
    if a.counts is not None:
        end = tl.minimum(start + 8 * C.NT, end + tl.load(a.counts + slot, cache_modifier=".cg"))
    return start, end


# few       y[t] = residual[t] + W . x[t], with ACT act(W . x) * (U . x). GROUPED: for the pairs q of a tile
#           y[q] = W[e] . x[q // pairs_per_x] + bias[ids[q]], times its weight if there are some; ACT "clamped": of such
#           sums with bias and up_bias (`clamped_swiglu`); the expert of a tile is its slot, `stack` stands for the
#           shared one; 0 for the pairs without an expert
# shapes    w, up: codes, scales and biases of rows of one format, `matrix` rows for each expert; common, common_up: of
#           the shared expert; x bfloat16 [.., K]; y, residual [.., N], may be one; order int32 [pairs]; tiles int32
#           [3, NT], behind them their number, and where in the order the pairs without an expert begin; or order, tiles
#           and counts of `routed`; T: of tokens, GROUPED of pairs
# grid      (programs,): items of V * 16 * row tiles rows and 8 * NT tokens go round; not GROUPED: one for each program,
#           those of the same rows side by side
# bytes     the weights that are named, once for each tile; x and y from L2
# limits    K a multiple of GS; addresses of rows multiples of 16 bytes
#
# PDL: not GROUPED it asks for its weights before it waits for the kernel before, unless that may have written them.
@triton.jit(do_not_specialize=["magic", "wait_first", "T", "NT", "stack", "pairs_per_x"])
def _few_kernel(
    a, magic, wait_first, T, N, matrix, NT, stack, pairs_per_x, C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    OUT: tl.constexpr = row_tiles(C)
    KIND: tl.constexpr = a.w[1].dtype.element_ty
    thread = tl.arange(0, warps(C))
    part, v = thread // 32 % C.S, thread // (32 * C.S)
    r, q = thread % 32 // 4, thread % 4
    across = tl.cdiv(N, 16 * OUT * C.V)
    if PDL:
        if C.GROUPED:
            gdc_launch_dependents()
            gdc_wait()
        else:
            wait_if(wait_first)
    slot = 0
    if C.GROUPED:  # the first slot is on its way before it is known whether there is one
        slot = tl.load(a.tiles + tl.minimum(tl.program_id(0) // across, NT - 1), cache_modifier=".cg")
        items = _tile_count(a, NT, stack) * across
    else:
        items = across * tl.cdiv(T, 8 * C.NT)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if C.GROUPED:
            tile, first = item // across, item % across * (16 * OUT * C.V)
            if item >= tl.num_programs(0):
                slot = tl.load(a.tiles + tile, cache_modifier=".cg")
            start, end = _tile_places(a, tile, slot, NT, C)
        else:
            passes = tl.cdiv(T, 8 * C.NT)
            first, start, end = item // passes * (16 * OUT * C.V), item % passes * (8 * C.NT), T
        row = (first + v * (16 * OUT) + r).to(tl.int64)
        back = ()
        if not C.EVEN:
            for m in tl.static_range(2 * OUT):
                back += (tl.maximum(row + 8 * m - (N - 1), 0),)
        if C.GROUPED:
            shared = slot == stack
            base = row + tl.where(slot < stack, slot, 0).to(tl.int64) * matrix
            if C.ACT is None:
                starts = (_start(_either(a.w, a.common, shared), base, q, C),)
            else:
                gate, up = _either(a.w, a.common, shared), _either(a.up, a.common_up, shared)
                starts = (_start(gate, base, q, C), _start(up, base, q, C))
        else:
            if C.ACT is None:
                starts = (_start(a.w, row, q, C),)
            else:
                starts = (_start(a.w, row, q, C), _start(a.up, row, q, C))
        loaded = load_block(starts, back, part, C)
        if PDL and not C.GROUPED:
            gdc_launch_dependents()
            gdc_wait()
        x_at, live = (), ()
        for t in tl.static_range(C.NT):
            place = start + 8 * t + r
            there = place < end
            if C.GROUPED:
                place = tl.load(a.order + place, mask=there, other=0, cache_modifier=".cg") // pairs_per_x
            x_at += (a.x.to(tl.int64) + place.to(tl.int64) * (2 * C.K) + quarter(q, C) * (C.GS // 2),)
            live += (there.to(tl.int32),)
        if C.S == 1:
            ends = ()
            for t in tl.static_range(C.NT):
                for i in tl.static_range(2):
                    ends += (_end(a, start + 8 * t + 2 * q + i, end, C),)
            total = multiplied(starts, back, x_at, live, loaded, magic, part, KIND, C)
            for m in tl.static_range(OUT):
                for t in tl.static_range(C.NT):
                    for i in tl.static_range(4):
                        y, at = total[4 * (m * C.NT + t) + i], ends[2 * t + i % 2]
                        n = first + v * (16 * OUT) + m * 16 + i // 2 * 8 + r
                        if a.bias is not None:
                            y += _bias_of(a.bias, n, at, N)
                        if C.ACT is not None:
                            above = total[4 * ((m + OUT) * C.NT + t) + i]
                            if C.ACT == "clamped":
                                y = clamped_swiglu(y, above + _bias_of(a.up_bias, n, at, N), a.clamp[0], a.clamp[1])
                            else:
                                y = activation(y, C.ACT) * above
                        _store(a, y, n, at, N, C)
        else:
            y = summed(multiplied(starts, back, x_at, live, loaded, magic, part, KIND, C), C)
            SUMS: tl.constexpr = 4 * OUT * C.NT
            if C.ACT is not None:
                gate, above = tl.split(tl.permute(tl.reshape(y, [C.V, 32, 2, SUMS]), [0, 1, 3, 2]))
                y = activation(gate, C.ACT) * above
            i = tl.arange(0, SUMS)[None, None, :]
            lane = tl.arange(0, 32)[None, :, None]
            tile_row = i // (4 * C.NT) * 16 + i // 2 % 2 * 8 + lane // 4
            n = first + tl.arange(0, C.V)[:, None, None] * (16 * OUT) + tile_row
            place = start + i // 4 % C.NT * 8 + lane % 4 * 2 + i % 2
            _store(a, y, n, _end(a, place, end, C), N, C)
    if C.GROUPED:
        _clear(a, T, NT, stack, N, C)


@triton.jit
def _clear(a, pairs, NT, stack, N, C: tl.constexpr):
    """y = 0 of the pairs without an expert, which are the last of the order; a program has some of them."""
    if a.counts is None:
        first = tl.load(a.tiles + 3 * NT + 1, cache_modifier=".cg")
    else:
        first = (stack + 1) * (pairs // C.SHARED_EVERY)
        pairs = first + tl.load(a.counts + stack + 1, cache_modifier=".cg")
    n = tl.arange(0, warps(C))
    for place in range(first + tl.program_id(0), pairs, tl.num_programs(0)):
        to = a.y + tl.load(a.order + place, cache_modifier=".cg").to(tl.int64) * N
        for start in range(0, N, warps(C)):
            tl.store(to + start + n, tl.zeros([warps(C)], a.y.dtype.element_ty), mask=start + n < N)


@triton.jit
def _end(a, place, end, C: tl.constexpr):
    """Which row of y the token, or pair, at each place has, whether there is one, what it is multiplied by, and its
    expert where there are biases.
    """
    there, factor, expert = place < end, 1.0, 0
    if C.GROUPED:
        place = tl.load(a.order + place, mask=there, other=0, cache_modifier=".cg")
        if a.weights is not None:
            factor = factor_of(a.weights, a.score, place, there, C.SHARED_EVERY)
        if a.bias is not None:
            expert = tl.load(a.ids + place, mask=there, other=0)
    return place, there, factor, expert


@triton.jit
def _bias_of(bias, n, at, N):
    """Numbers n of the bias of the experts of `_end`."""
    _, there, _, expert = at
    return tl.load(bias + expert.to(tl.int64) * N + n, mask=there & (n < N), other=0.0)


@triton.jit
def _store(a, y, n, at, N, C: tl.constexpr):
    """y of rows n and the tokens, or pairs, of `_end`."""
    place, there, factor, _ = at
    ok = there & (n < N)
    if a.weights is not None:
        y *= factor
    to = place.to(tl.int64) * N + n
    if a.residual is not None:
        y += tl.load(a.residual + to, mask=ok, other=0.0).to(tl.float32)
    tl.store(a.y + to, rounded(y, a.y.dtype.element_ty), mask=ok)


@triton.jit
def _slots(ids_ptr, slot_of_ptr, pair, P, S, known, EVERY: tl.constexpr, SHARED: tl.constexpr):
    """The slot of each pair: S is the shared expert's, S + 1 stands for none; S + 2 beyond the pairs."""
    inside = pair < P
    if SHARED:
        common = pair % EVERY == EVERY - 1
        own = place_of(ids_ptr, slot_of_ptr, pair - pair // EVERY, inside & ~common, known, S).to(tl.int32)
        slot = tl.where(common, S, tl.where(own < 0, S + 1, own))
    else:
        own = place_of(ids_ptr, slot_of_ptr, pair, inside, known, S).to(tl.int32)
        slot = tl.where(own < 0, S + 1, own)
    return tl.where(inside, slot, S + 2)


# tiles     order = the pairs by the slot of their expert, those of a slot in their own order; tiles = slot, first place
#           and end of each tile of at most BM pairs of one slot, in any order, then how many there are, and where in
#           the order the pairs without an expert begin, which have no tiles
# shapes    ids int32 [T, EVERY], with SHARED EVERY - 1 of them: the last pair of a token is that of the shared expert,
#           slot S; pairs without an expert have slot S + 1; order int32 [P]; tiles int32 [3 * NT + 2]; counter int32, 0
#           before and after: tiles so far times 65536, and programs
# grid      (S + 2,): a program places the pairs of its slot; the last one to count knows how many tiles there are
# bytes     4 * P per program, from L2; twice as many where there are more than BLOCK (ONE: no more)
# limits    P and S + 2 < 32768, fewer than 32768 tiles; NT at least P / BM + S + 1
@triton.jit(do_not_specialize=["P", "S", "known", "NT"])
def _tiles_kernel(
    ids_ptr, slot_of_ptr, order_ptr, tiles_ptr, counter_ptr, P, S, known, NT, EVERY: tl.constexpr, SHARED: tl.constexpr,
    BM: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    slot = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    found = _slots(ids_ptr, slot_of_ptr, i, P, S, known, EVERY, SHARED)
    both = (found < slot).to(tl.int32) * 65536 + (found == slot).to(tl.int32)
    if not ONE:
        for first in range(BLOCK, P, BLOCK):
            more = _slots(ids_ptr, slot_of_ptr, first + i, P, S, known, EVERY, SHARED)
            both += (more < slot).to(tl.int32) * 65536 + (more == slot).to(tl.int32)
    both = tl.sum(both)
    begin, count = both // 65536, both % 65536
    needed = tl.where(slot <= S, tl.cdiv(count, BM), 0)
    before = tl.atomic_add(counter_ptr, needed * 65536 + 1, sem="relaxed")
    tile = before // 65536
    if count > 0:
        mine = (found == slot).to(tl.int32)
        tl.store(order_ptr + begin + tl.cumsum(mine) - 1, i, mask=mine > 0)
        if not ONE:
            place = begin + tl.sum(mine)
            for first in range(BLOCK, P, BLOCK):
                mine = (_slots(ids_ptr, slot_of_ptr, first + i, P, S, known, EVERY, SHARED) == slot).to(tl.int32)
                tl.store(order_ptr + place + tl.cumsum(mine) - 1, first + i, mask=mine > 0)
                place += tl.sum(mine)
        j = tl.arange(0, 32)
        for first in range(0, needed, 32):
            at, live = tiles_ptr + tile + first + j, first + j < needed
            start = begin + (first + j) * BM
            tl.store(at, slot, mask=live)
            tl.store(at + NT, start, mask=live)
            tl.store(at + 2 * NT, tl.minimum(start + BM, begin + count), mask=live)
    if slot == S + 1:
        tl.store(tiles_ptr + 3 * NT + 1, begin)
    if before % 65536 == S + 1:
        tl.store(tiles_ptr + 3 * NT, tile + needed)
        tl.store(counter_ptr, 0)


# -- launches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """Pairs by expert: see `tiles`, with counts `routed` of `_routed`. rows: pairs of a tile at most; every: pairs of a
    token.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    pairs: int
    rows: int
    every: int
    shared: bool
    counts: torch.Tensor | None = None

    @property
    def most(self) -> int:
        """Tiles that there is room for."""
        return (self.tiles.numel() - 2) // 3


class Launch(NamedTuple):
    """How a product is launched: the constants of a program besides those of the weight, and registers of a thread at
    most (None: any number).
    """

    MT: int
    NT: int
    S: int
    V: int
    P: int
    U: int
    AHEAD: bool
    registers: int | None = None


LANE_BLOCKS = ("Q4_K", "Q5_K", "Q6_K")  # types of GGUF blocks that lanes can read


def is_lane_float(w: Any) -> bool:
    """Whether the codes of a weight are floats that lanes can read."""
    return isinstance(w, QuantizedTensor) and w.mode in LANE_FLOATS


def _form(w: QuantizedTensor) -> tuple[int, int, str | None]:
    """Bits, group size and type of blocks, or mode of floats, that a product is compiled for."""
    if isinstance(w, GgufTensor):
        return 4, 32, w.mode
    return (w.bits, GROUP, w.mode) if is_lane_float(w) else (w.bits, w.group_size, None)


def _magic(w: QuantizedTensor) -> int:
    if is_lane_float(w):
        return 0
    return {"Q4_K": MAGIC[4], "Q5_K": FIVE, "Q6_K": SIX}[w.mode] if isinstance(w, GgufTensor) else MAGIC[w.bits]


def _fits(w: Any) -> bool:
    """Whether lanes can read this weight: whole words of a group for each, scales of 16 bits, rows that are aligned."""
    if isinstance(w, GgufPlanes):
        planes = zip(w.by_name, (16, 8, 8, 2, 2), strict=True)  # bytes that one load takes, of top those of an entry
        return w.mode in LANE_BLOCKS and all(
            plane is None or plane.data_ptr() % max(least, plane.element_size()) == 0 for plane, least in planes
        )
    if not isinstance(w, QuantizedTensor) or isinstance(w, GgufTensor):
        return False
    if is_lane_float(w):
        groups, each = w.shape[-1] // GROUP, scale_bytes(w.mode)
        least = each * min(8, groups & -groups)  # bytes of scales that one load may take
        whole = w.shape[-1] % GROUP == 0 and least > 1 and w.global_scale is None
        return whole and w.packed.data_ptr() % 16 == 0 and w.scales.data_ptr() % least == 0
    if w.bits not in MAGIC or w.scales.element_size() != 2:
        return False
    words, groups = lane_words(w.bits, w.group_size), w.scales.shape[-1]
    least = 2 * min(8, groups & -groups)  # bytes of scales that one load may take
    aligned = w.packed.data_ptr() % 16 == 0
    return words in (1, 2, 4) and aligned and all(a.data_ptr() % least == 0 for a in (w.scales, w.biases))


def takes(x: torch.Tensor, *weights: Any) -> bool:
    """Whether these products can go through lanes: bfloat16 rows, weights that fit."""
    return (
        x.dtype is torch.bfloat16
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        and not deterministic()
        and all(map(_fits, weights))
    )


def refused(x: torch.Tensor, *weights: Any) -> BackendError:
    """What is raised where lanes are asked for by name and cannot take these products."""
    given = ", ".join(repr(w) if isinstance(w, QuantizedTensor) else f"dense {w.dtype}" for w in weights)
    taken = (
        "bfloat16 rows and Q4_K, Q5_K or Q6_K, or mxfp4, mxfp8 (rows of multiples of 64) or nvfp4 (of 32, without a "
        "global scale), or codes of 2, 4 or 8 bits of one format, 16 to 64 bytes of a group, 16-bit scales"
    )
    return BackendError(f"variant 'lanes': x has {x.dtype} rows, weights are {given}, expected {taken} on cuda")


def _groups(K: int, bits: int, gs: int, most: int) -> int:
    """Groups whose scales come in one load: as many as divide a row, up to `most`."""
    groups = K // gs
    return min(most, max(1, FEW_WORDS // lane_words(bits, gs)), groups & -groups)


@functools.cache
def _dense_launch(
    T: int, N: int, K: int, bits: int, gs: int, gated: bool, processors: int, blocks: str | None = None
) -> Launch:  # fmt: skip
    table = FEW_FOUR if blocks is None and bits == 4 else FEW_BLOCKS[blocks]
    row: FewRows = next(row for row in table if row.tokens >= T and row.rows * processors <= N)
    if blocks in LANE_FLOATS:  # groups are half as long, and those of blocks
        P = _groups(K, bits, gs, 2 * row.groups)
        U = row.ahead * max(1, 2 * row.groups // P)
    else:
        P = 4 if blocks else _groups(K, bits, gs, row.groups)
        U = row.ahead * max(1, row.groups // (2 if blocks else P))
    U = max(1, min(U, -(-(K // gs // P) // row.parts)))
    tiles = max(2, row.tiles) if gated else row.tiles
    return Launch(tiles, row.token_tiles, row.parts, row.across, P, U, False, row.registers)


def _rows(how: Launch, act: str | None) -> int:
    """Rows of the result that a program has."""
    return 16 * (how.MT if act is None else how.MT // 2) * how.V


def _constants(how: Launch, w: QuantizedTensor, N: int, act: str | None, grouped: bool, every: int) -> Constants:
    K, even, (bits, gs, blocks) = w.shape[-1], N % _rows(how, act) == 0, _form(w)
    fixed = (how.MT, how.NT, how.S, how.V, how.P, how.U, act, even, how.AHEAD, grouped, every)
    return Constants(K, bits, gs, *fixed, blocks)


def few_rows(
    x: torch.Tensor, w: QuantizedTensor, out: torch.Tensor, residual: torch.Tensor | None = None,
    up: QuantizedTensor | None = None, act: str | None = None,
) -> None:  # fmt: skip
    """out [T, N] = residual + x [T, K] · w [N, K]ᵀ, or act(x · wᵀ) · (x · upᵀ); weights are not rounded on the way.

    out may be residual.
    """
    (T, K), N = x.shape, w.shape[0]
    bits, gs, blocks = _form(w)
    how = _dense_launch(T, N, K, bits, gs, up is not None, multiprocessors(x), blocks)
    C = _constants(how, w, N, act, False, 0)
    ups = NO_WEIGHT if up is None else up.arrays
    a = _Arrays(w.arrays, ups, NO_WEIGHT, NO_WEIGHT, x, residual, None, None, None, None, out)
    grid = (triton.cdiv(N, _rows(how, act)) * triton.cdiv(T, 8 * how.NT),)
    unread = [is_new(one) for one in (w, up) if one is not None]
    _few_kernel[grid](
        a, _magic(w), int(any(unread)), T, N, 0, 0, 0, 1, C=compiled_for(C), num_warps=how.S * how.V, num_stages=1,
        maxnreg=how.registers, **pdl_options(),
    )  # fmt: skip


def tile_rows(pairs: int, experts: int) -> int:
    """Pairs of a tile: 8 where most experts have fewer, else 16."""
    return next(rows for most, rows in FEW_TILES if pairs <= most * experts)


def expert_tiles(ids: torch.Tensor, slots: int, slot_of: torch.Tensor | None, experts: int, shared: bool) -> Tiles:
    """Sort the pairs of ids [T, k] by the slot of their expert; shared: a pair more for each token."""
    T, k = ids.shape
    every = k + 1 if shared else k
    P, BM = T * every, tile_rows(T * k, experts)
    NT = P // BM + slots + 1
    assert max(P, slots + 2) < 32768
    made = torch.empty(P + 3 * NT + 2, dtype=torch.int32, device=ids.device)
    count = counters(made)
    if count is None:
        count = torch.zeros(1, dtype=torch.int32, device=ids.device)
    block = max(64, min(TILES_PAIRS, triton.next_power_of_2(P)))
    _tiles_kernel[(slots + 2,)](
        ids, slot_of, made, made[P:], count, P, slots, 0 if slot_of is None else slot_of.numel(), NT, every, shared, BM,
        block, block >= P, num_warps=max(1, block // 256), **pdl_options(),
    )  # fmt: skip
    return Tiles(made[:P], made[P:], P, BM, every, shared)


@functools.cache
def _expert_launch(kind: str, rows: int, K: int, bits: int, gs: int, blocks: str | None = None) -> Launch:
    row = FEW_GROUPS[kind, rows] if blocks is None else FEW_BLOCK_GROUPS[blocks, kind, rows]
    if INTERPRETED:  # which is slow by the operation: fewer of them
        row = row._replace(tiles=2, across=1 if blocks is None else 8)
    P = _groups(K, bits, gs, row.groups)
    U = max(1, min(row.groups // P, K // gs // P))
    return Launch(row.tiles, rows // 8, 1, row.across, P, U, row.x_ahead, row.registers)


def expert_products(
    x: torch.Tensor, w: QuantizedTensor, up: QuantizedTensor | None, tiles: Tiles, pairs_per_x: int, act: str | None,
    out: torch.Tensor, common: QuantizedTensor | None = None, common_up: QuantizedTensor | None = None,
    weights: torch.Tensor | None = None, score: torch.Tensor | None = None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), ids: torch.Tensor | None = None,
    clamp: tuple[float, float] | None = None,
) -> None:  # fmt: skip
    """out [pairs, N] = w[e] · x[q // pairs_per_x] for each pair q, times its weight; with act
    act(w[e] · x) · (up[e] · x).

    up None: the up rows follow the N gate rows of w. common, common_up [N, K]: those of the shared expert. biases of w
    and up [experts, N], by the ids of the pairs; clamp: limit and alpha of the act "clamped".
    """
    N, K = out.shape[-1], w.shape[-1]
    how = _expert_launch("down" if act is None else "gate_up", tiles.rows, K, *_form(w))
    C = _constants(how, w, N, act, True, tiles.every if tiles.shared else 0)
    ups, *shared = (NO_WEIGHT if one is None else one.arrays for one in (up, common, common_up))
    if act is not None and up is None:
        ups = tuple(part[:, N:] for part in w.arrays)
    sorted_by = tiles.order, tiles.tiles, weights, score, out, tiles.counts
    a = _Arrays(w.arrays, ups, *shared, x, None, *sorted_by, *biases, ids, clamp)
    P, NT = tiles.pairs, tiles.most
    across = triton.cdiv(N, _rows(how, act))
    programs = 2 if INTERPRETED else FEW_PROGRAMS * multiprocessors(x)
    _few_kernel[(min(NT * across, programs),)](
        a, _magic(w), 0, P, N, w.shape[-2], NT, w.shape[0], pairs_per_x, C=compiled_for(C),
        num_warps=how.S * how.V, num_stages=1, maxnreg=how.registers, **pdl_options(),
    )  # fmt: skip
