"""Sampling on CUDA: the tokens of the host's Sampler, ties at the limits, marked rows, graphs with other parameters."""

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.ops.sampling import MODES
from tests.gpu.common import GPU, reference, run, to_device
from tests.ops.common import assert_same_bits
from tests.ops.test_sampling import arguments, call, expected, rows

ROWS = {"greedy": 6, "plain": 4, "top_k": 2, "full": 2}  # in the interpreter


def check(logits, positions, parameters, mode):
    got = run(ops.sample_tokens, **arguments(logits, positions, parameters), mode=mode)
    want = expected(logits, positions, parameters)
    wrong = np.flatnonzero(got != want)
    assert not wrong.size, [(parameters[b], int(got[b]), want[b]) for b in wrong[:3]]


@pytest.mark.parametrize("mode", MODES)
def test_sample_tokens_gives_the_token_of_the_host(mode, rng):
    check(*rows(rng, 2000 if GPU else ROWS[mode], 297, mode), mode)


def test_sample_tokens_draws_from_every_block(rng):
    given = call(rng.standard_normal((300 if GPU else 12, 1000)), position=7, mode="plain")
    given["seed"][:] = np.arange(len(given["seed"]))
    got = run(ops.sample_tokens, **given)
    assert_same_bits("tokens", got, reference(ops.sample_tokens, **given))
    assert len(set((got // 256).tolist())) > 2


# Kinds of ties: (logits, top_k, top_p). 270 logits are two blocks.
TIES = {
    "k among equals": (lambda n: np.where(n < 5, 1.0, np.where(n % 9 == 4, 0.5, -1.0)), 12, 1.0),
    "p among those of k": (lambda n: np.where(n < 5, 1.0, np.where(n % 9 == 4, 0.5, -1.0)), 12, 0.9),
    "p above those of k": (lambda n: np.where(n % 90 == 7, 1.0, 0.5), 20, 0.2),
    "equal": (lambda n: np.zeros(n.size), 50, 0.5),
    "zeros of both signs": (lambda n: np.where(n % 2 == 0, -0.0, 0.0), 20, 1.0),
}


@pytest.mark.parametrize("mode", ["top_k", "full"])
@pytest.mark.parametrize("kind", TIES)
def test_sample_tokens_keeps_the_lowest_ids_among_equals(kind, mode, rng):
    form, top_k, top_p = TIES[kind]
    logits = form(np.arange(270)).astype(np.float32)
    last = np.sort(np.argsort(-logits, kind="stable")[:top_k])
    count = 300 if GPU else 1
    given = call(np.tile(logits, (count, 1)), top_k=top_k, top_p=top_p, mode=mode)
    given["positions"][:] = np.arange(count)
    if not GPU:
        given["positions"][:] = 145  # uniform(0, 145) is 0.994: the last kept id, where a limit one off shows
    got = run(ops.sample_tokens, **given)
    assert_same_bits("tokens", got, reference(ops.sample_tokens, **given))
    assert set(got.tolist()) <= set(last.tolist())


def test_sample_tokens_top_p_alone(rng):
    logits = (rng.standard_normal((200 if GPU else 1, 520)) * 2).astype(np.float32)
    given = call(logits, position=3, top_p=0.8)
    assert_same_bits("tokens", run(ops.sample_tokens, **given), reference(ops.sample_tokens, **given))


@pytest.mark.parametrize("mode", MODES)
def test_sample_tokens_marks_inactive_and_broken_rows(mode):
    logits = np.zeros((6, 300), np.float32)
    logits[1, 299], logits[2, 2], logits[3], logits[4, 0] = np.nan, np.inf, -np.inf, np.nan
    given = call(logits, temperature=float(mode != "greedy"), top_k=int(mode == "top_k"), mode=mode)
    given["positions"][4:] = -1
    given["temperature"][5], given["top_p"][5], given["top_k"][5] = np.nan, 7, -3
    assert run(ops.sample_tokens, **given)[1:].tolist() == [-2, -2, -2, -1, -1]


@pytest.mark.cuda
@pytest.mark.parametrize("V", [248_320, 262_144, 129_280, 32_001, 1])
@pytest.mark.parametrize("mode", MODES)
def test_sample_tokens_at_the_vocabularies_of_models(mode, V, rng):
    logits, positions, parameters = rows(rng, 40, V, mode)
    check(logits, positions, parameters, mode)
    check(logits[:1], positions[:1], parameters[:1], mode)
    given = {name: to_device(value) for name, value in arguments(logits, positions, parameters).items()}
    first = ops.sample_tokens(**given, mode=mode)
    assert all(torch.equal(ops.sample_tokens(**given, mode=mode), first) for _ in range(20))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
def test_sample_tokens_replays_in_a_graph_with_other_parameters(mode, rng):
    V, B = 20_003, 3
    made = [rows(rng, B, V, mode) for _ in range(8)]
    buffers = {name: to_device(value) for name, value in arguments(*made[0]).items()}
    ops.sample_tokens(**buffers, mode=mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.sample_tokens(**buffers, mode=mode)
    for given in made:
        for name, value in arguments(*given).items():
            buffers[name].copy_(to_device(value))
        got.fill_(-9)
        graph.replay()
        assert got.tolist() == expected(*given)


@pytest.mark.cuda
def test_sample_tokens_row_does_not_depend_on_the_others(rng):
    logits, positions, parameters = rows(rng, 64, 50_257)
    together = run(ops.sample_tokens, **arguments(logits, positions, parameters))
    for b in range(0, 64, 7):
        alone = arguments(logits[b : b + 1], positions[b : b + 1], parameters[b : b + 1])
        with penstock.backend("cuda", deterministic=True):
            assert ops.sample_tokens(**{n: to_device(v) for n, v in alone.items()}).item() == together[b]
