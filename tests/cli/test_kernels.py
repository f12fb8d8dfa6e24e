import inspect
import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from penstock import ops
from penstock.analysis import trace as trace_module
from penstock.ops import REGISTRY
from tests.cli.common import call, program
from tests.cli.test_bench import TINY


def fake_op(name, family, cpu=None, cuda=None):
    def body(x: "Array", *, eps: "float" = 1e-6) -> "Array":  # noqa: F821
        """Do something."""

    return SimpleNamespace(
        name=name,
        family=family,
        doc="Do something.\n\nDetails.",
        signature=inspect.signature(body),
        writes=("state",) if family == "delta" else (),
        backends=lambda: {"cpu": cpu, "cuda": cuda},
    )


@pytest.fixture
def three_ops(monkeypatch):
    plain = SimpleNamespace(composed=False, variants=())
    varied = SimpleNamespace(composed=False, variants=("rows", "tiles"))
    composed = SimpleNamespace(composed=True, variants=())
    found = [
        fake_op("twist", "norm", cpu=varied, cuda=plain),
        fake_op("bend", "norm", cpu=composed),
        fake_op("fold", "delta"),
    ]
    monkeypatch.setattr(ops, "REGISTRY", {op.name: op for op in found})


def test_kernels_json_lists_every_op_with_a_reference(capsys):
    listed = json.loads(call(capsys, "kernels", "--json").out)
    assert listed["count"] == len(listed["ops"]) == len(REGISTRY)
    assert {op["name"] for op in listed["ops"]} == set(REGISTRY)
    for op in listed["ops"]:
        assert op["reference"] is True
        assert set(op["backends"]) == {"cpu", "cuda"}
        assert op["signature"].startswith(f"{op['name']}(")
        assert op["doc"]
        assert op["family"]


def test_kernels_json_describes_kernels(capsys, three_ops):
    fold, bend, twist = json.loads(call(capsys, "kernels", "--json").out)["ops"]
    assert twist == {
        "name": "twist",
        "family": "norm",
        "reference": True,
        "backends": {
            "cpu": {"kind": "kernel", "variants": ["rows", "tiles"]},
            "cuda": {"kind": "kernel", "variants": []},
        },
        "writes": [],
        "signature": "twist(x: Array, *, eps: float = 1e-06) -> Array",
        "doc": "Do something.",
    }
    assert bend["backends"]["cpu"] == {"kind": "composed", "variants": []}
    assert fold["backends"]["cpu"] == fold["backends"]["cuda"] == {"kind": "none", "variants": []}
    assert fold["writes"] == ["state"]


def test_kernels_prints_a_line_per_op(capsys, three_ops):
    lines = call(capsys, "kernels").out.splitlines()
    assert [line.split(maxsplit=3) for line in lines[:4]] == [
        ["op", "family", "ref", "cpu                cuda"],
        ["fold", "delta", "yes", "–                  –"],
        ["bend", "norm", "yes", "composed           –"],
        ["twist", "norm", "yes", "yes (rows, tiles)  yes"],
    ]
    assert lines[4:] == ["3 ops, all with a NumPy definition (ref); 2 have a cpu kernel, 1 a cuda kernel."]


def test_kernels_of_a_family(capsys):
    listed = json.loads(call(capsys, "kernels", "--json", "--family", "norm").out)
    assert {op["name"] for op in listed["ops"]} == {name for name, op in REGISTRY.items() if op.family == "norm"}


def test_kernels_of_one_op_shows_its_definition(capsys):
    shown = call(capsys, "kernels", "rms_norm").out
    assert shown.startswith("rms_norm(\n    x: Array,\n")
    assert REGISTRY["rms_norm"].doc in shown
    only = json.loads(call(capsys, "kernels", "rms_norm", "--json").out)
    assert [op["name"] for op in only["ops"]] == ["rms_norm"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rms_nrom",), "kernels: there is no op 'rms_nrom'; did you mean rms_norm"),
        (("qqqq",), "kernels: there is no op 'qqqq'; penstock kernels lists them"),
        (("--family", "nrm"), "kernels: family is 'nrm', expected one of altup, attention, cache, collective"),
        (("rope", "--family", "norm"), "kernels: op 'rope' is of family 'rope', not 'norm'"),
    ],
)
def test_kernels_refuses_unknown_names(capsys, arguments, message):
    shown = call(capsys, "kernels", *arguments)
    assert (shown.status, shown.out) == (1, "")
    assert shown.err.startswith(f"penstock: error: {message}")


