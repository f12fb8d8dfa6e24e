"""The error of every node of a step on a GPU, given what the GPU's own nodes before it made.

    python benchmarks/node_errors.py FOLDER --text FILE [--tokens 256] [--row 0] [--json FILE]

A step of one prompt runs node by node in bfloat16. Each node runs once more on the CPU in float32, on the same inputs;
the error is the root mean square of the difference over that of the result, beside what one rounding to the node's
dtype would cost. A ratio of 1 is a kernel that rounds once; 2 to 3 one that also rounds weights and what is between its
products; more says that something is less exact than its dtype. Nodes of one op are one row of the table: their mean
and the worst of them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import machine

import penstock
from penstock import ops
from penstock.api import LLM
from penstock.dtypes import numpy_dtype, round_to
from penstock.engine.steps import Run, step_arrays
from penstock.graph import Node, Program
from penstock.ops.array import numpy_view
from penstock.quant import QuantizedTensor

_CHOICES = (ops.moe_route, ops.moe_softmax_topk, ops.moe_group_route)  # ids are not numbers


def on_host(value: Any) -> Any:
    """A copy of a node's argument for a kernel of the CPU: floats as float32, names of half dtypes as "float32"."""
    if isinstance(value, QuantizedTensor):
        arrays = [numpy_view(array.cpu()).copy() for array in value.arrays]
        return value.with_arrays(arrays[0].view(np.uint32), *arrays[1:])
    if isinstance(value, str):
        return "float32" if value == "bfloat16" else value
    if not hasattr(value, "cpu"):
        return value
    array = numpy_view(value.cpu())
    return array.astype(np.int32) if array.dtype.kind == "i" else array.astype(np.float32)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x.astype(np.float64))))) if x.size else 0.0


class Errors:
    """Wraps the kernels of a program; `rows` has node, error and what one rounding costs, of every output."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def wrap(self, node: Node, kernel: Any) -> Any:
        def run(*values: Any, out: Any = None) -> None:
            given = {name: on_host(value) for name, value in zip(node.args, values, strict=True)}
            kernel(*values) if out is None else kernel(*values, out=out)
            if out is None or node.op in _CHOICES:
                return
            with penstock.backend("cpu"):
                exact = node.op(**given)
            made = out if isinstance(out, tuple) else (out,)
            wanted = iter(exact if isinstance(exact, tuple) else (exact,))
            for number, each in enumerate(made):
                if each is not None:
                    self._note(node, number, on_host(each), next(wanted), str(each.dtype).removeprefix("torch."))

        return run

    def _note(self, node: Node, number: int, got: np.ndarray, want: np.ndarray, dtype: str) -> None:
        size = rms(want)
        once = rms(round_to(want, numpy_dtype(dtype)).astype(np.float64) - want) / size if size else 0.0
        row = {"node": node.number, "op": node.op.name, "output": number, "dtype": dtype, "shape": list(want.shape)}
        self.rows.append(row | {"error": rms(got - want) / size if size else rms(got), "rounding": once})


def measure(llm: LLM, tokens: list[int]) -> list[dict[str, Any]]:
    """Errors of the nodes of one step over these tokens."""
    engine = llm.engine
    programs, device = engine.programs, engine.device
    assert programs is not None
    sequence = engine.open()
    engine.caches.reserve(sequence, len(tokens))
    given = step_arrays([Run(sequence, np.array(tokens, np.int32), "all")], programs.windows)
    pages = max((given[name].shape[1] for name in programs.windows.values()), default=1)
    errors = Errors()
    with engine.lock, device.running(False):
        program = Program(programs.graph(len(tokens), 1, pages, len(tokens)), device.name, **programs.options)
        inputs = {name: device.to_device(np.ascontiguousarray(array)) for name, array in given.items()}
        arrays = {name: (inputs | programs.cache_arrays())[name] for name in program.graph.inputs}
        program.bind(arrays, device.arena(program.arena_bytes), errors.wrap).run()
    engine.close(sequence)
    return errors.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--row", type=int, default=0, help="of the text, in rows of so many tokens")
    parser.add_argument("--json", type=Path, help="also write all nodes and the machine to this file")
    args = parser.parse_args()

    llm = penstock.load(args.folder, device="cuda", max_context=max(512, args.tokens))
    if getattr(llm.engine.device, "interpreted", False):
        llm.engine.allocate(sequences=2)
    tokens = list(llm.tokenizer.encode(args.text.read_text(encoding="utf-8")))
    found = measure(llm, tokens[args.row * args.tokens : (args.row + 1) * args.tokens])
    table = Table("op", "output", "dtype", "nodes", "mean error", "worst", "one rounding", "worst ratio")
    by_op: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in found:
        by_op.setdefault((row["op"], row["output"], row["dtype"]), []).append(row)
    for (op, output, dtype), rows in by_op.items():
        mean, worst = np.mean([row["error"] for row in rows]), max(rows, key=lambda row: row["error"])
        ratio = f"{worst['error'] / worst['rounding']:.2f}" if worst["rounding"] else "–"
        numbers = f"{mean:.2e}", f"{worst['error']:.2e}", f"{worst['rounding']:.2e}"
        table.add_row(op, str(output), dtype, str(len(rows)), *numbers, ratio)
    Console(width=120).print(table)
    if args.json:
        about = {"model": args.folder.name, "machine": machine(), "nodes": found}
        args.json.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
