"""The choice of experts and the tiles of their pairs in one launch, for products by lanes.

Each token puts its pairs into buckets, one for each slot, with room for a pair of every token: their places are counted
by atomic sums, so that no launch has to look at all pairs. Which pair of a slot comes first decides about nothing but
its column in a product. Where experts have many pairs a launch sorts them all the same.
"""

import torch
import triton
import triton.language as tl

from penstock.backends.cuda._few_rows import Tiles, expert_tiles, tile_rows
from penstock.backends.cuda._launch import counters, pdl_options, wait_for_previous
from penstock.backends.cuda._route import route_row
from penstock.backends.cuda._tuning import ROUTED_PAIRS

MOST_EXPERTS = 1024  # that one warp looks through


# routed    `route`, the score of the shared expert, and the pairs of each row in the bucket of their slot: order[slot *
#           T + n] = the n-th pair there, in any order. Slot E is the shared expert's, whose pair is a row's last; pairs
#           of a row that is not active, and those behind the first of a row that is not sound, are in slot E + 1, whose
#           bucket is the last one. tiles: slot, first place and where its bucket begins, of each tile of up to BM pairs
#           of a slot, in any order
# shapes    logits float32 [T, E] or, with a score, [T, E + 1]; ids int32, weights float32 [T, k]; score float32 [T] or
#           None; order int32 [(E + 1) * T + T * k]; tiles int32 [3 * NT + 2], the last two unused; counts int32
#           [E + 3], 0 before: pairs of each slot, and how many tiles there are; None: no pairs are put anywhere
# grid      (T,): a program, one warp, has one token
# bytes     T * (E + 1) * 4 in, from L2; T * (k + 1) * 4 atomic sums of integers, and those of tiles
# limits    E <= 1024; T * k and NT below 2**31
@triton.jit(do_not_specialize=["T", "NT"])
def _routed_kernel(
    logits_ptr, scale_ptr, active_ptr, ids_ptr, weights_ptr, score_ptr, order_ptr, tiles_ptr, counts_ptr, T, NT, E, k,
    NAN: tl.constexpr, BM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    SCORED: tl.constexpr = score_ptr is not None
    logits = logits_ptr + row * (E + SCORED)
    if SCORED:
        score = tl.load(logits + E)
    ids = route_row(logits, row, scale_ptr, active_ptr, ids_ptr, weights_ptr, E, k, NAN, BLOCK_E, BLOCK_K)
    if SCORED:
        tl.store(score_ptr + row, score)
    if counts_ptr is not None:
        _put(ids, row, order_ptr, tiles_ptr, counts_ptr, T, NT, E, k, BM, BLOCK_K, BLOCK_P)


@triton.jit
def _put(
    ids, row, order_ptr, tiles_ptr, counts_ptr, T, NT, E, k, BM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A row's pairs into their buckets."""
    place = tl.arange(0, BLOCK_P)  # one of each lane, so that none counts a pair twice
    here = tl.arange(0, BLOCK_K)[:, None] == place[None, :]
    slot = tl.sum(tl.where(here, tl.where(ids < 0, E + 1, ids)[:, None], 0), axis=0)
    # All ids of a row that is not sound are 0: its first pair tells that, and a bucket has room for one of each row.
    first = tl.sum(tl.where(place == 0, slot, 0), axis=0)
    slot = tl.where((place > 0) & (slot == first), E + 1, slot)
    slot, live = tl.where(place == k, E, slot), place <= k
    n = tl.atomic_add(counts_ptr + slot, 1, mask=live, sem="relaxed")
    tl.store(order_ptr + slot.to(tl.int64) * T + n, (row * (k + 1) + place).to(tl.int32), mask=live)
    opens = live & (slot <= E) & (n % BM == 0)
    tile = tl.atomic_add(counts_ptr + E + 2 + tl.zeros_like(place), 1, mask=opens, sem="relaxed")
    tl.store(tiles_ptr + tile, slot, mask=opens)
    tl.store(tiles_ptr + NT + tile, slot * T + n, mask=opens)
    tl.store(tiles_ptr + 2 * NT + tile, slot * T, mask=opens)


def routed_tiles(
    logits: torch.Tensor, scale: torch.Tensor | None, k: int, nan: bool, active: torch.Tensor | None, ids: torch.Tensor,
    weights: torch.Tensor, score: torch.Tensor | None,
) -> Tiles:  # fmt: skip
    """Write ids and weights [T, k] of `moe_route` and the scores [T] of the shared expert, and give the tiles of their
    pairs and its own.

    Whoever reads the last of the products that go by these tiles sets `counts`, if there are some, to 0 again.
    """
    T, E = len(logits), logits.shape[1] - (score is not None)
    BM, P = tile_rows(T * k, E), T * (k + 1)
    room, NT = (E + 1) * T + T * k, P // BM + E + 1
    made = counts = None
    if T * k <= ROUTED_PAIRS * E:
        made = torch.empty(room + 3 * NT + 2, dtype=torch.int32, device=logits.device)
        counts = counters(made, E + 3)
    order, tiles = (None, None) if made is None or counts is None else (made[:room], made[room:])
    _routed_kernel[(T,)](
        logits, scale, active, ids, weights, score, order, tiles, counts, T, NT, E, k, NAN=nan, BM=BM,
        BLOCK_E=max(32, triton.next_power_of_2(E)), BLOCK_K=triton.next_power_of_2(k),
        BLOCK_P=max(32, triton.next_power_of_2(k + 1)), num_warps=1, **pdl_options(),
    )  # fmt: skip
    if order is None or tiles is None:
        return expert_tiles(ids.view(T, k), E, None, E, True)
    return Tiles(order, tiles, P, BM, k + 1, True, counts)
