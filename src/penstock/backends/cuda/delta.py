"""The gated delta net on the GPU: causal convolution (`_conv.py`), gates, and the delta rule.

The rule is the recurrence with the state in registers (`_recurrence.py`: decode, short and kept runs, float32
activations) or, for many tokens, chunks of 64 on tensor cores (`_chunk.py`). Slots outside the states, −1 for an
inactive row too, give a row of zeros and touch no state. `gated_delta_step` is a whole decode step (`_delta_step.py`),
`gated_delta_verify` one of runs that are kept (`_delta_verify.py`); where bits are not to depend on it, both take that.
"""

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._chunk import delta_chunks, delta_chunks_of_runs, takes_chunks
from penstock.backends.cuda._conv import commit_kept, commit_rows, convolve, convolve_runs, move_on, move_runs_on
from penstock.backends.cuda._delta_step import decay, mix, step, takes_steps
from penstock.backends.cuda._delta_verify import takes_runs, verify
from penstock.backends.cuda._launch import sigmoid
from penstock.backends.cuda._recurrence import commit_states, recur, recur_runs
from penstock.backends.cuda._tuning import DELTA_STEPS
from penstock.backends.cuda.norm import gated_rms_norm
from penstock.ops.op import deterministic, kernel

# -- convolution -----------------------------------------------------------------------------------------------------


@kernel(ops.conv1d_causal, device="cuda")
def conv1d_causal(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    slots: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    act: str = "silu",
    key_heads: int = 0,
    key_dim: int = 0,
    *,
    out: torch.Tensor,
) -> None:
    if not x.numel():
        return
    if starts is not None and slots is not None:
        inside = 0 if deterministic() else key_heads  # where another order of a head's sum will do
        if convolve_runs(x, state, weight, starts, slots, act == "silu", inside, key_dim, out):
            return
    else:
        convolve(x, state, weight, slots, act == "silu", out)
    if key_heads:
        ops.rms_norm_qk(out, key_heads, key_dim, key_heads * key_dim, out=out)


@kernel(ops.conv1d_state_update, device="cuda")
def conv1d_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    width: int | None = None,
) -> None:
    if not x.numel() or not state.numel():
        return
    if starts is not None and slots is not None:
        if len(slots):
            move_runs_on(state, x, starts, slots, keep, width)
    else:
        move_on(state, x, slots, width)


@kernel(ops.conv1d_commit, device="cuda")
def conv1d_commit(state: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, width: int) -> None:
    if len(slots) and state.numel():
        commit_kept(state, slots, accepted, width)


# -- gates -----------------------------------------------------------------------------------------------------------


