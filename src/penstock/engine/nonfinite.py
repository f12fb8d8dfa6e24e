"""Where NaN or infinity comes from: a sequence's last token once more, op by op, with a look at every result.

The step runs unfused on a copy of the sequence, one position further: there what the sequence has read so far is as it
was, and a weight that makes NaN makes it again. Of a split model every rank runs it and looks at its own results: the
first of all is the one with the fewest exchanges of ranks before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import ops
from penstock.dtypes import FLOATS
from penstock.engine.cache import Sequence
from penstock.engine.steps import Run, step_arrays
from penstock.graph import Node, Program, Wrap
from penstock.ops.array import is_array, spec_of
from penstock.quant import QuantizedTensor

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

_UNNAMED = ("whole", "parts")  # fields of joined weights
_EXCHANGES = (ops.all_reduce, ops.all_gather)


@dataclass(frozen=True)
class NonFinite:
    """A result that is not finite: its layer, weight and op, the node that makes it, exchanges of ranks up to it."""

    exchanges: int
    node: int
    where: str


def first_of_ranks(found: Seq[NonFinite | None]) -> str | None:
    """The first of what each rank has found, with its rank unless all have the same."""
    given = [(one.exchanges, one.node, rank, one.where) for rank, one in enumerate(found) if one is not None]
    if not given:
        return None
    *_, rank, where = min(given)
    return where if len(set(found)) == 1 else f"{where} on rank {rank}"


def first_nonfinite(engine: Engine, sequence: Sequence, token: int) -> str | None:
    """The first result of a step with this token that is not finite: its layer, weight and op. None: all are.

    The caller holds the engine's lock.
    """
    if engine.programs is None:
        return None
    copy = engine.caches.open()
    try:
        snapshot = engine.caches.snapshot(sequence)
        try:
            engine.caches.rewind(copy, snapshot)
        finally:
            engine.caches.drop(snapshot)
        engine.caches.reserve(copy, 1)
        if engine.leader is not None:
            return first_of_ranks(
                engine.leader.nonfinite_of_all(copy, token, lambda: own_nonfinite(engine, copy, token))
            )
        found = own_nonfinite(engine, copy, token)
    finally:
        engine.caches.close(copy)
    return None if found is None else found.where


def own_nonfinite(engine: Engine, sequence: Sequence, token: int) -> NonFinite | None:
    """What a step that appends this token to a sequence finds, of this rank's results. The sequence is spent."""
    names = dict(_named(engine.model.weights))
    found: list[NonFinite] = []
    where = "the step"
    nodes, exchanges = -1, 0

    def wrap(node: Node, kernel: Any) -> Any:
        nonlocal where, nodes, exchanges
        nodes, exchanges = nodes + 1, exchanges + (node.op in _EXCHANGES)
        own = next((names[id(arg)] for arg in node.args.values() if id(arg) in names), None)
        where = own or where.partition(",")[0]  # an op without weights is of the layer before it
        here = NonFinite(exchanges, nodes, f"{where} ({node.op.name})")

        def looking(*args: Any, **out: Any) -> None:
            kernel(*args, **out)
            if not found and any(not _finite(engine, array) for array in _arrays(out.get("out"))):
                found.append(here)

        return looking

    engine.caches.reserve(sequence, 1)
    _run(engine, Run(sequence, np.array([token], np.int32)), wrap)
    return found[0] if found else None


def _run(engine: Engine, run: Run, wrap: Wrap) -> None:
    """A step of one token, unfused, its kernels wrapped."""
    programs, device = engine.programs, engine.device
    assert programs is not None
    arrays = {name: device.to_device(array) for name, array in step_arrays([run], programs.windows).items()}
    pages = max((arrays[name].shape[1] for name in programs.windows.values()), default=1)
    program = Program(programs.graph(1, 1, pages, R=1, decode=True), device.name, fused=False)
    if programs.experts is not None:
        wrap = programs.experts.wrap(program.graph, False, wrap)
    program.bind(arrays | programs.cache_arrays(), programs.new_arena(program.arena_bytes), wrap).run()


def _finite(engine: Engine, array: Any) -> bool:
    return spec_of(array).dtype not in FLOATS or bool(np.isfinite(engine.device.to_host(array)).all())


def _arrays(out: Any) -> list[Any]:
    return [array for array in (out if isinstance(out, tuple) else (out,)) if array is not None]


def _named(weights: Any) -> Iterator[tuple[int, str]]:
    """The id of every weight and what it is called: "layer 3, mlp.router", "head"."""

    def visit(value: Any, path: tuple[str, ...]) -> Iterator[tuple[int, str]]:
        if isinstance(value, QuantizedTensor) or is_array(value):
            yield id(value), f"layer {path[1]}, {'.'.join(path[2:])}" if path[0] == "layers" else ".".join(path)
        elif isinstance(value, tuple | list):
            for n, item in enumerate(value):
                yield from visit(item, (*path, str(n)))
        elif is_dataclass(value):
            for field in fields(value):
                yield from visit(getattr(value, field.name), path if field.name in _UNNAMED else (*path, field.name))

    yield from visit(weights, ())
