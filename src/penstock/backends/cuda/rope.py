"""CUDA kernels of rotary position embedding. Its tables are made once per model on the host."""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._launch import pdl_options, wait_for_previous
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import ROPE_NUMBERS, ROPE_WARPS
from penstock.errors import BackendError
from penstock.ops.op import kernel

_WIDEST = 16384


class _Tile(NamedTuple):
    """A program's share: heads, tokens, columns of a piece of a head, pieces that pass through; and warps."""

    HEADS: int
    TOKENS: int
    HALF: int
    REST: int
    warps: int


def pieces_of(op: str, width: int, half: int) -> tuple[int, int]:
    """Columns of a piece of a head, and pieces beside the two that hold the pairs."""
    if width > _WIDEST:
        raise BackendError(f"{op}: x has heads of {width}, expected at most {_WIDEST} on cuda")
    piece = max(triton.next_power_of_2(half), triton.next_power_of_2(width) // 8)
    return piece, triton.cdiv(width - 2 * half, piece)


@functools.cache
def _tile(op: str, heads: int, width: int, half: int) -> _Tile:
    """The share of a program: by the sizes of a token alone, so that a row's bits do not depend on the others."""
    piece, rest = pieces_of(op, width, half)
    block = triton.next_power_of_2(width)
    some = max(1, min(triton.next_power_of_2(heads), ROPE_NUMBERS // block))
    return _Tile(some, max(1, ROPE_NUMBERS // (block * some)), piece, rest, ROPE_WARPS)


@triton.jit
def sincos(angle):
    """sin and cos of a float32 angle up to 2³¹ in size, good to 1e-7.

    The angle is reduced to ±π/4 in float64, where a product with 2/π added to 1.5 · 2⁵² leaves the nearest integer in
    the last bits. tl.sin and tl.cos have a second way for angles above 10⁵, through memory: a kernel with them has more
    than twice the instructions.
    """
    wide = angle.to(tl.float64)
    shifted = wide * 0.6366197723675814 + 6755399441055744.0
    quarter = shifted.to(tl.int64, bitcast=True).to(tl.int32)
    r = (wide - (shifted - 6755399441055744.0) * 1.5707963267948966).to(tl.float32)
    z = r * r
    sine = r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    cosine = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    odd = (quarter & 1) != 0
    s = tl.where(odd, cosine, sine)
    c = tl.where(odd, sine, cosine)
    return tl.where((quarter & 2) != 0, -s, s), tl.where(((quarter + 1) & 2) != 0, -c, c)


# rope      (a, b) → (a·c − b·s, a·s + b·c), c, s = mscale · cos, sin(float32(p) · inv_freq[i]) of pair i; with NORM the
#           head is n(head, w) first. Pairs are (i, i + half), INTERLEAVED (2i, 2i + 1); other channels pass through
# shapes    x, y [T, H, D]; inv_freq float32 [half]; w [D] or None; p = positions[t] (EACH), positions + t (one number
#           on the device), or start + t where positions is None. Rows of a negative position become 0
# grid      (ceil(T / TOKENS), ceil(H / HEADS)): HEADS heads of TOKENS tokens, which share their cos and sin. A head is
#           cut in pieces of HALF columns, first and second of the pairs and REST more, so that all have one layout
# bytes     2 · itemsize · T · H · D, without what passes through where y is x and nothing is normed (REST 0)
# limits    D ≤ 16384; HALF ≥ half, a power of two; y may be x
@triton.jit(do_not_specialize=["T", "start"])
def _rope_kernel(
    x_ptr,
    inv_freq_ptr,
    positions_ptr,
    w_ptr,
    y_ptr,
    T,
    H,
    D,
    half,
    start,
    mscale,
    eps,
    EACH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    kind: tl.constexpr = y_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    owned = (h < H)[:, None, None] & (t < T)[None, :, None]
    row = (t[None, :, None] * H + h[:, None, None]) * D
    if INTERLEAVED:
        j = tl.arange(0, 2 * HALF)
        live = owned & (j < 2 * half)[None, None, :]
        x = tl.load(x_ptr + row + j[None, None, :], mask=live, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (HEADS, TOKENS, HALF, 2)))
    else:
        live = owned & (i < half)[None, None, :]
        at = row + i[None, None, :]
        a = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + at + half, mask=live, other=0.0).to(tl.float32)
    rest = ()
    for r in tl.static_range(REST):
        k = 2 * half + r * HALF + i
        piece = tl.load(x_ptr + row + k[None, None, :], mask=owned & (k < D)[None, None, :], other=0.0)
        rest = rest + (piece,)  # noqa: RUF005 (Triton has no starred tuples)

    inv_freq = tl.load(inv_freq_ptr + i, mask=i < half, other=0.0)
    if EACH:
        p = tl.load(positions_ptr + t, mask=t < T, other=0)
        known = p >= 0
    else:
        begin = start if positions_ptr is None else tl.load(positions_ptr)
        p = (begin + t).to(tl.int32)
        known = (t >= 0) & (begin >= 0)
    known = known[None, :, None]
    if NORM:
        squares = a * a + b * b
        for r in tl.static_range(REST):
            squares += rest[r].to(tl.float32) * rest[r].to(tl.float32)
        factor = tl.rsqrt(tl.sum(squares, axis=2, keep_dims=True) / D + eps)
        a *= factor
        b *= factor
        if w_ptr is not None:
            step: tl.constexpr = 2 if INTERLEAVED else 1
            apart = 1 if INTERLEAVED else half
            a *= tl.load(w_ptr + i * step, mask=i < half, other=0.0).to(tl.float32)[None, None, :]
            b *= tl.load(w_ptr + i * step + apart, mask=i < half, other=0.0).to(tl.float32)[None, None, :]
    sine, cosine = sincos(p.to(tl.float32)[:, None] * inv_freq[None, :])
    c, s = (cosine * mscale)[None, :, :], (sine * mscale)[None, :, :]
    first = tl.where(known, a * c - b * s, 0.0)
    second = tl.where(known, a * s + b * c, 0.0)
    if INTERLEAVED:
        y = tl.reshape(tl.join(first, second), (HEADS, TOKENS, 2 * HALF))
        tl.store(y_ptr + row + j[None, None, :], rounded(y, kind), mask=live)
    else:
        tl.store(y_ptr + at, rounded(first, kind), mask=live)
        tl.store(y_ptr + at + half, rounded(second, kind), mask=live)
    for r in tl.static_range(REST):
        k = 2 * half + r * HALF + i
        y = rest[r].to(tl.float32)
        if NORM:
            y *= factor
            if w_ptr is not None:
                y *= tl.load(w_ptr + k, mask=k < D, other=0.0).to(tl.float32)[None, None, :]
        y = rounded(tl.where(known, y, 0.0), kind)
        tl.store(y_ptr + row + k[None, None, :], y, mask=owned & (k < D)[None, None, :])


def _rope(
    op: str,
    x: torch.Tensor,
    inv_freq: torch.Tensor,
    at: Any,
    mscale: float,
    interleaved: bool,
    out: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> None:
    if x.numel() == 0:
        return
    T = x.shape[0] if x.ndim == 3 else 1
    H, D = x.shape[-2:]
    half = inv_freq.shape[0]
    # in place and without a norm there is nothing to do for channels that pass through
    width = 2 * half if eps is None and x.data_ptr() == out.data_ptr() else D
    share = _tile(op, H, width, half)
    given = isinstance(at, torch.Tensor)
    _rope_kernel[(triton.cdiv(T, share.TOKENS), triton.cdiv(H, share.HEADS))](
        x,
        inv_freq,
        at if given else None,
        weight,
        out,
        T,
        H,
        D,
        half,
        0 if given else at,
        mscale,
        eps or 0.0,
        EACH=given and at.ndim == 1,
        INTERLEAVED=interleaved,
        NORM=eps is not None,
        HEADS=share.HEADS,
        TOKENS=share.TOKENS,
        HALF=share.HALF,
        REST=share.REST,
        num_warps=share.warps,
        **pdl_options(),
    )


@kernel(ops.rope, device="cuda")
def rope(x, inv_freq, start_pos, rotary_dim, mscale, interleaved, positions, *, out):
    _rope("rope", x, inv_freq, start_pos if positions is None else positions, mscale, interleaved, out)


@kernel(ops.head_norm_rope, device="cuda")
def head_norm_rope(x, weight, inv_freq, start_pos, eps, rotary_dim, mscale, interleaved, *, out):
    _rope("head_norm_rope", x, inv_freq, start_pos, mscale, interleaved, out, weight, eps)


# scale     y[t] = x[t] · (1 + beta · ln(1 + floor(positions[t] / length))); rows of a negative position as they are
# shapes    x, y [T, width]; positions int32 [T]
# grid      (T, ceil(width / BLOCK)): BLOCK columns of a row
# bytes     2 · itemsize · T · width
# limits    width ≤ 65535 · BLOCK; y may be x
@triton.jit(do_not_specialize=["length"])
def _position_scale_kernel(x_ptr, positions_ptr, y_ptr, width, beta, length, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.maximum(tl.load(positions_ptr + row), 0)
    factor = 1.0 + beta * tl.log(1.0 + (at // length).to(tl.float32))
    x = tl.load(x_ptr + row * width + col, mask=col < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + col, rounded(x * factor, y_ptr.dtype.element_ty), mask=col < width)


@kernel(ops.position_scale, device="cuda")
def position_scale(x, positions, beta, length, *, out):
    if x.numel():
        width = x.numel() // len(x)
        block = min(1024, triton.next_power_of_2(width))
        grid = (len(x), triton.cdiv(width, block))
        _position_scale_kernel[grid](
            x, positions, out, width, float(beta), int(length), BLOCK=block, num_warps=4, **pdl_options()
        )
