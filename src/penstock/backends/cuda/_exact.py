"""Products of many rows with codes that are not rounded: tensor cores add up each group, scale and bias come after.

A code or-ed into the mantissa of 2^bits is that number plus the code, exact in half precision as x is, and the sum of x
over the group takes the number away again. Codes of a byte are two halves where the mantissa is too short for them.
Weights go from shared memory to the tensor cores in the order in which their words hold them (`_gemm`: dot order); a
small launch brings x into that order, normed if that is asked for, and adds up its groups. Scores of a router, which
has few rows of codes, take codes in bytes less 128 and x as it is: a copy of x would take about as long as they do.
"""

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from penstock.backends.cuda._gemm import dot_dtype, dot_order, units
from penstock.backends.cuda._launch import (
    TL_DTYPES,
    WIDENED,
    compiled_for,
    counters,
    multiprocessors,
    pdl_options,
    wait_for_previous,
)
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import EXACT_FEWEST, EXACT_PROGRAMS, EXACT_ROUNDED, EXACT_TILES, SCORES
from penstock.quant import QuantizedTensor

_SHIFT = tl.constexpr(8388608.0 + 128.0)  # a code or-ed into the mantissa of 2^23 is that number plus the code

# Arrays of a product. x: in dot order; sums: of its groups; w: codes, scales, biases; parts, counters: of programs that
# share K.
_Arrays = namedtuple("_Arrays", "x sums w residual out parts counters")
# Arrays of the scores of a router; codes: bytes.
_Scores = namedtuple("_Scores", "x codes scales biases out")
# What a product is compiled for: rows of K codes of BITS in groups of GS; GP: groups of a row of sums; tiles of BN of
# them and BM rows of x; PARTS programs that share K, EACH groups for each, of which GROUPS at a time.
_Constants = namedtuple("_Constants", "K BITS GS GP BM BN PARTS EACH GROUPS DTYPE")


@triton.constexpr_function
def _mantissa(dtype):
    """Bits of the mantissa of a half precision."""
    return 10 if dtype == tl.float16 else 7


@triton.constexpr_function
def _halves(bits, dtype):
    """Parts of a code whose mantissas hold them: codes of a byte are two in bfloat16."""
    return 2 if bits > _mantissa(dtype) else 1


@triton.constexpr_function
def _above(bits, dtype):
    """What is added to a code, by all of its parts."""
    return 16 + 256 if _halves(bits, dtype) == 2 else 1 << bits


@triton.constexpr_function
def _one_bits(dtype, power):
    """Both halves of a word: the bits of 2^power."""
    one, mantissa = (15, 10) if dtype == tl.float16 else (127, 7)
    return ((one + power) << mantissa) * 0x10001


@triton.constexpr_function
def _pair_asm(bits, dtype, part):
    """PTX: $0 = two numbers 2^p + part of a code, from words whose codes stand in their lowest bits, $1."""
    width = bits // _halves(bits, dtype)
    up = _mantissa(dtype) - width
    mask, number = ((1 << width) - 1 << up) * 0x10001, _one_bits(dtype, width + 4 * part)
    return f"{{.reg .b32 t; shl.b32 t, $1, {up}; lop3.b32 $0, t, {mask:#x}, {number:#x}, 0xEA;}}"


