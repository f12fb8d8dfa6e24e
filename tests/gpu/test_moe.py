"""Routers, expert products and combination on CUDA: ties and odd rows, many rows, absent experts, repeated runs."""

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.backends.cuda import _matvec_experts, _route, _shared_down, _tuning
from penstock.backends.cuda import moe as cuda_moe
from penstock.backends.cuda._launch import counters
from penstock.errors import BackendError
from tests.gpu.common import GPU, reference, run, to_device, to_host
from tests.ops.common import assert_close, assert_same_bits, fenced, i32, normal, quantized

ROUTERS = {
    "route": lambda logits, k: (ops.moe_route, {"logits": logits, "per_expert_scale": None, "top_k": k}),
    "slots": lambda logits, k: (ops.moe_softmax_topk, {"logits": logits, "k": k}),
    "group": lambda logits, k: (
        ops.moe_group_route,
        {"logits": logits, "bias": None, "n_group": 1, "topk_group": 1, "top_k": k},
    ),
}
EACH_ROUTER = pytest.mark.parametrize("router", ROUTERS)


def check_router(op: Any, arguments: dict[str, Any]) -> None:
    got, want = run(op, **arguments), reference(op, **arguments)
    assert_same_bits("ids", got[0], want[0])
    assert_close("weights", got[1], want[1], 2e-6)


# -- routers: order and odd rows -------------------------------------------------------------------------------------


