"""Where top-k and top-p cut: the last rank that they keep, as a key and the highest id that is kept of those with it.

With top-p alone that is not asked of every row. The best of all ids is the best of those that are kept if it is one of
them, so a row is drawn from all first, and then the weight of the ids that rank before that token says whether it is
kept: if they have less than top_p of the whole weight it is, and the row is done (`_before_kernel`, `_rows_kernel`).
Weights and sums are float32 there. Noise lies between −3.14 and 22.88, so the exponent of a token that wins is above
−26.1, as are those before it; what lies below −30 weighs nothing in the sum of all. An exponent d is off by at most
4e-7 · |d|, its exp by 3e-7, and sums of 4096 in 128 threads and of 128 blocks by 4e-6: 2e-5 together, less than _OFF.
A row in which that much more or less could decide is open, like one whose token is not kept.

Logits are ranked by `key_of`, a 32-bit integer in their order. Few of them can be that rank; those are listed, and one
program finds it among them (`_limits_kernel`):

* with top-k, logits that reach a bound which k logits reach: about the k-th highest of the maxima of small parts;
* with top-p alone, logits in a window that the goal is reached in. They are counted in bins of weight, and the counts
  bound what each bin weighs. Where too many are left, the window is cut into bins once more.

What does not fit in a list (a top-k of thousands, many equal logits among others) is searched in the whole row, digit
by digit. Where the list holds all that is kept, the token is drawn from it, too, and no logit of the row is read again.

Bounds and windows only have to leave few logits: the limit itself is checked and found with exact weights. Every row
takes its own way. Open rows are listed by it, and the programs of a launch share what is listed: few rows have the
whole GPU, and a row that is done costs nothing more.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl

from penstock.backends.cuda._launch import multiprocessors, pdl_options, wait_for_previous
from penstock.backends.cuda._noise import best_of, winner_of, words_of
from penstock.backends.cuda._tuning import (
    SAMPLE_BIN_WARPS,
    SAMPLE_BINS,
    SAMPLE_CHUNK,
    SAMPLE_DECIDED,
    SAMPLE_LIST,
    SAMPLE_LIST_WARPS,
    SAMPLE_OPEN_PROGRAMS,
    SAMPLE_REGISTERS,
    SAMPLE_SPANS,
    SAMPLE_WARPS,
)

PEAKS = 32  # parts of a block whose maxima bound top-k

_PEAKS = tl.constexpr(PEAKS)
_GROUP = tl.constexpr(32)  # neighbours that a block has together
_CHUNK = tl.constexpr(SAMPLE_CHUNK)  # logits at a time of a program of _search_kernel, 16 sums of each in registers
_BITS = tl.constexpr(4)  # of a digit
_DIGITS = tl.constexpr(32 // _BITS.value)  # of a key
_DIGIT = tl.constexpr(1 << _BITS.value)  # values of a digit
_LOWEST = tl.constexpr(0x00800000)  # the key of the lowest finite number
_FAR = tl.constexpr(2**31 - 1)  # beyond every id
_SIGN = tl.constexpr(0x80000000)
_OFF = tl.constexpr(5e-5)  # more than weights and their sums in float32 are off
_COLD, _HOT = tl.constexpr(1e-29), tl.constexpr(1e30)  # temperatures between which they are that close
_BEYOND = tl.constexpr(1024.0)  # all that lies beyond the bins weighs less than this part of what top-p leaves out
# Ways of a row whose token is open: its window is to be found, it has a bound, it is drawn from all that is kept.
_BY_WINDOW, _BY_BOUND, DRAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
WAYS = tl.constexpr(3)
# Numbers of a row: way, highest, bound, total and step of _rows_kernel; first, last, outer, zoom and open of
# _window_kernel.
_STATE = tl.constexpr(10)
_TALLY = tl.constexpr(4)  # of a list: how many, the lowest and the highest key

# What every row is drawn from: its logits, the maxima of their blocks and where they are, its own sampling.
Given = namedtuple("Given", "logits highest first positions temperature top_k top_p min_p seed")
# What the maxima leave for top-k and top-p: maxima of parts of blocks, float32 [B, blocks, PEAKS]; weights of blocks
# relative to their maxima, about, float32 [B, blocks]; open int32 [1 + B, 3], for each way how many rows go it and then
# which, in any order.
Parts = namedtuple("Parts", "peaks sums open")
# What rows without top-k were drawn from all ids: the best sums of blocks, float64, and their ids, int32 [B, blocks].
Drawn = namedtuple("Drawn", "best tokens")
# What the passes leave for each other: states float64 [B, 10]; counts int32 [B, 2, BINS], of logits by bin; outside
# float32 [B, 2, blocks], weights above and below the first window, about; weights float64 [B, 2, blocks], of all logits
# and of those above the window; tallies int32 [B, 4], logits float32, ids int32 [B, LIST], the list; before float32 [B,
# blocks], weights before the token drawn from all ids, about; open of Parts.
Search = namedtuple("Search", "states counts outside weights tallies logits ids before open")


# -- logits, keys and weights ----------------------------------------------------------------------------------------


@triton.jit
def key_of(x):
    """uint32 in the order of float32 x; −0 is 0. No number has key 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def value_of(key):
    """The number with this key."""
    return tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _exp(d):
    """exp(d) of float64 d ≤ 0, off by 3e-16 of it, and 0 below −708. No branch, so that many run side by side."""
    d = tl.maximum(d, -1000.0)
    n = tl.floor(d * 1.4426950408889634 + 0.5)
    r = (d - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10  # ln 2 in two parts, n times the first
    p = 1.0 / 6227020800 * r + 1.0 / 479001600  # exp(r) by its series, |r| < 0.35
    p = p * r + 1.0 / 39916800
    p = p * r + 1.0 / 3628800
    p = p * r + 1.0 / 362880
    p = p * r + 1.0 / 40320
    p = p * r + 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = (n.to(tl.int32) + 1023).to(tl.int64) << 52
    return tl.where(n > -1022, p * power.to(tl.float64, bitcast=True), 0.0)


@triton.jit
def weight_of(x, highest, rate):
    """exp((x − highest) · rate) in float64. The difference comes first: it cannot overflow."""
    return _exp((x.to(tl.float64) - highest.to(tl.float64)) * rate)


@triton.jit
def rate_of(temperature):
    """1 / temperature, and where that overflows a number that sends all but the highest to weight 0 as well."""
    return tl.minimum(1.0 / temperature, 1.7e308)


@triton.jit
def rate_about(temperature):
    """1 / temperature in float32, where times −inf is −inf and times 0 is 0."""
    return tl.maximum(tl.minimum(1.0 / temperature, 1e30), 2e-38).to(tl.float32)


@triton.jit
def highest_of(maxima_ptr, row, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return tl.max(tl.load(maxima_ptr + row * blocks + block, mask=block < blocks, other=float("-inf")), axis=0)


@triton.jit
def spread_ids(block, blocks, BLOCK: tl.constexpr):
    """The ids of a block: groups from all over the row, as high logits have neighbours."""
    i = tl.arange(0, BLOCK)
    return ((i // _GROUP) * blocks + block) * _GROUP + i % _GROUP


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def cuts(top_k, V):
    return (top_k > 0) & (top_k < V)


@triton.jit
def _by_top_p(given, row, V):
    """Whether top-p alone cuts what the row is drawn from."""
    temperature, position = tl.load(given.temperature + row), tl.load(given.positions + row)
    top_k, top_p = tl.load(given.top_k + row), tl.load(given.top_p + row)
    return (temperature > 0) & (position >= 0) & (top_p < 1) & (not cuts(top_k, V))


@triton.jit
def _needed(goal, before, limit, highest, rate, V):
    """How many ids at the limit bring the weight before it to the goal, at least 1."""
    each = weight_of(value_of(limit), highest, rate)
    few = tl.where(each > 0, tl.ceil((goal - before) / each), 1.0)
    return tl.maximum(tl.minimum(few, V), 1.0)


@triton.jit
def _middle(low, high):
    """Above low, up to high."""
    return low + ((high - low + 1) >> 1)


# -- the token drawn from all ids ------------------------------------------------------------------------------------


# before    before[b, j] = sum of exp((x − highest) / temperature), about, of the logits of block j that rank before the
#           token drawn from all ids, in rows with top-p and no top-k
# shapes    logits float32 [B, V]; highest float32, best float64, tokens int32, before float32 [B, blocks]
# grid      (B, ceil(blocks / SPAN)): a program has SPAN blocks of BLOCK logits
# bytes     4 * BLOCK for each block whose highest logit reaches that of the token
# limits    V < 2**31
@triton.jit
def _before_kernel(
    given, drawn, before_ptr, V, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if _by_top_p(given, row, V):
        highest = highest_of(given.highest, row, blocks, BLOCKS)
        if is_finite(highest):
            token = winner_of(drawn.best, drawn.tokens, row, blocks, BLOCKS)
            own, rate = tl.load(given.logits + row * V + token), rate_about(tl.load(given.temperature + row))
            for part in tl.static_range(SPAN):  # unrolled: all loads are under way at once
                block = tl.program_id(1) * SPAN + part
                at, ids = row * blocks + block, spread_ids(block, blocks, BLOCK)
                most = tl.load(given.highest + at, mask=block < blocks, other=float("-inf"))
                here = ids < tl.where(most >= own, V, 0)
                x = tl.load(given.logits + row * V + ids, mask=here, other=float("-inf"))
                ahead = (x > own) | ((x == own) & (ids < token))
                w = tl.where(ahead, tl.exp((x - highest) * rate), 0.0)
                tl.store(before_ptr + at, tl.sum(w, axis=0), mask=block < blocks)


# -- rows whose token is open ----------------------------------------------------------------------------------------


@triton.jit
def _enlist(search, way, row):
    at = search.open + way
    tl.store(at + WAYS * (1 + tl.atomic_add(at, 1, sem="relaxed")), row.to(tl.int32))


@triton.jit
def open_rows(open_ptr, way):
    """How many rows are open and go this way."""
    return tl.load(open_ptr + way)


@triton.jit
def open_row(open_ptr, way, n):
    """Number n of these."""
    return tl.load(open_ptr + WAYS * (1 + n) + way).to(tl.int64)


# -- bounds and windows ----------------------------------------------------------------------------------------------


# rows      states[b] = the way of a row and its highest logit; with top-k the key of its bound; with top-p alone about
#           the weight of all logits, and the width of a bin in the exponent. limits[b] = nothing is cut, and the token
#           drawn from all ids where that one is certainly kept, else −1: then the row is open and has its way. Counts
#           and the tally start anew
# shapes    parts: peaks [B, blocks * PEAKS], sums [B, blocks]; drawn, or None: best, tokens [B, blocks]; before float32
#           [B, blocks]; states float64 [B, 10]; counts int32 [B, 2, BINS]; tallies int32 [B, 4]; limits float64 [B, 4];
#           open int32 [1 + B, 3]
# grid      (B,): a program holds the peaks of a row in registers
# bytes     4 * blocks * PEAKS for each row with top-k, 20 * blocks for each other one
# limits    blocks up to about 512. LISTED: a list has room for every row, and bounds need not be high
@triton.jit
def _rows_kernel(
    given, parts, drawn, search, limits_ptr, V, blocks, BLOCKS: tl.constexpr, BINS: tl.constexpr,
    LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    temperature, top_k, top_p = tl.load(given.temperature + row), tl.load(given.top_k + row), tl.load(given.top_p + row)
    position = tl.load(given.positions + row)
    at, there = row * blocks + block, block < blocks
    maxima = tl.load(given.highest + at, mask=there, other=float("-inf"))
    highest, state, way = tl.max(maxima, axis=0), search.states + row * _STATE, tl.full((), DRAW, tl.int32)
    token, bins = tl.full((), -1, tl.int32), 2 * row * BINS + tl.arange(0, 2 * BINS)
    tl.store(search.counts + bins, tl.zeros([2 * BINS], tl.int32))
    tl.store(search.tallies + row * _TALLY, 0)
    tl.store(search.tallies + row * _TALLY + 1, 0x7FFFFFFF)
    tl.store(search.tallies + row * _TALLY + 2, -0x80000000)
    if (temperature > 0) & (position >= 0) & is_finite(highest):
        if cuts(top_k, V) | ((top_p < 1) & LISTED):
            way = tl.full((), _BY_BOUND, tl.int32)
            low, high = tl.full((), _LOWEST, tl.uint32), key_of(highest)
            if not LISTED:
                peak = tl.arange(0, BLOCKS * _PEAKS)
                peaks = tl.load(
                    parts.peaks + row * blocks * _PEAKS + peak, mask=peak < blocks * _PEAKS, other=float("-inf")
                )
                keys, most, reach = key_of(peaks), top_k + top_k // 8, tl.full((), _FAR, tl.int32)
                while (low < high) & (reach > most):
                    trial = _middle(low, high)
                    count = tl.sum((keys >= trial).to(tl.int32), axis=0)
                    enough = count >= top_k
                    reach = tl.where(enough, count, reach)
                    low, high = tl.where(enough, trial, low), tl.where(enough, high, trial - 1)
            tl.store(state + 2, low.to(tl.float64))
        else:
            if drawn is not None:
                token = winner_of(drawn.best, drawn.tokens, row, blocks, BLOCKS)
            if top_p < 1:
                sums = tl.load(parts.sums + at, mask=there, other=0.0)
                total = tl.sum(sums * tl.exp((maxima - highest) * rate_about(temperature)), axis=0).to(tl.float64)
                if drawn is not None:
                    before = tl.sum(tl.load(search.before + at, mask=there, other=0.0), axis=0).to(tl.float64)
                    inside = before * (1 + _OFF) < top_p * total * (1 - _OFF)
                    # A token that nothing ranks before is kept, whatever weighs how much.
                    kept = (before == 0) | (inside & (temperature >= _COLD) & (temperature <= _HOT))
                    token = tl.where(kept, token, -1)
                if token < 0:
                    way = tl.full((), _BY_WINDOW, tl.int32)
                    tl.store(state + 3, total)
                    tl.store(state + 4, tl.log(V * _BEYOND / ((1.0 - top_p) * total)) / (BINS - 1))
        if token < 0:
            _enlist(search, way, row)
    tl.store(state, way.to(tl.float64))
    tl.store(state + 1, highest.to(tl.float64))
    _store_limit(limits_ptr, row, tl.full((), 0, tl.uint32), tl.full((), _FAR, tl.int32), 0.0)
    tl.store(limits_ptr + row * 4 + 3, token.to(tl.float64))


@triton.jit
def _way(search, row):
    return tl.load(search.states + row * _STATE).to(tl.int32)


@triton.jit
def _highest(search, row):
    return tl.load(search.states + row * _STATE + 1).to(tl.float32)


@triton.jit
def _place(x, highest, rate, step, BINS: tl.constexpr):
    """Where x is in the bins, float32: its distance from the highest in steps of the exponent."""
    return tl.minimum((highest - x) * (rate / step.to(tl.float32)), BINS - 1.0)


@triton.jit
def _window(counts_ptr, start, step, above, below, beyond, goal, rest, BINS: tl.constexpr):
    """The first and the last bin in which the goal may be reached, and how many logits lie from one to the other.

    Bins begin at exponent −start and are `step` wide. above, below: weights on both sides, about, the latter up to
    `beyond` higher. The goal is reached in a bin if it and those before weigh that much, or those behind it no more
    than the rest.
    """
    bins = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + bins)
    edge = tl.exp(-(start + bins * step))
    most, least = counts * edge, counts * (edge * tl.exp(-step))
    behind_most = below * (1 + _OFF) + beyond + tl.cumsum(most, axis=0, reverse=True) - most
    behind_least = below * (1 - _OFF) + tl.cumsum(least, axis=0, reverse=True) - least
    reached_most = above * (1 + _OFF) + tl.cumsum(most, axis=0)
    reached_least = above * (1 - _OFF) + tl.cumsum(least, axis=0)
    may = (reached_most >= goal * (1 - _OFF)) & (behind_least <= rest * (1 + _OFF))
    must = (reached_least >= goal * (1 + _OFF)) | (behind_most <= rest * (1 - _OFF))
    first = tl.min(tl.where(may, bins, BINS - 1), axis=0)
    last = tl.maximum(tl.min(tl.where(must, bins, BINS - 1), axis=0), first)
    return first, last, tl.sum(tl.where((bins >= first) & (bins <= last), counts, 0), axis=0)


@triton.jit
def _down_to(counts_ptr, last, BINS: tl.constexpr):
    """How many logits lie in the bins up to the last one."""
    bins = tl.arange(0, BINS)
    return tl.sum(tl.where(bins <= last, tl.load(counts_ptr + bins), 0), axis=0)


@triton.jit
def _store_window(state, first, last):
    tl.store(state + 5, first.to(tl.float64))
    tl.store(state + 6, last.to(tl.float64))


@triton.jit
def _load_window(state):
    return tl.load(state + 5).to(tl.int32), tl.load(state + 6).to(tl.int32)


@triton.jit
def _outside(search, side, row, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    at = search.outside + (2 * row + side) * blocks + block
    return tl.sum(tl.load(at, mask=block < blocks, other=0.0).to(tl.float64), axis=0)


# window    states[b] = the bins from first to last in which the goal of top-p is reached, bin i being the logits whose
#           place is from outer + i / zoom on, and whether it is open: too many for a list. LEVEL 0: of the bins of all,
#           from the highest on if a list holds that; outer and zoom cut an open window into bins. LEVEL 1: of those
# shapes    counts int32 [B, 2, BINS]; outside float32 [B, 2, blocks]; states float64 [B, 10]
# grid      (B,)
# bytes     4 * BINS + 8 * blocks for each row with top-p and no top-k
# limits    none
@triton.jit
def _window_kernel(
    given, search, blocks, LEVEL: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr, LIST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if _way(search, row) == _BY_WINDOW:
        state, counts, top_p = search.states + row * _STATE, search.counts + 2 * row * BINS, tl.load(given.top_p + row)
        total, step = tl.load(state + 3), tl.load(state + 4)
        goal, rest = top_p * total, (1.0 - top_p) * total
        if LEVEL == 0:
            first, last, count = _window(counts, 0.0, step, 0.0, 0.0, rest / _BEYOND, goal, rest, BINS)
            too_many = count > LIST
            first = tl.where(_down_to(counts, last, BINS) <= LIST, 0, first)
            _store_window(state, first, last)
            tl.store(state + 7, tl.where(too_many, first, 0).to(tl.float64))
            tl.store(state + 8, tl.where(too_many, BINS / (last - first + 1).to(tl.float32), 1.0).to(tl.float64))
            tl.store(state + 9, too_many.to(tl.float64))
        elif tl.load(state + 9) > 0:
            outer, last = _load_window(state)
            above, below = _outside(search, 0, row, blocks, BLOCKS), _outside(search, 1, row, blocks, BLOCKS)
            start, finer = outer * step, step * (last - outer + 1) / BINS
            first, last, _ = _window(counts + BINS, start, finer, above, below, 0.0, goal, rest, BINS)
            _store_window(state, first, last)


# count     counts[b, LEVEL, i] = logits of row b in bin i: of all that count, or (LEVEL 1) of the window that LEVEL 0
#           has left, where more are in it than a list holds; outside[b, :, j] = weight above and below it, about
# shapes    logits float32 [B, V]; counts int32 [B, 2, BINS]; outside float32 [B, 2, blocks]
# grid      any: programs share the rows that have a window, SPAN blocks of BLOCK logits at a time
# bytes     4 * V for each such row; counts are added by integer atomics, in any order
# limits    V < 2**31
@triton.jit
def _count_kernel(
    given, search, V, blocks, LEVEL: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, BINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    spans = tl.cdiv(blocks, SPAN)
    for item in range(tl.program_id(0), open_rows(search.open, _BY_WINDOW) * spans, tl.num_programs(0)):
        row, start = open_row(search.open, _BY_WINDOW, item // spans), item % spans * SPAN
        highest, state, wanted = _highest(search, row), search.states + row * _STATE, True
        if LEVEL == 1:
            wanted = tl.load(state + 9) > 0
        if wanted:
            step = tl.load(state + 4)
            if LEVEL == 1:
                first, last = _load_window(state)
                zoom = tl.load(state + 8).to(tl.float32)
            counts, rate = tl.zeros([BINS], tl.int32), rate_about(tl.load(given.temperature + row))
            for part in tl.static_range(SPAN):  # unrolled: all loads are under way at once
                block = start + part
                ids = spread_ids(block, blocks, BLOCK)
                here = ids < tl.where(block < blocks, V, 0)
                x = tl.load(given.logits + row * V + ids, mask=here, other=float("-inf"))
                place = _place(x, highest, rate, step, BINS)
                if LEVEL == 0:
                    counts += tl.histogram(place.to(tl.int32), BINS)
                else:
                    inside = (place >= first) & (place < last + 1) & (x > float("-inf"))
                    bins = tl.minimum((tl.where(inside, place - first, 0.0) * zoom).to(tl.int32), BINS - 1)
                    counts += tl.histogram(bins, BINS, mask=inside)
                    w = tl.exp((x - highest) * rate)
                    at = 2 * row * blocks + block
                    above = tl.sum(tl.where(place < first, w, 0.0), axis=0)
                    below = tl.sum(tl.where(place >= last + 1, w, 0.0), axis=0)
                    tl.store(search.outside + at, above, mask=block < blocks)
                    tl.store(search.outside + at + blocks, below, mask=block < blocks)
            bins = tl.arange(0, BINS)
            some = (counts > 0) & ((bins < BINS - 1) | (LEVEL == 1))  # the last bin of all is what lies beyond them
            tl.atomic_add(search.counts + (2 * row + LEVEL) * BINS + bins, counts, mask=some, sem="relaxed")


@triton.jit
def _append(search, x, ids, hit, row, LIST: tl.constexpr):
    """Put the logits that are hit into the list of the row, in any order; those beyond LIST are counted alone."""
    hit = hit.to(tl.int32)
    count = tl.sum(hit, axis=0)
    if count > 0:
        ranked = (key_of(x) ^ _SIGN).to(tl.int32, bitcast=True)
        tally = search.tallies + row * _TALLY
        slot = tl.atomic_add(tally, count, sem="relaxed") + tl.cumsum(hit, axis=0) - 1
        tl.atomic_min(tally + 1, tl.min(tl.where(hit > 0, ranked, 0x7FFFFFFF), axis=0), sem="relaxed")
        tl.atomic_max(tally + 2, tl.max(tl.where(hit > 0, ranked, -0x80000000), axis=0), sem="relaxed")
        here = (hit > 0) & (slot < LIST)
        tl.store(search.logits + row * LIST + slot, x, mask=here)
        tl.store(search.ids + row * LIST + slot, ids, mask=here)


# gather    listed logits[b], ids[b] = those of row b that reach its bound, or that are in the window of top-p, with all
#           above it if there is room; tallies[b] = how many, the lowest and the highest key; weights[b, :, j] = sums
#           over block j of row b of all weights, and of those above the window
# shapes    logits float32 [B, V]; tallies int32 [B, 4]; logits float32, ids int32 [B, LIST]; weights float64 [B, 2,
#           blocks]
# grid      any: programs share the rows that have a window or a bound, up to SPAN blocks of BLOCK logits at a time
# bytes     4 * V for each row with a window; with a bound 4 * BLOCK for each block that reaches the bound
# limits    V < 2**31
@triton.jit
def _gather_kernel(
    given, search, V, blocks, BLOCK: tl.constexpr, SPAN: tl.constexpr, BINS: tl.constexpr, LIST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    windows, bounds = open_rows(search.open, _BY_WINDOW), open_rows(search.open, _BY_BOUND)
    span = tl.maximum(tl.minimum(tl.cdiv((windows + bounds) * blocks, tl.num_programs(0)), SPAN), 1)
    spans = tl.cdiv(blocks, span)
    windows *= spans
    for item in range(tl.program_id(0), windows + bounds * spans, tl.num_programs(0)):
        start = item % spans * span
        if item >= windows:
            row = open_row(search.open, _BY_BOUND, (item - windows) // spans)
            bound = tl.load(search.states + row * _STATE + 2).to(tl.int64).to(tl.uint32)
            for block in range(start, tl.minimum(start + span, blocks)):
                if key_of(tl.load(given.highest + row * blocks + block)) >= bound:
                    ids = spread_ids(block, blocks, BLOCK)
                    x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
                    _append(search, x, ids, key_of(x) >= bound, row, LIST)
        else:
            row = open_row(search.open, _BY_WINDOW, item // spans)
            highest = _highest(search, row)
            state, temperature = search.states + row * _STATE, tl.load(given.temperature + row)
            first, last = _load_window(state)
            step, outer, zoom = tl.load(state + 4), tl.load(state + 7).to(tl.float32), tl.load(state + 8).to(tl.float32)
            rate, rate32 = rate_of(temperature), rate_about(temperature)
            for block in range(start, tl.minimum(start + span, blocks)):
                ids = spread_ids(block, blocks, BLOCK)
                x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
                place = (_place(x, highest, rate32, step, BINS) - outer) * zoom
                w, at = weight_of(x, highest, rate), 2 * row * blocks + block
                tl.store(search.weights + at, tl.sum(w, axis=0))
                tl.store(search.weights + at + blocks, tl.sum(tl.where(place < first, w, 0.0), axis=0))
                _append(search, x, ids, (place >= first) & (place < last + 1) & (x > float("-inf")), row, LIST)


# -- the last rank ---------------------------------------------------------------------------------------------------


@triton.jit
def _summed(search, side, row, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    at = search.weights + (2 * row + side) * blocks + block
    return tl.sum(tl.load(at, mask=block < blocks, other=0.0), axis=0)


@triton.jit
def _sum_from(key, numbers, least):
    """Of what has at least this key."""
    return tl.sum(tl.where(key >= least, numbers, 0), axis=0)


@triton.jit
def _store_limit(limits_ptr, row, limit, last, ties):
    at = limits_ptr + row * 4
    tl.store(at, limit.to(tl.float64))
    tl.store(at + 1, last.to(tl.float64))
    tl.store(at + 2, ties)


@triton.jit
def load_token(limits_ptr, row):
    """−1: it is yet to be drawn."""
    return tl.load(limits_ptr + row * 4 + 3).to(tl.int32)


@triton.jit
def load_limit(limits_ptr, row):
    """Key, highest id and number of ids of the last rank."""
    at = limits_ptr + row * 4
    return tl.load(at).to(tl.int64).to(tl.uint32), tl.load(at + 1).to(tl.int32), tl.load(at + 2)


# limits    limits[b] = key of the last rank that top-k and then top-p keep, the highest id that is kept of those with
#           that key, and their number, in rows with a window or a bound. _search_kernel finds the id if it is −1 here,
#           and all three if the number is 0. Then the token of the row where the list holds all that is kept, else −1:
#           then it is to be drawn
# shapes    lists of _gather_kernel; limits float64 [B, 4]; open int32 [1 + B, 3]
# grid      (B,): a program holds the list of a row in registers. Weights are summed as whole numbers, so that the order
#           of the list does not matter: 50 bits behind the point of the highest one, as good as float64
# bytes     8 * LIST for each row
# limits    LIST <= 4096: sums of that many weights have 62 bits
@triton.jit
def _limits_kernel(given, search, limits_ptr, V, blocks, BLOCKS: tl.constexpr, LIST: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    way, highest = _way(search, row), _highest(search, row)
    limit, last = tl.full((), 0, tl.uint32), tl.full((), _FAR, tl.int32)
    ties, token = tl.full((), 0.0, tl.float64), tl.full((), -1, tl.int32)
    if way != DRAW:
        top_k, top_p, tally = tl.load(given.top_k + row), tl.load(given.top_p + row), search.tallies + row * _TALLY
        temperature, count = tl.load(given.temperature + row), tl.load(tally)
        rate, above = rate_of(temperature), tl.full((), 0.0, tl.float64)
        low = tl.load(tally + 1).to(tl.uint32, bitcast=True) ^ _SIGN
        high = tl.load(tally + 2).to(tl.uint32, bitcast=True) ^ _SIGN
        # Logits that are all equal stand in one place, however many they are.
        listed, same = count <= LIST, (low == high) & (count > LIST)
        slot = tl.arange(0, LIST)
        there = slot < tl.where(same, 1, tl.minimum(count, LIST))
        x = tl.load(search.logits + row * LIST + slot, mask=there, other=float("-inf"))
        ids = tl.load(search.ids + row * LIST + slot, mask=there, other=_FAR)
        key, numbers = tl.where(there, key_of(x), 0), tl.where(there, tl.where(same, count, 1), 0)
        found = (count > 0) & (listed | same)
        if found & cuts(top_k, V) & (count >= top_k):
            limit, top = low, high  # the highest key that k logits reach
            while limit < top:
                trial = _middle(limit, top)
                enough = _sum_from(key, numbers, trial) >= top_k
                limit, top = tl.where(enough, trial, limit), tl.where(enough, top, trial - 1)
            ties = (top_k - _sum_from(key, numbers, limit + 1)).to(tl.float64)
        if found & (top_p < 1):
            scale = tl.where(same, 1073741824.0, 1125899906842624.0)  # 2^30 of one weight, 2^50 of up to 4096
            unit = weight_of(value_of(high), highest, rate)
            shares = tl.where(unit > 0, weight_of(x, highest, rate) / unit, 0.0)
            w = tl.where(there, (shares * scale + 0.5).to(tl.int64) * numbers, 0)
            unit /= scale
            tied = tl.where(limit > 0, ties * weight_of(value_of(limit), highest, rate), 0.0)
            inside = _sum_from(key, w, tl.maximum(low, limit + 1)) * unit + tied
            total = inside
            if way == _BY_WINDOW:
                total, above = _summed(search, 0, row, blocks, BLOCKS), _summed(search, 1, row, blocks, BLOCKS)
            goal = tl.maximum(top_p * total, 1e-300)  # > 0: the highest is kept
            found = (above < goal) & (above + inside >= goal)
            cut, top = tl.maximum(low, limit), high  # the highest key such that what reaches it weighs enough
            while cut < top:
                trial = _middle(cut, top)
                enough = above + _sum_from(key, w, trial) * unit >= goal
                cut, top = tl.where(enough, trial, cut), tl.where(enough, top, trial - 1)
            few = _needed(goal, above + _sum_from(key, w, cut + 1) * unit, cut, highest, rate, V)
            ties = tl.where(cut == limit, tl.minimum(few, ties), few)
            limit = cut
        if found & (limit > 0):
            equal = key == limit
            if tl.sum(tl.where(equal, numbers, 0), axis=0) > ties:
                first = tl.full((), 0, tl.int32)
                last = first + V - 1  # the lowest id up to which there are that many
                while first < last:
                    trial = (first + last) // 2
                    enough = tl.sum((equal & (ids <= trial)).to(tl.int32), axis=0) >= ties
                    first, last = tl.where(enough, first, trial + 1), tl.where(enough, trial, last)
                last = tl.where(listed, last, -1)
        last, ties = tl.where(found, last, -1), tl.where(found, ties, 0.0)
        if found & listed & (above == 0):  # the highest is in the list, and so is all that is kept
            seed, position = tl.load(given.seed + row), tl.load(given.positions + row)
            kept, at = (key > limit) | (there & (key == limit) & (ids <= last)), row * LIST
            _, token = best_of(
                x, words_of(seed, position, ids), kept, search.logits + at, search.ids + at, 0, highest,
                rate_about(temperature), temperature, tl.load(given.min_p + row), seed, position,
            )  # fmt: skip
        _store_limit(limits_ptr, row, limit, last, ties)
        tl.store(limits_ptr + row * 4 + 3, token.to(tl.float64))
        if token < 0:
            _enlist(search, DRAW, row)


# -- in the whole row ------------------------------------------------------------------------------------------------


@triton.jit
def _descend(prefix, before, goal, bins, share):
    """One digit further: the prefix (digits found so far), what stands above it, and the goal, from what each value of
    the next digit has. share ≥ 0: the goal is that share of everything.
    """
    digits = tl.arange(0, _DIGIT)
    goal = tl.where(share >= 0, tl.maximum(share * tl.sum(bins, axis=0), 1e-300), goal)  # > 0: the highest is kept
    reached = before + tl.cumsum(bins, axis=0, reverse=True) >= goal
    digit = tl.max(tl.where(reached, digits, 0), axis=0)
    before += tl.sum(tl.where(digits > digit, bins, 0.0), axis=0)
    return (prefix << _BITS) + digit.to(tl.uint32), before, goal


@triton.jit
def _by_digit(x, prefix, shift, limit, highest, rate, CHUNK: tl.constexpr, WEIGHTED: tl.constexpr):
    """[16, CHUNK]: 1, or the weight, of each x above the limit and under the prefix, in the line of its next digit."""
    key = key_of(x)
    inside = (((key >> shift) >> _BITS) == prefix) & (key > limit)
    digit = tl.where(inside, ((key >> shift) & (_DIGIT - 1)).to(tl.int32), -1)
    value = weight_of(x, highest, rate) if WEIGHTED else tl.full([CHUNK], 1.0, tl.float64)
    return tl.where(digit[None, :] == tl.arange(0, _DIGIT)[:, None], value[None, :], 0.0)


@triton.jit
def _search(row_ptr, V, goal, share, limit, ties, highest, rate, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
    """The highest key that brings what reaches it to the goal, what stands above it, and the goal.

    Numbers of logits, or weights: of what top-k keeps, which is above its limit or one of the ties at it.
    """
    CHUNK: tl.constexpr = min(_CHUNK, BLOCK)
    prefix, before = tl.full((), 0, tl.uint32), tl.full((), 0.0, tl.float64)
    tied = tl.where(ties > 0, ties * weight_of(value_of(limit), highest, rate), 0.0)
    for digit in range(_DIGITS):
        shift = (_DIGITS - 1 - digit) * _BITS
        totals = tl.zeros([_DIGIT, CHUNK], tl.float64)
        for start in range(0, V, BLOCK):
            for part in tl.static_range(BLOCK // CHUNK):  # unrolled: all loads are under way at once
                ids = start + part * CHUNK + tl.arange(0, CHUNK)
                x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
                totals += _by_digit(x, prefix, shift, limit, highest, rate, CHUNK, WEIGHTED)
        bins = tl.sum(totals, axis=1)
        if WEIGHTED:
            here = (limit >> shift) == (prefix << _BITS) + tl.arange(0, _DIGIT).to(tl.uint32)
            bins += tl.where(here, tied, 0.0)
        prefix, before, goal = _descend(prefix, before, goal, bins, tl.where(digit == 0, share, -1.0))
    return prefix, before, goal


@triton.jit
def _last_id(row_ptr, V, limit, ties, BLOCK: tl.constexpr):
    """The id up to which so many ids have the key of the limit; the last one if there are fewer."""
    last, left, start = tl.full((), _FAR, tl.int32), ties.to(tl.int32), tl.full((), 0, tl.int32)
    while (start < V) & (left > 0):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
        equal = ((key_of(x) == limit) & (ids < V)).to(tl.int32)
        chosen = (equal > 0) & (tl.cumsum(equal, axis=0) == left)
        last = tl.min(tl.where(chosen, ids, last), axis=0)
        left -= tl.sum(equal, axis=0)
        start += BLOCK
    return last


# search    limits[b] = what _limits_kernel has left open of it: the key of the last rank digit by digit, as a word in a
#           dictionary, and the highest id of those that are kept with it
# shapes    logits float32 [B, V]; limits float64 [B, 4]
# grid      (B,): a program goes through a row
# bytes     8 * 4 * V for each of top-k and top-p, and 4 * V for the id, in rows whose list does not say
# limits    V < 2**31
@triton.jit
def _search_kernel(given, search, limits_ptr, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    limit, last, ties = load_limit(limits_ptr, row)
    if last < 0:
        highest = _highest(search, row)
        top_k, top_p, row_ptr = tl.load(given.top_k + row), tl.load(given.top_p + row), given.logits + row * V
        rate = rate_of(tl.load(given.temperature + row))
        if ties == 0:
            limit = tl.full((), 0, tl.uint32)
            if cuts(top_k, V):
                k = top_k.to(tl.float64)
                found, before, k = _search(row_ptr, V, k, -1.0, limit, ties, highest, rate, BLOCK, False)
                limit, ties = found, k - before
            if top_p < 1:
                goal = tl.full((), 0.0, tl.float64)
                found, before, goal = _search(row_ptr, V, goal, top_p, limit, ties, highest, rate, BLOCK, True)
                few = _needed(goal, before, found, highest, rate, V)
                ties = tl.where(found == limit, tl.minimum(few, ties), few)
                limit = found
        _store_limit(limits_ptr, row, limit, _last_id(row_ptr, V, limit, ties, BLOCK), ties)


def fits_list(V: int) -> bool:
    """Whether a list has room for a whole row."""
    return V <= SAMPLE_LIST


def _span(rows: int) -> int:
    """Blocks of a row that a program takes, where so many rows are to be gone through."""
    return next(span for most, span in SAMPLE_SPANS if most >= rows)


def find_limits(
    given: Given, parts: Parts, full: bool, sizes: dict[str, int], drawn: Drawn | None = None
) -> torch.Tensor:
    """Limits float64 [B, 4] of all rows, for `load_limit` and `load_token`. full: some may have top-p and no top-k;
    drawn, then: tokens that may be the ones. None: every token is drawn from what is kept.
    """
    V, (B, blocks) = given.logits.shape[1], given.highest.shape
    assert SAMPLE_LIST <= 4096
    listed, pdl, padded = fits_list(V), pdl_options(), sizes["BLOCKS"]

    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=given.logits.device)

    search = Search(
        new(torch.float64, B, _STATE.value), new(torch.int32, B, 2, SAMPLE_BINS), new(torch.float32, B, 2, blocks),
        new(torch.float64, B, 2, blocks), new(torch.int32, B, _TALLY.value), new(torch.float32, B, SAMPLE_LIST),
        new(torch.int32, B, SAMPLE_LIST), new(torch.float32, B, blocks), parts.open,
    )  # fmt: skip
    limits, span = new(torch.float64, B, 4), _span(B)
    if drawn is not None:
        _before_kernel[B, triton.cdiv(blocks, span)](
            given, drawn, search.before, V, blocks, **sizes, SPAN=span, **pdl
        )  # fmt: skip
    counted = span if drawn is None else _span(triton.cdiv(B, SAMPLE_DECIDED))
    counting, listing = (n * multiprocessors(given.logits) for n in SAMPLE_OPEN_PROGRAMS[:2])
    counting, listing = min(B * triton.cdiv(blocks, counted), counting), min(B * blocks, listing)
    of_row = {"num_warps": SAMPLE_WARPS, **pdl}
    of_blocks = {"BLOCK": sizes["BLOCK"], "BINS": SAMPLE_BINS, **pdl}
    of_bins = {"BLOCKS": padded, "BINS": SAMPLE_BINS, "LIST": SAMPLE_LIST, "num_warps": SAMPLE_BIN_WARPS, **pdl}
    _rows_kernel[(B,)](
        given, parts, drawn, search, limits, V, blocks, BLOCKS=padded, BINS=SAMPLE_BINS, LISTED=listed, **of_row
    )
    if full and not listed:
        for level in range(2):
            _count_kernel[(counting,)](given, search, V, blocks, LEVEL=level, SPAN=counted, **of_blocks)
            _window_kernel[(B,)](given, search, blocks, LEVEL=level, **of_bins)
    _gather_kernel[(listing,)](
        given, search, V, blocks, SPAN=span, LIST=SAMPLE_LIST, **of_blocks, num_warps=SAMPLE_LIST_WARPS,
        maxnreg=SAMPLE_REGISTERS,
    )  # fmt: skip
    _limits_kernel[(B,)](
        given, search, limits, V, blocks, BLOCKS=padded, LIST=SAMPLE_LIST, maxnreg=SAMPLE_REGISTERS, **of_row
    )  # fmt: skip
    _search_kernel[(B,)](given, search, limits, V, BLOCK=sizes["BLOCK"], **of_row)
    return limits
