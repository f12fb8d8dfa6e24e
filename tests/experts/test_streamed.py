"""Whole models with streamed experts: the same bits as with all of them in memory, whatever the budget."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.api import LLM
from penstock.engine.expert_weights import ExpertOptions, budget_of, expert_layers, open_experts
from penstock.errors import CheckpointError, InvalidArgument, OutOfMemory
from penstock.experts.packed import write_packed
from penstock.experts.store import owned_bytes
from penstock.models import family_of, replaced
from penstock.models.layers import ExpertStack
from penstock.models.source import CheckpointSource, FileBackedSource, outlined
from penstock.ops.device import device_for
from penstock.weights.checkpoint import Checkpoint
from tests.experts.common import CONFIGS, checkpoint
from tests.models.common import moe_config, some_tokens
from tests.ops.common import normal

TOKENS = some_tokens(300)  # more than a piece of a prefill on the CPU


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = checkpoint(tmp_path_factory.mktemp("streamed") / name, CONFIGS[name])
        return made[name]

    return folder


def load(folder: Path, **options) -> LLM:
    return penstock.load(folder, device="cpu", **options)


def least(llm: LLM) -> int:
    """The smallest budget: one token's choice in one layer, of each format."""
    store = llm.engine.experts.store
    return sum(format.payload * store.top_k for format in {layer.format for layer in store.layers})


def decoded(llm: LLM, count: int = 3) -> np.ndarray:
    """Logits of sequences of different lengths that decode together, then alone."""
    engine = llm.engine
    sequences = [engine.open() for _ in range(count)]
    for n, sequence in enumerate(sequences):
        engine.prefill(sequence, TOKENS[: 5 + 3 * n])
    rows = [engine.decode(sequences, TOKENS[10 : 10 + count]) for _ in range(3)]
    rows.append(engine.decode(sequences[:1], TOKENS[20:21]))
    for sequence in sequences:
        engine.close(sequence)
    return np.concatenate(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_streamed_experts_give_the_same_bits(name, folder_of):
    folder = folder_of(name)
    resident = load(folder)
    want, rows = resident.logits(TOKENS), decoded(resident)
    probe = load(folder, expert_cache="100%")
    for budget in (str(least(probe)), "40%", "100%"):
        llm = load(folder, expert_cache=budget)
        np.testing.assert_array_equal(llm.logits(TOKENS), want)
        np.testing.assert_array_equal(decoded(llm), rows)
        store = llm.engine.experts.store
        arrays = {id(a): a.nbytes for pool in store.pool_of for a in pool.slots.arrays}
        assert store.nbytes == sum(arrays.values()) <= max(int(sum(layer.nbytes for layer in store.layers)), 0)
        stats = llm.stats()
        assert stats.expert_reads and stats.expert_bytes == store.nbytes
        assert budget == "100%" or stats.expert_reads > sum(layer.count for layer in store.layers)


def test_experts_that_come_in_batches_give_one_token_the_same_bits(folder_of, monkeypatch):
    """As when reads of guesses leave no slot: also the kernel of one token never meets an absent expert."""
    folder = folder_of("qwen3_5")
    want = decoded(load(folder))
    llm = load(folder, expert_cache="40%")
    monkeypatch.setattr(llm.engine.experts.store, "request", lambda *args, **options: False)
    np.testing.assert_array_equal(decoded(llm), want)


@pytest.mark.parametrize("policy", ["lru", "lfru", "pin"])
@pytest.mark.parametrize("io", ["direct", "pagecache", "mmap"])
def test_every_policy_and_way_to_read_gives_the_same_text(policy, io, folder_of):
    folder = folder_of("qwen3_5")
    options = {"max_tokens": 12, "temperature": 0.7, "seed": 3}
    want = load(folder).generate(TOKENS[:20], **options).tokens
    try:
        llm = load(folder, expert_cache="30%", expert_policy=policy, expert_io=io)
    except CheckpointError as error:
        pytest.skip(f"{error}")
    assert llm.generate(TOKENS[:20], **options).tokens == want


def test_exact_products_are_streamed_too(folder_of):
    folder = folder_of("gemma4")
    want = load(folder, activations="float32").logits(TOKENS[:40])
    np.testing.assert_array_equal(load(folder, activations="float32", expert_cache="30%").logits(TOKENS[:40]), want)


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "gemma4"])
def test_a_guess_at_the_next_choice_changes_no_bit(name, folder_of):
    folder = folder_of(name)
    want = load(folder).generate(TOKENS[:20], max_tokens=12).tokens
    llm = load(folder, expert_cache="70%", expert_prefetch=True)
    assert llm.generate(TOKENS[:20], max_tokens=12).tokens == want
    store = llm.engine.experts.store
    assert 0 < store.counters.guessed < store.counters.reads


