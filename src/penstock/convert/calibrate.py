"""What the inputs of a model's matrices look like on a text, and codes that are chosen by it.

The dense model reads the text in float32. Of every matrix the mean squares of its input channels are kept: an error of
a weight costs as much as its channel is large. As far as memory allows, products of channels are kept too: then what
one weight loses can be made up for by those behind it. Experts see only the tokens that were sent to them.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock import ops
from penstock.analysis.perplexity import windows
from penstock.convert.layout import ConversionPlan
from penstock.convert.rows import Rows, Stored, row_bytes, row_count, runs
from penstock.engine.engine import Engine, Model
from penstock.errors import InvalidArgument, OutOfMemory
from penstock.graph import Node
from penstock.machine import available_memory
from penstock.models.family import AnyFamily, ModelConfig
from penstock.models.source import Source, Weight
from penstock.ops.array import address
from penstock.quant import Format, QuantizedTensor, quantize
from penstock.units import amount
from penstock.weights.files import open_regular
from penstock.weights.mapped import MappedFile

FEW = 32  # tokens of an expert that count as much as what all experts of its layer saw
FLOOR = 0.02  # of the mean over all channels: none is worth nothing, a text shows only so much
DAMPING = 0.1  # of the mean square, added to all channels: what a short text says of two of them is not all true
WIDEST = 8192  # channels whose products are kept; more take minutes to invert

LENGTH = 512  # tokens of a window
TOKENS = 16384  # that are looked at
MEASURED = 5  # every so many windows one is kept to measure by

_TEXT_LIMIT = 16 << 20  # bytes of a text that are read

Formats = Callable[[str, tuple[int, ...]], Format | None]


def read_text(path: Path) -> str:
    """The beginning of a text file. Raises CheckpointError if it cannot be read, InvalidArgument if it is no text."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(_TEXT_LIMIT)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < _TEXT_LIMIT)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: byte {error.start} is no UTF-8, expected a text to calibrate with") from None
    if not text.strip():
        raise InvalidArgument(f"{path}: is empty, expected a text to calibrate with")
    return text


