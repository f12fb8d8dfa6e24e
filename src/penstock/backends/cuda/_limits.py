"""Where top-k and top-p cut: the last rank that they keep, as a key and a number of ids that have it, the lowest ones.

Logits are ranked by `key_of`, a 32-bit integer in their order. Two ways to the key of the last rank:

* `find_by_digits`, any top-k and top-p: like a word in a dictionary. Each pass counts (top-k) or sums the weights of
  (top-p) the logits that share the digits found so far, by their next digit and by block; the next pass adds up the
  blocks and takes the digit in which the goal is reached. Rows without top-k or top-p leave at once.
* `find_in_lists`, a low top-k in every row: the k-th highest of the block maxima is a bound that k logits reach and few
  others do. Those are listed, and one program finds the key among them bit by bit.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl

import penstock.backends.cuda._launch  # noqa: F401  (sets Triton up)
from penstock.backends.cuda._tuning import SAMPLE_CHUNK, SAMPLE_WARPS

_GROUP = tl.constexpr(32)  # neighbours that a block has together
_LIST = tl.constexpr(32)  # logits of a block that _limits_kernel can hold
_CHUNK = tl.constexpr(SAMPLE_CHUNK)  # logits at a time of a program of _digits_kernel, 16 sums of each in registers
_BITS = tl.constexpr(4)  # of a digit
_DIGITS = tl.constexpr(32 // _BITS.value)  # of a key
_BINS = tl.constexpr(1 << _BITS.value)
_PACK = tl.constexpr(3)  # digits after which few logits are left
_STATE = tl.constexpr(8)  # numbers of a row that a pass leaves for the next: prefix, before, goal, limit, ties
_LOWEST = tl.constexpr(0x00800000)  # the key of the lowest finite number

# What every row is drawn from: its logits, the maxima of their blocks and where they are, its own sampling.
Given = namedtuple("Given", "logits highest first positions temperature top_k top_p min_p seed")
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
def weight_of(x, highest, rate):
    """exp((x − highest) · rate) in float64. The difference comes first: it cannot overflow."""
    return tl.exp((x.to(tl.float64) - highest.to(tl.float64)) * rate)


@triton.jit
def rate_of(temperature):
    """1 / temperature, and where that overflows a number that sends all but the highest to weight 0 as well."""
    return tl.minimum(1.0 / temperature, 1.7e308)


@triton.jit
def highest_of(maxima_ptr, row, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return tl.max(tl.load(maxima_ptr + row * blocks + block, mask=block < blocks, other=float("-inf")), axis=0)


@triton.jit
def spread_ids(block, blocks, BLOCK: tl.constexpr):
    """The ids of a block where their order does not matter: groups from all over the row, as high logits have
    neighbours.
    """
    i = tl.arange(0, BLOCK)
    return ((i // _GROUP) * blocks + block) * _GROUP + i % _GROUP


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _cuts(top_k, V):
    return (top_k > 0) & (top_k < V)


@triton.jit
def _needed(goal, before, limit, highest, rate, V):
    """How many ids at the limit bring the weight before it to the goal, at least 1."""
    each = weight_of(value_of(limit), highest, rate)
    few = tl.where(each > 0, tl.ceil((goal - before) / each), 1.0)
    return tl.maximum(tl.minimum(few, V), 1.0)


# -- by digits -------------------------------------------------------------------------------------------------------


@triton.jit
def _table(table_ptr, row, blocks, BLOCKS: tl.constexpr):
    """What a pass found for each digit, [BLOCKS, 16]."""
    block, digits = tl.arange(0, BLOCKS), tl.arange(0, _BINS)
    at = (row * blocks + block)[:, None] * _BINS + digits[None, :]
    return tl.load(table_ptr + at, mask=(block < blocks)[:, None], other=0.0)


@triton.jit
def _state(states_ptr, step, row):
    """prefix (digits found so far), before (what stands above them), goal; limit and ties of top-k."""
    at = states_ptr + (step * tl.num_programs(0) + row) * _STATE
    prefix, limit = tl.load(at).to(tl.int64).to(tl.uint32), tl.load(at + 3).to(tl.int64).to(tl.uint32)
    return prefix, tl.load(at + 1), tl.load(at + 2), limit, tl.load(at + 4)


@triton.jit
def _descend(prefix, before, goal, table, extra, share):
    """One digit further: prefix, before and goal after the pass that left this table.

    `extra` [16] comes to what the table holds. share ≥ 0: the goal is that share of everything.
    """
    digits = tl.arange(0, _BINS)
    bins = tl.sum(table, axis=0) + extra
    goal = tl.where(share >= 0, tl.maximum(share * tl.sum(bins, axis=0), 1e-300), goal)  # > 0: the highest is kept
    reached = before + tl.cumsum(bins, axis=0, reverse=True) >= goal
    digit = tl.max(tl.where(reached, digits, 0), axis=0)
    before += tl.sum(tl.where(digits > digit, bins, 0.0), axis=0)
    return (prefix << _BITS) + digit.to(tl.uint32), before, goal


@triton.jit
def _at_limit(prefix, shift, limit, ties, highest, rate):
    """By digit, the weight of the ids that top-k keeps at its limit, which tables leave out."""
    here = (limit >> shift) == (prefix << _BITS) + tl.arange(0, _BINS).to(tl.uint32)
    weight = tl.where(ties > 0, ties * weight_of(value_of(limit), highest, rate), 0.0)
    return tl.where(here, weight, 0.0)


@triton.jit
def _by_digit(x, prefix, shift, limit, highest, rate, CHUNK: tl.constexpr, WEIGHTED: tl.constexpr):
    """[16, CHUNK]: 1, or the weight, of each x above the limit and under the prefix, in the line of its next digit."""
    key = key_of(x)
    inside = (((key >> shift) >> _BITS) == prefix) & (key > limit)
    digit = tl.where(inside, ((key >> shift) & (_BINS - 1)).to(tl.int32), -1)
    value = weight_of(x, highest, rate) if WEIGHTED else tl.full([CHUNK], 1.0, tl.float32)
    return tl.where(digit[None, :] == tl.arange(0, _BINS)[:, None], value[None, :], 0.0)


# digits    table[b, j, d] = number (WEIGHTED: sum of weights) of the logits in block j whose digits so far are those of
#           the limit of row b and whose next digit is d; before that, the digit of the pass before from its table.
#           WEIGHTED leaves out what top-k does: ids below its limit, and those at the limit, which `_at_limit` adds
# shapes    logits float32 [B, V]; tables float64 [B, blocks, 16]; states float64 [2 * 8, B, 8], one of each step; packs
#           float32 [B, blocks, BLOCK], counts int32 [B, blocks]: the logits left after PACK digits, or after top-k
# grid      (B, blocks): a program has BLOCK logits, CHUNK at a time; the first block's writes the state
# bytes     4 * B * V up to PACK, then 4 for each logit left; and 128 * blocks for each program (from L2)
# limits    V < 2**31; blocks up to about 256, as every program adds all of them up
@triton.jit(do_not_specialize=["step"])
def _digits_kernel(
    given, before_ptr, table_ptr, states_ptr, packs_ptr, counts_ptr, V, step, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = min(_CHUNK, BLOCK)
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    # All that decides what to do is loaded before any of it is looked at: one latency instead of four.
    temperature, top_k, top_p = tl.load(given.temperature + row), tl.load(given.top_k + row), tl.load(given.top_p + row)
    position, own = tl.load(given.positions + row), key_of(tl.load(given.highest + row * blocks + block))
    if WEIGHTED or not FIRST:
        prefix, before, goal, limit, ties = _state(states_ptr, step - 1, row)
        table = _table(before_ptr, row, blocks, BLOCKS)
    highest = highest_of(given.highest, row, blocks, BLOCKS)
    cut = _cuts(top_k, V)
    if (top_p < 1 if WEIGHTED else cut) & (temperature > 0) & (position >= 0) & is_finite(highest):
        rate = rate_of(temperature)
        shift = (_DIGITS - 1 - step % _DIGITS) * _BITS
        if not FIRST:
            share = tl.where(step == _DIGITS + 1, top_p, -1.0)
            extra = _at_limit(prefix, shift + _BITS, limit, ties, highest, rate) if WEIGHTED else 0.0
            prefix, before, goal = _descend(prefix, before, goal, table, extra, share)
        else:
            limit, ties = tl.full((), 0, tl.uint32), tl.full((), 0.0, tl.float64)
            if WEIGHTED:
                found, above, k = _descend(prefix, before, goal, table, 0.0, -1.0)
                limit, ties = tl.where(cut, found, limit), tl.where(cut, k - above, ties)
            prefix, before, goal = tl.full((), 0, tl.uint32), tl.full((), 0.0, tl.float64), top_k.to(tl.float64)
        if block == 0:
            state_ptr = states_ptr + (step * tl.num_programs(0) + row) * _STATE
            tl.store(state_ptr, prefix.to(tl.float64))
            tl.store(state_ptr + 1, before)
            tl.store(state_ptr + 2, goal)
            tl.store(state_ptr + 3, limit.to(tl.float64))
            tl.store(state_ptr + 4, ties)
        totals = tl.zeros([_BINS, CHUNK], tl.float64 if WEIGHTED else tl.float32)
        pack = tl.where(cut, 0, _PACK) if WEIGHTED else _PACK
        done, packs_ptr = step % _DIGITS, packs_ptr + (row * blocks + block) * BLOCK
        counts_ptr += row * blocks + block
        if done < pack:
            if ((own >> shift) >> _BITS) >= prefix:
                for part in tl.static_range(BLOCK // CHUNK):  # unrolled: all loads are under way at once
                    ids = spread_ids(block + part * (CHUNK // _GROUP) * blocks, blocks, CHUNK)
                    x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
                    totals += _by_digit(x, prefix, shift, limit, highest, rate, CHUNK, WEIGHTED)
        else:
            count = 0
            if done == pack:
                ids = spread_ids(block, blocks, BLOCK)
                x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
                key = key_of(x)
                hit = ((((key >> shift) >> _BITS) == prefix) & (key > limit)).to(tl.int32)
                count = tl.sum(hit, axis=0)
                tl.store(packs_ptr + tl.cumsum(hit, axis=0) - 1, x, mask=hit > 0)
                tl.store(counts_ptr, count)
                tl.debug_barrier()  # what one thread stored another one loads below
            else:
                count = tl.load(counts_ptr)
            for start in range(0, count, CHUNK):
                slot = start + tl.arange(0, CHUNK)
                x = tl.load(packs_ptr + slot, mask=slot < count, other=float("-inf"))
                totals += _by_digit(x, prefix, shift, limit, highest, rate, CHUNK, WEIGHTED)
        bins = tl.sum(totals, axis=1).to(tl.float64)
        tl.store(table_ptr + (row * blocks + block) * _BINS + tl.arange(0, _BINS), bins)


@triton.jit
def limit_by_digits(states_ptr, table_ptr, row, blocks, top_k, top_p, highest, rate, V, BLOCKS: tl.constexpr):
    """Key and number of ids of the last rank, from what the last pass left; 0 and 0 if the row keeps all."""
    by_sum = top_p < 1
    prefix, before, goal, limit, ties = _state(states_ptr, tl.where(by_sum, 2 * _DIGITS, _DIGITS) - 1, row)
    table = _table(table_ptr, row, blocks, BLOCKS)
    if by_sum:
        cut, extra = limit, _at_limit(prefix, 0, limit, ties, highest, rate)
        limit, before, goal = _descend(prefix, before, goal, table, extra, -1.0)
        few = _needed(goal, before, limit, highest, rate, V)
        ties = tl.where(limit == cut, tl.minimum(few, ties), few)
    elif _cuts(top_k, V):
        limit, before, goal = _descend(prefix, before, goal, table, 0.0, -1.0)
        ties = goal - before
    else:
        limit, ties = tl.full((), 0, tl.uint32), tl.full((), 0.0, tl.float64)
    return limit, ties


def find_by_digits(given: Given, sizes: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """States and the last table, of which `limit_by_digits` makes the limit of a row."""
    logits = given.logits
    digits, grid = _DIGITS.value, given.highest.shape
    states = torch.empty((2 * digits, grid[0], _STATE.value), dtype=torch.float64, device=logits.device)
    packs = torch.empty((*grid, sizes["BLOCK"]), dtype=torch.float32, device=logits.device)
    counts = torch.empty(grid, dtype=torch.int32, device=logits.device)
    other, table = torch.empty((2, *grid, _BINS.value), dtype=torch.float64, device=logits.device)
    for step in range(2 * digits):
        other, table = table, other
        _digits_kernel[tuple(grid)](
            given, other, table, states, packs, counts, logits.shape[1], step, **sizes, WEIGHTED=step >= digits,
            FIRST=step % digits == 0, num_warps=SAMPLE_WARPS,
        )  # fmt: skip
    return states, table


# -- in lists --------------------------------------------------------------------------------------------------------


# gather    lists[b, j, :] = the logits of block j that reach a bound which k logits reach: the k-th highest of the
#           block maxima. counts[b, j]: how many; those beyond LIST are counted, not listed
# shapes    logits float32 [B, V]; highest float32, counts int32 [B, blocks]; lists float32 [B, blocks, LIST]
# grid      (B, blocks): a program has BLOCK logits
# bytes     4 * BLOCK for each block that has any: k of them
# limits    blocks up to about 256, as every program compares all pairs of them
@triton.jit
def _gather_kernel(
    logits_ptr, highest_ptr, top_k_ptr, lists_ptr, counts_ptr, V, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    there = tl.arange(0, BLOCKS) < blocks
    maxima = tl.load(highest_ptr + row * blocks + tl.arange(0, BLOCKS), mask=there, other=float("-inf"))
    own, top_k = tl.load(highest_ptr + row * blocks + block), tl.load(top_k_ptr + row)
    reached = tl.sum((maxima[None, :] >= maxima[:, None]).to(tl.int32), axis=1)
    bound = tl.max(tl.where(reached >= tl.where(top_k > blocks, BLOCKS + 1, top_k), maxima, float("-inf")), axis=0)
    count = 0
    if own >= bound:
        ids = spread_ids(block, blocks, BLOCK)
        x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
        hit = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
        count = tl.sum(hit, axis=0)
        slot = tl.cumsum(hit, axis=0) - 1
        tl.store(lists_ptr + (row * blocks + block) * _LIST + slot, x, mask=(hit > 0) & (slot < _LIST))
    tl.store(counts_ptr + row * blocks + block, count)


@triton.jit
def _tally(key, value, whole, row_ptr, V, above, least, highest, rate, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
    """Number, or weight, of the logits whose keys are > above and ≥ least: of a list, or of the whole row."""
    if whole:
        totals = tl.zeros([BLOCK], tl.float64)
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
            each = key_of(x)
            inside = (each > above) & (each >= least)
            totals += tl.where(inside, weight_of(x, highest, rate) if WEIGHTED else 1.0, 0.0)
        total = tl.sum(totals, axis=0)
    else:
        inside = (key > above) & (key >= least)
        total = tl.sum(tl.where(inside, value, 0), axis=0).to(tl.float64)
    return total


# limits    limits[b] = key and number of ids of the last rank that top-k and then top-p keep, by bisection of its bits
# shapes    logits float32 [B, V]; lists, counts of _gather_kernel; limits float64 [B, 2]
# grid      (B,): a program holds the listed logits of a row in registers
# bytes     4 * blocks * LIST for each row; 64 * 4 * V where a block has more than that (a great many equal logits)
# limits    blocks up to about 256
@triton.jit
def _limits_kernel(given, lists_ptr, counts_ptr, limits_ptr, V, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(given.temperature + row), tl.load(given.top_k + row), tl.load(given.top_p + row)
    slot = tl.arange(0, BLOCKS * _LIST)
    at = row * blocks + slot // _LIST
    counts = tl.load(counts_ptr + at, mask=slot // _LIST < blocks, other=0)
    x = tl.load(lists_ptr + row * blocks * _LIST + slot, mask=slot % _LIST < counts, other=float("-inf"))
    position, highest = tl.load(given.positions + row), highest_of(given.highest, row, blocks, BLOCKS)
    if (temperature > 0) & (position >= 0) & is_finite(highest):
        rate, row_ptr = rate_of(temperature), given.logits + row * V
        whole = tl.max(counts, axis=0) > _LIST
        key, w = key_of(x), weight_of(x, highest, rate)

        none, last = tl.full((), 0, tl.uint32), tl.full((), 0x80000000, tl.uint32)
        limit = none  # the highest key that k logits reach
        for bit in range(32):
            trial = limit | (last >> bit)
            count = _tally(key, 1, whole, row_ptr, V, none, trial, highest, rate, BLOCK, False)
            limit = tl.where(count >= top_k, trial, limit)
        limit = tl.where(limit >= _LOWEST, limit, none)  # none: there are fewer than k
        ties = top_k - _tally(key, 1, whole, row_ptr, V, limit, none, highest, rate, BLOCK, False)
        ties = tl.where(limit > 0, ties, 0.0)

        if top_p < 1:
            tied = tl.where(limit > 0, ties * weight_of(value_of(limit), highest, rate), 0.0)
            total = _tally(key, w, whole, row_ptr, V, limit, none, highest, rate, BLOCK, True)
            goal = tl.maximum(top_p * (total + tied), 1e-300)
            cut = none  # the highest key such that what reaches it weighs as much as the goal
            for bit in range(32):
                trial = cut | (last >> bit)
                total = _tally(key, w, whole, row_ptr, V, limit, trial, highest, rate, BLOCK, True)
                cut = tl.where(total + tl.where(trial <= limit, tied, 0.0) >= goal, trial, cut)
            before = _tally(key, w, whole, row_ptr, V, tl.maximum(limit, cut), none, highest, rate, BLOCK, True)
            few = _needed(goal, before, cut, highest, rate, V)
            ties = tl.where(cut == limit, tl.minimum(few, ties), few)
            limit = cut
        tl.store(limits_ptr + row * 2, limit.to(tl.float64))
        tl.store(limits_ptr + row * 2 + 1, ties)


def find_in_lists(given: Given, limits: torch.Tensor, sizes: dict[str, int]) -> None:
    """`limits` float64 [B, 2]: key and number of ids of the last rank of each row that draws."""
    logits, V, (B, blocks) = given.logits, given.logits.shape[1], given.highest.shape
    lists = torch.empty((B, blocks, _LIST.value), dtype=torch.float32, device=logits.device)
    counts = torch.empty((B, blocks), dtype=torch.int32, device=logits.device)
    _gather_kernel[(B, blocks)](logits, given.highest, given.top_k, lists, counts, V, **sizes)
    _limits_kernel[(B,)](given, lists, counts, limits, V, blocks, **sizes, num_warps=SAMPLE_WARPS)
