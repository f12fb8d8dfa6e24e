"""Vector code that Numba cannot express, as LLVM IR behind intrinsics: unpacking codes, int8 and float32 dot products.

Each intrinsic is a small function on pointers with a few arguments that are constants of the calling kernel (the kind
of codes, the dot instruction, tile sizes). Vectors are 512 bits wide; LLVM cuts them to what the CPU has. Arithmetic
is spelled out: no flag allows it to be reassociated or contracted, so every variant and every tile gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
LANES = 16
V16F, V16I, V64B = (ir.VectorType(t, n) for t, n in ((F32, 16), (I32, 16), (I8, 64)))

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # formats of scales and dense weights, as in quant.py
# Scales of one byte, times what codes are divided by on their way to floats: E2M1 become 2 · float, E4M3 float / 256.
WIDE_E8M0, HALF_E8M0, HALF_E4M3 = 3, 4, 5

# Kinds of codes: 0 dense, 1 to 8 the bits of unsigned numbers; floats have a number of their own above their bits.
MXFP4, NVFP4, MXFP8 = 20, 36, 40
SCALES = {MXFP4: HALF_E8M0, NVFP4: HALF_E4M3, MXFP8: WIDE_E8M0}
OFFSET = 12  # added to 2 · E2M1, which makes them unsigned: 0 to 24
_TWICE = [0, 1, 2, 3, 4, 6, 8, 12]
_ELEMENT = {FLOAT32: F32, FLOAT16: I16, BFLOAT16: I16, WIDE_E8M0: I8, HALF_E8M0: I8, HALF_E4M3: I8}
TWICE = [*_TWICE, *(-v for v in _TWICE)]  # 2 · E2M1 by code

# How 64 unsigned codes meet 64 signed bytes: AVX-512 VNNI, its 256-bit form, or AVX2's 16-bit multiply-add after
# widening (the 8-bit one saturates).
VNNI, VNNI256, AVX2 = 0, 1, 2
ANY = 3  # no instruction of a CPU by name

AHEAD = 8192  # bytes of codes fetched into L2 in advance: the CPU's own prefetching stops at pages


# E4M3 magnitudes · 2^9 are whole numbers: significands below 16, shifted by 0 to 14 places. Three digits of radix 2^6,
# the highest first, are bytes, signed or not.
_SHIFTS = [max(exponent - 1, 0) for exponent in range(16)]
_PLACES = (12, 6, 0)
_WHOLE = [(m % 8 + (8 if m > 7 else 0)) << _SHIFTS[m // 8] for m in range(128)]
_DIGITS = [[whole >> place & 63 for whole in _WHOLE] for place in _PLACES]
E4M3_NAN = _DIGITS[0][127]  # the highest digit of a NaN code: those of numbers are smaller
E4M3_UNIT = 2.0**-17  # of whole numbers, next to scales that are multiplied by 256


@functools.cache
def _has_vbmi() -> bool:
    """Whether Numba compiles for a CPU that looks bytes up in 128 others by one instruction."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+avx512vbmi" in features.split(",")


def _by_digits(how: int) -> bool:
    """Whether rows of E4M3 codes are multiplied digit by digit, not by 16-bit products."""
    return how == VNNI and _has_vbmi()


def _nan_shown(how: int) -> int:
    """The byte that shows a NaN code: its highest digit, or its magnitude."""
    return E4M3_NAN if _by_digits(how) else 0x7F


def width(code: int) -> int:
    """Bits of a code of a kind."""
    return code & 15


def is_fp4(code: int) -> bool:
    return code in (MXFP4, NVFP4)


def _const(vector: ir.VectorType, values: Any) -> ir.Constant:
    return ir.Constant(vector, list(values) if isinstance(values, list | range) else [values] * vector.count)


