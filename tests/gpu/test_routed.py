"""Blocks with their router, whose choice sorts pairs by expert, on CUDA."""

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.backends.cuda import _routed, _staged
from penstock.backends.cuda import moe as cuda_moe
from tests.gpu.common import reference, run, to_device, to_host
from tests.gpu.test_few_rows import nearly
from tests.gpu.test_moe import routed_block
from tests.ops.common import assert_close, assert_same_bits, normal


@pytest.fixture
def made_tiles(monkeypatch) -> list[Any]:
    """Tiles of each choice that sorted its pairs."""
    found: list[Any] = []
    sort = cuda_moe.routed_tiles

    def noted(*args: Any) -> Any:
        found.append(sort(*args))
        return found[-1]

    monkeypatch.setattr(cuda_moe, "routed_tiles", noted)
    return found


def halves(rng: Any, T: int, E: int, k: int, N: int, K: int, normed: bool = True, **how: Any) -> dict[str, Any]:
    """A call that lanes can take: bfloat16 rows, a float32 stream."""
    call = routed_block(rng, T, E, k, N, K, dtype="bfloat16", **how) | {"residual": normal(rng, T, K)}
    return call | ({} if normed else {"norm_weight": None})


def check_block(call: dict[str, Any]) -> None:
    got, want = run(ops.moe_route_forward, **call), reference(ops.moe_route_forward, **call)
    assert_same_bits("ids", got[1], want[1])
    assert_close("weights", got[2], want[2], 2e-5, 1.0)
    nearly(got[0], want[0])


@pytest.mark.parametrize("staged", [False, True], ids=["registers", "shared memory"])
@pytest.mark.parametrize(
    "T, E, k, N, K, normed, scored",
    [(8, 33, 3, 64, 128, True, True), (19, 40, 5, 64, 256, False, True), (20, 12, 2, 128, 64, False, False)],
)
def test_block_with_its_router_matches_definition(T, E, k, N, K, normed, scored, staged, made_tiles, rng, monkeypatch):
    """Rows of no sequence too, in a second call as in the first."""
    monkeypatch.setattr(_staged, "STAGED_TOKENS", 1 if staged else 1000)
    call = halves(rng, T, E, k, N, K, normed, scored=scored, group_size=64)
    call["active"] = np.where(np.arange(T) % 4 == 3, -1, 0).astype(np.int32)
    for _ in range(2):
        check_block(call)
    assert len(made_tiles) == 2
    assert not any(tiles.counts.any() for tiles in made_tiles)
    monkeypatch.setattr(_routed, "ROUTED_PAIRS", 0)  # a launch sorts them
    check_block(call)
    assert made_tiles[2].counts is None


@pytest.mark.parametrize("nan", [False, True])
def test_rows_that_choose_nothing_leave_the_others_as_they_are(nan, made_tiles, rng):
    """Most of them are not numbers, and all others choose one expert beside the first."""
    T = 17
    call = halves(rng, T, 33, 4, 64, 128, group_size=64) | {"propagate_nan": nan}
    call["active"] = np.where(np.arange(T) == 5, -1, 0).astype(np.int32)
    odd = np.arange(T) % 3 != 0
    call["x"][odd, 7] = np.nan
    call["x"][~odd, 0], call["norm_weight"][0] = 60, 1
    call["w"] = normal(rng, 34, 128, dtype="bfloat16", scale=0.1)
    call["w"][1, 0] = 2
    got, want = run(ops.moe_route_forward, **call), reference(ops.moe_route_forward, **call)
    assert_same_bits("ids", got[1], want[1])
    assert (want[1][~odd] == 1).any(axis=1).all() and made_tiles[0].counts is not None
    assert_same_bits("rows of NaN", np.isnan(got[0]), np.isnan(want[0]))
    nearly(got[0][~odd], want[0][~odd])