@triton.jit
def _numbers(words, PART: tl.constexpr, C: tl.constexpr):
    """Words [BN, GS / VPW] of a group → 2^p + (part PART of a) code, [BN, GS] in dot order."""
    VPW: tl.constexpr = units(C.BITS)
    KIND: tl.constexpr = C.DTYPE
    j = tl.arange(0, VPW // 2) * C.BITS + 4 * PART
    words = tl.reshape(words.to(tl.uint32, bitcast=True), [C.BN, C.GS // (4 * VPW), 4])
    codes = words[:, :, None, :] >> j[None, None, :, None]
    if WIDENED:
        WIDTH: tl.constexpr = C.BITS // _halves(C.BITS, KIND)
        codes = tl.join(codes, codes >> 16) & ((1 << WIDTH) - 1)
        w = tl.reshape((codes.to(tl.float32) + (1 << WIDTH)) * (1 << (4 * PART)), [C.BN, C.GS]).to(KIND)
    else:
        ASM: tl.constexpr = _pair_asm(C.BITS, KIND, PART)
        pair = tl.inline_asm_elementwise(ASM, "=r,r", [codes], dtype=tl.uint32, is_pure=True, pack=1)
        low = pair.to(tl.uint16).to(KIND, bitcast=True)
        w = tl.reshape(tl.join(low, (pair >> 16).to(tl.uint16).to(KIND, bitcast=True)), [C.BN, C.GS])
    return w


@triton.jit
def _group_product(words, x, C: tl.constexpr):
    """(what is above the codes + codes) · xᵀ of a group, float32 [BN, BM]."""
    made = tl.dot(_numbers(words, 0, C), tl.trans(x), input_precision="ieee")
    if _halves(C.BITS, C.DTYPE) == 2:
        made = tl.dot(_numbers(words, 1, C), tl.trans(x), made, input_precision="ieee")
    return made


# sums      h = x, or x / sqrt(mean(x²) + eps) · norm in ordered's dtype; sums[t, g] = Σ_k h[t, k] over group g;
#           ordered[t] = h[t] in dot order
# shapes    x [T, K] in half precision, with a norm [K] of any float; ordered [T, K] in half precision; sums float32
#           [T, GP], 0 beyond the groups
# grid      (T,)
# bytes     x in, ordered and sums out
# limits    GS a multiple of 4 · VPW
#
# PDL: it does not let the next kernel start, whose programs would share the multiprocessors that are free so early.
@triton.jit
def _sums_kernel(
    x_ptr, norm_ptr, ordered_ptr, sums_ptr, eps, K: tl.constexpr, GS: tl.constexpr, GP: tl.constexpr,
    VPW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GP)
    at = g[:, None] * GS + tl.arange(0, GS)[None, :]
    live = (g < K // GS)[:, None]
    x = tl.load(x_ptr + t * K + at, mask=live, other=0.0)
    if norm_ptr is not None:
        x = x.to(tl.float32)
        x *= tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / K + eps)
        x = rounded(x * tl.load(norm_ptr + at, mask=live, other=0.0).to(tl.float32), ordered_ptr.dtype.element_ty)
    tl.store(sums_ptr + t * GP + g, tl.sum(x.to(tl.float32), axis=1))
    tl.store(ordered_ptr + t * K + at, dot_order(x, GP, GS, VPW), mask=live)


@triton.jit
def _products(a, row, m, live, begin, end, C: tl.constexpr):
    """Σ_g s[g] · (codes and what is above them) · x of the groups begin … end − 1, float32 [BN, BM].

    Scales are a step ahead: theirs are short loads, which become no asynchronous copies.
    """
    G: tl.constexpr = C.K // C.GS
    WORDS: tl.constexpr = C.GS * C.BITS // 32
    w_at = a.w[0] + row[:, None] * (G * WORDS) + tl.arange(0, WORDS)[None, :]
    x_at = a.x + m[:, None] * C.K + tl.arange(0, C.GS)[None, :]
    s_at = a.w[1] + row * G
    total = tl.zeros([C.BN, C.BM], tl.float32)
    following = ()
    for i in tl.static_range(C.GROUPS):
        following += (tl.load(s_at + begin + i),)
    for g in range(begin, end, C.GROUPS):
        words, x, scales, made = (), (), following, ()
        for i in tl.static_range(C.GROUPS):
            words += (tl.load(w_at + (g + i) * WORDS),)
        for i in tl.static_range(C.GROUPS):
            x += (tl.load(x_at + (g + i) * C.GS, mask=live, other=0.0),)
        following = ()
        for i in tl.static_range(C.GROUPS):
            following += (tl.load(s_at + tl.minimum(g + C.GROUPS + i, G - 1)),)
        for i in tl.static_range(C.GROUPS):
            made += (_group_product(words[i], x[i].to(C.DTYPE), C),)
        for i in tl.static_range(C.GROUPS):
            total += made[i] * scales[i].to(tl.float32)[:, None]
    return total


@triton.jit
def _biased(total, a, row, m, live, begin, end, C: tl.constexpr):
    """total + Σ_g (b[g] − above · s[g]) · sums[g] over the same groups."""
    G: tl.constexpr = C.K // C.GS
    BLOCK: tl.constexpr = min(32, max(16, triton.next_power_of_2(C.EACH)))
    for start in tl.static_range(0, C.EACH, BLOCK):
        g = begin + start + tl.arange(0, BLOCK)[None, :]
        at = row[:, None] * G + g
        b = tl.load(a.w[2] + at, mask=g < end, other=0.0).to(tl.float32)
        b -= tl.load(a.w[1] + at, mask=g < end, other=0.0).to(tl.float32) * _above(C.BITS, C.DTYPE)
        sums = tl.load(a.sums + m[:, None] * C.GP + g, mask=live & (g < end), other=0.0)
        total = tl.dot(b, tl.trans(sums), total, input_precision="tf32x3")
    return total


@triton.jit
def _store(a, y, m, n, live, N):
    at = m[:, None] * N + n[None, :]
    ok = live & (n < N)[None, :]
    y = tl.trans(y)
    if a.residual is not None:
        y += tl.load(a.residual + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(a.out + at, rounded(y, a.out.dtype.element_ty), mask=ok)


# exact     out[t, n] = residual[t, n] + Σ_g s[n, g] · Σ_k code[n, k] · x[t, k] + b[n, g] · Σ_k x[t, k], k over the
#           codes of group g, which has scale s and bias b
# shapes    x [T, K] in half precision, in dot order, and sums of `sums`; codes [N, K]; scales, biases [N, K / GS] of
#           any float; out, residual [T, N] of any, may be one; parts float32 [tiles, PARTS, BN, BM], a counter for each
#           tile, 0 before and after
# grid      (T tiles · N tiles · PARTS,), parts first, then T tiles: of the programs that share a tile the last one to
#           end adds up their sums, in the order of the parts
# bytes     x once for each N tile, the weight once for each T tile (both from L2 but the first), out once
# limits    K a multiple of GS, GS of four words of codes
@triton.jit(do_not_specialize=["T"])
def _exact_kernel(a, T, N, C: tl.constexpr, PDL: tl.constexpr):
    part = tl.program_id(0) % C.PARTS
    item = (tl.program_id(0) // C.PARTS).to(tl.int64)
    tiles = tl.cdiv(T, C.BM)
    m = item % tiles * C.BM + tl.arange(0, C.BM)
    n = (item // tiles).to(tl.int32) * C.BN + tl.arange(0, C.BN)
    row, live = tl.minimum(n, N - 1).to(tl.int64), (m < T)[:, None]
    begin = part * C.EACH
    end = tl.minimum(begin + C.EACH, C.K // C.GS)
    wait_for_previous(PDL)
    total = _products(a, row, m, live, begin, end, C)
    total = _biased(total, a, row, m, live, begin, end, C)
    if C.PARTS == 1:
        _store(a, total, m, n, live, N)
    else:
        own = tl.arange(0, C.BN)[:, None] * C.BM + tl.arange(0, C.BM)[None, :]
        SIZE: tl.constexpr = C.BN * C.BM
        parts = a.parts + item * (C.PARTS * SIZE) + own
        tl.store(parts + part * SIZE, total)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(a.counters + item, 1, sem="acq_rel") == C.PARTS - 1:
            tl.store(a.counters + item, 0)  # for the next launch
            total = tl.load(parts, cache_modifier=".cg")
            for i in tl.static_range(1, C.PARTS):
                total += tl.load(parts + i * SIZE, cache_modifier=".cg")
            _store(a, total, m, n, live, N)


# scores    out[t, n] = Σ_g s[n, g] · Σ_k (code[n, k] − 128) · x[t, k] + (b[n, g] + 128 · s[n, g]) · Σ_k x[t, k], k over
#           the codes of group g, which has scale s and bias b
# shapes    x [T, K] in half precision; codes uint8 [N, K]; scales, biases [N, K / GS] of any float; out float32 [T, N]
# grid      (T tiles · N tiles,), T tiles first
# bytes     x once for each N tile, the weight once for each T tile (from L2 but the first), out once
# limits    K a multiple of GS, GS one of 16
@triton.jit(do_not_specialize=["T"])
def _scores_kernel(a, T, N, K: tl.constexpr, GS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr):
    tiles = tl.cdiv(T, BM)
    m = (tl.program_id(0) % tiles).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)
    j = tl.arange(0, GS)
    s_at, b_at = a.scales + row * (K // GS), a.biases + row * (K // GS)
    total = tl.zeros([BN, BM], tl.float32)
    s, b = tl.load(s_at), tl.load(b_at)
    for g in range(K // GS):
        codes = tl.load(a.codes + row[:, None] * K + g * GS + j[None, :])
        x = tl.load(a.x + m[:, None] * K + g * GS + j[None, :], mask=(m < T)[:, None], other=0.0)
        scale, bias = s.to(tl.float32)[:, None], b.to(tl.float32)[:, None]
        following = tl.minimum(g + 1, K // GS - 1)  # its scales are on their way while this group is multiplied
        s, b = tl.load(s_at + following), tl.load(b_at + following)
        w = ((codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - _SHIFT).to(DTYPE)
        part = tl.dot(w, tl.trans(x.to(DTYPE)))
        total += part * scale + tl.sum(x.to(tl.float32), axis=1)[None, :] * (bias + scale * 128.0)
    at = a.out + m[:, None] * N + n[None, :]
    tl.store(at, tl.trans(total), mask=(m < T)[:, None] & (n < N)[None, :])


# -- launches --------------------------------------------------------------------------------------------------------


class _Launch(NamedTuple):
    """Rows of x and of the weight in a tile, programs that share K, groups of each, at a time; warps and stages."""

    BM: int
    BN: int
    parts: int
    each: int
    groups: int
    warps: int
    stages: int


@functools.cache
def _launch(T: int, N: int, groups: int, processors: int) -> _Launch:
    """The launch for a weight of so many groups in a row: K is shared where tiles alone are too tile."""
    tile = next(tile for tile in EXACT_TILES if tile.tokens >= T and tile.rows * processors <= N)
    tiles = -(-T // tile.BM) * -(-N // tile.BN)
    together = tile.groups if groups % tile.groups == 0 else 1
    parts = 1
    while tiles * parts * 2 <= EXACT_PROGRAMS * processors and groups >= parts * 4 * together:
        parts *= 2
    each = triton.cdiv(groups, parts * together) * together
    return _Launch(tile.BM, tile.BN, triton.cdiv(groups, each), each, together, tile.warps, tile.stages)


def takes_codes(x: torch.Tensor, w: Any) -> bool:
    """Whether codes of w are such that this multiplies them with x."""
    if not isinstance(w, QuantizedTensor) or w.mode != "affine" or w.bits not in (2, 4, 8) or x.dtype is torch.float32:
        return False
    return w.group_size % (4 * units(w.bits)) == 0 and all(part.data_ptr() % 16 == 0 for part in w.arrays)


def takes_exactly(x: torch.Tensor, w: Any, out: torch.Tensor, exact: bool) -> bool:
    """Whether a product goes this way; exact: weights may not be rounded."""
    T, N = out.shape
    if exact and SCORES[1] >= N:
        return _scores(x, w, out)
    fewest, most, rows = (EXACT_FEWEST, T, 0) if exact else EXACT_ROUNDED
    return fewest <= T <= most and rows <= N and takes_codes(x, w)


def _scores(x: torch.Tensor, w: Any, out: torch.Tensor) -> bool:
    """Whether these are the scores of a router: many rows, few rows of codes in bytes."""
    return (
        takes_codes(x, w)
        and w.bits == 8
        and len(x) >= SCORES[0]
        and w.shape[0] <= SCORES[1]
        and out.dtype is torch.float32
    )


def exact_product(
    x: torch.Tensor, w: QuantizedTensor, out: torch.Tensor, residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None, eps: float = 0.0, normed: torch.dtype | None = None,
) -> None:  # fmt: skip
    """out [T, N] = residual + x [T, K] · wᵀ; out may be residual. norm [K]: x is normed first, rounded to `normed`."""
    assert x.is_contiguous() and out.is_contiguous() and all(part.is_contiguous() for part in w.arrays)
    (T, K), N = x.shape, w.shape[0]
    if residual is None and norm is None and _scores(x, w, out):
        *_, BM, BN, warps, stages = SCORES
        a = _Scores(x, w.packed.view(torch.uint8), w.scales, w.biases, out)
        _scores_kernel[(triton.cdiv(T, BM) * triton.cdiv(N, BN),)](
            a, T, N, K, w.group_size, BM, BN, TL_DTYPES[dot_dtype(x, x, x)], num_warps=warps, num_stages=stages
        )
        return
    G = K // w.group_size
    BM, BN, parts, each, groups, warps, stages = _launch(T, N, G, multiprocessors(x))
    tiles = triton.cdiv(T, BM) * triton.cdiv(N, BN)
    shared = counters(out, tiles) if parts > 1 else None
    if shared is None:
        parts, each = 1, G
    kept = None if parts == 1 else torch.empty(tiles * parts * BN * BM, dtype=torch.float32, device=x.device)
    GP = triton.next_power_of_2(G)
    ordered = torch.empty_like(x, dtype=x.dtype if norm is None else normed)
    sums = torch.empty(T, GP, dtype=torch.float32, device=x.device)
    _sums_kernel[(T,)](x, norm, ordered, sums, eps, K, w.group_size, GP, units(w.bits), **pdl_options())
    kind = TL_DTYPES[dot_dtype(ordered, ordered, ordered)]
    C = _Constants(K, w.bits, w.group_size, GP, BM, BN, parts, each, groups, kind)
    a = _Arrays(ordered, sums, w.arrays, residual, out, kept, shared)
    _exact_kernel[(tiles * parts,)](a, T, N, C=compiled_for(C), num_warps=warps, num_stages=stages, **pdl_options())
