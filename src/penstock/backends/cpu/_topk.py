"""The largest few numbers of a row, in vector code: a bar that few of them pass, then ranks among those.

The largest number of each of 16 lanes is one that the row has, so the k-th largest of these is a bar that at least k
numbers pass; in a random row that are not many more (11 for k = 8). All pointers are to float32.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from penstock.backends.cpu._simd import F32, I32, I64, LANES, V16F, V16I, _Code, _const

WORD = 64  # numbers that `passing` looks at

if numba.config.DISABLE_JIT:

    def kth_peak(x, n, k):
        row = np.full(-(-n // LANES) * LANES, -np.inf, np.float32)
        row[:n] = x[:n]
        peaks = np.sort(row.reshape(-1, LANES).max(axis=0))  # NaN goes last, if there is one
        return (peaks[-1] if np.isnan(peaks[-1]) else peaks[-k]), peaks[-1]

    def passing(x, n, bar):
        return sum(1 << j for j in range(min(n, WORD)) if x[j] >= bar)

    def lowest(word):
        return (word & -word).bit_length() - 1

    def rank(x, n, places):
        places[np.argsort(-x[:n], kind="stable")] = np.arange(n)

    def softmax(x, n, k, places, weights):
        rank(x, n, places)
        e = np.where(places[:n] < k, np.exp(x[:n] - x[:n].max()), np.float32(0))
        weights[:n] = e / e.sum()

    def two_best(x, n):
        first, second = np.sort(x[:n])[: -3 if n > 2 else None : -1]
        return first + second

else:
    from penstock.backends.cpu._attend import _exp

    _FLOAT = types.CPointer(types.float32)
    _MASK, _BIT = ir.VectorType(ir.IntType(1), LANES), ir.IntType(1)

    class _Lanes(_Code):
        """16 numbers at a time."""

        def part(self, x, start, n):
            """Numbers start … start + 15 of n, -inf behind them, and the lanes that there are."""
            there = self.below(self.b.sub(n, start))
            values = self.masked(self.at(x, start, F32), V16F, there)
            return self.b.select(there, values, _const(V16F, -np.inf)), there

        def larger(self, a, b):
            return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

        def smaller(self, a, b):
            return self.b.select(self.b.fcmp_ordered("<", a, b), a, b)

        def largest(self, v):
            for width in (8, 4, 2, 1):
                v = self.larger(self.shuffle(v, v, range(width)), self.shuffle(v, v, range(width, 2 * width)))
            return self.b.extract_element(v, I32(0))

        def count(self, v, holds):
            """How many lanes x there are for each lane of v with holds(lane, x)."""
            total = _const(V16I, 0)
            for lane in range(LANES):
                true = holds(lane, self.shuffle(v, v, [lane] * LANES))
                total = self.b.sub(total, self.b.sext(true, V16I))
            return total

    @intrinsic
    def kth_peak(typingctx, x, n, k):
        """The k-th largest, k ≤ 16, of the largest numbers of the lanes of x[:n], or NaN if x has one; and the largest
        of all.
        """

        def codegen(context, builder, sig, args):
            code, b = _Lanes(builder), builder
            x, n, k = args

            def look(j, *carried):
                new = []
                for v, (most, odd) in enumerate(zip(carried[::2], carried[1::2], strict=True)):
                    values, _ = code.part(x, b.add(j, I64(LANES * v)), n)
                    new += code.larger(values, most), b.or_(odd, b.fcmp_unordered("uno", values, values))
                return new

            start = [_const(V16F, -np.inf), _const(_MASK, False)] * 4  # four at a time: they need not wait for another
            m0, o0, m1, o1, m2, o2, m3, o3 = code.loop(0, n, 4 * LANES, look, *start)
            most = code.larger(code.larger(m0, m1), code.larger(m2, m3))
            odd = b.bitcast(b.or_(b.or_(o0, o1), b.or_(o2, o3)), ir.IntType(LANES))
            reach = code.count(most, lambda lane, other: b.fcmp_ordered(">=", other, most))
            high = b.icmp_signed(">=", reach, code.splat(b.trunc(k, I32)))
            bar = code.largest(b.select(high, most, _const(V16F, -np.inf)))
            bar = b.select(b.icmp_signed("==", odd, odd.type(0)), bar, F32(float("nan")))
            return context.make_tuple(b, sig.return_type, [bar, code.largest(most)])

        return types.UniTuple(types.float32, 2)(_FLOAT, types.int64, types.int64), codegen

    @intrinsic
    def passing(typingctx, x, n, bar):
        """Bit j: x[j] >= bar, for j below n and below 64."""

        def codegen(context, builder, sig, args):
            code, b = _Lanes(builder), builder
            x, n, bar = args
            bars, word = code.splat(bar), I64(0)
            for start in range(0, WORD, LANES):
                values, there = code.part(x, I64(start), n)
                bits = b.bitcast(b.and_(b.fcmp_ordered(">=", values, bars), there), ir.IntType(LANES))
                word = b.or_(word, b.shl(b.zext(bits, I64), I64(start)))
            return word

        return types.int64(_FLOAT, types.int64, types.float32), codegen

    @intrinsic
    def lowest(typingctx, word):
        """Number of the lowest bit that is set; there is one."""

        def codegen(context, builder, sig, args):
            zeros = _Code(builder).function("llvm.cttz.i64", I64, I64, _BIT)
            return builder.call(zeros, [args[0], _BIT(1)])

        return types.int64(types.int64), codegen

    def _ranks(code, x, n):
        """16 numbers, the lanes that there are, and how many of them come before each."""
        b = code.b
        values, there = code.part(x, I64(0), n)
        known = b.select(there, values, _const(V16F, float("nan")))

        def before(lane, other):
            behind = _const(_MASK, [i > lane for i in range(LANES)])
            return b.or_(b.fcmp_ordered(">", other, known), b.and_(b.fcmp_ordered("==", other, known), behind))

        return values, there, code.count(known, before)

    def _store(context, code, vector, array, kind):
        code.store(vector, context.make_array(kind)(context, code.b, array).data)

    @intrinsic
    def rank(typingctx, x, n, places):
        """places[i] = the place of x[i] among x[:n], the largest first, equals in their order; n ≤ 16, room for 16."""

        def codegen(context, builder, sig, args):
            code = _Lanes(builder)
            _store(context, code, _ranks(code, *args[:2])[2], args[2], sig.args[2])
            return context.get_dummy_value()

        return types.void(_FLOAT, types.int64, places), codegen

    @intrinsic
    def softmax(typingctx, x, n, k, places, weights):
        """`rank`, and the softmax over the first k of that order: weights[i] of x[i], 0 for the others."""

        def codegen(context, builder, sig, args):
            code, b = _Lanes(builder), builder
            x, n, k, places, weights = args
            values, there, ranks = _ranks(code, x, n)
            chosen = b.and_(there, b.icmp_signed("<", ranks, code.splat(b.trunc(k, I32))))
            e = _exp(code, b.fsub(values, code.splat(code.largest(values))))
            e = b.select(chosen, e, _const(V16F, 0.0))
            _store(context, code, ranks, places, sig.args[3])
            _store(context, code, b.fdiv(e, code.splat(code.lane_sum(e))), weights, sig.args[4])
            return context.get_dummy_value()

        return types.void(_FLOAT, types.int64, types.int64, places, weights), codegen

    @intrinsic
    def two_best(typingctx, x, n):
        """The sum of the two largest of x[:n], none of them NaN; n ≥ 2."""

        def codegen(context, builder, sig, args):
            code, b = _Lanes(builder), builder
            x, n = args

            def look(j, first, second):
                values, _ = code.part(x, j, n)
                return code.larger(values, first), code.larger(code.smaller(values, first), second)

            nothing = _const(V16F, -np.inf)
            first, second = code.loop(0, n, LANES, look, nothing, nothing)
            for width in (8, 4, 2, 1):
                low, high = ([code.shuffle(v, v, range(at, at + width)) for v in (first, second)] for at in (0, width))
                first = code.larger(low[0], high[0])
                second = code.larger(code.smaller(low[0], high[0]), code.larger(low[1], high[1]))
            first, second = (b.extract_element(v, I32(0)) for v in (first, second))
            return b.fadd(first, second)

        return types.float32(_FLOAT, types.int64), codegen
