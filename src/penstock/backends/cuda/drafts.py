"""Drafts on CUDA: what a step of them reads, which of them count, and what a head reads behind one."""

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._launch import pdl_options, wait_for_previous
from penstock.ops.drafts import ACCEPTED, DRAFTS, LENGTH, TOKEN
from penstock.ops.op import kernel

_LENGTH, _ACCEPTED, _TOKEN = tl.constexpr(LENGTH), tl.constexpr(ACCEPTED), tl.constexpr(TOKEN)
_DRAFTS = tl.constexpr(DRAFTS)


# draft_rows  of sequence b: its token and N − 1 drafts, their positions and those behind them; its length with them,
#             and what was accepted of the run before
# shapes      ahead int32 [S, width]; slots int32 [B]; known int32 [B, 3]; tokens, positions, at int32 [B * N]; lengths,
#             accepted int32 [B]
# grid        (1,): a lane for each sequence
# bytes       a few
# limits      none
@triton.jit(do_not_specialize=["B"])
def _rows_kernel(
    ahead_ptr, slots_ptr, known_ptr, tokens_ptr, positions_ptr, at_ptr, lengths_ptr, accepted_ptr, B, width,
    N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    b = tl.arange(0, BLOCK)
    here = b < B
    slot = tl.load(slots_ptr + b, mask=here, other=-1)
    some = slot >= 0
    own = ahead_ptr + tl.maximum(slot, 0).to(tl.int64) * width
    told_ptr = known_ptr + b * 3
    given = tl.load(told_ptr + _LENGTH, mask=some, other=0)
    told = some & (given >= 0)
    own_known = some & (given < 0)
    length = tl.where(told, given, tl.load(own + _LENGTH, mask=own_known, other=0))
    accepted = tl.where(
        told, tl.load(told_ptr + _ACCEPTED, mask=told, other=0), tl.load(own + _ACCEPTED, mask=own_known, other=0)
    )
    token = tl.load(own + _TOKEN, mask=own_known, other=-1)
    token = tl.where(told, tl.load(told_ptr + _TOKEN, mask=told, other=0), token)
    for j in tl.static_range(N):
        if j > 0:
            token = tl.load(own + _DRAFTS + j - 1, mask=own_known, other=-1)
        position = tl.where(some, length + j, -1)
        tl.store(tokens_ptr + b * N + j, token, mask=here)
        tl.store(positions_ptr + b * N + j, position, mask=here)
        tl.store(at_ptr + b * N + j, tl.where(some, position + 1, -1), mask=here)
    tl.store(lengths_ptr + b, tl.where(some, length + N, 0), mask=here)
    tl.store(accepted_ptr + b, accepted, mask=here)


@kernel(ops.draft_rows, device="cuda")
def draft_rows(ahead: torch.Tensor, slots: torch.Tensor, known: torch.Tensor, drafts: int, *, out) -> None:
    B = len(slots)
    if B:
        _rows_kernel[(1,)](
            ahead, slots, known, *out, B, ahead.shape[1], N=1 + drafts, BLOCK=triton.next_power_of_2(B), num_warps=1,
            **pdl_options(),
        )  # fmt: skip


# accept_drafts  of sequence b the tokens drawn up to the first that is not the draft behind it; the others become −1
# shapes         drawn, tokens, positions, sequence int32 [B * N]; ahead int32 [S, width]; slots, wanted, at int32 [B];
#                seed int64 [B], chance float32 [B, width − 3]
# grid           (1,): a lane for each sequence
# bytes          a few
# limits         none
@triton.jit(do_not_specialize=["B"])
def _accept_kernel(
    drawn_ptr, ahead_ptr, tokens_ptr, positions_ptr, slots_ptr, seed_ptr, chance_ptr, sequence_ptr, wanted_ptr, at_ptr,
    B, width, vocab, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    b = tl.arange(0, BLOCK)
    here = b < B
    slot = tl.load(slots_ptr + b, mask=here, other=-1)
    some = slot >= 0
    seed = tl.load(seed_ptr + b, mask=here, other=0)
    first = tl.load(positions_ptr + b * N, mask=some, other=0)
    zero = (b * 0).to(tl.uint32)
    counts, count, last = some, b * 0, b * 0 - 1
    for j in tl.static_range(N):
        row = b * N + j
        token = tl.load(drawn_ptr + row, mask=some, other=-1)
        draft = b * 0 - 1
        if j + 1 < N:
            draft = tl.load(tokens_ptr + row + 1, mask=some, other=-1)
            chance = tl.load(chance_ptr + b * D + j, mask=some, other=-1.0)
            word, _, _, _ = tl.philox(seed, (first + j + 1).to(tl.uint32), zero, zero + 1, zero)
            taken = (word.to(tl.float64) + 0.5) * (1.0 / (1 << 32)) < chance.to(tl.float64)
            other = tl.where(token == draft, (draft + 1) % vocab, token)
            token = tl.where((chance >= 0) & (draft >= 0), tl.where(taken, draft, other), token)
        tl.store(drawn_ptr + row, tl.where(counts, token, -1), mask=here)
        tl.store(sequence_ptr + row, tl.where(counts, b, -1), mask=here)
        count += counts.to(tl.int32)
        last = tl.where(counts, token, last)
        counts = counts & (draft >= 0) & (token == draft)
    own = ahead_ptr + tl.maximum(slot, 0).to(tl.int64) * width
    tl.store(own + _LENGTH, first + count, mask=some)
    tl.store(own + _ACCEPTED, count, mask=some)
    tl.store(own + _TOKEN, last, mask=some)
    for j in tl.static_range(D):
        tl.store(own + _DRAFTS + j, b * 0 - 1, mask=some)
    tl.store(wanted_ptr + b, tl.where(some, b * N + count - 1, -1), mask=here)
    tl.store(at_ptr + b, tl.where(some, first + count + 1, -1), mask=here)


@kernel(ops.accept_drafts, device="cuda")
def accept_drafts(drawn, ahead, tokens, positions, slots, seed, chance, vocab, *, out) -> None:
    B = len(slots)
    _accept_kernel[(1,)](
        drawn, ahead, tokens, positions, slots, seed, chance, *out, B, ahead.shape[1], vocab, N=len(drawn) // B,
        D=chance.shape[1], BLOCK=triton.next_power_of_2(B), num_warps=1, **pdl_options(),
    )  # fmt: skip


# chain_draft  ahead[slots[b], 3 + place] = drawn[b], and what a head reads to draft behind it
# shapes       drawn, slots, tokens, positions, lengths, at int32 [B]; ahead int32 [S, width]
# grid         (1,): a lane for each sequence
# bytes        a few
# limits       none
@triton.jit(do_not_specialize=["B", "place"])
def _chain_kernel(
    drawn_ptr, ahead_ptr, slots_ptr, tokens_ptr, positions_ptr, lengths_ptr, at_ptr, B, width, place,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    b = tl.arange(0, BLOCK)
    here = b < B
    slot = tl.load(slots_ptr + b, mask=here, other=-1)
    some = slot >= 0
    own = ahead_ptr + tl.maximum(slot, 0).to(tl.int64) * width
    token = tl.maximum(tl.load(drawn_ptr + b, mask=some, other=0), 0)
    position = tl.load(own + _LENGTH, mask=some, other=0) + place
    tl.store(own + _DRAFTS + place, token, mask=some)
    tl.store(tokens_ptr + b, tl.where(some, token, -1), mask=here)
    tl.store(positions_ptr + b, tl.where(some, position, -1), mask=here)
    tl.store(lengths_ptr + b, tl.where(some, position + 1, 0), mask=here)
    tl.store(at_ptr + b, tl.where(some, position + 2, -1), mask=here)


@kernel(ops.chain_draft, device="cuda")
def chain_draft(drawn, ahead, slots, place, *, out) -> None:
    B = len(slots)
    if B:
        _chain_kernel[(1,)](
            drawn, ahead, slots, *out, B, ahead.shape[1], place, BLOCK=triton.next_power_of_2(B), num_warps=1,
            **pdl_options(),
        )  # fmt: skip
