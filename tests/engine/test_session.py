"""Sessions: the same text as in one go, going back, files, and what an interruption leaves."""

import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import penstock
from penstock.api import LLM
from penstock.engine.session import Session, _digest
from penstock.errors import CheckpointError, DTypeError, InvalidArgument
from penstock.graph import Bound
from tests.models.common import VOCAB, letters, small_config, some_tokens, tensors, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small"), small_config())


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return penstock.load(folder, device="cpu", max_context=700)


@pytest.fixture
def session(llm: LLM) -> Iterator[Session]:
    with llm.session() as session:
        yield session


def held(llm: LLM) -> tuple[int, dict[Any, int]]:
    """Slots and pages that somebody holds."""
    caches = llm.engine.caches
    return caches._slots - len(caches._free_slots), {window: pool.used for window, pool in caches.pools.items()}


def continued(session: Session, count: int = 12) -> list[int]:
    """What a session would write; it is as before afterwards."""
    snapshot = session.snapshot()
    tokens = session.generate(max_tokens=count, extra_eos=()).tokens
    session.rewind(snapshot)
    return tokens


# -- the same as in one go -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 256, 300])
def test_generate_is_that_of_the_model(length: int, llm: LLM, session: Session) -> None:
    prompt = some_tokens(length)
    once, here = llm.generate(prompt, max_tokens=20), session.generate(prompt, max_tokens=20)
    assert (here.tokens, here.text, here.finish_reason) == (once.tokens, once.text, once.finish_reason)
    assert session.tokens == [*prompt, *here.tokens] and len(session) == length + len(here.tokens)
    assert here.usage.prompt_tokens == length and here.usage.cached_tokens == 0


def test_append_at_the_grid_then_generate_gives_the_same_bits(llm: LLM, session: Session) -> None:
    prompt = some_tokens(520)
    assert [session.append(part) for part in (prompt[:256], prompt[256:512], prompt[512:])] == [256, 256, 8]
    np.testing.assert_array_equal(session.logits, llm.logits(prompt)[-1])
    assert session.generate(max_tokens=5).tokens == llm.generate(prompt, max_tokens=5).tokens


def test_append_anywhere_is_right(llm: LLM, session: Session) -> None:
    prompt = some_tokens(300)
    for part in (prompt[:1], prompt[1:7], [], prompt[7:100], prompt[100:]):
        session.append(part)
    assert session.logits is not None
    assert np.abs(session.logits - llm.logits(prompt)[-1]).max() < 1e-4


def test_generate_goes_on_after_what_it_wrote(llm: LLM, session: Session) -> None:
    """Token by token, in several calls, is what one call writes."""
    prompt = some_tokens(40)
    want = llm.generate(prompt, max_tokens=12).tokens
    got = session.generate(prompt, max_tokens=5).tokens
    got += session.generate(max_tokens=1).tokens
    second = session.generate(max_tokens=6)
    assert got + second.tokens == want
    assert (second.usage.prompt_tokens, second.usage.cached_tokens) == (46, 45)  # the last token is computed now


def test_generate_with_a_seed_does_not_depend_on_the_calls(llm: LLM, session: Session) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    want = llm.generate(some_tokens(9), max_tokens=10, **options).tokens
    got = session.generate(some_tokens(9), max_tokens=4, **options).tokens
    assert got + session.generate(max_tokens=6, **options).tokens == want


def test_stream_stopped_by_the_reader_keeps_what_was_read(llm: LLM, session: Session) -> None:
    want = llm.generate([1, 2, 3], max_tokens=9).tokens
    chunks = session.stream([1, 2, 3], max_tokens=9)
    first = [next(chunks).token for _ in range(4)]
    chunks.close()  # type: ignore[attr-defined]
    assert session.tokens == [1, 2, 3, *first]
    assert first + session.generate(max_tokens=5).tokens == want


