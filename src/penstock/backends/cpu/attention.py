"""Softmax attention, all of it in `_attend`; and the three launches that make a decode step in the sources."""

from __future__ import annotations

import numpy as np

from penstock import ops
from penstock.backends.cpu._attend import attend, attend_runs, floats, load, store, words, writable_words
from penstock.backends.cpu._formats import fmt
from penstock.backends.cpu._math import exp32
from penstock.backends.cpu.cache import kv_pages_append, split
from penstock.backends.cpu.compile import FUSED_MULTIPLY_ADD, SUM_IN_ANY_ORDER, keep_alive, njit
from penstock.backends.cpu.elementwise import sigmoid_gate
from penstock.backends.cpu.norm import rms_norm
from penstock.backends.cpu.rope import head_norm_rope, rope
from penstock.ops import kernel

_ZERO, _NOTHING = np.float32(0), np.float32(-np.inf)


@kernel(ops.attention_decode, device="cpu")
def attention_decode(q, k_cache, v_cache, seq_len, scale, window, slots, *, out):
    attend(q, k_cache, v_cache, seq_len, scale, window, slots, None, out)


@kernel(ops.attention_prefill, device="cpu")
def attention_prefill(q, k_cache, v_cache, start, scale, window, block_table, *, out):
    attend(q, k_cache, v_cache, int(start) + len(q), scale, window, None, block_table, out)


@kernel(ops.attention_paged, device="cpu")
def attention_paged(q, k_pages, v_pages, block_table, lengths, scale, window, gate, starts, sinks, *, out):
    if starts is None:
        attend(q, k_pages, v_pages, lengths, scale, window, None, block_table, out, sinks=sinks)
    else:
        attend_runs(q, k_pages, v_pages, lengths, scale, window, block_table, starts, out, sinks=sinks)
    if gate is not None:
        sigmoid_gate(out, gate, out=out)


@kernel(ops.split_q_gate, device="cpu")
def split_q_gate(q_proj, *, out):
    split(q_proj, *out)


def _turned(x, weight, inv_freq, positions, mscale, eps, out) -> None:
    if weight is None:
        rope(x, inv_freq, positions, None, mscale, False, None, out=out)
    else:
        head_norm_rope(x, weight, inv_freq, positions, eps, None, mscale, False, out=out)


@kernel(ops.attention_prepare, device="cpu", composed=True)
def attention_prepare(
    q, k, v, q_norm, k_norm, inv_freq, positions, key_pages, value_pages, block_table, H, rotary_dim, mscale, eps,
    gated, norm_values, sequence, q_bias, k_bias, v_bias, *, out,
) -> None:  # fmt: skip
    T, _, D = out[0].shape
    if T == 0:
        return
    q, k, v = (x if x is None or b is None else ops.add(x, b) for x, b in ((q, q_bias), (k, k_bias), (v, v_bias)))
    heads = q.reshape(T, H, -1)
    if gated:
        split(heads, *out)
        heads = out[0]
    _turned(heads, q_norm, inv_freq, positions, mscale, eps, out[0])
    keys = k.reshape(T, -1, D)
    values = keys if v is None else v.reshape(T, -1, D)
    if norm_values:
        normed = np.empty_like(values)
        rms_norm(values, None, eps, out=normed)
        values = normed
    turned = np.empty_like(keys)
    _turned(keys, k_norm, inv_freq, positions, mscale, eps, turned)
    kv_pages_append(turned, values, key_pages, value_pages, block_table, positions, sequence)


# -- one launch of the sources each ----------------------------------------------------------------------------------

_SCORES, _SOFTMAX, _VALUES = 0, 1, 2


@njit(fastmath=SUM_IN_ANY_ORDER)
def _dot(a, b):
    total = _ZERO
    for j in range(a.size):
        total += a[j] * b[j]
    return total


@njit(fastmath=FUSED_MULTIPLY_ADD)
def _add_scaled(acc, x, row):
    for j in range(acc.size):
        acc[j] += x * row[j]


@njit
def _softmax(row, seq_len):
    top = _NOTHING
    for p in range(seq_len):
        top = row[p] if (row[p] > top) | (row[p] != row[p]) else top
    shift = top if top > _NOTHING else _ZERO
    total = _ZERO
    for p in range(seq_len):
        row[p] = exp32(row[p] - shift)
        total += row[p]
    for p in range(seq_len):
        row[p] = row[p] / total if total != _ZERO else row[p]


# launch    _SCORES   y[h, p] = scale * x[h].cache[p, head(h)] for p < seq_len, the rest of y as it was
#           _SOFTMAX  y[h, :seq_len] = softmax(x[h, :seq_len]), the rest as x
#           _VALUES   y[h] = sum_p x[h, p] * cache[p, head(h)]
# shapes    x [H, wide], cache [max_seq, Hkv * D], y [H, columns], as words
# threads   one
# bytes     seq_len * D numbers of the cache for every query head, those of a group again from the CPU's cache
# limits    written for the sake of the step, not of speed: `attend` is the kernel of a decode step
@njit
def _launch(step, x, wide, cache, D, y, columns, seq_len, scale, heads_per_kv, form):
    H = x.size // wide // (2 if form == 0 else 1)
    row, head = np.empty(wide, np.float32), np.empty(D, np.float32)
    result = np.empty(columns, np.float32)
    for h in range(H):
        load(x, form, h * wide, floats(row, 0), wide)
        at, stride = h // heads_per_kv * D, H // heads_per_kv * D
        if step == _SCORES:
            for p in range(seq_len):
                load(cache, form, p * stride + at, floats(head, 0), D)
                result[p] = _dot(row, head) * scale
            store(floats(result, 0), form, y, h * columns, seq_len)
        elif step == _SOFTMAX:
            _softmax(row, seq_len)
            store(floats(row, 0), form, y, h * columns, columns)
        else:
            result[:] = _ZERO
            for p in range(seq_len):
                load(cache, form, p * stride + at, floats(head, 0), D)
                _add_scaled(result, row[p], head)
            store(floats(result, 0), form, y, h * columns, columns)
    keep_alive((row, head, result))


def _run_launch(step, x, cache, D, out, seq_len, scale, heads_per_kv) -> None:
    sizes = (out.shape[1], seq_len, np.float32(scale), heads_per_kv, fmt(x))
    _launch(step, words(x), x.shape[1], words(cache), D, writable_words(out), *sizes)


@kernel(ops.attention_scores, device="cpu")
def attention_scores(q, k_cache, seq_len, scale, heads_per_kv, seq_stride, *, out):
    _run_launch(_SCORES, q, k_cache, q.shape[1], out, seq_len, scale, heads_per_kv)


@kernel(ops.attention_softmax, device="cpu")
def attention_softmax(scores, seq_len, *, out):
    _run_launch(_SOFTMAX, scores, scores[:0], 1, out, seq_len, 1.0, 1)


@kernel(ops.attention_values, device="cpu")
def attention_values(scores, v_cache, seq_len, heads_per_kv, *, out):
    _run_launch(_VALUES, scores, v_cache, out.shape[1], out, seq_len, 1.0, heads_per_kv)
