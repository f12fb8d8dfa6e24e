"""Sampling on CUDA: edits, maxima of blocks, the best of all ids, limits of top-k and top-p where that may not be kept
(_limits.py), the best of what they keep, the draw.
"""

import functools

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._launch import multiprocessors, pdl_options, wait_for_previous
from penstock.backends.cuda._limits import (
    DRAW,
    PEAKS,
    WAYS,
    Drawn,
    Given,
    Parts,
    cuts,
    find_limits,
    fits_list,
    highest_of,
    is_finite,
    key_of,
    load_limit,
    load_token,
    open_row,
    open_rows,
    rate_about,
    spread_ids,
)
from penstock.backends.cuda._noise import best_of, winner_of, words_from
from penstock.backends.cuda._tuning import SAMPLE_BLOCK, SAMPLE_DRAW_WARPS, SAMPLE_OPEN_PROGRAMS, SAMPLE_PARTS
from penstock.ops.op import kernel

_PEAKS = tl.constexpr(PEAKS)
_FAR = tl.constexpr(2**31 - 1)  # beyond every id


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
    words, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
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


# maxima    highest[b, j] = max of block j of row b, +inf if it holds NaN; first[b, j] = the lowest id that has it; with
#           parts for rows with top-k also peaks[b, j, :] = maxima of its parts, and for rows with top-p alone
#           sums[b, j] = sum of exp((x − max) / temperature), about; no row is open yet
# shapes    logits float32 [B, V]; highest float32, first int32 [B, blocks]; peaks float32 [B, blocks, PEAKS], sums
#           float32 [B, blocks]; open int32 [1 + B, 3]
# grid      (B, blocks): a program has BLOCK logits
# bytes     4 * V for each active row
# limits    V < 2**31
@triton.jit
def _maxima_kernel(given, parts, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids, at, active = spread_ids(block, blocks, BLOCK), row * blocks + block, tl.load(given.positions + row) >= 0
    if parts is not None:
        temperature, top_k = tl.load(given.temperature + row), tl.load(given.top_k + row)
        top_p = tl.load(given.top_p + row)
    x = tl.load(given.logits + row * V + ids, mask=ids < tl.where(active, V, 0), other=float("-inf"))
    x = tl.where(x != x, float("inf"), x)
    highest = tl.max(x, axis=0)
    tl.store(given.highest + at, highest)
    tl.store(given.first + at, tl.min(tl.where(x == highest, ids, _FAR), axis=0))
    if parts is not None:
        for way in tl.static_range(WAYS):
            tl.store(parts.open + way, 0, mask=(row == 0) & (block == 0))
        drawn = active & (temperature > 0)
        if drawn & cuts(top_k, V):
            peaks = tl.max(tl.reshape(x, (_PEAKS, BLOCK // _PEAKS)), axis=1)
            tl.store(parts.peaks + at * _PEAKS + tl.arange(0, _PEAKS), peaks)
        elif drawn & (top_p < 1):
            w = tl.where(x > float("-inf"), tl.exp((x - highest) * rate_about(temperature)), 0.0)
            tl.store(parts.sums + at, tl.sum(w, axis=0))


# -- the draw --------------------------------------------------------------------------------------------------------


@triton.jit
def _draw_from_block(
    given, limits_ptr, best_ptr, token_ptr, row, block, blocks, temperature, position, V, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest sum of a block of neighbours and its id, of the ids that the limits keep; limits_ptr None: of all."""
    ids, at, seed = block * BLOCK + tl.arange(0, BLOCK), row * blocks + block, tl.load(given.seed + row)
    x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
    highest = highest_of(given.highest, row, blocks, BLOCKS)
    if is_finite(highest):
        kept = x > float("-inf")
        if limits_ptr is not None:
            limit, last, _ = load_limit(limits_ptr, row)
            key = key_of(x)
            kept = kept & ((key > limit) | ((key == limit) & (ids <= last)))
        start, rate, min_p = block * BLOCK, rate_about(temperature), tl.load(given.min_p + row)
        words, first = words_from(seed, position, start, BLOCK), given.logits + row * V + start
        found, token = best_of(x, words, kept, first, None, start, highest, rate, temperature, min_p, seed, position)
        tl.store(best_ptr + at, found)
        tl.store(token_ptr + at, token)


# best      best[b, j] = the highest sum of logit and noise of the ids from j · BLOCK on, token[b, j] its id. UNCUT: in
#           rows that no top-k cuts
# shapes    logits float32 [B, V]; best float64, token int32 [B, blocks]
# grid      (B, blocks): a program has BLOCK neighbours, not the ids of `spread_ids`: four have one counter
# bytes     4 * V for each row
# limits    V < 2**31
@triton.jit
def _best_kernel(
    given, best_ptr, token_ptr, V, UNCUT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, position = tl.load(given.temperature + row), tl.load(given.positions + row)
    undrawn = (temperature > 0) & (position >= 0)
    if UNCUT:
        undrawn = undrawn & (not cuts(tl.load(given.top_k + row), V))
    if undrawn:
        _draw_from_block(
            given, None, best_ptr, token_ptr, row, block, blocks, temperature, position, V, BLOCKS, BLOCK
        )  # fmt: skip


# kept      best[b, j] = the highest sum of logit and noise of the kept ids from j · BLOCK on, token[b, j] its id, in
#           rows whose token neither the draw from all ids nor a list has found
# shapes    logits float32 [B, V]; open int32 [1 + B, 3]; limits float64 [B, 4]; best float64, token int32 [B, blocks]
# grid      any: programs share the blocks of these rows, however few they are
# bytes     4 * V for each such row
# limits    V < 2**31
@triton.jit
def _kept_kernel(
    given, open_ptr, limits_ptr, best_ptr, token_ptr, V, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    for item in range(tl.program_id(0), open_rows(open_ptr, DRAW) * blocks, tl.num_programs(0)):
        row, block = open_row(open_ptr, DRAW, item // blocks), item % blocks
        temperature, position = tl.load(given.temperature + row), tl.load(given.positions + row)
        _draw_from_block(
            given, limits_ptr, best_ptr, token_ptr, row, block, blocks, temperature, position, V, BLOCKS, BLOCK
        )  # fmt: skip


# draw      token[b] = that of limits[b], or the id of the highest best[b], the lowest of equal ones; temperature 0: the
#           lowest id of the highest logit; −1 and −2: ops.sample_tokens
# shapes    highest float32, first int32, best float64, tokens int32 [B, blocks], the last two None: temperature 0;
#           limits float64 [B, 4] or None; out int32 [B]
# grid      (B,)
# bytes     20 * blocks for each row
# limits    none
@triton.jit
def _draw_kernel(
    given, limits_ptr, best_ptr, tokens_ptr, out_ptr, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    there, at = block < blocks, row * blocks + block
    maxima = tl.load(given.highest + at, mask=there, other=float("-inf"))
    highest = tl.max(maxima, axis=0)
    token = tl.min(tl.where(maxima == highest, tl.load(given.first + at, mask=there, other=_FAR), _FAR), axis=0)
    position = tl.load(given.positions + row)
    if best_ptr is not None:
        temperature = tl.load(given.temperature + row)
        if (temperature > 0) & (position >= 0) & is_finite(highest):
            token = tl.full((), -1, tl.int32)
            if limits_ptr is not None:
                token = load_token(limits_ptr, row)
            if token < 0:
                token = winner_of(best_ptr, tokens_ptr, row, blocks, BLOCKS)
    token = tl.where(is_finite(highest), token, -2)
    tl.store(out_ptr + row, tl.where(position >= 0, token, -1))


# -- log-probabilities -----------------------------------------------------------------------------------------------


# weights   sums[b, j] = sum of exp(x − highest) over block j of row b, in float64; with above also above[b, j] = the
#           logits there that are higher than that of token[b]
# shapes    logits float32 [B, V]; highest float32, sums float64, above int32 [B, blocks]; token int32 [B]
# grid      (B, blocks): a program has BLOCK logits
# bytes     4 * B * V
# limits    V < 2**31
@triton.jit
def _weights_kernel(
    given, sums_ptr, token_ptr, above_ptr, V, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_previous(PDL)
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(given.logits + row * V + ids, mask=ids < V, other=float("-inf"))
    highest = highest_of(given.highest, row, blocks, BLOCKS)
    if is_finite(highest):
        tl.store(sums_ptr + row * blocks + block, tl.sum(tl.exp(x.to(tl.float64) - highest.to(tl.float64)), axis=0))
        if above_ptr is not None:
            own = tl.load(given.logits + row * V + tl.maximum(tl.load(token_ptr + row), 0))
            tl.store(above_ptr + row * blocks + block, tl.sum((x > own).to(tl.int32), axis=0))


# logprobs  own[b] = x − highest − log(sum exp(x − highest)) of the token, top[b, :] that of the first n ranks, ids[b,
#           :] which those are; −inf and −1 where there are none; with above also ranks[b] = 1 + sum of above[b], −1 and
#           −2: ops.token_logprobs
# shapes    logits float32 [B, V]; highest float32, first int32, sums float64, above int32 [B, blocks]; token, ranks
#           int32, own float64 [B]; ids int32, top float64 [B, n]
# grid      (B,): a program takes the highest of what the blocks have left, n times, and reads its block again
# bytes     4 * BLOCK * n + 16 * blocks for each row
# limits    none
@triton.jit
def _logprobs_kernel(
    given, sums_ptr, above_ptr, token_ptr, own_ptr, ranks_ptr, ids_ptr, top_ptr, n, V, blocks, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    there, at = block < blocks, row * blocks + block
    left = tl.load(given.highest + at, mask=there, other=float("-inf"))
    firsts = tl.load(given.first + at, mask=there, other=_FAR)
    highest, token = tl.max(left, axis=0), tl.load(token_ptr + row)
    if above_ptr is not None:
        token = tl.where((token < 0) | is_finite(highest), token, -2)
        rank = 1 + tl.sum(tl.load(above_ptr + at, mask=there, other=0), axis=0)
        tl.store(ranks_ptr + row, tl.where(token >= 0, rank, token))
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
    block, blocks = _blocks(V)
    grid, sizes = (B, blocks), {"BLOCKS": triton.next_power_of_2(blocks), "BLOCK": block}
    new, pdl = functools.partial(torch.empty, device=logits.device), pdl_options()
    if slots is not None or masked is not None:
        edited = logits if in_place else new((B, V), dtype=torch.float32)
        # penalties round after every product, as in the definition
        _edit_kernel[grid](
            logits, edited, positions, slots, counts, bias, penalties, masked, masks, V, triton.cdiv(V, 32),
            IN_PLACE=in_place, BLOCK=block, enable_fp_fusion=False, **pdl,
        )  # fmt: skip
        logits = edited
    highest, first = new(grid, dtype=torch.float32), new(grid, dtype=torch.int32)
    given = Given(logits, highest, first, positions, temperature, top_k, top_p, min_p, seed)
    best = tokens = limits = parts = drawn = None
    if mode in ("top_k", "full"):
        peaks, sums = new((*grid, PEAKS), dtype=torch.float32), new(grid, dtype=torch.float32)
        parts = Parts(peaks, sums, new((1 + B, WAYS.value), dtype=torch.int32))
    _maxima_kernel[grid](given, parts, V, BLOCK=block, **pdl)
    if mode != "greedy":
        best, tokens = new(grid, dtype=torch.float64), new(grid, dtype=torch.int32)
        draws = {**sizes, "num_warps": SAMPLE_DRAW_WARPS, **pdl}
        if mode == "full" and not fits_list(V):
            drawn = Drawn(best, tokens)
        if mode == "plain" or drawn is not None:
            _best_kernel[grid](given, best, tokens, V, UNCUT=drawn is not None, **draws)
        if parts is not None:
            limits = find_limits(given, parts, mode == "full", sizes, drawn)
            programs = min(B * blocks, SAMPLE_OPEN_PROGRAMS[2] * multiprocessors(logits))
            _kept_kernel[(programs,)](given, parts.open, limits, best, tokens, V, blocks, **draws)
    _draw_kernel[(B,)](given, limits, best, tokens, out[0], blocks, BLOCKS=sizes["BLOCKS"], **pdl)
    if logprobs is not None:
        sums = new(grid, dtype=torch.float64)
        _weights_kernel[grid](given, sums, None, None, V, **sizes, **pdl)
        tokens, own, ids, top = out
        _logprobs_kernel[(B,)](given, sums, None, tokens, own, None, ids, top, logprobs, V, blocks, **sizes, **pdl)


@kernel(ops.token_logprobs, device="cuda")
def token_logprobs(logits, tokens, top=0, *, out):
    B, V = logits.shape
    if B == 0:
        return
    assert logits.is_contiguous()
    block, blocks = _blocks(V)
    grid, sizes = (B, blocks), {"BLOCKS": triton.next_power_of_2(blocks), "BLOCK": block}
    new, pdl = functools.partial(torch.empty, device=logits.device), pdl_options()
    highest, first = new(grid, dtype=torch.float32), new(grid, dtype=torch.int32)
    given = Given(logits, highest, first, tokens, *[tokens] * 5)  # rows without one are inactive; none is drawn
    _maxima_kernel[grid](given, None, V, BLOCK=block, **pdl)
    sums, above = new(grid, dtype=torch.float64), new(grid, dtype=torch.int32)
    _weights_kernel[grid](given, sums, tokens, above, V, **sizes, **pdl)
    own, ranks, ids, values = out
    _logprobs_kernel[(B,)](given, sums, above, tokens, own, ranks, ids, values, top, V, blocks, **sizes, **pdl)


def _blocks(V: int) -> tuple[int, int]:
    """Logits of a block, and how many blocks a row of V has."""
    fewest, most = SAMPLE_BLOCK
    block = min(most, max(fewest, triton.next_power_of_2(triton.cdiv(V, SAMPLE_PARTS))))
    return block, triton.cdiv(V, block)
