"""Gated DeltaNet and Kimi Delta Attention: causal convolution, decay gates, and the delta rule.

Around these ops a layer runs: projections → conv1d_causal → conv1d_state_update → rms_norm_qk → gdn_decay_beta →
gated_delta_net → gated_rms_norm → output projection; `gated_delta_step` is all between the projections for one token.
State ops have three forms: T steps of one sequence with its own state; one step of B sequences with `slots` int32 [B]
into states that have a leading slot axis; and with `starts` int32 [B + 1] beside the slots the runs of B sequences (see
ragged.py).

States are float32, or bfloat16 for half the bytes. What the rule leaves is rounded to the nearest: after every token of
the recurrence, after a chunk or several of the other form. A token's output is of the state before that.

A head has one decay (Gated DeltaNet), or one for each of its Dk key channels (Kimi Delta Attention): g [T, Hv] or
[T, Hv, Dk].

A run may be *kept* instead of moving the state on: keep int32 [B] is 0 or the length of the run. Then the rows before
the convolution go behind the W − 1 rows of conv_state, which has room for K of them, [S, W − 1 + K, C], and decays and
strength into `gates` [S, K, 2, Hv], with decays of channels [S, K, Dk + 1, Hv]; `delta_commit` moves the state on by as
many of them as were accepted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.dtypes import round_to
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.elementwise import sigmoid, silu
from penstock.ops.norm import GATE_ACTS, f64, gated_rms_norm, rms_norm_qk
from penstock.ops.op import op
from penstock.ops.ragged import check_starts, runs, sequences, with_runs

# -- convolution -----------------------------------------------------------------------------------------------------


def _slots(slots: Spec | None, rows: int, starts: Spec | None = None, keep: Spec | None = None) -> None:
    check.dtype("int32", slots=slots, keep=keep)
    if starts is None:
        if keep is not None:
            raise InvalidArgument("keep goes with starts")
        check.shape((rows,), "one per row", slots=slots)
        return
    if slots is None:
        raise InvalidArgument("starts goes with slots")
    check.shape((sequences(starts),), "one per sequence", slots=slots, keep=keep)


def _check_slots(slots: Array | None, state: Array) -> None:
    if slots is not None:
        check.in_range("slots", slots, -1, state.shape[0], f"{state.shape[0]} slots")
        check.unique("slots", slots[slots >= 0])


def _check_runs(slots: Array | None, state: Array, starts: Array | None, rows: int) -> None:
    if starts is not None:
        check_starts(starts, rows)
    _check_slots(slots, state)


def _check_keep(keep: Array | None, starts: Array, room: int) -> None:
    if keep is not None:
        lengths = starts[1:] - starts[:-1]
        if ((keep != 0) & (keep != lengths)).any() or (keep > room).any():
            raise InvalidArgument(f"keep is {keep.tolist()}, expected 0 or the length of the run, at most {room}")


def slotted_runs(starts: Array, slots: Array) -> Iterator[tuple[int, int, int, int]]:
    """(b, slot, first row, row behind the last) of each run of a sequence that has a slot."""
    for b, low, high in runs(starts):
        if slots[b] >= 0:
            yield b, int(slots[b]), low, high


def _conv_state(
    state: Spec, x: Spec, slots: Spec | None, width: int | None, starts: Spec | None = None, keep: Spec | None = None
) -> None:
    """state [W − 1, C] or [S, W − 1, C], or with room for kept rows [S, W − 1 + K, C]; float32 or x's dtype."""
    check.floating(x=x)
    check.axes("[T, C]", 2, x=x)
    check.filled(x=x)
    lead = 0 if slots is None else 1
    check.axes("[S, W - 1, C]" if lead else "[W - 1, C]", 2 + lead, state=state)
    if state.dtype not in ("float32", x.dtype):
        check.dtype(x.dtype, state=state)
    taps = state.shape[lead] if width is None or (lead and state.shape[lead] >= width) else width - 1
    check.shape((*state.shape[:lead], taps, x.shape[1]), "taps - 1 and channels", state=state)
    _slots(slots, x.shape[0], starts, keep)


