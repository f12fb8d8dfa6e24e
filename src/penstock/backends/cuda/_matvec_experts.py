"""Products of a few rows with the weights of the experts that they chose, each in one launch of `_matvec`."""

from typing import Any

import torch

from penstock.backends.cuda._activations import gated
from penstock.backends.cuda._matvec import launch, weight_parts
from penstock.backends.cuda._shared_down import shared_down_sum
from penstock.quant import QuantizedTensor


def expert_rows(
    x: torch.Tensor,
    experts: Any,
    ids: torch.Tensor | None,
    slot_of: torch.Tensor | None,
    pairs_per_x: int,
    out: torch.Tensor,
    stack: int = 0,
) -> None:
    """out [pairs, N] = x[p // pairs_per_x] · experts[ids[p]]; ids None: expert p; 0 for an expert that is not there."""
    pairs, N = out.shape
    launch(x, experts, out, N, pairs=pairs, pairs_per_x=pairs_per_x, ids=ids, slot_of=slot_of, stack=stack)


def alike(gate_w: Any, up_w: Any) -> bool:
    """Whether one launch reads both."""
    if isinstance(gate_w, QuantizedTensor) and isinstance(up_w, QuantizedTensor):
        return weight_parts(gate_w)[1:] == weight_parts(up_w)[1:] and gate_w.global_scale is None is up_w.global_scale
    return weight_parts(gate_w)[3:] == weight_parts(up_w)[3:]


def expert_gate_up_rows(
    x: torch.Tensor,
    gate_w: Any,
    up_w: Any,
    ids: torch.Tensor,
    slot_of: torch.Tensor | None,
    act: str,
    out: torch.Tensor,
) -> None:
    """out [T, k, N] = act(gate_w[e] · x[t]) · (up_w[e] · x[t]), e = ids[t, i]; up_w None: gate_w is [S, 2N, K].

    All chosen experts of a token in one launch; 0 for an expert that is not there.
    """
    T, k, N = out.shape
    if up_w is not None and not alike(gate_w, up_w):  # one kernel reads one format
        gate, up = (torch.empty((T * k, N), dtype=torch.float32, device=x.device) for _ in range(2))
        expert_rows(x, gate_w, ids, slot_of, k, gate)
        expert_rows(x, up_w, ids, slot_of, k, up)
        gated(gate, up, act, out)
        return
    launch(x, gate_w, out, N, pairs=T * k, pairs_per_x=k, ids=ids, slot_of=slot_of, up=up_w, act=act)


def clamped_gate_up_rows(
    x: torch.Tensor,
    gate_w: Any,
    up_w: Any,
    gate_bias: torch.Tensor,
    up_bias: torch.Tensor,
    ids: torch.Tensor,
    slot_of: torch.Tensor | None,
    limit: float,
    alpha: float,
    out: torch.Tensor,
    order: torch.Tensor | None = None,
) -> None:
    """out [T, k, N] = clamped_swiglu(gate_w[e] · x[t] + gate_bias[id], up_w[e] · x[t] + up_bias[id]), in one launch.

    order: as in `mixed_gate_up`.
    """
    T, k, N = out.shape
    launch(
        x, gate_w, out, N, pairs=T * k, pairs_per_x=k, ids=ids, slot_of=slot_of, up=up_w, act="clamped",
        biases=(gate_bias, up_bias), clamp=(limit, alpha), order=order,
    )  # fmt: skip


def expert_down_sum_rows(
    h: torch.Tensor,
    down_w: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    slot_of: torch.Tensor | None,
    out: torch.Tensor,
    after_gate_up: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """out [T, dim] = residual + Σ_i weights[t, i] · (down_w[e] · h[t, i] + bias[e]), e = ids[t, i], in one launch and
    without atomics.

    after_gate_up: the kernel before this one on the stream is that of `expert_gate_up_rows` with the same ids.
    """
    T, k, _ = h.shape
    launch(
        h, down_w, out, out.shape[1], pairs=T, slots=k, ids=ids, slot_of=slot_of, weights=weights,
        old_ids=after_gate_up, residual=residual, biases=(bias, None),
    )  # fmt: skip


def expert_down_rows(
    h: torch.Tensor,
    down_w: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    slot_of: torch.Tensor | None,
    order: torch.Tensor,
    out: torch.Tensor,
    after_gate_up: bool = False,
    bias: torch.Tensor | None = None,
) -> None:
    """The terms of `expert_down_sum_rows`' sum, out [T, k, dim], pairs in the turn of `order`."""
    T, k, dim = out.shape
    launch(
        h, down_w, out, dim, pairs=T * k, ids=ids, slot_of=slot_of, weights=weights, old_ids=after_gate_up,
        order=order, biases=(bias, None),
    )  # fmt: skip


def mixed_gate_up(
    x: torch.Tensor,
    gate_w: Any,
    up_w: Any,
    common: Any,
    common_up: Any,
    ids: torch.Tensor,
    slot_of: torch.Tensor | None,
    act: str,
    out: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    order: torch.Tensor | None = None,
) -> None:
    """out [T, k + 1, N]: as `expert_gate_up_rows`, and in the last place the common expert, all in one launch.

    common, common_up [N, K] of the form of gate_w and up_w; norm [K]: x is normed first. order [T · k]: pairs by their
    experts, so that weights which several tokens chose come from memory once.
    """
    T, slots, N = out.shape
    launch(
        x, gate_w, out, N, pairs=T * slots, pairs_per_x=slots, ids=ids, slot_of=slot_of, up=up_w, act=act,
        common=common, common_up=common_up, per_token=slots, norm=norm, eps=eps, order=order,
    )  # fmt: skip


def mixed_down_sum(
    h: torch.Tensor,
    down_w: Any,
    common: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    score: torch.Tensor | None,
    slot_of: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out [T, dim] = residual + Σ_i weights[t, i] · (down_w[ids[t, i]] · h[t, i]) + σ(score[t]) · (common · h[t, k]).

    One launch, straight after `mixed_gate_up` with the same ids; slots in order, no atomics; out may be residual.
    """
    if shared_down_sum(h, down_w, common, ids, weights, score, slot_of, residual, out):
        return
    T, slots, _ = h.shape
    launch(
        h, down_w, out, out.shape[1], pairs=T, slots=slots, ids=ids, slot_of=slot_of, weights=weights, old_ids=True,
        common=common, per_token=slots, score=score, residual=residual,
    )  # fmt: skip


def mixed_down(
    h: torch.Tensor,
    down_w: Any,
    common: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    score: torch.Tensor | None,
    slot_of: torch.Tensor | None,
    order: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The terms of `mixed_down_sum`'s sum, out [T, k + 1, dim], pairs in the turn of `order`."""
    T, slots, _ = h.shape
    launch(
        h, down_w, out, out.shape[2], pairs=T * slots, ids=ids, slot_of=slot_of, weights=weights, old_ids=True,
        order=order, common=common, per_token=slots, score=score,
    )  # fmt: skip
