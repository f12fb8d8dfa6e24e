"""Weights that outlive their files: a mapped file that is shortened while a step reads it kills the process (SIGBUS).

What fits into half of the free memory is copied into memory of its own, the weights outside of experts first. For files
that stay mapped the system is asked for a lease, which holds off writers until no step runs.
"""

from __future__ import annotations

import time
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from penstock.engine.engine import Engine
from penstock.models import replaced
from penstock.models.layers import ExpertStack
from penstock.quant import QuantizedTensor
from penstock.units import spelled
from penstock.weights.mapped import in_memory, is_mapped

_WORKING = 256 << 20  # bytes that stay free for activations


def protect(engine: Engine, room: int | None = None) -> str:
    """Protect a model's weights from changes of their files, before its first step; says how, for the log.

    room: bytes that copies may take; by default half of the free memory, less if a sequence of max_context needs more.
    """
    model = engine.model
    if room is None:
        free = engine.device.free_memory()
        room = min(free // 2, free - engine.caches.bytes_of(engine.max_context) - _WORKING)
    if model.check is None:
        return "weights: none is in a mapped file"
    held = model.weights, model.head
    dense = _mapped_bytes(held, experts=False)
    whole = dense + (_mapped_bytes(held, experts=True) if model.experts is None else 0)  # slots are no files
    copied = next((count for count in (whole, dense) if count <= room), 0)
    start = time.perf_counter()
    if copied or not whole:
        weights, head = _copied(held, experts=copied > dense)
        model = replace(model, weights=weights, head=head, from_files=model.from_files - copied)
        if copied == whole:
            model = replace(model, from_files=model.from_files if model.experts else 0, check=None)
        engine.replace_model(model)
    done = f"{spelled(copied)} were copied into memory in {time.perf_counter() - start:.1f} s"
    if copied == whole:
        return f"weights: {done}; their files may change"
    if model.lease is not None and model.lease():
        how = "with a lease on their files, which holds off writers until a step is complete"
    else:
        how = "without a lease on their files, which is refused: one that is shortened during a step ends this process"
    left = f"{spelled(whole - copied)} are mapped, {how}"
    return f"weights: {done}; {left}" if copied else f"weights: {left}"


def _mapped_bytes(weights: Any, experts: bool) -> int:
    """Bytes of mapped files in the experts of a family's weights, or in all the rest; what is shared counts once."""
    found: dict[int, int] = {}

    def visit(value: Any, inside: bool) -> None:
        if isinstance(value, QuantizedTensor):
            visit(value.arrays, inside)
        elif isinstance(value, np.ndarray):
            if inside == experts and is_mapped(value):
                found[value.__array_interface__["data"][0]] = value.nbytes
        elif isinstance(value, tuple | list):
            for item in value:
                visit(item, inside)
        elif is_dataclass(value):
            for field in fields(value):
                visit(getattr(value, field.name), inside or isinstance(value, ExpertStack))

    visit(weights, False)
    return sum(found.values())


def _copied(weights: Any, experts: bool) -> Any:
    """A family's weights with copies of what is mapped, experts left as they are unless asked for."""

    def copy(value: Any) -> Any:
        if isinstance(value, ExpertStack) and not experts:
            return value
        if isinstance(value, ExpertStack):
            return replaced(value, (np.ndarray, QuantizedTensor), copy)
        if isinstance(value, QuantizedTensor):
            return value.with_arrays(*map(copy, value.arrays)) if any(map(is_mapped, value.arrays)) else value
        return in_memory(value) if is_mapped(value) else value

    return replaced(weights, (ExpertStack, np.ndarray, QuantizedTensor), copy)