def _convolved(
    x: Spec,
    state: Spec,
    weight: Spec,
    slots: Spec | None,
    starts: Spec | None,
    act: str,
    key_heads: int,
    key_dim: int,
) -> Spec:
    check.one_of(("silu", "none"), act=act)
    check.floating(weight=weight)
    check.axes("[C, W]", 2, weight=weight)
    check.filled(0, weight=weight)
    _conv_state(state, x, slots, weight.shape[1], starts)
    if weight.shape[0] != x.shape[1]:
        raise ShapeError(f"weight has shape {weight.shape}, expected {x.shape[1]} rows (channels of x)")
    if key_heads < 0 or key_dim < 0 or 2 * key_heads * key_dim > x.shape[1] or (key_heads > 0) != (key_dim > 0):
        raise InvalidArgument(
            f"key_heads and key_dim are {key_heads} and {key_dim}, expected both 0, or heads of q and k that fit in "
            f"{x.shape[1]} channels"
        )
    return x


@op(infer=_convolved, check=lambda x, state, slots, starts: _check_runs(slots, state, starts, len(x)))
def conv1d_causal(
    x: Array,
    state: Array,
    weight: Array,
    slots: Array | None = None,
    starts: Array | None = None,
    act: str = "silu",
    key_heads: int = 0,
    key_dim: int = 0,
) -> Array:
    """silu(Σ_j seq[t + j] · weight[:, j]) per channel, seq = state followed by x: tap W − 1 meets the current token.

    x [T, C], state [W − 1, C], weight [C, W]; or x [B, C], state [S, W − 1, C], slots int32 [B], one step each → like
    x. With starts x [T, C] has the runs of B sequences. Slot −1: 0, and no state moves, here and below. Reads the state
    only: `conv1d_state_update` moves it on. act "none": the sum itself. With key_heads the result, rounded, is that of
    rms_norm_qk: q and k in front, so many heads of key_dim channels each.
    """
    taps = f64(weight).T  # [W, C]
    starts = with_runs(slots, starts)
    if starts is not None and slots is not None:
        y = np.zeros(x.shape)
        for _, slot, low, high in slotted_runs(starts, slots):
            seq = np.concatenate([f64(state[slot, : len(taps) - 1]), f64(x[low:high])])
            y[low:high] = sum(seq[j : j + high - low] * taps[j] for j in range(len(taps)))
    elif slots is None:
        seq = np.concatenate([f64(state), f64(x)])
        y = sum(seq[j : j + len(x)] * taps[j] for j in range(len(taps)))
    else:
        seq = np.concatenate([f64(state[slots, : len(taps) - 1]), f64(x)[:, None]], axis=1)  # [B, W, C]
        y = sum(seq[:, j] * taps[j] for j in range(len(taps)))
    made = round_to(silu(np.asarray(y)) if act == "silu" else np.asarray(y), x.dtype)
    return rms_norm_qk.body(made, key_heads, key_dim, key_heads * key_dim) if key_heads else made


def _updated(
    state: Spec, x: Spec, slots: Spec | None, starts: Spec | None, keep: Spec | None, width: int | None
) -> None:
    _conv_state(state, x, slots, width, starts, keep)
    if keep is not None and width is None:
        raise InvalidArgument("keep goes with width (taps of the convolution)")


def _check_update(
    state: Array, x: Array, slots: Array | None, starts: Array | None, keep: Array | None, width: int | None
) -> None:
    _check_runs(slots, state, starts, len(x))
    if starts is not None and width is not None:
        _check_keep(keep, starts, state.shape[1] - width + 1)


@op(infer=_updated, check=_check_update, writes=("state",))
def conv1d_state_update(
    state: Array,
    x: Array,
    slots: Array | None = None,
    starts: Array | None = None,
    keep: Array | None = None,
    width: int | None = None,
) -> None:
    """state ← the last W − 1 rows of state followed by x. Shapes as in `conv1d_causal`; run it after that op.

    With the width W of the convolution the state may have more rows, of which the first W − 1 count; with keep int32
    [B] beside it, runs that are kept go behind these instead.
    """
    starts = with_runs(slots, starts)
    rows = state.shape[-2] if width is None else width - 1
    if starts is not None and slots is not None:
        for b, slot, low, high in slotted_runs(starts, slots):
            new = x[low:high].astype(state.dtype)
            if keep is not None and keep[b]:
                state[slot, rows : rows + len(new)] = new
            else:
                state[slot, :rows] = np.concatenate([state[slot, :rows], new])[len(new) :]
    elif slots is None:
        state[...] = np.concatenate([state, x.astype(state.dtype)])[len(x) :]
    elif rows:
        state[slots, :rows] = np.concatenate([state[slots, 1:rows], x.astype(state.dtype)[:, None]], axis=1)