def test_kernels_in_a_pipe_has_no_colour_and_does_not_wrap():
    shown = program("kernels", COLUMNS="40")
    assert shown.status == 0
    assert "\x1b" not in shown.out
    assert len(shown.out.splitlines()) == len(REGISTRY) + 2


def test_kernels_on_a_terminal_obeys_no_color_and_its_width(capsys, monkeypatch, three_ops):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    table = call(capsys, "kernels").out
    assert "───" in table
    assert "\x1b" not in table
    assert max(map(len, table.splitlines()[:-2])) <= 80


# -- traces ----------------------------------------------------------------------------------------------------------

DIM, VOCAB, E, K, WIDTH, HEADS, D = 64, 96, 8, 2, 32, 2, 32
CONFIG = TINY | {"vocab_size": VOCAB, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def trace(capsys, *options):
    shown = call(capsys, "kernels", "--trace", *options, "--bandwidth", "100", "--json")
    assert (shown.status, shown.err) == (0, "")
    return json.loads(shown.out)


def q4(*shape):
    """Bytes of a quantized weight: 4 bits, a scale and a bias of 2 bytes per group of 32."""
    return math.prod(shape) // 2 + math.prod(shape) // 32 * 4


def test_trace_for_cuda_needs_no_gpu_and_fuses(capsys, tiny):
    found = trace(capsys, tiny, "--device", "cuda")
    before, after = found["before"], found["after"]
    assert (found["device"], found["dtype"], found["step"], found["depth"]) == ("cuda", "bfloat16", "decode", 0)
    assert 0 < after["count"] == len(after["nodes"]) < before["count"] == len(before["nodes"])
    assert {"gated_delta_step", "attention_prepare"} <= {node["op"] for node in after["nodes"]}
    for side in (before, after):
        assert side["bytes"] == sum(node["read_bytes"] + node["written_bytes"] for node in side["nodes"])
        assert side["predicted_us"] == pytest.approx(side["bytes"] / 100e9 * 1e6)
        assert side["measured_us"] is None and side["nodes"][0]["measured_us"] is None
        assert 0 < side["arena_bytes"] < side["arena_bytes_without_plan"]


def test_trace_of_a_batch_joins_projections_where_the_device_does(capsys):
    for device, batch, joined in (("cuda", "9", True), ("cpu", "8", True), ("cpu", "9", False)):
        report = trace(capsys, "--device", device, "--batch", batch)
        before, after = (report[side]["nodes"] for side in ("before", "after"))
        ops_before, ops_after = ({node["op"] for node in nodes} for nodes in (before, after))
        assert "split_columns" not in ops_before
        assert ("split_columns" in ops_after) == (joined and device == "cpu")  # a GPU reads columns where they lie
        products = ("quantized_matmul", "norm_matmul", "matmul_add")
        single, found = (
            {one for node in nodes if node["op"] in products for one in node["makes"]} for nodes in (before, after)
        )
        assert (not found <= single) == joined  # a product as wide as several


def test_trace_knows_the_layer_of_every_node(capsys, tiny):
    nodes = trace(capsys, tiny, "--device", "cpu")["before"]["nodes"]
    layers = [node["layer"] for node in nodes]
    assert layers[0] is None and layers[-2:] == [None, None]  # embedding, norm and head
    inner = [layer for layer in layers if layer is not None]
    assert inner == sorted(inner) and set(inner) == {0, 1, 2}
    assert [node["layer"] for node in nodes if node["op"] == "attention_paged"] == [1]


def bytes_of(side, op):
    return [(node["read_bytes"], node["written_bytes"]) for node in side["nodes"] if node["op"] == op]


@pytest.mark.parametrize("batch, depth", [(1, 0), (3, 700)])
def test_trace_counts_the_bytes_that_a_decode_needs(capsys, tiny, batch, depth):
    side = trace(capsys, tiny, "--device", "cpu", "--batch", f"{batch}", "--depth", f"{depth}")["before"]
    table, positions = q4(VOCAB, DIM) * batch // VOCAB, 4 * batch
    assert bytes_of(side, "quantized_embedding") == [(positions + table, 4 * batch * DIM)]
    q = 4 * batch * HEADS * D
    pages, tables = 2 * 4 * batch * (depth + 1) * D, 4 * batch * 4
    assert bytes_of(side, "attention_paged") == [(q + pages + tables + positions, q)]
    k = 2 * 4 * batch * D
    assert bytes_of(side, "kv_pages_append") == [(k + tables + positions, k)]
    state = 4 * batch * 2 * 32 * 32
    conv = 4 * batch * (32 + 32 + 64)
    values = 4 * batch * 2 * 32
    assert bytes_of(side, "gated_delta_net") == [(state + conv + 2 * 4 * batch * 2 + positions, state + values)] * 2
    share = 1 - (1 - K / E) ** batch
    experts = round(share * (2 * q4(E, WIDTH, DIM) + q4(E, DIM, WIDTH)))
    rows = 4 * batch * DIM
    assert bytes_of(side, "moe_forward") == [(experts + rows + 2 * 4 * batch * K, rows)] * 3


def test_trace_counts_the_bytes_that_a_prefill_needs(capsys, tiny):
    options = ("--device", "cuda", "--step", "prefill", "--tokens", "100", "--depth", "300")
    found = trace(capsys, tiny, *options)
    assert (found["step"], found["tokens"], found["batch"]) == ("prefill", 100, 1)
    q, pages = 2 * 100 * HEADS * D, 2 * 2 * 400 * D
    runs = 4 + 8  # the length of the sequence, and where its run begins and ends
    assert bytes_of(found["before"], "attention_paged") == [(q + pages + 4 * 4 + runs, q)]
    conv = 2 * 3 * 128  # the rows that stay, not all of x
    assert bytes_of(found["before"], "conv1d_state_update") == [(2 * conv + runs, conv)] * 2


def test_trace_prints_layers_that_are_alike_once(capsys, tiny):
    shown = call(capsys, "kernels", "--trace", tiny, "--device", "cuda", "--bandwidth", "100").out
    first, _, *rest = shown.splitlines()
    assert first == "tiny: decode of 1 sequence at depth 0 on cuda in bfloat16; predicted at 100 GB/s (as given)"
    assert rest[0].split()[:3] == ["op", "before", "after"]
    assert sum(line.startswith("2 × layers 0, 2 ") for line in rest) == 1
    assert any(line.startswith("layer 1 ") for line in rest)
    totals = dict(line.split(maxsplit=1) for line in rest[-5:])
    assert set(totals) == {"nodes", "moved", "predicted", "launches", "arena"}
    assert re.fullmatch(r"\d+ → \d+", totals["nodes"])
    whole = call(capsys, "kernels", "--trace", tiny, "--device", "cuda", "--bandwidth", "100", "--all").out
    before, after = map(int, totals["nodes"].split(" → "))
    listed = whole[whole.index("before fusion") :].splitlines()
    assert sum(bool(re.search(r"\[[\d, ]+\]|–  ", line)) for line in listed) >= before + after


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "deepseek-v3"])
def test_trace_of_a_large_config_takes_no_weights(capsys, name):
    found = trace(capsys, name, "--device", "cuda", "--layers", "5")
    assert found["model"].startswith(f"{name}, 5 of ")
    assert found["after"]["bytes"] > 1e8