def split_windows(tokens: Sequence[int], limit: int, context: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Windows to look at, of about `limit` tokens in all, and windows between them to measure by, [n, length] each."""
    length = min(LENGTH, context)
    if len(tokens) < 2 * length:
        raise InvalidArgument(f"{where}: has {len(tokens)} tokens, expected at least {2 * length} to calibrate with")
    rows = windows(tokens, length)
    measured = np.arange(len(rows)) % min(MEASURED, len(rows)) == 1
    count = max(1, limit // length)
    return rows[~measured][:count], rows[measured][: max(1, count // (MEASURED - 1))]


def check_memory(planned: ConversionPlan) -> None:
    """Raises OutOfMemory if what has to be in memory of the dense model is more than there is."""
    need = sum(row_count(r) * row_bytes(r) for r in planned.tensors.values() if not isinstance(r, Stored))
    if need > (free := available_memory()):
        raise OutOfMemory(f"calibrate: {amount(need)} of the dense model have to be in memory, {amount(free)} are free")


class Planned:
    """A `models.source.Source` of a plan's tensors in memory; those that lie in a file as they are stay there.

    formats: bits and group size that a matrix is rounded to, None for a dense one; without it all are dense. `names`
    has the path of each dense matrix by the address of its array.
    """

    layout = "mlx"

    def __init__(self, planned: ConversionPlan, formats: Formats | None = None) -> None:
        self._planned, self._formats = planned, formats
        self._prefix, self._head = planned.rules.prefixes
        self._files: dict[Path, MappedFile] = {}
        self.names: dict[int, str] = {}

    def _path(self, path: str) -> str:
        return (self._head if path == "lm_head" else self._prefix) + path

    def __contains__(self, path: str) -> bool:
        name = self._path(path)
        return name in self._planned.tensors or f"{name}.weight" in self._planned.tensors

    def weight(self, path: str, *shape: int) -> Weight:
        name = self._path(path)
        array = self._array(self._planned.tensors[f"{name}.weight"])
        format = None if self._formats is None else self._formats(name, shape)
        return self._named(name, array if format is None else quantize(array, *format))

    def vector(self, path: str, *shape: int) -> np.ndarray:
        name, tensors = self._path(path), self._planned.tensors
        return self._array(tensors[f"{name}.weight" if f"{name}.weight" in tensors else name]).astype(np.float32)

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        whole = self.weight(path, *shape)
        if isinstance(whole, QuantizedTensor):
            return whole.rows(order)
        return self._named(self._path(path), np.ascontiguousarray(whole[order]))

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        assert len(paths) == 1, "a plan has its experts in stacks"
        return self.weight(paths[0], *shape)

    def _named(self, name: str, weight: Weight) -> Weight:
        if isinstance(weight, np.ndarray):
            self.names[address(weight)] = name
        return weight

    def _array(self, rows: Rows) -> np.ndarray:
        if isinstance(rows, Stored) and rows.start % rows.dtype.itemsize == 0:
            if rows.path not in self._files:
                self._files[rows.path] = MappedFile(rows.path)
            return self._files[rows.path].view(rows.start, rows.shape, rows.dtype)
        return rows.read(0, row_count(rows)).reshape(rows.shape)


def engine(family: AnyFamily, config: ModelConfig, source: Source, fused: bool = True) -> Engine:
    """A model of a source's weights, ready to run with exact products."""
    model = Model(family, config, family.read_weights(source, config), "calibration")
    return Engine(model, activations="float32", max_context=config.max_positions, fused=fused)


@dataclass
class Inputs:
    """What the matrices of one path are multiplied by: sums over tokens of squares [parts, K], their number [parts].

    products: sums of products of two channels [parts or 1, K, K], None where there is no memory for them.
    """

    squares: np.ndarray
    counts: np.ndarray
    products: np.ndarray | None = None
    _last: tuple[int, np.ndarray] | None = field(default=None, repr=False)

    def add(self, x: np.ndarray, part: int = 0) -> None:
        """Rows x [T, K] that one matrix of a stack sees."""
        self.squares[part] += np.einsum("tk,tk->k", x, x)
        self.counts[part] += len(x)

    def add_products(self, x: np.ndarray, part: int = 0) -> None:
        if self.products is not None:
            turned = np.ascontiguousarray(x.T)
            self.products[part] += ops.matmul(turned, turned)  # not NumPy's: its threads and the kernels' would compete

    def importance(self, part: int = 0) -> np.ndarray:
        """Of each channel, float32 [K] with a mean of 1. A part that saw few tokens takes after the mean of all."""
        part = min(part, len(self.squares) - 1)
        mean = self.squares.sum(axis=0) / max(self.counts.sum(), 1)
        found = (self.squares[part] + FEW * mean) / (self.counts[part] + FEW)
        found = found / max(float(found.mean()), 1e-30)
        return ((found + FLOOR) / (1 + FLOOR)).astype(np.float32)

    def feedback(self, part: int = 0) -> np.ndarray | None:
        """What an error of weight j does to the best values of those behind it, float32 [K, K]; the last is kept.

        With H the products of channels and H⁻¹ = Uᵀ U, U upper triangular: U[j, k] / U[j, j].
        """
        if self.products is None or not self.counts.sum():
            return None
        part = min(part, len(self.products) - 1)
        if self._last is None or self._last[0] != part:
            H = self.products[part].astype(np.float64)
            K, whole = len(H), np.einsum("pkk->", self.products, dtype=np.float64)
            usual = whole / max(self.counts.sum(), 1) / K  # mean square of a channel
            own = self.counts[part] if len(self.products) > 1 else self.counts.sum()
            H[np.diag_indices(K)] += (DAMPING * own + FEW) * usual + 1e-30
            U = np.linalg.cholesky(np.linalg.inv(H)).T
            self._last = part, np.ascontiguousarray(U / np.diag(U)[:, None], np.float32)
        return self._last[1]


def collect(
    model: Engine, names: Mapping[int, str], rows: np.ndarray, progress: Callable[[int], None] | None = None
) -> dict[str, Inputs]:
    """Read windows [n, length] of tokens and look at what every matrix is multiplied by; results by path.

    names: paths of matrices by the address of their array, as `Planned.names`; the model's ops must not be fused.
    """
    watch = _Watch(names, room=available_memory() // 4)
    assert model.programs is not None
    model.programs.wrap = watch.wrap
    for row in rows:
        sequence = model.open()
        try:
            model.prefill(sequence, row.tolist(), every=True)
        finally:
            model.close(sequence)
        if progress is not None:
            progress(len(row))
    return watch.found


class _Watch:
    """Looks at the arguments of every op that multiplies by a matrix. room: bytes for products of channels."""

    def __init__(self, names: Mapping[int, str], room: int) -> None:
        self._names, self._room = names, room
        self._latent: np.ndarray | None = None  # what the last layer of MLA has put into its cache
        self.found: dict[str, Inputs] = {}

    def wrap(self, node: Node, kernel: Any) -> Any:
        look = getattr(self, f"_{node.op.name}", None)
        if look is None:
            return kernel

        def looking(*args: Any, **kwargs: Any) -> Any:
            look(*args)
            return kernel(*args, **kwargs)

        return looking

    def _inputs(self, weight: Any, K: int, parts: int = 1, shared: bool = False) -> Inputs | None:
        """Those of a matrix that has a name; shared: one table of products for all parts."""
        name = self._names.get(address(weight))
        if name is None:
            return None
        if name not in self.found:
            made = Inputs(np.zeros((parts, K)), np.zeros(parts))
            shape = (1 if shared else parts, K, K)
            if K <= WIDEST and (need := 4 * int(np.prod(shape))) <= self._room:
                made.products = np.zeros(shape, np.float32)
                self._room -= need
            self.found[name] = made
        return self.found[name]

    def _matmul(self, x: np.ndarray, w: Any, *_: Any) -> None:
        x = x.reshape(-1, x.shape[-1])
        inputs = self._inputs(w, x.shape[-1])
        if inputs is not None:
            inputs.add(x)
            inputs.add_products(x)

    def _moe_forward(
        self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, gate: Any, up: Any, down: Any, *rest: Any
    ) -> None:
        _, act, *_ = rest
        experts, K = len(gate), x.shape[-1]
        sides = [self._inputs(w, K, experts, shared=True) for w in (gate, up)]
        inner = self._inputs(down, down.shape[-1], experts)
        for e in np.unique(ids[ids >= 0]):
            tokens, slots = np.nonzero(ids == e)
            strength = weights[tokens, slots][:, None]  # what an expert's output is multiplied by, and so its error
            seen = x[tokens]
            a, b = (ops.matmul(seen, w[e]) for w in (gate, up))
            gated = (a / (1 + np.exp(-a)) if act == "silu" else _gelu_tanh(a)) * b * strength
            for inputs, rows in ((sides[0], seen * strength), (sides[1], seen * strength), (inner, gated)):
                if inputs is not None:
                    inputs.add(rows, e)
                    inputs.add_products(rows, e if inputs is inner else 0)

    def _mla_cache_append(self, latent: np.ndarray, *_: Any) -> None:
        self._latent = latent.copy()  # its memory is used again before the layer's attention is over

    def _mla_q_prime(self, q: np.ndarray, key: Any) -> None:
        inputs = self._inputs(key, q.shape[2], q.shape[1])
        if inputs is not None:
            for head in range(q.shape[1]):
                inputs.add(q[:, head], head)
                inputs.add_products(q[:, head], head)

    def _mla_out_per_head(self, x: np.ndarray, value: Any, *_: Any) -> None:
        latent = self._latent
        assert latent is not None
        inputs = self._inputs(value, latent.shape[1])
        if inputs is not None:  # what a head multiplies is a mean of latents
            inputs.add(latent)
            inputs.add_products(latent)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)))


def searched(
    array: np.ndarray, inputs: Inputs | None, bits: int, group_size: int, first: int, size: int
) -> QuantizedTensor:
    """Rows of a stack of matrices of `size` rows each, from row `first` on, quantized by what their inputs are like.

    Raises InvalidArgument for a row that cannot be quantized.
    """
    from penstock.backends.cpu.quant_search import search_into

    rows, K = array.shape
    packed = np.empty((rows, K * bits // 32), np.uint32)
    scales, biases = (np.empty((rows, K // group_size), array.dtype) for _ in range(2))
    alike = np.ones(K, np.float32)
    for part, a, b in runs(first, first + rows, size):
        own = slice(part * size + a - first, part * size + b - first)
        out = QuantizedTensor(packed[own], scales[own], biases[own], bits, group_size)
        importance = alike if inputs is None else inputs.importance(part)
        bad = search_into(array[own], importance, out, None if inputs is None else inputs.feedback(part))
        if bad >= 0:
            raise InvalidArgument(f"quantize: row {own.start + bad} is not finite or too wide, expected finite numbers")
    return QuantizedTensor(packed, scales, biases, bits, group_size)
