"""Steps of an engine: the prefill grid, limits, what a failed step leaves behind, several threads."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.api import LLM
from penstock.backends.cpu import device as cpu_device
from penstock.engine.engine import Engine
from penstock.errors import InvalidArgument, OutOfMemory
from penstock.graph import Bound
from penstock.ops.device import device_for
from tests.models.common import VOCAB, small_config, some_tokens, write_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return penstock.load(write_model(tmp_path_factory.mktemp("small"), small_config()), device="cpu")


@pytest.fixture
def engine(llm: LLM) -> Engine:
    """A new engine on the model, with caches of its own."""
    return Engine(llm.engine.model, activations="float32", max_context=600)


def failing(error: BaseException, after: int = 0) -> Callable[..., None]:
    """In the place of `Bound.run`: after a number of whole steps one stops half-way."""
    steps = 0

    def run(self: Bound) -> tuple[Any, ...]:
        nonlocal steps
        steps += 1
        for call in self.calls if steps <= after else self.calls[: len(self.calls) // 2]:
            call()
        if steps > after:
            raise error
        return self.outputs

    return run


# -- prefill ---------------------------------------------------------------------------------------------------------


def test_prefill_is_cut_at_the_grid(engine: Engine) -> None:
    assert engine.device.chunk_alignment == 256
    pieces: list[int] = []
    sequence = engine.open()
    engine.prefill(sequence, some_tokens(100), progress=pieces.append)
    engine.prefill(sequence, some_tokens(470), progress=pieces.append)
    assert pieces == [100, 156, 256, 58] and sequence.length == 570


def test_prefill_of_the_last_token_is_the_last_of_every(engine: Engine) -> None:
    tokens = some_tokens(300)
    one, other = engine.open(), engine.open()
    last, rows = engine.prefill(one, tokens), engine.prefill(other, tokens, every=True)
    assert last.shape == (VOCAB,) and rows.shape == (300, VOCAB) and last.dtype == rows.dtype == np.float32
    np.testing.assert_array_equal(last, rows[-1])


def test_prefill_does_not_depend_on_where_pages_lie(engine: Engine, llm: LLM) -> None:
    """Sequences that take pages in turns, after others gave some back, get the bits of a fresh engine."""
    old = [engine.open() for _ in range(3)]
    for n, sequence in enumerate(old):
        engine.prefill(sequence, some_tokens(300, seed=n))
    engine.close(old[1])
    a, b = engine.open(), engine.open()
    texts = some_tokens(512, seed=8), some_tokens(512, seed=9)
    for part in (slice(0, 256), slice(256, 512)):
        rows = [engine.prefill(sequence, text[part]) for sequence, text in zip((a, b), texts, strict=True)]
    for row, text in zip(rows, texts, strict=True):
        np.testing.assert_array_equal(row, llm.engine.prefill(llm.engine.open(), text))


@pytest.mark.parametrize(
    "tokens", [[-1], [VOCAB], [1, 2**31], [2**63], [2**70], [1.0], ["1"], [None], [[1]], None, "ab", [True]]
)
def test_prefill_refuses_what_is_no_token(tokens: Any, engine: Engine) -> None:
    sequence = engine.open()
    with pytest.raises(InvalidArgument, match="^tokens: "):
        engine.prefill(sequence, tokens)
    with pytest.raises(InvalidArgument, match="^prefill: tokens is empty, expected at least one"):
        engine.prefill(sequence, [])
    assert sequence.length == 0 and not sequence.corrupt


def test_prefill_takes_arrays_of_any_integers(engine: Engine) -> None:
    spellings: list[Any] = [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint8), [np.int64(1), 2]]
    rows = [engine.prefill(engine.open(), tokens) for tokens in spellings]
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])


def test_prefill_refuses_more_than_the_context(engine: Engine) -> None:
    sequence = engine.open()
    engine.prefill(sequence, some_tokens(590))
    with pytest.raises(
        InvalidArgument, match="^context: 590 positions are filled and 11 more were given, expected at most 600"
    ):
        engine.prefill(sequence, some_tokens(11))
    engine.prefill(sequence, some_tokens(10))
    with pytest.raises(InvalidArgument, match="^context: 600 positions are filled and 1 more"):
        engine.decode([sequence], [1])
    assert sequence.length == 600 and not sequence.corrupt


def test_closed_sequences_are_refused(engine: Engine) -> None:
    sequence = engine.open()
    snapshot = engine.snapshot(sequence)
    engine.close(sequence)
    for call in (
        lambda: engine.prefill(sequence, [1]),
        lambda: engine.decode([sequence], [1]),
        lambda: engine.snapshot(sequence),
        lambda: engine.rewind(sequence, snapshot),
    ):
        with pytest.raises(InvalidArgument, match="was closed, expected an open one"):
            call()
    engine.drop(snapshot)
    with pytest.raises(InvalidArgument, match="the snapshot was closed"):
        engine.rewind(engine.open(), snapshot)


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), RuntimeError("kernel")], ids=repr)
def test_an_interrupted_step_spoils_its_sequences(
    error: BaseException, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(40)
    sequences = [engine.open() for _ in range(3)]
    for sequence in sequences:
        engine.prefill(sequence, tokens[:30])
    snapshots = [engine.snapshot(sequence) for sequence in sequences[:2]]
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(Bound, "run", failing(error))
        engine.decode(sequences[:2], tokens[30:32])
    assert [sequence.corrupt for sequence in sequences] == [True, True, False]
    assert [sequence.length for sequence in sequences] == [30, 30, 30]
    for sequence in sequences[:2]:
        with pytest.raises(InvalidArgument, match="^sequence: it was interrupted in the middle of a step"):
            engine.decode([sequence], [1])
        with pytest.raises(InvalidArgument, match="interrupted"):
            engine.snapshot(sequence)
    want = engine.decode([sequences[2]], tokens[30:31])
    for sequence, snapshot in zip(sequences[:2], snapshots, strict=True):
        engine.rewind(sequence, snapshot)
        np.testing.assert_array_equal(engine.decode([sequence], tokens[30:31]), want)


def test_an_interrupted_prefill_keeps_the_pieces_before(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = engine.open()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Bound, "run", failing(KeyboardInterrupt(), after=1))
        engine.prefill(sequence, some_tokens(300))
    assert sequence.length == 256 and sequence.corrupt


def test_progress_may_stop_a_prefill_between_pieces(engine: Engine) -> None:
    tokens = some_tokens(500)

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    sequence = engine.open()
    with pytest.raises(KeyboardInterrupt):
        engine.prefill(sequence, tokens, progress=stop)
    assert sequence.length == 256 and not sequence.corrupt
    np.testing.assert_array_equal(engine.prefill(sequence, tokens[256:]), engine.prefill(engine.open(), tokens))


def test_out_of_memory_leaves_sequences_as_they_were(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = some_tokens(400)
    sequence = engine.open()
    engine.prefill(sequence, tokens[:256])
    others = [engine.open() for _ in range(3)]  # take what has been allocated ahead
    for other in others:
        engine.prefill(other, [1])
    with monkeypatch.context() as patch:
        patch.setattr(cpu_device, "available_memory", lambda: 0)
        with pytest.raises(OutOfMemory):
            engine.decode([sequence], tokens[256:257])
        with pytest.raises(OutOfMemory):
            engine.prefill(sequence, tokens[256:])
    assert not sequence.corrupt and sequence.length == 256
    np.testing.assert_array_equal(engine.prefill(sequence, tokens[256:]), engine.prefill(engine.open(), tokens))


# -- other -----------------------------------------------------------------------------------------------------------


def test_snapshot_and_rewind_give_the_same_bits(engine: Engine) -> None:
    tokens = some_tokens(320)
    sequence = engine.open()
    engine.prefill(sequence, tokens[:300])
    snapshot = engine.snapshot(sequence)
    first = [engine.decode([sequence], [token]) for token in tokens[300:]]
    engine.rewind(sequence, snapshot)
    other = engine.open()
    engine.rewind(other, snapshot)
    for token, want in zip(tokens[300:], first, strict=True):
        rows = engine.decode([sequence, other], [token, token])
        np.testing.assert_array_equal(rows, np.concatenate([want, want]))


def test_several_threads_may_use_an_engine(engine: Engine) -> None:
    texts = [some_tokens(60, seed=n) for n in range(4)]

    def logits(text: list[int]) -> np.ndarray:
        sequence = engine.open()
        rows = [engine.prefill(sequence, text[:50])]
        rows += [engine.decode([sequence], [token])[0] for token in text[50:]]
        engine.close(sequence)
        return np.array(rows)

    alone = [logits(text) for text in texts]
    together: dict[int, np.ndarray] = {}
    threads = [
        threading.Thread(target=lambda n=n, text=text: together.__setitem__(n, logits(text)))
        for n, text in enumerate(texts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for n, want in enumerate(alone):
        np.testing.assert_array_equal(together[n], want)


def test_reference_engine_leaves_the_backend_outside_alone(llm: LLM) -> None:
    reference = Engine(llm.engine.model, device=device_for("reference"), activations="float32", max_context=64)
    want = llm.logits([1, 2, 3])
    got = reference.prefill(reference.open(), [1, 2, 3], every=True)
    assert 0 < np.abs(got - want).max() < 1e-4
    np.testing.assert_array_equal(llm.logits([1, 2, 3]), want)


def test_decode_padding_of_block_tables_is_never_read(engine: Engine) -> None:
    """A short sequence beside a long one: its table is padded with page 0, which is the long one's."""
    long, short = engine.open(), engine.open()
    engine.prefill(long, some_tokens(520))
    engine.prefill(short, [5])
    assert engine.caches.pools[None].references[0] == 1
    alone = engine.open()
    engine.prefill(alone, [5])
    want = engine.decode([alone], [6])[0]
    np.testing.assert_array_equal(engine.decode([long, short], [7, 6])[1], want)
