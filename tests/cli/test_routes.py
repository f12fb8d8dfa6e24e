import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from penstock.analysis.expert_routes import ExpertRoutes, LayerUse, load_expert_routes
from penstock.experts.simulate import Trace, table
from tests.cli.common import call, program
from tests.cli.model import write_small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("models") / "small")


def made(tokens=40, prompt=25, layers=3, experts=12, k=2, seed=0, **changes):
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(experts), (tokens, layers, 1)), axis=2)[..., :k]
    values = {
        "model": "made",
        "tokens": np.arange(tokens, dtype=np.int32),
        "texts": tuple(f"w{n} " for n in range(tokens)),
        "ids": ids.astype(np.int32),
        "decode": np.arange(tokens) >= prompt,
        "experts": experts,
        "layers": (1, 3, 5)[:layers],
        "expert_bytes": (1000, 2000, 3000)[:layers],
    }
    return ExpertRoutes(**values | changes)


@pytest.fixture
def saved(tmp_path):
    made().save(tmp_path / "made.npz")
    return str(tmp_path / "made.npz")


def test_routes_records_a_model_and_prints_both_tables(capsys, model):
    shown = call(capsys, "routes", model, "--device", "cpu", "-p", "Once upon a time", "--max-tokens", "6")
    assert shown.status == 0
    lines = shown.out.splitlines()
    found = re.fullmatch(
        r"small: (\d+) tokens of a prompt and 5 of an answer, 1 layer of 16 experts, 4 per token", lines[0]
    )
    assert found is not None
    assert lines[2].split() == ["layer", "used", "top", "10%", "entropy", "repeated"]
    assert [line.split()[0] for line in lines[3:5]] == ["0", "mean"]
    assert lines[8].split() == ["cache", "bytes", "experts", "lru", "lfru", "pin", "min"]
    assert [line.split()[0] for line in lines[9:15]] == ["10%", "20%", "30%", "50%", "70%", "100%"]
    assert "--expert-policy auto is lfru" in shown.out


def test_routes_saves_what_it_can_show_again(capsys, model, tmp_path):
    path = str(tmp_path / "r.npz")
    arguments = ("--device", "cpu", "-p", "Hello", "-m", "6", "--temp", "0.9", "--seed", "4", "--json")
    first = call(capsys, "routes", "--model", model, *arguments, "--save", path)
    again = call(capsys, "routes", "--load", path, "--json")
    assert first.status == again.status == 0 and first.out == again.out
    assert "".join(load_expert_routes(path).texts) == json.loads(first.out)["text"]


def test_routes_json_has_the_numbers_of_the_recording(capsys, saved):
    found = json.loads(call(capsys, "routes", "--load", saved, "--json").out)
    routes = made()
    assert (found["model"], found["experts"], found["top_k"]) == ("made", 12, 2)
    assert (found["prompt_tokens"], found["answer_tokens"]) == (25, 15)
    assert found["expert_bytes"] == 12 * 6000
    assert [layer["layer"] for layer in found["layers"]] == [1, 3, 5]
    assert [layer["counts"] for layer in found["layers"]] == routes.counts().tolist()
    assert found["repeated"] == pytest.approx(np.mean([layer["repeated"] for layer in found["layers"]]))
    for row, want in zip(found["hit_rates"], table(Trace(routes.ids, routes.decode, 12)), strict=True):
        assert (row["share"], row["experts"], row["bytes"]) == (want.share, want.slots, 2000 * want.slots)
        assert {name: row[name] for name in ("lru", "lfru", "pin", "min")} == want.rates


@pytest.mark.parametrize(
    ("counts", "used", "top", "entropy"),
    [
        ([5] * 10, 10, 0.1, 1.0),
        ([8, 0, 0, 0], 1, 1.0, 0.0),
        ([6, 2, 0, 0], 2, 0.75, (0.75 * np.log(4 / 3) + 0.25 * np.log(4)) / np.log(4)),
        ([1] * 11 + [9], 12, 10 / 20, None),  # a tenth of 12 experts is 2
        ([0, 0], 0, 0.0, 0.0),
        ([3], 1, 1.0, 1.0),
    ],
)
def test_layer_use_by_hand(counts, used, top, entropy):
    use = LayerUse(0, np.array(counts), None)
    assert (use.used, use.top_share) == (used, pytest.approx(top))
    if entropy is not None:
        assert use.entropy == pytest.approx(entropy, abs=1e-12)


def test_routes_of_a_prompt_alone_has_nothing_to_simulate(capsys, tmp_path):
    made(prompt=40).save(tmp_path / "r.npz")
    shown = call(capsys, "routes", "--load", str(tmp_path / "r.npz"), "--html", str(tmp_path / "r.html"))
    assert shown.status == 0 and "nothing to simulate" in shown.out
    assert "Hit rates" not in (tmp_path / "r.html").read_text()
    found = json.loads(call(capsys, "routes", "--load", str(tmp_path / "r.npz"), "--json").out)
    assert found["hit_rates"] == [] and found["repeated"] is None


