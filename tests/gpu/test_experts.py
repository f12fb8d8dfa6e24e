"""Streamed experts on the GPU: the kernels that move and look for them, and models with every budget."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.api import LLM
from penstock.backends.cuda.runtime import experts
from penstock.backends.cuda.runtime.device import CudaDevice
from penstock.errors import CheckpointError
from penstock.experts.layout import Format, Layer, stacked
from penstock.experts.store import Store
from penstock.ops.array import Spec
from penstock.ops.collective import communicator
from tests.experts.common import CONFIGS, checkpoint
from tests.gpu.test_steps import stepped
from tests.models.common import error, small_config, some_tokens
from tests.parallel.streamed import Turns, on_ranks

SPECS = (Spec((6, 4), "uint32"), Spec((6, 2), "bfloat16"), Spec((3, 5), "float32"))


class Numbers:
    """A reader whose experts are made of their numbers."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []

    def submit(self, layer: int, expert: int, into: Any) -> Any:
        self.reads.append((layer, expert))
        for n, view in enumerate(into):
            view[:] = np.random.default_rng((layer, expert, n)).bytes(len(view))
        return experts._done()

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def made(
    count: int, host: str, policy: str = "lru", owned: tuple[int, ...] | None = None
) -> tuple[Store, Numbers, experts.GpuTier]:
    """Two layers of ten experts, of which `count` are in slots."""
    parts = tuple(stacked(Path("x"), 0, 10, spec) for spec in SPECS)
    reader, tier = Numbers(), experts.GpuTier(CudaDevice(), host, 2)
    layers, budget = [Layer("a", parts), Layer("b", parts)], count * Format(SPECS).payload
    store = Store(layers, reader, budget, 2, policy, tier, owned)
    tier.device_slot_maps(store)
    return store, reader, tier


def check(store: Store, tier: experts.GpuTier) -> None:
    """What the host thinks is what the device has: tables, owners of slots, and the experts in them."""
    np.testing.assert_array_equal(tier.table.cpu().numpy(), np.concatenate(store.slot_of))
    slots = store.pool_of[0].slots
    np.testing.assert_array_equal(slots.key.cpu().numpy(), store.pool_of[0].owner)
    for layer, row in enumerate(store.slot_of):
        for expert in np.flatnonzero(row >= 0):
            held = [array[int(row[expert])].contiguous().view(-1).view(torch.uint8) for array in slots.arrays]
            want = [np.random.default_rng((layer, expert, n)).bytes(spec.nbytes) for n, spec in enumerate(SPECS)]
            assert [part.cpu().numpy().tobytes() for part in held] == want


def bring(store: Store, layer: int, ids: list[int]) -> None:
    assert store.request(layer, np.array(ids, np.int32))
    store.wait(layer, np.array(ids))


def test_experts_land_in_their_slots_and_show_in_the_tables():
    store, reader, tier = made(5, "100%")
    for layer, ids in ((0, [3, 9]), (1, [3]), (0, [1, 3]), (1, [0, 9]), (0, [5])):
        bring(store, layer, ids)
        check(store, tier)
    assert store.counters.reads == len(reader.reads) == 7
    assert store.counters.bytes_copied == 7 * Format(SPECS).payload


def test_what_is_in_host_memory_is_not_read_again():
    store, reader, _ = made(2, "100%")
    for _ in range(3):
        bring(store, 0, [7, 8])
        bring(store, 1, [7])
        bring(store, 1, [4])
    assert reader.reads == [(0, 7), (0, 8), (1, 7), (1, 4)] and store.counters.host_hits > 0


def test_host_memory_keeps_the_latest_and_stays_within_its_budget():
    store, _, tier = made(4, "0%")
    slots = store.pool_of[0].slots
    for expert in range(10):
        bring(store, 0, [expert])
    assert len(slots._at) == slots._most == 4 and len(slots._record_of) <= 4
    assert (tier.host_records != experts._NOWHERE).sum() == len(slots._record_of)
    check(store, tier)
    assert store.counters.reads == 10


INPUTS = ("slots", "positions", "lengths")


def detect(store: Store, tier: experts.GpuTier, layer: int, ids: list[list[int]], active: list[int]) -> tuple[Any, Any]:
    """What a decode step of a layer does on the device; its report, and what became of the inputs."""
    gpu = tier._gpu
    detector = gpu.miss_detector(tier, 2, len(ids) * len(ids[0]))
    chosen = torch.tensor(ids, dtype=torch.int32, device=gpu.torch_device)
    inputs = {name: torch.tensor(active, dtype=torch.int32, device=gpu.torch_device) for name in INPUTS}
    detector.rank(0)
    detector.detect(1, layer, chosen, inputs)
    detector.wait()
    return detector.host[1].copy(), {name: value.tolist() for name, value in inputs.items()}