# gdn_decay_beta  g = exp(-exp(A_log) * softplus(alpha + dt_bias)), b = sigmoid(beta)
# shapes          alpha [T, Hv, D], beta [T, Hv]; A_log [Hv], dt_bias [Hv, D], any float; g [T, Hv, D],
#                 b [T, Hv] float32; D = 1 for one decay of a head
# grid            (blocks of elements,)
# bytes           T * Hv * (D + 1) * (itemsize + 4)
# limits          none
@triton.jit(do_not_specialize=["n"])
def _gates_kernel(
    alpha_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, g_ptr, b_ptr, n, Hv, D: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    first = live & (i % D == 0)  # of a head
    channel = i % (Hv * D)
    alpha = tl.load(alpha_ptr + i, mask=live, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + i // D, mask=first, other=0.0).to(tl.float32)
    A = tl.load(A_log_ptr + channel // D, mask=live, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias_ptr + channel, mask=live, other=0.0).to(tl.float32)
    tl.store(g_ptr + i, decay(alpha, A, bias), mask=live)
    tl.store(b_ptr + i // D, sigmoid(beta), mask=first)


@kernel(ops.gdn_decay_beta, device="cuda")
def gdn_decay_beta(
    alpha: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    n = alpha.numel()
    if n:
        block = 128
        grid = (triton.cdiv(n, block),)
        D = 1 if alpha.ndim == 2 else alpha.shape[2]
        _gates_kernel[grid](alpha, beta, A_log, dt_bias, *out, n, alpha.shape[1], D, block, num_warps=1)


# -- delta rule ------------------------------------------------------------------------------------------------------

_ANY = (1 << 31) - 1


@kernel(ops.gated_delta_net, device="cuda", variants=("step", "chunks"))
def gated_delta_net(
    state: torch.Tensor,
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    Hk: int,
    Hv: int,
    Dk: int,
    Dv: int,
    method: str = "auto",
    chunk: int = 0,
    slots: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    variant: str | None,
) -> None:
    """`chunk` says where the definition cuts; the chunks here are of 64 tokens whatever it is.

    Of a ragged call each run has its own arrangement, by its own length: up to DELTA_STEPS tokens, and all that are
    kept, by the recurrence.
    """
    T = len(qkv)
    if T == 0:
        return
    if starts is not None and slots is not None:
        by_steps = method in ("step", "sequential") if variant is None else variant == "step"
        all_chunks = method == "chunkwise" if variant is None else variant == "chunks"
        longest = _ANY if by_steps or not takes_chunks(qkv, Dk) else 0 if all_chunks else DELTA_STEPS
        recur_runs(state, qkv, g, b, starts, slots, keep, gates, longest, out, Hk, Hv, Dk, Dv)
        if longest < T:
            delta_chunks_of_runs(state, qkv, g, b, starts, slots, keep, longest, out, Hk, Hv, Dk, Dv)
        return
    many = method == "chunkwise" or (method == "auto" and (T > DELTA_STEPS or deterministic()))
    if (many if variant is None else variant == "chunks") and slots is None and takes_chunks(qkv, Dk):
        delta_chunks(state, qkv, g, b, out, Hk, Hv, Dk, Dv)
    else:
        recur(state, qkv, g, b, slots, out, Hk, Hv, Dk, Dv)


@kernel(ops.delta_commit, device="cuda")
def delta_commit(conv_state, state, gates, slots, accepted, conv_weight, Hk) -> None:
    """The convolution of the kept rows, which moves on; rms_norm_qk of what it gives; the recurrence. Where bits are
    not to depend on when it is done, as steps do it: runs of no rows behind what was accepted.
    """
    (B,), K, C = slots.shape, gates.shape[1], conv_state.shape[2]
    if not B or not K:
        return
    Hv, _, Dk = state.shape[1:]
    if deterministic() and takes_runs(conv_weight.shape[1]) and gates.shape[2] == 2:
        none, rows = conv_state.new_empty((0, Hv)), conv_state.new_empty((0, C))
        runs, unread = (gates, slots, slots.new_zeros(B + 1), None, accepted), conv_weight
        verify(rows, none, none, none, conv_state, state, *runs, conv_weight, *(unread,) * 3, Hk, 0.0, "silu", rows)
        return
    rows = conv_state.new_zeros((B * K, C))  # those that are not accepted are normed, and not read
    commit_rows(conv_state, conv_weight, slots, accepted, rows.view(B, K, C))
    ops.rms_norm_qk(rows, Hk, Dk, Hk * Dk, out=rows)
    commit_states(state, rows.view(B, K, C), gates, slots, accepted, Hk)


# -- a layer's step --------------------------------------------------------------------------------------------------


@kernel(ops.gated_delta_step, device="cuda")
def gated_delta_step(
    qkv, z, alpha, beta, conv_state, state, slots, conv_weight, A_log, dt_bias, norm_weight, Hk, eps, act="silu", *, out
) -> None:
    if not len(qkv):
        return
    Hv, Dv, Dk = state.shape[1:]
    weights = (conv_weight, A_log, dt_bias, norm_weight)
    if deterministic() and takes_runs(conv_weight.shape[1]) and alpha.ndim == 2:
        rows, runs = (qkv, z, alpha, beta, conv_state, state), (None, slots, None, None, None)
        verify(*rows, *runs, *weights, Hk, eps, act, out)
        return
    if takes_steps(Dk, Dv):
        step(qkv, z, alpha, beta, conv_state, state, slots, *weights, Hk, eps, act, out)
        return
    y, g, b = mix(qkv, alpha, beta, conv_state, slots, conv_weight, A_log, dt_bias, Hk, Hv, Dk, Dv)
    recur(state, y, g, b, slots, out, Hk, Hv, Dk, Dv)
    gated_rms_norm(out, z, norm_weight, eps, act, out=out)


@kernel(ops.gated_delta_verify, device="cuda")
def gated_delta_verify(
    qkv, z, alpha, beta, conv_state, state, gates, slots, starts, keep, accepted, conv_weight, A_log, dt_bias,
    norm_weight, Hk, eps, act="silu", *, out,
) -> None:  # fmt: skip
    if not len(qkv):
        return
    Hv, Dv, Dk = state.shape[1:]
    if takes_runs(conv_weight.shape[1]):
        runs = (gates, slots, starts, keep, accepted)
        weights = (conv_weight, A_log, dt_bias, norm_weight)
        verify(qkv, z, alpha, beta, conv_state, state, *runs, *weights, Hk, eps, act, out)
        return
    delta_commit(conv_state, state, gates, slots, accepted, conv_weight, Hk)
    qkv, alpha, beta = (rows.contiguous() for rows in (qkv, alpha, beta))  # no model's convolution is that wide
    y = ops.conv1d_causal(qkv, conv_state, conv_weight, slots, starts)
    ops.conv1d_state_update(conv_state, qkv, slots, starts, keep, conv_weight.shape[1])
    y = ops.rms_norm_qk(y, Hk, Dk, Hk * Dk)
    g, b = ops.gdn_decay_beta(alpha, beta, A_log, dt_bias)
    ops.gated_delta_net(state, y, g, b, Hk, Hv, Dk, Dv, "step", 16, slots, starts, keep, gates, out=out)
    gated_rms_norm(out, z, norm_weight, eps, act, out=out)
