import inspect
import json
from types import SimpleNamespace

import pytest

from penstock import ops
from penstock.ops import REGISTRY
from tests.cli.common import call, program


def fake_op(name, family, cpu=None, cuda=None, sources=()):
    def body(x: "Array", *, eps: "float" = 1e-6) -> "Array":  # noqa: F821
        """Do something."""

    return SimpleNamespace(
        name=name,
        family=family,
        doc="Do something.\n\nDetails.",
        signature=inspect.signature(body),
        writes=("state",) if family == "delta" else (),
        sources=sources,
        backends=lambda: {"cpu": cpu, "cuda": cuda},
    )


@pytest.fixture
def three_ops(monkeypatch):
    plain = SimpleNamespace(composed=False, variants=())
    varied = SimpleNamespace(composed=False, variants=("rows", "tiles"))
    composed = SimpleNamespace(composed=True, variants=())
    found = [
        fake_op("twist", "norm", cpu=varied, cuda=plain, sources=("twist_f32", "twist_f16")),
        fake_op("bend", "norm", cpu=composed, sources=("twist_f32",)),
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
        "sources": ["twist_f32", "twist_f16"],
        "signature": "twist(x: Array, *, eps: float = 1e-06) -> Array",
        "doc": "Do something.",
    }
    assert bend["backends"]["cpu"] == {"kind": "composed", "variants": []}
    assert fold["backends"]["cpu"] == fold["backends"]["cuda"] == {"kind": "none", "variants": []}
    assert fold["writes"] == ["state"]


def test_kernels_prints_a_line_per_op(capsys, three_ops):
    lines = call(capsys, "kernels").out.splitlines()
    assert [line.split(maxsplit=3) for line in lines[:4]] == [
        ["op", "family", "ref", "cpu                cuda  sources"],
        ["fold", "delta", "yes", "–                  –     0"],
        ["bend", "norm", "yes", "composed           –     1"],
        ["twist", "norm", "yes", "yes (rows, tiles)  yes   2"],
    ]
    assert lines[4:] == [
        "3 ops, all with a NumPy definition (ref); 2 have a cpu kernel, 1 a cuda kernel.",
        "They do the work of 2 source kernels.",
    ]


def test_kernels_of_a_family(capsys):
    listed = json.loads(call(capsys, "kernels", "--json", "--family", "norm").out)
    assert {op["name"] for op in listed["ops"]} == {name for name, op in REGISTRY.items() if op.family == "norm"}


def test_kernels_of_one_op_shows_its_definition(capsys):
    shown = call(capsys, "kernels", "rms_norm").out
    assert shown.startswith("rms_norm(\n    x: Array,\n")
    assert REGISTRY["rms_norm"].doc in shown
    assert "rms_norm_f16" in shown
    only = json.loads(call(capsys, "kernels", "rms_norm", "--json").out)
    assert [op["name"] for op in only["ops"]] == ["rms_norm"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rms_nrom",), "kernels: there is no op 'rms_nrom'; did you mean rms_norm"),
        (("qqqq",), "kernels: there is no op 'qqqq'; penstock kernels lists them"),
        (("--family", "nrm"), "kernels: family is 'nrm', expected one of attention, cache, delta"),
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
    assert len(shown.out.splitlines()) == len(REGISTRY) + 3


def test_kernels_on_a_terminal_obeys_no_color_and_its_width(capsys, monkeypatch, three_ops):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    table = call(capsys, "kernels").out
    assert "───" in table
    assert "\x1b" not in table
    assert max(map(len, table.splitlines()[:-2])) <= 80
