"""The end of a step on the GPU: rows with edits, grammars and log-probabilities draw as on the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.backends.cuda.runtime.sampler import RING, EditTables
from penstock.engine.sampling import Sampled, Sampler, SamplingParams, mode_of, with_logprobs
from penstock.errors import BackendError
from penstock.ops.device import PendingDraw, device_for
from penstock.ops.sampling import Edits
from tests.gpu.common import GPU

V = 77
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}
UNDRAWN = -9


class Steps:
    """Steps of up to `most` rows that make up their logits, and the sampler behind them. Row b is in slot most - b."""

    def __init__(self, most: int, rng: np.random.Generator) -> None:
        self.device, self.rng, self.most = device_for("cuda"), rng, most
        self.inputs: Any = self.device.step_inputs({"wanted": ((most,), "int32")}, most + 2)
        self.inputs.last.fill_(UNDRAWN)
        self.sampler = self.device.sampler(self.inputs, V)

    def launch(
        self,
        samplers: Sequence[Sampler],
        position: int,
        mode: str,
        masks: Sequence[np.ndarray | None] = (),
        rows: int | None = None,
    ) -> tuple[np.ndarray, PendingDraw]:
        """Draw tokens at a position in a program of so many rows, those behind the samplers inactive; its logits."""
        count = len(samplers)
        rows = rows or count
        slots = (self.most - np.arange(count)).astype(np.int32)
        values = self.sampler.values([sampler.row for sampler in samplers], masks)
        values |= {"draw_at": np.full(count, position, np.int32), "draw_slots": slots}
        for name, array in values.items():
            values[name] = np.full(rows, -1 if name.startswith("draw") else 0, array.dtype)
            values[name][:count] = array
        made = (3 * self.rng.standard_normal((rows, V))).astype(np.float32)
        logits = self.device.to_device(made.copy())
        self.inputs.send(values)
        self.inputs.unpack()
        for call in self.sampler.calls(logits, mode):
            call()
        return made, self.sampler.launched(rows, mode)


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
    steps = Steps(7, rng)
    mode = mode_of(own, masked=True)
    assert mode.endswith("+edits+logprobs")
    for position in range(4, 24 if GPU else 7):
        masks = [None, None, None, mask_of(rng), mask_of(rng) if position % 2 else None]
        logits, step = steps.launch(own, position, mode, masks, rows=7)
        tokens, found = step.tokens(), step.logprobs()
        assert tokens[5:] == [-1, -1]
        for b, sampler in enumerate(own):
            want = host[b].sample(logits[b], position, masks[b])
            sampler.record(tokens[b])
            same_choice(with_logprobs(sampler, tokens[b], [array[b] for array in found]), want)
        assert steps.inputs.last.tolist() == [*[UNDRAWN] * 3, *reversed(tokens[:5]), UNDRAWN]
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
    """More steps than are kept are launched before the tokens of the first are asked for."""
    host, own = (samplers_of({}, PENALTIES | {"temperature": 0.9, "logprobs": 3}) for _ in range(2))
    steps = Steps(2, rng)
    launched, want = [], []
    for position in range(4, 6 + RING):
        logits, step = steps.launch(own, position, "plain+edits+logprobs")
        launched.append(step)
        want.append([sampler.sample(row, position) for sampler, row in zip(host, logits, strict=True)])
    for step, choices in zip(launched, want, strict=True):
        tokens, found = step.tokens(), step.logprobs()
        for b, choice in enumerate(choices):
            same_choice(with_logprobs(own[b], tokens[b], [array[b] for array in found]), choice)


def test_drawing_is_given_what_the_host_has_counted(rng):
    """A request draws in one program, on the host, then in a program of another size."""
    host, own = (samplers_of(PENALTIES)[0] for _ in range(2))
    steps = Steps(3, rng)
    for position, rows in enumerate([1, 1, None, 3, None, 1, 3], 4):
        if rows is None:
            logits = (3 * rng.standard_normal(V)).astype(np.float32)
            got = own.sample(logits, position).token
        else:
            made, step = steps.launch([own], position, "greedy+edits", rows=rows)
            logits, got = made[0], step.tokens()[0]
            own.record(got)
        assert got == host.sample(logits, position).token
    np.testing.assert_array_equal(own.edits.counts, host.edits.counts)
    tables: EditTables = steps.sampler._tables
    np.testing.assert_array_equal(tables.counts[tables._slots[own.edits]].cpu().numpy(), host.edits.counts)


def test_drawing_without_edits_forgets_those_before(rng):
    edited, plain = samplers_of({"logit_bias": {7: 90.0}}, {})
    steps = Steps(1, rng)
    for sampler, masks in ((edited, ()), (plain, ()), (plain, [np.array([0, 2, 0], np.uint32)]), (plain, ())):
        logits, step = steps.launch([sampler], 9, "greedy+edits", masks)
        want = 7 if sampler is edited else 33 if masks else logits[0].argmax()
        assert step.tokens() == [want]


def test_drawing_follows_rows_that_join_and_leave(rng):
    """How a row draws is sent anew when others come; the same rows are not looked at again."""
    first, second, third = samplers_of({}, {"temperature": 0.8}, {"temperature": 1.2, "min_p": 0.05})
    steps = Steps(3, rng)
    for position, own in enumerate(([first], [first, second], [second], [second], [third, second], [second, third])):
        logits, step = steps.launch(own, position, "plain", rows=3)
        want = [sampler.sample(row, position).token for sampler, row in zip(own, logits, strict=False)]
        assert step.tokens()[: len(own)] == want


def edits_of(number: int) -> Edits:
    counts = np.zeros(V, np.int32)
    counts[number] = number
    return Edits(counts, np.zeros(V, np.float32), np.ones(3))


def test_edit_tables_make_room_for_new_requests():
    count = 16
    tables = EditTables(device_for("cuda"), V, count)
    kept = [edits_of(n) for n in range(count)]
    slots = tables.fill([None, *kept])
    assert slots[0] == -1 and sorted(slots[1:]) == list(range(count))
    tables.fill(kept[1:])
    new = edits_of(70)
    assert tables.fill([new, kept[5]]) == [slots[1], slots[6]]  # the place of the one that was used least lately
    assert tables.counts[slots[1], 70] == 70 and not tables.counts[slots[1], 0]
    gone = slots[10]
    del kept[9]
    assert tables.fill([edits_of(71)]) == [gone]
    with pytest.raises(BackendError, match=f"^sampling: more than {count} rows have edits"):
        tables.fill([edits_of(n) for n in range(count + 1)])