def test_records_may_lie_before_the_first_block():
    """Pinned memory that is taken later may have lower addresses: a negative place is a place."""
    store, reader, tier = made(3, "100%")
    slots = store.pool_of[0].slots
    size = slots._format.nbytes // 4
    memory = torch.zeros(20 * size, dtype=torch.int32)
    memory = memory if tier._gpu.interpreted else memory.pin_memory()
    slots._blocks = [memory[10 * size :]]
    slots._at = [n * size for n in (3, -2, -10, 0, 5, -7)]
    data = memoryview(memory.numpy()).cast("B")
    slots._bytes = [data[(10 * size + at) * 4 :][: 4 * size] for at in slots._at]
    slots._spare, slots._most = list(range(6)), 6
    for ids in ([1, 2], [3, 4], [5, 6]):
        bring(store, 0, ids)
    for ids in ([1, 6], [2, 3], [4, 5]):
        report, _ = detect(store, tier, 0, [ids], [4])
        assert report[0] == 0
        tier.apply_report(np.array([0]), report[None])
        check(store, tier)
    assert len(reader.reads) == 6


def test_the_device_misses_and_reports_no_experts_of_other_ranks():
    owned = (1, 4, 7)
    store, reader, tier = made(3, "100%", owned=owned)
    check(store, tier)  # they are no one's to fetch from the start
    bring(store, 0, [1, 2, 4, 9])
    report, inputs = detect(store, tier, 0, [[0, 4], [1, 3]], [5, 6])
    assert report.tolist() == [0, -1, 4, 1, -1, -1, -1, -1, -1] and inputs["slots"] == [5, 6]
    tier.apply_report(np.array([0]), report[None])
    assert store.counters.hits == 2
    report, inputs = detect(store, tier, 1, [[0, 2], [9, -1]], [5, 6])
    assert report.tolist() == [0, -1, -1, -1, -1, -1, -1, -1, -1] and inputs["slots"] == [5, 6]
    report, inputs = detect(store, tier, 1, [[0, 7], [9, 7]], [5, 6])
    assert report.tolist() == [1, -1, 7, -1, 7, -1, -1, -1, -1] and inputs["slots"] == [-1, -1]
    assert not tier.fully_cached
    for _ in range(9):
        tier.prefetch_all()
    assert sorted(reader.reads) == [(layer, expert) for layer in (0, 1) for expert in owned] and tier.fully_cached
    report, _ = detect(store, tier, 1, [[0, 7], [4, 7]], [5, 6])
    assert report[:5].tolist() == [0, -1, 7, 4, 7]
    tier.apply_report(np.array([1]), report[None])
    check(store, tier)
    assert store.counters.host_hits == 2 and store.counters.reads == 6 and (store.slot_of[1][[0, 9]] == -2).all()


@pytest.mark.parametrize("policy", ["lru", "lfru", "pin"])
def test_the_device_brings_in_what_is_in_host_memory(policy, rng):
    store, reader, tier = made(5, "100%", policy)
    for layer in (0, 1):
        for expert in range(10):
            bring(store, layer, [expert])
    reads = len(reader.reads)
    for step in range(12):
        layer = step % 2
        ids = [rng.permutation(10)[:2].tolist() for _ in range(2)]
        there = {e for e in range(10) if store.slot_of[layer][e] >= 0}
        report, inputs = detect(store, tier, layer, ids, [4, 6])
        flat, taken = report[1:5], report[5:]
        assert report[0] == 0 and flat.tolist() == [*ids[0], *ids[1]] and inputs["slots"] == [4, 6]
        came = {int(e) for e, slot in zip(flat, taken, strict=True) if slot >= 0}
        assert came == set(flat.tolist()) - there and (taken >= 0).sum() == len(came)
        tier.apply_report(np.array([layer]), report[None])
        check(store, tier)
        assert all(store.slot_of[layer][e] >= 0 for e in flat)
    assert len(reader.reads) == reads


def test_the_device_stops_at_what_is_on_disk():
    store, _, tier = made(5, "0%")
    bring(store, 0, [1, 2])
    before = tier.table.tolist()
    report, inputs = detect(store, tier, 0, [[1, 2], [2, 1]], [4, 6])
    assert report.tolist() == [0, 1, 2, 2, 1, -1, -1, -1, -1]
    report, inputs = detect(store, tier, 0, [[1, 2], [2, 8]], [4, -1])  # the row that wants 8 is inactive
    assert report.tolist() == [0, 1, 2, -1, -1, -1, -1, -1, -1] and inputs["slots"] == [4, -1]
    report, inputs = detect(store, tier, 0, [[1, 2], [2, 8]], [4, 6])
    assert report[:5].tolist() == [1, 1, 2, 2, 8]
    assert inputs == {"slots": [-1, -1], "positions": [-1, -1], "lengths": [0, 0]}
    assert tier.table.tolist() == before


