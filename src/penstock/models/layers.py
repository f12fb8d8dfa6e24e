"""Pieces that several families are made of: a product with a weight of any kind, gated feed-forward, experts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from penstock import ops
from penstock.errors import CheckpointError
from penstock.experts.layout import ExpertFiles
from penstock.experts.layout import in_turns as in_turns_in_files
from penstock.models.rope import Rope
from penstock.models.source import Source, Weight
from penstock.models.step import STREAM, Step
from penstock.ops.array import Array, concatenated
from penstock.quant import GgufTensor, QuantizedTensor


def linear(step: Step, x: Array, w: Weight, dtype: str | None = None) -> Array:
    """x @ w.T for a dense or quantized weight; dtype of the result, x's by default."""
    if isinstance(w, QuantizedTensor):
        return ops.quantized_matmul(x, w, activations=step.activations, dtype=dtype)
    return ops.matmul(x, w, dtype=dtype)


def embed(step: Step, table: Weight, dtype: str = STREAM, vocab: int | None = None) -> Array:
    """Rows of an embedding table [T, dim], in the dtype of the residual stream or another.

    vocab: tokens of the whole table, where a split model has a part of it.
    """
    gather = ops.quantized_embedding if isinstance(table, QuantizedTensor) else ops.embedding
    if step.mesh is None or vocab is None:
        return gather(step.tokens, table, dtype=dtype)
    first, stop = step.mesh.share(vocab)
    return ops.all_reduce(gather(ops.part_ids(step.tokens, first, stop - first), table, dtype=dtype))


def head_logits(step: Step, x: Array, head: Weight, vocab: int) -> Array:
    """Logits of all tokens, float32 [T, vocab]."""
    y = linear(step, x, head, "float32")
    return y if step.mesh is None else ops.all_gather(y, vocab)


def over_ranks(step: Step, x: Array) -> Array:
    """What each rank has a part of, summed."""
    return x if step.mesh is None else ops.all_reduce(x)


def nothing(x: Array) -> Array:
    """Zeros like x, for a rank that has no part of a sum."""
    return ops.mul(x, 0.0)


def add_blocks(step: Step, h: Array, shared: Array | None, score: Array | None, routed: Array) -> Array:
    """h + routed + σ(score) · shared; of a split model each rank has a part of both, and h is added to their sum."""
    if step.mesh is None:
        return ops.moe_combine_residual(h, None, None, shared, score, moe_sum=routed)
    own = routed
    if shared is not None:
        own = ops.moe_combine_residual(None, None, None, shared, score, moe_sum=routed)
    return ops.residual_add(h, ops.all_reduce(own))


def stream_norm(step: Step, h: Array, weight: Array, eps: float) -> Array:
    """rms_norm of the residual stream h [T, dim], in the dtype of activations."""
    return ops.rms_norm(h, weight, eps, step.dtype)


def stream_rows(step: Step, h: Array) -> Array:
    """The residual stream h [T, dim] itself, in the dtype of activations."""
    return h if step.dtype == STREAM else ops.columns(h, 0, h.shape[1], step.dtype)


def apply_rope(step: Step, x: Array, rope: Rope) -> Array:
    """x [T, H, D] with the rotary channels of each token rotated by its position."""
    return ops.rope(x, rope.inv_freq, step.positions, rope.width, rope.mscale)


