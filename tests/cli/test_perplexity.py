import functools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

import penstock
from penstock.analysis.perplexity import StoredLogits, evaluate, windows
from penstock.api import LLM
from penstock.cli.perplexity import encoded
from penstock.engine.engine import Engine
from penstock.engine.execution import most_rows
from penstock.errors import BackendError, InvalidArgument
from penstock.text.tokenizer import Tokenizer
from tests.cli.common import call
from tests.cli.model import write_small_model
from tests.engine.capturing import CapturingHost
from tests.models.common import small_config, some_tokens, write_model

TALE = (
    "Once upon a time there was a fox who lived in a wood with his mother. One day the fox said to the crow: I am "
    "hungry, and you are fat. The crow laughed and flew away, and the fox went home without his dinner. "
)


@functools.cache
def demo(activations: str = "float32") -> LLM:
    return penstock.load(device="cpu", activations=activations)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def predictions(llm: LLM, rows: np.ndarray) -> np.ndarray:
    """log p of all tokens at all predicted places of all windows, float64 [n, vocab]: the plain way."""
    return np.concatenate([log_probabilities(llm.logits(row.tolist())[:-1]) for row in rows])


# -- the library -----------------------------------------------------------------------------------------------------


def test_windows_follow_each_other_and_leave_out_the_end():
    found = windows(range(10), 3)
    assert found.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]] and found.dtype == np.int32
    assert windows(range(10), 3, count=2).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert windows(range(9), 4, prefix=[77]).tolist() == [[77, 0, 1, 2], [77, 3, 4, 5], [77, 6, 7, 8]]


def test_windows_are_drawn_with_a_seed():
    drawn = windows(range(40), 4, count=5, seed=3)
    assert drawn.tolist() == windows(range(40), 4, count=5, seed=3).tolist()
    assert drawn.tolist() != windows(range(40), 4, count=5, seed=4).tolist()
    whole = windows(range(40), 4).tolist()
    assert all(row in whole for row in drawn.tolist()) and drawn.tolist() != whole[:5]


@pytest.mark.parametrize(
    ("count", "length", "number", "message"),
    [
        (3, 4, None, "the text has 3 tokens, expected at least 4 (one window)"),
        (9, 1, None, "a window is 1 tokens, expected at least 2"),
        (9, 4, 0, "0 windows are asked for, expected at least 1"),
    ],
)
def test_windows_refuse_what_makes_none(count, length, number, message):
    with pytest.raises(InvalidArgument) as caught:
        windows(range(count), length, number)
    assert str(caught.value) == f"perplexity: {message}"


def test_evaluate_is_exp_of_the_mean_loss_of_the_logits():
    rows = windows(demo().tokenizer.encode(TALE * 13), 300)  # two pieces of the grid, the second one ragged
    assert len(rows) > 1
    done = []
    found = evaluate(demo().engine, rows, progress=lambda number, value: done.append((number, value)))
    log_p = predictions(demo(), rows)
    losses = -log_p[np.arange(len(log_p)), rows[:, 1:].reshape(-1)]
    assert found.perplexity == pytest.approx(np.exp(losses.mean()), rel=1e-7)
    error = losses.std(ddof=1) / len(losses) ** 0.5
    assert found.perplexity_error == pytest.approx(found.perplexity * error, rel=1e-6)
    assert (found.predictions, found.windows, found.length) == (len(losses), len(rows), 300)
    assert [number for number, _ in done] == list(range(1, len(rows) + 1))
    assert done[-1][1] == pytest.approx(found.perplexity)
    assert found.divergence is None and found.tokens_per_second > 0