def test_what_nobody_has_chosen_is_read_meanwhile_where_there_is_room_for_all():
    store, reader, tier = made(4, "100%")
    bring(store, 0, [1, 2])
    tier.prefetch_all()  # begins
    assert not tier.fully_cached and len(reader.reads) == 2 + experts._PREFETCHED
    bring(store, 0, [3])  # under way already
    assert len(reader.reads) == 2 + experts._PREFETCHED
    for _ in range(3):
        tier.prefetch_all()
    assert sorted(reader.reads) == [(layer, expert) for layer in range(2) for expert in range(10)]
    assert tier.fully_cached and (tier.records.cpu().numpy() == tier.host_records).all()
    assert (store.counters.reads, store.counters.guessed) == (20, 17)
    report, _ = detect(store, tier, 1, [[5, 9]], [0])
    assert report[0] == 0
    tier.apply_report(np.array([1]), report[None])
    check(store, tier)


def test_all_in_slots_is_whole_and_part_of_it_in_host_memory_is_not():
    store, _, tier = made(20, "0%")
    for layer in range(2):
        for expert in range(0, 10, 2):
            assert not tier.fully_cached
            bring(store, layer, [expert, expert + 1])
    assert tier.fully_cached
    store, reader, tier = made(4, "90%")
    bring(store, 0, [1, 2])
    tier.prefetch_all()
    assert len(reader.reads) == 2 and not tier.fully_cached


def test_an_expert_that_cannot_be_read_is_left_to_whoever_needs_it():
    store, reader, tier = made(4, "100%")
    read = reader.submit

    def submit(layer: int, expert: int, into: Any) -> Any:
        future = read(layer, expert, into)
        if (layer, expert) != (1, 4):
            return future
        failed: Any = type(future)()
        failed.set_exception(CheckpointError("it is gone"))
        return failed

    reader.submit = submit  # type: ignore[method-assign]
    for _ in range(4):
        tier.prefetch_all()
    assert not tier.fully_cached and tier.host_records[14] == experts._NOWHERE
    bring(store, 1, [5])
    with pytest.raises(CheckpointError, match="gone"):
        bring(store, 1, [4])
    assert tier.host_records[14] == experts._NOWHERE
    check(store, tier)


def test_a_record_is_the_size_of_its_arrays():
    format = Format(SPECS)
    record = memoryview(bytearray(format.nbytes))
    assert [len(view) for view in format.views(record)] == [spec.nbytes for spec in SPECS]


def loaded(folder: Path, sequences: int, **options: Any) -> LLM:
    """A model with room for so many sequences: steps have the same sizes however many experts are in place."""
    llm = penstock.load(folder, device="cuda", **options)
    llm.engine.allocate(sequences=sequences)
    return llm


@pytest.mark.slow
def test_cuda_streams_a_model(tmp_path: Path):
    """In the interpreter: one layer, a prompt of which all experts do not fit, and a step."""
    folder = checkpoint(tmp_path / "model", {**CONFIGS["llama"], "num_hidden_layers": 1})
    options: dict[str, Any] = {"dtype": "float32", "max_context": 64}
    want = loaded(folder, 1, **options).generate([1, 2, 3], max_tokens=2).tokens
    llm = loaded(folder, 1, expert_cache="34%", expert_host="0%", **options)
    assert llm.generate([1, 2, 3], max_tokens=2).tokens == want
    assert llm.stats().expert_reads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_learn_with_a_sum_that_one_of_them_stops(dtype: str):
    """The second of three ranks misses an expert; what it sums, and what the others do, is theirs all the same."""
    turns = Turns(3)

    def work(rank: int) -> Any:
        store, _, tier = made(5, "0%")
        bring(store, 0, [1, 2])
        gpu = tier._gpu
        detector = gpu.miss_detector(tier, 2, 4, dtype)
        assert detector.agreed.tolist() == [[1, 1]] * 2  # nothing is known to be there
        chosen = torch.tensor([[1, 2], [2, 8 if rank == 1 else 1]], dtype=torch.int32, device=gpu.torch_device)
        x = torch.tensor([[1.5, 2, 3], [rank, 5, 6]], dtype=getattr(torch, dtype), device=gpu.torch_device)
        found = []
        for resolved in (False, True):
            inputs = {name: torch.tensor([4, 6], dtype=torch.int32, device=gpu.torch_device) for name in INPUTS}
            if resolved:
                if rank == 1:
                    bring(store, 0, [8])
                detector.resolve(1, missed=rank == 1)
            else:
                detector.detect(1, 0, chosen, inputs)
                detector.wait()
                assert detector.host[1, 0] == (rank == 1)
            out = torch.full_like(x, float("nan"))
            detector.agree(1, x, inputs, out)
            detector.wait()
            found.append((out.tolist(), detector.agreed[1].tolist(), *(inputs[name].tolist() for name in INPUTS)))
        return found

    total = [[4.5, 6.0, 9.0], [3.0, 15.0, 18.0]]
    stopped, went_on = (total, [1, 1], [-1, -1], [-1, -1], [0, 0]), (total, [0, 1], [4, 6], [4, 6], [4, 6])
    assert turns.run(work) == [[stopped, went_on]] * 3


