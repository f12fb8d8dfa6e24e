"""All between the projections of an attention layer and its attention, in one launch: heads, or latents (MLA)."""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._launch import pdl_options
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import PREPARE_NUMBERS, PREPARE_ONE
from penstock.backends.cuda.rope import pieces_of, sincos
from penstock.ops.op import deterministic


@triton.jit
def _columns(r: tl.constexpr, half, D, HALF: tl.constexpr):
    """Columns of piece r of a head and which of them are there: first and second of the pairs, then what is left."""
    i = tl.arange(0, HALF)[None, :]
    if r < 2:
        column, there = r * half + i, i < half
    else:
        column = 2 * half + (r - 2) * HALF + i
        there = column < D
    return column, there


@triton.jit
def _load_head(rows, live, half, D, HALF: tl.constexpr, PIECES: tl.constexpr):
    """The heads that start at `rows` [TOKENS, 1], as PIECES float32 [TOKENS, HALF]."""
    head = ()
    for r in tl.static_range(PIECES):
        column, there = _columns(r, half, D, HALF)
        head = head + (tl.load(rows + column, mask=live & there, other=0.0).to(tl.float32),)  # noqa: RUF005
    return head


@triton.jit
def _store_head(rows, head, live, half, D, HALF: tl.constexpr, PIECES: tl.constexpr):
    for r in tl.static_range(PIECES):
        column, there = _columns(r, half, D, HALF)
        tl.store(rows + column, rounded(head[r], rows.dtype.element_ty), mask=live & there)


@triton.jit
def _normed(head, w_ptr, half, D, eps, HALF: tl.constexpr, PIECES: tl.constexpr):
    squares = head[0] * head[0]
    for r in tl.static_range(1, PIECES):
        squares += head[r] * head[r]
    factor = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / D + eps)
    y = ()
    for r in tl.static_range(PIECES):
        piece = head[r] * factor
        if w_ptr is not None:
            column, there = _columns(r, half, D, HALF)
            piece *= tl.load(w_ptr + column, mask=there, other=0.0).to(tl.float32)
        y = y + (piece,)  # noqa: RUF005
    return y


@triton.jit
def _turned(head, c, s, PIECES: tl.constexpr):
    y = (head[0] * c - head[1] * s, head[0] * s + head[1] * c)
    for r in tl.static_range(2, PIECES):
        y = y + (head[r],)  # noqa: RUF005
    return y


@triton.jit
def _position(positions_ptr, start, t, live, EACH: tl.constexpr):
    """Positions of tokens t, int32: positions[t] if EACH, else start or positions[0], and t; negative: nowhere."""
    if EACH:
        p = tl.load(positions_ptr + t, mask=live, other=-1)
    else:
        begin = start if positions_ptr is None else tl.load(positions_ptr)
        p = tl.where(begin >= 0, begin + t, -1).to(tl.int32)
    return p