def test_evaluate_compares_with_a_reference():
    rows = windows(demo().tokenizer.encode(TALE * 12), 270, count=2)
    found = evaluate(demo("int8").engine, rows, demo().engine).divergence
    assert found is not None
    own, base = (predictions(llm, rows) for llm in (demo("int8"), demo()))
    p = np.exp(base)
    kl = (p * (base - own)).sum(axis=1)
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-4) and found.kl_mean > 1e-4
    assert found.kl_error == pytest.approx(kl.std(ddof=1) / len(kl) ** 0.5, rel=1e-4)
    quantiles = np.quantile(kl, [0.5, 0.95, 0.99, 1.0])
    assert [found.kl_median, found.kl_95, found.kl_99, found.kl_max] == pytest.approx(quantiles.tolist(), rel=1e-3)
    same = own.argmax(axis=1) == base.argmax(axis=1)
    assert found.same_top == same.mean() and 0.5 < found.same_top < 1
    targets = rows[:, 1:].reshape(-1)
    true = [log_p[np.arange(len(log_p)), targets] for log_p in (own, base)]
    assert found.perplexity == pytest.approx(np.exp(-true[1].mean()), rel=1e-7)
    assert found.ratio == pytest.approx(np.exp((true[1] - true[0]).mean()), rel=1e-6)
    change = np.exp(true[0]) - np.exp(true[1])
    assert found.rms_probability == pytest.approx((change**2).mean() ** 0.5, rel=1e-4)


def test_a_reference_may_leave_its_logits_behind(monkeypatch):
    rows = windows(demo().tokenizer.encode(TALE * 13), 300, count=2)  # two chunks, the second one ragged
    with StoredLogits(demo().engine, rows) as stored:
        found, want = (evaluate(demo("int8").engine, rows, other) for other in (stored, demo().engine))
        assert found.divergence == want.divergence and found.perplexity == want.perplexity
        assert found.seconds > stored.seconds > 0
        with pytest.raises(InvalidArgument, match="logits of 2 windows are stored, expected 1"):
            evaluate(demo().engine, rows[:1], stored)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    with pytest.raises(
        InvalidArgument, match=r"1.05 MB are free, and logits of 2 windows take .*, expected fewer windows"
    ):
        StoredLogits(demo().engine, rows)


def test_evaluate_finds_no_difference_of_a_model_from_itself():
    rows = windows(demo().tokenizer.encode(TALE * 2), 40, count=2)
    found = evaluate(demo().engine, rows, demo().engine).divergence
    assert found is not None
    assert (found.kl_max, found.same_top, found.ratio, found.rms_probability) == (0.0, 1.0, 1.0, 0.0)


def test_evaluate_compares_devices_that_cut_windows_otherwise():
    """Windows of two chunks here, of one there, also where a device draws tokens itself."""
    rows = windows(demo().tokenizer.encode(TALE * 13), 300, count=2)
    other = Engine(demo().engine.model, activations="float32", max_context=512, device=CapturingHost())
    found, back = evaluate(demo().engine, rows, other), evaluate(other, rows, demo().engine)
    assert found.divergence is not None and found.divergence.kl_max < 1e-6 and found.divergence.same_top == 1
    assert found.divergence.perplexity == pytest.approx(found.perplexity, rel=1e-5)
    assert back.perplexity == found.divergence.perplexity and other.caches.slots_used == 0


def test_evaluate_is_that_of_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    folder = write_model(tmp_path / "model", small_config())
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    rows = windows(some_tokens(160), 50)
    with torch.no_grad():
        batch = torch.tensor(rows.astype(np.int64))
        logits = model(batch).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), batch[:, 1:].flatten())
    found = evaluate(penstock.load(folder, device="cpu", activations="float32").engine, rows)
    assert found.perplexity == pytest.approx(float(losses.exp()), rel=1e-5)


@pytest.mark.parametrize(("grid", "vocab", "length"), [(2048, 262144, 256), (2048, 4096, 2048), (256, 262144, 256)])
def test_scores_of_a_piece_stay_below_a_limit(grid, vocab, length):
    engine = SimpleNamespace(
        device=SimpleNamespace(chunk_alignment=grid), model=SimpleNamespace(config=SimpleNamespace(vocab_size=vocab))
    )
    assert most_rows(engine) == length  # type: ignore[arg-type]


