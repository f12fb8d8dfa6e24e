"""Sampling on CUDA: maxima of blocks, the limits of top-k and top-p (_limits.py), sums of blocks, and the draw."""

import functools

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._limits import (
    Given,
    find_by_digits,
    find_in_lists,
    highest_of,
    is_finite,
    key_of,
    limit_by_digits,
    rate_of,
    spread_ids,
    value_of,
    weight_of,
)
from penstock.backends.cuda._tuning import SAMPLE_BLOCK, SAMPLE_PARTS
from penstock.ops.op import kernel

_FAR = tl.constexpr(2**31 - 1)  # beyond every id


# maxima    highest[b, j] = max of block j of row b, +inf if it holds NaN; first[b, j] = the lowest id that has it
# shapes    logits float32 [B, V]; highest float32, first int32 [B, blocks]
# grid      (B, blocks): a program has BLOCK logits
# bytes     4 * B * V
# limits    V < 2**31
@triton.jit
def _maxima_kernel(logits_ptr, highest_ptr, first_ptr, V, BLOCK: tl.constexpr):
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = spread_ids(block, blocks, BLOCK)
    x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
    x = tl.where(x != x, float("inf"), x)
    highest = tl.max(x, axis=0)
    tl.store(highest_ptr + row * blocks + block, highest)
    tl.store(first_ptr + row * blocks + block, tl.min(tl.where(x == highest, ids, _FAR), axis=0))


