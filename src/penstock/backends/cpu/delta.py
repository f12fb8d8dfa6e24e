"""The gated delta net on the CPU: causal convolution, gates, and the delta rule in two arrangements.

`_step_heads` keeps the state's rows as they are: one pass over a row decays it, reads it with k and q and adds the
correction, so that a decode step moves the state through the cores once. `_lane_heads`, for many tokens, turns the
state around: 32 value rows lie in the lanes of two vectors and one fused pass over Dk serves a token, at three
multiply-adds per element of the state. That is what the chunkwise form needs as well, without its triangular solves
and ratios of decays. A head has one decay, or one for each key channel: the latter are multiplied into the state as
they come.
"""

import functools
from collections.abc import Iterator

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from penstock import ops
from penstock.backends.cpu._formats import FLOAT32, fmt, frozen
from penstock.backends.cpu._math import exp32, sigmoid32, silu32, softplus32
from penstock.backends.cpu._rows import (
    bytes_in,
    bytes_out,
    copy_bytes,
    itemsize,
    load_block,
    load_bytes,
    store_block,
    store_bytes,
)
from penstock.backends.cpu._simd import F32, I64, V16F, _Code, _const, at
from penstock.backends.cpu._threads import run, threads
from penstock.backends.cpu.compile import FUSED_MULTIPLY_ADD, SUM_IN_ANY_ORDER, compiles, keep_alive, njit
from penstock.backends.cpu.norm import gated_rms_norm, qk_rows, rms_norm_qk
from penstock.errors import BackendError
from penstock.ops.delta import slotted_runs
from penstock.ops.op import kernel
from penstock.ops.ragged import equal_runs, with_runs

_ONE_SEQUENCE = np.full(1, -1, np.int32)  # stands for slots where the state has no slot axis
_ONE_SEQUENCE.flags.writeable = False


def _check_state(op: str, state: np.ndarray) -> None:
    if state.dtype != np.float32:
        raise BackendError(f"{op}: state is {state.dtype}, expected float32: the CPU has no other states")


def _slots(slots: np.ndarray | None) -> np.ndarray:
    return _ONE_SEQUENCE if slots is None else frozen(slots)


def _parts(starts: np.ndarray, slots: np.ndarray, out: np.ndarray) -> Iterator[tuple[slice, np.ndarray | int]]:
    """Rows that one call computes: neighbouring runs of one token with their slots, or a longer run with its slot.

    Rows without a sequence or a slot are set to 0.
    """
    done = 0
    for first, count, length in equal_runs(starts):
        low, own = int(starts[first]), slots[first : first + count]
        out[done:low] = 0
        if length == 1 and own.min() >= 0:
            yield slice(low, low + count), own
        else:
            for n, slot in enumerate(own.tolist()):
                rows = slice(low + n * length, low + (n + 1) * length)
                if slot < 0:
                    out[rows] = 0
                else:
                    yield rows, own[n : n + 1] if length == 1 else slot
        done = low + count * length
    out[done:] = 0


# -- convolution -----------------------------------------------------------------------------------------------------

_CHANNELS, _TOKENS = 4096, 32  # a task of the convolution: its rows and taps stay in the second-level cache
_SERIAL_CONV = 1 << 14  # outputs up to which one thread is faster than waking the others


@kernel(ops.conv1d_causal, device="cpu")
def conv1d_causal(
    x: np.ndarray,
    state: np.ndarray,
    weight: np.ndarray,
    slots: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    act: str = "silu",
    key_heads: int = 0,
    key_dim: int = 0,
    *,
    out: np.ndarray,
) -> None:
    if key_heads:
        conv1d_causal(x, state, weight, slots, starts, act, out=out)
        rms_norm_qk(out, key_heads, key_dim, key_heads * key_dim, None, 1e-6, "sum", out=out)
        return
    starts = with_runs(slots, starts)
    if starts is not None and slots is not None:
        kept = weight.shape[1] - 1
        for rows, own in _parts(starts, slots, out):
            if isinstance(own, int):
                conv1d_causal(x[rows], state[own, :kept], weight, act=act, out=out[rows])
            else:
                conv1d_causal(x[rows], state, weight, own, act=act, out=out[rows])
        return
    if out.size == 0:
        return
    args = (bytes_in(x), bytes_in(state), frozen(weight.ravel().view(np.uint8)), _slots(slots), state.shape[-2])
    args = (*args, fmt(x), fmt(state), fmt(weight), act == "silu", bytes_out(out))
    if out.size <= _SERIAL_CONV:
        _convolve_some(*args, 0, len(x), 0, x.shape[1])
    else:
        run(_convolve, *args)