@pytest.mark.parametrize("read", [1, 2, 4])
def test_a_session_may_be_used_while_an_answer_is_not_read_to_its_end(read: int, llm: LLM, session: Session) -> None:
    """The answer ends: what was read of it belongs to the session."""
    want = llm.generate([1, 2, 3], max_tokens=9).tokens
    session.append([1, 2, 3])
    start = session.snapshot()
    chunks = session.stream(max_tokens=9)
    first = [next(chunks).token for _ in range(read)]
    assert first + session.generate(max_tokens=9 - read).tokens == want
    assert list(chunks) == [] and session.tokens == [1, 2, 3, *want]
    for change in (lambda: session.rewind(start), lambda: session.advance([1, 2, 3])):
        chunks = session.stream([5], max_tokens=4)
        next(chunks)
        change()
        assert list(chunks) == [] and session.tokens == [1, 2, 3]
        assert continued(session, 9) == want
    chunks = session.stream(max_tokens=9)
    first = [next(chunks).token for _ in range(read)]
    session.append([7, 8])
    assert list(chunks) == [] and session.tokens == [1, 2, 3, *first, 7, 8]
    assert continued(session) == llm.generate(session.tokens, max_tokens=12).tokens


def test_close_ends_an_answer_that_is_being_read(llm: LLM) -> None:
    before = held(llm)
    session = llm.session()
    chunks = session.stream([1, 2, 3], max_tokens=300)
    next(chunks)
    session.close()
    assert held(llm) == before
    assert list(chunks) == [] and held(llm) == before and llm.scheduler.idle


def test_stream_goes_on_where_the_session_is_at_its_first_chunk(llm: LLM, session: Session) -> None:
    session.generate([1, 2, 3], max_tokens=2)  # of which the last token is not computed yet
    first, second = session.stream([5], max_tokens=2), session.stream([6], max_tokens=2)
    for chunks, token in ((second, 6), (first, 5)):
        before = list(session.tokens)
        assert [chunk.token for chunk in chunks] == llm.generate([*before, token], max_tokens=2).tokens
        assert session.tokens[: len(before) + 1] == [*before, token]