def test_evaluate_refuses_windows_that_do_not_fit():
    engine = demo().engine
    with pytest.raises(InvalidArgument, match="a window is 4000 tokens, expected at most 2048"):
        evaluate(engine, np.zeros((1, 4000), np.int32))
    with pytest.raises(InvalidArgument, match=r"windows have shape \(0, 9\), expected \[n, length\]"):
        evaluate(engine, np.zeros((0, 9), np.int32))


def test_evaluate_refuses_scores_that_are_not_finite_and_closes_its_sequences(monkeypatch):
    engine = demo().engine
    before = engine.caches._free_slots[:]
    monkeypatch.setattr(engine, "step", lambda _: np.full((7, 4096), np.nan, np.float32))
    with pytest.raises(BackendError, match="logits of window 0 are not finite"):
        evaluate(engine, np.zeros((1, 8), np.int32))
    assert sorted(engine.caches._free_slots) == sorted(before or [0])


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tale(tmp_path):
    path = tmp_path / "tale.txt"
    path.write_text(TALE * 4)
    return str(path)


@pytest.fixture
def small(tmp_path):
    """A model of one layer, which runs by the definitions in no time."""
    return write_small_model(tmp_path / "small")


TIMED = ("seconds", "tokens_per_second", "peak_memory")
WAYS = ("--device", "reference", "--sequence-length", "12", "--num-samples", "2")


def test_perplexity_json_has_what_the_library_found(capsys, small, tale):
    shown = call(capsys, "perplexity", small, "--data-path", tale, *WAYS, "--json")
    assert (shown.status, shown.err) == (0, "")
    found = json.loads(shown.out)
    llm = penstock.load(small, device="reference")
    want = evaluate(llm.engine, windows(llm.tokenizer.encode(TALE * 4), 12, 2))
    assert found["perplexity"] == pytest.approx(want.perplexity, rel=1e-12)
    assert (found["predictions"], found["windows"], found["length"]) == (22, 2, 12)
    assert (found["model"], found["data"], found["bos"], found["divergence"]) == ("small", tale, False, None)


def test_perplexity_names_a_token_without_embedding(capsys, small, tmp_path):
    path, text = Path(small, "tokenizer.json"), tmp_path / "text.txt"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.add_special_tokens(["<|image|>"])
    backend.save(str(path))
    text.write_text("once upon a time <|image|>")
    shown = call(capsys, "perplexity", small, "--data-path", str(text), *WAYS)
    assert shown.status == 1 and f"{text}: has 4096 ('<|image|>'), expected ids from 0 to 4095" in shown.err


def test_perplexity_prints_the_reference_beside(capsys, small, tale):
    shown = call(capsys, "perplexity", "--model", small, "-f", tale, *WAYS, "--reference", small)
    assert shown.status == 0
    lines = dict(line.split("  ", 1) for line in shown.out.splitlines())
    assert lines["Same top token"].strip() == "100.00% ± 0.00%"
    assert lines["Perplexity"].strip() == lines["Reference"].strip()
    assert lines["Ratio"].strip().startswith("1.00000")
    assert "mean 0.000000 ± 0.000000, median 0.000000" in lines["KL divergence"]
    assert lines["Tokens"].strip() == "22 predicted in 2 windows of 12"


def test_models_that_are_split_are_compared_one_after_the_other(capsys, small, tale, monkeypatch, tmp_path):
    words = ("perplexity", small, "-f", tale, *WAYS, "--json", "--reference")
    shown = [call(capsys, *words, small)]
    monkeypatch.setattr("penstock.cli.perplexity._is_split", lambda chosen: True)
    shown.append(call(capsys, *words, small))
    want, found = ({**json.loads(one.out), **dict.fromkeys(TIMED)} for one in shown)
    assert found == want and found["divergence"]["same_top"] == 1
    wide = call(capsys, *words, str(write_model(tmp_path / "other", small_config())))
    assert wide.status == 1 and "--reference: its vocabulary has 263 tokens, expected 4096 as the model's\n" in wide.err


def test_a_reference_is_refused_under_torchrun(capsys, small, tale, monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("0", "2", "0", "2", "127.0.0.1", "29400"), strict=True):
        monkeypatch.setenv(name, value)
    shown = call(capsys, "perplexity", small, "-f", tale, *WAYS, "--reference", small)
    assert shown.status == 2 and "--reference: the ranks of torchrun run one model, expected -tp N" in shown.err


