"""Blocks of GGUF files in vector code: 256 weights of any type become codes, scales and biases in registers.

A step is 256 weights: one block of a K type, eight of 32 weights. `Steps.decoded` gives their codes as four vectors of
64 bytes in order and the scales (and biases) of 16 weights as one vector of 16 floats each, as `penstock.quant.Decoded`
has them; everything else is the same for all types. A last step that is not whole is filled with zeros by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from penstock.backends.cpu import _simd
from penstock.backends.cpu._simd import AHEAD, F32, FLOAT32, I8, I16, I32, I64, LANES, TWICE, V16F, V16I, V64B
from penstock.quant import BLOCK_TYPES
from penstock.quant.gguf_blocks import LEVELS

STEP = 256
FIRST = 256  # kinds of codes of _simd.py are below
KINDS = {name: FIRST + 16 * i for i, name in enumerate(BLOCK_TYPES)}
_NAMES = {kind: name for name, kind in KINDS.items()}
_const = _simd._const
_U8, _S8, _FLOAT = (types.CPointer(t) for t in (types.uint8, types.int8, types.float32))
_V16H = ir.VectorType(I16, 16)
_PAIRS = [i // 2 for i in range(LANES)]  # what 32 weights share, for each 16
_SHARES = {"wide": ("Q6_K",), "over": ("IQ4_NL", "IQ4_XS")}  # sums of 8 codes · int8, of 4, do not fit 16 bits


def step_bytes(kind: int) -> int:
    """Bytes of 256 weights."""
    known = BLOCK_TYPES[_NAMES[kind]]
    return STEP // known.size * known.nbytes


def center(kind: int) -> int:
    return BLOCK_TYPES[_NAMES[kind]].center


def has_biases(kind: int) -> bool:
    return _NAMES[kind] in ("Q2_K", "Q4_K", "Q5_K", "Q5_1")


class Steps(_simd._Code):
    """An IR builder that unpacks a step of one type."""

    def __init__(self, builder: ir.IRBuilder, kind: int, how: int) -> None:
        super().__init__(builder)
        self.kind, self.how, self.name = kind, how, _NAMES[kind]
        self.nbytes = step_bytes(kind)

    def decoded(self, p: ir.Value) -> tuple[list[ir.Value], ir.Value, ir.Value | None]:
        """Codes, scales and biases (None: there are none) of the step at p."""
        made: Callable[[ir.Value], Any] = getattr(self, f"_{self.name.lower()}")
        return made(p)

    def sums_of_16(self, codes: list[ir.Value], x: ir.Value) -> ir.Value:
        """Σ code · x over each 16 of 256 bytes at x, in order."""
        zero = _const(V16I, 0)
        v = [self.dot(zero, part, self.load(self.at(x, 64 * i, I8), V64B), self.how) for i, part in enumerate(codes)]
        if self.name in _SHARES["over"]:
            return self.pair_sums(self.pair_sums(v[0], v[1]), self.pair_sums(v[2], v[3]))
        return self.quad_sums(v, self.how, self.name in _SHARES["wide"])

    def weights(self, codes: list[ir.Value], scales: ir.Value, biases: ir.Value | None) -> list[ir.Value]:
        """The 256 weights as 16 vectors of floats."""
        b, made = self.b, []
        middle = center(self.kind)
        for i in range(LANES):
            part = codes[i // 4]
            sixteen = self.shuffle(part, part, range(16 * (i % 4), 16 * (i % 4) + 16))
            if middle:
                number = b.sitofp(b.sext(b.sub(sixteen, _const(sixteen.type, middle)), V16I), V16F)
            else:
                number = b.sitofp(b.zext(sixteen, V16I), V16F)
            value = b.fmul(number, self.shuffle(scales, scales, [i] * LANES))
            made.append(value if biases is None else b.fadd(value, self.shuffle(biases, biases, [i] * LANES)))
        return made

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _bytes(self, p: ir.Value, start: int, count: int) -> ir.Value:
        return self.load(self.at(p, start, I8), ir.VectorType(I8, count))

    def _doubled(self, p: ir.Value, start: int) -> ir.Value:
        """32 bytes twice, as words."""
        raw = self._bytes(p, start, 32)
        return self.b.bitcast(self.shuffle(raw, raw, [*range(32), *range(32)]), V16I)

    def _fields(self, words: ir.Value, low: int, high: int, bits: int) -> ir.Value:
        """Bits of each byte from `low` on in the first half, from `high` on in the second."""
        shifted = self.b.lshr(words, _const(V16I, [low] * 8 + [high] * 8))
        return self.b.and_(shifted, _const(V16I, 0x01010101 * ((1 << bits) - 1)))

    def _above(self, codes: ir.Value, high: ir.Value, bits: int) -> ir.Value:
        """codes | high << bits as bytes: high has fields that leave room."""
        return self.b.bitcast(self.b.or_(codes, self.b.shl(high, _const(V16I, bits))), V64B)

    def _splat_half(self, p: ir.Value, start: int) -> ir.Value:
        return self.from_halves(self.splat(self.load(self.at(p, start, I8), I16)))

    def _words(self, *words: ir.Value) -> ir.Value:
        """Four words as 16 bytes, one to a lane, unsigned."""
        four: Any = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
        for i, word in enumerate(words):
            four = self.b.insert_element(four, word, I32(i))
        return self.b.zext(self.b.bitcast(four, ir.VectorType(I8, 16)), V16I)

    def _part(self, word: ir.Value, shift: int, mask: int) -> ir.Value:
        return self.b.and_(self.b.lshr(word, I32(shift)) if shift else word, I32(mask))

    # -- K types -----------------------------------------------------------------------------------------------------

    def _k_scales(self, p: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Scales and biases of Q4_K and Q5_K: 8 of 6 bits and 8 minima of 6 bits, in 12 bytes behind two halves."""
        b = self.b
        first, second, third = (self.load(self.at(p, 4 + 4 * i, I8), I32) for i in range(3))
        scales_high = b.or_(self._part(third, 0, 0x0F0F0F0F), self._part(first, 2, 0x30303030))
        least_high = b.or_(self._part(third, 4, 0x0F0F0F0F), self._part(second, 2, 0x30303030))
        six = self._words(self._part(first, 0, 0x3F3F3F3F), scales_high, self._part(second, 0, 0x3F3F3F3F), least_high)
        two = self._bytes(p, 0, 4)
        halves = b.bitcast(self.shuffle(two, two, [0, 1] * 8 + [2, 3] * 8), _V16H)
        both = b.fmul(self.from_halves(halves), b.sitofp(six, V16F))
        scales = self.shuffle(both, both, _PAIRS)
        return scales, b.fneg(self.shuffle(both, both, [8 + i for i in _PAIRS]))

    def _q4_k(self, p):
        codes = [self.b.bitcast(self._fields(self._doubled(p, 16 + 32 * i), 0, 4, 4), V64B) for i in range(4)]
        return codes, *self._k_scales(p)

    def _q5_k(self, p):
        high = self._doubled(p, 16)
        codes = [
            self._above(
                self._fields(self._doubled(p, 48 + 32 * i), 0, 4, 4), self._fields(high, 2 * i, 2 * i + 1, 1), 4
            )
            for i in range(4)
        ]
        return codes, *self._k_scales(p)

    def _q6_k(self, p):
        b, codes = self.b, []
        for half in range(2):
            low = b.bitcast(self._bytes(p, 64 * half, 64), V16I)
            high = self._doubled(p, 128 + 32 * half)
            for i in range(2):
                codes.append(
                    self._above(self._fields(low, 4 * i, 4 * i, 4), self._fields(high, 4 * i, 4 * i + 2, 2), 4)
                )
        eight = b.sitofp(b.sext(self._bytes(p, 192, 16), V16I), V16F)
        return codes, b.fmul(self._splat_half(p, 208), eight), None

    def _q3_k(self, p):
        b, codes, high = self.b, [], self._doubled(p, 0)
        for half in range(2):
            low = self._doubled(p, 32 + 32 * half)
            for i in range(2):
                bit = 4 * half + 2 * i
                codes.append(
                    self._above(self._fields(low, 4 * i, 4 * i + 2, 2), self._fields(high, bit, bit + 1, 1), 2)
                )
        first, second, third = (self.load(self.at(p, 96 + 4 * i, I8), I32) for i in range(3))
        words = []
        for i, (word, shift) in enumerate(((first, 0), (second, 0), (first, 4), (second, 4))):
            upper = b.shl(self._part(third, 2 * i, 0x03030303), I32(4))
            words.append(b.or_(self._part(word, shift, 0x0F0F0F0F), upper))
        six = b.sitofp(b.sub(self._words(*words), _const(V16I, 32)), V16F)
        return codes, b.fmul(self._splat_half(p, 108), six), None

    def _q2_k(self, p):
        b, codes = self.b, []
        for half in range(2):
            low = self._doubled(p, 16 + 32 * half)
            codes += [b.bitcast(self._fields(low, 4 * i, 4 * i + 2, 2), V64B) for i in range(2)]
        both = b.zext(self._bytes(p, 0, 16), V16I)
        scales, least = b.and_(both, _const(V16I, 15)), b.lshr(both, _const(V16I, 4))
        scales = b.fmul(self._splat_half(p, 80), b.sitofp(scales, V16F))
        return codes, scales, b.fneg(b.fmul(self._splat_half(p, 82), b.sitofp(least, V16F)))

    def _iq4_xs(self, p):
        b = self.b
        codes = [self._levels(self._two_nibbles(self._bytes(p, 8 + 32 * i, 32))) for i in range(4)]
        four = self._bytes(p, 4, 4)
        low = b.zext(self.shuffle(four, four, [i // 4 for i in range(LANES)]), V16I)
        low = b.and_(b.lshr(low, _const(V16I, [4 * (i // 2 % 2) for i in range(LANES)])), _const(V16I, 15))
        high = b.zext(self.splat(self.load(self.at(p, 2, I8), I16)), V16I)
        high = b.and_(b.lshr(high, _const(V16I, [i // 2 * 2 for i in range(LANES)])), _const(V16I, 3))
        six = b.sub(b.or_(low, b.shl(high, _const(V16I, 4))), _const(V16I, 32))
        return codes, b.fmul(self._splat_half(p, 0), b.sitofp(six, V16F)), None

    # -- types of 32 weights, eight blocks at a time -----------------------------------------------------------------

    def _two_nibbles(self, raw: ir.Value) -> ir.Value:
        """16 bytes of each of two blocks as their codes: low halves, then high halves."""
        twice = self.b.bitcast(self.shuffle(raw, raw, [*range(16), *range(16), *range(16, 32), *range(16, 32)]), V16I)
        shifted = self.b.lshr(twice, _const(V16I, [0] * 4 + [4] * 4 + [0] * 4 + [4] * 4))
        return self.b.and_(shifted, _const(V16I, 0x0F0F0F0F))

    def _block_nibbles(self, p: ir.Value, start: int) -> list[ir.Value]:
        size = self.nbytes // 8
        made = []
        for i in range(0, 8, 2):
            one, other = (self._bytes(p, (i + n) * size + start, 16) for n in (0, 1))
            made.append(self._two_nibbles(self.shuffle(one, other, range(32))))
        return made

    def _block_halves(self, p: ir.Value, start: int) -> ir.Value:
        eight: Any = ir.Constant(ir.VectorType(I16, 8), ir.Undefined)
        for i in range(8):
            eight = self.b.insert_element(eight, self.load(self.at(p, i * (self.nbytes // 8) + start, I8), I16), I32(i))
        return self.from_halves(self.shuffle(eight, eight, _PAIRS))

    def _fives(self, p: ir.Value, start: int) -> list[ir.Value]:
        b, size, made = self.b, self.nbytes // 8, []
        for i, low in enumerate(self._block_nibbles(p, start + 4)):
            one, other = (b.zext(self.load(self.at(p, (2 * i + n) * size + start, I8), I32), I64) for n in (0, 1))
            bits = b.bitcast(b.or_(one, b.shl(other, I64(32))), ir.VectorType(ir.IntType(1), 64))
            made.append(self._above(low, b.bitcast(b.zext(bits, V64B), V16I), 4))
        return made

    def _q5_0(self, p):
        return self._fives(p, 2), self._block_halves(p, 0), None

    def _q5_1(self, p):
        return self._fives(p, 4), self._block_halves(p, 0), self._block_halves(p, 2)

    def _levels(self, nibbles: ir.Value) -> ir.Value:
        return self.looked_up(self.b.bitcast(nibbles, V64B), [int(v) + 127 for v in LEVELS], self.how)

    def _iq4_nl(self, p):
        return [self._levels(v) for v in self._block_nibbles(p, 2)], self._block_halves(p, 0), None

    def _mxfp4(self, p):
        b = self.b
        table = [v + 12 for v in TWICE]
        codes = [self.looked_up(b.bitcast(v, V64B), table, self.how) for v in self._block_nibbles(p, 1)]
        words: Any = ir.Constant(ir.VectorType(I32, 8), ir.Undefined)
        for i in range(8):
            words = b.insert_element(words, b.zext(self.load(self.at(p, 17 * i, I8), I8), I32), I32(i))
        e = self.shuffle(words, words, _PAIRS)
        small = b.shl(_const(V16I, 0x00200000), e)
        normal = b.shl(b.sub(e, _const(V16I, 1)), _const(V16I, 23))
        bits = b.select(b.icmp_unsigned("<", e, _const(V16I, 2)), small, normal)
        return codes, b.bitcast(bits, V16F), None

    def fetch_ahead(self, p: ir.Value) -> None:
        for line in range(0, self.nbytes, 64):
            self.prefetch(self.at(p, AHEAD + line, I8))


@intrinsic(prefer_literal=True)
def block_dot(typingctx, row, xq, delta, total, steps, kind, how):
    """Σ_g (scale_g · delta_g) · Σ code·xq + (bias_g − center · scale_g) · total_g over the groups of 16 of a row.

    Lane g % 16 collects group g, first the one product and then the other, then the lanes' tree.
    """
    if (fixed := _simd._constants(kind, how)) is None:
        return None
    sig = types.float32(_U8, _S8, _FLOAT, _FLOAT, types.int64, kind, how)

    def codegen(context, builder, sig, args):
        code = Steps(builder, *fixed)
        row, xq, delta, total, steps = args[:5]
        b = builder

        def step(i, acc):
            p = code.at(row, b.mul(i, I64(code.nbytes)), I8)
            code.fetch_ahead(p)
            codes, scales, biases = code.decoded(p)
            sums = code.sums_of_16(codes, code.at(xq, b.mul(i, I64(STEP)), I8))
            g = b.mul(i, I64(LANES))
            d, x = code.floats(delta, g, FLOAT32), code.floats(total, g, FLOAT32)
            acc = b.fadd(acc, b.fmul(b.fmul(scales, d), b.sitofp(sums, V16F)))
            return [b.fadd(acc, b.fmul(_shifted(code, scales, biases), x))]

        (acc,) = code.loop(0, steps, 1, step, _const(V16F, 0.0))
        return code.lane_sum(acc)

    return sig, codegen


def _shifted(code: Steps, scales: ir.Value, biases: ir.Value | None) -> ir.Value:
    """Biases of codes that are not less their center."""
    if biases is not None:
        return biases
    return code.b.fmul(scales, _const(V16F, -float(center(code.kind))))


@intrinsic(prefer_literal=True)
def block_codes(typingctx, row, codes, scales, biases, steps, kind, how):
    """A row as codes of one byte with float32 scales and biases of 16, those that `block_dot` multiplies with."""
    if (fixed := _simd._constants(kind, how)) is None:
        return None
    sig = types.void(_U8, _U8, _FLOAT, _FLOAT, types.int64, kind, how)

    def codegen(context, builder, sig, args):
        code = Steps(builder, *fixed)
        row, to_codes, to_scales, to_biases, steps = args[:5]
        b = builder

        def step(i):
            codes, scales, biases = code.decoded(code.at(row, b.mul(i, I64(code.nbytes)), I8))
            for n, part in enumerate(codes):
                code.store(part, code.at(to_codes, b.add(b.mul(i, I64(STEP)), I64(64 * n)), I8))
            g = b.mul(i, I64(LANES))
            code.store(scales, code.at(to_scales, g, F32))
            code.store(_shifted(code, scales, biases), code.at(to_biases, g, F32))

        code.loop(0, steps, 1, step)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def block_weights(typingctx, row, out, steps, kind, how):
    """A row made dense in float32: bit for bit the definition."""
    if (fixed := _simd._constants(kind, how)) is None:
        return None
    sig = types.void(_U8, _FLOAT, types.int64, kind, how)

    def codegen(context, builder, sig, args):
        code = Steps(builder, *fixed)
        row, out, steps = args[:3]
        b = builder

        def step(i):
            made = code.weights(*code.decoded(code.at(row, b.mul(i, I64(code.nbytes)), I8)))
            for n, part in enumerate(made):
                code.store(part, code.at(out, b.add(b.mul(i, I64(STEP)), I64(LANES * n)), F32))

        code.loop(0, steps, 1, step)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def block_float_dots(typingctx, row, stride, x, y, steps, kind, rows, how):
    """y[r] = `float_dots` of rows that `block_weights` would make, the same bits, without storing them."""
    if (fixed := _simd._constants(kind, rows, how)) is None:
        return None
    sig = types.void(_U8, types.int64, _FLOAT, _FLOAT, types.int64, kind, rows, how)

    def codegen(context, builder, sig, args):
        kind, R, how = fixed
        code = Steps(builder, kind, how)
        row, stride, x, y, steps = args[:5]
        b = builder
        fma = code.function("llvm.fma.v16f32", V16F, V16F, V16F, V16F)
        starts = [code.at(row, b.mul(I64(r), stride), I8) for r in range(R)]

        def step(i, *acc):
            acc, at_k = list(acc), b.mul(i, I64(STEP))
            for r in range(R):
                p = code.at(starts[r], b.mul(i, I64(code.nbytes)), I8)
                code.fetch_ahead(p)
                made = code.weights(*code.decoded(p))
                for n in range(LANES):
                    xs = code.floats(x, b.add(at_k, I64(LANES * n)), FLOAT32)
                    acc[r] = b.call(fma, [made[n], xs, acc[r]])
            return acc

        acc = code.loop(0, steps, 1, step, *[_const(V16F, 0.0)] * R)
        for r in range(R):
            code.store(code.lane_sum(acc[r]), code.at(y, r, F32))
        return context.get_dummy_value()

    return sig, codegen
