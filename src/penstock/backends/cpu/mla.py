"""Multi-head latent attention: `_attend` with one latent row as key and value of all heads, and products with kv_b."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from penstock import ops
from penstock.backends.cpu import _simd
from penstock.backends.cpu._attend import (
    RAGGED,
    TILE,
    WHOLE,
    attend,
    attend_runs,
    claim,
    fetch,
    floats,
    forward,
    load,
    merge,
    products,
    raw,
    store,
    task_rows,
    tile,
    words,
    writable_words,
)
from penstock.backends.cpu._formats import FLOAT32, fmt, frozen
from penstock.backends.cpu._simd import F32, I8, I64, V16F
from penstock.backends.cpu._threads import run, threads
from penstock.backends.cpu.cache import mla_cache_append, split
from penstock.backends.cpu.compile import keep_alive, njit
from penstock.backends.cpu.linear import chosen, float_scales, kind_of
from penstock.backends.cpu.norm import rms_norm
from penstock.backends.cpu.quant import dequantize_into
from penstock.backends.cpu.rope import rope
from penstock.ops import kernel
from penstock.ops.ragged import runs
from penstock.quant import GgufTensor, QuantizedTensor

_NOTHING, _ZERO = np.float32(-np.inf), np.float32(0)


@kernel(ops.mla_split_q_kv, device="cpu")
def mla_split_q_kv(q_full, kv_pre, nope, kv_lora_rank, *, out):
    q_nope, q_pe, kv_lat, k_pe = out
    split(q_full, q_nope, q_pe)
    split(kv_pre, kv_lat, k_pe)


@kernel(ops.mla_prepare, device="cpu", composed=True)
def mla_prepare(
    q, kv, kv_norm, inv_freq, positions, latent_pages, rope_pages, block_table, H, nope, mscale, eps, sequence, *, out
):
    T = len(q)
    if T == 0:
        return
    q_nope, q_pe = out
    rope_dim = q_pe.shape[-1]
    latent, k_pe = np.empty((T, kv.shape[1] - rope_dim), kv.dtype), np.empty((T, 1, rope_dim), kv.dtype)
    split(q.reshape(T, H, -1), q_nope, q_pe)
    split(kv, latent, k_pe)
    rms_norm(latent, kv_norm, eps, out=latent)
    for part in (q_pe, k_pe):
        rope(part, inv_freq, positions, None, mscale, False, None, out=part)
    mla_cache_append(latent, k_pe[:, 0], latent_pages, rope_pages, positions, None, block_table, sequence)


# -- attention over latents ------------------------------------------------------------------------------------------


@kernel(ops.mla_sdpa, device="cpu")
def mla_sdpa(
    q_prime,
    q_pe,
    latent_cache,
    rope_k_cache,
    cache_len,
    softmax_scale,
    slots,
    block_table,
    starts,
    longest,
    up_to,
    *,
    out,
):
    rope = (q_pe, rope_k_cache)
    given = (q_prime, latent_cache, latent_cache, cache_len, softmax_scale, None)
    if starts is None:
        attend(*given, slots, block_table, out, rope)
    else:
        attend_runs(*given, block_table, starts, out, rope, longest, up_to)


# accumulate  M, Z, V = merge of the running state with the blocks of a tile, in their order
# shapes      M, Z float32 [H], V float32 [H, R]; parts [blocks, tasks, rows, state] as `attend` leaves them
# threads     one
# bytes       H * R numbers of every block, and twice those of V
# limits      none
@njit
def _accumulate(sizes, parts, running_max, denominator, accumulator):
    R, state = sizes.Dv, sizes.state
    acc = np.empty(state, np.float32)
    for task in range(sizes.tiles):
        _, _, first, rows = task_rows(sizes, task)
        for r in range(rows):
            h = first + r
            for j in range(R):
                acc[j] = accumulator[h, j]
            acc[state - 2], acc[state - 1] = running_max[h], denominator[h]
            for block in range(sizes.blocks):
                at = ((block * sizes.tiles + task) * sizes.rows + r) * state
                merge(floats(acc, 0), floats(parts, at), state, R)
            for j in range(R):
                accumulator[h, j] = acc[j]
            running_max[h], denominator[h] = acc[state - 2], acc[state - 1]
    keep_alive(acc)


@kernel(ops.mla_sdpa_tile_accumulate, device="cpu")
def mla_sdpa_tile_accumulate(
    running_max, denominator, accumulator, q_prime, q_pe, latent_cache, rope_k_cache, start, end, softmax_scale, first
):
    if first:
        running_max.fill(-np.inf)
        denominator.fill(0)
        accumulator.fill(0)
    if start == end:
        return
    rope = (q_pe, rope_k_cache)
    done = attend(q_prime, latent_cache, latent_cache, end, softmax_scale, end - start, None, None, None, rope)
    assert done is not None
    _accumulate(*done, running_max, denominator, accumulator)


# finalize  y[h] = V[h] / Z[h], 0 where Z[h] is not above 0
# shapes    Z float32 [H], V float32 [H, R] as words, y [H, R] as words of any format
# threads   one
# bytes     V in, y out
# limits    none; y may be V
@njit
def _finalize(denominator, accumulator, form, y):
    H = denominator.size
    R = accumulator.size // 2 // H
    row = np.empty(R, np.float32)
    for h in range(H):
        load(accumulator, FLOAT32, h * R, floats(row, 0), R)
        z = denominator[h]
        for j in range(R):
            row[j] = row[j] / z if z > _ZERO else _ZERO
        store(floats(row, 0), form, y, h * R, R)
    keep_alive(row)


@kernel(ops.mla_sdpa_finalize, device="cpu")
def mla_sdpa_finalize(denominator, accumulator, dtype, *, out):
    _finalize(frozen(denominator), words(accumulator), fmt(out), writable_words(out))


# -- products with the weight between latents and heads --------------------------------------------------------------

TOKENS = 64  # rows of x that a task takes
CHUNK = 64  # rows of w that become float32 at once
STRIP = 16  # rows of codes that are added up in registers before the next columns
_WIDTH = 64  # columns that a single row of x adds up at once
_FEW = 1 << 18  # multiplications that one thread does before others are awake

if numba.config.DISABLE_JIT:

    def dots(w, w_row, x, x_row, y, y_row, K, rows, tokens):
        for t in range(tokens):
            for r in range(rows):
                y[t * y_row + r] = np.dot(w[r * w_row : r * w_row + K], x[t * x_row : t * x_row + K])

else:
    dots = _simd.float_dots


@njit
def _dot_rows(w, n, x, tokens, y, y_row):
    """y[t, r] = w[r].x[t] for n rows; there is room for 4 rows of w, of x and of columns of y at a time."""
    K = w.shape[1]
    if tokens == 1:
        for r in range(0, n, 4):
            dots(floats(w, r * K), K, floats(x, 0), K, forward(y, r), y_row, K, 4, 1)
        return
    for r in range(0, n, 4):
        for t in range(0, tokens, 4):
            dots(floats(w, r * K), K, floats(x, t * K), K, forward(y, t * y_row + r), y_row, K, 4, 4)


@njit
def _add_rows(x, x_row, w, n, tokens, y, keep):
    """y[t] = sum_i x[t, i] * w[i] over n rows, added to y if `keep`; sums in the order of i."""
    K, y_row = w.shape[1], y.shape[1]
    if tokens > 1:
        products(x, x_row, 1, floats(w, 0), K, floats(y, 0), y_row, n, tokens, K, keep, 0)
        return
    for j in range(0, K, _WIDTH):
        b, c = floats(w, j), floats(y, j)
        if K - j >= _WIDTH:
            tile(x, x_row, 1, b, K, c, y_row, n, 1, K - j, keep, 0, 1, _WIDTH, WHOLE)
        else:
            tile(x, x_row, 1, b, K, c, y_row, n, 1, K - j, keep, 0, 1, _WIDTH, RAGGED)


@intrinsic(prefer_literal=True)
def _add_coded_rows(typingctx, codes, stride, scales, biases, groups, x, n, y, K, gs, keep, kind, how):
    """y[c] = sum_i x[i] * w[i, c] over the n rows that `dense_codes` would make, added to y if `keep`.

    scales, biases float32 [n, groups]. The sums of `_add_rows`, bit for bit, without storing the rows.
    """
    if (fixed := _simd._constants(kind, how)) is None:
        return None
    size, pointer = types.int64, types.CPointer(types.float32)
    sig = types.void(
        types.CPointer(types.uint8), size, pointer, pointer, size, pointer, size, pointer, size, size, size, kind, how
    )

    def codegen(context, builder, sig, args):
        code, (kind, how) = _simd._Code(builder), fixed
        per_group = 16 if kind == _simd.NVFP4 else 32
        codes, stride, scales, biases, groups, x, n, y, K, gs, keep = args[:11]
        b = builder
        fma = code.function("llvm.fma.v16f32", V16F, V16F, V16F, V16F)
        group_of = code.divider(gs)
        kept = b.icmp_signed("!=", keep, I64(0))

        def columns(k, half=False):
            count = 2 if half else 4
            blocks = [group_of(b.add(k, I64(block))) for block in range(0, 16 * count, per_group)]

            def row(i, *acc):
                part = code.signed(code.at(codes, b.mul(i, stride), I8), k, kind, half, how)
                weight = code.splat(code.load(code.at(x, i, F32), F32))
                new = []
                for v in range(count):
                    place = b.add(b.mul(i, groups), blocks[16 * v // per_group])
                    bases = (scales,) if kind in _simd.SCALES else (scales, biases)
                    s, *bias = (code.splat(code.load(code.at(base, place, F32), F32)) for base in bases)
                    q = code.numbers(part, range(16 * v, 16 * v + 16), kind)
                    new.append(b.call(fma, [weight, code.weight(q, s, bias[0] if bias else None), acc[v]]))
                return new

            places = [code.at(code.at(y, k, F32), 16 * v, F32) for v in range(count)]
            start = [b.select(kept, code.load(place, V16F), _simd._const(V16F, 0.0)) for place in places]
            for total, place in zip(code.loop(0, n, 1, row, *start), places, strict=True):
                code.store(total, place)

        whole = b.and_(K, I64(-64))
        code.loop(0, whole, 64, columns)
        code.loop(whole, K, 64, lambda k: columns(k, half=True))
        return context.get_dummy_value()

    return sig, codegen


@functools.cache
def _per_head(kind: int, how: int) -> tuple[Any, Any]:
    """The product for codes of a kind (0: dense), on one thread and on all."""
    bits = _simd.width(kind)
    if bits:

        @njit
        def load_groups(scales, biases, form, at, count, groups):
            load(scales, form, at, floats(groups, 0), count)
            load(biases, form, at, floats(groups, groups.shape[1]), count)

        @njit
        def dense(w, scales, biases, form, gs, row, n, groups, out):
            K = out.shape[1]
            per_row = K // gs
            load_groups(scales, biases, form, row * per_row, n * per_row, groups)
            for i in range(n):
                codes = raw(w, (row + i) * K * bits // 8)
                s, b = raw(groups, 4 * i * per_row), raw(groups, 4 * (groups.shape[1] + i * per_row))
                _simd.dense_codes(codes, s, b, floats(out, i * K), K, gs, kind, FLOAT32, how)

        @njit
        def one_row(by_rows, w, scales, biases, form, gs, row, n, K, groups, x, y):
            """The product of a single row of x; False: not done here."""
            per_row = K // gs
            load_groups(scales, biases, form, row * per_row, n * per_row, groups)
            stride = K * bits // 8
            if by_rows:
                for i in range(0, n, STRIP):
                    s, b = floats(groups, i * per_row), floats(groups, groups.shape[1] + i * per_row)
                    codes, m = raw(w, (row + i) * stride), min(STRIP, n - i)
                    _add_coded_rows(codes, stride, s, b, per_row, forward(x, i), m, y, K, gs, i, kind, how)
                return True
            for i in range(0, n, 4):
                s, b = floats(groups, i * per_row), floats(groups, groups.shape[1] + i * per_row)
                codes, target = raw(w, (row + i) * stride), forward(y, i)
                if n - i >= 4:
                    _simd.coded_dots(codes, stride, s, b, per_row, x, target, K, gs, kind, 4, how)
                else:
                    for j in range(n - i):
                        s, b = forward(s, j * per_row), forward(b, j * per_row)
                        codes = raw(w, (row + i + j) * stride)
                        _simd.coded_dots(codes, stride, s, b, per_row, x, forward(target, j), K, gs, kind, 1, how)
            return True

    else:

        @njit
        def dense(w, scales, biases, form, gs, row, n, groups, out):
            for i in range(n):
                load(scales, form, (row + i) * out.shape[1], floats(out, i * out.shape[1]), out.shape[1])

        @njit
        def one_row(by_rows, w, scales, biases, form, gs, row, n, K, groups, x, y):
            return False

    @njit
    def work(counter, by_rows, w, scales, biases, shape, x, form, y):
        T, H, x_heads, per_head, first, n, K, gs, w_form = shape
        X, Y = (n, K) if by_rows else (K, n)
        tokens = min(T, TOKENS)
        xs = np.empty((tokens + 3, X), np.float32)
        rows = np.empty((CHUNK, K), np.float32)
        groups = np.empty((2, max(n, CHUNK) * (K // gs)), np.float32)
        ys = np.empty((tokens + TILE, Y + _WIDTH), np.float32)
        blocks = (T + TOKENS - 1) // TOKENS
        unit = claim(counter)
        while unit < H * blocks:
            following = claim(counter)
            if bits and T == 1:  # its codes arrive while this head is worked on
                fetch(floats(w, (following * per_head + first) * K * bits // 32), 0, 1, n * K * bits // 32)
            h, t0 = unit // blocks, unit % blocks * TOKENS
            row, count = h * per_head + first, min(TOKENS, T - t0)
            for t in range(count):
                load(x, form, ((t0 + t) * x_heads + h % x_heads) * X, floats(xs, t * X), X)
            done = False
            if T == 1:
                done = one_row(by_rows, w, scales, biases, w_form, gs, row, n, K, groups, floats(xs, 0), floats(ys, 0))
            for i in range(0, 0 if done else n, CHUNK):
                m = min(CHUNK, n - i)
                dense(w, scales, biases, w_form, gs, row + i, m, groups, rows)
                if by_rows:
                    _add_rows(floats(xs, i), X, rows, m, count, ys, i)
                else:
                    _dot_rows(rows, m, xs, count, floats(ys, i), ys.shape[1])
            for t in range(count):
                store(floats(ys, t * ys.shape[1]), form, y, ((t0 + t) * H + h) * Y, Y)
            unit = following
        keep_alive((xs, rows, groups, ys))

    # per_head  y[t, h, j] = sum_c w[h, first + j, c] * x[t, h, c], or by rows
    #           y[t, h, c] = sum_j x[t, h, j] * w[h, first + j, c]
    # shapes    w [H, per_head, K] packed bytes with scales and biases [H, per_head, K / gs] as words, or words alone in
    #           `scales`; n rows of each head count; x [T, H or 1, K or n], y [T, H, n or K] as words; float32 sums
    # threads   workers take heads, 64 rows of x at a time; a sum belongs to one of them
    # bytes     n rows of w for each head and 64 rows of x; for several x they become float32 in cache, 64 at a time
    # limits    K a multiple of 32 for packed w
    @njit(parallel=True)
    def work_all(workers, counter, by_rows, w, scales, biases, shape, x, form, y):
        for _ in prange(workers):
            work(counter, by_rows, w, scales, biases, shape, x, form, y)

    return work, work_all


_NO_BYTES, _NO_WORDS = np.zeros(0, np.uint8), words(np.zeros(0, np.float32))
_NO_BYTES.flags.writeable = False


def _multiply(w: Any, x: np.ndarray, out: np.ndarray, by_rows: bool, first: int, n: int) -> None:
    """The product of x [(T,) H or 1, …] with rows first … first + n - 1 of each head of w [H * P, K] or [H, P, K]."""
    H, K = out.shape[-2], w.shape[-1]
    T = out.size // (H * out.shape[-1])
    if T == 0:
        return
    if isinstance(w, GgufTensor) or (isinstance(w, QuantizedTensor) and numba.config.DISABLE_JIT):
        plain = np.empty(w.shape, np.float32)
        dequantize_into(w, plain)
        w = plain
    if isinstance(w, QuantizedTensor):
        packed = w.packed.reshape(-1).view(np.uint8)
        packed.flags.writeable = False
        scales, biases = (w.scales, w.biases) if w.mode == "affine" else (float_scales(w),) * 2
        kind, weights, packing = kind_of(w), (packed, words(scales), words(biases)), (w.group_size, fmt(scales))
    else:
        kind, weights, packing = 0, (_NO_BYTES, words(w), _NO_WORDS), (K, fmt(w))
    per_head = w.shape[0] // H if w.ndim == 2 else w.shape[1]
    X = n if by_rows else K
    x_heads = x.size // (T * X)
    shape = (T, H, x_heads, per_head, first, n, K, *packing)
    arguments = (np.zeros(1, np.int64), by_rows, *weights, shape, words(x), fmt(x), writable_words(out))
    work, work_all = _per_head(kind, chosen(None))
    if T * H * K * n <= _FEW:
        work(*arguments)
    else:
        run(work_all, min(threads(), H * -(-T // TOKENS)), *arguments)


@kernel(ops.mla_q_prime, device="cpu")
def mla_q_prime(q_nope, kv_b, *, out):
    if len(kv_b.shape) == 3:
        _multiply(kv_b, q_nope, out, False, 0, kv_b.shape[1])
    else:
        _multiply(kv_b, q_nope, out, True, 0, q_nope.shape[-1])


@kernel(ops.mla_out_per_head, device="cpu")
def mla_out_per_head(v_combine, kv_b, nope, v_head_dim, *, out):
    n = out.shape[-1]
    first = 0 if len(kv_b.shape) == 3 else kv_b.shape[0] // out.shape[-2] - n
    _multiply(kv_b, v_combine, out, False, first, n)


@kernel(ops.mla_expand, device="cpu")
def mla_expand(latent, kv_b, unembed_out, heads, nope, v_head_dim, *, out):
    k, v = out
    x = latent[:, None]
    if unembed_out is None:
        _multiply(kv_b, x, k, False, 0, k.shape[-1])
        _multiply(kv_b, x, v, False, k.shape[-1], v.shape[-1])
    else:
        _multiply(kv_b, x, k, True, 0, latent.shape[1])
        _multiply(unembed_out, x, v, False, 0, v.shape[-1])


@kernel(ops.mla_prefill, device="cpu", composed=True)
def mla_prefill(
    q_nope, q_pe, latent_cache, rope_k_cache, start, softmax_scale, kv_b, unembed_out, block_table, starts, longer_than,
    up_to, *, out,
):  # fmt: skip
    if starts is not None:
        out.fill(0)
        for b, low, high in runs(starts):
            if high - low > longer_than and (up_to is None or start[low] + high - low <= up_to):
                caches = (latent_cache, rope_k_cache, start[low], softmax_scale, kv_b, unembed_out, block_table[b])
                mla_prefill(q_nope[low:high], q_pe[low:high], *caches, None, 0, None, out=out[low:high])
        return
    T, H, nope = q_nope.shape
    if T == 0:
        return
    end, rope = int(start) + T, q_pe.shape[2]
    latent, rope_k = (_first_rows(cache, block_table, end) for cache in (latent_cache, rope_k_cache))
    keys, values = np.empty((end, H, nope + rope), q_nope.dtype), np.empty((end, *out.shape[1:]), q_nope.dtype)
    k = np.empty((end, H, nope), q_nope.dtype)
    mla_expand(latent, kv_b, unembed_out, H, nope, None, out=(k, values))
    keys[..., :nope], keys[..., nope:] = k, rope_k[:, None]
    q = np.concatenate([q_nope, q_pe], axis=2)
    rows = keys.reshape(end, H * (nope + rope))
    attend(q, rows, values.reshape(end, -1), end, softmax_scale, None, None, None, out)


def _first_rows(cache, block_table, end):
    """Rows of positions 0 … end − 1 as one array: a view of a contiguous cache, a copy of pages."""
    if block_table is None:
        return cache.reshape(len(cache), -1)[:end]
    page = cache.shape[1]
    pages = cache[block_table[: -(-end // page)]]
    return pages.reshape(len(pages) * page, -1)[:end]
