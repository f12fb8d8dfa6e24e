"""Sampling on CUDA: edits, maxima of blocks, limits of top-k and top-p (_limits.py), the best of blocks, the draw."""

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
)
from penstock.backends.cuda._tuning import SAMPLE_BLOCK, SAMPLE_PARTS
from penstock.ops.op import kernel

_FAR = tl.constexpr(2**31 - 1)  # beyond every id
_SLACK = tl.constexpr(1e-3)  # more than float32 is off in sums that can win


@triton.jit
def _penalized(x, ids, slot, counts_ptr, bias_ptr, penalties_ptr, V, BLOCK: tl.constexpr):
    if slot >= 0:
        at = slot * V + ids
        x += tl.load(bias_ptr + at, mask=ids < V, other=0.0)
        count = tl.load(counts_ptr + at, mask=ids < V, other=0)
        r = tl.full([BLOCK], 1.0, tl.float32) * tl.load(penalties_ptr + slot * 3).to(tl.float32)
        presence, frequency = tl.load(penalties_ptr + slot * 3 + 1), tl.load(penalties_ptr + slot * 3 + 2)
        x = tl.where((count & 1) != 0, tl.where(x > 0, tl.div_rn(x, r), x * r), x)
        n = count >> 1
        x = tl.where(n > 0, x - (frequency * n + presence).to(tl.float32), x)
    return x


@triton.jit
def _allowed(x, ids, masked, masks_ptr, V, words):
    if masked >= 0:
        word = tl.load(masks_ptr + masked * words + ids // 32, mask=ids < V, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    return x


# edit      edited = logits + bias, penalized by counts, −inf where the mask has no bit; logits where a row has no edits
# shapes    logits, edited float32 [B, V], the same array if IN_PLACE; slots, masked int32 [B]; counts int32, bias
#           float32 [S, V]; penalties float64 [S, 3]; masks int32 [M, words]
# grid      (B, blocks): a program has BLOCK logits
# bytes     8 * V for a row, none for one without edits if IN_PLACE; 8 * V more with a slot, V / 8 with a mask
# limits    V < 2**31
@triton.jit
def _edit_kernel(
    logits_ptr, edited_ptr, positions_ptr, slots_ptr, counts_ptr, bias_ptr, penalties_ptr, masked_ptr, masks_ptr, V,
    words, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, masked = tl.full((), -1, tl.int64), tl.full((), -1, tl.int64)
    if tl.load(positions_ptr + row) >= 0:
        if slots_ptr is not None:
            slot = tl.load(slots_ptr + row).to(tl.int64)
        if masked_ptr is not None:
            masked = tl.load(masked_ptr + row).to(tl.int64)
    if (slot >= 0) | (masked >= 0) | (not IN_PLACE):
        here = ids < V
        x = tl.load(logits_ptr + row * V + ids, mask=here, other=0.0)
        if slots_ptr is not None:
            x = _penalized(x, ids, slot, counts_ptr, bias_ptr, penalties_ptr, V, BLOCK)
        if masked_ptr is not None:
            x = _allowed(x, ids, masked, masks_ptr, V, words)
        tl.store(edited_ptr + row * V + ids, x, mask=here)


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


# -- noise -----------------------------------------------------------------------------------------------------------


@triton.jit
def _words(seed, position, start, BLOCK: tl.constexpr):
    """The random words of ids start … start + BLOCK − 1; start is a multiple of 4."""
    block = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block * 0 + position.to(tl.uint32), block, block * 0, block * 0)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _noise_about(word):
    """−log(−log(u)) in float32, off by less than 1e-4."""
    v = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * (1.0 / (1 << 32))  # 1 − u, which float32 has near u = 1
    small = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * 0.25)))
    u = (word.to(tl.float32) + 0.5) * (1.0 / (1 << 32))
    return -tl.log(tl.where(v < 0.0625, small, -tl.log(u)))


@triton.jit
def _noise(word):
    return -tl.log(-tl.log((word.to(tl.float64) + 0.5) * (1.0 / (1 << 32))))


@triton.jit
def _best_of(x, ids, start, kept, found, token, given, row, highest, BLOCK: tl.constexpr):
    """The best sum so far and its id, or a better one of the kept ids of a block.

    Sums in float32 say which come into question; these, one as a rule, are worked out in float64.
    """
    seed, position = tl.load(given.seed + row), tl.load(given.positions + row)
    temperature, min_p = tl.load(given.temperature + row), tl.load(given.min_p + row)
    rate = tl.maximum(tl.minimum(1.0 / temperature, 1e30), 2e-38).to(tl.float32)  # times −inf is −inf, times 0 is 0
    words = _words(seed, position, start, BLOCK)
    about = tl.where(kept, (x - highest) * rate, float("-inf"))
    about = tl.where(about >= tl.log(min_p.to(tl.float32)) - _SLACK, about + _noise_about(words), float("-inf"))
    most = tl.max(about, axis=0)
    while (most > float("-inf")) & (most >= found - _SLACK):
        at = tl.min(tl.where(about == most, ids, _FAR), axis=0)
        chosen = ids == at
        value = tl.sum(tl.where(chosen, x, 0.0), axis=0)
        word = tl.sum(tl.where(chosen, words, 0), axis=0)
        d = (value.to(tl.float64) - highest.to(tl.float64)) / temperature
        total = tl.where(tl.exp(d) >= min_p, d + _noise(word), float("-inf"))
        better = (total > found) | ((total == found) & (at < token))
        found, token = tl.where(better, total, found), tl.where(better, at, token)
        about = tl.where(chosen, float("-inf"), about)
        most = tl.max(about, axis=0)
    return found, token