@EACH_ROUTER
@pytest.mark.parametrize("E", (1, 31, 33, 64, 127, 128, 129, 511, 512) if GPU else (1, 33))
def test_router_finds_the_winner_in_every_position(router, E, rng):
    places = np.arange(E) if GPU else np.unique([0, E // 2, E - 1])
    logits = normal(rng, len(places), E)
    logits[np.arange(len(places)), places] = 9
    check_router(*ROUTERS[router](logits, min(E, 3)))


@EACH_ROUTER
@pytest.mark.parametrize("distance", (1, 16, 31, 32, 33, 64, 127) if GPU else (1, 33))
def test_router_breaks_ties_by_the_lowest_index(router, distance, rng):
    E = 128
    first = np.arange(E - distance) if GPU else np.array([0, E - distance - 1])
    logits = normal(rng, len(first) + 1, E)
    logits[np.arange(len(first)), first] = logits[np.arange(len(first)), first + distance] = 7
    logits[-1] = 0.25
    check_router(*ROUTERS[router](logits, 4))


@EACH_ROUTER
def test_router_gives_odd_rows_no_experts(router, rng):
    logits = normal(rng, 8 if GPU else 6, 33)
    logits[0, 7], logits[1, 32] = np.nan, -np.nan
    logits[2, 5] = np.inf
    logits[3] = -np.inf
    logits[4, :31] = -np.inf
    logits[5] = -1
    logits[5, ::4], logits[5, 2::4] = -0.0, 0.0
    op, arguments = ROUTERS[router](logits, 5)
    check_router(op, arguments)
    arguments["propagate_nan"] = True
    check_router(op, arguments)
    assert np.isnan(run(op, **arguments)[1][:5]).all()


@EACH_ROUTER
@pytest.mark.parametrize("E, k", [(7, 7), (40, 33), (600, 500), (4096, 64), (3000, 3000)][: 5 if GPU else 2])
def test_router_takes_any_number_of_experts(router, E, k, rng):
    check_router(*ROUTERS[router](np.round(normal(rng, 2, E), 2), k))


def test_router_refuses_more_experts_than_a_program_holds():
    with pytest.raises(BackendError, match=r"^moe_route: logits has 16385 experts, expected at most 16384 on cuda"):
        run(ops.moe_route, logits=np.zeros((1, 16385), np.float32), per_expert_scale=None, top_k=1)


def test_moe_softmax_topk_keeps_the_slots_of_the_definition():
    rows = {
        (0.1, 0.4, 0.2, 0.3): [3, 1],
        (0.25, 0.25, 0.25, 0.25): [0, 1],
        (0.05, 0.3, 0.05, 0.3, 0.3): [3, 1, 4],
        (0.3, 0.1, 0.2, 0.4): [0, 3, 2],
    }
    for p, slots in rows.items():
        ids, weights = run(ops.moe_softmax_topk, logits=np.log(np.array([p], np.float32)), k=len(slots))
        assert ids.tolist() == [slots]
        assert_close("weights", weights, np.array([[p[i] for i in slots]]), 2e-6)


def test_moe_softmax_topk_takes_rising_falling_and_equal_rows(rng):
    E = 40
    rising = np.arange(E, dtype=np.float32)
    logits = np.stack([rising, -rising, rising % 5, -(rising % 3), rising // 7])
    check_router(*ROUTERS["slots"](logits, 8))


def test_moe_route_does_not_renormalise_after_the_scale():
    logits, scale = np.array([[1, 3, 2, 3]], np.float32), np.array([1, 2, 3, 4], np.float32)
    ids, weights = run(ops.moe_route, logits=logits, per_expert_scale=scale, top_k=2)
    assert ids.tolist() == [[1, 3]]
    assert_close("weights", weights, np.array([[1.0, 2.0]]), 2e-6)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("groups, keep", [(4, 2), (6, 5), (40, 3)])
def test_moe_group_route_chooses_among_groups(groups, keep, norm, rng):
    E = 12 * groups
    bias = normal(rng, E, scale=0.2, dtype="bfloat16")
    logits = np.round(normal(rng, 4, E) * 2) / 2
    logits[3, 20] = np.nan
    bias[13], bias[14] = np.inf, -np.inf
    call = {"n_group": groups, "topk_group": keep, "top_k": 6, "norm_topk_prob": norm, "routed_scaling_factor": 1.7}
    check_router(ops.moe_group_route, {"logits": logits, "bias": bias, **call})


def test_moe_group_route_ranks_infinite_choices_as_the_definition(rng):
    """inf - inf ranks after everything; experts of dropped groups are -inf and tie with kept ones that are."""
    bias = np.array([np.inf, -np.inf, 5, -np.inf, -np.inf, -np.inf], np.float32)
    call = {"logits": normal(rng, 2, 6), "bias": bias, "n_group": 3, "topk_group": 1, "top_k": 2}
    assert run(ops.moe_group_route, **call)[0].tolist() == [[2, 0]] * 2
    check_router(ops.moe_group_route, call)


def test_moe_normalize_weights_leaves_rows_without_a_sum(rng):
    weights = normal(rng, 5, 3)
    weights[1], weights[2], weights[3, 1] = 0, -1, np.nan
    got, want = run(ops.moe_normalize_weights, weights=weights), reference(ops.moe_normalize_weights, weights=weights)
    assert_close("weights", got, want, 2e-6)
    assert_same_bits("rows without a sum", got[1:4], weights[1:4])


# -- routers: many rows ----------------------------------------------------------------------------------------------


def _logits(rows: int, E: int, seed: int, ties: bool) -> torch.Tensor:
    made = torch.randn(rows, E, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) * 2
    return (made * 8).round() / 8 if ties else made


def _slots(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The definition of moe_softmax_topk's ids, all rows at once."""
    held = logits[:, :k].clone()
    ids = torch.arange(k, device=logits.device).repeat(len(logits), 1)
    for i in range(k, logits.shape[1]):
        slot = (held == held.min(1, keepdim=True).values).int().argmax(1, keepdim=True)
        better = logits[:, i : i + 1] > held.gather(1, slot)
        ids.scatter_(1, slot, torch.where(better, i, ids.gather(1, slot)))
        held.scatter_(1, slot, torch.where(better, logits[:, i : i + 1], held.gather(1, slot)))
    return ids.int()


def _group_ids(logits: torch.Tensor, bias: torch.Tensor, groups: int, keep: int, k: int) -> torch.Tensor:
    """The definition of moe_group_route's ids, all rows at once."""
    choice = torch.sigmoid(logits.double()).float() + bias
    each = choice.view(len(logits), groups, -1)
    two = each.topk(2, dim=2).values
    kept = (two[..., 0] + two[..., 1]).sort(dim=1, descending=True, stable=True).indices[:, :keep]
    mask = torch.zeros(len(logits), groups, dtype=torch.bool, device=logits.device).scatter_(1, kept, True)
    choice = torch.where(mask[..., None], each, -torch.inf).view_as(choice)
    return choice.sort(dim=1, descending=True, stable=True).indices[:, :k].int()


MANY = pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])


@pytest.mark.cuda
@MANY
@pytest.mark.parametrize("E", [128, 256])
def test_moe_route_ids_of_a_million_rows(E, ties):
    for seed in range(4):
        logits = _logits(250_000, E, seed, ties)
        ids, weights = ops.moe_route(logits, None, 8)
        assert torch.equal(ids, logits.sort(dim=1, descending=True, stable=True).indices[:, :8].int())
        want = torch.softmax(logits.double().gather(1, ids.long()), 1)
        assert (weights - want).abs().max() < 2e-6


@pytest.mark.cuda
@MANY
def test_moe_softmax_topk_ids_of_a_million_rows(ties):
    for seed in range(4):
        logits = _logits(250_000, 256, seed, ties)
        ids, weights = ops.moe_softmax_topk(logits, 8)
        assert torch.equal(ids, _slots(logits, 8))
        assert (weights - torch.softmax(logits.double(), 1).gather(1, ids.long())).abs().max() < 2e-6


@pytest.mark.cuda
@MANY
def test_moe_group_route_ids_of_a_million_rows(ties):
    bias = _logits(1, 256, 9, ties)[0] * 0.1
    for seed in range(4):
        logits = _logits(250_000, 256, seed, ties)
        ids, _ = ops.moe_group_route(logits, bias, 8, 4, 8, True, 2.5)
        assert torch.equal(ids, _group_ids(logits, bias, 8, 4, 8))


@pytest.mark.cuda
@EACH_ROUTER
def test_router_agrees_with_the_definition_on_many_rows(router, rng):
    check_router(*ROUTERS[router](normal(rng, 5000, 256, scale=2), 8))


@pytest.mark.cuda
@EACH_ROUTER
def test_router_gives_the_same_bits_every_time(router):
    op, call = ROUTERS[router](_logits(100_000, 128, 3, ties=True), 8)
    first = op(**call)
    for _ in range(100):
        again = op(**call)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


# -- routers with the norm and the product before them -----------------------------------------------------------------


def router_call(rng, T, E, K, scores=1, bits=8, dtype="float32"):
    w = (
        quantized(rng, E + scores, K, bits=bits)
        if bits
        else normal(rng, E + scores, K, dtype="bfloat16", scale=K**-0.5)
    )
    norm = normal(rng, K, dtype=dtype)
    return {"x": normal(rng, T, K, dtype=dtype), "norm_weight": norm, "w": w, "scores": scores, "write_normed": True}


def check_norm_router(op: Any, call: dict[str, Any]) -> Any:
    got, want = run(op, **call), reference(op, **call)
    assert_close("h", got[0], want[0], 4e-6 if got[0].dtype == np.float32 else 2**-7)
    assert_same_bits("ids", got[1], want[1])
    assert_close("weights", got[2], want[2], 2e-5, 1.0)
    if call["scores"]:
        assert_close("scores", got[3], want[3], 1e-5, float(np.abs(want[3]).max()))
    return got


@pytest.mark.parametrize("last", [1, 8], ids=["alone", "all"])
@pytest.mark.parametrize("bits", [8, 3, 0], ids=["codes", "stream", "dense"])
@pytest.mark.parametrize(
    "T, E, k, scores", [(1, 256, 8, 1), (1, 33, 3, 0), (3, 70, 5, 2), (8, 7, 7, 1), (1, 600, 4, 1)]
)
def test_moe_norm_route_matches_definition(T, E, k, scores, bits, last, rng, monkeypatch):
    monkeypatch.setattr(_tuning, "ROUTER_LAST", last)
    call = {**router_call(rng, T, E, 128, scores, bits), "top_k": k, "per_expert_scale": normal(rng, E)}
    check_norm_router(ops.moe_norm_route, call)


@pytest.mark.parametrize("last", [1, 8], ids=["alone", "all"])
@pytest.mark.parametrize("T, E, G, keep, k", [(1, 256, 8, 4, 8), (2, 33, 1, 1, 3), (5, 12, 3, 2, 7), (1, 40, 1, 1, 40)])
def test_moe_norm_group_route_matches_definition(T, E, G, keep, k, last, rng, monkeypatch):
    monkeypatch.setattr(_tuning, "ROUTER_LAST", last)
    how = {
        "n_group": G,
        "topk_group": keep,
        "top_k": k,
        "routed_scaling_factor": 2.5,
        "bias": normal(rng, E, scale=0.1),
    }
    check_norm_router(ops.moe_norm_group_route, {**router_call(rng, T, E, 64), **how})


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("op", [ops.moe_norm_route, ops.moe_norm_group_route], ids=["route", "group"])
def test_norm_routers_give_odd_rows_no_experts(op, nan, rng, monkeypatch):
    """Rows of NaN and of infinities, and one of no sequence; ties go to the lowest index."""
    monkeypatch.setattr(_tuning, "ROUTER_LAST", 8)
    call = router_call(rng, 5, 40, 64, bits=0)
    call["x"][0, 7], call["x"][1, 9] = np.nan, np.inf
    call["w"][8:32] = call["w"][8]
    how = {"top_k": 6, "active": i32(0, 0, -1, 3, 0), "propagate_nan": nan}
    how |= {"per_expert_scale": None} if op is ops.moe_norm_route else {"n_group": 4, "topk_group": 2, "bias": None}
    got, want = run(op, **call, **how), reference(op, **call, **how)
    assert_same_bits("ids", got[1], want[1])
    assert_same_bits("which are NaN", np.isnan(got[2]), np.isnan(want[2]))
    assert_close("weights", np.nan_to_num(got[2]), np.nan_to_num(want[2]), 2e-5)


@pytest.mark.parametrize("T", [1, 9])
def test_moe_norm_route_is_batch_invariant_if_asked(T, rng):
    call = {**router_call(rng, 10, 33, 128), "top_k": 5, "per_expert_scale": None}
    with penstock.backend("cuda", deterministic=True):
        whole = ops.moe_norm_route(**{name: to_device(value) for name, value in call.items()})
        part = ops.moe_norm_route(**{name: to_device(value) for name, value in {**call, "x": call["x"][:T]}.items()})
    for name, a, b in zip(("h", "ids", "weights", "scores"), to_host(part), to_host(whole), strict=True):
        assert_same_bits(name, a, b[:T])


def test_moe_norm_route_leaves_its_counter_at_zero(rng):
    """Also where another call has written to the same array before."""
    call = {name: to_device(value) for name, value in router_call(rng, 1, 200, 64, scores=3).items()}
    out = tuple(to_device(np.empty((1, n), kind)) for n, kind in ((64, "f4"), (5, "i4"), (5, "f4"), (3, "f4")))
    found = []
    with penstock.backend("cuda"):
        for _ in range(3):
            for each in out:
                each.fill_(-7)
            ops.moe_norm_route(**call, per_expert_scale=None, top_k=5, out=out)
            found.append([each.clone() for each in out])
            ended = counters(out[1])
            assert ended is not None and not ended.any()
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))


@pytest.mark.parametrize("bits", [8, 0], ids=["codes", "dense"])
def test_moe_norm_route_fetches_without_a_trace(bits, rng, monkeypatch):
    """Programs that bring another weight to a cache change no result; its size is no multiple of what each takes."""
    call = {**router_call(rng, 1, 40, 256, 1, bits), "top_k": 5, "per_expert_scale": None}
    want = run(ops.moe_norm_route, **call)
    monkeypatch.setattr(_tuning, "ROUTER_FETCH", 3)
    for fetch in (quantized(rng, 131, 1024), normal(rng, 77, 1024), normal(rng, 2, 8)):
        for name, a, b in zip(
            ("h", "ids", "weights", "scores"), run(ops.moe_norm_route, **call, fetch=fetch), want, strict=True
        ):
            assert_same_bits(name, a, b)


@pytest.mark.cuda
@pytest.mark.parametrize("T, E, dim, bits", [(1, 256, 2048, 8), (1, 128, 2816, 0), (4, 256, 7168, 8)])
def test_moe_norm_route_in_a_chain_of_replays_equals_call_by_call(T, E, dim, bits, rng, monkeypatch):
    """The last program sees the logits of all others, and the next launch what it chose."""
    monkeypatch.setattr(_tuning, "ROUTER_LAST", 8)
    call = {name: to_device(value) for name, value in router_call(rng, T, E, dim, 1, bits, "bfloat16").items()}

    def chain(x: torch.Tensor, wait: Any) -> list[torch.Tensor]:
        made = []
        for _ in range(20):
            h, ids, weights, score = ops.moe_norm_route(**{**call, "x": x}, per_expert_scale=None, top_k=8)
            wait()
            x = h + (weights.sum() + score[0, 0] + ids.sum() % 7).to(h.dtype)
            made += [h, ids, weights, score]
            wait()
        return made

    want = chain(call["x"], torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(call["x"], lambda: None)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# -- experts ---------------------------------------------------------------------------------------------------------


def block(rng: Any, T: int, E: int, k: int, N: int, K: int, dtype: str = "float32", **form: Any) -> dict[str, Any]:
    stacks = {
        "gate_w": quantized(rng, E, N, K, **form),
        "up_w": quantized(rng, E, N, K, **form),
        "down_w": quantized(rng, E, K, N, **form),
    }
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    return {
        "x": normal(rng, T, K, dtype=dtype),
        "ids": ids,
        "weights": np.abs(normal(rng, T, k)),
        **stacks,
        "slot_of": None,
        "act": "silu",
        "activations": "float32",
    }


def close_enough(got: np.ndarray, want: np.ndarray, rel: float) -> None:
    want = want.astype(np.float64)
    assert_close("y", got, want, rel, np.abs(want).max())


VARIANTS = pytest.mark.parametrize("variant", ["rows", "grouped"])


@VARIANTS
@pytest.mark.parametrize("T, dtype", [(1, "bfloat16"), (5, "float32"), (700, "bfloat16")] if GPU else [(1, "float32")])
def test_moe_forward_variant_matches_definition(variant, T, dtype, rng):
    sizes = {"E": 16, "k": 4, "N": 512, "K": 1024} if GPU else {"E": 3, "k": 1, "N": 32, "K": 32}
    call = block(rng, T, **sizes, dtype=dtype, group_size=32)
    close_enough(run(ops.moe_forward, variant, **call), reference(ops.moe_forward, **call), 2**-6 if T > 5 else 2**-7)


@VARIANTS
def test_moe_forward_skips_absent_experts(variant, rng):
    """Value checks do not run on a GPU: a pair without an expert adds nothing."""
    call = with_fences(block(rng, 2, 4, 3, 32, 32))
    call["slot_of"] = i32(2, -1, 0, 1, 9)
    call["ids"] = i32([3, 1, -1], [4, 5, -(2**31)])
    got = run_unchecked(ops.moe_forward, variant, call)
    present = np.array([[1, 0, 0], [0, 0, 0]], np.float32)
    safe = {**call, "ids": i32([3, 3, 3], [3, 3, 3]), "weights": call["weights"] * present}
    close_enough(got, reference(ops.moe_forward, **safe), 4e-6)


@pytest.mark.parametrize("way", ["rows", "grouped", "deterministic", "int8"])
def test_rows_of_no_sequence_leave_the_others_as_they_are(way, rng):
    """Rows beyond the tokens of a step: none, some, all but a few, all. What they hold is not looked at."""
    T, sizes = (300, {"E": 16, "k": 4, "N": 256, "K": 512}) if GPU else (9, {"E": 3, "k": 2, "N": 32, "K": 32})
    T = T if GPU or way in ("grouped", "int8") else 3  # the interpreter is slow by the program
    call = with_fences(block(rng, T, **sizes, dtype="bfloat16", group_size=32))
    call["activations"] = "int8" if way == "int8" else "float32"
    logits = normal(rng, T, sizes["E"])

    def routed(inactive: np.ndarray) -> np.ndarray:
        given = {**call, "x": np.where(inactive[:, None], call["x"].dtype.type(np.nan), call["x"])}
        made = {name: to_device(value) for name, value in given.items()}
        seen = to_device(np.where(inactive[:, None], np.float32(np.nan), logits))
        active = to_device(np.where(inactive, -1, np.arange(T)).astype(np.int32))
        with penstock.backend("cuda"):
            made["ids"], made["weights"] = ops.moe_softmax_topk(seen, sizes["k"], True, active)
        made["weights"][made["ids"] < 0] = float("inf")
        variant = way if way in ("rows", "grouped") else None
        with penstock.backend("cuda", variant=variant, deterministic=way == "deterministic"):
            return to_host(ops.moe_forward(**made))

    row = np.arange(T)
    want = routed(row < 0)
    assert np.isfinite(want.astype(np.float32)).all()
    for inactive in (row % 3 > 0, row >= 2, row >= 0):
        got = routed(inactive)
        assert_same_bits("rows of sequences", got[~inactive], want[~inactive])
        assert not got[inactive].any()


def test_expert_mlp_leaves_the_rows_of_absent_experts(rng):
    call = with_fences(block(rng, 3, 4, 2, 32, 32))
    del call["weights"]
    call |= {"slot_of": i32(2, -1, 0, -1), "ids": i32([0, 1], [3, 2], [1, 3]), "expert_out": normal(rng, 3, 2, 32)}
    made = {name: to_device(value) for name, value in call.items()}
    with penstock.backend("cuda"):
        ops.expert_mlp(**made)
    got, want = made["expert_out"].cpu().numpy(), call["expert_out"].copy()
    with penstock.backend("reference"):
        ops.expert_mlp(**{**call, "expert_out": want})
    close_enough(got, want, 4e-6)
    absent = np.array([[False, True], [True, False], [True, True]])
    np.testing.assert_array_equal(got[absent], call["expert_out"][absent])


STACKS = ("gate_w", "up_w", "down_w")


def with_fences(call: dict[str, Any]) -> dict[str, Any]:
    """NaN around the stacks of a call, which a kernel that reads an absent expert finds."""
    return {name: fenced(value) if name in STACKS else value for name, value in call.items()}


def run_unchecked(op: Any, variant: str | None, call: dict[str, Any]) -> np.ndarray:
    """By the kernel with values that the definition's checks refuse."""
    made = {name: to_device(value) for name, value in call.items()}
    with penstock.backend("cuda", variant=variant):
        return op(**made).cpu().numpy()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_moe_forward_deterministic_rows_do_not_depend_on_the_batch(dtype, rng):
    T = 300
    made = {name: to_device(value) for name, value in block(rng, T, 16, 8, 512, 1024, dtype=dtype).items()}
    with penstock.backend("cuda", deterministic=True):
        whole = ops.moe_forward(**made)
        for part in (slice(0, 1), slice(7, 9), slice(100, 140), slice(T - 1, T)):
            some = {**made, **{name: made[name][part] for name in ("x", "ids", "weights")}}
            assert torch.equal(ops.moe_forward(**some), whole[part])


@pytest.mark.cuda
@pytest.mark.parametrize("bits, group_size", [(2, 32), (3, 64), (5, 32), (6, 128), (8, 64)])
def test_moe_forward_takes_every_format(bits, group_size, rng):
    call = block(rng, 2, 3, 2, 128, 128, bits=bits, group_size=group_size)
    close_enough(run(ops.moe_forward, **call), reference(ops.moe_forward, **call), 4e-6)


@pytest.mark.cuda
@VARIANTS
@pytest.mark.parametrize("T", [1, 64, 1000])
def test_moe_forward_gives_the_same_bits_every_time(variant, T, rng):
    call = {name: to_device(value) for name, value in block(rng, T, 32, 8, 512, 1024, dtype="bfloat16").items()}
    with penstock.backend("cuda", variant=variant):
        first = ops.moe_forward(**call)
        assert all(torch.equal(ops.moe_forward(**call), first) for _ in range(20))


@pytest.mark.cuda
@pytest.mark.parametrize("T", [1, 300])
def test_moe_block_replays_in_a_graph_with_other_tokens(T, rng):
    """Router, experts and combination captured once; ids, logits and rows change in their buffers."""
    call = block(rng, T, 32, 4, 256, 512, dtype="bfloat16")
    made = {name: to_device(value) for name, value in call.items()}
    logits, made_x = to_device(normal(rng, T, 32)), made["x"]

    def step() -> torch.Tensor:
        ids, weights = ops.moe_softmax_topk(logits, 4)
        routed = ops.moe_forward(**{**made, "ids": ids, "weights": ops.moe_normalize_weights(weights)})
        return ops.moe_combine_residual(made_x, None, None, made_x, None, moe_sum=routed)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        logits.copy_(torch.randn_like(logits))
        made_x.copy_(torch.randn_like(made_x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, step())


# -- whole blocks ----------------------------------------------------------------------------------------------------


def whole_block(rng: Any, T: int, E: int, k: int, N: int, K: int, dtype: str = "float32", **form: Any) -> Any:
    shared = {"gate_w": (N, K), "up_w": (N, K), "down_w": (K, N)}
    return {
        "residual": normal(rng, T, K, dtype=dtype),
        **block(rng, T, E, k, N, K, dtype, **form),
        **{f"shared_{name}": quantized(rng, *shape, **form) for name, shape in shared.items()},
        "shared_score": normal(rng, T, 1, dtype="bfloat16"),
    }


@pytest.mark.parametrize("bits, group_size", [(4, 64), (8, 32), (3, 32), (2, 128)][: None if GPU else 2])
@pytest.mark.parametrize("T, E", [(1, 16), (2, 16), (5, 64), (5, 5)] if GPU else [(2, 16), (2, 5)])
def test_moe_shared_forward_by_rows_matches_definition(T, E, bits, group_size, rng):
    """Two launches where few tokens choose among many experts; the others with pairs sorted by expert."""
    size = 128 if GPU else 64
    call = whole_block(rng, T, E, 2, size, size, bits=bits, group_size=group_size)
    call["norm_weight"] = normal(rng, size, dtype="float16")
    close_enough(run(ops.moe_shared_forward, "rows", **call), reference(ops.moe_shared_forward, **call), 4e-6)


@VARIANTS
def test_moe_shared_forward_skips_absent_experts(variant, rng):
    """The shared expert and the residual stay where no routed expert is there."""
    call = with_fences(whole_block(rng, 2, 4, 3, 32, 32))
    call["slot_of"] = i32(2, -1, 0, 1, 9)
    call["ids"] = i32([3, 1, -1], [4, 5, -(2**31)])
    got = run_unchecked(ops.moe_shared_forward, variant, call)
    present = np.array([[1, 0, 0], [0, 0, 0]], np.float32)
    safe = {**call, "ids": i32([3, 3, 3], [3, 3, 3]), "weights": call["weights"] * present}
    close_enough(got, reference(ops.moe_shared_forward, **safe), 4e-6)


@pytest.mark.parametrize(
    ("variant", "shared", "own"),
    [
        ("rows", False, ()),
        ("rows", True, (0, 3)),
        ("lanes", False, (0, 3)),
        ("lanes", True, ()),
        ("grouped", False, (0, 3)),
        ("grouped", True, ()),
    ],
)
def test_other_ranks_experts_are_no_experts(variant, shared, own, rng):
    """Bit for bit as with ids of −1, whatever their weights and their rows are; a stack may be empty."""
    E, k = 4, 3
    call = (whole_block if shared else block)(rng, 2, E, k, 32, 32, "bfloat16")
    stacks = {name: call[name].with_arrays(*(a[list(own)] for a in call[name].arrays)) for name in STACKS}
    call |= {name: fenced(stack) for name, stack in stacks.items()}
    call["slot_of"] = np.full(E, -2, np.int32)
    call["slot_of"][list(own)] = np.arange(len(own))
    call["ids"] = i32([3, 1, 0], [1, 2, -1])
    mine = np.isin(call["ids"], own)
    call["weights"][~mine] = np.nan
    op = ops.moe_shared_forward if shared else ops.moe_forward
    if not shared:
        call["x"][~mine.any(axis=-1)] = np.nan
    none = np.where(mine, call["ids"], -1).astype(np.int32)
    got = run(op, variant, **call)
    assert_same_bits("y", got, run(op, variant, **call | {"ids": none}))
    want = reference(op, **call)
    assert_close("y", got, want, 2**-7, np.abs(want.astype(np.float64)).max())
    assert shared or not got[~mine.any(axis=-1)].any()
    if not shared and variant == "grouped":
        each = np.full((2, k, 32), np.nan, np.float32)
        each[mine] = 1
        got = run(op, **call | {"expert_out": each, "slot_of": np.where(call["slot_of"] < 0, -2, -1).astype(np.int32)})
        assert_close("y of rows", got, np.nansum(call["weights"] * mine, axis=1, keepdims=True) * np.ones(32), 2**-7)


def test_moe_shared_forward_of_many_pairs_sums_rows_of_half_precision(rng, monkeypatch):
    monkeypatch.setattr(cuda_moe, "_EXACT", 0)
    call = whole_block(rng, 9, 3, 2, 96, 64, dtype="float16")
    call["residual"] = normal(rng, 9, 64)
    call["ids"][4, 1] = -1
    want = reference(ops.moe_shared_forward, **call)
    got = run(ops.moe_shared_forward, "grouped", **call)
    assert_close("y", got, want, 2**-11, np.abs(want.astype(np.float64)).max())


def test_moe_shared_forward_writes_over_the_residual(rng):
    call = whole_block(rng, 1, 3, 2, 32, 32)
    call["x"] = call["residual"]
    call["norm_weight"] = normal(rng, 32)
    want = reference(ops.moe_shared_forward, **call)
    made = {name: to_device(value) for name, value in call.items()}
    made["x"] = made["residual"]
    with penstock.backend("cuda"):
        ops.moe_shared_forward(**made, out=made["residual"])
    close_enough(made["residual"].cpu().numpy(), want, 4e-6)


@pytest.mark.parametrize("T, E", [(1, 3), (2, 4), (9, 3)], ids=["rows", "in-turn", "grouped"])
def test_moe_shared_forward_without_a_residual_writes_over_x(T, E, rng):
    call = whole_block(rng, T, E, 2, 32, 32) | {"residual": None, "norm_weight": normal(rng, 32)}
    want = reference(ops.moe_shared_forward, **call)
    made = {name: value if value is None else to_device(value) for name, value in call.items()}
    with penstock.backend("cuda"):
        ops.moe_shared_forward(**made, out=made["x"])
    close_enough(made["x"].cpu().numpy(), want, 4e-6)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "T, E, dim, width", [(1, 32, 2048, 512), (2, 16, 2048, 512), (1, 9, 7168, 2048), (40, 16, 512, 256)]
)
def test_moe_shared_forward_in_a_chain_of_replays_equals_call_by_call(T, E, dim, width, rng):
    """Kernels that start before the one ahead of them has ended read nothing too soon."""
    call = {name: to_device(value) for name, value in whole_block(rng, T, E, 8, width, dim, "bfloat16").items()}
    router, norm = to_device(quantized(rng, E, dim, bits=8)), to_device(normal(rng, dim, dtype="bfloat16"))

    def chain(x: torch.Tensor, wait: Any) -> torch.Tensor:
        for _ in range(10):
            logits = ops.norm_matmul(x, norm, router, dtype="float32")
            wait()
            ids, weights = ops.moe_route(logits, None, 8)
            wait()
            more = {"residual": x, "x": x, "ids": ids, "weights": weights, "norm_weight": norm}
            x = ops.moe_shared_forward(**{**call, **more}) * 0.5
            wait()
        return x

    want = chain(call["x"], torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(call["x"], lambda: None)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)


def routed_block(
    rng: Any,
    T: int,
    E: int,
    k: int,
    N: int,
    K: int,
    bits: int = 8,
    scored: bool = True,
    dtype: str = "float32",
    **form: Any,
) -> dict[str, Any]:
    """A call of moe_route_forward; bits: of the router's weight, 0: dense."""
    given = whole_block(rng, T, E, k, N, K, dtype, **form)
    experts = {name: value for name, value in given.items() if name.endswith("_w")}
    router = router_call(rng, T, E, K, int(scored), bits, dtype)
    rows = {name: router[name] for name in ("x", "norm_weight", "w")}
    scale = normal(rng, E)
    return {"residual": given["residual"], **rows, **experts, "per_expert_scale": scale, "top_k": k, "scored": scored}


@pytest.fixture
def chosen_inside(monkeypatch) -> list[int]:
    """Gate and up choose for up to 4 tokens; tokens of each launch that did."""
    found: list[int] = []
    launch = cuda_moe.chosen_gate_up

    def counted(x: torch.Tensor, *rest: Any) -> None:
        found.append(len(x))
        launch(x, *rest)

    monkeypatch.setattr(cuda_moe, "chosen_gate_up", counted)
    monkeypatch.setattr(cuda_moe, "MOE_CHOOSES", 4)
    return found


def check_routed_block(call: dict[str, Any], rel: float = 4e-6) -> Any:
    got, want = run(ops.moe_route_forward, **call), reference(ops.moe_route_forward, **call)
    assert_same_bits("ids", got[1], want[1])
    assert_same_bits("which are NaN", np.isnan(got[2]), np.isnan(want[2]))
    assert_close("weights", np.nan_to_num(got[2]), np.nan_to_num(want[2]), 2e-5, 1.0)
    odd = np.isnan(want[0])
    assert_same_bits("rows of NaN", np.isnan(got[0]), odd)
    close_enough(np.where(odd, 0, got[0]), np.where(odd, 0, want[0]), rel)
    return got


@pytest.mark.parametrize(
    "T, E, k, bits, scored",
    [(1, 256, 8, 8, True), (1, 33, 3, 0, False), (3, 70, 5, 8, True), (2, 512, 1, 0, True), (1, 40, 40, 8, False),
     (4, 31, 7, 3, True)],
)  # fmt: skip
def test_moe_route_forward_matches_definition(T, E, k, bits, scored, chosen_inside, rng):
    check_routed_block(routed_block(rng, T, E, k, 96, 64, bits, scored), 2e-5)
    assert chosen_inside == [T]


@pytest.mark.parametrize("nan", [False, True])
def test_moe_route_forward_of_odd_rows(nan, chosen_inside, rng):
    """NaN, infinities, a row of no sequence; ties of many experts, which go to the lowest index."""
    call = routed_block(rng, 4, 40, 6, 32, 64, 0) | {"active": i32(0, 0, -1, 3), "propagate_nan": nan, "top_k": 6}
    call["x"][0, 7] = np.nan
    call["x"][1, 9] = np.inf
    call["w"][3:30] = call["w"][3]
    call["w"][33:36] = call["w"][33]
    check_routed_block(call)
    assert chosen_inside == [4]


@pytest.mark.parametrize("first", [0, 1, 5, 28])
def test_moe_route_forward_ranks_equal_experts_by_index(first, chosen_inside, rng):
    """Each place of a row whose keys come in pairs, negative ones and zeros of both signs too."""
    call = routed_block(rng, 1, 32, 8, 32, 32, 0)
    logits = np.repeat(np.arange(16, dtype=np.float32) - 4, 2)[rng.permutation(32)]
    logits[first : first + 2] = 0.0, -0.0
    call["x"], call["norm_weight"] = np.zeros((1, 32), np.float32), np.ones(32, np.float32)
    call["x"][0, 0] = 1
    call["w"] = np.zeros((33, 32), np.float32)
    call["w"][:32, 0] = logits
    check_routed_block(call | {"per_expert_scale": None, "eps": 1e-6})
    assert chosen_inside == [1]


@pytest.mark.parametrize("nan", [False, True])
def test_gate_and_up_that_choose_equal_those_with_ids(nan, rng):
    """Bit for bit, in rows without a sound choice and of no sequence too, which no later result shows."""
    T, E, k, N, K = 5, 40, 6, 64, 32
    block = {name: to_device(w) for name, w in whole_block(rng, T, E, k, N, K).items() if name.endswith("_w")}
    logits = normal(rng, T, E)
    logits[1, 7], logits[2, 30], logits[3, 2:30] = np.nan, -np.inf, 4
    ids, weights = (to_device(np.full((T, k), -7, dtype)) for dtype in ("int32", "float32"))
    x, seen, active = to_device(normal(rng, T, K)), to_device(logits), to_device(i32(0, 0, 0, 0, -1))
    got, want = (torch.full((T, k + 1, N), float("nan"), device=x.device) for _ in range(2))
    routing, chooses = _route.Routing(None, active, ids, weights, 1.0), _route.router(E, k, 0, 0, -1.0, nan)
    assert chooses is not None
    common = block["gate_w"], block["up_w"], block["shared_gate_w"], block["shared_up_w"]
    with penstock.backend("cuda"):
        cuda_moe.chosen_gate_up(x, *common, seen, routing, chooses, "silu", got)
        chosen = ops.moe_route(seen, None, k, nan, active)
        _matvec_experts.mixed_gate_up(x, *common, chosen[0], None, "silu", want)
    assert torch.equal(ids, chosen[0]) and torch.equal(weights.nan_to_num(9), chosen[1].nan_to_num(9))
    assert_same_bits("h", to_host(got), to_host(want))


def test_moe_route_forward_in_parts_where_it_has_to_be(chosen_inside, rng):
    """Many tokens, experts of another format than the shared one, more experts than a program looks through."""
    for call in (
        routed_block(rng, 5, 12, 3, 32, 32),
        routed_block(rng, 1, 12, 3, 32, 32) | {"shared_down_w": normal(rng, 32, 32, scale=0.2)},
        routed_block(rng, 1, 1100, 3, 32, 32),
    ):
        check_routed_block(call)
    assert not chosen_inside


@pytest.mark.parametrize("T", [1, 3])
def test_moe_route_forward_is_batch_invariant_if_asked(T, chosen_inside, rng):
    call = routed_block(rng, 5, 20, 4, 32, 64) | {"per_expert_scale": None}
    part = call | {name: call[name][:T] for name in ("x", "residual")}
    with penstock.backend("cuda", deterministic=True):
        whole, some = (
            to_host(ops.moe_route_forward(**{n: v if v is None else to_device(v) for n, v in each.items()}))
            for each in (call, part)
        )
    for name, a, b in zip(("y", "ids", "weights"), some, whole, strict=True):
        assert_same_bits(name, a, b[:T])
    assert not chosen_inside


@pytest.mark.cuda
@pytest.mark.parametrize(
    "T, E, dim, width",
    [(1, 256, 2048, 512), (1, 64, 2048, 1024), (1, 40, 1024, 512), (2, 256, 2048, 512), (3, 256, 2048, 512),
     (4, 256, 2048, 512), (4, 256, 2048, 1024)],
)  # fmt: skip
def test_moe_route_forward_in_a_chain_of_replays_equals_call_by_call(T, E, dim, width, rng):
    """Kernels that start before the one ahead of them has ended read nothing too soon, ids that it chose neither."""
    call = {
        name: to_device(value) for name, value in routed_block(rng, T, E, 8, width, dim, dtype="bfloat16").items()
    } | {"per_expert_scale": None}  # fmt: skip
    parts = {name: call[name] for name in ("norm_weight", "w", "per_expert_scale", "top_k")}

    def chain(x: torch.Tensor, wait: Any) -> list[torch.Tensor]:
        made = []
        for _ in range(10):
            y, ids, weights = ops.moe_route_forward(**{**call, "residual": x, "x": x})
            wait()
            x = y * 0.5
            made += [y, ids, weights]
            wait()
        return made

    want = chain(call["x"], torch.cuda.synchronize)
    _, ids, weights, _ = ops.moe_norm_route(call["x"], **parts, scores=1, write_normed=True)
    assert torch.equal(want[1], ids)
    assert torch.equal(want[2], weights) if T == 1 else torch.allclose(want[2], weights, rtol=1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(call["x"], lambda: None)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# -- down whose warps share the common expert --------------------------------------------------------------------------

# experts, k, width of an expert, bits and group size: 8, 4 and 4 blocks, the last ones of each expert not full
SHARED_DOWNS = [(40, 8, 512, 4, 64), (20, 4, 448, 4, 64), (16, 4, 192, 2, 32), (16, 2, 832, 4, 64)]


@pytest.fixture
def shared_downs(monkeypatch) -> list[bool]:
    """Whether the kernel took each of the calls; as on a GPU of many multiprocessors."""
    found: list[bool] = []
    launch = _matvec_experts.shared_down_sum

    def counted(*args: Any) -> bool:
        found.append(launch(*args))
        return found[-1]

    monkeypatch.setattr(_matvec_experts, "shared_down_sum", counted)
    monkeypatch.setattr(_shared_down, "multiprocessors", lambda x: 132)
    monkeypatch.setattr(cuda_moe, "MOE_IN_TURN", 0)  # pairs of several tokens are not sorted
    return found


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("E, k, N, bits, group_size", SHARED_DOWNS)
@pytest.mark.parametrize("alone", [False, True], ids=["stream", "alone"])
def test_down_of_few_tokens_matches_definition(T, E, k, N, bits, group_size, alone, shared_downs, rng):
    """With a residual stream and a score, and without either."""
    call = whole_block(rng, T, E, k, N, 128, "bfloat16", bits=bits, group_size=group_size)
    call |= {"residual": None, "shared_score": None} if alone else {"residual": normal(rng, T, 128)}
    got, want = run(ops.moe_shared_forward, "rows", **call), reference(ops.moe_shared_forward, **call)
    close_enough(got, want, 2**-7 if alone else 2e-3)
    assert shared_downs == [True]


def test_down_of_few_tokens_skips_absent_experts(shared_downs, rng):
    """Some of one token, all of another, as in a row of no sequence."""
    call = with_fences(whole_block(rng, 3, 40, 8, 512, 64, "bfloat16", bits=4, group_size=64))
    call |= {"residual": normal(rng, 3, 64)}
    call["ids"] = i32([3, 1, -1, 39, 5, 40, -(2**31), 0], [-1] * 8, [7, 1, 38, 2, 0, 39, 30, 4])
    call["slot_of"] = np.concatenate([np.arange(39), [-1]]).astype(np.int32)
    here = np.array([[1, 1, 0, 0, 1, 0, 0, 1], [0] * 8, [1, 1, 1, 1, 1, 0, 1, 1]], np.float32)
    safe = {**call, "ids": np.where(here > 0, call["ids"], 3).astype(np.int32), "weights": call["weights"] * here}
    want = reference(ops.moe_shared_forward, **safe)
    call["weights"] = np.where(here > 0, call["weights"], np.nan).astype(np.float32)
    close_enough(run_unchecked(ops.moe_shared_forward, "rows", call), want, 2e-3)
    assert shared_downs == [True]


@pytest.mark.parametrize("T", [1, 4])
def test_down_of_few_tokens_writes_over_the_residual(T, shared_downs, rng):
    call = whole_block(rng, T, 40, 8, 512, 64, "bfloat16", bits=4, group_size=64) | {"residual": normal(rng, T, 64)}
    want = reference(ops.moe_shared_forward, **call)
    made = {name: value if value is None else to_device(value) for name, value in call.items()}
    with penstock.backend("cuda"):
        ops.moe_shared_forward(**made, out=made["residual"])
    close_enough(made["residual"].cpu().numpy(), want, 2e-3)
    assert shared_downs == [True]


@pytest.mark.parametrize(
    "T, k, N, dtype, form",
    [(5, 8, 512, "bfloat16", {"bits": 4}), (1, 7, 512, "bfloat16", {"bits": 4}), (1, 8, 1024, "bfloat16", {"bits": 4}),
     (1, 8, 512, "float16", {"bits": 4}), (1, 8, 512, "bfloat16", {"bits": 8})],
)  # fmt: skip
def test_down_of_other_sizes_goes_another_way(T, k, N, dtype, form, shared_downs, rng):
    call = whole_block(rng, T, 64, k, N, 64, dtype, group_size=64, **form) | {"residual": normal(rng, T, 64)}
    close_enough(run(ops.moe_shared_forward, "rows", **call), reference(ops.moe_shared_forward, **call), 4e-3)
    assert shared_downs == [False]


# -- combination -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [None, -1.5, 800.0], ids=str)
@pytest.mark.parametrize("k", [0, 3, 20])
def test_moe_combine_residual_takes_any_slots_and_gates(k, gate, rng):
    rows = {name: normal(rng, 2, 37, dtype="float16") for name in ("h_mid", "shared_out")}
    call = {**rows, "expert_out": normal(rng, 2, k, 37, dtype="float16"), "weights": normal(rng, 2, k)}
    got, want = (how(ops.moe_combine_residual, **call, shared_gate=gate) for how in (run, reference))
    assert_close("y", got, want, 2**-10)


def test_moe_combine_residual_writes_over_its_input(rng):
    h, moe = (normal(rng, 3, 50) for _ in range(2))
    call = {"h_mid": h, "expert_out": None, "weights": None, "shared_out": None, "moe_sum": moe}
    want = reference(ops.moe_combine_residual, **call)
    made = {name: to_device(value) for name, value in call.items()}
    with penstock.backend("cuda"):
        ops.moe_combine_residual(**made, out=made["h_mid"])
    assert_close("y", made["h_mid"].cpu().numpy(), want, 2e-6)


def test_moe_bucket_accumulate_adds_every_row_of_a_token(rng):
    T, B, dim = (50, 3000, 2100) if GPU else (5, 40, 37)
    tokens = rng.integers(0, T, B).astype(np.int32)
    tokens[::7] = 3
    sums = {"out_sum": normal(rng, T, dim), "bucket_out": normal(rng, B, dim)}
    call = {**sums, "token_idx": tokens, "weights": normal(rng, B)}
    want = {name: value.copy() for name, value in call.items()}
    with penstock.backend("reference"):
        ops.moe_bucket_accumulate(**want)
    made = {name: to_device(value) for name, value in call.items()}
    with penstock.backend("cuda"):
        ops.moe_bucket_accumulate(**made)
    assert_close("out_sum", made["out_sum"].cpu().numpy(), want["out_sum"], 2e-6, np.abs(want["out_sum"]).max())


def test_moe_bucket_accumulate_skips_tokens_that_are_not_there(rng):
    before = normal(rng, 3, 5)
    made = {
        "out_sum": before,
        "bucket_out": normal(rng, 4, 5),
        "token_idx": i32(-1, 3, 1, 2**30),
        "weights": before[0, :4],
    }
    made = {name: to_device(value.copy()) for name, value in made.items()}
    with penstock.backend("cuda"):
        ops.moe_bucket_accumulate(**made)
    after = made["out_sum"].cpu().numpy()
    assert_same_bits("other rows", after[[0, 2]], before[[0, 2]])
    assert (after[1] != before[1]).any()