def test_a_prefill_reads_every_expert_once_per_piece_at_most(folder_of):
    llm = load(folder_of("qwen3_5"), expert_cache="25%")
    store = llm.engine.experts.store
    llm.logits(TOKENS[:256])
    assert store.counters.reads <= sum(layer.count for layer in store.layers)
    llm.logits(TOKENS[:256])
    assert store.counters.reads <= 2 * sum(layer.count for layer in store.layers)


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_that_own_the_halves_read_those_and_add_up_to_the_whole(packed, folder_of, tmp_path, rng):
    folder = folder_of("qwen3_5")
    source = Checkpoint.open(folder)
    family = family_of(source.config)
    config, device = family.read_config(source.config), device_for("cpu")
    weights_of = CheckpointSource(source, *family.names(source, config))
    layers = expert_layers(family, weights_of, config)
    options = ExpertOptions(cache="60%", file=f"{tmp_path / 'experts'}" if packed else None)
    if packed:
        write_packed(layers, source.fingerprint, tmp_path / "experts")
    E, k, dim = layers[0].count, config.top_k, config.dim
    ids = np.stack([rng.permutation(E)[:k] for _ in range(40)]).astype(np.int32)
    x, weights = normal(rng, len(ids), dim), np.abs(normal(rng, len(ids), k))
    results = {}
    for owned in (None, tuple(range(0, E, 2)), tuple(range(1, E, 2))):
        of_rank = family.read_weights(FileBackedSource(weights_of, outlined), config)
        budget = budget_of(options, layers, 0, device, "model", owned)
        count = E if owned is None else len(owned)
        assert budget == int(0.6 * len(layers) * count * layers[0].format.payload)
        rest = (budget, k, device, folder, source.fingerprint)
        of_rank, streamed, notices = open_experts(of_rank, options, *rest, owned)
        stacks: list[ExpertStack] = []
        replaced(of_rank, ExpertStack, lambda stack, stacks=stacks: stacks.append(stack) or stack)
        store, rows = streamed.store, np.full((*ids.shape, dim), np.nan, np.float32)
        assert not notices and store.nbytes <= budget and len(stacks) == len(layers)
        for layer, w in enumerate(stacks):
            for slot_of in store.expert_batches(layer, ids):
                ops.expert_mlp(rows, x, ids, w.gate, w.up, w.down, slot_of)
        last = stacks[-1]
        results[owned] = ops.moe_forward(x, ids, weights, last.gate, last.up, last.down, last.slot_of, expert_out=rows)
        read = store.reader.counters
        assert read.reads == store.counters.reads == len(layers) * count  # all are chosen, and each is read once
        assert read.nbytes == store.counters.bytes_read == owned_bytes(layers, owned)
        assert store.counters.hits == 0
        streamed.store.close()
    want = results.pop(None)
    np.testing.assert_allclose(sum(results.values()), want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_a_budget_that_is_too_small_or_too_large_is_refused(folder_of):
    with pytest.raises(InvalidArgument, match=r"expert_cache: 100 B are too few, expected at least \d+\.\d\d kB"):
        load(folder_of("qwen3_5"), expert_cache="100")
    with pytest.raises(InvalidArgument, match="has no experts, expected 'auto'"):
        load(penstock_dense(folder_of), expert_cache="1G")


def penstock_dense(folder_of) -> Path:
    from tests.models.test_llama import CONFIGS as LLAMA

    CONFIGS.setdefault("dense", LLAMA["tied"])
    return folder_of("dense")


def test_a_model_larger_than_memory_is_streamed_by_itself(folder_of, monkeypatch):
    folder = folder_of("deepseek_v3")
    want = load(folder).logits(TOKENS[:30])
    size = sum(layer.nbytes for layer in load(folder, expert_cache="100%").engine.experts.store.layers)
    probe = load(folder, max_context=256)
    caches, positions = probe.engine.caches, min(probe.config.max_positions, 4096)
    file = (folder / "model.safetensors").stat().st_size
    free = (256 << 20) + caches.nbytes + caches.bytes_of(positions) + file - size // 2
    monkeypatch.setattr("penstock.backends.cpu.device.available_memory", lambda: free)
    llm = load(folder, max_context=256)
    assert llm.engine.experts is not None and 0 < llm.stats().expert_bytes <= size
    np.testing.assert_array_equal(llm.logits(TOKENS[:30]), want)
    monkeypatch.setattr("penstock.backends.cpu.device.available_memory", lambda: 256 << 20)
    with pytest.raises(OutOfMemory, match=r"expert_cache: .* are asked for"):
        load(folder, expert_cache="100%")


def test_a_file_that_changes_while_it_is_in_use_ends_the_step_with_an_error(folder_of, tmp_path):
    for options in ({}, {"expert_cache": "30%"}, {"expert_cache": "30%", "expert_io": "mmap"}):
        folder = checkpoint(tmp_path / f"{len(options)}", CONFIGS["llama"])
        llm = load(folder, **options)
        llm.logits(TOKENS[:5])
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate((folder / "model.safetensors").stat().st_size // 2)
        with pytest.raises(CheckpointError, match="model.safetensors"):
            llm.logits(TOKENS[:5])
        with pytest.raises(CheckpointError, match="model.safetensors"):
            llm.generate(TOKENS[:5])


def test_a_damaged_record_of_a_packed_file_ends_the_request(tmp_path):
    folder = checkpoint(tmp_path / "packed", CONFIGS["llama"])
    source = Checkpoint.open(folder)
    family = family_of(source.config)
    config = family.read_config(source.config)
    layers = expert_layers(family, CheckpointSource(source, *family.names(source, config)), config)
    write_packed(layers, source.fingerprint, folder / "experts.penstock")
    whole = load(folder, expert_cache="100%")
    assert whole.generate(TOKENS[:20], max_tokens=2).tokens
    data = np.fromfile(folder / "experts.penstock", np.uint8)
    for layer in whole.engine.experts.store.layers:
        data[[extent.start for extent in layer.parts[0].extents]] ^= 1  # small: the answer would be a finite one
    data.tofile(folder / "experts.penstock")
    llm = load(folder, expert_cache="100%")
    with pytest.raises(CheckpointError, match=r"experts.penstock: expert \d+ of 'model.layers.* is damaged"):
        llm.generate(TOKENS[:20], max_tokens=2)


def test_a_read_error_ends_one_request_only(folder_of, monkeypatch):
    from concurrent.futures import Future

    llm = load(folder_of("qwen3_5"), expert_cache="25%")
    want = llm.generate(TOKENS[:8], max_tokens=6).tokens
    reader, failing = llm.engine.experts.store.reader, [True]
    submit = reader.submit

    def sometimes(layer, expert, into):
        if not failing:
            return submit(layer, expert, into)
        future: Future = Future()
        future.set_exception(CheckpointError("x.safetensors: cannot be read at byte 7"))
        return future

    monkeypatch.setattr(reader, "submit", sometimes)
    session = llm.session()
    with pytest.raises(CheckpointError, match="cannot be read at byte 7"):
        session.append(TOKENS[100:110])
        session.generate(max_tokens=4)
    failing.clear()
    assert llm.generate(TOKENS[:8], max_tokens=6).tokens == want
    session.close()


def test_statistics_tell_of_experts(folder_of):
    resident = load(folder_of("qwen3_5"))
    assert resident.stats().experts() is None and "Experts" not in str(resident.stats())
    llm = load(folder_of("qwen3_5"), expert_cache="50%")
    llm.generate(TOKENS[:10], max_tokens=5)
    found = llm.stats().experts()
    assert found is not None and set(found) >= {"hits", "reads", "bytes_read", "wait_seconds", "hit_rate", "bytes"}
    assert found["reads"] > 0 and 0 < found["hit_rate"] < 1
    assert "of the chosen ones were in" in str(llm.stats())
    assert json.loads(json.dumps(llm.stats().as_dict()))["expert_reads"] == found["reads"]


RESIDENT = """
import sys, json
import penstock

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

tokens = [int(t) for t in sys.argv[3].split(",")]
llm = penstock.load(sys.argv[1], device="cpu", expert_cache=sys.argv[2], expert_io="pagecache", threads=1)
before = anonymous()  # the slots have no pages yet
for _ in range(2):
    llm.logits(tokens)
store = llm.engine.experts.store
print(json.dumps({"grown": anonymous() - before, "slots": store.nbytes, "read": store.counters.bytes_read}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_resident_memory_grows_by_the_budget_and_no_more(tmp_path):
    config = moe_config(num_experts=96, moe_intermediate_size=512, num_hidden_layers=6)
    folder = checkpoint(tmp_path / "wide", config)
    tokens = ",".join(map(str, TOKENS[:200]))
    grown = {}
    for budget in ("4M", "4M", "16M"):  # the first time kernels may be compiled, which takes memory
        done = subprocess.run(
            [sys.executable, "-c", RESIDENT, str(folder), budget, tokens], capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout)
        assert found["slots"] <= int(budget[:-1]) << 20 < found["read"] // 2
        grown[budget] = found["grown"]
    # what a step needs besides is the same in both
    assert 11 << 20 < grown["16M"] - grown["4M"] < 14 << 20