# sums      sums[b, j] = sum of the kept weights of block j above the limit of row b; counts[b, j] = ids at the limit
# shapes    logits float32 [B, V]; sums float64, counts int32 [B, blocks]; limits float64 [B, 2]: key, number of ids
# grid      (B, blocks): a program has BLOCK logits; in MODE "full" the first block's writes the limit
# bytes     4 * B * V; MODE "full": 128 * blocks for each program (from L2)
# limits    as _digits_kernel in MODE "full"
@triton.jit
def _sums_kernel(
    given, table_ptr, states_ptr, limits_ptr, sums_ptr, counts_ptr, V, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
    temperature, position = tl.load(given.temperature + row), tl.load(given.positions + row)
    highest = highest_of(given.highest, row, blocks, BLOCKS)
    if (temperature > 0) & (position >= 0) & is_finite(highest):
        rate, at = rate_of(temperature), row * blocks + block
        limit = tl.full((), 0, tl.uint32)
        if MODE == "top_k":
            limit = tl.load(limits_ptr + row * 2).to(tl.int64).to(tl.uint32)
        if MODE == "full":
            top_k, top_p = tl.load(given.top_k + row), tl.load(given.top_p + row)
            limit, ties = limit_by_digits(states_ptr, table_ptr, row, blocks, top_k, top_p, highest, rate, V, BLOCKS)
            if block == 0:
                tl.store(limits_ptr + row * 2, limit.to(tl.float64))
                tl.store(limits_ptr + row * 2 + 1, ties)
        key, total, count = key_of(x), tl.full((), 0.0, tl.float64), 0
        if tl.max((key >= limit).to(tl.int32), axis=0) > 0:  # else nothing is kept: no need for 2048 exponentials
            w = weight_of(x, highest, rate)
            total = tl.sum(tl.where((key > limit) & (w >= tl.load(given.min_p + row)), w, 0.0), axis=0)
            count = tl.sum((key == limit).to(tl.int32), axis=0)
        tl.store(sums_ptr + at, total)
        if MODE != "plain":
            tl.store(counts_ptr + at, count)


# draw      token[b] = the first kept id whose running sum of weights exceeds u * sum(sums[b]), u = 53 bits of
#           Philox(seed, position); temperature 0: the lowest id of the highest logit; −1 and −2: ops.sample_tokens
# shapes    logits float32 [B, V]; highest float32, first int32, sums float64, counts int32 [B, blocks]; token int32 [B]
# grid      (B,): a program finds the block, then the id in it; MODE "greedy" reads highest and first alone
# bytes     4 * BLOCK + 20 * blocks for each row
# limits    none
@triton.jit
def _draw_kernel(
    given, limits_ptr, sums_ptr, counts_ptr, token_ptr, V, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    there, at = block < blocks, row * blocks + block
    maxima = tl.load(given.highest + at, mask=there, other=float("-inf"))
    highest = tl.max(maxima, axis=0)
    token = tl.min(tl.where(maxima == highest, tl.load(given.first + at, mask=there, other=_FAR), _FAR), axis=0)
    position = tl.load(given.positions + row)
    if MODE != "greedy":
        temperature = tl.load(given.temperature + row)
        if (temperature > 0) & (position >= 0) & is_finite(highest):
            rate, min_p = rate_of(temperature), tl.load(given.min_p + row)
            sums = tl.load(sums_ptr + at, mask=there, other=0.0)
            if MODE != "plain":
                limit = tl.load(limits_ptr + row * 2).to(tl.int64).to(tl.uint32)
                ties = tl.load(limits_ptr + row * 2 + 1)
                counts = tl.load(counts_ptr + at, mask=there, other=0)
                left = ties.to(tl.int32) - (tl.cumsum(counts, axis=0) - counts)
                taken = tl.maximum(tl.minimum(left, counts), 0)
                if ties > 0:
                    each = weight_of(value_of(limit), highest, rate)
                    sums += tl.where(each >= min_p, taken * each, 0.0)

            c0 = position.to(tl.uint32)
            low, high, _, _ = tl.philox(tl.load(given.seed + row), c0, c0 * 0, c0 * 0, c0 * 0)
            u = (((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11).to(tl.float64) * (1.0 / (1 << 53))
            goal = u * tl.sum(sums, axis=0)
            chosen = tl.min(tl.where(tl.cumsum(sums, axis=0) > goal, block, BLOCKS), axis=0)
            chosen = tl.minimum(chosen, tl.max(tl.where(sums > 0, block, 0), axis=0))

            ids = chosen * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
            w = weight_of(x, highest, rate)
            kept = w >= min_p
            if MODE != "plain":
                key = key_of(x)
                tied = (key == limit).to(tl.int32)
                few = tl.sum(tl.where(block == chosen, taken, 0), axis=0)
                kept &= (key > limit) | ((tied > 0) & (tl.cumsum(tied, axis=0) <= few))
            w = tl.where(kept, w, 0.0)
            running = tl.sum(tl.where(block < chosen, sums, 0.0), axis=0) + tl.cumsum(w, axis=0)
            token = tl.min(tl.where((running > goal) & (w > 0), ids, _FAR), axis=0)
            token = tl.minimum(token, tl.max(tl.where(w > 0, ids, 0), axis=0))
    token = tl.where(is_finite(highest), token, -2)
    tl.store(token_ptr + row, tl.where(position >= 0, token, -1))


@kernel(ops.sample_tokens, device="cuda")
def sample_tokens(logits, positions, temperature, top_k, top_p, min_p, seed, mode, *, out):
    B, V = logits.shape
    if B == 0:
        return
    assert logits.is_contiguous()
    fewest, most = SAMPLE_BLOCK
    block = min(most, max(fewest, triton.next_power_of_2(triton.cdiv(V, SAMPLE_PARTS))))
    blocks = triton.cdiv(V, block)
    grid, sizes = (B, blocks), {"BLOCKS": triton.next_power_of_2(blocks), "BLOCK": block}
    new = functools.partial(torch.empty, device=logits.device)
    highest, first = new(grid, dtype=torch.float32), new(grid, dtype=torch.int32)
    given = Given(logits, highest, first, positions, temperature, top_k, top_p, min_p, seed)
    sums = counts = limits = states = table = None
    _maxima_kernel[grid](logits, highest, first, V, BLOCK=block)
    if mode != "greedy":
        sums = new(grid, dtype=torch.float64)
        if mode != "plain":
            counts, limits = new(grid, dtype=torch.int32), new((B, 2), dtype=torch.float64)
        if mode == "top_k":
            find_in_lists(given, limits, sizes)
        if mode == "full":
            states, table = find_by_digits(given, sizes)
        _sums_kernel[grid](given, table, states, limits, sums, counts, V, **sizes, MODE=mode)
    _draw_kernel[(B,)](given, limits, sums, counts, out, V, blocks, **sizes, MODE=mode)