def test_session_names_what_is_no_snapshot_and_no_metadata(session: Session, tmp_path: Path) -> None:
    with pytest.raises(DTypeError, match="^rewind: snapshot is a NoneType, expected"):
        session.rewind(None)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="^save: metadata is 5, expected"):
        session.save(tmp_path / "x", metadata=5)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_append_text_adds_special_tokens_only_at_the_beginning(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(  # type: ignore[assignment]
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    backend.save(str(tmp_path / "model" / "tokenizer.json"))
    llm = penstock.load(tmp_path / "model", device="reference")
    with llm.session() as session:
        for text in ("ab", "", "cd"):
            session.append(text)
        assert session.tokens == llm.tokenizer.encode("abcd") and session.tokens[0] == 0
        session.generate("e", max_tokens=1)
        assert session.tokens[:-1] == llm.tokenizer.encode("abcde")


def test_generate_applies_penalties_to_all_tokens_of_the_session(llm: LLM, session: Session) -> None:
    session.append(some_tokens(30))
    assert session.generate(max_tokens=5, repetition_penalty=1.5).tokens == (
        llm.generate(some_tokens(30), max_tokens=5, repetition_penalty=1.5).tokens
    )


# -- going back ------------------------------------------------------------------------------------------------------


def test_rewind_gives_the_same_text_again(session: Session) -> None:
    session.append(some_tokens(280))
    snapshot = session.snapshot()
    first = session.generate(max_tokens=10).tokens
    session.append(some_tokens(270, seed=3))
    session.rewind(snapshot)
    assert session.tokens == some_tokens(280)
    assert session.generate(max_tokens=10).tokens == first
    session.rewind(snapshot)
    assert session.generate(max_tokens=10).tokens == first


def test_snapshot_between_generated_tokens(session: Session) -> None:
    session.generate(some_tokens(5), max_tokens=4)
    snapshot = session.snapshot()
    first = session.generate(max_tokens=6).tokens
    session.rewind(snapshot)
    assert session.generate(max_tokens=6).tokens == first


def test_snapshot_of_one_session_starts_another(llm: LLM, session: Session) -> None:
    session.append(some_tokens(100))
    snapshot = session.snapshot()
    want = continued(session)
    session.close()
    with llm.session() as other:
        other.rewind(snapshot)
        assert other.tokens == some_tokens(100) and other.generate(max_tokens=12).tokens == want


def test_snapshots_give_their_pages_back(llm: LLM) -> None:
    before = held(llm)
    with llm.session() as session:
        for n in range(4):
            session.append(some_tokens(20, seed=n))
            session.snapshot()
        kept = session.snapshot()
        session.append([1])
    del kept, session
    assert held(llm) == before


def test_rewind_refuses_the_snapshot_of_another_model(folder: Path, session: Session) -> None:
    with penstock.load(folder, device="reference").session() as other:
        other.append([1, 2])
        with pytest.raises(InvalidArgument, match="^rewind: the snapshot belongs to another model"):
            session.rewind(other.snapshot())


# -- advance ---------------------------------------------------------------------------------------------------------


def test_advance_keeps_what_is_the_same(llm: LLM, session: Session) -> None:
    text = some_tokens(300)
    assert session.advance(text[:256]) == 0
    snapshot = session.snapshot()
    assert session.advance(text) == 256
    np.testing.assert_array_equal(session.logits, llm.logits(text)[-1])
    assert session.advance(text) == 300
    changed = [*text[:256], *some_tokens(60, seed=4)]
    assert session.advance(changed, [snapshot]) == 256
    np.testing.assert_array_equal(session.logits, llm.logits(changed)[-1])
    assert session.tokens == changed
    assert session.advance([9, *text[1:300]], [snapshot]) == 0  # nothing fits
    np.testing.assert_array_equal(session.logits, llm.logits([9, *text[1:300]])[-1])


def test_advance_takes_the_longest_moment(session: Session) -> None:
    text = some_tokens(60)
    moments = []
    for end in (10, 30, 50):
        session.append(text[end - 20 if end > 10 else 0 : end])
        moments.append(session.snapshot())
    session.append(some_tokens(5, seed=5))
    assert session.advance(text[:45], moments) == 30
    assert session.advance(text, moments) == 50


def test_advance_over_a_generated_token_that_was_not_computed(llm: LLM, session: Session) -> None:
    """After one generated token the caches end where the prompt does, but its logits are gone."""
    prompt = some_tokens(20)
    want = llm.generate(prompt, max_tokens=3).tokens
    session.generate(prompt, max_tokens=1)
    session.advance(prompt)
    assert session.tokens == prompt and session.generate(max_tokens=3).tokens == want
    session.advance([*prompt, *want])
    assert session.tokens == [*prompt, *want]
    assert session.generate(max_tokens=1).tokens == llm.generate([*prompt, *want], max_tokens=1).tokens


def test_advance_to_nothing_empties_the_session(session: Session) -> None:
    session.append([1, 2, 3])
    assert session.advance([]) == 0 and session.tokens == []
    with pytest.raises(InvalidArgument, match="^session: it is empty and so is the prompt"):
        session.generate()


# -- refusals and interruptions --------------------------------------------------------------------------------------


def test_a_closed_session_refuses_everything(llm: LLM, tmp_path: Path) -> None:
    session = llm.session()
    session.append([1, 2, 3])
    snapshot = session.snapshot()
    session.close()
    session.close()
    for call in (
        lambda: session.append([4]),
        lambda: session.generate([4]),
        lambda: session.snapshot(),
        lambda: session.rewind(snapshot),
        lambda: session.advance([1, 2, 3, 4]),
        lambda: session.advance([7]),
        lambda: session.save(tmp_path / "x"),
    ):
        with pytest.raises(InvalidArgument, match="was closed, expected an open one"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [
    lambda s: s.append([VOCAB]),
    lambda s: s.append(None),
    lambda s: s.generate([-1]),
    lambda s: s.generate([1], max_tokens=0),
    lambda s: s.generate([1], temperature=-1),
    lambda s: s.generate([1], wisdom=9),
    lambda s: s.generate([1], stop=[""]),
    lambda s: s.generate([1], logit_bias={VOCAB: 1}),
    lambda s: s.generate([1], extra_eos=[VOCAB]),
    lambda s: s.generate([1], extra_eos=5),
    lambda s: s.generate(some_tokens(690)),
    lambda s: s.append(some_tokens(700)),
    lambda s: s.append("\ud800"),
    lambda s: s.advance([1, VOCAB]),
])  # fmt: skip
def test_a_refused_call_changes_nothing(call: Any, session: Session) -> None:
    session.append(some_tokens(20))
    tokens, want = list(session.tokens), continued(session)
    with pytest.raises(InvalidArgument):
        call(session)
    assert session.tokens == tokens and continued(session) == want


def test_generate_ends_where_the_context_ends(llm: LLM, session: Session) -> None:
    done = session.generate(some_tokens(690), max_tokens=50, logit_bias=letters())
    assert done.finish_reason == "length" and len(done.tokens) == 10 and len(session) == 700
    with pytest.raises(InvalidArgument, match="^prompt has 700 tokens, expected fewer than 700"):
        session.generate()
    with pytest.raises(InvalidArgument, match="^context: 699 positions are filled and 2 more were given"):
        session.append([1])
    assert len(session) == 700


def test_append_stopped_between_pieces_keeps_them(llm: LLM, session: Session) -> None:
    text = some_tokens(600)

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.append(text, progress=stop)
    assert session.tokens == text[:256]
    with pytest.raises(KeyboardInterrupt):
        next(session.stream(text[256:], progress=stop))
    assert session.tokens == text[:512]
    with pytest.raises(InvalidArgument):  # no logits to go on from
        session.generate()
    assert session.generate(text[512:], max_tokens=8).tokens == llm.generate(text, max_tokens=8).tokens


def test_a_spoiled_session_can_go_back(llm: LLM, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.append(some_tokens(20))
    snapshot, want = session.snapshot(), continued(session)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Bound, "run", interrupt)
        session.append([5])
    assert session.tokens == some_tokens(20)
    for call in (lambda: session.append([1]), lambda: session.generate([1]), session.snapshot):
        with pytest.raises(InvalidArgument, match="interrupted in the middle of a step"):
            call()
    session.rewind(snapshot)
    assert continued(session) == want
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Bound, "run", interrupt)
        session.append([5])
    assert session.advance(some_tokens(20)) == 0  # reads all again
    assert session.generate(max_tokens=12).tokens == want


def test_sessions_are_given_back_when_nobody_holds_them(llm: LLM) -> None:
    before = held(llm)
    for _ in range(5):
        llm.session().append([1, 2])
    assert held(llm) == before


def test_two_sessions_in_two_threads(llm: LLM) -> None:
    texts = some_tokens(30, seed=1), some_tokens(270, seed=2)
    want = [llm.generate(text, max_tokens=10).tokens for text in texts]
    got: dict[int, list[int]] = {}

    def talk(n: int) -> None:
        with llm.session() as session:
            got[n] = session.generate(texts[n], max_tokens=5).tokens
            got[n] += session.generate(max_tokens=5).tokens

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[0], got[1]] == want


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(llm: LLM, tmp_path: Path) -> Path:
    with llm.session() as session:
        session.append(some_tokens(270))
        session.save(tmp_path / "talk.session")
    return tmp_path / "talk.session"