@pytest.mark.parametrize("all_alike", [True, False])
def test_tiles_hold_each_pair_once(all_alike, rng):
    """Of experts that all tokens choose several tiles; pairs without an expert behind all others, as are those of a row
    that is not a number but for its first.
    """
    T, E, k = 21, 37, 4
    logits = normal(rng, T, E + 1)
    logits[::2, 3] = np.nan
    if all_alike:
        logits[:, :k] += 100
    active = np.where(np.arange(T) % 5 == 4, -1, 0).astype(np.int32)
    given = to_device([logits, active, np.full((T, k), -7, np.int32), np.zeros((T, k), np.float32)])
    seen, there, ids, weights = given
    score = torch.full((T,), float("nan"), device=seen.device)
    with penstock.backend("cuda"):
        tiles = _routed.routed_tiles(seen, None, k, False, there, ids, weights, score)
        want = ops.moe_route(seen[:, :E].contiguous(), None, k, False, there)
    assert torch.equal(ids, want[0]) and torch.equal(weights, want[1]) and torch.equal(score, seen[:, E])
    counts, order, NT = to_host(tiles.counts), to_host(tiles.order), tiles.most
    slots, starts, begins = to_host(tiles.tiles)[: 3 * NT].reshape(3, NT)[:, : counts[E + 2]]
    assert counts[: E + 1].max() <= T
    chosen = np.concatenate([to_host(ids), np.full((T, 1), E, np.int32)], axis=1)
    chosen[::2, 1:k] = -1
    chosen = chosen.ravel()
    found = []
    for slot, start, begin in zip(slots, starts, begins, strict=True):
        own = order[start : min(start + tiles.rows, begin + counts[slot])]
        assert len(own) and (chosen[own] == slot).all()
        found += [*own]
    rest = order[(E + 1) * T :][: counts[E + 1]]
    assert (chosen[rest] == -1).all()
    assert sorted([*found, *rest]) == list(range(T * (k + 1)))
    tiles.counts.zero_()


def test_counts_start_anew_where_a_block_has_failed(made_tiles, rng, monkeypatch):
    call = halves(rng, 9, 20, 2, 64, 64)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(cuda_moe, "_combine", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            run(ops.moe_route_forward, **call)
    assert made_tiles[0].counts is not None and not made_tiles[0].counts.any()
    check_block(call)


def test_blocks_that_lanes_cannot_take_have_a_router_apart(made_tiles, rng):
    """Few tokens, float32 rows, many pairs for each expert, more experts than one warp looks through."""
    check_block(halves(rng, 6, 20, 2, 64, 64))
    check_block(halves(rng, 9, 20, 2, 64, 64, False) | {"x": normal(rng, 9, 64)})
    call = halves(rng, 24, 3, 2, 64, 64)  # whose tiles round weights
    got, want = run(ops.moe_route_forward, **call), reference(ops.moe_route_forward, **call)
    assert_close("y", got[0], want[0], 2**-7, float(np.abs(want[0]).max()))
    check_block(halves(rng, 8, 1030, 2, 32, 32, False))
    assert not made_tiles


@pytest.mark.cuda
@pytest.mark.parametrize("T", [8, 13, 32, 100, 256])
def test_block_in_a_chain_of_replays_equals_call_by_call(T, made_tiles, rng):
    call = halves(rng, T, 256, 8, 64, 512, False, group_size=64)
    call = {n: to_device(v) for n, v in call.items()} | {"per_expert_scale": None}

    def chain(x: torch.Tensor, wait: Any) -> list[torch.Tensor]:
        made = []
        for _ in range(6):
            y, ids, weights = ops.moe_route_forward(**{**call, "x": x})
            wait()
            x = (y * 0.5).bfloat16()
            made += [y, ids, weights]
            wait()
        return made

    want = chain(call["x"], torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(call["x"], lambda: None)
    for _ in range(30):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(made_tiles) == 12
    assert all((tiles.counts is None) == (T == 256) for tiles in made_tiles)
    assert T == 256 or not any(tiles.counts.any() for tiles in made_tiles)