def test_trace_of_the_demo_model_and_of_its_folder(capsys):
    from tests.cli.model import DEMO

    demo, folder = trace(capsys, "--device", "cuda"), trace(capsys, str(DEMO), "--device", "cuda")
    assert demo["model"] == "demo" and demo["after"] == folder["after"]


def test_trace_measures_every_node(capsys, tiny, monkeypatch):
    monkeypatch.setattr(trace_module, "_ROUNDS", 1)
    found = trace(capsys, tiny, "--device", "cpu", "--measure", "--depth", "5", "--batch", "2")
    for side in (found["before"], found["after"]):
        assert side["measured_us"] > 0 and all(node["measured_us"] > 0 for node in side["nodes"])


class Page(HTMLParser):
    """Checks that elements are closed in order; collects text, addresses and the number of elements."""

    def __init__(self, text):
        super().__init__()
        self.open, self.count, self.words, self.links = [], Counter(), [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.count[tag] += 1
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("measure", [False, True])
def test_trace_writes_a_page_that_needs_nothing_else(capsys, tiny, tmp_path, monkeypatch, measure):
    monkeypatch.setattr(trace_module, "_ROUNDS", 1)
    file = tmp_path / "trace.html"
    options = ("--device", "cpu", *(("--measure",) if measure else ()))
    found = trace(capsys, tiny, *options, "--html", str(file))
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and page.links == [] and "http" not in text and "@import" not in text
    assert page.count["details"] == 2 * 4  # before, two kinds of layers, after; of two programs
    assert {node["op"] for side in ("before", "after") for node in found[side]["nodes"]} <= set(page.words)
    assert ("measured, the whole step" in page.words) == measure
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_trace_page_escapes_names(tmp_path, capsys):
    path = tmp_path / "<b>&.json"
    path.write_text(json.dumps(CONFIG))
    file = tmp_path / "trace.html"
    trace(capsys, str(path), "--device", "cpu", "--html", str(file))
    assert "<title>&lt;b&gt;&amp;: decode" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "decode"), "--step: expected together with --trace"),
        (("--measure",), "--measure: expected together with --trace"),
        (("--depth", "5"), "--depth: expected together with --trace"),
        (("--trace", "--family", "norm"), "--family: expected without --trace"),
        (("--trace", "--tokens", "5"), "--tokens: expected with --step prefill"),
        (("--trace", "--step", "prefill", "--batch", "2"), "--batch: expected with --step decode"),
        (("--trace", "--device", "cpu", "--step", "prefill", "--tokens", "300"), "--tokens: is 300, expected at most"),
        (("--trace", "--bandwidth", "0"), "--bandwidth: is 0.0, expected GB/s above 0"),
        (("--trace", "--bandwidth", "nan"), "--bandwidth: is nan, expected GB/s above 0"),
        (("--trace", "--layers", "2"), "--layers: expected with a config.json"),
        (("--trace", "--batch", "0"), "Invalid value for '--batch'"),
        (("--trace", "--step", "both"), "Invalid value for '--step'"),
    ],
)
def test_trace_wrong_usage_is_status_2(capsys, arguments, message):
    shown = call(capsys, "kernels", *arguments)
    assert (shown.status, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert shown.err.startswith(f"penstock: error: {message}")


def test_trace_failures_are_one_line_and_status_1(capsys, tiny, tmp_path):
    for arguments, message in (
        (("/nowhere/config.json",), "/nowhere/config.json: no such file"),
        (("/nowhere/model",), "'/nowhere/model': no such folder"),
        ((tiny, "--depth", "4096"), "kernels: 4097 positions are asked for, expected at most 4096"),
        ((tiny, "--batch", "1000000000"), "kernels: decode of 1000000000 sequences at depth 0: a cache of shape"),
        ((tiny, "--batch", "1000000000", "--measure"), "tiny: needs"),
        ((tiny, "--layers", "9"), f"{tiny}: layers is 9, expected 1 to 3"),
        ((tiny, "--html", f"{tmp_path}/no/file.html"), f"--html: {tmp_path}/no/file.html: No such file"),
    ):
        shown = call(capsys, "kernels", "--trace", *arguments, "--bandwidth", "100")
        assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)
        assert shown.err.startswith(f"penstock: error: {message}")


def test_kernels_help_fits_80_columns_and_shows_examples(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(capsys, "kernels", "--help").out
    assert "penstock kernels --trace qwen3.6-35b-a3b --device cuda --html trace.html" in shown
    assert max(map(len, shown.splitlines())) <= 80