@pytest.mark.parametrize("prepare", [
    lambda s: None,
    lambda s: s.append(some_tokens(256)),
    lambda s: s.append(some_tokens(300)),
    lambda s: s.generate(some_tokens(3), max_tokens=4),
], ids=["empty", "page", "appended", "generated"])  # fmt: skip
def test_save_and_restore_give_the_same_text(prepare: Any, llm: LLM, session: Session, tmp_path: Path) -> None:
    prepare(session)
    session.save(tmp_path / "talk")
    assert [path.name for path in tmp_path.iterdir()] == ["talk"]  # nothing temporary is left
    with penstock.restore(tmp_path / "talk", llm) as other:
        assert other.tokens == session.tokens
        more = [] if session.tokens else [5]
        first, second = (s.generate(more, max_tokens=10) for s in (session, other))
        assert first.tokens == second.tokens
        other.append([1, 2])
        session.append([1, 2])
        np.testing.assert_array_equal(other.logits, session.logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restore_loads_the_model_that_the_file_names(dtype: str, folder: Path, tmp_path: Path) -> None:
    llm = penstock.load(folder, dtype=dtype, activations="float32")
    with llm.session() as session:
        want = session.generate(some_tokens(8), max_tokens=5).tokens
        session.save(tmp_path / "talk")
        more = session.generate(max_tokens=5).tokens
    with penstock.restore(tmp_path / "talk") as other:
        assert other.tokens == [*some_tokens(8), *want]
        assert (other.engine.dtype, other.engine.activations) == (dtype, "float32")
        assert other.generate(max_tokens=5).tokens == more


def test_save_and_restore_of_bfloat16_states(folder: Path, tmp_path: Path) -> None:
    half, path = penstock.load(folder, device="reference", max_context=64, state_dtype="bfloat16"), tmp_path / "half"
    with half.session() as session:
        session.append(some_tokens(12))
        session.save(path)
        want = continued(session, 3)
        assert continued(session, 3) == want
    assert {str(array.dtype) for name, array in load_file(path).items() if array.ndim == 3} == {"bfloat16"}
    with penstock.restore(path, half) as session:
        assert continued(session, 3) == want
    whole = penstock.load(folder, device="reference", max_context=64)
    refused(path, whole, "was saved with state_dtype 'bfloat16', expected this model's (state_dtype 'float32')")


def test_restore_of_the_demo_model(tmp_path: Path) -> None:
    with penstock.load(device="reference").session() as session:
        session.append([5, 6])
        session.save(tmp_path / "talk")
    with penstock.restore(tmp_path / "talk") as other:
        assert other.tokens == [5, 6]


def rewritten(path: Path, arrays: Any = None, signed: bool = True, **about: Any) -> None:
    """The file with other arrays or another description; signed: with a digest that fits them."""
    with safe_open(path, "np") as file:
        description = dict(file.metadata())
    arrays = arrays or load_file(path)
    description |= about
    if signed:
        description = {key: value for key, value in description.items() if value is not None}
        description["digest"] = _digest(description, arrays)
    save_file(arrays, path, {key: value for key, value in description.items() if value is not None})


@pytest.mark.parametrize("about", [{}, {"state_dtype": None}], ids=["as it was", "from before states had dtypes"])
def test_rewritten_as_it_was_is_accepted(about: dict[str, Any], saved: Path, llm: LLM) -> None:
    rewritten(saved, **about)
    with penstock.restore(saved, llm) as session:
        assert session.tokens == some_tokens(270)


@pytest.mark.parametrize("about, words", [
    ({"format": "mlx-lm"}, "format is 'mlx-lm', expected a saved session"),
    ({"format": None}, "format is None, expected a saved session"),
    ({"version": "2"}, "version is '2', expected 1"),
    ({"version": "0" * 1000}, "version is '00000000000000000000', expected 1"),
    ({"fingerprint": "0" * 64}, "was saved with another model or quantization, expected this model's"),
    ({"dtype": "bfloat16"}, "was saved with dtype 'bfloat16', expected this model's (dtype 'float32')"),
    ({"state_dtype": "bfloat16"}, "was saved with state_dtype 'bfloat16', expected this model's (state_dtype 'float"),
    ({"activations": "float32"}, "was saved with activations 'float32', expected this model's (activations 'int8')"),
    ({"length": "100000"}, "has 100000 positions, expected at most 700 (max_context)"),
    ({"length": "269"}, "expected a whole session"),
    ({"length": "-1"}, "the description lacks a length"),
    ({"length": "9" * 50}, "the description lacks a length"),
    ({"length": None}, "the description lacks length"),
    ({"model": None}, "the description lacks model"),
])  # fmt: skip
def test_restore_refuses_a_file_of_something_else(about: dict[str, Any], words: str, saved: Path, llm: LLM) -> None:
    rewritten(saved, signed="length" in about or "dtype" in about, **about)
    refused(saved, llm, words)


def refused(path: Path, llm: LLM, words: str) -> None:
    """One line that names the file; the model is as before, and nothing stays open."""
    before = held(llm)
    with pytest.raises(CheckpointError) as caught:
        penstock.restore(path, llm)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and words in message and "\n" not in message and len(message) < 400
    assert held(llm) == before


def test_restore_refuses_a_tampered_token_list(saved: Path, llm: LLM) -> None:
    arrays = load_file(saved)
    arrays["tokens"] = arrays["tokens"] + np.int32(1)
    rewritten(saved, arrays, signed=False)
    refused(saved, llm, "the contents do not fit their digest, expected an unchanged file")


@pytest.mark.parametrize("change, words", [
    (lambda a: a | {"tokens": np.full(270, VOCAB, np.int32)}, f"tokens: has {VOCAB}, expected ids from 0 to"),
    (lambda a: a | {"tokens": np.full(270, -1, np.int32)}, "tokens: has -1, expected ids from 0 to"),
    (lambda a: a | {"tokens": a["tokens"][:-1]}, "has 269 tokens for 270 positions"),
    (lambda a: a | {"tokens": np.tile(a["tokens"], 2)}, "has 540 tokens for 270 positions"),
    (lambda a: a | {"tokens": a["tokens"].astype(np.float32)}, "tokens is missing or not int32 [270]"),
    (lambda a: a | {"logits": a["logits"][:5]}, f"logits is missing or not float32 [{VOCAB}]"),
    (lambda a: {k: v for k, v in a.items() if k != "tokens"}, "tokens is missing"),
    (lambda a: {k: v for k, v in a.items() if k != "layers.1.second"}, "layers.1.second is missing"),
    (lambda a: a | {"layers.1.first": a["layers.1.first"][:9]}, "layers.1.first is missing or not float32 [270, 64]"),
    (lambda a: a | {"layers.0.second": np.float64(a["layers.0.second"])}, "layers.0.second is missing or not float32"),
    (lambda a: a | {"more": np.zeros(3, np.float32)}, "the contents do not fit"),
])  # fmt: skip
def test_restore_refuses_contents_that_do_not_fit(change: Any, words: str, saved: Path, llm: LLM) -> None:
    rewritten(saved, change(load_file(saved)))
    refused(saved, llm, words)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 5000, -1])