def _conv_committed(state: Spec, slots: Spec, accepted: Spec, width: int) -> None:
    check.floating(state=state)
    check.dtype("int32", slots=slots, accepted=accepted)
    check.axes("[S, W - 1 + K, C]", 3, state=state)
    check.positive(width=width)
    if state.shape[1] < width - 1:
        raise ShapeError(f"state has shape {state.shape}, expected at least {width - 1} rows (width - 1)")
    check.axes("[B]", 1, slots=slots)
    check.shape(slots.shape, "as slots", accepted=accepted)


def _check_conv_commit(state: Array, slots: Array, accepted: Array, width: int) -> None:
    _check_slots(slots, state)
    room = state.shape[1] - width + 1
    check.in_range("accepted", accepted, 0, room + 1, f"{room} rows can be kept")


@op(infer=_conv_committed, check=_check_conv_commit, writes=("state",))
def conv1d_commit(state: Array, slots: Array, accepted: Array, width: int) -> None:
    """Moves the rows of convolutions of W = width taps on by the first accepted[b] that were kept at slots[b] (−1:
    none): what conv1d_state_update does with these rows. state [S, W − 1 + K, C]; `delta_commit` does it with all else.
    """
    for slot, count in zip(slots.tolist(), accepted.tolist(), strict=True):
        if slot >= 0:
            state[slot, : width - 1] = state[slot, count : count + width - 1].copy()


# -- gates -----------------------------------------------------------------------------------------------------------


def _gates(alpha: Spec, beta: Spec, A_log: Spec, dt_bias: Spec) -> tuple[Spec, Spec]:
    check.alike(alpha=alpha, beta=beta)
    check.floating(A_log=A_log, dt_bias=dt_bias)
    check.axes("[T, Hv] or [T, Hv, D]", 2, 3, alpha=alpha)
    check.filled(alpha=alpha)
    check.shape(alpha.shape[:2], "as alpha", beta=beta)
    check.shape(alpha.shape[1:2], "one per value head", A_log=A_log)
    check.shape(alpha.shape[1:], "one per value head" if len(alpha.shape) == 2 else "as alpha", dt_bias=dt_bias)
    return Spec(alpha.shape, "float32"), Spec(beta.shape, "float32")


@op(infer=_gates)
def gdn_decay_beta(alpha: Array, beta: Array, A_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """g = exp(−exp(A_log) · softplus(alpha + dt_bias)), b = sigmoid(beta): decay and write strength, both in [0, 1].

    alpha, beta [T, Hv], A_log, dt_bias [Hv] → two float32 [T, Hv]. softplus(z) = max(z, 0) + log1p(exp(−|z|)).
    A decay for each of D channels: alpha and g [T, Hv, D], dt_bias [Hv, D].
    """
    z = f64(alpha) + f64(dt_bias)
    softplus = np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))
    g = np.exp(-np.exp(f64(A_log)).reshape(-1, *[1] * (alpha.ndim - 2)) * softplus)
    return g.astype(np.float32), sigmoid(f64(beta)).astype(np.float32)


# -- delta rule ------------------------------------------------------------------------------------------------------

METHODS = ("auto", "step", "sequential", "chunkwise")
CHUNK = 16


