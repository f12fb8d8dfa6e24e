"""The end of a decode step on the GPU: rows with edits, grammars and log-probabilities draw as on the host."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.backends.cuda.runtime.draw import EDIT_SLOTS
from penstock.engine.sampling import Sampled, Sampler, SamplingParams, mode_of, with_logprobs
from penstock.errors import BackendError
from penstock.ops.device import device_for
from penstock.ops.sampling import Edits
from tests.gpu.common import GPU

V = 77
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}


class Decoding:
    """A decode program that makes up its logits, and the drawing behind it."""

    def __init__(self, rows: int, rng: np.random.Generator, vocab: int = V, device: Any = None) -> None:
        self.device = device or device_for("cuda")
        self.rng, self.logits = rng, self.device.zeros((rows, vocab), "float32")
        self.inputs = {name: self.device.zeros((rows,), "int32") for name in ("tokens", "positions", "lengths")}
        for array in self.inputs.values():
            array.fill_(-1)
        self.drawing = self.device.drawing(self.logits, self.inputs)

    def at(self, positions: list[int]) -> None:
        """The next step draws the tokens at these positions; rows behind them are inactive."""
        for name, array in self.inputs.items():
            array[: len(positions)] = torch.tensor(positions, dtype=torch.int32) - int(name == "positions")

    def step(self, mode: str) -> tuple[np.ndarray, Any]:
        """Its logits and its flight."""
        made = (3 * self.rng.standard_normal(self.logits.shape)).astype(np.float32)
        self.logits.copy_(torch.from_numpy(made))
        for call in self.drawing.calls(mode):
            call()
        return made, self.drawing.launched()


def samplers_of(*options: dict[str, Any], prompt: tuple[int, ...] = (3, 4, 4, 60)) -> list[Sampler]:
    """A sampler for each, with a seed of its own."""
    return [Sampler(SamplingParams(**{"seed": 2**64 - 1 - n} | o), V, prompt) for n, o in enumerate(options)]


def mask_of(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, 2**32, 3, dtype=np.uint32)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8}, {"temperature": 1.3, "top_k": 20, "top_p": 0.9}], ids=str
)
def test_drawing_gives_the_tokens_of_the_host(options, rng):
    several = [
        options,
        options | PENALTIES,
        options | PENALTIES | {"repetition_context": 3},
        options | {"logit_bias": {5: 9.0, 6: -20.0}, "logprobs": 4},
        options | {"logprobs": 0},
    ]
    host, own = samplers_of(*several), samplers_of(*several)
    decoding = Decoding(7, rng)
    decoding.at([4] * 5)
    mode = mode_of(own, masked=True)
    assert mode.endswith("+edits+logprobs")
    for position in range(4, 24 if GPU else 9):
        masks = [None, None, None, mask_of(rng), mask_of(rng) if position % 2 else None]
        decoding.drawing.fill([sampler.row for sampler in own], masks)
        logits, flight = decoding.step(mode)
        tokens, found = flight.tokens(), flight.logprobs()
        assert tokens[5:] == [-1, -1]
        for b, sampler in enumerate(own):
            want = host[b].sample(logits[b], position, masks[b])
            sampler.record(tokens[b])
            same_choice(with_logprobs(sampler, tokens[b], [array[b] for array in found]), want)
        assert decoding.inputs["tokens"][:5].tolist() == tokens[:5]
    assert own[2].waits and not own[1].waits
    assert not any(sampler.edits.stale for sampler in own if sampler.edits)


def same_choice(got: Sampled, want: Sampled) -> None:
    assert got.token == want.token
    if want.logprob is None:
        assert got == want
    else:
        assert [i for i, _ in got.top] == [i for i, _ in want.top]
        values = [[each.logprob, *(p for _, p in each.top)] for each in (got, want)]
        np.testing.assert_allclose(*values, rtol=0, atol=1e-12)


def test_drawing_counts_what_it_draws_ahead_of_the_host(rng):
    host, own = (samplers_of({}, PENALTIES | {"temperature": 0.9}) for _ in range(2))
    decoding = Decoding(2, rng)
    decoding.at([4, 4])
    decoding.drawing.fill([sampler.row for sampler in own])
    for position in range(4, 10):  # filled once, read late
        logits, flight = decoding.step("plain+edits")
        want = [sampler.sample(row, position).token for sampler, row in zip(host, logits, strict=True)]
        assert flight.tokens() == want


def test_drawing_is_given_what_the_host_has_counted(rng):
    """A request draws in one program, on the host, then in another program of the device."""
    host, own = (samplers_of(PENALTIES)[0] for _ in range(2))
    first = Decoding(1, rng)
    second = Decoding(3, rng, device=first.device)
    for position, decoding in enumerate([first, first, None, second, None, first, second], 4):
        if decoding is None:
            logits = (3 * rng.standard_normal(V)).astype(np.float32)
            got = own.sample(logits, position).token
        else:
            decoding.at([position])
            decoding.drawing.fill([own.row])
            made, flight = decoding.step("greedy+edits")
            logits, got = made[0], flight.tokens()[0]
            own.record(got)
        assert got == host.sample(logits, position).token
    np.testing.assert_array_equal(own.edits.counts, host.edits.counts)
    tables = first.device.edit_tables(V)
    np.testing.assert_array_equal(tables.counts[tables._slots[own.edits]].cpu().numpy(), host.edits.counts)


def test_drawing_without_edits_forgets_those_before(rng):
    edited, plain = samplers_of({"logit_bias": {7: 90.0}}, {})
    decoding = Decoding(1, rng)
    for sampler, masks in ((edited, ()), (plain, ()), (plain, [np.array([0, 2, 0], np.uint32)]), (plain, ())):
        decoding.at([9])
        decoding.drawing.fill([sampler.row], masks)
        logits, flight = decoding.step("greedy+edits")
        want = 7 if sampler is edited else 33 if masks else logits[0].argmax()
        assert flight.tokens() == [want]


def edits_of(number: int) -> Edits:
    counts = np.zeros(V, np.int32)
    counts[number] = number
    return Edits(counts, np.zeros(V, np.float32), np.ones(3))


def test_edit_tables_make_room_for_new_requests():
    tables = device_for("cuda").edit_tables(V)
    kept = [edits_of(n) for n in range(EDIT_SLOTS)]
    slots = tables.fill([None, *kept])
    assert slots[0] == -1 and sorted(slots[1:]) == list(range(EDIT_SLOTS))
    tables.fill(kept[1:])
    new = edits_of(70)
    assert tables.fill([new, kept[5]]) == [slots[1], slots[6]]  # the place of the one that was used least lately
    assert tables.counts[slots[1], 70] == 70 and not tables.counts[slots[1], 0]
    gone = slots[10]
    del kept[9]
    assert tables.fill([edits_of(71)]) == [gone]
    with pytest.raises(BackendError, match=f"^sampling: more than {EDIT_SLOTS} rows have edits"):
        tables.fill([edits_of(n) for n in range(EDIT_SLOTS + 1)])