@triton.jit
def _row_in_pages(table_ptr, t, p, live, page, pages, entries, EACH: tl.constexpr):
    """The row of position p in the pages of token t's sequence, and whether it is there."""
    live &= (p >= 0) & (p // page < entries)
    held = tl.load(table_ptr + (t * entries if EACH else 0) + p // page, mask=live, other=-1).to(tl.int64)
    return held * page + p % page, live & (held >= 0) & (held < pages)


# prepare   q_out[t, h] = rope(n(q[t, h], q_w)), gate[t, h] behind it in q if there is one; row p of the pages likewise
#           rope(n(k[t, h], k_w)), and v[t, h] or k[t, h], with NORM_VALUES n(v[t, h], 1). Without weights no norm
# shapes    q [T, H, D or 2D], q_out, gate [T, H, D], k, v [T, heads, D], pages [pages * page, heads, D];
#           inv_freq [half]; p = positions[t] if EACH, else start + t (start: positions[0] where it is on the device);
#           table int32, `entries` for each sequence. A row of a negative p gives 0; rows outside of the pages are not
#           written
# grid      (ceil(T / TOKENS), H + heads): TOKENS rows of a head of q, or of k and v
# bytes     q, k and v in, the same out
# limits    D <= 16384; a head is cut in PIECES of HALF columns as in `rope`
@triton.jit(do_not_specialize=["T", "start"])
def _prepare_kernel(
    q_ptr, k_ptr, v_ptr, q_w_ptr, k_w_ptr, inv_freq_ptr, positions_ptr, table_ptr, q_out_ptr, gate_ptr, k_pages_ptr,
    v_pages_ptr, T, start, H, heads, D, half, page, pages, entries, mscale, eps,
    EACH: tl.constexpr, NORM_VALUES: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr, PIECES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    h = tl.program_id(1)
    live = t < T
    p = _position(positions_ptr, start, t, live, EACH)
    i = tl.arange(0, HALF)[None, :]
    inv_freq = tl.load(inv_freq_ptr + i, mask=i < half, other=0.0)
    if h < H:
        wide = D if gate_ptr is None else 2 * D
        rows = q_ptr + (t * H + h) * wide
        head = _load_head(rows, live, half, D, HALF, PIECES)
        if gate_ptr is not None:
            gate = _load_head(rows + D, live, half, D, HALF, PIECES)
            _store_head(gate_ptr + (t * H + h) * D, gate, live, half, D, HALF, PIECES)
        sine, cosine = sincos(p.to(tl.float32) * inv_freq)
        if q_w_ptr is not None:
            head = _normed(head, q_w_ptr, half, D, eps, HALF, PIECES)
        head = _turned(head, cosine * mscale, sine * mscale, PIECES)
        y = ()
        for r in tl.static_range(PIECES):
            y = y + (tl.where(p >= 0, head[r], 0.0),)  # noqa: RUF005
        _store_head(q_out_ptr + (t * H + h) * D, y, live, half, D, HALF, PIECES)
    else:
        h -= H
        place = (t * heads + h) * D
        head = _load_head(k_ptr + place, live, half, D, HALF, PIECES)
        if v_ptr is None:
            value = head
        else:
            value = _load_head(v_ptr + place, live, half, D, HALF, PIECES)
        row, live = _row_in_pages(table_ptr, t, p, live, page, pages, entries, EACH)
        place = (row * heads + h) * D
        if NORM_VALUES:
            value = _normed(value, None, half, D, eps, HALF, PIECES)
        _store_head(v_pages_ptr + place, value, live, half, D, HALF, PIECES)
        sine, cosine = sincos(p.to(tl.float32) * inv_freq)
        if k_w_ptr is not None:
            head = _normed(head, k_w_ptr, half, D, eps, HALF, PIECES)
        head = _turned(head, cosine * mscale, sine * mscale, PIECES)
        _store_head(k_pages_ptr + place, head, live, half, D, HALF, PIECES)


@functools.cache
def _tile(D: int, half: int, few: bool) -> dict[str, int]:
    """A program's share: tokens, columns of a piece and pieces; and warps."""
    piece, rest = pieces_of("attention_prepare", D, half)
    block = triton.next_power_of_2(D)
    tokens = 1 if few else max(1, PREPARE_NUMBERS // block)
    return {"TOKENS": tokens, "HALF": piece, "PIECES": 2 + rest, "num_warps": max(1, min(8, tokens * block // 512))}


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    inv_freq: torch.Tensor,
    positions: torch.Tensor | int,
    pages: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    mscale: float,
    eps: float,
    norm_values: bool,
    out: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """One launch of `prepare`; a row's bits do not depend on the others as long as `deterministic` asks for that."""
    T, H, D = out[0].shape
    half, heads = inv_freq.shape[0], k.shape[1] // D
    given = isinstance(positions, torch.Tensor)
    tile = _tile(D, half, T <= PREPARE_ONE and not deterministic())
    _prepare_kernel[(triton.cdiv(T, tile["TOKENS"]), H + heads)](
        q, k, v, *norms, inv_freq, positions if given else None, block_table, *out, *pages,
        T, 0 if given else positions, H, heads, D, half, pages[0].shape[1], pages[0].shape[0], block_table.shape[-1],
        mscale, eps, EACH=given and positions.ndim == 1, NORM_VALUES=norm_values, **tile, **pdl_options(),
    )  # fmt: skip


# mla_prepare  q_nope[t, h] and q_pe[t, h] = rope of the two parts of q[t, h]; row p of the pages: n(kv[t, :R], w), and
#              rope of the end of kv[t]
# shapes    q [T, H, nope + 2 half], kv [T, R + 2 half], q_nope [T, H, nope], q_pe [T, H, 2 half]; w [R]; inv_freq
#           [half]; latent pages [pages * page, R], rope pages [pages * page, 2 half]; positions, table as in `prepare`
# grid      (T, ceil(H / HEADS) + 1): HEADS heads of a token; the last program has its latent
# bytes     q and kv in, the same out
# limits    NOPE, HALF, RANK: powers of two that hold nope, half and R
@triton.jit(do_not_specialize=["start"])
def _mla_prepare_kernel(
    q_ptr, kv_ptr, w_ptr, inv_freq_ptr, positions_ptr, table_ptr, q_nope_ptr, q_pe_ptr, latent_ptr, rope_ptr,
    start, H, nope, half, R, page, pages, entries, mscale, eps,
    EACH: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    part = tl.program_id(1)
    live = t >= 0
    p = _position(positions_ptr, start, t, live, EACH)
    i = tl.arange(0, HALF)[None, :]
    inv_freq = tl.load(inv_freq_ptr + i, mask=i < half, other=0.0)
    if part < tl.cdiv(H, HEADS):
        h = part * HEADS + tl.arange(0, HEADS)[:, None]
        head = q_ptr + (t * H + h) * (nope + 2 * half)
        n = tl.arange(0, NOPE)[None, :]
        first = tl.load(head + n, mask=(h < H) & (n < nope), other=0.0)
        tl.store(q_nope_ptr + (t * H + h) * nope + n, first, mask=(h < H) & (n < nope))
        here = (h < H) & (i < half)
        _turn(head + nope, q_pe_ptr + (t * H + h) * 2 * half, p, inv_freq, half, mscale, here, p >= 0, HALF)
    else:
        row, there = _row_in_pages(table_ptr, t, p, live, page, pages, entries, EACH)
        kv = kv_ptr + t * (R + 2 * half)
        c = tl.arange(0, RANK)[None, :]
        x = tl.load(kv + c, mask=c < R, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + c, mask=c < R, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / R + eps) * w
        tl.store(latent_ptr + row * R + c, rounded(y, latent_ptr.dtype.element_ty), mask=(c < R) & there)
        _turn(kv + R, rope_ptr + row * 2 * half, p, inv_freq, half, mscale, (i < half) & there, there, HALF)


@triton.jit
def _turn(x_ptr, y_ptr, p, inv_freq, half, mscale, mask, known, HALF: tl.constexpr):
    """Heads of nothing but pairs from x to y, 0 where p is not known."""
    i = tl.arange(0, HALF)[None, :]
    a = tl.load(x_ptr + i, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + half + i, mask=mask, other=0.0).to(tl.float32)
    sine, cosine = sincos(p.to(tl.float32) * inv_freq)
    c, s = cosine * mscale, sine * mscale
    kind: tl.constexpr = y_ptr.dtype.element_ty
    tl.store(y_ptr + i, rounded(tl.where(known, a * c - b * s, 0.0), kind), mask=mask)
    tl.store(y_ptr + half + i, rounded(tl.where(known, a * s + b * c, 0.0), kind), mask=mask)


@functools.cache
def _mla_tile(H: int, nope: int, half: int, R: int) -> dict[str, int]:
    """A program's share, by sizes of a token alone; and warps."""
    width = triton.next_power_of_2(nope)
    heads = max(1, min(triton.next_power_of_2(H), 1024 // width))
    blocks = {"NOPE": width, "HALF": triton.next_power_of_2(half), "RANK": triton.next_power_of_2(R)}
    return {"HEADS": heads, **blocks, "num_warps": 4}


def mla_prepare(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor | int,
    pages: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    mscale: float,
    eps: float,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """One launch of `mla_prepare`."""
    T, H, nope = out[0].shape
    half, R = inv_freq.shape[0], kv_norm.shape[0]
    given = isinstance(positions, torch.Tensor)
    tile = _mla_tile(H, nope, half, R)
    _mla_prepare_kernel[(T, triton.cdiv(H, tile["HEADS"]) + 1)](
        q, kv, kv_norm, inv_freq, positions if given else None, block_table, *out, *pages,
        0 if given else positions, H, nope, half, R, pages[0].shape[1], pages[0].shape[0], block_table.shape[-1],
        mscale, eps, EACH=given and positions.ndim == 1, **tile, **pdl_options(),
    )  # fmt: skip