def heads(x: Array, count: int) -> Array:
    """[T, count · D] as [T, count, D]."""
    return x.reshape(x.shape[0], count, x.shape[1] // count)


def flat(x: Array) -> Array:
    """[T, H, D] as [T, H · D]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


def adjacent(*weights: Weight) -> tuple[Weight, ...]:
    """Weights with one input as rows of one block (a copy), so that the graph can make one product of theirs.

    Those that differ in bits, group size or dtype, are dense or blocks of a GGUF file, stay where they are.
    """
    quantized = [w for w in weights if isinstance(w, QuantizedTensor)]
    if len({(*w.key[1:], w.shape[1]) for w in quantized}) != 1 or len(quantized) < len(weights):
        return weights
    if quantized[0].global_scale is not None or isinstance(quantized[0], GgufTensor):  # blocks stay in their file
        return weights
    blocks = [concatenated(arrays) for arrays in zip(*(w.arrays for w in quantized), strict=True)]
    ends = accumulate(w.shape[0] for w in quantized)
    return tuple(
        w.with_arrays(*(block[end - w.shape[0] : end] for block in blocks))
        for w, end in zip(quantized, ends, strict=True)
    )


@dataclass(frozen=True)
class ExpertStack:
    """Feed-forward blocks of E experts: gate, up [E, I, dim], down [E, dim, I]. up None: gate rows, then up rows.

    slot_of int32 [E]: where each expert is in the stacks, if they do not hold all of them; −1: not here yet, −2:
    another rank's.
    """

    gate: Weight
    up: Weight | None
    down: Weight
    slot_of: Array | None = None


@dataclass(frozen=True)
class Mlp:
    """A gated feed-forward block."""

    gate: Weight
    up: Weight
    down: Weight


def read_mlp(source: Source, path: str, dim: int, width: int) -> Mlp:
    gate, up = adjacent(*(source.weight(f"{path}.{part}_proj", width, dim) for part in ("gate", "up")))
    return Mlp(gate, up, source.weight(f"{path}.down_proj", dim, width))


def read_head(source: Source, tied: bool, table: Weight, vocab: int, dim: int) -> Weight:
    """The output head [vocab, dim]; a tied model uses the embedding table.

    A file of a tied model that has a head all the same has been trained on: the head counts, as in transformers.
    """
    return table if tied and "lm_head" not in source else source.weight("lm_head", vocab, dim)


def read_experts(
    source: Source,
    path: str,
    stacked: str,
    count: int,
    dim: int,
    width: int,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> ExpertStack:
    """Experts in any of three spellings: `stacked` (MLX), `gate_up_proj` (joined), or one module per expert, whose
    `parts` are gate, up and down.
    """
    if f"{path}.{stacked}.gate_proj" in source:
        gate, up = (source.stack([f"{path}.{stacked}.{part}_proj"], count, width, dim) for part in ("gate", "up"))
        return ExpertStack(gate, up, source.stack([f"{path}.{stacked}.down_proj"], count, dim, width))
    base = path if path.endswith("experts") else f"{path}.experts"
    if f"{base}.gate_up_proj" in source:
        joined = source.stack([f"{base}.gate_up_proj"], count, 2 * width, dim)
        return ExpertStack(joined, None, source.stack([f"{base}.down_proj"], count, dim, width))
    if (last := f"{base}.{count - 1}.{parts[0]}") not in source:
        source.stack([f"{base}.0.{parts[0]}", last], 2, width, dim)  # says so, before a list of all that are claimed
    gate, up, down = (
        source.stack([f"{base}.{e}.{part}" for e in range(count)], count, *shape)
        for part, shape in zip(parts, ((width, dim), (width, dim), (dim, width)), strict=True)
    )
    return ExpertStack(gate, up, down)


def in_turns(stack: Weight) -> tuple[Weight, Weight]:
    """Two stacks [E, N, K] out of one [E, 2 N, K] that has their rows in turns: copies, on its device, or where they
    lie in files.
    """
    if isinstance(stack, ExpertFiles):
        return in_turns_in_files(stack)  # type: ignore[return-value]

    def every_other(array: Any, first: int) -> Any:
        rows = array[:, first::2]
        if not isinstance(rows, np.ndarray):
            return rows.contiguous()
        return rows if 0 in rows.strides else np.copy(rows)  # what only has a shape gets no memory

    if isinstance(stack, QuantizedTensor):
        first, second = (stack.with_arrays(*(every_other(part, n) for part in stack.parts)) for n in (0, 1))
        return first, second
    return every_other(stack, 0), every_other(stack, 1)


def columns_as_rows(stack: Any, turns: int = 1) -> tuple[Array, ...]:
    """A dense stack [E, K, N] as one [E, N, K], or as `turns` of them that have its columns in turns: copies, on its
    device. Raises CheckpointError for experts that stay in files.
    """
    if isinstance(stack, ExpertFiles):
        raise CheckpointError(
            f"{stack.name} has the columns of each expert as rows, which cannot be streamed, expected them resident "
            "(expert_cache) or in mlx-lm's layout: penstock convert"
        )

    def made(array: Any) -> Any:
        rows = array.swapaxes(1, 2)
        if not isinstance(rows, np.ndarray):
            return rows.contiguous()
        return rows if 0 in rows.strides else np.copy(rows, order="C")  # what only has a shape gets no memory

    return tuple(made(stack[:, :, first::turns]) for first in range(turns))


def mlp(step: Step, x: Array, w: Mlp, act: str = "silu") -> Array:
    """down(act(gate x) · up x), x [T, dim] → [T, dim]."""
    if w.gate.shape[0] == 0:
        return nothing(x)
    gated = ops.swiglu if act == "silu" else ops.geglu
    return linear(step, gated(linear(step, x, w.gate), linear(step, x, w.up)), w.down)


def experts(step: Step, x: Array, ids: Array, weights: Array, w: ExpertStack, act: str = "silu") -> Array:
    """Σ over the chosen experts of weight · expert(x), ids and weights [T, k] → [T, dim]."""
    if 0 in w.gate.shape:  # a rank that has none of them
        return nothing(x)
    return ops.moe_forward(x, ids, weights, w.gate, w.up, w.down, w.slot_of, act, step.activations)