def split_heads(qkv: Array, Hk: int, Hv: int, Dk: int, Dv: int) -> tuple[Array, Array, Array]:
    """Rows q | k | v → float64 q, k [T, Hv, Dk] (each key head repeated for its value heads) and v [T, Hv, Dv]."""
    T, keys = len(qkv), Hk * Dk
    q, k = (f64(qkv[:, i * keys : (i + 1) * keys]).reshape(T, Hk, Dk).repeat(Hv // Hk, axis=1) for i in (0, 1))
    return q, k, f64(qkv[:, 2 * keys :]).reshape(T, Hv, Dv)


def _columns_of(g: Array) -> Array:
    """Decays of a state's columns, [T, Hv, 1] or [T, Hv, Dk]."""
    return g[..., None] if g.ndim == 2 else g


def recurrence(
    S: Array, q: Array, k: Array, v: Array, g: Array, b: Array, kept: np.dtype | None = None
) -> tuple[Array, Array]:
    """The delta rule token by token in float64; returns outputs [T, Hv, Dv] and the last state.

    `kept` rounds the state after each token, so that a sequence may be cut into calls anywhere without changing a bit;
    a token's output is of the state before it is rounded.
    """
    y, g = np.empty(v.shape), _columns_of(g)
    for t in range(len(q)):
        S = g[t][:, None, :] * S
        memory = np.einsum("hvk,hk->hv", S, k[t])
        S = S + ((v[t] - memory) * b[t, :, None])[:, :, None] * k[t][:, None, :]
        y[t] = np.einsum("hvk,hk->hv", S, q[t])
        S = S if kept is None else f64(round_to(S, kept))
    return y, S


def chunkwise(
    S: Array, q: Array, k: Array, v: Array, g: Array, b: Array, chunk: int, kept: np.dtype | None = None
) -> tuple[Array, Array]:
    """The same by chunks of tokens: small matrix products and one triangular solve per chunk, float64.

    With L the running sum of ln(max(g, 1e-30)), γ_l = exp(L[l]) and Γ[l, i] = exp(L[l] − L[i]), numbers or one for each
    channel of k:
        (I + A) U = R,  A[l, i] = b_l (Γ[l, i] k_i)·k_l (i < l),  R_l = b_l (v_l − S (γ_l k_l))
        y_l = S (γ_l q_l) + Σ_{i ≤ l} (Γ[l, i] k_i)·q_l U_i;   S ← γ_last S + Σ_i U_i ⊗ (Γ[last, i] k_i)
    """
    y, g = np.empty(v.shape), _columns_of(g)
    for start in range(0, len(q), chunk):
        rows = slice(start, min(start + chunk, len(q)))
        Q, K, V = (x[rows].swapaxes(0, 1) for x in (q, k, v))  # [Hv, c, ·]
        L = np.cumsum(np.log(np.maximum(g[rows], 1e-30)), axis=0).swapaxes(0, 1)  # [Hv, c, 1 or Dk]
        beta, c = b[rows].T[..., None], L.shape[1]
        gamma, ratio = np.exp(L), np.exp(np.minimum(L[:, :, None] - L[:, None], 0))  # ratio [Hv, c, c, 1 or Dk]
        A = beta * np.tril(_decayed_products(K, K, ratio), -1)
        R = beta * (V - (gamma * K) @ S.swapaxes(1, 2))
        U = np.linalg.solve(np.eye(c) + A, R)
        y[rows] = ((gamma * Q) @ S.swapaxes(1, 2) + np.tril(_decayed_products(Q, K, ratio)) @ U).swapaxes(0, 1)
        S = gamma[:, -1:] * S + U.swapaxes(1, 2) @ (ratio[:, -1] * K)
        S = S if kept is None else f64(round_to(S, kept))
    return y, S


def _decayed_products(x: Array, k: Array, ratio: Array) -> Array:
    """(ratio[h, l, i] k[h, i]) · x[h, l] → [Hv, c, c]; ratio has one number or one for each channel."""
    if ratio.shape[-1] == 1:
        return ratio[..., 0] * (x @ k.swapaxes(1, 2))
    return np.einsum("hlk,hik,hlik->hli", x, k, ratio)


def _state_dtype(state: Spec) -> None:
    if state.dtype != "bfloat16":
        check.dtype("float32", state=state)


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
    starts: Spec | None,
    keep: Spec | None,
    gates: Spec | None,
) -> Spec:
    check.floating(qkv=qkv)
    _state_dtype(state)
    check.dtype("float32", g=g, b=b)
    check.positive(Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv, chunk=chunk)
    check.one_of(METHODS, method=method)
    if Hv % Hk:
        raise InvalidArgument(f"Hv is {Hv}, expected a multiple of {Hk} (Hk)")
    check.axes("[T, 2 Hk Dk + Hv Dv]", 2, qkv=qkv)
    check.shape((qkv.shape[0], 2 * Hk * Dk + Hv * Dv), "T, 2 Hk Dk + Hv Dv", qkv=qkv)
    by_channel = len(g.shape) == 3
    check.shape((qkv.shape[0], Hv, Dk) if by_channel else (qkv.shape[0], Hv), "T, Hv" + ", Dk" * by_channel, g=g)
    check.shape((qkv.shape[0], Hv), "T, Hv", b=b)
    _slots(slots, qkv.shape[0], starts, keep)
    if (keep is None) != (gates is None):
        raise InvalidArgument("keep and gates go together")
    check.dtype("float32", gates=gates)
    check.axes("[Hv, Dv, Dk]" if slots is None else "[S, Hv, Dv, Dk]", 3 if slots is None else 4, state=state)
    lead = () if slots is None else state.shape[:1]
    check.shape((*lead, Hv, Dv, Dk), "Hv, Dv, Dk", state=state)
    check.axes("[S, K, 2, Hv]", 4, gates=gates)
    if gates is not None:
        _gates_shape(gates, gates.shape[1], state, Dk + 1 if by_channel else 2)
    return Spec((qkv.shape[0], Hv, Dv), qkv.dtype)


def _gates_shape(gates: Spec, K: int, state: Spec, rows: int) -> None:
    """Rows of a token are its decay, or decays of channels, and its strength."""
    check.shape((state.shape[0], K, rows, state.shape[1]), f"slots of state, K, {rows}, Hv", gates=gates)


def _check_delta(
    state: Array, qkv: Array, slots: Array | None, starts: Array | None, keep: Array | None, gates: Array | None
) -> None:
    _check_runs(slots, state, starts, len(qkv))
    if starts is not None and gates is not None:
        _check_keep(keep, starts, gates.shape[1])


@op(infer=_delta, check=_check_delta, writes=("state", "gates"))
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
    starts: Array | None = None,
    keep: Array | None = None,
    gates: Array | None = None,
) -> Array:
    """The gated delta rule, for each token and value head h with key head h // (Hv / Hk):

        S ← g·S;  δ = (v − S·k)·b;  S ← S + δ ⊗ k;  y = S·q
    state [Hv, Dv, Dk], float32 or bfloat16, is moved on; qkv [T, 2 Hk Dk + Hv Dv] holds q | k | v; g, b float32 [T, Hv]
    → [T, Hv, Dv]. With g [T, Hv, Dk] each key channel, a column of S, has a decay of its own. method "step" or
    "sequential" is the recurrence, "chunkwise" its form by chunks of `chunk` tokens, "auto" leaves the choice to the
    backend. With slots int32 [B], one step of B sequences whose states are state[slots], [S, Hv, Dv, Dk]; with starts
    int32 [B + 1] their runs. Runs that are kept (keep int32 [B], see above) leave the state as it is and put g and b
    into gates float32 [S, K, 2 or Dk + 1, Hv]; they are computed by the recurrence.
    """
    q, k, v = split_heads(qkv, Hk, Hv, Dk, Dv)
    decay, strength = f64(g), f64(b)
    starts = with_runs(slots, starts)
    if starts is not None and slots is not None:
        y = np.zeros(v.shape)
        for n, slot, low, high in slotted_runs(starts, slots):
            run, kept = slice(low, high), keep is not None and bool(keep[n])
            parts = (f64(state[slot]), q[run], k[run], v[run], decay[run], strength[run])
            if method == "chunkwise" and not kept:
                y[run], last = chunkwise(*parts, chunk, state.dtype)
            else:
                y[run], last = recurrence(*parts, state.dtype)
            if kept and gates is not None:
                gates[slot, : high - low, :-1] = _columns_of(g[run]).swapaxes(1, 2)
                gates[slot, : high - low, -1] = b[run]
            else:
                state[slot] = last
        return round_to(y, qkv.dtype)
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


