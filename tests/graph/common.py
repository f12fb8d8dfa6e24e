"""Graphs of a few nodes on NumPy arrays: made-up weights and inputs, and a run by the ops' definitions."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock import quant
from penstock.dtypes import numpy_dtype
from penstock.graph.trace import Graph, Value
from penstock.ops.array import Spec, columns_of
from penstock.ops.op import backend
from penstock.quant import QuantizedTensor


def vector(*shape: int, seed: int = 0) -> np.ndarray:
    return (1 + 0.5 * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def matrix(*shape: int, seed: int = 0, bits: int = 4) -> QuantizedTensor:
    weight = np.random.default_rng([seed, *shape]).standard_normal(shape) * shape[-1] ** -0.5
    return quant.quantize(weight.astype(np.float32), bits, 32)


def arrays(specs: Mapping[str, Spec], **given: np.ndarray) -> dict[str, np.ndarray]:
    """Random numbers for the inputs of a graph that are not given; integers are 0."""
    rng = np.random.default_rng(1)
    made = {}
    for name, spec in specs.items():
        if spec.dtype == "int32":
            made[name] = np.zeros(spec.shape, np.int32)
        else:
            made[name] = rng.standard_normal(spec.shape).astype(numpy_dtype(spec.dtype))
    return made | given


def run(graph: Graph, inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """The outputs of a graph by the definitions; written inputs change."""
    found = {value: inputs[name] for name, value in graph.inputs.items()}

    def array(value: Value) -> np.ndarray:
        flat = found[value.base].reshape(-1)
        if value.row_stride is not None:
            return np.ascontiguousarray(columns_of(flat[value.offset :], value.shape, value.row_stride))
        return flat[value.offset : value.offset + value.spec.size].reshape(value.shape)

    with backend("reference"):
        for node in graph.nodes:
            args: dict[str, Any] = {n: array(a) if isinstance(a, Value) else a for n, a in node.args.items()}
            results = node.op(**args)
            wanted = [out for out in node.outs if out is not None]
            for out, result in zip(wanted, results if isinstance(results, tuple) else (results,), strict=False):
                assert result.shape == out.shape
                found[out] = result
    return tuple(map(array, graph.outputs))


def names(graph: Graph) -> list[str]:
    return [node.op.name for node in graph.nodes]