# conv1d    out[t, c] = silu(sum_j seq[t + j, c] * weight[c, j]), seq = state, x; by slots: seq = state[slots[t]], x[t];
#           gated false: the sum itself
# shapes    rows of any format as bytes: x, out [T, C], state [(S *) depth, C], its first W - 1 count; weight the bytes
#           of [C, W]
# threads   prange over blocks of rows and channels
# bytes     2 * T * C * itemsize, the state and the weights once for each block of rows
# limits    none
@njit(parallel=True)
def _convolve(x, state, weight, slots, depth, x_fmt, state_fmt, weight_fmt, gated, out):
    T, C = x.shape[0], x.shape[1] // itemsize(x_fmt)
    across, down = (C + _CHANNELS - 1) // _CHANNELS, (T + _TOKENS - 1) // _TOKENS
    for task in prange(across * down):
        t, c = _TOKENS * (task // across), _CHANNELS * (task % across)
        tokens, channels = min(T, t + _TOKENS), min(C, c + _CHANNELS)
        _convolve_some(x, state, weight, slots, depth, x_fmt, state_fmt, weight_fmt, gated, out, t, tokens, c, channels)


@njit
def _convolve_some(x, state, weight, slots, depth, x_fmt, state_fmt, weight_fmt, gated, out, t0, t1, c0, c1):
    xs, ss, ws = itemsize(x_fmt), itemsize(state_fmt), itemsize(weight_fmt)
    C = x.shape[1] // xs
    W = weight.size // (C * ws)
    width = min(_CHANNELS, c1 - c0)
    taps, seen = np.empty((W, width), np.float32), np.empty((W, width), np.float32)
    flat, y = np.empty(W * width, np.float32), np.empty(width, np.float32)
    for first in range(c0, c1, _CHANNELS):
        n = min(_CHANNELS, c1 - first)
        part = weight[first * W * ws : (first + n) * W * ws]
        if weight_fmt == FLOAT32:
            _turn_taps(part.view(np.float32), taps, n)
        else:
            load_bytes(part, weight_fmt, flat)
            _turn_taps(flat, taps, n)
        for t in range(t0, t1):
            # row r of state followed by x lies in seen[r % W]
            if slots[0] >= 0:
                for j in range(W - 1):
                    row = state[np.int64(slots[t]) * depth + j]
                    load_bytes(row[first * ss : (first + n) * ss], state_fmt, seen[(t + j) % W])
            elif t == t0:
                for r in range(t, t + W - 1):
                    if r < W - 1:
                        load_bytes(state[r, first * ss : (first + n) * ss], state_fmt, seen[r % W])
                    else:
                        load_bytes(x[r - W + 1, first * xs : (first + n) * xs], x_fmt, seen[r % W])
            load_bytes(x[t, first * xs : (first + n) * xs], x_fmt, seen[(t + W - 1) % W])
            result = out[t, first * xs : (first + n) * xs]
            if x_fmt == FLOAT32:
                _convolve_row(seen, taps, t, gated, result.view(np.float32))
            else:
                _convolve_row(seen, taps, t, gated, y[:n])
                store_bytes(y, x_fmt, result)


@njit
def _turn_taps(flat, taps, n):
    W = taps.shape[0]
    if W == 4:  # four outputs of one loop vectorise, one with a stride does not
        a, b, c, d = taps[0], taps[1], taps[2], taps[3]
        for i in range(n):
            a[i], b[i], c[i], d[i] = flat[4 * i], flat[4 * i + 1], flat[4 * i + 2], flat[4 * i + 3]
    else:
        for i in range(n):
            for j in range(W):
                taps[j, i] = flat[W * i + j]


@njit(fastmath=FUSED_MULTIPLY_ADD)
def _convolve_row(seen, taps, t, gated, y):
    W = taps.shape[0]
    if W == 4 and gated:
        r0, r1, r2, r3 = seen[t % 4], seen[(t + 1) % 4], seen[(t + 2) % 4], seen[(t + 3) % 4]
        t0, t1, t2, t3 = taps[0], taps[1], taps[2], taps[3]
        for c in range(y.size):
            y[c] = silu32(r0[c] * t0[c] + r1[c] * t1[c] + r2[c] * t2[c] + r3[c] * t3[c])
    elif W == 3 and not gated:
        r0, r1, r2 = seen[t % 3], seen[(t + 1) % 3], seen[(t + 2) % 3]
        t0, t1, t2 = taps[0], taps[1], taps[2]
        for c in range(y.size):
            y[c] = r0[c] * t0[c] + r1[c] * t1[c] + r2[c] * t2[c]
    else:
        for c in range(y.size):
            y[c] = np.float32(0)
        for j in range(W):
            row, tap = seen[(t + j) % W], taps[j]
            for c in range(y.size):
                y[c] += row[c] * tap[c]
        if gated:
            for c in range(y.size):
                y[c] = silu32(y[c])


@kernel(ops.conv1d_state_update, device="cpu")
def conv1d_state_update(
    state: np.ndarray,
    x: np.ndarray,
    slots: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    keep: np.ndarray | None = None,
    width: int | None = None,
) -> None:
    if x.size == 0 or state.size == 0:
        return
    rows = state.shape[-2] if width is None else width - 1
    starts = with_runs(slots, starts)
    if starts is None or slots is None:
        _shift(bytes_in(x), _slots(slots), rows, state.shape[-2], fmt(x), fmt(state), bytes_out(state))
        return
    for b, slot, low, high in slotted_runs(starts, slots):
        if keep is not None and keep[b]:
            state[slot, rows : rows + high - low] = x[low:high]
        else:
            conv1d_state_update(state[slot, :rows], x[low:high])


# shift     state <- the last W - 1 rows of state followed by x; by slots: of state[slots[t]] followed by x[t]
# shapes    rows of any format as bytes: x [T, C]; state [(S *) depth, C], of x's format or float32, W - 1 rows count
# threads   one
# bytes     2 * (W - 1) * C * itemsize
# limits    none
@njit
def _shift(x, slots, keep, depth, x_fmt, state_fmt, state):
    T = x.shape[0]
    by_slot = slots[0] >= 0
    rows = 1 if by_slot else T  # new rows of each sequence
    for s in range(slots.size):
        base = np.int64(slots[s]) * depth if by_slot else np.int64(0)
        for i in range(keep):
            row = state[base + i]
            source = i + rows - keep  # the row of x that becomes row i, if there is one
            if source < 0:
                copy_bytes(state[base + i + rows], row)
            elif x_fmt == state_fmt:
                copy_bytes(x[s + source], row)
            else:
                load_bytes(x[s + source], x_fmt, row.view(np.float32))


@kernel(ops.conv1d_commit, device="cpu")
def conv1d_commit(state: np.ndarray, slots: np.ndarray, accepted: np.ndarray, width: int) -> None:
    ops.conv1d_commit.body(state, slots, accepted, width)  # a few rows, which NumPy copies


# -- gates -----------------------------------------------------------------------------------------------------------


@kernel(ops.gdn_decay_beta, device="cpu")
def gdn_decay_beta(alpha: np.ndarray, beta: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray, *, out) -> None:
    g, b = out
    if not g.size:
        return
    A_log, dt_bias = (frozen(v.astype(np.float32, copy=False)) for v in (A_log, dt_bias))
    if alpha.ndim == 3:
        T, Hv, D = alpha.shape
        rows = (bytes_in(alpha.reshape(T, Hv * D)), bytes_in(beta), A_log, dt_bias, fmt(alpha), g, b)
        if g.size <= _SERIAL_DECAY:
            _decay_some(*rows, 0, T)
        else:
            run(_decay_channels, *rows)
    else:
        _decay_beta(bytes_in(alpha), bytes_in(beta), A_log, dt_bias, fmt(alpha), g, b)


# decay     g = exp(-exp(A_log) * softplus(alpha + dt_bias)), b = sigmoid(beta)
# shapes    alpha, beta [T, Hv]: rows of one format as bytes; A_log, dt_bias [Hv], g, b [T, Hv] float32
# threads   one: T * Hv is small
# bytes     T * Hv * (2 * itemsize + 8)
# limits    none
@njit
def _decay_beta(alpha, beta, A_log, dt_bias, fmt, g, b):
    T, Hv = g.shape
    rows = max(1, min(T, 512 // Hv))  # taken as one long row, which vectorises better than short ones
    rate, bias, x = np.empty(rows * Hv, np.float32), np.empty(rows * Hv, np.float32), np.empty(rows * Hv, np.float32)
    for i in range(rows):
        for h in range(Hv):
            rate[i * Hv + h] = -exp32(A_log[h])
            bias[i * Hv + h] = dt_bias[h]
    width = Hv * itemsize(fmt)
    alpha, beta, decays, strengths = alpha.reshape(-1), beta.reshape(-1), g.reshape(-1), b.reshape(-1)
    for first in range(0, T, rows):
        stop = min(T, first + rows)
        load_bytes(alpha[first * width : stop * width], fmt, x)
        _decay_row(x, rate, bias, decays[first * Hv : stop * Hv])
        load_bytes(beta[first * width : stop * width], fmt, x)
        _sigmoid_row(x, strengths[first * Hv : stop * Hv])


# decay     the same with a decay for each of D channels
# shapes    alpha [T, Hv D], beta [T, Hv]: rows of one format as bytes; A_log [Hv], dt_bias [Hv, D], g [T, Hv, D],
#           b [T, Hv] float32
# threads   prange over tokens
# bytes     T * Hv * (D + 1) * (itemsize + 4)
# limits    none
@njit(parallel=True)
def _decay_channels(alpha, beta, A_log, dt_bias, fmt, g, b):
    for t in prange(g.shape[0]):
        _decay_some(alpha, beta, A_log, dt_bias, fmt, g, b, t, t + 1)


@njit
def _decay_some(alpha, beta, A_log, dt_bias, fmt, g, b, start, stop):
    _, Hv, D = g.shape
    width = D * itemsize(fmt)
    x, strengths = np.empty(D, np.float32), np.empty(Hv, np.float32)
    for t in range(start, stop):
        for h in range(Hv):
            load_bytes(alpha[t, h * width : (h + 1) * width], fmt, x)
            _decay_head(x, -exp32(A_log[h]), dt_bias[h], g[t, h])
        load_bytes(beta[t], fmt, strengths)
        _sigmoid_row(strengths, b[t])


@njit
def _decay_head(x, rate, bias, out):
    for i in range(out.size):
        out[i] = exp32(rate * softplus32(x[i] + bias[i]))


@njit
def _decay_row(x, rate, bias, out):
    for i in range(out.size):
        out[i] = exp32(rate[i] * softplus32(x[i] + bias[i]))


@njit
def _sigmoid_row(x, out):
    for i in range(out.size):
        out[i] = sigmoid32(x[i])


# -- delta rule ------------------------------------------------------------------------------------------------------

_BLOCK = 8  # tokens that `_step_heads` gathers while a row of the state is in the first-level cache
_SPAN = 128  # tokens whose q, k, v a task of `_lane_heads` holds at once
_WIDTH = 32  # value rows in lanes
_GATES = 10  # numbers for each pair of tokens
_LANES_FROM = 8  # tokens from which turning the state around pays
_SERIAL_DECAY = 1 << 13  # decays of channels up to which one thread is faster than waking the others
_SERIAL_DELTA = 1 << 15  # elements of the state times tokens up to which one thread is faster than waking the others
_VECTORS = 8  # of 16 numbers: rows of the state that stay in registers have 128
_COMPILED = compiles()
_FLOAT = types.CPointer(types.float32)
_SMALL, _LARGE = 2.0**-16, 2.0**16  # bounds of the decay that `_lane_heads` leaves out of its state


@kernel(ops.gated_delta_net, device="cpu")
def gated_delta_net(
    state: np.ndarray,
    qkv: np.ndarray,
    g: np.ndarray,
    b: np.ndarray,
    Hk: int,
    Hv: int,
    Dk: int,
    Dv: int,
    method: str = "auto",
    chunk: int = 16,
    slots: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    keep: np.ndarray | None = None,
    gates: np.ndarray | None = None,
    *,
    out: np.ndarray,
) -> None:
    _check_state("gated_delta_net", state)
    sizes = (Hk, Hv, Dk, Dv)
    starts = with_runs(slots, starts)
    if starts is not None and slots is not None and keep is not None and gates is not None:
        moving = np.where(keep > 0, np.int32(-1), slots)
        gated_delta_net(state, qkv, g, b, *sizes, method, chunk, moving, starts, out=out)
        for n, slot, low, high in slotted_runs(starts, slots):
            if keep[n]:
                own = slice(low, high)
                _step(state[slot], None, qkv[own], g[own], b[own], Hk, out[own], kept=True)
                gates[slot, : high - low, :-1] = g[own].reshape(high - low, Hv, -1).swapaxes(1, 2)
                gates[slot, : high - low, -1] = b[own]
        return
    if starts is not None and slots is not None:
        for rows, own in _parts(starts, slots, out):
            if isinstance(own, int):
                gated_delta_net(state[own], qkv[rows], g[rows], b[rows], *sizes, method, chunk, out=out[rows])
            else:
                gated_delta_net(state, qkv[rows], g[rows], b[rows], *sizes, method, chunk, own, out=out[rows])
        return
    T = len(qkv)
    wide = method == "chunkwise" or (method == "auto" and T >= _LANES_FROM)
    if T and wide and slots is None and not numba.config.DISABLE_JIT:
        rows = (bytes_in(qkv), frozen(g), frozen(b), Hk, fmt(qkv), bytes_out(out.reshape(T, Hv * Dv)))
        run(_lane_heads_by_channel if g.ndim == 3 else _lane_heads, state.reshape(-1, Dv, Dk), *rows)
    else:
        _step(state, slots, qkv, g, b, Hk, out)


def _step(state, slots, qkv, g, b, Hk: int, out, kept: bool = False) -> None:
    """Token by token; kept: the state stays as it is."""
    Hv, Dv, Dk = state.shape[-3:]
    T, by_channel = len(qkv), g.ndim == 3
    if T == 0:
        return
    if kept and T > _BLOCK:
        state, kept = state.copy(), False
    rows = (bytes_in(qkv), frozen(g), frozen(b), Hk, fmt(qkv), kept, bytes_out(out.reshape(T, Hv * Dv)))
    heads = state.reshape(-1, Dv, Dk)
    if T * Hv * Dv * Dk <= _SERIAL_DELTA:
        some = _step_some_by_channel if by_channel else _step_some
        some(heads, _slots(slots), *rows, 0, (1 if slots is None else T) * Hv)
    else:
        run(_step_heads_by_channel if by_channel else _step_heads, heads, _slots(slots), *rows)


# delta     for each token: S <- g S; d = (v - S k) b; S <- S + d k'; y = S q, from one read of S: y = g S q + d (k q)
# shapes    state float32 [(S *) Hv, Dv, Dk], written unless `kept`; qkv [T, 2 Hk Dk + Hv Dv], out [T, Hv Dv] as bytes;
#           g, b [T, Hv]
# threads   prange over sequences and heads; the arithmetic of a token does not depend on how many there are
# bytes     the state twice for each block of 8 tokens (in and out; once if kept), qkv and out once
# limits    8 tokens where the state is kept
@njit(parallel=True)
def _step_heads(state, slots, qkv, g, b, Hk, fmt, kept, out):
    for task in prange(slots.size * g.shape[1]):
        _step_some(state, slots, qkv, g, b, Hk, fmt, kept, out, task, task + 1)


@njit
def _step_some(state, slots, qkv, g, b, Hk, fmt, kept, out, start, stop):
    Hv, Dv, Dk = g.shape[1], state.shape[1], state.shape[2]
    T = 1 if slots[0] >= 0 else g.shape[0]  # tokens of each sequence
    n = min(T, _BLOCK)
    q, k = np.empty((n, Dk), np.float32), np.empty((n, Dk), np.float32)
    v, y = np.empty((n, Dv), np.float32), np.empty((n, Dv), np.float32)
    gates, row = np.empty((n, 3), np.float32), np.empty(Dk, np.float32)
    for task in range(start, stop):
        s, h = task // Hv, task % Hv
        S = state[(slots[s] if slots[0] >= 0 else 0) * Hv + h]
        for first in range(s * T, (s + 1) * T, _BLOCK):
            n = min(_BLOCK, (s + 1) * T - first)
            _load_heads(qkv, fmt, first, n, h, Hk, Hv, Dv, q, k, v)
            for i in range(n):
                gates[i, 0], gates[i, 1], gates[i, 2] = g[first + i, h], b[first + i, h], _dot(k[i], q[i])
            _step_block(S, row, q, k, v, gates, y, 0, n, not kept)
            store_block(y[:n], fmt, first, h * Dv, Dv, out)


@njit
def _load_heads(qkv, fmt, first, n, h, Hk, Hv, Dv, q, k, v):
    """q, k and v of value head h for n tokens, as float32."""
    Dk = q.shape[1]
    key_head = h // (Hv // Hk)
    load_block(qkv, fmt, first, key_head * Dk, Dk, q[:n])
    load_block(qkv, fmt, first, (Hk + key_head) * Dk, Dk, k[:n])
    load_block(qkv, fmt, first, 2 * Hk * Dk + h * Dv, Dv, v[:n])


@njit(fastmath=SUM_IN_ANY_ORDER)
def _dot(a, b):
    total = np.float32(0)
    for j in range(a.size):
        total += a[j] * b[j]
    return total


@njit
def _step_block(S, row, q, k, v, gates, y, before, n, moves):
    """A head's state S [Dv, Dk] through n tokens: behind the first `before` it is written, nothing is read of them but
    what the state becomes; behind all where it moves.
    """
    if _COMPILED and S.shape[1] == _VECTORS * 16 and S.shape[0] % 2 == 0:
        to = n if moves else before
        _row_pairs(at(S, 0), at(q, 0), at(k, 0), at(v, 0), at(gates, 0), at(y, 0), S.shape[0], before, n, to)
    else:
        _step_rows(S, row, q, k, v, gates, y, before, n, moves)


@njit(fastmath=SUM_IN_ANY_ORDER)
def _step_rows(S, row, q, k, v, gates, y, before, n, moves):
    Dv, Dk = S.shape
    for r in range(Dv):
        for j in range(Dk):
            row[j] = S[r, j]
        for i in range(n):
            with_k, with_q = np.float32(0), np.float32(0)
            for j in range(Dk):
                with_k += row[j] * k[i, j]
                with_q += row[j] * q[i, j]
            decay = gates[i, 0]
            change = (v[i, r] - decay * with_k) * gates[i, 1]
            for j in range(Dk):
                row[j] = decay * row[j] + change * k[i, j]
            y[i, r] = decay * with_q + change * gates[i, 2]
            if i + 1 == before or (moves and i + 1 == n):
                for j in range(Dk):
                    S[r, j] = row[j]


@intrinsic
def _row_pairs(typingctx, S, q, k, v, gates, y, Dv, before, n, to):
    """`_step_rows` for rows of 128, two at a time in registers; S is written behind `before` tokens and behind `to`."""
    sig = types.void(*[_FLOAT] * 6, *[types.int64] * 4)

    def codegen(context, builder, sig, args):
        code, b = _Code(builder), builder
        S, q, k, v, gates, y, Dv, before, n, to = args
        fma = code.function("llvm.fma.v16f32", V16F, V16F, V16F, V16F)
        width, each, two = 16 * _VECTORS, range(_VECTORS), range(2)

        def products(row, other):
            """16 sums that add up to the product of two rows."""
            sums = [b.fmul(row[i], other[i]) for i in two]
            for i in range(2, _VECTORS):
                sums[i % 2] = b.call(fma, [row[i], other[i], sums[i % 2]])
            return b.fadd(*sums)

        def added(one, other):
            """Of two vectors what 8 neighbours of four lanes come to: of the first, then of the second."""
            low, high = ([*range(i, i + 8), *range(16 + i, 24 + i)] for i in (0, 8))
            return b.fadd(code.shuffle(one, other, low), code.shuffle(one, other, high))

        def totals(vectors):
            """The sums of the lanes of four vectors, in the same order for each."""
            one, other = added(*vectors[:2]), added(*vectors[2:])
            low, high = ([first + i for first in (0, 8, 16, 24) for i in range(at, at + 4)] for at in (0, 4))
            found = b.fadd(code.shuffle(one, other, low), code.shuffle(one, other, high))
            for step in (2, 1):
                found = b.fadd(found, code.shuffle(found, found, [i ^ step for i in range(16)]))
            return [b.extract_element(found, ir.Constant(ir.IntType(32), 4 * i)) for i in range(4)]

        def token(r, reads):
            def moved(i, *rows):
                rows = [rows[:_VECTORS], rows[_VECTORS:]]
                at_key = b.mul(i, I64(width))
                keys = [code.load(code.at(k, b.add(at_key, I64(16 * j)), F32), V16F) for j in each]
                sums = [products(row, keys) for row in rows]
                if reads:
                    queries = [code.load(code.at(q, b.add(at_key, I64(16 * j)), F32), V16F) for j in each]
                    sums += [products(row, queries) for row in rows]
                found = totals(sums if reads else sums + sums)
                place = b.add(b.mul(i, Dv), r)
                gate = code.at(gates, b.mul(i, I64(3)), F32)
                decay, strength, both = (code.load(code.at(gate, j, F32), F32) for j in range(3))
                made = []
                for m, row in enumerate(rows):
                    value = code.load(code.at(v, b.add(place, I64(m)), F32), F32)
                    change = b.fmul(b.fsub(value, b.fmul(decay, found[m])), strength)
                    if reads:
                        result = b.fadd(b.fmul(decay, found[2 + m]), b.fmul(change, both))
                        code.store(result, code.at(y, b.add(place, I64(m)), F32))
                    wide, scale = code.splat(change), code.splat(decay)
                    made += [b.call(fma, [wide, keys[j], b.fmul(scale, row[j])]) for j in each]
                return made

            return moved

        def store(start, rows):
            for j, row in enumerate(rows):
                code.store(row, code.at(S, b.add(start, I64(16 * j)), F32))

        def pair(r):
            start = b.mul(r, I64(width))
            rows = [code.load(code.at(S, b.add(start, I64(16 * j)), F32), V16F) for j in range(2 * _VECTORS)]
            rows = code.loop(0, before, 1, token(r, False), *rows)
            with b.if_then(b.and_(b.icmp_signed(">", before, I64(0)), b.icmp_signed("==", before, to))):
                store(start, rows)
            rows = code.loop(before, n, 1, token(r, True), *rows)
            with b.if_then(b.icmp_signed(">", to, before)):
                store(start, rows)

        code.loop(0, Dv, 2, pair)
        return context.get_dummy_value()

    return sig, codegen


# delta     the same with a decay for each channel: y = S (g q) + d (k q), d = (v - S (g k)) b; S <- S diag(g) + d k'
# shapes    as _step_heads, g [T, Hv, Dk]
# threads   as _step_heads
# bytes     as _step_heads, and g
# limits    none
@njit(parallel=True)
def _step_heads_by_channel(state, slots, qkv, g, b, Hk, fmt, kept, out):
    for task in prange(slots.size * g.shape[1]):
        _step_some_by_channel(state, slots, qkv, g, b, Hk, fmt, kept, out, task, task + 1)


@njit
def _step_some_by_channel(state, slots, qkv, g, b, Hk, fmt, kept, out, start, stop):
    Hv, Dv, Dk = g.shape[1], state.shape[1], state.shape[2]
    T = 1 if slots[0] >= 0 else g.shape[0]  # tokens of each sequence
    n = min(T, _BLOCK)
    q, k = np.empty((n, Dk), np.float32), np.empty((n, Dk), np.float32)
    with_q, with_k = np.empty((n, Dk), np.float32), np.empty((n, Dk), np.float32)
    v, y = np.empty((n, Dv), np.float32), np.empty((n, Dv), np.float32)
    gates, row = np.empty((n, 2), np.float32), np.empty(Dk, np.float32)
    for task in range(start, stop):
        s, h = task // Hv, task % Hv
        S = state[(slots[s] if slots[0] >= 0 else 0) * Hv + h]
        for first in range(s * T, (s + 1) * T, _BLOCK):
            n = min(_BLOCK, (s + 1) * T - first)
            _load_heads(qkv, fmt, first, n, h, Hk, Hv, Dv, q, k, v)
            for i in range(n):
                gates[i, 0], gates[i, 1] = b[first + i, h], _dot(k[i], q[i])
                _times(g[first + i, h], q[i], with_q[i])
                _times(g[first + i, h], k[i], with_k[i])
            _step_block_by_channel(S, kept, row, g[first : first + n, h], with_q, with_k, k, v, gates, y, n)
            store_block(y[:n], fmt, first, h * Dv, Dv, out)


@njit
def _times(a, b, out):
    for j in range(out.size):
        out[j] = a[j] * b[j]


@njit(fastmath=SUM_IN_ANY_ORDER)
def _step_block_by_channel(S, kept, row, g, with_q, with_k, k, v, gates, y, n):
    Dv, Dk = S.shape
    for r in range(Dv):
        for j in range(Dk):
            row[j] = S[r, j]
        for i in range(n):
            known, read = np.float32(0), np.float32(0)
            for j in range(Dk):
                known += row[j] * with_k[i, j]
                read += row[j] * with_q[i, j]
            change = (v[i, r] - known) * gates[i, 0]
            for j in range(Dk):
                row[j] = g[i, j] * row[j] + change * k[i, j]
            y[i, r] = read + change * gates[i, 1]
        if not kept:
            for j in range(Dk):
                S[r, j] = row[j]


# delta     the same for many tokens, with 32 rows of the state in lanes and two tokens at a time: S = c Z, c the
#           product of the decays since Z was last scaled. From Z k of both tokens (found in the pass before) come their
#           a = (v - c Z k) b / c; one pass over Z then does Z <- Z + a k' and c Z q for each, and Z k of the next two
# shapes    as _step_heads, one sequence
# threads   prange over heads
# bytes     the state twice (in and out), qkv and out once (q and k once for each of their value heads)
# limits    needs a compiler: the pass is vector code
@njit(parallel=True)
def _lane_heads(state, qkv, g, b, Hk, fmt, out):
    for h in prange(state.shape[0]):
        _lane_head(state[h], qkv, g, b, h, Hk, fmt, out)


@njit
def _lane_head(S, qkv, g, b, h, Hk, fmt, out):
    T, Hv = g.shape
    Dv, Dk = S.shape
    panels = (Dv + _WIDTH - 1) // _WIDTH
    size, width = panels * Dk * _WIDTH, panels * _WIDTH
    n = min(T + T % 2, _SPAN)
    memory = np.zeros(size + 16, np.float32)
    start = (-memory.ctypes.data % 64) // 4  # a vector of Z lies in one cache line
    Z = memory[start : start + size].reshape((panels, Dk, _WIDTH))
    q, k = np.empty((n, Dk), np.float32), np.empty((n, Dk), np.float32)
    v, y = np.zeros((n, width), np.float32), np.empty((n, width), np.float32)
    gates = np.empty((n // 2, _GATES), np.float32)
    for r in range(Dv):
        panel, lane = Z[r // _WIDTH], r % _WIDTH
        for j in range(Dk):
            panel[j, lane] = S[r, j]
    c = 1.0
    for first in range(0, T, _SPAN):
        n = min(_SPAN, T - first)
        pairs = (n + 1) // 2
        _load_heads(qkv, fmt, first, n, h, Hk, Hv, Dv, q, k, v)
        if n % 2:  # a token that changes nothing
            q[n, :], k[n, :], v[n, :] = np.float32(0), np.float32(0), np.float32(0)
        c = _lane_gates(g, b, first, n, h, k, c, gates)
        for p in range(panels):
            _lane_pass(
                at(Z, p * Dk * _WIDTH), at(q, 0), at(k, 0), at(v, p * _WIDTH), at(gates, 0), at(y, p * _WIDTH),
                pairs, Dk, width, at(k, 0), at(gates, 0),
            )  # fmt: skip
        store_block(y[:n], fmt, first, h * Dv, Dv, out)
    last = np.float32(c)
    for r in range(Dv):
        panel, lane = Z[r // _WIDTH], r % _WIDTH
        for j in range(Dk):
            S[r, j] = panel[j, lane] * last
    keep_alive((Z, q, k, v, y, gates))


@njit
def _lane_gates(g, b, first, n, h, k, c, gates):
    """Fills gates for n tokens; returns c after them."""
    for pair in range((n + 1) // 2):
        for i in range(2):
            t = 2 * pair + i
            strength, scale = 0.0, 1.0
            if t < n:
                c *= np.float64(g[first + t, h])
                if not _SMALL <= abs(c) <= _LARGE:
                    scale, c = c, 1.0
                strength = np.float64(b[first + t, h]) / c
            gates[pair, i] = np.float32(scale)
            gates[pair, 2 + i] = np.float32(c)
            gates[pair, 4 + i] = np.float32(scale * c)
            gates[pair, 6 + i] = np.float32(strength)
        gates[pair, 8] = _dot(k[2 * pair], k[2 * pair + 1])
        gates[pair, 9] = np.float32(gates[pair, 0] == 1 and gates[pair, 1] == 1)
    return c


# delta     the same with a decay for each channel: of two tokens Z (g1 k1) and Z (g1 g2 k2), found in the pass before,
#           give what is known of them; one pass over Z then does Z <- diag(g) Z + a k' and Z q for each
# shapes    as _lane_heads, g [T, Hv, Dk]
# threads   prange over heads
# bytes     as _lane_heads, and g
# limits    as _lane_heads
@njit(parallel=True)
def _lane_heads_by_channel(state, qkv, g, b, Hk, fmt, out):
    for h in prange(state.shape[0]):
        _lane_head_by_channel(state[h], qkv, g, b, h, Hk, fmt, out)


@njit
def _lane_head_by_channel(S, qkv, g, b, h, Hk, fmt, out):
    T, Hv, Dk = g.shape
    Dv = S.shape[0]
    panels = (Dv + _WIDTH - 1) // _WIDTH
    size, width = panels * Dk * _WIDTH, panels * _WIDTH
    n = min(T + T % 2, _SPAN)
    memory = np.zeros(size + 16, np.float32)
    start = (-memory.ctypes.data % 64) // 4  # a vector of Z lies in one cache line
    Z = memory[start : start + size].reshape((panels, Dk, _WIDTH))
    q, k = np.empty((n, Dk), np.float32), np.empty((n, Dk), np.float32)
    decays, keys = np.empty((n, Dk), np.float32), np.empty((n, Dk), np.float32)
    v, y = np.zeros((n, width), np.float32), np.empty((n, width), np.float32)
    gates = np.ones((n // 2, _GATES), np.float32)
    for r in range(Dv):
        panel, lane = Z[r // _WIDTH], r % _WIDTH
        for j in range(Dk):
            panel[j, lane] = S[r, j]
    for first in range(0, T, _SPAN):
        n = min(_SPAN, T - first)
        pairs = (n + 1) // 2
        _load_heads(qkv, fmt, first, n, h, Hk, Hv, Dv, q, k, v)
        decays[:n] = g[first : first + n, h]
        if n % 2:  # a token that changes nothing
            q[n, :], k[n, :], v[n, :], decays[n, :] = np.float32(0), np.float32(0), np.float32(0), np.float32(1)
        _lane_gates_by_channel(b, first, n, h, k, decays, keys, gates)
        for p in range(panels):
            _lane_pass_by_channel(
                at(Z, p * Dk * _WIDTH), at(q, 0), at(k, 0), at(v, p * _WIDTH), at(gates, 0), at(y, p * _WIDTH),
                pairs, Dk, width, at(keys, 0), at(decays, 0),
            )  # fmt: skip
        store_block(y[:n], fmt, first, h * Dv, Dv, out)
    for r in range(Dv):
        panel, lane = Z[r // _WIDTH], r % _WIDTH
        for j in range(Dk):
            S[r, j] = panel[j, lane]
    keep_alive((Z, q, k, decays, keys, v, y, gates))


@njit
def _lane_gates_by_channel(b, first, n, h, k, decays, keys, gates):
    """Fills gates and the keys that read Z before a pair of n tokens; what scales Z and c stay 1."""
    for pair in range((n + 1) // 2):
        one, two = 2 * pair, 2 * pair + 1
        gates[pair, 6] = b[first + one, h]
        gates[pair, 7] = b[first + two, h] if two < n else np.float32(0)
        _times(decays[one], k[one], keys[one])
        _times(decays[two], k[two], keys[two])
        gates[pair, 8] = _dot(k[one], keys[two])
        _times(decays[one], keys[two], keys[two])


def _lane_code(by_channel):
    """An intrinsic: tokens two by two over one panel Z [Dk, 32]; q, k [2 pairs, Dk], v, y 32 columns of rows of
    `stride`.

    gates [pairs, _GATES], two each: what Z is scaled with first, c, the product of these, b / c; then the product of
    the two k, and whether nothing is scaled. keys [2 pairs, Dk] read Z before a pair; by channel Z is scaled with
    decays [2 pairs, Dk].
    """
    sig = types.void(*[_FLOAT] * 6, types.int64, types.int64, types.int64, _FLOAT, _FLOAT)

    def codegen(context, builder, sig, args):
        code, b = _Code(builder), builder
        Z, q, k, v, gates, y, pairs, Dk, stride, keys, decays = args
        vectors = range(_WIDTH // 16)
        two = range(2)
        zero = [_const(V16F, 0.0)] * (2 * len(vectors))
        fma = code.function("llvm.fma.v16f32", V16F, V16F, V16F, V16F)
        even = b.and_(Dk, I64(-2))

        def spread(base, index):
            return code.splat(code.load(code.at(base, index, F32), F32))

        def over_keys(element, sums):
            """element(j, *sums) for each key j, two in a round."""

            def round_of_two(j, *sums):
                return element(b.add(j, I64(1)), *element(j, *sums))

            return code.loop(even, Dk, 1, element, *code.loop(0, even, 2, round_of_two, *sums))

        def place(j, i):
            return code.at(Z, b.add(b.mul(j, I64(_WIDTH)), I64(16 * i)), F32)

        def products(numbers, factors, sums):
            return [b.call(fma, [numbers[i], factors[n], sums[2 * i + n]]) for i in vectors for n in two]

        def read(j, *sums):
            old = [code.load(place(j, i), V16F) for i in vectors]
            return products(old, [spread(keys, j), spread(keys, b.add(j, Dk))], sums)

        def pair(p, *z):
            mine = code.at(gates, b.mul(p, I64(_GATES)), F32)
            gate = [spread(mine, i) for i in range(9)]
            scale, c, whole, strength, both = gate[0:2], gate[2:4], gate[4:6], gate[6:8], gate[8]
            rows = [b.mul(b.add(b.mul(p, I64(2)), I64(n)), stride) for n in two]
            this = [b.mul(b.add(b.mul(p, I64(2)), I64(n)), Dk) for n in two]
            more = b.icmp_signed("<", b.add(p, I64(1)), pairs)
            ahead = [b.select(more, b.add(row, b.mul(Dk, I64(2))), row) for row in this]
            pieces = ((q, this), (k, this), (keys, ahead), (decays, this))
            q_rows, k_rows, next_rows, decay_rows = (
                [code.at(base, start, F32) for start in starts] for base, starts in pieces
            )
            a = []
            for i in vectors:
                value = [code.load(code.at(v, b.add(row, I64(16 * i)), F32), V16F) for row in rows]
                one = b.fmul(b.fsub(value[0], b.fmul(whole[0], z[2 * i])), strength[0])
                with_k = b.fadd(b.fmul(scale[0], z[2 * i + 1]), b.fmul(one, both))
                a.append([one, b.fmul(b.fsub(value[1], b.fmul(whole[1], with_k)), strength[1])])

            def moved(scaled):
                def element(j, *sums):
                    own, queries, nexts = ([spread(row, j) for row in rows] for rows in (k_rows, q_rows, next_rows))
                    factor = [spread(row, j) for row in decay_rows] if by_channel else scale
                    read, found = list(sums[: len(zero)]), list(sums[len(zero) :])
                    new = [code.load(place(j, i), V16F) for i in vectors]
                    for n in two:
                        for i in vectors:
                            old = b.fmul(new[i], factor[n]) if scaled else new[i]
                            new[i] = b.call(fma, [a[i][n], own[n], old])
                            read[2 * i + n] = b.call(fma, [new[i], queries[n], read[2 * i + n]])
                    for i in vectors:
                        code.store(new[i], place(j, i))
                    return [*read, *products(new, nexts, found)]

                return over_keys(element, zero + zero)

            if by_channel:
                sums = moved(True)
                for i in vectors:
                    for n in two:
                        code.store(sums[2 * i + n], code.at(y, b.add(rows[n], I64(16 * i)), F32))
                return sums[len(zero) :]
            plainly = b.fcmp_ordered("==", code.load(code.at(mine, 9, F32), F32), ir.Constant(F32, 1.0))
            with b.if_else(plainly) as (then, otherwise):
                with then:
                    plain, plain_end = moved(False), b.block
                with otherwise:
                    scaled, scaled_end = moved(True), b.block
            sums = []
            for one, other in zip(plain, scaled, strict=True):
                sums.append(b.phi(V16F))
                sums[-1].add_incoming(one, plain_end)
                sums[-1].add_incoming(other, scaled_end)
            for i in vectors:
                for n in two:
                    code.store(b.fmul(sums[2 * i + n], c[n]), code.at(y, b.add(rows[n], I64(16 * i)), F32))
            return sums[len(zero) :]

        code.loop(0, pairs, 1, pair, *over_keys(read, zero))
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def _lane_pass(typingctx, Z, q, k, v, gates, y, pairs, Dk, stride, keys, decays):
    return _lane_code(by_channel=False)


@intrinsic
def _lane_pass_by_channel(typingctx, Z, q, k, v, gates, y, pairs, Dk, stride, keys, decays):
    return _lane_code(by_channel=True)


# -- runs that are kept ----------------------------------------------------------------------------------------------


@kernel(ops.delta_commit, device="cpu")
def delta_commit(conv_state, state, gates, slots, accepted, conv_weight, Hk) -> None:
    _check_state("delta_commit", state)
    if gates.shape[2] == 2 and _fits_one_call(conv_state, int(accepted.sum())):
        none = np.empty((0, gates.shape[3]), np.float32)
        starts = np.zeros(len(slots) + 1, np.int32)
        out = np.empty((0, *state.shape[1:3]), np.float32)
        rows = (np.empty((0, conv_state.shape[2]), np.float32), none, none)
        _verify(*rows, conv_state, state, gates, slots, starts, starts[1:], accepted, conv_weight, none, none, Hk, out)
        return
    Hv, Dv, Dk = state.shape[1:]
    kept = conv_weight.shape[1] - 1
    for slot, count in zip(slots.tolist(), accepted.tolist(), strict=True):
        if slot < 0 or count == 0:
            continue
        rows = conv_state[slot]
        y = np.empty((count, rows.shape[1]), rows.dtype)
        conv1d_causal(rows[kept : kept + count], rows[:kept], conv_weight, out=y)
        rms_norm_qk(y, Hk, Dk, Hk * Dk, None, 1e-6, "sum", out=y)
        g, b = gates[slot, :count, :-1].swapaxes(1, 2), np.ascontiguousarray(gates[slot, :count, -1])
        g = np.ascontiguousarray(g[..., 0] if g.shape[2] == 1 else g)
        ignored = np.empty((count, Hv, Dv), y.dtype)
        _step(state[slot], None, y, g, b, Hk, ignored)
        rows[:kept] = rows[count : count + kept].copy()


@kernel(ops.gated_delta_verify, device="cpu")
def gated_delta_verify(
    qkv, z, alpha, beta, conv_state, state, gates, slots, starts, keep, accepted, conv_weight, A_log, dt_bias,
    norm_weight, Hk, eps, act="silu", *, out,
) -> None:  # fmt: skip
    _check_state("gated_delta_verify", state)
    Hv, Dv, Dk = state.shape[1:]
    short = len(qkv) < _LANES_FROM or _are_short(starts, keep)
    if qkv.dtype == np.float32 and short and _fits_one_call(conv_state, len(qkv)):
        rows, weights = (qkv, alpha, beta), (conv_weight, A_log, dt_bias)
        _verify(*rows, conv_state, state, gates, slots, starts, keep, accepted, *weights, Hk, out)
    else:
        delta_commit(conv_state, state, gates, slots, accepted, conv_weight, Hk)
        y, g, b = np.empty_like(qkv), np.empty(alpha.shape, np.float32), np.empty(beta.shape, np.float32)
        conv1d_causal(qkv, conv_state, conv_weight, slots, starts, out=y)
        conv1d_state_update(conv_state, qkv, slots, starts, keep, conv_weight.shape[1])
        rms_norm_qk(y, Hk, Dk, Hk * Dk, None, 1e-6, "sum", out=y)
        gdn_decay_beta(alpha, beta, A_log, dt_bias, out=(g, b))
        runs = {"slots": slots, "starts": starts, "keep": keep, "gates": gates}
        gated_delta_net(state, y, g, b, Hk, Hv, Dk, Dv, **runs, out=out)
    # rows of no sequence are 0, and stay so where float32 has no number for 1 / sqrt(eps)
    gated_rms_norm(out, z, norm_weight, max(eps, 1e-37) if eps else eps, act, out=out)


def _fits_one_call(conv_state: np.ndarray, rows: int) -> bool:
    """Whether one thread convolves so many rows."""
    return conv_state.dtype == np.float32 and (rows * conv_state.shape[2] <= _SERIAL_CONV or threads() == 1)


def _are_short(starts: np.ndarray, keep: np.ndarray) -> bool:
    """Whether all runs go token by token: those that are kept, and others of few tokens."""
    lengths = np.diff(starts)
    return bool(((lengths < _LANES_FROM) | (keep > 0)).all())


def _verify(qkv, alpha, beta, conv_state, state, gates, slots, starts, keep, accepted, weight, A_log, dt_bias, Hk, out):
    """All of a layer's step between its projections but the norm behind it, float32."""
    _, Hv, Dv, Dk = state.shape
    A_log, dt_bias = (v.astype(np.float32, copy=False).ravel() for v in (A_log, dt_bias))
    args = (
        frozen(qkv), frozen(alpha), frozen(beta), conv_state.reshape(-1, conv_state.shape[2]), conv_state.shape[1],
        state.reshape(-1, Dv, Dk), gates, frozen(slots), frozen(starts), frozen(keep), frozen(accepted),
        frozen(weight.ravel().view(np.uint8)), fmt(weight), weight.shape[1], frozen(A_log), frozen(dt_bias), Hk,
        np.float32(Dk**-0.5), out.reshape(len(qkv), Hv * Dv),
    )  # fmt: skip
    if threads() == 1 or len(slots) * Hv * Dv * Dk <= _SERIAL_DELTA:
        _verify_runs(*args)
    else:
        run(_verify_heads, *args)


# verify    the tokens that were accepted of each sequence's last run, then those of its next one: convolution, norms of
#           q and k, gates, delta rule. State and rows of the convolution move on by the former, by the latter too
#           unless they are kept, which is noted
# shapes    qkv [T, C], alpha, beta [T, Hv], conv_state [S * depth, C], state [S * Hv, Dv, Dk], gates [S, K, 2, Hv],
#           out [T, Hv Dv], all float32; weight the bytes of [C, W]; slots, keep, accepted [B], starts [B + 1]
# threads   prange over sequences and heads, the rest on one
# bytes     the state twice (in and out), all else once
# limits    runs of up to 8 tokens
@njit
def _verify_runs(
    qkv, alpha, beta, conv_state, depth, state, gates, slots, starts, keep, accepted, weight, form, W, A_log, dt_bias,
    Hk, factor, out,
):  # fmt: skip
    rows = _kept_rows(
        qkv, alpha, beta, conv_state, depth, state.shape[2], gates, slots, starts, keep, accepted, weight, form, W,
        A_log, dt_bias, Hk, factor, out,
    )  # fmt: skip
    for task in range(slots.size * gates.shape[3]):
        _verify_head(state, rows, slots, starts, keep, accepted, Hk, out, task)


@njit(parallel=True)
def _verify_heads(
    qkv, alpha, beta, conv_state, depth, state, gates, slots, starts, keep, accepted, weight, form, W, A_log, dt_bias,
    Hk, factor, out,
):  # fmt: skip
    rows = _kept_rows(
        qkv, alpha, beta, conv_state, depth, state.shape[2], gates, slots, starts, keep, accepted, weight, form, W,
        A_log, dt_bias, Hk, factor, out,
    )  # fmt: skip
    for task in prange(slots.size * gates.shape[3]):
        _verify_head(state, rows, slots, starts, keep, accepted, Hk, out, task)


@njit
def _kept_rows(
    qkv, alpha, beta, conv_state, depth, Dk, gates, slots, starts, keep, accepted, weight, form, W, A_log, dt_bias, Hk,
    factor, out,
):  # fmt: skip
    """Of the accepted and the new tokens of each sequence, one behind the other: rows behind convolution and norms,
    decay and strength, and where those of each sequence begin. What is kept for the next time is written.
    """
    Hv, C, T = gates.shape[3], conv_state.shape[1], qkv.shape[0]
    first = np.zeros(slots.size + 1, np.int64)
    most = 0
    for s in range(slots.size):
        count = np.int64(accepted[s]) + starts[s + 1] - starts[s] if slots[s] >= 0 else 0
        first[s + 1] = first[s] + count
        most = max(most, count)
    y = np.empty((first[-1], C), np.float32)
    g, b = np.empty((first[-1], Hv), np.float32), np.empty((first[-1], Hv), np.float32)
    new_g, new_b = np.empty((T, Hv), np.float32), np.empty((T, Hv), np.float32)
    if T:
        _decay_beta(alpha.view(np.uint8), beta.view(np.uint8), A_log, dt_bias, FLOAT32, new_g, new_b)
    seen = np.empty((W - 1 + most, C), np.float32)
    one = np.full(1, -1, np.int32)
    end = 0
    for s in range(slots.size):
        low, high, held = np.int64(starts[s]), np.int64(starts[s + 1]), np.int64(accepted[s])
        out[end:low] = np.float32(0)
        end = high
        if slots[s] < 0:
            out[low:high] = np.float32(0)
            continue
        slot, n, at_row = np.int64(slots[s]), high - low, first[s]
        base = slot * depth
        for i in range(W - 1 + held):
            _copy_row(conv_state[base + i], seen[i])
        for i in range(n):
            _copy_row(qkv[low + i], seen[W - 1 + held + i])
        rows = seen[: W - 1 + held + n].view(np.uint8)
        if held + n:
            _convolve_some(
                rows[W - 1 :], rows, weight, one, depth, FLOAT32, FLOAT32, form, True,
                y[at_row : at_row + held + n].view(np.uint8), 0, held + n, 0, C,
            )  # fmt: skip
        kept = n if keep[s] else 0
        shift = held if kept else held + n
        for i in range(W - 1 + kept):
            _copy_row(seen[shift + i], conv_state[base + i])
        for i in range(held):
            _copy_row(gates[slot, i, 0], g[at_row + i])
            _copy_row(gates[slot, i, 1], b[at_row + i])
        for i in range(n):
            _copy_row(new_g[low + i], g[at_row + held + i])
            _copy_row(new_b[low + i], b[at_row + held + i])
        for i in range(kept):
            _copy_row(new_g[low + i], gates[slot, i, 0])
            _copy_row(new_b[low + i], gates[slot, i, 1])
    out[end:] = np.float32(0)
    if first[-1]:
        patterns = y.reshape(-1).view(np.uint16)
        qk_rows(patterns, FLOAT32, C, Hk, Dk, Hk * Dk, factor, 1e-6, patterns, 0, first[-1])
    return y, g, b, first


@njit
def _copy_row(row, to):
    for i in range(to.size):
        to[i] = row[i]


@njit
def _verify_head(state, rows, slots, starts, keep, accepted, Hk, out, task):
    y, g, b, first = rows
    Hv, Dv, Dk = g.shape[1], state.shape[1], state.shape[2]
    s, h = task // Hv, task % Hv
    if slots[s] < 0 or first[s + 1] == first[s]:
        return
    n, held, low = first[s + 1] - first[s], np.int64(accepted[s]), np.int64(starts[s])
    q, k = np.empty((n, Dk), np.float32), np.empty((n, Dk), np.float32)
    v, found = np.empty((n, Dv), np.float32), np.empty((n, Dv), np.float32)
    factors, row = np.empty((n, 3), np.float32), np.empty(Dk, np.float32)
    _load_heads(y.view(np.uint8), FLOAT32, first[s], n, h, Hk, Hv, Dv, q, k, v)
    for i in range(n):
        at_row = first[s] + i
        factors[i, 0], factors[i, 1], factors[i, 2] = g[at_row, h], b[at_row, h], _dot(k[i], q[i])
    S = state[np.int64(slots[s]) * Hv + h]
    _step_block(S, row, q, k, v, factors, found, held, n, keep[s] == 0)
    for i in range(held, n):
        _copy_row(found[i], out[low + i - held, h * Dv : (h + 1) * Dv])


# -- a layer's step --------------------------------------------------------------------------------------------------


@kernel(ops.gated_delta_step, device="cpu")
def gated_delta_step(
    qkv, z, alpha, beta, conv_state, state, slots, conv_weight, A_log, dt_bias, norm_weight, Hk, eps, act="silu", *, out
) -> None:
    _check_state("gated_delta_step", state)
    Hv, Dv, Dk = state.shape[1:]
    if qkv.dtype == np.float32 and alpha.ndim == 2 and _fits_one_call(conv_state, len(qkv)):
        runs, gates = _single_runs(len(slots)), np.empty((1, 0, 2, Hv), np.float32)
        rows, weights = (qkv, alpha, beta), (conv_weight, A_log, dt_bias)
        _verify(*rows, conv_state, state, gates, slots, *runs, *weights, Hk, out)
    else:
        y, g, b = np.empty_like(qkv), np.empty(alpha.shape, np.float32), np.empty(beta.shape, np.float32)
        conv1d_causal(qkv, conv_state, conv_weight, slots, out=y)
        conv1d_state_update(conv_state, qkv, slots, width=conv_weight.shape[1])
        rms_norm_qk(y, Hk, Dk, Hk * Dk, None, 1e-6, "sum", out=y)
        gdn_decay_beta(alpha, beta, A_log, dt_bias, out=(g, b))
        gated_delta_net(state, y, g, b, Hk, Hv, Dk, Dv, slots=slots, out=out)
    gated_rms_norm(out, z, norm_weight, eps, act, out=out)


@functools.lru_cache(maxsize=64)
def _single_runs(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, kept and accepted tokens of so many sequences with one token each."""
    none = np.zeros(count, np.int32)
    return np.arange(count + 1, dtype=np.int32), none, none