def test_restore_refuses_a_truncated_file(size: int, saved: Path, llm: LLM) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[:size])
    refused(saved, llm, "")


def test_restore_refuses_changed_bytes_anywhere(saved: Path, llm: LLM) -> None:
    data = bytearray(saved.read_bytes())
    for at in np.random.default_rng(0).integers(len(data) // 2, len(data), 4):
        changed = bytearray(data)
        changed[at] ^= 1
        saved.write_bytes(changed)
        refused(saved, llm, "")


def test_restore_refuses_other_files(tmp_path: Path, llm: LLM, folder: Path) -> None:
    refused(folder / "model.safetensors", llm, "expected a saved session")
    (tmp_path / "text").write_text("once upon a time " * 50)
    for path in (tmp_path / "text", tmp_path / "nothing", tmp_path):
        refused(path, llm, "")


def test_restore_refuses_another_quantization(tmp_path: Path, saved: Path) -> None:
    """The same names and another config."""
    other = write_model(tmp_path / "other", small_config(rms_norm_eps=1e-5), tensors(small_config()))
    refused(saved, penstock.load(other, device="reference"), "another model or quantization")


PLACES = {
    "nowhere/talk": "nowhere/talk: cannot be written: No such file or directory$",
    "folder": "is a folder",
    "": "is a folder",
    "file/talk": "Not a directory",
    "pipe": "is a device or a pipe",
    "n" * 256: "File name too long",
    "a\0b": r"a\\x00b: cannot be written: embedded null",
    "\ud800": r"\\ud800: cannot be written",
}


@pytest.mark.parametrize("place", PLACES, ids=ascii)
def test_save_names_a_place_that_cannot_be_written(place: str, session: Session, tmp_path: Path) -> None:
    session.append([1])
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=PLACES[place]) as refused:
        session.save(f"{tmp_path}/{place}")
    assert "cannot be written: " in str(refused.value) and "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "file").read_text() == "mine"


