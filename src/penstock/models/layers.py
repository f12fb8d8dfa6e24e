"""Pieces that several families are made of: a product with a weight of any kind, gated feed-forward, experts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from penstock import ops
from penstock.models.rope import Rope
from penstock.models.source import Source, Weight
from penstock.models.step import Step
from penstock.ops.array import Array, concatenated
from penstock.quant import QuantizedTensor


def linear(step: Step, x: Array, w: Weight, dtype: str | None = None) -> Array:
    """x @ w.T for a dense or quantized weight; dtype of the result, x's by default."""
    if isinstance(w, QuantizedTensor):
        return ops.quantized_matmul(x, w, activations=step.activations, dtype=dtype)
    return ops.matmul(x, w, dtype=dtype)


def embed(step: Step, table: Weight) -> Array:
    """Rows of an embedding table [T, dim], in the dtype of the residual stream."""
    gather = ops.quantized_embedding if isinstance(table, QuantizedTensor) else ops.embedding
    return gather(step.tokens, table, dtype=step.dtype)


def apply_rope(step: Step, x: Array, rope: Rope) -> Array:
    """x [T, H, D] with the rotary channels of each token rotated by its position."""
    return ops.rope(x, rope.inv_freq, step.positions, rope.width, rope.mscale)


def heads(x: Array, count: int) -> Array:
    """[T, count · D] as [T, count, D]."""
    return x.reshape(x.shape[0], count, x.shape[1] // count)


def flat(x: Array) -> Array:
    """[T, H, D] as [T, H · D]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


@dataclass(frozen=True)
class Joined:
    """Weights with one input. Alike in format they lie below each other in `whole`, and `parts` are views of it."""

    whole: Weight | None
    parts: tuple[Weight, ...]


def join(*weights: Weight) -> Joined:
    """Put quantized weights of one bits, group size and dtype below each other (a copy), so that one call reads all."""
    first = weights[0]
    if not isinstance(first, QuantizedTensor):
        return Joined(None, weights)
    quantized = [w for w in weights if isinstance(w, QuantizedTensor) and w.key[1:] == first.key[1:]]
    if len(quantized) < len(weights) or any(w.shape[1] != first.shape[1] for w in quantized):
        return Joined(None, weights)
    columns = zip(*(w.arrays for w in quantized), strict=True)
    whole = first.with_arrays(*(concatenated(arrays) for arrays in columns))
    ends = list(accumulate(w.shape[0] for w in quantized))
    rows = [slice(end - w.shape[0], end) for w, end in zip(quantized, ends, strict=True)]
    return Joined(whole, tuple(first.with_arrays(*(a[part] for a in whole.arrays)) for part in rows))


def project(step: Step, x: Array, w: Joined, dtype: str | None = None, joins: int | None = None) -> tuple[Array, ...]:
    """x [T, K] times each joined weight. One row is one product, cut into views; more rows are cut into copies.

    joins: most rows that are not multiplied with each weight by itself, those of the step by default.
    """
    if w.whole is None or x.shape[0] > (step.joins if joins is None else joins):
        return tuple(linear(step, x, part, dtype) for part in w.parts)
    y = linear(step, x, w.whole, dtype)
    if x.shape[0] != 1:
        return (y,) if len(w.parts) == 1 else ops.split_columns(y, *(part.shape[0] for part in w.parts))
    cuts = accumulate(part.shape[0] for part in w.parts)
    return tuple(y[:, end - part.shape[0] : end] for part, end in zip(w.parts, cuts, strict=True))


@dataclass(frozen=True)
class ExpertStack:
    """Feed-forward blocks of E experts: gate, up [E, I, dim], down [E, dim, I]. up None: gate rows, then up rows.

    slot_of int32 [E]: where each expert is in the stacks, if they do not hold all of them.
    """

    gate: Weight
    up: Weight | None
    down: Weight
    slot_of: Array | None = None


@dataclass(frozen=True)
class Mlp:
    """A gated feed-forward block."""

    gate_up: Joined
    down: Weight


def read_mlp(source: Source, path: str, dim: int, width: int) -> Mlp:
    gate, up = (source.weight(f"{path}.{part}_proj", width, dim) for part in ("gate", "up"))
    return Mlp(join(gate, up), source.weight(f"{path}.down_proj", dim, width))


def read_head(source: Source, tied: bool, table: Weight, vocab: int, dim: int) -> Weight:
    """The output head [vocab, dim]; a tied model uses the embedding table.

    A file of a tied model that has a head all the same has been trained on: the head counts, as in transformers.
    """
    return table if tied and "lm_head" not in source else source.weight("lm_head", vocab, dim)


def read_experts(source: Source, path: str, stacked: str, count: int, dim: int, width: int) -> ExpertStack:
    """Experts in any of three spellings: `stacked` (MLX), `gate_up_proj` (joined), or one module per expert."""
    if f"{path}.{stacked}.gate_proj" in source:
        gate, up = (source.stack([f"{path}.{stacked}.{part}_proj"], count, width, dim) for part in ("gate", "up"))
        return ExpertStack(gate, up, source.stack([f"{path}.{stacked}.down_proj"], count, dim, width))
    base = path if path.endswith("experts") else f"{path}.experts"
    if f"{base}.gate_up_proj" in source:
        joined = source.stack([f"{base}.gate_up_proj"], count, 2 * width, dim)
        return ExpertStack(joined, None, source.stack([f"{base}.down_proj"], count, dim, width))
    if (last := f"{base}.{count - 1}.gate_proj") not in source:
        source.stack([f"{base}.0.gate_proj", last], 2, width, dim)  # says so, before a list of all that are claimed
    gate, up, down = (
        source.stack([f"{base}.{e}.{part}_proj" for e in range(count)], count, *shape)
        for part, shape in (("gate", (width, dim)), ("up", (width, dim)), ("down", (dim, width)))
    )
    return ExpertStack(gate, up, down)


def mlp(step: Step, x: Array, w: Mlp, act: str = "silu") -> Array:
    """down(act(gate x) · up x), x [T, dim] → [T, dim]."""
    gated = ops.swiglu if act == "silu" else ops.geglu
    gate, up = project(step, x, w.gate_up, joins=1)  # two products are one fused op
    return linear(step, gated(gate, up), w.down)


def experts(step: Step, x: Array, ids: Array, weights: Array, w: ExpertStack, act: str = "silu") -> Array:
    """Σ over the chosen experts of weight · expert(x), ids and weights [T, k] → [T, dim]."""
    return ops.moe_forward(x, ids, weights, w.gate, w.up, w.down, w.slot_of, act, step.activations)
