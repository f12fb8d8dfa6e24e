"""All between the projections of an attention layer and its attention, in one launch: heads, or latents (MLA)."""

import functools
from collections import namedtuple

import torch
import triton
import triton.language as tl

from penstock.backends.cuda._launch import compiled_for, pdl_options, wait_for_previous
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import PREPARE_NUMBERS, PREPARE_ONE
from penstock.backends.cuda.rope import pieces_of, sincos
from penstock.ops.op import deterministic

# Arguments of the two kernels: arrays (None where there is none), numbers of the model, what they are compiled for.
_Arrays = namedtuple(
    "_Arrays", "q k v q_w k_w q_b k_b v_b inv_freq positions table sequence q_out gate k_pages v_pages"
)
_Sizes = namedtuple("_Sizes", "H heads D half page pages entries q_step k_step v_step mscale eps")
_Constants = namedtuple("_Constants", "EACH NORM_VALUES TOKENS HALF PIECES")
_MlaArrays = namedtuple("_MlaArrays", "q kv w inv_freq positions table sequence q_nope q_pe latent rope")
_MlaSizes = namedtuple("_MlaSizes", "H nope half R page pages entries mscale eps")
_MlaConstants = namedtuple("_MlaConstants", "EACH HEADS NOPE HALF RANK")


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
def _load_head(rows, bias, place, live, half, D, HALF: tl.constexpr, PIECES: tl.constexpr):
    """The heads that start at `rows` [TOKENS, 1], as PIECES float32 [TOKENS, HALF]; with a bias, whose part of this
    head starts at `place`, added and rounded.
    """
    head = ()
    for r in tl.static_range(PIECES):
        column, there = _columns(r, half, D, HALF)
        x = tl.load(rows + column, mask=live & there, other=0.0).to(tl.float32)
        if bias is not None:
            x += tl.load(bias + place + column, mask=there, other=0.0).to(tl.float32)
            x = rounded(x, rows.dtype.element_ty).to(tl.float32)
        head = head + (x,)  # noqa: RUF005
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
def _row_in_pages(a, t, p, live, lines, n, EACH: tl.constexpr):
    """The row of position p in the pages of token t's sequence, and whether it is there."""
    live &= (p >= 0) & (p // n.page < n.entries)
    s = t
    if a.sequence is not None:
        s = tl.load(a.sequence + t, mask=live, other=-1).to(tl.int64)
        live &= (s >= 0) & (s < lines)
    held = tl.load(a.table + (s * n.entries if EACH else 0) + p // n.page, mask=live, other=-1).to(tl.int64)
    return held * n.page + p % n.page, live & (held >= 0) & (held < n.pages)


# prepare   q_out[t, h] = rope(n(q[t, h], q_w)), gate[t, h] behind it in q if there is one; row p of the pages likewise
#           rope(n(k[t, h], k_w)), and v[t, h] or k[t, h], with NORM_VALUES n(v[t, h], 1). Without weights no
#           norm n. Biases are added to q, k and v first, rounded to their dtype
# shapes    q [T, H, D or 2D], q_out, gate [T, H, D], k, v [T, heads, D], pages [pages * page, heads, D]; rows of q, k
#           and v q_step, k_step and v_step apart; biases [H, D or 2D], [heads, D]; inv_freq [half]; p = positions[t] if
#           EACH, else start + t (start: positions[0] where it is on the device); table int32, `entries` for each of
#           `lines` sequences: that of sequence[t], or t. A row of a negative p gives 0; rows outside of the pages, and
#           those of no sequence, are not written
# grid      (ceil(T / TOKENS), H + heads): TOKENS rows of a head of q, or of k and v
# bytes     q, k and v in, the same out
# limits    D <= 16384; a head is cut in PIECES of HALF columns as in `rope`
@triton.jit(do_not_specialize=["T", "start", "lines"])
def _prepare_kernel(a, T, start, lines, n, C: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    t = tl.program_id(0).to(tl.int64) * C.TOKENS + tl.arange(0, C.TOKENS)[:, None]
    h = tl.program_id(1)
    PIECES: tl.constexpr = C.PIECES
    live = t < T
    p = _position(a.positions, start, t, live, C.EACH)
    i = tl.arange(0, C.HALF)[None, :]
    inv_freq = tl.load(a.inv_freq + i, mask=i < n.half, other=0.0)
    if h < n.H:
        wide = n.D if a.gate is None else 2 * n.D
        rows = a.q + t * n.q_step + h * wide
        head = _load_head(rows, a.q_b, h * wide, live, n.half, n.D, C.HALF, PIECES)
        if a.gate is not None:
            gate = _load_head(rows + n.D, a.q_b, h * wide + n.D, live, n.half, n.D, C.HALF, PIECES)
            _store_head(a.gate + (t * n.H + h) * n.D, gate, live, n.half, n.D, C.HALF, PIECES)
        sine, cosine = sincos(p.to(tl.float32) * inv_freq)
        if a.q_w is not None:
            head = _normed(head, a.q_w, n.half, n.D, n.eps, C.HALF, PIECES)
        head = _turned(head, cosine * n.mscale, sine * n.mscale, PIECES)
        y = ()
        for r in tl.static_range(PIECES):
            y = y + (tl.where(p >= 0, head[r], 0.0),)  # noqa: RUF005
        _store_head(a.q_out + (t * n.H + h) * n.D, y, live, n.half, n.D, C.HALF, PIECES)
    else:
        h -= n.H
        head = _load_head(a.k + t * n.k_step + h * n.D, a.k_b, h * n.D, live, n.half, n.D, C.HALF, PIECES)
        if a.v is None:
            value = head
        else:
            value = _load_head(a.v + t * n.v_step + h * n.D, a.v_b, h * n.D, live, n.half, n.D, C.HALF, PIECES)
        row, live = _row_in_pages(a, t, p, live, lines, n, C.EACH)
        place = (row * n.heads + h) * n.D
        if C.NORM_VALUES:
            value = _normed(value, None, n.half, n.D, n.eps, C.HALF, PIECES)
        _store_head(a.v_pages + place, value, live, n.half, n.D, C.HALF, PIECES)
        sine, cosine = sincos(p.to(tl.float32) * inv_freq)
        if a.k_w is not None:
            head = _normed(head, a.k_w, n.half, n.D, n.eps, C.HALF, PIECES)
        head = _turned(head, cosine * n.mscale, sine * n.mscale, PIECES)
        _store_head(a.k_pages + place, head, live, n.half, n.D, C.HALF, PIECES)


@functools.cache
def _tile(D: int, half: int, few: bool) -> tuple[int, int, int, int]:
    """A program's share: tokens, columns of a piece and pieces; and warps."""
    piece, rest = pieces_of("attention_prepare", D, half)
    block = triton.next_power_of_2(D)
    tokens = 1 if few else max(1, PREPARE_NUMBERS // block)
    return tokens, piece, 2 + rest, max(1, min(8, tokens * block // 512))


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    inv_freq: torch.Tensor,
    positions: torch.Tensor | int,
    pages: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    mscale: float,
    eps: float,
    norm_values: bool,
    sequence: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """One launch of `prepare`; a row's bits do not depend on the others as long as `deterministic` asks for that."""
    T, H, D = out[0].shape
    half, heads = inv_freq.shape[0], k.shape[1] // D
    given = isinstance(positions, torch.Tensor)
    tokens, *pieces, warps = _tile(D, half, T <= PREPARE_ONE and not deterministic())
    where = inv_freq, positions if given else None, block_table, sequence
    arrays = _Arrays(q, k, v, *norms, *biases, *where, *out, *pages)
    steps = q.stride(0), k.stride(0), 0 if v is None else v.stride(0)
    n = _Sizes(H, heads, D, half, pages[0].shape[1], pages[0].shape[0], block_table.shape[-1], *steps, mscale, eps)
    C = _Constants(given and positions.ndim == 1, norm_values, tokens, *pieces)
    grid = (triton.cdiv(T, tokens), H + heads)
    _prepare_kernel[grid](
        arrays, T, 0 if given else positions, len(block_table), n, C=compiled_for(C), num_warps=warps, **pdl_options()
    )


# mla_prepare  q_nope[t, h] and q_pe[t, h] = rope of the two parts of q[t, h]; row p of the pages: n(kv[t, :R], w), and
#              rope of the end of kv[t]
# shapes    q [T, H, nope + 2 half], kv [T, R + 2 half], q_nope [T, H, nope], q_pe [T, H, 2 half]; w [R]; inv_freq
#           [half]; latent pages [pages * page, R], rope pages [pages * page, 2 half]; positions, table as in `prepare`
# grid      (T, ceil(H / HEADS) + 1): HEADS heads of a token; the last program has its latent
# bytes     q and kv in, the same out
# limits    NOPE, HALF, RANK: powers of two that hold nope, half and R
@triton.jit(do_not_specialize=["start", "lines"])
def _mla_prepare_kernel(a, start, lines, n, C: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    t = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    part = tl.program_id(1)
    live = t >= 0
    p = _position(a.positions, start, t, live, C.EACH)
    i = tl.arange(0, C.HALF)[None, :]
    inv_freq = tl.load(a.inv_freq + i, mask=i < n.half, other=0.0)
    if part < tl.cdiv(n.H, C.HEADS):
        h = part * C.HEADS + tl.arange(0, C.HEADS)[:, None]
        head = a.q + (t * n.H + h) * (n.nope + 2 * n.half)
        d = tl.arange(0, C.NOPE)[None, :]
        first = tl.load(head + d, mask=(h < n.H) & (d < n.nope), other=0.0)
        tl.store(a.q_nope + (t * n.H + h) * n.nope + d, first, mask=(h < n.H) & (d < n.nope))
        here = (h < n.H) & (i < n.half)
        _turn(head + n.nope, a.q_pe + (t * n.H + h) * 2 * n.half, p, inv_freq, n.half, n.mscale, here, p >= 0, C.HALF)
    else:
        row, there = _row_in_pages(a, t, p, live, lines, n, C.EACH)
        kv = a.kv + t * (n.R + 2 * n.half)
        c = tl.arange(0, C.RANK)[None, :]
        x = tl.load(kv + c, mask=c < n.R, other=0.0).to(tl.float32)
        w = tl.load(a.w + c, mask=c < n.R, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / n.R + n.eps) * w
        tl.store(a.latent + row * n.R + c, rounded(y, a.latent.dtype.element_ty), mask=(c < n.R) & there)
        _turn(kv + n.R, a.rope + row * 2 * n.half, p, inv_freq, n.half, n.mscale, (i < n.half) & there, there, C.HALF)


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
def _mla_tile(H: int, nope: int, half: int, R: int) -> tuple[int, int, int, int]:
    """HEADS, NOPE, HALF and RANK of a program, by sizes of a token alone."""
    width = triton.next_power_of_2(nope)
    heads = max(1, min(triton.next_power_of_2(H), 1024 // width))
    return heads, width, triton.next_power_of_2(half), triton.next_power_of_2(R)


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
    sequence: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """One launch of `mla_prepare`."""
    T, H, nope = out[0].shape
    half, R = inv_freq.shape[0], kv_norm.shape[0]
    given = isinstance(positions, torch.Tensor)
    tile = _mla_tile(H, nope, half, R)
    arrays = _MlaArrays(q, kv, kv_norm, inv_freq, positions if given else None, block_table, sequence, *out, *pages)
    n = _MlaSizes(H, nope, half, R, pages[0].shape[1], pages[0].shape[0], block_table.shape[-1], mscale, eps)
    C = _MlaConstants(given and positions.ndim == 1, *tile)
    grid = (T, triton.cdiv(H, C.HEADS) + 1)
    start = 0 if given else positions
    _mla_prepare_kernel[grid](
        arrays, start, len(block_table), n, C=compiled_for(C), num_warps=4, **pdl_options()
    )  # fmt: skip
