"""CPU kernels of the norm ops: one row program for all fusions, and one kernel for the q and k heads of delta-net.

As in elementwise.py arrays come flat, as uint16 patterns of any dtype. A block of rows is read as a whole before any of
it is written, so outputs may lie on inputs. Squares are summed in float64, which is free beside the memory traffic: no
finite row overflows or underflows.
"""

from typing import Any

import numpy as np
from numba import prange

from penstock import ops
from penstock.backends.cpu import _threads
from penstock.backends.cpu._formats import FLOAT32, fmt
from penstock.backends.cpu._math import sigmoid32, silu32
from penstock.backends.cpu.compile import FUSED_MULTIPLY_ADD, SUM_IN_ANY_ORDER, njit
from penstock.backends.cpu.elementwise import NO_OUTPUT, NOTHING, SERIAL, expert_sum, flat, flat_out, load, slots, store
from penstock.dtypes import round_to
from penstock.ops.op import kernel

PLAIN, ADDED, NORMED = range(3)  # how v comes from x: x, a + x, a + n(x, w_mid)
# what happens to n(v, w): nothing, · b, · silu(b), + b, + n(b, w_mid), · sigmoid(b)
ALONE, TIMES, GATED, PLUS, PLUS_NORMED, SIGMOID = range(6)
_AS_IS, _BY_NUMBER, _BY_VECTOR = range(3)  # s: nothing, one number, an array

_BLOCK = 2048  # numbers of a block of rows, if rows are shorter than that
_CHUNK = 16  # blocks that a thread takes at once
_ONE = np.float32(1)
_NO_SLOTS = np.empty((0, 0), np.float32)
_NO_SLOTS.flags.writeable = False


@njit(fastmath=SUM_IN_ANY_ORDER)
def _sum_of_squares(v, i):
    total = np.float64(0)
    for j in range(v.shape[1]):
        total += np.float64(v[i, j]) * np.float64(v[i, j])
    return total


@njit
def unit_factors(v, n, divisor, eps, rinv):
    """rinv[i] = 1 / sqrt(sum(v[i]**2) / divisor + eps) for the first n rows.

    A row so large or small that its factor is no float32 is scaled by a power of two first, which changes no bit of the
    product.
    """
    for i in range(n):
        factor = 1 / np.sqrt(_sum_of_squares(v, i) / divisor + eps)
        if (factor < 2.0**-100 or factor > 2.0**100) and factor != 0 and factor != np.inf:
            step = 2.0**-100 if factor < 1 else 2.0**100
            for j in range(v.shape[1]):
                v[i, j] *= np.float32(step)
            factor /= step
        rinv[i] = np.float32(factor)


# Loops over the rows are inside of these functions: slices passed to a function per row cost as much as a row of 256.


@njit(fastmath=FUSED_MULTIPLY_ADD)
def scaled_rows(v, n, rinv, w, b, merge, y):
    """y = n(v, w), alone or with b; y is none of the others, else the loops would not vectorise."""
    if merge == ALONE:
        for i in range(n):
            for j in range(v.shape[1]):
                y[i, j] = v[i, j] * rinv[i] * w[j]
    elif merge == TIMES:
        for i in range(n):
            for j in range(v.shape[1]):
                y[i, j] = v[i, j] * rinv[i] * w[j] * b[i, j]
    elif merge == GATED:
        for i in range(n):
            for j in range(v.shape[1]):
                y[i, j] = v[i, j] * rinv[i] * w[j] * silu32(b[i, j])
    elif merge == SIGMOID:
        for i in range(n):
            for j in range(v.shape[1]):
                y[i, j] = v[i, j] * rinv[i] * w[j] * sigmoid32(b[i, j])
    else:
        for i in range(n):
            for j in range(v.shape[1]):
                y[i, j] = b[i, j] + v[i, j] * rinv[i] * w[j]


@njit
def _multiply(y, factor):
    for j in range(y.size):
        y[j] *= factor