def _committed(
    conv_state: Spec, state: Spec, gates: Spec, slots: Spec, accepted: Spec, conv_weight: Spec, Hk: int
) -> None:
    check.floating(conv_state=conv_state, conv_weight=conv_weight)
    _state_dtype(state)
    check.dtype("float32", gates=gates)
    check.dtype("int32", slots=slots, accepted=accepted)
    check.positive(Hk=Hk)
    check.axes("[S, Hv, Dv, Dk]", 4, state=state)
    check.axes("[S, K, 2, Hv]", 4, gates=gates)
    check.axes("[C, W]", 2, conv_weight=conv_weight)
    check.filled(0, conv_weight=conv_weight)
    S, Hv, Dv, Dk = state.shape
    if Hv % Hk:
        raise InvalidArgument(f"Hk is {Hk}, expected a divisor of {Hv} (Hv)")
    K, C = gates.shape[1], 2 * Hk * Dk + Hv * Dv
    W = conv_weight.shape[1]
    check.shape((C, W), "C, W", conv_weight=conv_weight)
    _gates_shape(gates, K, state, Dk + 1 if gates.shape[2] == Dk + 1 else 2)
    check.shape((S, W - 1 + K, C), "slots of state, W - 1 + K, C", conv_state=conv_state)
    check.axes("[B]", 1, slots=slots)
    check.shape(slots.shape, "as slots", accepted=accepted)