class _Code:
    """An IR builder with the few vector idioms used below."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def function(self, name: str, result: ir.Type, *args: ir.Type) -> ir.Function:
        module = self.b.module
        return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, args), name)

    def at(self, pointer: ir.Value, index: ir.Value | int, element: ir.Type) -> ir.Value:
        return self.b.gep(pointer, [I64(index) if isinstance(index, int) else index], source_etype=element)

    def rows(self, base: ir.Value, stride: ir.Value, count: ir.Value) -> list[ir.Value]:
        """Where 16 rows of bytes start; from `count` on it is the last one again."""
        b = self.b
        last = b.sub(count, I64(1))
        rows = [b.select(b.icmp_signed("<", I64(r), last), I64(r), last) for r in range(LANES)]
        return [self.at(base, b.mul(row, stride), I8) for row in rows]

    def load(self, pointer: ir.Value, kind: ir.Type) -> ir.Value:
        value = self.b.load(self.b.bitcast(pointer, kind.as_pointer()), typ=kind)
        value.align = 1
        return value

    def store(self, value: ir.Value, pointer: ir.Value) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer())).align = 1

    def shuffle(self, a: ir.Value, b: ir.Value, lanes: list[int] | range) -> ir.Value:
        return self.b.shuffle_vector(a, b, _const(ir.VectorType(I32, len(lanes)), lanes))

    def transposed(self, v: list[ir.Value]) -> list[ir.Value]:
        """16 vectors of 16 words as their columns: blocks of 8, 4, 2 and 1 change places."""
        for n in (8, 4, 2, 1):
            low = [(lane if not lane & n else (lane & ~n) + LANES) for lane in range(LANES)]
            high = [(lane | n if not lane & n else lane + LANES) for lane in range(LANES)]
            w = list(v)
            for i in range(LANES):
                if not i & n:
                    w[i], w[i | n] = self.shuffle(v[i], v[i | n], low), self.shuffle(v[i], v[i | n], high)
            v = w
        return v

    def splat(self, scalar: ir.Value) -> ir.Value:
        empty = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        return self.shuffle(self.b.insert_element(empty, scalar, I32(0)), empty, [0] * LANES)

    def pair_sums(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Sums of neighbouring lanes: those of a, then those of b."""
        n = a.type.count
        return self.b.add(self.shuffle(a, b, range(0, 2 * n, 2)), self.shuffle(a, b, range(1, 2 * n, 2)))

    def quad_sums(self, v: list[ir.Value], how: int, wide: bool) -> ir.Value:
        """Sums of 4 neighbouring lanes of 4 vectors, in order. Lanes fit 16 bits; unless wide two of them do, too."""
        b = self.b
        if how != VNNI:
            return self.pair_sums(self.pair_sums(v[0], v[1]), self.pair_sums(v[2], v[3]))
        if wide:
            low, high = self.packed_pairs(v[0], v[1]), self.packed_pairs(v[2], v[3])
            first = [side + 4 * block + i for block in range(4) for side in (0, LANES) for i in (0, 2)]
            total = b.add(self.shuffle(low, high, first), self.shuffle(low, high, [i + 1 for i in first]))
            return self.shuffle(total, total, [4 * (i % 4) + i // 4 for i in range(LANES)])
        while len(v) > 1:
            v = [self.packed_pairs(v[i], v[i + 1]) for i in range(0, len(v), 2)]
        return self.shuffle(v[0], v[0], [4 * (i % 4) + i // 4 for i in range(LANES)])

    def packed_pairs(self, v: ir.Value, w: ir.Value) -> ir.Value:
        """Sums of neighbouring lanes, which fit 16 bits: of each block of four lanes those of v, then those of w.

        Packed to 16 bits, multiplied by 1, neighbours added: it stays inside blocks of four lanes, which is half the
        work of shuffling across them. AVX-512.
        """
        words = ir.VectorType(I16, 32)
        pack = self.function("llvm.x86.avx512.packssdw.512", words, V16I, V16I)
        madd = self.function("llvm.x86.avx512.pmaddw.d.512", V16I, words, words)
        return self.b.call(madd, [self.b.call(pack, [v, w]), _const(words, 1)])

    def eight_sums(self, v: list[ir.Value], how: int) -> list[ir.Value]:
        """Sums of 2 neighbouring lanes of 4 vectors, in order: two vectors. Lanes fit 16 bits."""
        made = []
        for i in (0, 2):
            if how == VNNI:
                pairs = self.packed_pairs(v[i], v[i + 1])
                order = [4 * (n // 2) + n % 2 + half for half in (0, 2) for n in range(8)]
                made.append(self.shuffle(pairs, pairs, order))
            else:
                made.append(self.pair_sums(v[i], v[i + 1]))
        return made

    def sums_of_eight(self, v: list[ir.Value]) -> ir.Value:
        """Sums of 8 neighbouring lanes of 8 vectors, in order.

        Inside of blocks of four lanes first: as many instructions, of which 3 instead of 14 move lanes between blocks.
        """
        low, high = [0, 16, 1, 17], [0, 1, 16, 17]
        for lanes in (low, high):
            order = [4 * block + i for block in range(4) for i in lanes]
            v = [self._halves_added(v[i], v[i + 1], order) for i in range(0, len(v), 2)]
        # lane i of block j of v[n] has a quarter of vector 4 n + i
        order = [i + side for side in (0, 16) for block in (0, 8) for i in range(block, block + 4)]
        total = self.b.add(self.shuffle(*v, order), self.shuffle(*v, [i + 4 for i in order]))
        return self.shuffle(total, total, [8 * (i // 8) + 4 * (i % 2) + i % 8 // 2 for i in range(LANES)])

    def _halves_added(self, v: ir.Value, w: ir.Value, order: list[int]) -> ir.Value:
        """Lower halves of blocks of four lanes of v and w, in an order, plus the upper halves in the same."""
        return self.b.add(self.shuffle(v, w, order), self.shuffle(v, w, [i + 2 for i in order]))

    def sums_of_32(self, row: ir.Value, start: ir.Value, kind: int, how: int) -> Callable[[ir.Value], list[ir.Value]]:
        """512 elements of a row of codes, unpacked; the result takes a pointer to x and gives 16 sums over 32, or, of
        nvfp4, 32 sums over 16.
        """
        b, zero = self.b, _const(V16I, 0)
        bits = width(kind)
        if bits != 4:
            parts = [self.codes(row, b.add(start, I64(64 * c)), kind) for c in range(8)]

            def natural(x):
                v = [self.dot(zero, p, self.load(self.at(x, 64 * c, I8), V64B), how) for c, p in enumerate(parts)]
                return [self.sums_of_eight(v)]

            return natural
        # 64 bytes hold 128 codes: their low halves meet the even x, their high halves the odd x, in the same lanes
        words = ir.VectorType(I16, 32)
        halves = []
        for c in range(4):
            raw = self.load(self.at(row, b.add(b.lshr(start, I64(1)), I64(64 * c)), I8), words)
            nibbles = (b.and_(v, _const(words, 0x0F0F)) for v in (raw, b.lshr(raw, _const(words, 4))))
            halves.append([self.unsigned(b.bitcast(v, V64B), kind, how) for v in nibbles])

        def paired(x):
            v = []
            for c, (low, high) in enumerate(halves):
                even, odd = (self.load(self.at(x, 128 * c + 64 * i, I8), V64B) for i in (0, 1))
                v.append(self.dot(self.dot(zero, low, even, how), high, odd, how))
            return self.eight_sums(v, how) if kind == NVFP4 else [self.quad_sums(v, how, is_fp4(kind))]

        return paired

    def unsigned(self, nibbles: ir.Value, kind: int, how: int) -> ir.Value:
        """64 codes as the unsigned bytes that meet x: themselves, or 2 · E2M1 + OFFSET."""
        if not is_fp4(kind):
            return nibbles
        return self.looked_up(nibbles, [v + OFFSET for v in TWICE], how)

    def looked_up(self, nibbles: ir.Value, table: list[int], how: int) -> ir.Value:
        """64 bytes below 16 as entries of a table; where `how` is ANY of TWICE, or of TWICE + OFFSET."""
        b = self.b
        table = [v % 256 for v in table]
        if how == VNNI:
            look = self.function("llvm.x86.avx512.pshuf.b.512", V64B, V64B, V64B)
            return b.call(look, [_const(V64B, table * 4), nibbles])
        if how in (VNNI256, AVX2):
            half = ir.VectorType(I8, 32)
            look = self.function("llvm.x86.avx2.pshuf.b", half, half, half)
            parts = [self.shuffle(nibbles, nibbles, range(i, i + 32)) for i in (0, 32)]
            found = [b.call(look, [_const(half, table * 2), part]) for part in parts]
            return self.shuffle(found[0], found[1], range(64))
        seven = b.and_(nibbles, _const(V64B, 7))
        above = b.icmp_unsigned(">", seven, _const(V64B, 4))
        more = b.select(above, b.sub(seven, _const(V64B, 4)), _const(V64B, 0))
        last = b.select(b.icmp_unsigned("==", seven, _const(V64B, 7)), _const(V64B, 2), _const(V64B, 0))
        twice = b.add(b.add(seven, more), last)
        negative = b.icmp_unsigned(">", nibbles, _const(V64B, 7))
        return b.add(b.select(negative, b.neg(twice), twice), _const(V64B, table[0]))

    def signed(self, row: ir.Value, start: ir.Value, kind: int, half: bool, how: int) -> ir.Value:
        """`codes` for `numbers`: of E2M1 twice the float, signed; of E4M3 the bits of float / 256 as float16."""
        if is_fp4(kind):
            return self.looked_up(self.codes(row, start, 4, half), TWICE, how)
        codes = self.codes(row, start, width(kind), half)
        if kind != MXFP8 or how == ANY:
            return codes
        return self.as_halves(codes)

    def as_halves(self, codes: ir.Value) -> ir.Value:
        """The bits of E4M3 numbers / 256 as float16: their conversion takes subnormal ones without delay."""
        b, v = self.b, ir.VectorType(I16, codes.type.count)
        pattern = b.and_(b.shl(b.sext(codes, v), _const(v, 7)), _const(v, 0xBF80))
        nan = b.icmp_unsigned("==", b.and_(codes, _const(codes.type, 0x7F)), _const(codes.type, 0x7F))
        return b.select(nan, _const(v, 0x7E00), pattern)

    def numbers(self, part: ir.Value, lanes: range, kind: int) -> ir.Value:
        """16 of the bytes of `signed` as the floats that a scale of SCALES is multiplied with."""
        b = self.b
        bytes16 = self.shuffle(part, part, lanes)
        if is_fp4(kind):
            return b.sitofp(b.sext(bytes16, V16I), V16F)
        if bytes16.type.element == I16:
            return self.from_halves(bytes16)
        return self.e4m3(b.zext(bytes16, V16I)) if kind == MXFP8 else b.uitofp(b.zext(bytes16, V16I), V16F)

    def from_halves(self, bits: ir.Value) -> ir.Value:
        return self.b.fpext(self.b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), V16F)

    def e4m3(self, code: ir.Value) -> ir.Value:
        """16 E4M3 numbers / 256 of their codes in words, on any CPU."""
        b = self.b
        magnitude = b.and_(code, _const(V16I, 0x7F))
        sign = b.shl(b.and_(code, _const(V16I, 0x80)), _const(V16I, 24))
        # The exponents' biases differ by 120. Below 8 a magnitude is a subnormal number, a multiple of 2^-9: it becomes
        # one without a subnormal float32 on the way, which would take the CPU a hundred cycles.
        normal = b.bitcast(b.add(b.shl(magnitude, _const(V16I, 20)), _const(V16I, 120 << 23)), V16F)
        small = b.fsub(b.fadd(normal, normal), _const(V16F, 2.0**-6))
        value = b.select(b.icmp_unsigned("<", magnitude, _const(V16I, 8)), small, normal)
        value = b.fmul(value, _const(V16F, 1 / 256))
        pattern = b.or_(b.bitcast(value, V16I), sign)
        nan = b.icmp_unsigned("==", magnitude, _const(V16I, 0x7F))
        return b.bitcast(b.select(nan, _const(V16I, 0x7FC00000), pattern), V16F)

    def e4m3_patterns(self, codes: ir.Value) -> list[ir.Value]:
        """64 E4M3 codes as 4 vectors of floats: their bits in the places of a float32, so that they are numbers times
        2^-120, subnormal ones too; NaN is 480.

        Words of codes change places first, so that bytes and halves are unpacked inside of blocks of four lanes.
        """
        b, halves = self.b, ir.VectorType(I16, 32)
        words = b.bitcast(codes, V16I)
        placed = b.bitcast(self.shuffle(words, words, [4 * (i % 4) + i // 4 for i in range(LANES)]), V64B)
        found = []
        for side in (0, 8):
            order = [64 if i % 2 == 0 else 16 * (i // 16) + side + i % 16 // 2 for i in range(64)]
            high = b.bitcast(self.shuffle(placed, _const(V64B, 0), order), halves)
            high = b.and_(b.ashr(high, _const(halves, 4)), _const(halves, 0x87F0))
            for part in (0, 4):
                lanes = [32 if i % 2 == 0 else 8 * (i // 8) + part + i % 8 // 2 for i in range(32)]
                found.append(b.bitcast(self.shuffle(high, _const(halves, 0), lanes), V16F))
        return found

    def e4m3_digits(self, codes: ir.Value, how: int) -> list[ir.Value]:
        """The three digits of the magnitudes of 64 E4M3 codes; of NaN the first one is E4M3_NAN. AVX-512."""
        b = self.b
        if _has_vbmi():
            look = self.function("llvm.x86.avx512.vpermi2var.qi.512", V64B, V64B, V64B, V64B)
            halves = [[_const(V64B, digits[i : i + 64]) for i in (0, 64)] for digits in _DIGITS]
            return [b.call(look, [low, codes, high]) for low, high in halves]
        exponent, significand = self.e4m3_parts(codes, how)
        wide, made = ir.VectorType(I16, 64), []
        for place in _PLACES:  # the digit has bits 8 to 13 of the significand, shifted by 8 more than its place
            by = self.looked_up(exponent, [min(max(s + 8 - place, 0), 14) for s in _SHIFTS], how)
            shifted = b.lshr(b.shl(b.zext(significand, wide), b.zext(by, wide)), _const(wide, 8))
            made.append(b.trunc(b.and_(shifted, _const(wide, 63)), V64B))
        return made

    def e4m3_parts(self, codes: ir.Value, how: int) -> tuple[ir.Value, ir.Value]:
        """Exponents and significands of 64 E4M3 codes."""
        b = self.b
        exponent = b.and_(b.lshr(codes, _const(V64B, 3)), _const(V64B, 15))
        leading = self.looked_up(exponent, [0] + [8] * 15, how)
        return exponent, b.or_(b.and_(codes, _const(V64B, 7)), leading)

    def e4m3_dot(self, codes: ir.Value, how: int) -> tuple[Callable[[ir.Value], ir.Value], ir.Value]:
        """64 E4M3 codes as whole numbers: a function that multiplies them with 64 signed bytes, sums in 16 lanes, of 16
        neighbours in 4; and bytes of which the largest, `_nan_shown`, are those of NaN codes.
        """
        b = self.b
        if not _by_digits(how):
            return self.e4m3_pairs(codes, how), b.and_(codes, _const(V64B, 0x7F))
        digits = self.e4m3_digits(codes, how)
        return lambda x: self.digits_dot(digits, self.negated(x, codes)), digits[0]

    def digits_dot(self, digits: list[ir.Value], x: ir.Value) -> ir.Value:
        """`dot` of 64 whole numbers of three digits with 64 signed bytes. AVX-512 VNNI."""
        total = _const(V16I, 0)
        for digit in digits:
            total = self.dot(self.b.shl(total, _const(V16I, 6)), digit, x, VNNI)
        return total

    def e4m3_pairs(self, codes: ir.Value, how: int) -> Callable[[ir.Value], ir.Value]:
        """`e4m3_dot` by 16-bit products: (significand · x) · 2^shift, two neighbours summed. AVX2."""
        b, words, half = self.b, ir.VectorType(I16, 32), ir.VectorType(I32, 8)
        madd = self.function("llvm.x86.avx2.pmadd.wd", half, ir.VectorType(I16, 16), ir.VectorType(I16, 16))
        exponent, significand = self.e4m3_parts(codes, how)
        low, high = (self.looked_up(exponent, [(1 << s) >> byte & 255 for s in _SHIFTS], how) for byte in (0, 8))
        significand, zero = self.negated(significand, codes), _const(V64B, 0)
        orders = [[16 * (i // 16) + side + i % 16 // 2 + 64 * (i % 2) for i in range(64)] for side in (0, 8)]

        def widened(v, order):
            return b.ashr(b.bitcast(self.shuffle(zero, v, order), words), _const(words, 8))

        powers = [b.bitcast(self.shuffle(low, high, order), words) for order in orders]
        parts = [(order, widened(significand, order), power) for order, power in zip(orders, powers, strict=True)]

        def product(x):
            total = _const(V16I, 0)
            for order, by, power in parts:
                pair = b.mul(by, widened(x, order)), power
                sums = [b.call(madd, [self.shuffle(v, v, range(i, i + 16)) for v in pair]) for i in (0, 16)]
                total = b.add(total, self.shuffle(*sums, range(LANES)))
            return total

        return product

    def negated(self, x: ir.Value, codes: ir.Value) -> ir.Value:
        """64 bytes, negated where the code is negative."""
        return self.b.select(self.b.icmp_signed("<", codes, _const(V64B, 0)), self.b.neg(x), x)

    def larger(self, v: ir.Value, w: ir.Value) -> ir.Value:
        return self.b.call(self.function("llvm.umax.v64i8", V64B, V64B, V64B), [v, w])

    def any_equal(self, tops: list[ir.Value], nan: int) -> ir.Value:
        """Whether one of the bytes is the one that shows NaN."""
        found = ir.IntType(1)(0)
        for top in tops:
            equal = self.b.bitcast(self.b.icmp_unsigned("==", top, _const(V64B, nan)), I64)
            found = self.b.or_(found, self.b.icmp_unsigned("!=", equal, I64(0)))
        return found

    def all_below(self, values: ir.Value, count: ir.Value, bound: float) -> ir.Value:
        """Whether all of `count` floats are; NaN is not."""
        b, bools = self.b, ir.VectorType(ir.IntType(1), LANES)

        def step(i, good, mask=None):
            return [b.and_(good, b.fcmp_ordered("<", self.floats(values, i, FLOAT32, mask), _const(V16F, bound)))]

        whole = b.and_(count, I64(-LANES))
        (good,) = self.loop(0, whole, LANES, step, _const(bools, 1))
        rest = b.sub(count, whole)
        (good,) = self.last(rest, [good], lambda: step(whole, good, self.below(rest)))
        return b.icmp_unsigned("==", b.bitcast(good, I16), I16(0xFFFF))

    def weight(self, numbers: ir.Value, scale: ir.Value, bias: ir.Value | None) -> ir.Value:
        product = self.b.fmul(numbers, scale)
        return product if bias is None else self.b.fadd(product, bias)

    def divider(self, power: ir.Value) -> Callable[[ir.Value], ir.Value]:
        """Division of what is not negative by a power of two that is known at run time only."""
        zeros = self.function("llvm.cttz.i64", I64, I64, ir.IntType(1))
        shift = self.b.call(zeros, [power, ir.IntType(1)(0)])
        return lambda value: self.b.lshr(value, shift)

    def lane_sum(self, v: ir.Value) -> ir.Value:
        """The sum of 16 float lanes as a fixed tree: lanes 8 apart, then 4, 2, 1."""
        for n in (8, 4, 2, 1):
            v = self.b.fadd(self.shuffle(v, v, range(n)), self.shuffle(v, v, range(n, 2 * n)))
        return self.b.extract_element(v, I32(0))

    def loop(self, start: Any, stop: ir.Value, step: int, body: Callable[..., Any], *carried: ir.Value) -> list:
        """`for i in range(start, stop, step)`; body(i, *carried) returns the carried values of the next round."""
        b, entry = self.b, self.b.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(I64(start) if isinstance(start, int) else start, entry)
        values = [b.phi(value.type) for value in carried]
        for phi, value in zip(values, carried, strict=True):
            phi.add_incoming(value, entry)
        b.cbranch(b.icmp_signed("<", i, stop), inside, after)
        b.position_at_end(inside)
        following = body(i, *values) or ()
        end = b.block
        i.add_incoming(b.add(i, I64(step)), end)
        for phi, value in zip(values, following, strict=True):
            phi.add_incoming(value, end)
        b.branch(head)
        b.position_at_end(after)
        return values

    def prefetch(self, pointer: ir.Value) -> None:
        fetch = self.function("llvm.prefetch.p0", ir.VoidType(), I8.as_pointer(), I32, I32, I32)
        self.b.call(fetch, [pointer, I32(0), I32(2), I32(1)])

    def last(self, rest: ir.Value, values: list, body: Callable[[], list]) -> list:
        """What `body` makes of the values if anything is left, else the values as they are."""
        b = self.b
        with b.if_else(b.icmp_signed("==", rest, I64(0))) as (then, otherwise):
            with then:
                even = b.block
            with otherwise:
                changed = body()
                ragged = b.block
        merged = [b.phi(value.type) for value in values]
        for phi, value, new in zip(merged, values, changed, strict=True):
            phi.add_incoming(value, even)
            phi.add_incoming(new, ragged)
        return merged

    # -- formats -----------------------------------------------------------------------------------------------------

    def widen(self, bits: ir.Value, fmt: int) -> ir.Value:
        """16 floats of patterns of a format."""
        b = self.b
        if fmt == FLOAT32:
            return bits
        wide = b.zext(bits, V16I)
        if fmt == HALF_E4M3:
            return b.fmul(self.from_halves(self.as_halves(bits)), _const(V16F, 128.0))
        if fmt in (WIDE_E8M0, HALF_E8M0):
            shifted = b.shl(wide, _const(V16I, 23))
            scale = b.select(b.icmp_unsigned("==", wide, _const(V16I, 0)), _const(V16I, 0x00400000), shifted)
            scale = b.bitcast(scale, V16F)
            return b.fmul(scale, _const(V16F, 256.0 if fmt == WIDE_E8M0 else 0.5))
        if fmt == BFLOAT16:
            return b.bitcast(b.shl(wide, _const(V16I, 16)), V16F)
        magnitude = b.shl(b.and_(wide, _const(V16I, 0x7FFF)), _const(V16I, 13))
        sign = b.shl(b.and_(wide, _const(V16I, 0x8000)), _const(V16I, 16))
        # the exponents' biases differ by 112; the product also normalises subnormals
        finite = b.bitcast(b.fmul(b.bitcast(magnitude, V16F), _const(V16F, 2.0**112)), V16I)
        special = b.or_(magnitude, _const(V16I, 0x7F800000))
        value = b.select(b.icmp_signed("<", magnitude, _const(V16I, 0x0F800000)), finite, special)
        return b.bitcast(b.or_(sign, value), V16F)

    def floats(self, base: ir.Value, index: ir.Value | int, fmt: int, mask: ir.Value | None = None) -> ir.Value:
        """16 numbers of a format at base[index …] as float32; lanes outside of the mask come from the bits of 0.

        Those of E8M0 would be a subnormal float32, which takes the CPU a hundred cycles: they come from the bits of 1.
        """
        element = _ELEMENT[fmt]
        vector = ir.VectorType(element, LANES)
        pointer = self.at(self.b.bitcast(base, element.as_pointer()), index, element)
        other = 127 if fmt in (WIDE_E8M0, HALF_E8M0) else 0
        bits = self.load(pointer, vector) if mask is None else self.masked(pointer, vector, mask, other)
        return self.widen(bits, fmt)

    def masked(self, pointer: ir.Value, vector: ir.VectorType, mask: ir.Value, other: int = 0) -> ir.Value:
        name = {F32: "f32", I32: "i32", I16: "i16", I8: "i8"}[vector.element]
        kind = vector.as_pointer()
        bools = ir.VectorType(ir.IntType(1), LANES)
        load = self.function(f"llvm.masked.load.v16{name}.p0", vector, kind, I32, bools, vector)
        return self.b.call(load, [self.b.bitcast(pointer, kind), I32(1), mask, _const(vector, other)])

    def below(self, count: ir.Value) -> ir.Value:
        """Lanes 0 … count − 1."""
        return self.b.icmp_signed("<", _const(V16I, range(LANES)), self.splat(self.b.trunc(count, I32)))

    # -- codes -------------------------------------------------------------------------------------------------------

    def bytes64(self, pointer: ir.Value, n: int) -> ir.Value:
        """n ≤ 64 bytes, zeros behind them."""
        raw = self.load(pointer, ir.VectorType(I8, n))
        return raw if n == 64 else self.shuffle(raw, _const(raw.type, 0), [min(i, n) for i in range(64)])

    def codes(self, row: ir.Value, start: ir.Value, kind: int, half: bool = False, how: int = ANY) -> ir.Value:
        """Elements start … start + 63 of a row of packed codes, unsigned, one to a byte; `half`: 32 of them."""
        b = self.b
        if is_fp4(kind):
            return self.unsigned(self.codes(row, start, 4, half), kind, how)
        bits = width(kind)
        pointer = self.at(row, b.lshr(b.mul(start, I64(bits)), I64(3)), I8)
        n = 4 * bits if half else 8 * bits
        raw = self.load(pointer, ir.VectorType(I8, n))
        if half:
            raw = self.shuffle(raw, _const(raw.type, 0), [min(i, n) for i in range(2 * n)])
        if bits == 8:
            return raw
        if bits == 4:
            v = ir.VectorType(I16, 32)
            pairs = b.zext(raw, v)
            return b.bitcast(b.and_(b.or_(pairs, b.shl(pairs, _const(v, 4))), _const(v, 0x0F0F)), V64B)
        # 8 codes go into a 64-bit lane of their own and are spread over its bytes in three halvings
        v = ir.VectorType(I64, 8)
        lanes = [q * bits + t if t < bits else 8 * bits for q in range(8) for t in range(8)]
        x = b.bitcast(self.shuffle(raw, _const(raw.type, 0), lanes), v)
        for size, shift in ((4 * bits, 32), (2 * bits, 16), (bits, 8)):
            low = sum(((1 << size) - 1) << at for at in range(0, 64, 2 * shift))
            high = b.and_(b.shl(x, _const(v, shift - size)), _const(v, low << shift))
            x = b.or_(b.and_(x, _const(v, low)), high)
        return b.bitcast(x, V64B)

    def dot(self, total: ir.Value, codes: ir.Value, x: ir.Value, how: int) -> ir.Value:
        """total + products of 64 unsigned and 64 signed bytes, 4 neighbours summed in each of 16 int32 lanes."""
        b = self.b
        if how == VNNI:
            dot = self.function("llvm.x86.avx512.vpdpbusd.512", V16I, V16I, V16I, V16I)
            return b.call(dot, [total, b.bitcast(codes, V16I), b.bitcast(x, V16I)])
        half = ir.VectorType(I32, 8)
        if how == VNNI256:
            dot = self.function("llvm.x86.avx512.vpdpbusd.256", half, half, half, half)
            parts = [
                b.call(
                    dot, [_const(half, 0), *(b.bitcast(self.shuffle(v, v, range(i, i + 32)), half) for v in (codes, x))]
                )
                for i in (0, 32)
            ]
            return b.add(total, self.shuffle(*parts, range(LANES)))
        words = ir.VectorType(I16, 16)
        madd = self.function("llvm.x86.avx2.pmadd.wd", half, words, words)
        pairs = []
        for i in range(0, 64, 16):
            c, s = (self.shuffle(v, v, range(i, i + 16)) for v in (codes, x))
            pairs.append(b.call(madd, [b.zext(c, words), b.sext(s, words)]))
        return b.add(total, self.shuffle(self.pair_sums(*pairs[:2]), self.pair_sums(*pairs[2:]), range(LANES)))


_Pointer = types.CPointer
_U8, _S8, _INT, _FLOAT = (_Pointer(t) for t in (types.uint8, types.int8, types.int32, types.float32))


def _constants(*values: Any) -> list[int] | None:
    return [v.literal_value for v in values] if all(isinstance(v, types.IntegerLiteral) for v in values) else None


@intrinsic(prefer_literal=True)
def at(typingctx, array, index):
    """Pointer to element `index` of a contiguous array, which has to live as long: see `compile.keep_alive`."""
    sig = _Pointer(array.dtype)(array, types.int64)

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.gep(data, [args[1]], source_etype=context.get_data_type(sig.args[0].dtype))

    return sig, codegen


@intrinsic(prefer_literal=True)
def group_dots(typingctx, codes, xq, sums, T, K, gs, kind, how):
    """sums[t, g] = Σ code · xq[t] over group g: one packed row of K codes against T rows of K bytes. Of E2M1 the code
    is twice the float, plus OFFSET; of E4M3 it is the float · 2^9, and the result says whether one is NaN.

    Codes are taken in blocks of 512. The last one of a ragged row goes over some groups again: their sums are integers,
    so they come out the same, and a block is as fast as 64 elements by themselves. For 4-bit codes x is as `pair_rows`
    of linear.py makes it: the elements of each block, of each 128 the even ones first, then the odd ones.
    """
    if (fixed := _constants(kind, how)) is None:
        return None
    sig = types.boolean(_U8, _S8, _INT, types.int64, types.int64, types.int64, kind, how)

    def codegen(context, builder, sig, args):
        code, (kind, how) = _Code(builder), fixed
        nbits = width(kind)
        row, xq, sums, T, K, gs = args[:6]
        b, zero = builder, _const(V16I, 0)
        group_of = code.divider(gs)
        groups = group_of(K)
        is_32, is_64 = (b.icmp_signed("==", gs, I64(size)) for size in (32, 64))
        short = b.icmp_signed("<", K, I64(512))
        many = b.select(short, I64(0), b.and_(b.add(K, I64(511)), I64(-512)))
        x_stride = b.select(short, K, many) if nbits == 4 else K

        def target(t, k):
            return code.at(sums, b.add(b.mul(t, groups), group_of(k)), I32)

        def x_at(t, k):
            return code.at(xq, b.add(b.mul(t, x_stride), k), I8)

        def first(v, n, place):
            code.store(code.shuffle(v, v, range(n)), place)

        def block(i, *tops):  # 512 elements: 16 sums over 32, then sums over groups
            last = b.sub(K, I64(512))
            k = b.select(b.icmp_signed("<", i, last), i, last)
            for line in range(nbits):
                code.prefetch(code.at(row, b.add(b.mul(b.lshr(k, I64(3)), I64(nbits)), I64(AHEAD + 64 * line)), I8))
            if kind == MXFP8:
                return e4m3_block(k, T, *tops)
            sums_with = code.sums_of_32(row, k, kind, how)

            def token(t):
                place, (total, *more) = target(t, k), sums_with(x_at(t, i if nbits == 4 else k))
                if more:
                    code.store(total, place)
                    code.store(more[0], code.at(place, LANES, I32))
                    return
                with b.if_else(is_32) as (then, otherwise):
                    with then:
                        code.store(total, place)
                    with otherwise:
                        pairs = code.pair_sums(total, total)
                        with b.if_else(is_64) as (then_64, then_128):
                            with then_64:
                                first(pairs, 8, place)
                            with then_128:
                                first(code.pair_sums(pairs, pairs), 4, place)

            return code.loop(0, T, 1, token)

        def e4m3_block(k, T, top):
            places = [code.at(row, b.add(k, I64(c)), I8) for c in range(0, 512, 64)]

            def token(t, top, parts=None):
                v, x = [], x_at(t, k)
                for c, place in enumerate(places):
                    product, shown = parts[c] if parts else code.e4m3_dot(code.load(place, V64B), how)
                    v.append(product(code.load(code.at(x, 64 * c, I8), V64B)))
                    top = code.larger(shown, top)
                code.store(code.sums_of_eight(v), target(t, k))
                return [top]

            if _by_digits(how):  # they are not kept for the next row of x: they are more than there are registers
                return code.loop(0, T, 1, token, top)
            parts = [code.e4m3_dot(code.load(place, V64B), how) for place in places]
            return code.loop(0, T, 1, functools.partial(token, parts=parts), top)

        def one(k, *tops, half=False):  # 64 elements, or the last 32
            part = code.codes(row, k, kind, half, how)
            starts = b.icmp_signed("==", b.and_(k, b.sub(gs, I64(1))), I64(0))

            def token(t, *tops):
                place, x = target(t, k), code.bytes64(x_at(t, k), 32 if half else 64)
                if kind == MXFP8:
                    product, shown = code.e4m3_dot(part, how)
                    v, tops = product(x), [code.larger(shown, *tops)]
                else:
                    v = code.dot(zero, part, x, how)
                for _ in range(2 if kind == NVFP4 else 3):
                    v = code.pair_sums(v, zero)
                if kind == NVFP4:
                    first(v, 2 if half else 4, place)
                    return tops
                with b.if_else(is_32) as (then, otherwise):
                    with then:
                        first(v, 1 if half else 2, place)
                    with otherwise:
                        before = b.select(starts, I32(0), code.load(place, I32))
                        both = b.add(b.extract_element(v, I32(0)), b.extract_element(v, I32(1)))
                        code.store(b.add(before, both), place)
                return tops

            return code.loop(0, T, 1, token, *tops)

        tops = code.loop(0, many, 512, block, *[_const(V64B, 0)] * (kind == MXFP8))
        rest = b.select(short, K, I64(0))
        whole = b.and_(rest, I64(-64))
        tops = code.loop(0, whole, 64, one, *tops)
        tops = code.loop(whole, rest, 64, functools.partial(one, half=True), *tops)
        return code.any_equal(tops, _nan_shown(how))

    return sig, codegen


def _scaled_step(code: _Code, args: Any, kind: int) -> Callable[..., list[ir.Value]]:
    """16 groups of `scaled_sum` from g on, added to what there is."""
    sums, scales, biases, delta, total = args[:5]
    b = code.b

    def step(g, acc, mask=None):
        ints = (
            code.load(code.at(sums, g, I32), V16I) if mask is None else code.masked(code.at(sums, g, I32), V16I, mask)
        )
        s = code.floats(scales, g, kind, mask)
        d, x = code.floats(delta, g, FLOAT32, mask), code.floats(total, g, FLOAT32, mask)
        if kind == WIDE_E8M0:
            return [b.fadd(acc, b.fmul(b.fmul(s, d), b.fmul(b.sitofp(ints, V16F), _const(V16F, E4M3_UNIT))))]
        if kind > WIDE_E8M0:
            return [b.fadd(acc, b.fmul(b.fmul(s, d), b.fsub(b.sitofp(ints, V16F), x)))]
        acc = b.fadd(acc, b.fmul(b.fmul(s, d), b.sitofp(ints, V16F)))
        return [b.fadd(acc, b.fmul(code.floats(biases, g, kind, mask), x))]

    return step


@intrinsic(prefer_literal=True)
def scaled_sum(typingctx, sums, scales, biases, delta, total, groups, fmt):
    """Σ_g (scale_g · delta_g) · sums_g + bias_g · total_g; lane g % 16 collects group g, then the lanes' tree. With
    scales of E2M1 Σ_g (scale_g · delta_g) · (sums_g − total_g), of E4M3 Σ_g (scale_g · delta_g) · (sums_g · E4M3_UNIT).

    Scales, biases and dense weights come as bytes here and below; `fmt` says what they are.
    """
    if (fixed := _constants(fmt)) is None:
        return None
    sig = types.float32(_INT, _U8, _U8, _FLOAT, _FLOAT, types.int64, fmt)

    def codegen(context, builder, sig, args):
        code, groups, b = _Code(builder), args[5], builder
        step = _scaled_step(code, args, fixed[0])
        whole = b.and_(groups, I64(-LANES))
        (acc,) = code.loop(0, whole, LANES, step, _const(V16F, 0.0))
        rest = b.sub(groups, whole)
        (acc,) = code.last(rest, [acc], lambda: step(whole, acc, code.below(rest)))
        return code.lane_sum(acc)

    return sig, codegen


@intrinsic(prefer_literal=True)
def scaled_terms(typingctx, sums, scales, biases, delta, total, count, terms, fmt):
    """The terms of `scaled_sum` by themselves: float32 [count], a multiple of 16, of several rows with few groups."""
    if (fixed := _constants(fmt)) is None:
        return None
    sig = types.void(_INT, _U8, _U8, _FLOAT, _FLOAT, types.int64, _FLOAT, fmt)

    def codegen(context, builder, sig, args):
        code, count, terms = _Code(builder), args[5], args[6]
        step = _scaled_step(code, args, fixed[0])

        def body(g):
            code.store(step(g, _const(V16F, 0.0))[0], code.at(terms, g, F32))

        code.loop(0, count, LANES, body)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def strip_terms(typingctx, codes, xq, size, scales, biases, delta, total, T, groups, terms, kind, how, fmt):
    """`group_dots` and `scaled_terms` of 16 short rows, whose codes lie in one piece, with T tokens: float32 [T, 16,
    groups], for groups of 64 codes of 4 bits.

    xq [T, size]: x again and again, paired, up to whole blocks of 512; delta, total [T, 16 · groups]. Codes are
    unpacked once for all tokens.
    """
    if (fixed := _constants(kind, how, fmt)) is None:
        return None
    args = (_U8, _S8, types.int64, _U8, _U8, _FLOAT, _FLOAT, types.int64, types.int64, _FLOAT)
    sig = types.void(*args, kind, how, fmt)

    def codegen(context, builder, sig, args):
        code, (kind, how, form), b = _Code(builder), fixed, builder
        codes, xq, size, scales, biases, delta, total, T, groups, terms = args[:10]
        count = b.mul(groups, I64(LANES))

        def sixteen(g):  # 1024 elements: 16 groups
            starts = [b.mul(g, I64(64)), b.add(b.mul(g, I64(64)), I64(512))]
            sums_with = [code.sums_of_32(codes, start, kind, how) for start in starts]
            places = [b.urem(start, size) for start in starts]
            s, bias = code.floats(scales, g, form, None), code.floats(biases, g, form, None)

            def token(t):
                own, at_group = b.mul(t, size), b.add(b.mul(t, count), g)
                (one,), (two,) = (
                    sums(code.at(xq, b.add(own, place), I8)) for sums, place in zip(sums_with, places, strict=True)
                )
                d, x = (code.floats(numbers, at_group, FLOAT32, None) for numbers in (delta, total))
                ints = b.sitofp(code.pair_sums(one, two), V16F)
                found = b.fadd(_const(V16F, 0.0), b.fmul(b.fmul(s, d), ints))
                code.store(b.fadd(found, b.fmul(bias, x)), code.at(terms, at_group, F32))

            code.loop(0, T, 1, token)

        code.loop(0, count, LANES, sixteen)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def row_sums(typingctx, terms, out, groups):
    """out[r] = the sum of the terms of row r of 16, by the lanes' tree; terms float32 [16, groups], up to 16 groups."""
    if (fixed := _constants(groups)) is None:
        return None
    sig = types.void(_FLOAT, _FLOAT, groups)

    def codegen(context, builder, sig, args):
        code, (groups,) = _Code(builder), fixed
        every = code.load(args[0], ir.VectorType(F32, LANES * groups))
        lanes = [code.shuffle(every, every, range(g, LANES * groups, groups)) for g in range(groups)]
        for n in (8, 4, 2, 1):
            above = lanes[n : 2 * n]
            lanes = [builder.fadd(v, above[i]) if i < len(above) else v for i, v in enumerate(lanes[:n])]
        code.store(lanes[0], args[1])
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def code_panel(typingctx, codes, stride, rows, panel, K, kind):
    """Codes of up to 16 rows as panel[K/4][16][4]: the bytes that meet one broadcast group of four x, row by row.

    Rows from `rows` on repeat the last one. Of 4 bits the even ones of eight codes come first, then the odd ones: words
    of packed codes change places, and are unpacked afterwards.
    """
    if (fixed := _constants(kind)) is None:
        return None
    sig = types.void(_U8, types.int64, types.int64, _U8, types.int64, kind)

    def codegen(context, builder, sig, args):
        code, (kind,) = _Code(builder), fixed
        base, stride, rows, panel, K = args[:5]
        b = builder
        starts = code.rows(base, stride, rows)

        def put(v, k, i):
            code.store(v, code.at(panel, b.add(b.mul(k, I64(LANES)), I64(64 * i)), I8))

        def chunk(k, half=False):
            v = code.transposed([b.bitcast(code.codes(start, k, kind, half), V16I) for start in starts])
            for i in range(LANES // 2 if half else LANES):
                put(v[i], k, i)

        def nibbles(k, count):
            at = b.lshr(k, I64(1))
            v = [b.bitcast(code.bytes64(code.at(start, at, I8), count // 2), V16I) for start in starts]
            for i, word in enumerate(code.transposed(v)[: count // 8]):
                for n, shifted in enumerate((word, b.lshr(word, _const(V16I, 4)))):
                    nibble = b.bitcast(b.and_(shifted, _const(V16I, 0x0F0F0F0F)), V64B)
                    put(code.unsigned(nibble, kind, VNNI), k, 2 * i + n)

        if width(kind) == 4:
            done: Any = 0
            for count in (128, 64, 32):
                stop = b.and_(K, I64(-count))
                code.loop(done, stop, count, functools.partial(nibbles, count=count))
                done = stop
        else:
            whole = b.and_(K, I64(-64))
            code.loop(0, whole, 64, chunk)
            code.loop(whole, K, 64, lambda k: chunk(k, half=True))
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def e4m3_panel(typingctx, panel, sums, groups):
    """sums[g][16] = −128 · Σ code over group g, the codes of a panel as whole numbers: what `panel_dots` starts with,
    since its x is 128 too large. int32, though the pointer is to float32. The result says whether a code is NaN.
    """
    sig = types.boolean(_U8, _FLOAT, types.int64)

    def codegen(context, builder, sig, args):
        code, b = _Code(builder), builder
        panel, sums, groups = args

        def group(g, top):
            total = _const(V16I, 0)
            for i in range(8):
                codes = code.load(code.at(panel, b.add(b.mul(g, I64(512)), I64(64 * i)), I8), V64B)
                digits = code.e4m3_digits(codes, VNNI)
                total = b.add(total, code.digits_dot(digits, code.negated(_const(V64B, 1), codes)))
                top = code.larger(digits[0], top)
            total = b.sub(_const(V16I, 0), b.shl(total, _const(V16I, 7)))
            code.store(total, code.at(sums, b.mul(g, I64(LANES)), F32))
            return [top]

        return code.any_equal(code.loop(0, groups, 1, group, _const(V64B, 0)), E4M3_NAN)

    return sig, codegen


@intrinsic(prefer_literal=True)
def scale_panel(typingctx, scales, stride, rows, panel, groups, fmt):
    """Scales (or biases) of up to 16 rows as float32 panel[groups][16], filled up to a multiple of 16 groups.

    Rows from `rows` on repeat the last one.
    """
    if (fixed := _constants(fmt)) is None:
        return None
    sig = types.void(_U8, types.int64, types.int64, _FLOAT, types.int64, fmt)

    def codegen(context, builder, sig, args):
        code, (kind,) = _Code(builder), fixed
        base, stride, rows, panel, groups = args[:5]
        b = builder
        starts = code.rows(base, stride, rows)

        def sixteen(g, mask=None):
            v = code.transposed([code.floats(start, g, kind, mask) for start in starts])
            for i, value in enumerate(v):
                code.store(value, code.at(panel, b.mul(b.add(g, I64(i)), I64(LANES)), F32))
            return []

        whole = b.and_(groups, I64(-LANES))
        code.loop(0, whole, LANES, sixteen)
        rest = b.sub(groups, whole)
        code.last(rest, [], lambda: sixteen(whole, code.below(rest)))
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def panel_dots(typingctx, panel, scales, biases, xq, delta, total, acc, y, y_stride, rows, K, gs, ahead, kind, tokens):
    """`scaled_sum` of 16 rows for a few tokens at once, the same bits: rows in lanes, x broadcast four bytes at a time.

    panel and the order of xq [tokens, K] as in code_panel; scales, biases float32 [K/gs, 16]; delta, total [tokens,
    K/gs]; acc float32 [16, tokens, 16] is scratch; y[t · y_stride + r] for r < rows. Meanwhile 16 rows of packed codes
    of a kind are fetched from `ahead` on, for the next panel. Of E4M3 xq is unsigned, 128 larger, and biases are the
    sums of `e4m3_panel`: signs go to the codes, once for all tokens. AVX-512 VNNI.
    """
    if (fixed := _constants(kind, tokens)) is None:
        return None
    sig = types.void(
        _U8,
        _FLOAT,
        _FLOAT,
        _S8,
        _FLOAT,
        _FLOAT,
        _FLOAT,
        _FLOAT,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        _U8,
        kind,
        tokens,
    )

    def codegen(context, builder, sig, args):
        code, (kind, n) = _Code(builder), fixed
        nbits = width(kind)
        panel, scales, biases, xq, delta, total, acc, y, y_stride, rows, K, gs, ahead = args[:13]
        b = builder
        groups = b.sdiv(K, gs)
        zero = _const(V16F, 0.0)

        def clear(i):
            code.store(zero, code.at(acc, b.mul(i, I64(LANES)), F32))

        def whole_number(digits):
            total = digits[0]
            for digit in digits[1:]:
                total = b.add(b.shl(total, _const(V16I, 6)), digit)
            return total

        code.loop(0, I64(LANES * n), 1, clear)
        x_rows = [code.at(xq, b.mul(I64(t), K), I8) for t in range(n)]

        def group(g):
            first = b.mul(g, gs)

            def e4m3_four(k, *ints):
                codes, made = code.load(code.at(panel, b.mul(k, I64(LANES)), I8), V64B), []
                digits = [code.negated(digit, codes) for digit in code.e4m3_digits(codes, VNNI)]
                for t in range(n):
                    x = b.bitcast(code.splat(code.load(code.at(x_rows[t], k, I8), I32)), V64B)
                    made += [code.dot(ints[3 * t + i], x, digit, VNNI) for i, digit in enumerate(digits)]
                return made

            def four(k, *ints):
                if kind == MXFP8:
                    return e4m3_four(k, *ints)
                w = code.load(code.at(panel, b.mul(k, I64(LANES)), I8), V64B)
                return [
                    code.dot(ints[t], w, b.bitcast(code.splat(code.load(code.at(x_rows[t], k, I8), I32)), V64B), VNNI)
                    for t in range(n)
                ]

            def sixteen(k, *ints):
                for line in range(0, 32 * nbits, 64):
                    code.prefetch(code.at(ahead, b.add(b.mul(k, I64(2 * nbits)), I64(line)), I8))
                for step in range(0, 16, 4):
                    ints = four(b.add(k, I64(step)), *ints)
                return ints

            start = [_const(V16I, 0)]
            if kind == MXFP8:
                start = [*start * 2, code.load(code.at(biases, b.mul(g, I64(LANES)), F32), V16I)]
            ints = code.loop(first, b.add(first, gs), 16, sixteen, *start * n)
            if kind == MXFP8:
                ints = [whole_number(ints[3 * t : 3 * t + 3]) for t in range(n)]
            s = code.floats(scales, b.mul(g, I64(LANES)), FLOAT32)
            bias = None if kind in SCALES else code.floats(biases, b.mul(g, I64(LANES)), FLOAT32)
            lane = b.and_(g, I64(LANES - 1))
            for t in range(n):
                at = b.add(b.mul(I64(t), groups), g)
                d, x = (code.splat(code.load(code.at(v, at, F32), F32)) for v in (delta, total))
                place = code.at(acc, b.mul(b.add(b.mul(lane, I64(n)), I64(t)), I64(LANES)), F32)
                total_of = b.sitofp(ints[t], V16F)
                if kind == MXFP8:
                    total_of = b.fmul(total_of, _const(V16F, E4M3_UNIT))
                elif bias is None:
                    total_of = b.fsub(total_of, x)
                a = b.fadd(code.load(place, V16F), b.fmul(b.fmul(s, d), total_of))
                code.store(a if bias is None else b.fadd(a, b.fmul(bias, x)), place)

        code.loop(0, groups, 1, group)
        full = b.icmp_signed("==", rows, I64(LANES))
        for t in range(n):
            v = [code.load(code.at(acc, (lane * n + t) * LANES, F32), V16F) for lane in range(LANES)]
            while len(v) > 1:
                v = [b.fadd(v[i], v[i + len(v) // 2]) for i in range(len(v) // 2)]
            place = code.at(y, b.mul(I64(t), y_stride), F32)
            with b.if_else(full) as (then, otherwise):
                with then:
                    code.store(v[0], place)
                with otherwise:
                    name = "llvm.masked.store.v16f32.p0"
                    bools = ir.VectorType(ir.IntType(1), LANES)
                    store = code.function(name, ir.VoidType(), V16F, V16F.as_pointer(), I32, bools)
                    b.call(store, [v[0], b.bitcast(place, V16F.as_pointer()), I32(1), code.below(rows)])
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def dense_codes(typingctx, codes, scales, biases, out, K, gs, kind, fmt, how):
    """out[j] = code_j · scale_g + bias_g in float32, product and sum each rounded: one packed row made dense. Floats
    have no bias.
    """
    if (fixed := _constants(kind, fmt, how)) is None:
        return None
    sig = types.void(_U8, _U8, _U8, _FLOAT, types.int64, types.int64, kind, fmt, how)

    def codegen(context, builder, sig, args):
        code, (kind, fmt, how) = _Code(builder), fixed
        row, scales, biases, out, K, gs = args[:6]
        b = builder

        def scalar(base, g):
            element = _ELEMENT[fmt]
            one = code.load(code.at(b.bitcast(base, element.as_pointer()), g, element), element)
            return code.widen(code.splat(one), fmt)

        group_of = code.divider(gs)

        def group_part(part, first, k):
            s = bias = None
            for i in (0, 16):
                at_k = b.add(k, I64(i))
                if s is None or kind == NVFP4:
                    s, bias = scalar(scales, group_of(at_k)), None if kind in SCALES else scalar(biases, group_of(at_k))
                q = code.numbers(part, range(first + i, first + i + 16), kind)
                code.store(code.weight(q, s, bias), code.at(out, at_k, F32))

        def chunk(k, half=False):
            v = code.signed(row, k, kind, half, how)
            group_part(v, 0, k)
            if not half:
                group_part(v, 32, b.add(k, I64(32)))

        whole = b.and_(K, I64(-64))
        code.loop(0, whole, 64, chunk)
        code.loop(whole, K, 64, lambda k: chunk(k, half=True))
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def coded_dots(typingctx, codes, stride, scales, biases, groups, x, y, K, gs, kind, rows, how):
    """y[r] = `float_dots` of rows that `dense_codes` would make, the same bits, without storing them.

    scales, biases float32 [rows, groups]; x float32 [K].
    """
    if (fixed := _constants(kind, rows, how)) is None:
        return None
    sig = types.void(
        _U8, types.int64, _FLOAT, _FLOAT, types.int64, _FLOAT, _FLOAT, types.int64, types.int64, kind, rows, how
    )

    def codegen(context, builder, sig, args):
        code, (kind, R, how) = _Code(builder), fixed
        codes, stride, scales, biases, groups, x, y, K, gs = args[:9]
        b = builder
        fma = code.function("llvm.fma.v16f32", V16F, V16F, V16F, V16F)
        starts = [code.at(codes, b.mul(I64(r), stride), I8) for r in range(R)]
        group_of = code.divider(gs)
        ahead = b.mul(I64(R), stride)  # to the rows that come next

        def chunk(k, *acc, half=False):
            for start in starts:
                code.prefetch(code.at(start, b.add(ahead, b.lshr(b.mul(k, I64(width(kind))), I64(3))), I8))
            acc, parts = list(acc), [code.signed(start, k, kind, half, how) for start in starts]
            per_group = 16 if kind == NVFP4 else 32
            for block in range(0, 32 if half else 64, per_group):
                at_k = b.add(k, I64(block))
                g = group_of(at_k)
                xs = [code.floats(x, b.add(at_k, I64(i)), FLOAT32) for i in range(0, per_group, 16)]
                for r in range(R):
                    place = b.add(b.mul(I64(r), groups), g)
                    s = code.splat(code.load(code.at(scales, place, F32), F32))
                    bias = None if kind in SCALES else code.splat(code.load(code.at(biases, place, F32), F32))
                    for i, each in enumerate(xs):
                        lanes = range(block + 16 * i, block + 16 * i + 16)
                        q = code.numbers(parts[r], lanes, kind)
                        acc[r] = b.call(fma, [code.weight(q, s, bias), each, acc[r]])
            return acc

        def patterned(k, *carried):
            """`chunk` of E4M3 whose scales are below 2^16: weights are the same products, of other powers of two."""
            acc, tops = list(carried[:R]), list(carried[R:])
            for r, start in enumerate(starts):
                code.prefetch(code.at(start, b.add(k, ahead), I8))
                raw = code.load(code.at(start, k, I8), V64B)
                tops[r] = b.call(largest, [tops[r], b.and_(raw, _const(V64B, 0x7F))])
                for i, number in enumerate(code.e4m3_patterns(raw)):
                    if i % 2 == 0:
                        place = b.add(b.mul(I64(r), groups), group_of(b.add(k, I64(16 * i))))
                        s = b.fmul(code.splat(code.load(code.at(scales, place, F32), F32)), _const(V16F, 2.0**112))
                    each = code.floats(x, b.add(k, I64(16 * i)), FLOAT32)
                    acc[r] = b.call(fma, [b.fmul(number, s), each, acc[r]])
            return [*acc, *tops]

        whole, zeros = b.and_(K, I64(-64)), [_const(V16F, 0.0)] * R
        if kind != MXFP8 or how != VNNI:
            acc = code.loop(0, whole, 64, chunk, *zeros)
        else:
            largest = code.function("llvm.umax.v64i8", V64B, V64B, V64B)
            few = code.all_below(scales, b.mul(I64(R), groups), 2.0**16)
            fast = code.loop(0, b.select(few, whole, I64(0)), 64, patterned, *zeros, *[_const(V64B, 0)] * R)
            acc = code.loop(b.select(few, whole, I64(0)), whole, 64, chunk, *fast[:R])
            for r, top in enumerate(fast[R:]):  # the largest code is NaN, and so is all that it is added to
                nan = b.icmp_unsigned("==", top, _const(V64B, 0x7F))
                found = b.icmp_unsigned("!=", b.bitcast(nan, I64), I64(0))
                acc[r] = b.select(found, _const(V16F, float("nan")), acc[r])
        acc = code.loop(whole, K, 64, lambda k, *acc: chunk(k, *acc, half=True), *acc)
        for r in range(R):
            code.store(code.lane_sum(acc[r]), code.at(y, r, F32))
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def dense_row(typingctx, row, out, K, fmt):
    """out[j] = float32 of a row of numbers of a format."""
    if (fixed := _constants(fmt)) is None:
        return None
    sig = types.void(_U8, _FLOAT, types.int64, fmt)

    def codegen(context, builder, sig, args):
        code, (kind,) = _Code(builder), fixed
        row, out, K = args[:3]
        b = builder
        whole = b.and_(K, I64(-LANES))

        def sixteen(k):
            code.store(code.floats(row, k, kind), code.at(out, k, F32))

        code.loop(0, whole, LANES, sixteen)

        def one(k):
            code.store(b.extract_element(code.floats(row, k, kind, code.below(I64(1))), I32(0)), code.at(out, k, F32))

        code.loop(whole, K, 1, one)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def float_dots(typingctx, w, w_stride, x, x_stride, y, y_stride, K, rows, tokens):
    """y[t, r] = Σ_j w[r, j] · x[t, j] for a tile of rows × tokens: lane j % 16 collects by fused multiply-add, then
    the tree.

    The order of the sum depends on nothing but K, so tiles of any size give the same bits.
    """
    if (fixed := _constants(rows, tokens)) is None:
        return None
    sig = types.void(_FLOAT, types.int64, _FLOAT, types.int64, _FLOAT, types.int64, types.int64, rows, tokens)

    def codegen(context, builder, sig, args):
        code, (R, T) = _Code(builder), fixed
        w, w_stride, x, x_stride, y, y_stride, K = args[:7]
        b = builder
        fma = code.function("llvm.fma.v16f32", V16F, V16F, V16F, V16F)
        w_rows = [code.at(w, b.mul(I64(r), w_stride), F32) for r in range(R)]
        x_rows = [code.at(x, b.mul(I64(t), x_stride), F32) for t in range(T)]

        def step(k, *acc, mask=None):
            ws, xs = ([code.floats(row, k, FLOAT32, mask) for row in part] for part in (w_rows, x_rows))
            return [b.call(fma, [ws[r], xs[t], acc[r * T + t]]) for r in range(R) for t in range(T)]

        whole = b.and_(K, I64(-LANES))
        acc = code.loop(0, whole, LANES, step, *[_const(V16F, 0.0)] * (R * T))
        rest = b.sub(K, whole)
        acc = code.last(rest, acc, lambda: step(whole, *acc, mask=code.below(rest)))
        for r in range(R):
            for t in range(T):
                code.store(code.lane_sum(acc[r * T + t]), code.at(y, b.add(b.mul(I64(t), y_stride), I64(r)), F32))
        return context.get_dummy_value()

    return sig, codegen