def test_save_refuses_what_is_no_file_of_the_working_folder(session: Session, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    session.append([1])
    for folder in ("", ".", "..", "/"):
        with pytest.raises(CheckpointError, match="cannot be written: is a folder"):
            session.save(folder)
    for path in (5, None, b"talk"):
        with pytest.raises(DTypeError, match="^save: path is a .*, expected a str or a Path$"):
            session.save(path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_save_takes_the_longest_name_there_is(session: Session, llm: LLM, tmp_path: Path) -> None:
    session.append([1])
    session.save(tmp_path / ("n" * 255))
    with penstock.restore(tmp_path / ("n" * 255), llm) as other:
        assert other.tokens == [1]


def test_save_without_room_or_interrupted_leaves_the_older_file(
    saved: Path, session: Session, monkeypatch: Any
) -> None:
    before = saved.read_bytes()
    session.append(some_tokens(200))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be written: .*File too large"):
            session.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.save(saved)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name] and saved.read_bytes() == before


def test_save_replaces_an_older_file(session: Session, llm: LLM, tmp_path: Path) -> None:
    for text in ([1], [2, 3]):
        session.append(text)
        session.save(tmp_path / "talk")
    with penstock.restore(tmp_path / "talk", llm) as other:
        assert other.tokens == [1, 2, 3]


def test_save_says_what_it_is(saved: Path, folder: Path) -> None:
    with safe_open(saved, "np") as file:
        about = file.metadata()
    assert (about["format"], about["version"], about["model"]) == ("penstock-session", "1", str(folder))
    assert (about["dtype"], about["activations"], about["length"]) == ("float32", "int8", "270")
