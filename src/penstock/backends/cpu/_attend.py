"""Softmax attention over a cache: the core of attention.py and mla.py.

The query rows of a key-value head lie in the lanes of vectors: row r = t * G + g is its query head g of token t.
Positions are cut into blocks of BLOCK at fixed places. A block gives each row its maximum, its sum of weights and its
weighted values; blocks are merged in the order of their positions. So the result of a row depends on nothing but its
query and the keys it sees: not on threads, nor on other rows of the call, nor on how the cache lies in memory. A row of
a prefill, the same row in another chunk and the decode step of that token have the same bits.

    scores   s[p, r] = sum_d k[p, d] * q[r, d]      tiles of a product with keys as rows and r in lanes
    values   y[r, c] = sum_p w[p, r] * v[p, c]      the same product with r as rows and c in lanes

Arrays come as 16-bit words, two of them to a float32 number: one signature serves all formats.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from penstock.backends.cpu import _math, _simd
from penstock.backends.cpu._formats import BFLOAT16, FLOAT16, FLOAT32, fmt, frozen, load_row, rounded
from penstock.backends.cpu._math import exp32
from penstock.backends.cpu._simd import F32, I8, I32, I64, LANES, V16I
from penstock.backends.cpu._threads import run, threads
from penstock.backends.cpu.compile import keep_alive, njit
from penstock.backends.cpu.features import usable_features
from penstock.ops.ragged import equal_runs

BLOCK = 256  # positions
RUN = 64  # positions whose values are added up in registers before the next columns
FEW_RUN = 16  # the same for halves of a decode step
ROWS = 64  # query rows of a task

# A tile of products holds rows x vectors of 16 sums in registers: 16 of AVX-512's 32, else 8 of 16 half as wide.
_WIDE = "avx512f" in usable_features()
TILE = 8 if _WIDE else 4
VECTORS = 2 if _WIDE else 1
STRIDE = LANES * VECTORS  # columns of a tile
HALF = 8  # rows and columns of the tiles of scores where 8 query rows share the keys of a head
_LINE = 16  # numbers in 64 bytes

WHOLE, RAGGED, MARKED, KEYS = 0, 1, 2, 3
_WORD = np.dtype(np.uint16)
_MARK = -0x80000000  # bits of -0.0, the weight of a key that a row does not see; exp never gives it

_FEW = 1 << 19  # multiplications that one thread does before others are awake
_PARTS = 1 << 24  # numbers that the results of single blocks may take

_NOTHING = np.float32(-np.inf)
_ZERO, _ONE, _MINUS_ZERO = np.float32(0), np.float32(1), np.float32(-0.0)
_UNSEEN = np.float32(-1)  # sum of weights of a row that sees no key of a block
_ALL = 1 << 40  # a window that no cache fills


class Sizes(NamedTuple):
    """T rows each of B sequences, G query heads to each of Hkv heads; keys of D + E numbers, values of Dv."""

    B: int
    T: int
    G: int
    Hkv: int
    D: int
    E: int
    Dv: int
    page: int  # rows of a page
    fmt: int
    rows: int  # query rows of a task, a multiple of width
    width: int  # lanes of a panel: the queries and scores of a task are stored panel by panel
    tiles: int  # tasks of a head
    blocks: int  # blocks of a task where each of them is worked on alone, else 0
    state: int  # numbers in the state of a row: values with room for whole tiles, then maximum and sum of weights


# -- intrinsics, and what stands for them without a compiler ---------------------------------------------------------

_FLOAT = types.CPointer(types.float32)

if numba.config.DISABLE_JIT:

    def floats(array, index):
        return array.reshape(-1).view(np.float32)[index:]

    def raw(array, index):
        return array.reshape(-1).view(np.uint8)[index:]

    def forward(pointer, count):
        return pointer[count:]

    def peek(pointer, index):
        return pointer[index]

    def poke(pointer, index, value):
        pointer[index] = value

    def claim(counter):
        counter[0] += 1
        return counter[0] - 1

    def widen(array, at, form, out, n):
        load_row(array[at : at + n], form, out[:n])

    def tile(a, a_row, a_step, b, b_step, c, c_row, K, live, cols, keep, ahead, rows, lanes, kind):
        width = min(cols, lanes)
        for i in range(rows):
            total = c[i * c_row : i * c_row + width]
            if not keep:
                total[:] = 0
            for k in range(K):
                x = a[min(i, live - 1) * a_row + k * a_step]
                if kind != MARKED or x.view(np.int32) != _MARK:
                    total += x * b[k * b_step : k * b_step + width]

    def fetch(pointer, step, rows, count):
        pass

    def weights(s, n, step, scale, low, high, top, total, lanes):
        x = np.lib.stride_tricks.as_strided(s, (n, lanes), (4 * step, 4))
        seen = (low[:lanes] <= np.arange(n)[:, None]) & (np.arange(n)[:, None] <= high[:lanes])
        x[:] = np.where(seen, x * scale, _NOTHING)
        most = x.max(axis=0, initial=_NOTHING)
        x[:] = np.where(seen, np.exp(x - np.where(most > _NOTHING, most, _ZERO)), _MINUS_ZERO)
        top[:lanes], total[:lanes] = most, x.sum(axis=0)

else:

    @intrinsic(prefer_literal=True)
    def floats(typingctx, array, index):
        """Pointer to float32 number `index` of a contiguous array, whatever its elements are called."""
        sig = _FLOAT(array, types.int64)

        def codegen(context, builder, sig, args):
            data = context.make_array(sig.args[0])(context, builder, args[0]).data
            return builder.gep(builder.bitcast(data, F32.as_pointer()), [args[1]], source_etype=F32)

        return sig, codegen

    @intrinsic(prefer_literal=True)
    def raw(typingctx, array, index):
        """Pointer to byte `index` of a contiguous array."""
        sig = types.CPointer(types.uint8)(array, types.int64)

        def codegen(context, builder, sig, args):
            data = context.make_array(sig.args[0])(context, builder, args[0]).data
            return builder.gep(builder.bitcast(data, I8.as_pointer()), [args[1]], source_etype=I8)

        return sig, codegen

    @intrinsic
    def forward(typingctx, pointer, count):
        def codegen(context, builder, sig, args):
            return builder.gep(args[0], [args[1]], source_etype=F32)

        return _FLOAT(_FLOAT, types.int64), codegen

    @intrinsic
    def peek(typingctx, pointer, index):
        def codegen(context, builder, sig, args):
            return builder.load(builder.gep(args[0], [args[1]], source_etype=F32), typ=F32)

        return types.float32(_FLOAT, types.int64), codegen

    @intrinsic
    def poke(typingctx, pointer, index, value):
        def codegen(context, builder, sig, args):
            builder.store(args[2], builder.gep(args[0], [args[1]], source_etype=F32))
            return context.get_dummy_value()

        return types.void(_FLOAT, types.int64, types.float32), codegen

    @intrinsic
    def claim(typingctx, counter):
        """counter[0], counted up by one afterwards: each number goes to one thread."""

        def codegen(context, builder, sig, args):
            data = context.make_array(sig.args[0])(context, builder, args[0]).data
            return builder.atomic_rmw("add", data, I64(1), "monotonic")

        return types.int64(counter), codegen

    @njit
    def widen(array, at, form, out, n):
        if form == FLOAT16:
            _simd.dense_row(raw(array, 2 * at), out, n, FLOAT16)
        else:
            _simd.dense_row(raw(array, 2 * at), out, n, BFLOAT16)

    def _vector(lanes):
        return ir.VectorType(F32, min(lanes, LANES))

    def _splat(builder, scalar, vector):
        empty = ir.Constant(ir.VectorType(scalar.type, vector.count), ir.Undefined)
        zeros = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
        return builder.shuffle_vector(builder.insert_element(empty, scalar, I32(0)), empty, zeros)

    def _fetch(code, pointer, locality):
        """Ask for the cache line of an address, which need not exist."""
        prefetch = code.function("llvm.prefetch.p0", ir.VoidType(), I8.as_pointer(), I32, I32, I32)
        code.b.call(prefetch, [code.b.bitcast(pointer, I8.as_pointer()), I32(0), I32(locality), I32(1)])

    @intrinsic
    def fetch(typingctx, pointer, step, rows, count):
        """Ask for the first `count` numbers of rows that follow at `step`, into the second cache."""
        n = types.int64

        def codegen(context, builder, sig, args):
            code = _simd._Code(builder)
            pointer, step, rows, count = args

            def row(i):
                start = code.at(pointer, builder.mul(i, step), F32)
                code.loop(0, count, _LINE, lambda j: _fetch(code, code.at(start, j, F32), 2))

            code.loop(0, rows, 1, row)
            return context.get_dummy_value()

        return types.void(_FLOAT, n, n, n), codegen

    @intrinsic(prefer_literal=True)
    def tile(typingctx, a, a_row, a_step, b, b_step, c, c_row, K, live, cols, keep, ahead, rows, lanes, kind):
        """c[i, j] = sum_k a[i, k] * b[k, j] for a few rows i and 8, 16 or 32 columns j; added to c if `keep`.

        Element [i, k] of a is a[min(i, live - 1) * a_row + k * a_step]; rows of b and c follow at b_step and c_row.
        Sums are fused multiply-adds in the order of k, so tiles of any form give the same bits. RAGGED reads only
        `cols` columns of b (zeros for the others); MARKED too, and it leaves out products with marked elements of a.
        KEYS asks for what lies `ahead` of a, the others for what lies ahead of b.
        """
        if (fixed := _simd._constants(rows, lanes, kind)) is None:
            return None
        n = types.int64
        sig = types.void(_FLOAT, n, n, _FLOAT, n, _FLOAT, n, n, n, n, n, n, rows, lanes, kind)

        def codegen(context, builder, sig, args):
            code, (R, columns, how) = _simd._Code(builder), fixed
            a, a_row, a_step, b_rows, b_step, c, c_row, K, live, cols, keep, ahead = args[:12]
            b, vector = builder, _vector(columns)
            V = columns // vector.count
            fma = code.function(f"llvm.fma.v{vector.count}f32", vector, vector, vector, vector)
            last = b.sub(live, I64(1))
            a_rows = []
            for i in range(R):
                row = b.select(b.icmp_signed("<", I64(i), last), I64(i), last)
                a_rows.append(code.at(a, b.mul(row, a_row), F32))
            masked = how in (RAGGED, MARKED)
            masks = [code.below(b.sub(cols, I64(LANES * v))) if masked else None for v in range(V)]
            rows = [code.at(c, b.mul(I64(i), c_row), F32) for i in range(R)]
            places = [code.at(row, LANES * v, F32) for row in rows for v in range(V)]
            kept = b.icmp_signed("!=", keep, I64(0))
            zero = ir.Constant(vector, [0.0] * vector.count)
            start = [b.select(kept, code.load(place, vector), zero) for place in places]

            def step(k, *acc):
                b_row = code.at(b_rows, b.mul(k, b_step), F32)
                if masked:
                    bs = [code.masked(code.at(b_row, LANES * v, F32), vector, masks[v]) for v in range(V)]
                else:
                    bs = [code.load(code.at(b_row, LANES * v, F32), vector) for v in range(V)]
                if how == WHOLE:
                    for v in range(V):
                        _fetch(code, code.at(code.at(b_row, ahead, F32), LANES * v, F32), 2)
                offset = b.mul(k, a_step)
                new = []
                for i in range(R):
                    x = _splat(b, code.load(code.at(a_rows[i], offset, F32), F32), vector)
                    for v in range(V):
                        total = b.call(fma, [x, bs[v], acc[i * V + v]])
                        if how == MARKED:
                            mark = b.icmp_signed("==", b.bitcast(x, V16I), _simd._const(V16I, _MARK))
                            total = b.select(mark, acc[i * V + v], total)
                        new.append(total)
                return new

            def line(k, *acc):
                for row in a_rows:
                    _fetch(code, code.at(code.at(row, ahead, F32), k, F32), 2)
                return code.loop(k, b.add(k, I64(_LINE)), 1, step, *acc)

            done = I64(0)
            if how == KEYS:
                done = b.and_(K, I64(-_LINE))
                start = code.loop(0, done, _LINE, line, *start)
            for total, place in zip(code.loop(done, K, 1, step, *start), places, strict=True):
                code.store(total, place)
            return context.get_dummy_value()

        return sig, codegen

    @intrinsic(prefer_literal=True)
    def weights(typingctx, s, n, step, scale, low, high, top, total, lanes):
        """Scores to exp(score * scale - top), top the largest of each lane; -0.0 where a lane does not see a key.

        s [n, step] with 8 or 16 lanes; lane i sees keys low[i] … high[i]; total is the sum of its weights. A NaN among
        its scores is the top of a lane.
        """
        if (fixed := _simd._constants(lanes)) is None:
            return None
        sig = types.void(_FLOAT, types.int64, types.int64, types.float32, *[_FLOAT] * 4, lanes)

        def codegen(context, builder, sig, args):
            code, (count,) = _simd._Code(builder), fixed
            s, n, step, scale, low, high, top, total = args[:8]
            b, vector = builder, _vector(count)
            low, high, scale = code.load(low, vector), code.load(high, vector), _splat(b, scale, vector)

            def const(x):
                return ir.Constant(vector, [float(x)] * count)

            def at(p):
                position = _splat(b, b.sitofp(p, F32), vector)
                seen = b.and_(b.fcmp_ordered("<=", low, position), b.fcmp_ordered("<=", position, high))
                return code.at(s, b.mul(p, step), F32), seen

            def largest(p, most):
                place, seen = at(p)
                x = b.select(seen, b.fmul(code.load(place, vector), scale), const(-np.inf))
                code.store(x, place)
                above = b.or_(b.fcmp_ordered(">", x, most), b.fcmp_unordered("uno", x, x))
                return [b.select(above, x, most)]

            (most,) = code.loop(0, n, 1, largest, const(-np.inf))
            code.store(most, top)
            shift = b.select(b.fcmp_ordered(">", most, const(-np.inf)), most, const(0))

            def weight(p, acc):
                place, seen = at(p)
                x = _exp(code, b.fsub(code.load(place, vector), shift))
                x = b.select(seen, x, const(-0.0))
                code.store(x, place)
                return [b.fadd(acc, x)]

            (acc,) = code.loop(0, n, 1, weight, const(0))
            code.store(acc, total)
            return context.get_dummy_value()

        return sig, codegen

    def _exp(code, x):
        """exp32 of a vector, for numbers up to 88."""
        b, vector = code.b, x.type
        ints = ir.VectorType(I32, vector.count)
        fma = code.function(f"llvm.fma.v{vector.count}f32", vector, vector, vector, vector)
        rint = code.function(f"llvm.rint.v{vector.count}f32", vector, vector)

        def const(value):
            return ir.Constant(vector, [float(value)] * vector.count)

        def power_of_two(n):
            biased = b.add(n, ir.Constant(ints, [127] * vector.count))
            return b.bitcast(b.shl(biased, ir.Constant(ints, [23] * vector.count)), vector)

        least = const(_math._EXP_LEAST)
        c = b.select(b.fcmp_ordered(">", x, least), x, least)  # NaN becomes a number here and comes back at the end
        c = b.select(b.fcmp_ordered("<", c, const(_math._EXP_MOST)), c, const(_math._EXP_MOST))
        n = b.call(rint, [b.fmul(c, const(_math._LOG2_E))])
        r = b.call(fma, [n, const(-_math._LN2_HIGH), c])
        r = b.call(fma, [n, const(-_math._LN2_LOW), r])
        y = const(_math._E4)
        for coefficient in (_math._E3, _math._E2, _math._E1, _math._E0):
            y = b.call(fma, [y, r, const(coefficient)])
        y = b.call(fma, [b.fmul(r, r), y, r])
        y = b.fadd(y, const(1))
        k = b.fptosi(n, ints)
        half = b.ashr(k, ir.Constant(ints, [1] * vector.count))
        y = b.fmul(b.fmul(y, power_of_two(half)), power_of_two(b.sub(k, half)))
        return b.select(b.fcmp_ordered("==", x, x), y, x)


# -- rows in and out -------------------------------------------------------------------------------------------------


def words(array: np.ndarray) -> np.ndarray:
    """A contiguous array as a read-only list of 16-bit words."""
    view = array.ravel().view(_WORD)
    view.setflags(False)
    return view


def writable_words(array: np.ndarray) -> np.ndarray:
    assert array.flags.c_contiguous
    return array.ravel().view(_WORD)


@njit
def load(array, form, at, out, n):
    """out[j] = number at + j of an array of words, for j < n; out is a pointer."""
    if form == FLOAT32:
        source = floats(array, at)
        for j in range(n):
            poke(out, j, peek(source, j))
    else:
        widen(array, at, form, out, n)


@njit
def store(values, form, array, at, n):
    """Number at + j of an array of words = values[j], for j < n; values is a pointer."""
    if form == FLOAT32:
        target = floats(array, at)
        for j in range(n):
            poke(target, j, peek(values, j))
        return
    row = array[at : at + n]
    if form == FLOAT16:
        for j in range(n):
            row[j] = rounded(peek(values, j), FLOAT16)
    else:
        for j in range(n):
            row[j] = rounded(peek(values, j), BFLOAT16)


# -- one block of keys -----------------------------------------------------------------------------------------------


@njit
def products(a, a_row, a_step, b, b_step, c, c_row, K, rows, cols, keep, ahead):
    """c = a @ b (+ c) tile by tile. c has room for a multiple of TILE rows and of STRIDE columns.

    What lies `ahead` of b is asked for on the way.
    """
    for j in range(0, cols, STRIDE):
        left = cols - j
        for i in range(0, rows, TILE):
            x, y, z = forward(a, i * a_row), forward(b, j), forward(c, i * c_row + j)
            if left >= STRIDE:
                tile(x, a_row, a_step, y, b_step, z, c_row, K, rows - i, left, keep, ahead, TILE, STRIDE, WHOLE)
            else:
                tile(x, a_row, a_step, y, b_step, z, c_row, K, rows - i, left, keep, ahead, TILE, STRIDE, RAGGED)


@njit
def _scores(keys, step, q, s, n, K, width, keep, ahead):
    """s[p, r] = sum_d keys[p, d] * q[d, r] of n keys for the rows of one panel, added to s if `keep`."""
    if width == HALF:
        for i in range(0, n, HALF):
            a, c = forward(keys, i * step), forward(s, i * width)
            tile(a, step, 1, q, width, c, width, K, n - i, width, keep, ahead, HALF, HALF, KEYS)
        return
    for i in range(0, n, TILE):
        a, c = forward(keys, i * step), forward(s, i * width)
        if width == LANES:
            tile(a, step, 1, q, width, c, width, K, n - i, width, keep, ahead, TILE, LANES, KEYS)
        else:
            for j in range(0, width, STRIDE):
                x, y = forward(q, j), forward(c, j)
                tile(a, step, 1, x, width, y, width, K, n - i, width, keep, ahead, TILE, STRIDE, KEYS)


@njit
def _add_values(s, values, step, acc, acc_row, n, rows, cols, width, marked, ahead):
    """acc[r, c] += sum_p s[p, r] * values[p, c] over n positions for the rows of one panel."""
    if not marked:
        products(s, 1, width, values, step, acc, acc_row, n, rows, cols, 1, ahead)
        return
    for j in range(0, cols, STRIDE):
        for i in range(0, rows, TILE):
            x, y, z = forward(s, i), forward(values, j), forward(acc, i * acc_row + j)
            tile(x, 1, width, y, step, z, acc_row, n, rows - i, cols - j, 1, 0, TILE, STRIDE, MARKED)


@njit
def _first_number(table, sizes, b, head, p, K):
    """Where the K numbers of a head at position p start."""
    row = np.int64(table[b, p // sizes.page]) * sizes.page + p % sizes.page
    return (row * sizes.Hkv + head) * K


@njit
def _rows_at(stack, table, sizes, b, head, p, stop, most, K, buffer):
    """Pointer to the K numbers of a head at position p, step to the next, for how many positions, and what to ask for.

    Those are up to `stop`, the end of a page, and `most`; halves are widened into the buffer. The last number leads
    from a row to one that is wanted soon: some rows on where many follow each other, else the row after all of these.
    """
    at, step = _first_number(table, sizes, b, head, p, K), sizes.Hkv * K
    n = min(stop - p, sizes.page - p % sizes.page, most)
    ahead = 0
    if n > RUN:
        ahead = 2 * HALF * step
    elif p + n < stop:
        ahead = _first_number(table, sizes, b, head, p + n, K) - at
    if sizes.fmt == FLOAT32:
        return floats(stack, at), step, n, ahead
    fetch(floats(stack, (at + ahead) // 2), step // 2, n, (K + 1) // 2)
    for i in range(n):
        load(stack, sizes.fmt, at + i * step, forward(buffer, i * K), K)
    return buffer, K, n, 0


@njit
def _block(k, e, v, table, sizes, task, scale, low, high, q, s, buffer, top, total, acc):
    """Positions first … stop - 1 of one block for the rows of a task: their states acc [rows, state].

    q [panels, D + E, width], s [panels, BLOCK + HALF, width], low, high, top, total [rows]; all pointers.
    """
    b, head, first, stop, rows = task
    D, E, Dv, width, state, direct = sizes.D, sizes.E, sizes.Dv, sizes.width, sizes.state, sizes.fmt == FLOAT32
    most = RUN if direct or rows > LANES else FEW_RUN  # widened rows of a decode step stay in the first cache
    panel = (BLOCK + HALF) * width
    panels = (rows + width - 1) // width
    p = first
    while p < stop:
        keys, step, n, ahead = _rows_at(k, table, sizes, b, head, p, stop, BLOCK if direct else most, D, buffer)
        for i in range(panels):
            queries, scores = forward(q, i * (D + E) * width), forward(s, i * panel + (p - first) * width)
            _scores(keys, step, queries, scores, n, D, width, 0, ahead)
        if E:
            keys, step, n, ahead = _rows_at(e, table, sizes, b, head, p, stop, BLOCK if direct else most, E, buffer)
            for i in range(panels):
                queries, scores = forward(q, (i * (D + E) + D) * width), forward(s, i * panel + (p - first) * width)
                _scores(keys, step, queries, scores, n, E, width, 1, ahead)
        p += n  # a tile wrote a few rows more; the next one starts there
    at, n = _first_number(table, sizes, b, head, first, Dv), min(most, sizes.page - first % sizes.page, stop - first)
    if direct:
        fetch(floats(v, at), sizes.Hkv * Dv, n, Dv)
    else:
        fetch(floats(v, at // 2), sizes.Hkv * Dv // 2, n, (Dv + 1) // 2)

    every, until = first, stop  # positions in between are seen by every row
    for r in range(rows):
        every = max(every, first + np.int64(peek(low, r)))
        until = min(until, first + np.int64(peek(high, r)) + 1)
    for i in range(panels):
        at = i * width
        x, y, z, w = forward(low, at), forward(high, at), forward(top, at), forward(total, at)
        if width == HALF:
            weights(s, stop - first, width, scale, x, y, z, w, HALF)
        for j in range(0, width if width > HALF else 0, LANES):
            scores, lanes = forward(s, i * panel + j), forward(x, j)
            weights(scores, stop - first, width, scale, lanes, forward(y, j), forward(z, j), forward(w, j), LANES)
    for i in range(rows * state):
        poke(acc, i, _ZERO)
    for r in range(rows):
        seen = peek(low, r) <= min(peek(high, r), np.float32(stop - first - 1))
        poke(acc, r * state + state - 2, peek(top, r))
        poke(acc, r * state + state - 1, peek(total, r) if seen else _UNSEEN)

    p = first
    while p < stop:
        end = min(every, stop) if p < every else until if p < until else stop
        values, step, n, ahead = _rows_at(v, table, sizes, b, head, p, end, most, Dv, buffer)
        marked = p < every or p >= until
        for i in range(panels):
            scores, target = forward(s, i * panel + (p - first) * width), forward(acc, i * width * state)
            live = min(width, rows - i * width)
            _add_values(scores, values, step, target, state, n, live, Dv, width, marked, ahead)
        p += n


# -- states of rows --------------------------------------------------------------------------------------------------


@njit
def clear(acc, state):
    """The state of a row that has seen nothing."""
    for j in range(state):
        poke(acc, j, _ZERO)
    poke(acc, state - 2, _NOTHING)


@njit
def merge(acc, part, state, count):
    """Online softmax: the state of a row after a block has joined; a side whose maximum is -inf counts as nothing."""
    if peek(part, state - 1) == _UNSEEN:
        return
    top, part_top = peek(acc, state - 2), peek(part, state - 2)
    most = part_top if (part_top > top) | (part_top != part_top) else top
    keep = exp32(top - most) if top > _NOTHING else _ZERO
    take = exp32(part_top - most) if part_top > _NOTHING else _ZERO
    for j in range(count):
        poke(acc, j, peek(acc, j) * keep + peek(part, j) * take)
    poke(acc, state - 2, most)
    poke(acc, state - 1, peek(acc, state - 1) * keep + peek(part, state - 1) * take)


@njit
def _add_sink(acc, state, count, sink):
    """The state of a row after a score without a value has joined."""
    top = peek(acc, state - 2)
    most = top if (top > sink) | (top != top) else sink
    keep = exp32(top - most) if top > _NOTHING else _ZERO
    for j in range(count):
        poke(acc, j, peek(acc, j) * keep)
    poke(acc, state - 2, most)
    poke(acc, state - 1, peek(acc, state - 1) * keep + exp32(sink - most))


@njit
def _store_quotient(acc, state, count, form, out, at):
    total = peek(acc, state - 1)
    divisor = _ONE if total == _ZERO else total
    for j in range(count):
        poke(acc, j, peek(acc, j) / divisor)
    store(acc, form, out, at, count)


# -- tasks -----------------------------------------------------------------------------------------------------------


@njit
def task_rows(sizes, task):
    """Sequence, head, first row and number of rows of a task; the last rows, which see most, come first."""
    heads = sizes.B * sizes.Hkv
    r = (sizes.tiles - 1 - task // heads) * sizes.rows
    return task % heads // sizes.Hkv, task % sizes.Hkv, r, min(sizes.rows, sizes.T * sizes.G - r)


@njit
def _row_at(sizes, b, head, r):
    """Number of row r of a head among the rows [B, T, H] of queries and results."""
    return ((b * sizes.T + r // sizes.G) * sizes.Hkv + head) * sizes.G + r % sizes.G


@njit
def _work(counter, q, qe, k, e, v, table, lengths, scale, window, sinks, sizes, parts, out):
    """Take tasks, or with sizes.blocks single blocks of them, until none is left; states of blocks go to `parts`."""
    D, E, Dv, width, state, form, size = sizes.D, sizes.E, sizes.Dv, sizes.width, sizes.state, sizes.fmt, sizes.rows
    scratch = np.empty(size * (D + E + BLOCK + HALF + 2 * state + 4) + RUN * max(D, E, Dv) + LANES, np.float32)
    queries = floats(scratch, 0)
    s = forward(queries, size * (D + E))
    acc = forward(s, size * (BLOCK + HALF))
    part = forward(acc, size * state)
    low = forward(part, size * state)
    high, top, total = forward(low, size), forward(low, 2 * size), forward(low, 3 * size)
    buffer = forward(low, 4 * size)

    tasks = sizes.B * sizes.Hkv * sizes.tiles
    units = tasks * max(sizes.blocks, 1)
    unit = claim(counter)
    while unit < units:
        b, head, r0, rows = task_rows(sizes, unit % tasks)
        start = np.int64(lengths[b]) - sizes.T
        stop = start + (r0 + rows - 1) // sizes.G + 1
        first = max(0, start + r0 // sizes.G - window + 1)
        if sizes.blocks:
            part = floats(parts, unit * size * state)
            block = first // BLOCK + unit // tasks
            first, stop = max(first, block * BLOCK), min(stop, (block + 1) * BLOCK)
            for r in range(rows):
                poke(part, r * state + state - 1, _UNSEEN)
        else:
            for r in range(rows):
                clear(forward(acc, r * state), state)
        if first < stop:
            for r in range(rows):  # lanes behind them hold anything: no lane looks at another
                row, lane = _row_at(sizes, b, head, r0 + r), forward(queries, r // width * (D + E) * width + r % width)
                load(q, form, row * D, buffer, D)
                if E:
                    load(qe, form, row * E, forward(buffer, D), E)
                for j in range(D + E):
                    poke(lane, j * width, peek(buffer, j))
        while first < stop:
            end = min(stop, (first // BLOCK + 1) * BLOCK)
            for r in range(size):
                at = start + (r0 + min(r, rows - 1)) // sizes.G - first
                poke(low, r, np.float32(max(min(at - window + 1, BLOCK), 0)))
                poke(high, r, np.float32(max(min(at, BLOCK), -1)))
            task = (b, head, first, end, rows)
            _block(k, e, v, table, sizes, task, scale, low, high, queries, s, buffer, top, total, part)
            if not sizes.blocks:
                for r in range(rows):
                    merge(forward(acc, r * state), forward(part, r * state), state, Dv)
            first = end
        if not sizes.blocks:
            for r in range(rows):
                if sinks.size:
                    _add_sink(forward(acc, r * state), state, Dv, sinks[head * sizes.G + (r0 + r) % sizes.G])
                _store_quotient(forward(acc, r * state), state, Dv, form, out, _row_at(sizes, b, head, r0 + r) * Dv)
        unit = claim(counter)
    keep_alive(scratch)


# attend    y[r] = sum_p w[p] v[p] / sum_p w[p], w[p] = exp(scale * q[r].k[p] - max), p in the row's window up to itself
# shapes    q [B, T, H, D] and [B, T, H, E], k, e, v [pages, page, Hkv, D | E | Dv] as words; table int32 [B, n];
#           lengths int32 [B] with the T rows counted; sinks float32 [H] or [0]: scores without a value; out
#           [B, T, H, Dv] as words; float32 sums
# threads   workers take tasks (sequence, head, 64 rows), or where those are few single blocks of 256 keys
# bytes     keys and values of a sequence once for every 64 rows of a head; a decode step reads each once
# limits    positions and rows in int64; scratch of a worker (D + E + BLOCK + 2 Dv) * 64 numbers
@njit(parallel=True)
def _work_all(workers, counter, q, qe, k, e, v, table, lengths, scale, window, sinks, sizes, parts, out):
    for _ in prange(workers):
        _work(counter, q, qe, k, e, v, table, lengths, scale, window, sinks, sizes, parts, out)


# finish    the blocks of every row, merged in their order; its values / its sum of weights
# shapes    parts [blocks, tasks, rows, state]; out [B, T, H, Dv] as words
# threads   one: a block of keys costs a hundred times more than merging it
# bytes     parts in, out out
# limits    none
@njit
def _finish(sinks, sizes, parts, out):
    tasks = sizes.B * sizes.Hkv * sizes.tiles
    scratch = np.empty(sizes.state, np.float32)
    acc = floats(scratch, 0)
    for task in range(tasks):
        b, head, r0, rows = task_rows(sizes, task)
        for r in range(rows):
            clear(acc, sizes.state)
            for block in range(sizes.blocks):
                at = ((block * tasks + task) * sizes.rows + r) * sizes.state
                merge(acc, floats(parts, at), sizes.state, sizes.Dv)
            if sinks.size:
                _add_sink(acc, sizes.state, sizes.Dv, sinks[head * sizes.G + (r0 + r) % sizes.G])
            _store_quotient(acc, sizes.state, sizes.Dv, sizes.fmt, out, _row_at(sizes, b, head, r0 + r) * sizes.Dv)
    keep_alive(scratch)


_NO_WORDS, _NO_OUT, _NO_PARTS = words(np.zeros(0, np.float32)), np.zeros(0, np.uint16), np.zeros(0, np.float32)
_ONE_PAGE, _NO_SINKS = frozen(np.zeros((1, 1), np.int32)), frozen(np.zeros(0, np.float32))


@functools.lru_cache(maxsize=512)
def _layout(B: int, T: int, H: int, D: int, E: int, page: int, key: tuple, value: tuple, form: int) -> Sizes:
    """Sizes of a call on caches whose rows have the shapes key and value."""
    Hkv = math.prod(key) // D
    Dv = math.prod(value) // Hkv
    rows = T * H // Hkv
    width = HALF if rows <= HALF else LANES if rows <= LANES else 2 * LANES
    size = min(-(-rows // width) * width, ROWS)
    state = -(-Dv // STRIDE) * STRIDE + LANES
    return Sizes(B, T, H // Hkv, Hkv, D, E, Dv, page, form, size, width, -(-rows // size), 0, state)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: np.ndarray | int,
    scale: float,
    window: int | None,
    slots: np.ndarray | None,
    block_table: np.ndarray | None,
    out: np.ndarray | None,
    rope: tuple[np.ndarray, np.ndarray] | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[Sizes, np.ndarray] | None:
    """Attention of q [H, D] or [T, H, D] of one sequence (`lengths` a number), or [B * T, H, D] T rows of each of B.

    Row t of a sequence is at position lengths - T + t. `rope`: further columns of queries and keys. sinks [H]: scores
    without a value. Without `out` the states of the blocks are returned.
    """
    rows = q.shape[0] if q.ndim == 3 else 1
    if rows == 0:
        return None
    if isinstance(lengths, int) or lengths.ndim == 0:
        B, T, longest = 1, rows, int(lengths)
        keys, lengths = longest, np.array([longest], np.int32)
    else:
        B, T, longest = len(lengths), rows // len(lengths), int(lengths.max())
        keys = int(lengths.sum())
    if block_table is not None:
        lead, page, table = 2, k.shape[1], block_table.reshape(B, -1)
    elif slots is not None:
        lead, page, table = 2, k.shape[1], slots.reshape(B, 1)
    else:
        lead, page, table = 1, max(1, k.shape[0]), _ONE_PAGE
    E, qe, e = (0, _NO_WORDS, _NO_WORDS) if rope is None else (rope[0].shape[-1], words(rope[0]), words(rope[1]))
    sizes = _layout(B, T, *q.shape[-2:], E, page, k.shape[lead:], v.shape[lead:], fmt(q))
    window = _ALL if window is None else window

    workers, blocks, parts = 1, 0, _NO_PARTS
    if min(keys, B * window) * rows * q.shape[-2] * (sizes.D + E + sizes.Dv) > _FEW:
        workers = threads()
    tasks = B * sizes.Hkv * sizes.tiles
    if out is None or tasks < 2 * workers:
        seen = min(longest, window + sizes.rows // sizes.G + 1)
        blocks = min(-(-longest // BLOCK), (seen + BLOCK - 2) // BLOCK + 1)
        numbers = tasks * blocks * sizes.rows * sizes.state
        if out is not None and (blocks == 1 or numbers > _PARTS):
            blocks = 0
        else:
            parts, sizes = np.empty(numbers, np.float32), sizes._replace(blocks=blocks)

    target = _NO_OUT if out is None else writable_words(out)
    arguments = (np.zeros(1, np.int64), words(q), qe, words(k), e, words(v), frozen(table), frozen(lengths))
    sunk = _NO_SINKS if sinks is None else frozen(sinks)
    arguments = (*arguments, np.float32(scale), window, sunk, sizes, parts, target)
    if workers == 1:
        _work(*arguments)
    else:
        run(_work_all, min(workers, tasks * max(blocks, 1)), *arguments)
    if out is None:
        return sizes, parts
    if blocks:
        _finish(sunk, sizes, parts, target)
    return None


def attend_runs(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: np.ndarray,
    scale: float,
    window: int | None,
    block_table: np.ndarray,
    starts: np.ndarray,
    out: np.ndarray,
    rope: tuple[np.ndarray, np.ndarray] | None = None,
    longest: int | None = None,
    up_to: int | None = None,
    sinks: np.ndarray | None = None,
) -> None:
    """Attention of the runs of B sequences over pages, neighbours of one length together.

    Runs of more rows than `longest` that end at up to `up_to` positions give 0.
    """
    done = 0
    for first, count, T in equal_runs(starts):
        split = longest is not None and longest < T  # neighbours may be on either side of up_to
        for b in range(first, first + count) if split else (first,):
            each = slice(b, b + 1 if split else first + count)
            low = int(starts[b])
            high = int(starts[each.stop])
            out[done:low] = 0
            if split and (up_to is None or lengths[b] <= up_to):
                out[low:high] = 0
            else:
                turned = None if rope is None else (rope[0][low:high], rope[1])
                pages, part = block_table[each], out[low:high]
                attend(q[low:high], k, v, lengths[each], scale, window, None, pages, part, turned, sinks)
            done = high
    out[done:] = 0
