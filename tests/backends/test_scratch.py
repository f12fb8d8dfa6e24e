"""Arrays that CPU kernels make for themselves and read by pointers: they live as long, and are never left."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.backends.cpu.compile import compiles

FOLDER = Path(penstock.__file__).parent / "backends" / "cpu"
POINTERS, MAKERS = {"floats", "raw", "at"}, {"empty", "zeros", "ones", "full", "empty_like", "zeros_like"}


def named(call: ast.AST) -> str | None:
    """The function that is called."""
    if not isinstance(call, ast.Call):
        return None
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)


def own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions inside."""
    left: list[ast.AST] = [*function.body]
    while left:
        node = left.pop()
        yield node
        left += [] if isinstance(node, ast.FunctionDef | ast.Lambda) else ast.iter_child_nodes(node)


def names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def made(node: ast.AST) -> set[str]:
    """Arrays that an assignment makes."""
    if not isinstance(node, ast.Assign) or len(node.targets) > 1:
        return set()
    target = node.targets[0]
    pairs = [(target, node.value)]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        pairs = [*zip(target.elts, node.value.elts, strict=True)]
    return {
        to.id
        for to, value in pairs
        if isinstance(to, ast.Name) and any(named(part) in MAKERS for part in ast.walk(value))
    }


def freed_early(function: ast.FunctionDef) -> list[str]:
    """Arrays that a function makes and takes pointers to, and that it mentions behind `keep_alive`, or has none of."""
    nodes, found = [*own(function)], []
    for name in sorted(set().union(*map(made, nodes))):
        mentions = {node.lineno for node in nodes if isinstance(node, ast.Name) and node.id == name}
        calls = [node for node in nodes if isinstance(node, ast.Call) and node.args and name in names(node.args[0])]
        if not any(named(call) in POINTERS and isinstance(call.args[0], ast.Name) for call in calls):
            continue
        kept = {call.lineno for call in calls if named(call) == "keep_alive"}
        if max(kept, default=0) < max(mentions):
            found.append(f"{function.name}: {name}")
    return found


def test_kernels_keep_what_they_have_pointers_to():
    """Numba frees an array behind the last line that names it, a pointer or not."""
    functions = [
        (file.name, node)
        for file in sorted(FOLDER.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [f"{file}, {one}" for file, function in functions for one in freed_early(function)] == []
    assert sum(named(node) == "keep_alive" for _, function in functions for node in own(function)) >= 15
    (bad,) = ast.parse("def f(x):\n    a = np.empty(4)\n    p = at(a, 0)\n    return g(p)\n").body
    assert isinstance(bad, ast.FunctionDef) and freed_early(bad) == ["f: a"]


# Whatever has 256 bytes or more is pages of its own, and no memory once it is freed.
PAGES = "glibc.malloc.mmap_threshold=256:glibc.malloc.mmap_max=50000"
CALLS = """
import numpy as np
from penstock import ops
import penstock
from tests.ops.cases import CASES
from tests.ops.common import normal, quantized

count = 0
with penstock.backend("cpu"):
    for case in CASES:
        op = ops.REGISTRY[case.op]
        if op.kernel("cpu") is not None:
            op(**case.arguments(case.dtypes[-1]))
            count += 1
    rng = np.random.default_rng(0)
    for T, H, Hkv, D in ((1, 8, 2, 64), (70, 4, 2, 96), (300, 2, 1, 128)):
        ops.attention_prefill(normal(rng, T, H, D), normal(rng, T, Hkv, D), normal(rng, T, Hkv, D), 0, 0.1)
    for K in (96, 320, 704, 1056, 2880):
        for bits in (2, 3, 4, 5, 6, 8):
            w = [quantized(rng, 35, K, bits=bits, group_size=32) for _ in range(2)]
            for T in (1, 2, 5, 19):
                x = normal(rng, T, K)
                ops.fused_gate_up_swiglu(x, *w, "int8")
                ops.quantized_matmul(x, w[0])
print(count > 200)
"""


@pytest.mark.skipif(sys.platform != "linux" or not compiles(), reason="glibc's malloc, compiled kernels")
def test_kernels_touch_no_memory_that_is_not_theirs():
    environment = os.environ | {"GLIBC_TUNABLES": PAGES}
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", CALLS], env=environment, capture_output=True, text=True
    )
    assert (child.returncode, child.stdout) == (0, "True\n"), child.stderr[:2000]
