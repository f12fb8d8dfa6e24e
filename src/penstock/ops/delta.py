"""Gated DeltaNet: causal convolution, decay gates, and the delta rule.

Around these ops a layer runs: projections → conv1d_causal → conv1d_state_update → rms_norm_qk → gdn_decay_beta →
gated_delta_net → gated_rms_norm → output projection; `gated_delta_step` is all between the projections for one token.
State ops have two forms: T steps of one sequence with its own state, or one step of B sequences with `slots` int32 [B]
into states that have a leading slot axis.
"""

from __future__ import annotations

import numpy as np

from penstock.dtypes import round_to
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.elementwise import sigmoid, silu
from penstock.ops.norm import f64, gated_rms_norm, rms_norm_qk
from penstock.ops.op import op

# -- convolution -----------------------------------------------------------------------------------------------------


def _slots(slots: Spec | None, rows: int) -> None:
    check.dtype("int32", slots=slots)
    check.shape((rows,), "one per row", slots=slots)


def _check_slots(slots: Array | None, state: Array) -> None:
    if slots is not None:
        check.in_range("slots", slots, 0, state.shape[0], f"{state.shape[0]} slots")
        check.unique("slots", slots)


def _conv_state(state: Spec, x: Spec, slots: Spec | None, width: int | None) -> None:
    """state [W − 1, C] or [S, W − 1, C], float32 or x's dtype."""
    check.floating(x=x)
    check.axes("[T, C]", 2, x=x)
    check.filled(x=x)
    lead = 0 if slots is None else 1
    check.axes("[S, W - 1, C]" if lead else "[W - 1, C]", 2 + lead, state=state)
    if state.dtype not in ("float32", x.dtype):
        check.dtype(x.dtype, state=state)
    taps = state.shape[lead] if width is None else width - 1
    check.shape((*state.shape[:lead], taps, x.shape[1]), "taps - 1 and channels", state=state)
    _slots(slots, x.shape[0])


def _convolved(x: Spec, state: Spec, weight: Spec, slots: Spec | None) -> Spec:
    check.floating(weight=weight)
    check.axes("[C, W]", 2, weight=weight)
    check.filled(0, weight=weight)
    _conv_state(state, x, slots, weight.shape[1])
    if weight.shape[0] != x.shape[1]:
        raise ShapeError(f"weight has shape {weight.shape}, expected {x.shape[1]} rows (channels of x)")
    return x


@op(infer=_convolved, check=_check_slots)
def conv1d_causal(x: Array, state: Array, weight: Array, slots: Array | None = None) -> Array:
    """silu(Σ_j seq[t + j] · weight[:, j]) per channel, seq = state followed by x: tap W − 1 meets the current token.

    x [T, C], state [W − 1, C], weight [C, W]; or x [B, C], state [S, W − 1, C], slots int32 [B], one step each → like
    x. Reads the state only: `conv1d_state_update` moves it on.
    """
    taps = f64(weight).T  # [W, C]
    if slots is None:
        seq = np.concatenate([f64(state), f64(x)])
        y = sum(seq[j : j + len(x)] * taps[j] for j in range(len(taps)))
    else:
        seq = np.concatenate([f64(state[slots]), f64(x)[:, None]], axis=1)  # [B, W, C]
        y = sum(seq[:, j] * taps[j] for j in range(len(taps)))
    return round_to(silu(np.asarray(y)), x.dtype)


@op(infer=lambda state, x, slots: _conv_state(state, x, slots, None), check=_check_slots, writes=("state",))
def conv1d_state_update(state: Array, x: Array, slots: Array | None = None) -> None:
    """state ← the last W − 1 rows of state followed by x. Shapes as in `conv1d_causal`; run it after that op."""
    if slots is None:
        state[...] = np.concatenate([state, x.astype(state.dtype)])[len(x) :]
    elif state.shape[1]:
        state[slots] = np.concatenate([state[slots, 1:], x.astype(state.dtype)[:, None]], axis=1)