def _check_commit(state: Array, gates: Array, slots: Array, accepted: Array) -> None:
    check.in_range("slots", slots, -1, state.shape[0], f"{state.shape[0]} slots")
    check.unique("slots", slots[slots >= 0])
    check.in_range("accepted", accepted, 0, gates.shape[1] + 1, f"{gates.shape[1]} tokens can be kept")


@op(infer=_committed, check=_check_commit, writes=("conv_state", "state"))
def delta_commit(
    conv_state: Array, state: Array, gates: Array, slots: Array, accepted: Array, conv_weight: Array, Hk: int
) -> None:
    """Moves states on by the first accepted[b] tokens of the runs that were kept at slots[b] (−1: none).

    conv_state [S, W − 1 + K, C] holds W − 1 rows and then the kept ones, gates float32 [S, K, 2, Hv] their decay and
    strength, or [S, K, Dk + 1, Hv] their decays by channel and strength. What conv1d_causal, conv1d_state_update,
    rms_norm_qk and gated_delta_net do with these tokens one by one, each rounded to conv_state's dtype.
    """
    Hv, Dv, Dk = state.shape[1:]
    W = conv_weight.shape[1]
    for slot, count in zip(slots.tolist(), accepted.tolist(), strict=True):
        if slot < 0 or count == 0:
            continue
        rows = conv_state[slot]
        y = conv1d_causal.body(rows[W - 1 : W - 1 + count], rows[: W - 1], conv_weight)
        y = rms_norm_qk.body(y, Hk, Dk, Hk * Dk)
        g, b = gates[slot, :count, :-1].swapaxes(1, 2), gates[slot, :count, -1]
        gated_delta_net.body(state[slot], y, g, b, Hk, Hv, Dk, Dv, "step")
        rows[: W - 1] = rows[count : count + W - 1].copy()


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
    act: str,
) -> Spec:
    check.alike(qkv=qkv, z=z, alpha=alpha, beta=beta)
    check.one_of(GATE_ACTS, act=act)
    check.floating(conv_weight=conv_weight, A_log=A_log, dt_bias=dt_bias, norm_weight=norm_weight)
    _state_dtype(state)
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
    by_channel = (Dk,) if len(alpha.shape) == 3 else ()
    check.shape((B, Hv, *by_channel), "B, Hv" + ", Dk" * len(by_channel), alpha=alpha)
    check.shape((B, Hv), "B, Hv", beta=beta)
    _slots(slots, B)
    check.axes("[C, W]", 2, conv_weight=conv_weight)
    check.filled(0, conv_weight=conv_weight)
    W = conv_weight.shape[1]
    check.shape((C, W), "C, W", conv_weight=conv_weight)
    rows = conv_state.shape[1] if len(conv_state.shape) == 3 and conv_state.shape[1] >= W else W - 1
    check.shape((S, rows, C), "slots of state, W - 1, C", conv_state=conv_state)
    check.shape((Hv,), "Hv", A_log=A_log)
    check.shape((Hv, *by_channel), "Hv" + ", Dk" * len(by_channel), dt_bias=dt_bias)
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
    act: str = "silu",
) -> Array:
    """One token of B sequences through all of a layer between its projections → [B, Hv, Dv].

    conv1d_causal → conv1d_state_update → rms_norm_qk → gdn_decay_beta → gated_delta_net → gated_rms_norm(eps, act),
    each rounded as on its own. qkv [B, 2 Hk Dk + Hv Dv], z [B, Hv, Dv], alpha, beta [B, Hv]; conv_state [S, W − 1, C],
    or with room behind these rows, and state [S, Hv, Dv, Dk], float32 or bfloat16, move on at slots int32 [B];
    conv_weight [C, W], A_log, dt_bias [Hv], norm_weight [Dv]. With decays of channels alpha [B, Hv, Dk] and dt_bias
    [Hv, Dk].
    """
    Hv, Dv, Dk = state.shape[1:]
    y = conv1d_causal.body(qkv, conv_state, conv_weight, slots)
    conv1d_state_update.body(conv_state, qkv, slots, width=conv_weight.shape[1])
    y = rms_norm_qk.body(y, Hk, Dk, Hk * Dk)
    g, b = gdn_decay_beta.body(alpha, beta, A_log, dt_bias)
    d = gated_delta_net.body(state, y, g, b, Hk, Hv, Dk, Dv, slots=slots)
    return gated_rms_norm.body(d, z, norm_weight, eps, act)