# best      best[b, j] = the highest sum of logit and noise in block j above the limit of row b, token[b, j] its id;
#           counts[b, j] = ids at the limit
# shapes    logits float32 [B, V]; best float64, token, counts int32 [B, blocks]; limits float64 [B, 2]: key, how many
# grid      (B, blocks): a program has BLOCK logits; in MODE "full" the first block's writes the limit
# bytes     4 * B * V; MODE "full": 128 * blocks for each program (from L2)
# limits    as _digits_kernel in MODE "full"
@triton.jit
def _best_kernel(
    given, table_ptr, states_ptr, limits_ptr, best_ptr, token_ptr, counts_ptr, V, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
    temperature, position = tl.load(given.temperature + row), tl.load(given.positions + row)
    highest = highest_of(given.highest, row, blocks, BLOCKS)
    if (temperature > 0) & (position >= 0) & is_finite(highest):
        at, limit = row * blocks + block, tl.full((), 0, tl.uint32)
        if MODE == "top_k":
            limit = tl.load(limits_ptr + row * 2).to(tl.int64).to(tl.uint32)
        if MODE == "full":
            top_k, top_p, rate = tl.load(given.top_k + row), tl.load(given.top_p + row), rate_of(temperature)
            limit, ties = limit_by_digits(states_ptr, table_ptr, row, blocks, top_k, top_p, highest, rate, V, BLOCKS)
            if block == 0:
                tl.store(limits_ptr + row * 2, limit.to(tl.float64))
                tl.store(limits_ptr + row * 2 + 1, ties)
        key = key_of(x)
        found, token = tl.full((), float("-inf"), tl.float64), tl.full((), _FAR, tl.int32)
        kept = (key > limit) & (x > float("-inf"))
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            found, token = _best_of(x, ids, block * BLOCK, kept, found, token, given, row, highest, BLOCK)
        tl.store(best_ptr + at, found)
        tl.store(token_ptr + at, token)
        if MODE != "plain":
            tl.store(counts_ptr + at, tl.sum((key == limit).to(tl.int32), axis=0))


# draw      token[b] = the id of the highest best[b], or a better one of the ids at the limit, the lowest of equal ones;
#           temperature 0: the lowest id of the highest logit; −1 and −2: ops.sample_tokens
# shapes    logits float32 [B, V]; highest float32, first int32, best float64, tokens, counts int32 [B, blocks]; out
#           int32 [B]
# grid      (B,): a program goes through the blocks that have kept ids at the limit, one as a rule; MODE "greedy" reads
#           highest and first alone, "plain" no logits
# bytes     4 * BLOCK + 20 * blocks for each row
# limits    none
@triton.jit
def _draw_kernel(
    given, limits_ptr, best_ptr, tokens_ptr, counts_ptr, out_ptr, V, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
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
            best = tl.load(best_ptr + at, mask=there, other=float("-inf"))
            tokens = tl.load(tokens_ptr + at, mask=there, other=_FAR)
            found = tl.max(best, axis=0)
            token = tl.min(tl.where(best == found, tokens, _FAR), axis=0)
            if MODE != "plain":
                limit = tl.load(limits_ptr + row * 2).to(tl.int64).to(tl.uint32)
                ties = tl.load(limits_ptr + row * 2 + 1)
                counts = tl.load(counts_ptr + at, mask=there, other=0)
                left = ties.to(tl.int32) - (tl.cumsum(counts, axis=0) - counts)
                taken = tl.maximum(tl.minimum(left, counts), 0)
                tied = tl.min(tl.where(taken > 0, block, BLOCKS), axis=0)
                while tied < BLOCKS:
                    ids = tied * BLOCK + tl.arange(0, BLOCK)
                    x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
                    same = (key_of(x) == limit).to(tl.int32)
                    few = tl.sum(tl.where(block == tied, taken, 0), axis=0)
                    kept = (same > 0) & (tl.cumsum(same, axis=0) <= few) & (x > float("-inf"))
                    found, token = _best_of(x, ids, tied * BLOCK, kept, found, token, given, row, highest, BLOCK)
                    tied = tl.min(tl.where((taken > 0) & (block > tied), block, BLOCKS), axis=0)
    token = tl.where(is_finite(highest), token, -2)
    tl.store(out_ptr + row, tl.where(position >= 0, token, -1))


# -- log-probabilities -----------------------------------------------------------------------------------------------


# weights   sums[b, j] = sum of exp(x − highest) over block j of row b, in float64
# shapes    logits float32 [B, V]; highest float32, sums float64 [B, blocks]
# grid      (B, blocks): a program has BLOCK logits
# bytes     4 * B * V
# limits    V < 2**31
@triton.jit
def _weights_kernel(given, sums_ptr, V, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
    highest = highest_of(given.highest, row, blocks, BLOCKS)
    if is_finite(highest):
        tl.store(sums_ptr + row * blocks + block, tl.sum(tl.exp(x.to(tl.float64) - highest.to(tl.float64)), axis=0))


# logprobs  own[b] = x − highest − log(sum exp(x − highest)) of the token, top[b, :] that of the first n ranks, ids[b,
#           :] which those are; −inf and −1 where there are none
# shapes    logits float32 [B, V]; highest float32, first int32, sums float64 [B, blocks]; token int32, own float64 [B];
#           ids int32, top float64 [B, n]
# grid      (B,): a program takes the highest of what the blocks have left, n times, and reads its block again
# bytes     4 * BLOCK * n + 16 * blocks for each row
# limits    none
@triton.jit
def _logprobs_kernel(
    given, sums_ptr, token_ptr, own_ptr, ids_ptr, top_ptr, n, V, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    there, at = block < blocks, row * blocks + block
    left = tl.load(given.highest + at, mask=there, other=float("-inf"))
    firsts = tl.load(given.first + at, mask=there, other=_FAR)
    highest, token = tl.max(left, axis=0), tl.load(token_ptr + row)
    base = tl.log(tl.sum(tl.load(sums_ptr + at, mask=there, other=0.0), axis=0))  # a row without a token: anything
    own = tl.load(given.logits + row * V + tl.maximum(token, 0)).to(tl.float64) - highest.to(tl.float64) - base
    tl.store(own_ptr + row, tl.where(token >= 0, own, float("-inf")))
    for rank in range(n):
        value = tl.max(left, axis=0)
        best = tl.min(tl.where(left == value, firsts, _FAR), axis=0)
        some = (token >= 0) & (value > float("-inf"))
        logprob = value.to(tl.float64) - highest.to(tl.float64) - base
        tl.store(ids_ptr + row * n + rank, tl.where(some, best, -1))
        tl.store(top_ptr + row * n + rank, tl.where(some, logprob, float("-inf")))
        if some:
            mine = tl.min(tl.where((left == value) & (firsts == best), block, BLOCKS), axis=0)
            ids = spread_ids(mine, blocks, BLOCK)
            x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
            x = tl.where((x < value) | ((x == value) & (ids > best)), x, float("-inf"))
            next_value = tl.max(x, axis=0)
            next_first = tl.min(tl.where(x == next_value, ids, _FAR), axis=0)
            left = tl.where(block == mine, next_value, left)
            firsts = tl.where(block == mine, next_first, firsts)


@kernel(ops.sample_tokens, device="cuda")
def sample_tokens(
    logits, positions, temperature, top_k, top_p, min_p, seed, mode, slots=None, counts=None, bias=None, penalties=None,
    masked=None, masks=None, logprobs=None, *, out, in_place=False,
):  # fmt: skip
    """in_place: `logits` may be written to, so that rows without edits cost nothing."""
    B, V = logits.shape
    if B == 0:
        return
    assert logits.is_contiguous()
    fewest, most = SAMPLE_BLOCK
    block = min(most, max(fewest, triton.next_power_of_2(triton.cdiv(V, SAMPLE_PARTS))))
    blocks = triton.cdiv(V, block)
    grid, sizes = (B, blocks), {"BLOCKS": triton.next_power_of_2(blocks), "BLOCK": block}
    new = functools.partial(torch.empty, device=logits.device)
    if slots is not None or masked is not None:
        edited = logits if in_place else new((B, V), dtype=torch.float32)
        # penalties round after every product, as in the definition
        _edit_kernel[grid](
            logits, edited, positions, slots, counts, bias, penalties, masked, masks, V, triton.cdiv(V, 32),
            IN_PLACE=in_place, BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip
        logits = edited
    highest, first = new(grid, dtype=torch.float32), new(grid, dtype=torch.int32)
    given = Given(logits, highest, first, positions, temperature, top_k, top_p, min_p, seed)
    best = tokens = tied = limits = states = table = None
    _maxima_kernel[grid](logits, highest, first, V, BLOCK=block)
    if mode != "greedy":
        best, tokens = new(grid, dtype=torch.float64), new(grid, dtype=torch.int32)
        if mode != "plain":
            tied, limits = new(grid, dtype=torch.int32), new((B, 2), dtype=torch.float64)
        if mode == "top_k":
            find_in_lists(given, limits, sizes)
        if mode == "full":
            states, table = find_by_digits(given, sizes)
        _best_kernel[grid](given, table, states, limits, best, tokens, tied, V, **sizes, MODE=mode)
    _draw_kernel[(B,)](given, limits, best, tokens, tied, out[0], V, blocks, **sizes, MODE=mode)
    if logprobs is not None:
        sums = new(grid, dtype=torch.float64)
        _weights_kernel[grid](given, sums, V, **sizes)
        _logprobs_kernel[(B,)](given, sums, *out, logprobs, V, blocks, **sizes)