# -- the page --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags that load something, unbalanced ones, the page's data and the cells of its tables."""

    VOID = ("meta", "br", "input")

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.cells, self.data = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href") or "url(" in (value or "")]
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][1].get("id") == "data":
            self.data += data
        if self.open and self.open[-1][0] == "td":
            self.cells.append(data)


def test_routes_page_is_whole_and_needs_nothing(capsys, tmp_path):
    texts = ("</script><b>x</b>", "日本 ", "", '"quoted" & <i>', *(f"w{n} " for n in range(36)))
    made(texts=texts, model='a<b>&"c": d').save(tmp_path / "r.npz")
    path = tmp_path / "r.html"
    assert call(capsys, "routes", "--load", str(tmp_path / "r.npz"), "--html", str(path)).status == 0
    text = path.read_text(encoding="utf-8")
    found = Page(text)
    assert found.open == [] and found.loads == []
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert not re.search(r"@\w+@", text)
    data = json.loads(found.data)
    assert tuple(data["texts"]) == texts
    ids = np.frombuffer(base64.b64decode(data["ids"]), "<u2").reshape(40, 3, 2)
    np.testing.assert_array_equal(ids, made().ids)
    assert data["counts"] == made().counts().tolist()
    assert "<b>x" not in text and "a<b>" not in text and "a&lt;b&gt;&amp;" in text
    rates = [f"{row.rates[name]:.1%}" for row in table(Trace(made().ids, made().decode, 12)) for name in row.rates]
    assert all(rate in found.cells for rate in rates)


def test_routes_page_marks_layers_without_a_choice(capsys, tmp_path):
    ids = made().ids.copy()
    ids[:, 1, 1] = -1
    made(ids=ids).save(tmp_path / "r.npz")
    call(capsys, "routes", "--load", str(tmp_path / "r.npz"), "--html", str(tmp_path / "r.html"))
    data = json.loads(Page((tmp_path / "r.html").read_text()).data)
    kept = np.frombuffer(base64.b64decode(data["ids"]), "<u2").reshape(40, 3, 2)
    assert (kept[:, 1, 1] == 0xFFFF).all() and (kept[:, 0] < 12).all()


def test_routes_of_an_empty_prompt(capsys, model):
    """It is none of hello, but what generate makes of it."""
    shown = call(capsys, "routes", model, "-p", "", "--ignore-chat-template", "-m", "2")
    assert (shown.status, shown.out) == (1, "")
    assert shown.err.endswith("penstock: error: prompt has no tokens, expected at least one\n")


# -- wrong usage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("a", "--model", "b"), 2, "MODEL: is 'a' beside --model 'b', expected one of the two"),
        (("a", "--load", "x.npz"), 2, "MODEL: expected without --load"),
        (("--load", "x.npz", "-p", "hi"), 2, "--prompt: expected without --load"),
        (("--load", "x.npz", "--save", "y.npz"), 2, "--save: expected without --load"),
        (("--load", "none.npz"), 1, "none.npz: cannot be read: No such file or directory"),
        (("no/such/model", "--html", "/nowhere/x"), 1, "--html: /nowhere/x: No such file or directory"),
        (("no/such/model", "--save", "/"), 1, "--save: /: Is a directory"),
        (("no/such/model",), 1, "'no/such/model': no such folder"),
        (("--temp", "-1"), 2, "Invalid value for '--temp'"),
        (("--max-tokens", "0"), 2, "Invalid value for '--max-tokens'"),
        (("--adapter-path", "x"), 2, "--adapter-path: not supported by penstock yet"),
    ],
)
def test_routes_refuses(capsys, arguments, status, message):
    shown = call(capsys, "routes", *arguments)
    assert (shown.status, shown.out) == (status, "")
    assert shown.err.startswith(f"penstock: error: {message}") and shown.err.count("\n") == 1


def test_routes_refuses_the_reference_device(capsys, model):
    shown = call(capsys, "routes", model, "--device", "reference")
    assert shown.status == 1
    assert shown.err.endswith("penstock: error: routes: device is 'reference', expected cpu or cuda\n")


def test_routes_says_which_page_cannot_be_written(capsys, saved, tmp_path):
    shown = call(capsys, "routes", "--load", saved, "--html", str(tmp_path / "none" / "r.html"))
    assert shown.status == 1
    assert shown.err.startswith("penstock: error: --html: ") and "No such file or directory" in shown.err


def test_routes_in_a_pipe_has_no_colour(saved):
    shown = program("routes", "--load", saved, NO_COLOR="")
    assert shown.status == 0 and "\x1b" not in shown.out and shown.err == ""


def test_routes_help_shows_examples_and_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(capsys, "routes", "--help")
    assert shown.status == 0 and "penstock routes ./my-model" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
