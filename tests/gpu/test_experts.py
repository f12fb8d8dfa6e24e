"""Streamed experts on the GPU: the kernels that move and look for them, and models with every budget."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
import penstock.streaming.store
from penstock.backends.cuda import experts
from penstock.backends.cuda.place import Gpu
from penstock.ops._op import Spec
from penstock.streaming.layout import Format, views
from tests.models.common import small_config, some_tokens
from tests.streaming.common import CONFIGS, checkpoint

SPECS = (Spec((6, 4), "uint32"), Spec((6, 2), "bfloat16"), Spec((3, 5), "float32"))


class Counting:
    """A reader whose experts are made of their numbers."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []

    def submit(self, layer: int, expert: int, into: Any) -> Any:
        self.reads.append((layer, expert))
        for n, view in enumerate(into):
            view[:] = np.random.default_rng((layer, expert, n)).bytes(len(view))
        return experts._done()


class Shop:
    """What slots need of a store."""

    def __init__(self) -> None:
        self.reader, self.counters = Counting(), penstock.streaming.store.Counters()


def made(count: int, records: str) -> tuple[Any, Any, Any, list[np.ndarray]]:
    tier, shop = experts.GpuTier(Gpu(), records, 2), Shop()
    slots = tier.slots(Format(SPECS), count, 20, 1.0, shop)
    slot_of = [np.full(10, -1, np.int32), np.full(10, -1, np.int32)]
    return slots, shop, tier.shown(slot_of), slot_of


def held(slots: Any, slot: int) -> list[bytes]:
    return [array[slot].contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for array in slots.arrays]


def test_experts_land_in_their_slots_and_show_in_the_tables():
    slots, shop, shown, slot_of = made(5, "100%")
    for layer, chosen, into in ((0, [3, 9], [4, 0]), (1, [3], [2]), (0, [1], [0])):
        slots.fill(into, layer, chosen)
        slot_of[layer][chosen] = into
        slots.land(into)
        for expert, slot in zip(chosen, into, strict=True):
            want = [np.random.default_rng((layer, expert, n)).bytes(spec.nbytes) for n, spec in enumerate(SPECS)]
            assert held(slots, slot) == want
        for rows, table in zip(slot_of, shown, strict=True):
            np.testing.assert_array_equal(table.cpu().numpy(), rows)
    assert shop.counters.reads == 4 and shop.counters.bytes_copied == 4 * Format(SPECS).payload


def test_what_is_in_host_memory_is_not_read_again():
    slots, shop, _, _ = made(5, "100%")
    for _ in range(3):
        slots.fill([0, 1], 0, [7, 8])
        slots.land([0, 1])
    assert shop.reader.reads == [(0, 7), (0, 8)] and shop.counters.host_hits == 4


def test_host_memory_keeps_the_latest_and_stays_within_its_budget():
    slots, shop, _, _ = made(4, "0%")
    most = slots._most
    for expert in range(10):
        slots.fill([expert % 4], 0, [expert])
        slots.land([expert % 4])
    assert len(slots._at) <= most and len(slots._record_of) <= most
    slots.fill([0], 0, [9])
    slots.land([0])
    assert shop.counters.host_hits == 1 and shop.counters.reads == 10


def test_a_record_is_the_size_of_its_arrays():
    format = Format(SPECS)
    record = memoryview(bytearray(format.nbytes))
    assert [len(view) for view in views(format, record)] == [spec.nbytes for spec in SPECS]


@pytest.mark.parametrize("rows, k", [(1, 3), (3, 2)])
def test_look_finds_what_is_missing_and_stops_the_step(rows, k):
    gpu = Gpu()
    missing = gpu.missing(2, rows * k)
    ids = torch.arange(rows * k, dtype=torch.int32, device=gpu.device).view(rows, k)
    table = torch.full((10,), 5, dtype=torch.int32, device=gpu.device)

    def inputs() -> dict[str, Any]:
        made = {name: torch.full((rows,), 7, dtype=torch.int32, device=gpu.device) for name in ("positions", "lengths")}
        slots = torch.arange(rows, dtype=torch.int32, device=gpu.device)
        if rows > 1:
            slots[-1] = -1
        return made | {"slots": slots}

    given = inputs()
    missing.look(0, ids, table, given)
    missing.wait()
    active = rows * k if rows == 1 else (rows - 1) * k
    assert missing.host[0].tolist() == [0, *range(active), *[-1] * (rows * k - active)]
    assert given["positions"].tolist() == [7] * rows
    table[rows * k - 1] = -1  # chosen by the last row, which is inactive if there are several
    missing.look(1, ids, table, given)
    missing.wait()
    assert missing.host[1, 0] == int(rows == 1)
    table[0] = -1
    given = inputs()
    missing.look(1, ids, table, given)
    missing.wait()
    assert missing.host[1, 0] == 1
    assert given["slots"].tolist() == given["positions"].tolist() == [-1] * rows
    assert given["lengths"].tolist() == [0] * rows


@pytest.mark.slow
def test_cuda_streams_a_model(tmp_path: Path):
    """In the interpreter: one layer, a prompt of which all experts do not fit, and a step."""
    folder = checkpoint(tmp_path / "model", {**CONFIGS["llama"], "num_hidden_layers": 1})
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_context": 64}
    want = penstock.load(folder, **options).generate([1, 2, 3], max_tokens=2).tokens
    llm = penstock.load(folder, expert_cache="34%", expert_host="0%", **options)
    assert llm.generate([1, 2, 3], max_tokens=2).tokens == want
    assert llm.stats().expert_reads


@pytest.mark.cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_cuda_streamed_experts_give_the_same_bits(name: str, tmp_path: Path):
    folder = checkpoint(tmp_path / "model", CONFIGS[name])
    tokens = some_tokens(300)
    resident = penstock.load(folder, device="cuda")
    want, few, text = resident.logits(tokens), resident.logits(tokens[:5]), resident.generate(tokens[:9], max_tokens=20)
    several = [out.tokens for out in resident.generate([tokens[:5], tokens[3:9]], max_tokens=5)]
    for cache, host in (("25%", "0%"), ("40%", "60%"), ("100%", "auto")):
        llm = penstock.load(folder, device="cuda", expert_cache=cache, expert_host=host)
        np.testing.assert_array_equal(llm.logits(tokens), want)
        np.testing.assert_array_equal(llm.logits(tokens[:5]), few)
        for _ in range(2):
            assert llm.generate(tokens[:9], max_tokens=20).tokens == text.tokens
        if llm._engine.most_sequences >= 2:
            assert [out.tokens for out in llm.generate([tokens[:5], tokens[3:9]], max_tokens=5)] == several


@pytest.mark.cuda
def test_cuda_streams_with_sampling_as_on_the_host(tmp_path: Path):
    folder = checkpoint(tmp_path / "model", small_config() | {"vocab_size": 4096})
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "top_k": 9, "seed": 5}
    want = penstock.load(folder, device="cuda").generate([1, 2, 3], **options).tokens
    llm = penstock.load(folder, device="cuda", expert_cache="70%", expert_host="0%")
    assert llm.generate([1, 2, 3], **options).tokens == want