@pytest.mark.slow
def test_cuda_streams_the_parts_of_a_model_of_which_one_alone_misses(tmp_path: Path):
    """Two ranks in the interpreter, the second without room for its experts: both stop, and give the text of one."""
    config = {**CONFIGS["llama"], "num_hidden_layers": 2, "head_dim": 32}
    folder = checkpoint(tmp_path / "model", {**config, "quantization": {"bits": 4, "group_size": 32}})
    prompts = [[1, 2], [4]]

    def answers(llm: Any) -> list[list[int]]:
        llm.engine.allocate(sequences=2)
        return [out.tokens for _ in range(2) for out in llm.generate(prompts, max_tokens=6)]

    want = answers(loaded(folder, 2, dtype="float32", max_context=64))
    given = [{"device": "cuda", "expert_host": "0%", "expert_cache": cache} for cache in ("100%", "80%")]
    resolved: list[tuple[int, bool]] = []
    resolve = experts.MissDetector.resolve

    def noted(self: Any, n: int, missed: bool) -> None:
        resolved.append((communicator().rank, missed))
        resolve(self, n, missed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts.MissDetector, "resolve", noted)
        got, engines, turns = on_ranks(folder, given, answers)
    assert got == want and turns.exchanged[0] == turns.exchanged[1]
    assert (0, False) in resolved and (1, True) in resolved
    assert all(any(r.captured for r in engine.programs.steps._runners.values()) for engine in engines)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_cuda_streamed_experts_give_the_same_bits(name: str, tmp_path: Path):
    folder = checkpoint(tmp_path / "model", CONFIGS[name])
    tokens = some_tokens(300)
    resident = loaded(folder, 2)
    want, few, text = resident.logits(tokens), resident.logits(tokens[:5]), resident.generate(tokens[:9], max_tokens=20)
    several = [out.tokens for out in resident.generate([tokens[:5], tokens[3:9]], max_tokens=5)]
    for cache, host in (("25%", "0%"), ("40%", "60%"), ("25%", "100%"), ("100%", "auto")):
        llm = loaded(folder, 2, expert_cache=cache, expert_host=host)
        np.testing.assert_array_equal(llm.logits(tokens), want)
        np.testing.assert_array_equal(llm.logits(tokens[:5]), few)
        for _ in range(3):
            assert llm.generate(tokens[:9], max_tokens=20).tokens == text.tokens
        assert llm.engine.experts.fully_cached == (host != "0%" and host != "60%")
        if llm.engine.most_sequences >= 2:
            assert [out.tokens for out in llm.generate([tokens[:5], tokens[3:9]], max_tokens=5)] == several


@pytest.mark.cuda
def test_cuda_streams_with_sampling_as_on_the_host(tmp_path: Path):
    folder = checkpoint(tmp_path / "model", small_config() | {"vocab_size": 4096})
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "top_k": 9, "seed": 5}
    want = loaded(folder, 1).generate([1, 2, 3], **options).tokens
    llm = loaded(folder, 1, expert_cache="70%", expert_host="0%")
    assert llm.generate([1, 2, 3], **options).tokens == want


@pytest.mark.cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_cuda_streamed_experts_take_prompts_and_answers_in_one_step(name: str, tmp_path: Path):
    """Against steps one by one with all experts in place."""
    folder = checkpoint(tmp_path / "model", CONFIGS[name])
    options: dict[str, Any] = {"dtype": "float32", "max_context": 400}
    steps = [[(0, 60)], [(0, 1), (1, 7)], [(1, 1), (2, 110), (0, 1)], [(2, 1), (0, 4)], [(0, 1)], [(1, 2)]]
    texts = [some_tokens(200, seed=n) for n in range(3)]
    want = stepped(loaded(folder, 3, **options).engine, texts, steps, together=False)
    for cache, host in (("25%", "0%"), ("40%", "60%"), ("25%", "100%")):
        llm = loaded(folder, 3, expert_cache=cache, expert_host=host, **options)
        got = stepped(llm.engine, texts, steps, together=True)
        for own, expected in zip(got, want, strict=True):
            assert error(own, expected) <= 5e-5