def _verify(
    qkv: Spec,
    z: Spec,
    alpha: Spec,
    beta: Spec,
    conv_state: Spec,
    state: Spec,
    gates: Spec,
    slots: Spec,
    starts: Spec,
    keep: Spec,
    accepted: Spec,
    conv_weight: Spec,
    A_log: Spec,
    dt_bias: Spec,
    norm_weight: Spec,
    Hk: int,
    eps: float,
    act: str,
) -> Spec:
    check.alike(qkv=qkv, z=z, alpha=alpha, beta=beta)
    check.one_of(GATE_ACTS, act=act)
    check.floating(A_log=A_log, dt_bias=dt_bias, norm_weight=norm_weight)
    check.eps(eps)
    check.axes("[T, Hv]", 2, alpha=alpha)
    _committed(conv_state, state, gates, slots, accepted, conv_weight, Hk)
    if conv_state.dtype not in ("float32", qkv.dtype):
        check.dtype(qkv.dtype, conv_state=conv_state)
    Hv, Dv, _ = state.shape[1:]
    _gates_shape(gates, gates.shape[1], state, 2)
    T, C = qkv.shape[0], conv_weight.shape[0]
    check.shape((T, C), "T, 2 Hk Dk + Hv Dv", qkv=qkv)
    check.shape((T, Hv, Dv), "T, Hv, Dv", z=z)
    check.shape((T, Hv), "T, Hv", alpha=alpha, beta=beta)
    check.shape((sequences(starts),), "one per sequence", slots=slots)
    check.dtype("int32", keep=keep)
    check.shape(slots.shape, "as slots", keep=keep)
    check.shape((Hv,), "Hv", A_log=A_log, dt_bias=dt_bias)
    check.shape((Dv,), "Dv", norm_weight=norm_weight)
    return z


def _check_verify(
    qkv: Array, state: Array, gates: Array, slots: Array, starts: Array, keep: Array, accepted: Array
) -> None:
    check_starts(starts, len(qkv))
    _check_commit(state, gates, slots, accepted)
    _check_keep(keep, starts, gates.shape[1])


@op(infer=_verify, check=_check_verify, writes=("conv_state", "state", "gates"))
def gated_delta_verify(
    qkv: Array,
    z: Array,
    alpha: Array,
    beta: Array,
    conv_state: Array,
    state: Array,
    gates: Array,
    slots: Array,
    starts: Array,
    keep: Array,
    accepted: Array,
    conv_weight: Array,
    A_log: Array,
    dt_bias: Array,
    norm_weight: Array,
    Hk: int,
    eps: float = 1e-6,
    act: str = "silu",
) -> Array:
    """Runs of B sequences through all of a layer between its projections, behind what was accepted of the runs that
    were kept before → [T, Hv, Dv].

    delta_commit → conv1d_causal → conv1d_state_update → rms_norm_qk → gdn_decay_beta → gated_delta_net →
    gated_rms_norm(eps, act), each rounded as on its own; shapes as in `gated_delta_step`, with T rows in place of B,
    conv_state [S, W − 1 + K, C] and gates float32 [S, K, 2, Hv]; starts int32 [B + 1], keep and accepted int32 [B].
    """
    Hv, Dv, Dk = state.shape[1:]
    delta_commit.body(conv_state, state, gates, slots, accepted, conv_weight, Hk)
    y = conv1d_causal.body(qkv, conv_state, conv_weight, slots, starts)
    conv1d_state_update.body(conv_state, qkv, slots, starts, keep, conv_weight.shape[1])
    y = rms_norm_qk.body(y, Hk, Dk, Hk * Dk)
    g, b = gdn_decay_beta.body(alpha, beta, A_log, dt_bias)
    d = gated_delta_net.body(state, y, g, b, Hk, Hv, Dk, Dv, "step", CHUNK, slots, starts, keep, gates)
    return gated_rms_norm.body(d, z, norm_weight, eps, act)