@njit
def _multiply_rows(y, n, s):
    for i in range(n):
        for j in range(y.shape[1]):
            y[i, j] *= s[j]


@njit
def _add(y, b):
    for j in range(y.size):
        y[j] = b[j] + y[j]


@njit
def _load_vectors(vectors, fmts, wanted, dim):
    """Weights as float32 [5, dim]; an empty one is all 1, one of a single element is that element throughout."""
    loaded = np.empty((len(vectors), dim), np.float32)
    first = np.empty(1, np.float32)
    for i in range(len(vectors)):
        if not wanted[i]:
            continue
        size = vectors[i].size // 2 if fmts[i] == FLOAT32 else vectors[i].size
        if size == dim:
            load(vectors[i], fmts[i], 0, loaded[i])
        else:
            first[0] = np.float32(1)
            if size == 1:
                load(vectors[i], fmts[i], 0, first)
            loaded[i, :] = first[0]
    return loaded


@njit
def _norm_blocks(program, x, slot_weights, a, b, fmt, vectors, fmts, factor, dim, eps, mid, outs, start, stop):
    """Rows start … stop - 1 of `_norm_parallel`."""
    source, merge, scaled = program
    middle = source == NORMED or merge == PLUS_NORMED
    wanted = (True, outs[1].size > 0, outs[2].size > 0, middle, scaled == _BY_VECTOR)
    w = _load_vectors(vectors, fmts, wanted, dim)
    w_mid, s = w[3], w[4]
    rows = max(1, _BLOCK // dim)
    scratch = np.empty((4, rows, dim), np.float32)
    v, ra, rb, y = scratch[0], scratch[1], scratch[2], scratch[3]
    rinv = np.empty(rows, np.float32)
    for r in range(start, stop, rows):
        n = min(rows, stop - r)
        span = n * dim
        if slot_weights.size > 0:
            for i in range(n):
                expert_sum(x, fmt, slot_weights, r + i, v[i])
        else:
            load(x, fmt, r * dim, v.reshape(-1)[:span])
        if merge != ALONE:
            load(b, fmt, r * dim, rb.reshape(-1)[:span])
        if source != PLAIN:
            load(a, fmt, r * dim, ra.reshape(-1)[:span])
        if source == ADDED:
            _add(v.reshape(-1)[:span], ra.reshape(-1)[:span])
        elif source == NORMED:
            unit_factors(v, n, dim, eps, rinv)
            scaled_rows(v, n, rinv, w_mid, ra, PLUS, y)
            v, y = y, v
        if merge == PLUS_NORMED:
            unit_factors(rb, n, dim, eps, rinv)
            scaled_rows(rb, n, rinv, w_mid, ra, ALONE, y)
            rb, y = y, rb
        if mid.size > 0:
            store(v.reshape(-1)[:span], fmt, mid, r * dim)
        unit_factors(v, n, dim, eps, rinv)
        for k in range(len(outs)):
            if outs[k].size > 0:
                scaled_rows(v, n, rinv, w[k], rb, merge, y)
                if scaled == _BY_VECTOR:
                    _multiply_rows(y, n, s)
                elif scaled == _BY_NUMBER:
                    _multiply(y.reshape(-1)[:span], factor)
                store(y.reshape(-1)[:span], fmt, outs[k], r * dim)


# norm      v = x or sum_i weights[i] * x[i];  v = v, a + v or a + n(v, w_mid);  mid = v
#           y_k = n(v, w_k) · s, with n(v, w_k) alone, · b, · act(b), + b or + n(b, w_mid);  n as in penstock.ops.norm
# shapes    x [rows, dim] or [rows, slots, dim]; a, b, mid, y_k [rows, dim]; w_k, w_mid, s [dim] of any format each, or
#           s the number `factor`
# threads   prange over chunks of rows; a row belongs to one thread and its sums have one order for each dim
# bytes     x, a, b, mid, y_k once each; the vectors once per chunk of 32k numbers
# limits    sums a + x and weighted sums are float32: beyond its range they are infinite
@njit(parallel=True)
def _norm_parallel(program, x, slot_weights, a, b, fmt, vectors, fmts, factor, dim, eps, mid, outs, rows):
    step = max(1, _BLOCK // dim) * _CHUNK
    for c in prange((rows + step - 1) // step):
        start, stop = c * step, min(rows, (c + 1) * step)
        _norm_blocks(program, x, slot_weights, a, b, fmt, vectors, fmts, factor, dim, eps, mid, outs, start, stop)


def _run(
    x: np.ndarray,
    weights: tuple[np.ndarray | None, ...],
    eps: float,
    outs: tuple[np.ndarray, ...],
    *,
    slot_weights: np.ndarray | None = None,
    source: int = PLAIN,
    a: np.ndarray | None = None,
    merge: int = ALONE,
    b: np.ndarray | None = None,
    w_mid: np.ndarray | None = None,
    scalar: Any = None,
    mid: np.ndarray | None = None,
) -> None:
    """The row program of `_norm_parallel` for one to three weights and as many outputs."""
    if outs[0].size == 0:
        return
    dim = outs[0].shape[-1]
    scaled, factor = (_AS_IS, _ONE) if scalar is None else (_BY_VECTOR, _ONE)
    if scaled and not isinstance(scalar, np.ndarray):
        scaled, factor, scalar = _BY_NUMBER, np.float32(scalar), None
    w0, w1, w2 = weights if len(weights) == 3 else (weights[0], None, None)
    y1, y2 = (flat_out(outs[1]), flat_out(outs[2])) if len(outs) == 3 else (NO_OUTPUT, NO_OUTPUT)
    call = (  # without helpers: a call of Python's for each of these would cost as much as the norm of a row
        (source, merge, scaled),
        flat(x),
        _NO_SLOTS if slot_weights is None else slots(slot_weights),
        NOTHING if a is None else flat(a),
        NOTHING if b is None else flat(b),
        fmt(x),
        (
            NOTHING if w0 is None else flat(w0),
            NOTHING if w1 is None else flat(w1),
            NOTHING if w2 is None else flat(w2),
            NOTHING if w_mid is None else flat(w_mid),
            NOTHING if scalar is None else flat(scalar),
        ),
        (
            FLOAT32 if w0 is None else fmt(w0),
            FLOAT32 if w1 is None else fmt(w1),
            FLOAT32 if w2 is None else fmt(w2),
            FLOAT32 if w_mid is None else fmt(w_mid),
            FLOAT32 if scalar is None else fmt(scalar),
        ),
        factor,
        dim,
        float(eps),
        NO_OUTPUT if mid is None else flat_out(mid),
        (flat_out(outs[0]), y1, y2),
    )
    rows = outs[0].size // dim
    if x.size <= SERIAL:
        _norm_blocks(*call, 0, rows)
    else:
        _threads.run(_norm_parallel, *call, rows)


def _in_float32(run: Any, rows: tuple[np.ndarray, ...], rest: tuple[Any, ...], out: Any) -> None:
    """A kernel whose rows and results are of one dtype, for others: a copy of each in float32."""
    targets = out if isinstance(out, tuple | list) else (out,)
    results = [None if target is None else np.empty(target.shape, np.float32) for target in targets]
    wide = [np.array(array, np.float32) for array in rows]
    run(*wide, *rest, out=tuple(results) if isinstance(out, tuple | list) else results[0])
    for target, result in zip(targets, results, strict=True):
        if target is not None and result is not None:
            np.copyto(target, round_to(result, target.dtype))


@kernel(ops.rms_norm, device="cpu")
def rms_norm(x, weight, eps, dtype=None, *, out):
    if out.dtype != x.dtype:
        _in_float32(rms_norm, (x,), (weight, eps), out)
        return
    _run(x, (weight,), eps, (out,))


@kernel(ops.rms_norm_mul, device="cpu")
def rms_norm_mul(x, norm_weight, scale, eps, *, out):
    _run(x, (norm_weight,), eps, (out,), merge=TIMES, b=scale)


@kernel(ops.rms_norm_triple, device="cpu")
def rms_norm_triple(x, wa, wb, wc, eps, dtype=None, *, out):
    if out[0].dtype != x.dtype:
        _in_float32(rms_norm_triple, (x,), (wa, wb, wc, eps), out)
        return
    _run(x, (wa, wb, wc), eps, out)


@kernel(ops.gated_rms_norm, device="cpu")
def gated_rms_norm(values, z, weight, eps, act="silu", *, out):
    _run(values, (weight,), eps, (out,), merge=GATED if act == "silu" else SIGMOID, b=z)


@kernel(ops.norm_add, device="cpu")
def norm_add(residual, x, weight, eps, *, out):
    if residual.dtype != x.dtype:
        _in_float32(norm_add, (residual, x), (weight, eps), out)
        return
    _run(x, (weight,), eps, (out,), merge=PLUS, b=residual)


@kernel(ops.norm_add_scalar, device="cpu")
def norm_add_scalar(residual, x, weight, scalar, eps, *, out):
    if residual.dtype != x.dtype:
        _in_float32(norm_add_scalar, (residual, x), (weight, scalar, eps), out)
        return
    _run(x, (weight,), eps, (out,), merge=PLUS, b=residual, scalar=scalar)


@kernel(ops.residual_norm, device="cpu")
def residual_norm(residual, x, weight, eps, write_sum, *, out):
    if residual.dtype != x.dtype:
        _in_float32(residual_norm, (residual, x), (weight, eps, write_sum), out)
        return
    y, total = out
    _run(x, (weight,), eps, (y,), source=ADDED, a=residual, mid=total)


@kernel(ops.residual_norm_scalar, device="cpu")
def residual_norm_scalar(residual, x, weight, scalar, eps, *, out):
    _run(x, (weight,), eps, (out,), source=ADDED, a=residual, scalar=scalar)


@kernel(ops.moe_wsum_norm_add, device="cpu")
def moe_wsum_norm_add(expert_out, weights, residual, norm_weight, eps, *, out):
    _run(expert_out, (norm_weight,), eps, (out,), slot_weights=weights, merge=PLUS, b=residual)


@kernel(ops.moe_wsum_dnorm_add, device="cpu")
def moe_wsum_dnorm_add(expert_out, weights, residual, res_norm_weight, moe_norm_weight, eps, *, out):
    operand = {"merge": PLUS_NORMED, "b": residual, "w_mid": res_norm_weight}
    _run(expert_out, (moe_norm_weight,), eps, (out,), slot_weights=weights, **operand)


@kernel(ops.post_attn_triple_norm, device="cpu")
def post_attn_triple_norm(hidden, attn_out, post_attn_w, wa, wb, wc, eps, *, out):
    if hidden.dtype != attn_out.dtype:
        _in_float32(post_attn_triple_norm, (hidden, attn_out), (post_attn_w, wa, wb, wc, eps), out)
        return
    res, *ys = out
    _run(attn_out, (wa, wb, wc), eps, tuple(ys), source=NORMED, a=hidden, w_mid=post_attn_w, mid=res)


@kernel(ops.post_ff_norm2_endlayer, device="cpu")
def post_ff_norm2_endlayer(addend, moe_accum, residual, w2, w3, layer_scalar, eps, return_mid, w1, *, out):
    mid, hidden = out
    if w1 is not None:  # no program of the CPU has it: the addend's norm in float32, then the rest of the op in it too
        first = np.array(addend, np.float32)
        rms_norm(first, w1, eps, out=first)
        addend = first
    if w1 is not None or residual.dtype != addend.dtype:
        rest = (w2, w3, layer_scalar, eps, return_mid, None)
        _in_float32(post_ff_norm2_endlayer, (addend, moe_accum, residual), rest, out)
        return
    first = {"source": NORMED, "a": addend, "w_mid": w2, "mid": mid}
    _run(moe_accum, (w3,), eps, (hidden,), merge=PLUS, b=residual, scalar=layer_scalar, **first)


@kernel(ops.moe_wsum_post_ff_norm2_endlayer, device="cpu")
def moe_wsum_post_ff_norm2_endlayer(
    expert_out, weights, addend, residual, w2, w3, layer_scalar, eps, return_mid, *, out
):
    mid, hidden = out
    first = {"slot_weights": weights, "source": NORMED, "a": addend, "w_mid": w2, "mid": mid}
    _run(expert_out, (w3,), eps, (hidden,), merge=PLUS, b=residual, scalar=layer_scalar, **first)


# -- the q and k heads of delta-net ----------------------------------------------------------------------------------


@njit
def _unit_heads(x, fmt, place, factor, added, heads, rinv, y, out):
    """heads ← x at place; y = heads / sqrt(sum(heads**2) + added) · factor → out at place."""
    n = heads.shape[0]
    load(x, fmt, place, heads.reshape(-1))
    unit_factors(heads, n, 1, added, rinv)
    scaled_rows(heads, n, rinv, factor, heads, ALONE, y)
    store(y.reshape(-1), fmt, out, place)


@njit
def qk_rows(x, fmt, total, heads, key_dim, key_offset, q_factor, added, out, start, stop):
    """Rows start … stop - 1 of `_qk_parallel`."""
    width = heads * key_dim
    scratch, rinv = np.empty((2, heads, key_dim), np.float32), np.empty(heads, np.float32)
    h, y = scratch[0], scratch[1]
    factors = np.full((2, key_dim), q_factor, np.float32)
    factors[1, :] = np.float32(1)
    per_number = 2 if fmt == FLOAT32 else 1  # uint16 patterns
    for row in range(start, stop):
        first = row * total
        for part in range(2):
            _unit_heads(x, fmt, first + part * key_offset, factors[part], added, h, rinv, y, out)
        _copy(x, out, per_number * (first + width), per_number * (first + key_offset))
        _copy(x, out, per_number * (first + key_offset + width), per_number * (first + total))


@njit
def _copy(x, out, start, stop):
    source, target = x[start:stop], out[start:stop]
    for i in range(source.size):
        target[i] = source[i]


# qk        q ← q / sqrt(sum(q**2) + added) · q_factor, k ← k / sqrt(sum(k**2) + added) per head; the rest is copied
# shapes    x, out [T, total] flat, uint16 patterns; q heads from column 0, k heads from key_offset: [heads, key_dim]
# threads   prange over chunks of tokens; a token belongs to one thread
# bytes     2 * T * total * itemsize
# limits    none
@njit(parallel=True)
def _qk_parallel(x, fmt, total, heads, key_dim, key_offset, q_factor, added, out, rows):
    step = max(1, _BLOCK * _CHUNK // total)
    for c in prange((rows + step - 1) // step):
        start, stop = c * step, min(rows, (c + 1) * step)
        qk_rows(x, fmt, total, heads, key_dim, key_offset, q_factor, added, out, start, stop)


@kernel(ops.rms_norm_qk, device="cpu")
def rms_norm_qk(x, num_k_heads, key_dim, key_offset, inv_scale, eps, eps_on, *, out):
    if x.size == 0:
        return
    rows, total = x.shape
    factor = np.float32(key_dim**-0.5 if inv_scale is None else inv_scale)
    added = float(eps * key_dim if eps_on == "mean" else eps)
    call = (flat(x), fmt(x), total, num_k_heads, key_dim, key_offset, factor, added, flat_out(out))
    if x.size <= SERIAL:
        qk_rows(*call, 0, rows)
    else:
        _threads.run(_qk_parallel, *call, rows)
