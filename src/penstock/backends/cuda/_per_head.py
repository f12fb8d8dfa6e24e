"""Products of each head with its own rows of a weight, whole or in heads, dense or quantized, for latent attention."""

import functools
import weakref
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from penstock.backends.cuda._attend_tile import dot
from penstock.backends.cuda._blocks import block_tile, is_blocks
from penstock.backends.cuda._codes import is_stream
from penstock.backends.cuda._floats import groups_of, is_float, kernel_arrays, kind_of
from penstock.backends.cuda._floats import width as bits_of
from penstock.backends.cuda._gemm import dense_copy, in_full
from penstock.backends.cuda._launch import pdl_options, wait_for_previous
from penstock.backends.cuda._matvec import batched_matvec
from penstock.backends.cuda._quant import code_at, dequantized, float_weights
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import PER_HEAD_COPY
from penstock.ops.op import deterministic
from penstock.quant import GgufTensor, QuantizedTensor


@triton.jit
def _weights(
    w_ptr,
    scales_ptr,
    biases_ptr,
    row,
    row_ok,
    start,
    width,
    dtype: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    GS: tl.constexpr,
):
    """Elements start … start + COLUMNS − 1 of rows of `width`, dense (BITS = 0) or dequantized; 0 where masked."""
    column = start + tl.arange(0, COLUMNS)
    ok = row_ok[:, None] & (column < width)[None, :]
    if BITS == 0:
        w = tl.load(w_ptr + row[:, None] * width + column[None, :], mask=ok, other=0.0)
        w = rounded(w.to(tl.float32), dtype)
    elif is_blocks(BITS):
        w = rounded(block_tile(w_ptr, row.to(tl.int64), row_ok, start, width, row.shape[0], COLUMNS, BITS), dtype)
    elif is_float(BITS):
        code = code_at(w_ptr + row[:, None] * (width * bits_of(BITS) // 32), column[None, :], ok, BITS)
        group = row[:, None] * (width // GS) + (column // GS)[None, :]
        w = float_weights(code, tl.load(scales_ptr + group, mask=ok, other=0), None, BITS, dtype)
    elif BITS == 2 or BITS == 4 or BITS == 8:  # scale and bias once for each word
        PER: tl.constexpr = 32 // BITS
        word = start // PER + tl.arange(0, COLUMNS // PER)
        ok = row_ok[:, None] & (word < width // PER)[None, :]
        words = tl.load(w_ptr + row[:, None] * (width // PER) + word[None, :], mask=ok, other=0)
        group = row[:, None] * (width // GS) + (word // (GS // PER))[None, :]
        scale = tl.load(scales_ptr + group, mask=ok, other=0.0).to(tl.float32)
        bias = tl.load(biases_ptr + group, mask=ok, other=0.0).to(tl.float32)
        # 2²³ + code is a float whose last bits are the code's
        shift = (tl.arange(0, PER) * BITS)[None, None, :]
        code = ((words[:, :, None] >> shift) & ((1 << BITS) - 1)) | 0x4B000000
        w = (code.to(tl.float32, bitcast=True) - 8388608.0) * scale[:, :, None] + bias[:, :, None]
        w = rounded(w, dtype).reshape(row.shape[0], COLUMNS)
    else:
        code = code_at(w_ptr + row[:, None] * (width * BITS // 32), column[None, :], ok, BITS)
        group = row[:, None] * (width // GS) + (column // GS)[None, :]
        scale = tl.load(scales_ptr + group, mask=ok, other=0.0)
        bias = tl.load(biases_ptr + group, mask=ok, other=0.0)
        w = rounded(dequantized(code, scale, bias, tl.float32), dtype)
    return w


# per_head  y[t, h, n] = Σ_k x[t, h, k] · w[h · P + first + n, k], or with TURNED · w[h · P + first + k, n]; with a
#           count, which is on the device, for t < count[0] alone
# shapes    x [T, H, K] (SHARED: [T, K], the same for all heads), y [T, H, N]; w rows of `width` numbers or packed
#           words, with scales and biases [rows, width / GS]
# grid      (tiles of T · tiles of N · H,): MT tokens × BN outputs of one head, K in steps of BK
# bytes     weights once per tile of tokens, x once per tile of outputs; bound by bandwidth up to about 64 tokens
# limits    none; BITS = 0 stands for dense weights of any dtype
@triton.jit(do_not_specialize=["T"])
def _per_head_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    biases_ptr,
    y_ptr,
    count_ptr,
    T,
    H,
    K,
    N,
    P,
    first,
    width,
    BITS: tl.constexpr,
    GS: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    MT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles = tl.cdiv(T, MT)
    t = (pid % tiles).to(tl.int64) * MT + tl.arange(0, MT)
    pid = pid // tiles
    columns = tl.cdiv(N, BN)
    n0 = (pid % columns) * BN
    head = (pid // columns).to(tl.int64)
    n = n0 + tl.arange(0, BN)
    x_row = t if SHARED else t * H + head
    wait_for_previous(PDL)
    if count_ptr is not None:
        T = tl.minimum(T, tl.load(count_ptr))
        if tl.min(t, axis=0) >= T:
            return
    acc = tl.zeros([MT, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x_ok = (t < T)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + x_row[:, None] * K + k[None, :], mask=x_ok, other=0.0)
        row = head * P + first
        if TURNED:
            w = _weights(w_ptr, scales_ptr, biases_ptr, row + k, k < K, n0, width, x.dtype, BN, BITS, GS)
        else:
            w = tl.trans(_weights(w_ptr, scales_ptr, biases_ptr, row + n, n < N, k0, width, x.dtype, BK, BITS, GS))
        acc = dot(x, w, acc)
    y_ok = (t < T)[:, None] & (n < N)[None, :]
    tl.store(y_ptr + (t * H + head)[:, None] * N + n[None, :], rounded(acc, y_ptr.dtype.element_ty), mask=y_ok)


# turned    y[t, h, n] = Σ_k x[t, h, k] · w[h · P + k, n] for a few tokens, codes of 4 bits
# shapes    x [T, H, K], y [T, H, N], half precision; w [H · P, N], P ≥ K, in groups of GS
# grid      (H · N / 64,): 64 outputs of a head for one warp, L of K in each of its lanes
# bytes     the rows that are used, once
# limits    T ≤ 4, GS a multiple of 64, K ≤ 4 · L
#
# Tensor cores take 16 outputs × 16 of K of the codes at a time, where a lane has pairs along K of 2 outputs. A word is
# 8 outputs of one of K, so a lane makes pairs of two words and has 8 outputs: no code changes lanes (the order of the
# axes says which lane has what: see `_codes`). 16 + code is a bfloat16 with the code in its mantissa. x · scale, the
# other operand, comes as two bfloat16 for each token: of bfloat16 numbers exactly.
@triton.jit(do_not_specialize=["T", "magic"])
def _turned_kernel(
    x_ptr, w_ptr, scales_ptr, biases_ptr, y_ptr, magic, T, H, K, N, P,
    GS: tl.constexpr, L: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    head = (tl.program_id(0) // (N // 64)).to(tl.int64)
    block = tl.program_id(0) % (N // 64)
    quarter = tl.arange(0, 4)[:, None, None]
    eighth = tl.arange(0, 8)[None, :, None]
    k = quarter * L + tl.arange(0, L)[None, None, :]
    w_ptr += head * P * (N // 8) + block * 8
    words = tl.load(w_ptr + k * (N // 8) + eighth, mask=k < K, other=0)  # [4, 8, L]

    token = eighth // 2
    ok = (k < K) & (token < T)
    x = tl.load(x_ptr + head * K + token * (H * K) + k, mask=ok, other=0.0).to(tl.float32)
    group = head * P * (N // GS) + block * 64 // GS
    scale = tl.load(scales_ptr + group + k * (N // GS), mask=ok, other=0.0).to(tl.float32)
    bias = tl.load(biases_ptr + group + k * (N // GS), mask=ok, other=0.0).to(tl.float32)
    product = x * scale
    first = rounded(product, tl.bfloat16)
    second = rounded(product - first.to(tl.float32), tl.bfloat16)
    b = tl.where(eighth % 2 == 0, first, second)
    # What 16 + code has too much goes away with the biases, once for each token.
    rest = tl.where(eighth % 2 == 0, bias * x, 0.0) - 16.0 * b.to(tl.float32)
    offset = tl.sum(tl.sum(rest, axis=2), axis=0)  # [8]
    b = b.reshape(4, 8, L // 4, 4).permute(2, 0, 3, 1).reshape(4 * L, 8)

    even, odd = tl.split(words.reshape(4, 8, L // 2, 2))
    low, high = (even & 0xFFFF) | (odd << 16), ((even >> 16) & 0xFFFF) | (odd & -65536)
    halves = tl.join(low, high).permute(3, 1, 0, 2).reshape(2, 1, 8, 4, L // 2)
    shift = (4 * tl.arange(0, 4) - 3)[None, :, None, None, None]
    pair = tl.where(shift < 0, halves << 3, halves >> tl.maximum(shift, 0)) & 0x780078 | magic
    pair = pair.reshape(64, 4, L // 2)  # output 8 · lane + code at 8 · code + lane
    a = tl.join((pair & 0xFFFF).to(tl.int16), (pair >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    a = a.reshape(64, 4, L // 4, 4).permute(0, 2, 1, 3).reshape(64, 4 * L)
    y = dot(a, b, tl.zeros((64, 8), tl.float32)) + offset[None, :]
    y = tl.sum(y.reshape(64, 4, 2), axis=2)
    i = tl.arange(0, 64)[:, None]
    n = block * 64 + i % 8 * 8 + i // 8
    t = tl.arange(0, 4)[None, :]
    tl.store(y_ptr + (t * H + head) * N + n, rounded(y, y_ptr.dtype.element_ty), mask=t < T)


_FP_MAGIC = 0x41804180  # two bfloat16 numbers 16


def _turns(x: torch.Tensor, w: Any, N: int) -> bool:
    """Whether `turned` takes this product."""
    fits = isinstance(w, QuantizedTensor) and kind_of(w) == 4 and w.group_size % 64 == 0 and N % 64 == 0
    return fits and len(x) <= 4 and x.dtype is not torch.float32 and x.shape[-1] <= 256


@functools.cache
def _few_tile(K: int, turned: bool) -> tuple[int, int, int, int]:
    """Tokens, outputs, steps of K and warps of a program for up to 16 tokens."""
    return 16, 64 if turned else 32, max(16, min(128, triton.next_power_of_2(K))), 4


def per_head(
    x, w, y, rows_per_head: int, first: int, turned: bool, count: torch.Tensor | None = None
) -> None:  # fmt: skip
    """y [T, H, N] of x [T, H, K] (or [T, K], the same for all heads) and the weight rows of each head from `first` on.

    turned: they are K rows of N numbers, not N rows of K. count: int32 [1], of so many tokens alone.
    """
    T, H, N = y.shape
    K, shared, quantized = x.shape[-1], x.ndim == 2, isinstance(w, QuantizedTensor)
    if count is None and not deterministic():
        if copies(x, w) or (not quantized and T >= 32 and w.dtype is x.dtype and in_full(x)):
            _batched(x, dense_copy(w, x.dtype) if quantized else w, y, rows_per_head, first, turned)
            return
        if T <= 8 and not (shared or turned):
            part = w if w.ndim == 3 else _rows_of_heads(w, H, first) if quantized else None
            if part is not None:
                batched_matvec(x, part, y)
                return
        if turned and not shared and _turns(x, w, N):
            L = max(4, triton.next_power_of_2(triton.cdiv(K, 4)))
            _turned_kernel[(H * (N // 64),)](
                x, *w.arrays, y, _FP_MAGIC, T, H, K, N, rows_per_head, GS=w.group_size, L=L, num_warps=1,
                **pdl_options(),
            )  # fmt: skip
            return
    arrays, bits, group = (kernel_arrays(w), kind_of(w), groups_of(w)) if quantized else ((w, w, w), 0, 1)
    if isinstance(w, GgufTensor):
        arrays = (arrays, None, None)
    few = T <= 16 and not deterministic()
    exact = x.dtype is torch.float32
    MT, BN, BK, warps = (16, 32, 32, 4) if exact else _few_tile(K, turned) if few else (128, 128, 64, 8)
    # Words and scales are loaded once for each code of 3, 5 or 6 bits or of floats: three stages take 131 to 320 KB.
    stages = 1 if is_stream(bits) or is_float(bits) else 3
    grid = (triton.cdiv(T, MT) * triton.cdiv(N, BN) * H,)
    _per_head_kernel[grid](
        x, *arrays, y, count, T, H, K, N, rows_per_head, first, w.shape[-1],
        BITS=bits, GS=group, SHARED=shared, TURNED=turned, MT=MT, BN=BN, BK=BK, num_warps=warps, num_stages=stages,
        **pdl_options(),
    )  # fmt: skip


_Parts: TypeAlias = dict[tuple[int, int], QuantizedTensor]
_parts: weakref.WeakKeyDictionary[QuantizedTensor, _Parts] = weakref.WeakKeyDictionary()


def _rows_of_heads(w: QuantizedTensor, H: int, first: int) -> QuantizedTensor:
    """w [H · P, K] as [·, P, K] that starts at row `first`: head h is there at h, the last one without its end."""
    known = _parts.setdefault(w, {})
    found = known.get((H, first))
    if found is None:
        P = w.shape[0] // H
        heads, rows = (1, P - first) if H == 1 else (H - 1, P)
        cut = (array[first : first + heads * rows].view(heads, rows, -1) for array in w.parts)
        found = known[H, first] = w.with_arrays(*cut)
    return found


def copies(x: torch.Tensor, w: Any) -> bool:
    """Whether w is made dense for cuBLAS."""
    return isinstance(w, QuantizedTensor) and len(x) >= PER_HEAD_COPY and in_full(x) and not deterministic()


def _batched(x, w, y, rows_per_head: int, first: int, turned: bool) -> None:
    """`per_head` of a dense weight by cuBLAS, one product per head in one launch."""
    _, H, N = y.shape
    w = w.view(H, rows_per_head, -1)[:, first : first + (x.shape[-1] if turned else N)]
    x = x.expand(H, *x.shape) if x.ndim == 2 else x.transpose(0, 1)
    torch.bmm(x, w if turned else w.transpose(1, 2), out=y.transpose(0, 1))