# -- gates -----------------------------------------------------------------------------------------------------------


def _gates(alpha: Spec, beta: Spec, A_log: Spec, dt_bias: Spec) -> tuple[Spec, Spec]:
    check.alike(alpha=alpha, beta=beta)
    check.floating(A_log=A_log, dt_bias=dt_bias)
    check.axes("[T, Hv]", 2, alpha=alpha)
    check.filled(alpha=alpha)
    check.shape(alpha.shape, "as alpha", beta=beta)
    check.shape(alpha.shape[1:], "one per value head", A_log=A_log, dt_bias=dt_bias)
    gate = Spec(alpha.shape, "float32")
    return gate, gate


@op(infer=_gates)
def gdn_decay_beta(alpha: Array, beta: Array, A_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """g = exp(−exp(A_log) · softplus(alpha + dt_bias)), b = sigmoid(beta): decay and write strength, both in [0, 1].

    alpha, beta [T, Hv], A_log, dt_bias [Hv] → two float32 [T, Hv]. softplus(z) = max(z, 0) + log1p(exp(−|z|)).
    """
    z = f64(alpha) + f64(dt_bias)
    softplus = np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))
    g = np.exp(-np.exp(f64(A_log)) * softplus)
    return g.astype(np.float32), sigmoid(f64(beta)).astype(np.float32)


# -- delta rule ------------------------------------------------------------------------------------------------------

METHODS = ("auto", "step", "sequential", "chunkwise")
CHUNK = 16