def test_perplexity_takes_the_command_line_of_mlx_lm(capsys, small, tale):
    words = ["--model", small, "--data-path", tale, "--batch-size", "4", "--sequence-length", "60"]
    shown = call(capsys, "perplexity", *words, "--num-samples", "-1", "--seed", "123", "--device", "reference")
    assert shown.status == 0
    assert "remote" not in shown.err
    words = [*words[2:], "--device", "reference"]
    shown = call(capsys, "perplexity", "-m", small, *words, "--trust-remote-code")  # -m as in llama.cpp
    assert shown.status == 0
    assert shown.err.startswith("penstock: --trust-remote-code: no code from model folders is run\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, expected a text"),
        (b" \n\n ", "has no words, expected a text"),
        (b"caf\xe9 au lait", "byte 3 is not UTF-8, expected plain text"),
        (b"GGUF\xff\xff", "a GGUF file, expected plain text"),
        (b"too short", "the text has 3 tokens, expected at least 12 (one window)"),
    ],
)
def test_perplexity_refuses_a_bad_text(capsys, small, tmp_path, content, message):
    path = tmp_path / "text"
    path.write_bytes(content)
    shown = call(capsys, "perplexity", small, "--data-path", str(path), *WAYS, "--json")
    assert (shown.status, shown.out, shown.err) == (1, "", f"penstock: error: {path}: {message}\n")


def test_perplexity_refuses_what_is_no_text_file(capsys, tmp_path):
    shown = call(capsys, "perplexity", "--data-path", "allenai/tulu-3-sft-mixture")
    assert shown.status == 1 and shown.err.endswith(
        ": no such file, expected a text in UTF-8 (datasets of the hub are not supported)\n"
    )
    shown = call(capsys, "perplexity", "--data-path", str(tmp_path))
    assert shown.status == 1 and shown.err.endswith("is a folder, expected a regular file\n")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--sequence-length", "4096"), 1, "--sequence-length: is 4096, expected 2 to 2048 (the context of small)"),
        (("--num-samples", "0"), 2, "--num-samples: is 0, expected at least 1, or -1 for the whole text"),
        (("--reference-device", "cpu"), 2, "--reference-device: expected together with --reference"),
        (("--model", "other"), 2, "--model: "),
    ],
)
def test_perplexity_refuses_options_that_cannot_be(capsys, small, tale, words, status, message):
    shown = call(capsys, "perplexity", small, "--data-path", tale, "--device", "reference", "--json", *words)
    assert (shown.status, shown.out) == (status, "")
    assert shown.err.startswith(f"penstock: error: {message}") and shown.err.count("\n") == 1


def test_perplexity_refuses_a_reference_with_another_vocabulary(capsys, small, tale, tmp_path):
    other = str(write_model(tmp_path / "other", small_config()))
    shown = call(capsys, "perplexity", small, "--data-path", tale, *WAYS, "--reference", other)
    assert (shown.status, shown.out) == (1, "")
    assert "--reference: its vocabulary has 263 tokens, expected 4096 as the model's\n" in shown.err


def test_perplexity_refuses_a_reference_that_cuts_the_text_otherwise(capsys, small, tale, tmp_path):
    other = write_small_model(tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = content["model"]["merges"][:200]
    path.write_text(json.dumps(content))
    shown = call(capsys, "perplexity", small, "--data-path", tale, *WAYS, "--json", "--reference", other)
    assert (shown.status, shown.out) == (1, "")
    assert "--reference: its tokenizer makes " in shown.err and shown.err.count("\n") == 1


def test_every_window_begins_with_the_tokens_that_the_tokenizer_adds():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    backend.add_special_tokens(["<s>", "</s>"])
    assert encoded(Tokenizer(backend), "a b a") == ([2, 3, 2], [])
    both = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    backend.post_processor = both  # type: ignore[assignment]
    assert encoded(Tokenizer(backend), "a b a") == ([2, 3, 2], [0])