def split_heads(qkv: Array, Hk: int, Hv: int, Dk: int, Dv: int) -> tuple[Array, Array, Array]:
    """Rows q | k | v → float64 q, k [T, Hv, Dk] (each key head repeated for its value heads) and v [T, Hv, Dv]."""
    T, keys = len(qkv), Hk * Dk
    q, k = (f64(qkv[:, i * keys : (i + 1) * keys]).reshape(T, Hk, Dk).repeat(Hv // Hk, axis=1) for i in (0, 1))
    return q, k, f64(qkv[:, 2 * keys :]).reshape(T, Hv, Dv)


def recurrence(
    S: Array, q: Array, k: Array, v: Array, g: Array, b: Array, kept: np.dtype | None = None
) -> tuple[Array, Array]:
    """The delta rule token by token in float64; returns outputs [T, Hv, Dv] and the last state.

    `kept` rounds the state after each token, so that a sequence may be cut into calls anywhere without changing a bit.
    """
    y = np.empty(v.shape)
    for t in range(len(q)):
        S = g[t, :, None, None] * S
        memory = np.einsum("hvk,hk->hv", S, k[t])
        S = S + ((v[t] - memory) * b[t, :, None])[:, :, None] * k[t][:, None, :]
        S = S if kept is None else f64(S.astype(kept))
        y[t] = np.einsum("hvk,hk->hv", S, q[t])
    return y, S


def chunkwise(
    S: Array, q: Array, k: Array, v: Array, g: Array, b: Array, chunk: int, kept: np.dtype | None = None
) -> tuple[Array, Array]:
    """The same by chunks of tokens: small matrix products and one triangular solve per chunk, float64.

    With L the running sum of ln(max(g, 1e-30)) and Γ[l, i] = exp(L[l] − L[i]):
        (I + A) U = R,  A[l, i] = b_l Γ[l, i] k_i·k_l (i < l),  R_l = b_l (v_l − γ_l S k_l)
        y_l = γ_l S q_l + Σ_{i ≤ l} Γ[l, i] (k_i·q_l) U_i;   S ← γ_last S + Σ_i Γ[last, i] U_i ⊗ k_i
    """
    y = np.empty(v.shape)
    for start in range(0, len(q), chunk):
        rows = slice(start, min(start + chunk, len(q)))
        Q, K, V = (x[rows].swapaxes(0, 1) for x in (q, k, v))  # [Hv, c, ·]
        L = np.cumsum(np.log(np.maximum(g[rows], 1e-30)), axis=0).T  # [Hv, c]
        beta, c = b[rows].T[..., None], L.shape[1]
        gamma, ratio = np.exp(L)[..., None], np.exp(np.minimum(L[:, :, None] - L[:, None, :], 0))
        A = beta * ratio * np.tril(K @ K.swapaxes(1, 2), -1)
        R = beta * (V - gamma * (K @ S.swapaxes(1, 2)))
        U = np.linalg.solve(np.eye(c) + A, R)
        y[rows] = (gamma * (Q @ S.swapaxes(1, 2)) + (ratio * np.tril(Q @ K.swapaxes(1, 2))) @ U).swapaxes(0, 1)
        S = gamma[:, -1:] * S + (ratio[:, -1, :, None] * U).swapaxes(1, 2) @ K
        S = S if kept is None else f64(S.astype(kept))
    return y, S


def _delta(
    state: Spec,
    qkv: Spec,
    g: Spec,
    b: Spec,
    Hk: int,
    Hv: int,
    Dk: int,
    Dv: int,
    method: str,
    chunk: int,
    slots: Spec | None,
) -> Spec:
    check.floating(qkv=qkv)
    check.dtype("float32", state=state, g=g, b=b)
    check.positive(Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv, chunk=chunk)
    check.one_of(METHODS, method=method)
    if Hv % Hk:
        raise InvalidArgument(f"Hv is {Hv}, expected a multiple of {Hk} (Hk)")
    check.axes("[T, 2 Hk Dk + Hv Dv]", 2, qkv=qkv)
    check.shape((qkv.shape[0], 2 * Hk * Dk + Hv * Dv), "T, 2 Hk Dk + Hv Dv", qkv=qkv)
    check.shape((qkv.shape[0], Hv), "T, Hv", g=g, b=b)
    _slots(slots, qkv.shape[0])
    check.axes("[Hv, Dv, Dk]" if slots is None else "[S, Hv, Dv, Dk]", 3 if slots is None else 4, state=state)
    lead = () if slots is None else state.shape[:1]
    check.shape((*lead, Hv, Dv, Dk), "Hv, Dv, Dk", state=state)
    return Spec((qkv.shape[0], Hv, Dv), qkv.dtype)


@op(infer=_delta, check=_check_slots, writes=("state",))
def gated_delta_net(
    state: Array,
    qkv: Array,
    g: Array,
    b: Array,
    Hk: int,
    Hv: int,
    Dk: int,
    Dv: int,
    method: str = "auto",
    chunk: int = CHUNK,
    slots: Array | None = None,
) -> Array:
    """The gated delta rule, for each token and value head h with key head h // (Hv / Hk):

        S ← g·S;  δ = (v − S·k)·b;  S ← S + δ ⊗ k;  y = S·q
    state float32 [Hv, Dv, Dk] is moved on; qkv [T, 2 Hk Dk + Hv Dv] holds q | k | v; g, b float32 [T, Hv] → [T, Hv,
    Dv]. method "step" or "sequential" is the recurrence, "chunkwise" its form by chunks of `chunk` tokens, "auto"
    leaves the choice to the backend. With slots int32 [B], one step of B sequences whose states are state[slots], [S,
    Hv, Dv, Dk].
    """
    q, k, v = split_heads(qkv, Hk, Hv, Dk, Dv)
    decay, strength = f64(g), f64(b)
    if slots is not None:
        y = np.empty(v.shape)
        for row, slot in enumerate(slots):
            one = slice(row, row + 1)
            y[one], last = recurrence(f64(state[slot]), q[one], k[one], v[one], decay[one], strength[one], state.dtype)
            state[slot] = last
        return round_to(y, qkv.dtype)
    if method == "chunkwise":
        y, last = chunkwise(f64(state), q, k, v, decay, strength, chunk, state.dtype)
    else:
        y, last = recurrence(f64(state), q, k, v, decay, strength, state.dtype)
    state[...] = last
    return round_to(y, qkv.dtype)


# -- a layer's step --------------------------------------------------------------------------------------------------


def _step(
    qkv: Spec,
    z: Spec,
    alpha: Spec,
    beta: Spec,
    conv_state: Spec,
    state: Spec,
    slots: Spec,
    conv_weight: Spec,
    A_log: Spec,
    dt_bias: Spec,
    norm_weight: Spec,
    Hk: int,
    eps: float,
) -> Spec:
    check.alike(qkv=qkv, z=z, alpha=alpha, beta=beta)
    check.floating(conv_weight=conv_weight, A_log=A_log, dt_bias=dt_bias, norm_weight=norm_weight)
    check.dtype("float32", state=state)
    if conv_state.dtype not in ("float32", qkv.dtype):
        check.dtype(qkv.dtype, conv_state=conv_state)
    check.eps(eps)
    check.positive(Hk=Hk)
    check.axes("[S, Hv, Dv, Dk]", 4, state=state)
    check.filled(state=state)
    S, Hv, Dv, Dk = state.shape
    if Hv % Hk:
        raise InvalidArgument(f"Hk is {Hk}, expected a divisor of {Hv} (Hv)")
    check.axes("[B, C]", 2, qkv=qkv)
    B, C = qkv.shape[0], 2 * Hk * Dk + Hv * Dv
    check.shape((B, C), "B, 2 Hk Dk + Hv Dv", qkv=qkv)
    check.shape((B, Hv, Dv), "B, Hv, Dv", z=z)
    check.shape((B, Hv), "B, Hv", alpha=alpha, beta=beta)
    _slots(slots, B)
    check.axes("[C, W]", 2, conv_weight=conv_weight)
    check.filled(0, conv_weight=conv_weight)
    W = conv_weight.shape[1]
    check.shape((C, W), "C, W", conv_weight=conv_weight)
    check.shape((S, W - 1, C), "slots of state, W - 1, C", conv_state=conv_state)
    check.shape((Hv,), "Hv", A_log=A_log, dt_bias=dt_bias)
    check.shape((Dv,), "Dv", norm_weight=norm_weight)
    return z


@op(infer=_step, check=_check_slots, writes=("conv_state", "state"))
def gated_delta_step(
    qkv: Array,
    z: Array,
    alpha: Array,
    beta: Array,
    conv_state: Array,
    state: Array,
    slots: Array,
    conv_weight: Array,
    A_log: Array,
    dt_bias: Array,
    norm_weight: Array,
    Hk: int,
    eps: float = 1e-6,
) -> Array:
    """One token of B sequences through all of a layer between its projections → [B, Hv, Dv].

    conv1d_causal → conv1d_state_update → rms_norm_qk → gdn_decay_beta → gated_delta_net → gated_rms_norm(eps), each
    rounded as on its own. qkv [B, 2 Hk Dk + Hv Dv], z [B, Hv, Dv], alpha, beta [B, Hv]; conv_state [S, W − 1, C] and
    state float32 [S, Hv, Dv, Dk] move on at slots int32 [B]; conv_weight [C, W], A_log, dt_bias [Hv], norm_weight [Dv].
    """
    Hv, Dv, Dk = state.shape[1:]
    y = conv1d_causal.body(qkv, conv_state, conv_weight, slots)
    conv1d_state_update.body(conv_state, qkv, slots)
    y = rms_norm_qk.body(y, Hk, Dk, Hk * Dk)
    g, b = gdn_decay_beta.body(alpha, beta, A_log, dt_bias)
    d = gated_delta_net.body(state, y, g, b, Hk, Hv, Dk, Dv, slots=slots)
    return gated_rms_norm.body(d, z, norm_weight, eps)
