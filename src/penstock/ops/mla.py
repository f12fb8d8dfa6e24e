"""Multi-head latent attention (DeepSeek-V3) in the absorbed form: one latent row serves all heads as key and value.

The weight between latents and heads comes whole or as a pair, quantized or dense:

    kv_b         [H · P, R], P = nope + v_head_dim: rows h·P … h·P + nope − 1 are the key part of head h, then the
    value part
    embed_q      [H, R, nope], the key part of each head transposed, and
    unembed_out  [H, v_head_dim, R], the value part
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.dtypes import round_to
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.attention import attend, run_spans
from penstock.ops.cache import (
    appended,
    batched,
    capacity,
    check_append,
    check_layout,
    check_read,
    read_rows,
    row_width,
    table_of,
    write_rows,
)
from penstock.ops.linear import dense
from penstock.ops.norm import f64, rms_norm
from penstock.ops.op import op
from penstock.ops.ragged import check_starts, runs, sequences
from penstock.ops.rope import rope, rotated
from penstock.quant import QuantizedTensor

# -- splitting -------------------------------------------------------------------------------------------------------


def _split(q_full: Spec, kv_pre: Spec, nope: int, rope: int) -> tuple[Spec, Spec, Spec, Spec]:
    dtype = check.alike(q_full=q_full, kv_pre=kv_pre)
    check.axes("[T, H, nope + rope] or [H, nope + rope]", 2, 3, q_full=q_full)
    check.filled(q_full.ndim - 2, q_full=q_full)
    if nope < 1 or rope < 1:
        form = f"a last axis of nope + rope, both at least 1 (they are {nope} and {rope})"
        raise ShapeError(f"q_full has shape {q_full.shape}, expected {form}")
    check.axes("[T, R + rope] or [R + rope]", q_full.ndim - 1, kv_pre=kv_pre)
    lead = q_full.shape[:-2]
    R = kv_pre.shape[-1] - rope
    if R < 1:
        raise ShapeError(f"kv_pre has shape {kv_pre.shape}, expected a last axis of more than {rope} (R + rope)")
    check.shape((*lead, R + rope), "T, R + rope", kv_pre=kv_pre)
    heads = q_full.shape[:-1]
    shapes = ((*heads, nope), (*heads, rope), (*lead, R), (*lead, rope))
    q_nope, q_pe, kv_lat, k_pe = (Spec(shape, dtype) for shape in shapes)
    return q_nope, q_pe, kv_lat, k_pe


def _sizes(q_full: Any, kv_pre: Any, nope: int | None, kv_lora_rank: int | None) -> tuple[int, int]:
    """Widths of the two parts of a query head, from either of them."""
    if nope is None and kv_lora_rank is None:
        raise InvalidArgument("nope and kv_lora_rank are both left out, expected one of them")
    if nope is None:
        rope = kv_pre.shape[-1] - kv_lora_rank
        return q_full.shape[-1] - rope, rope
    rope = q_full.shape[-1] - nope
    if kv_lora_rank is not None and kv_pre.shape[-1] - kv_lora_rank != rope:
        raise ShapeError(
            f"kv_pre has shape {tuple(kv_pre.shape)}, expected a last axis of {kv_lora_rank + rope} (R + rope)"
        )
    return nope, rope


@op(
    infer=lambda q_full, kv_pre, nope, kv_lora_rank: _split(q_full, kv_pre, *_sizes(q_full, kv_pre, nope, kv_lora_rank))
)
def mla_split_q_kv(
    q_full: Array, kv_pre: Array, nope: int | None = None, kv_lora_rank: int | None = None
) -> tuple[Array, Array, Array, Array]:
    """q_full [(T,) H, nope + rope] → q_nope, q_pe; kv_pre [(T,) R + rope] → kv_lat, k_pe. Pure copies.

    Either of nope and kv_lora_rank (R) fixes where to cut.
    """
    nope, rope = _sizes(q_full, kv_pre, nope, kv_lora_rank)
    R = kv_pre.shape[-1] - rope
    return q_full[..., :nope].copy(), q_full[..., nope:].copy(), kv_pre[..., :R].copy(), kv_pre[..., R:].copy()


def _prepared(
    q: Spec,
    kv: Spec,
    kv_norm: Spec,
    inv_freq: Spec,
    positions: Spec | int,
    latent_pages: Spec,
    rope_pages: Spec,
    block_table: Spec,
    H: int,
    nope: int,
    mscale: float,
    eps: float,
    sequence: Spec | None,
) -> tuple[Spec, Spec]:
    check.positive(H=H, nope=nope)
    check.eps(eps)
    dtype = check.alike(q=q, kv=kv)
    check.floating(kv_norm=kv_norm)
    check.axes("[T, H (nope + rope)]", 2, q=q)
    check.axes("[T, R + rope]", 2, kv=kv)
    T, rope_dim = q.shape[0], q.shape[1] // H - nope
    if rope_dim < 1 or q.shape[1] % H:
        raise ShapeError(f"q has shape {q.shape}, expected a last axis of {H} heads wider than {nope} (nope)")
    R = kv.shape[1] - rope_dim
    if R < 1:
        raise ShapeError(f"kv has shape {kv.shape}, expected a last axis of more than {rope_dim} (R + rope)")
    check.shape((T, R + rope_dim), "T, R + rope", kv=kv)
    check.shape((R,), "R", kv_norm=kv_norm)
    rows = {"kv": Spec((T, R), dtype), "the end of kv": Spec((T, rope_dim), dtype)}
    caches = {"latent_pages": latent_pages, "rope_pages": rope_pages}
    appended(rows, caches, positions, "positions", None, block_table, sequence)
    q_pe = rotated(Spec((T, H, rope_dim), dtype), inv_freq, positions, None, mscale, False, None)
    return Spec((T, H, nope), dtype), q_pe


@op(
    infer=_prepared,
    check=lambda q, latent_pages, block_table, positions, sequence: check_append(
        "positions", latent_pages, len(q), None, block_table, positions, sequence
    ),
    writes=("latent_pages", "rope_pages"),
)
def mla_prepare(
    q: Array,
    kv: Array,
    kv_norm: Array,
    inv_freq: Array,
    positions: int | Array,
    latent_pages: Array,
    rope_pages: Array,
    block_table: Array,
    H: int,
    nope: int,
    mscale: float = 1.0,
    eps: float = 1e-6,
    sequence: Array | None = None,
) -> tuple[Array, Array]:
    """All between the projections of a layer and its attention: q_nope [T, H, nope] and q_pe [T, H, rope].

    mla_split_q_kv; rms_norm of the latent with kv_norm [R]; rope of q_pe and k_pe; mla_cache_append: each rounded as on
    its own. q [T, H · (nope + rope)], kv [T, R + rope]. Decode: positions int32 [B], block_table int32 [B, n]. Prefill:
    the position of the first of T tokens, block_table [n]. Ragged: positions and sequence int32 [T], block_table
    [B, n]; rows of no sequence are written nowhere.
    """
    q_nope, q_pe, latent, k_pe = mla_split_q_kv.body(q.reshape(len(q), H, q.shape[1] // H), kv, nope)
    write_rows(latent_pages, rms_norm.body(latent, kv_norm, eps), None, block_table, positions, sequence)
    k_pe = rope.body(k_pe[:, None], inv_freq, positions, None, mscale)[:, 0]
    write_rows(rope_pages, k_pe, None, block_table, positions, sequence)
    return q_nope, rope.body(q_pe, inv_freq, positions, None, mscale)


# -- weights ---------------------------------------------------------------------------------------------------------


def _rows_per_head(kv_b: Any, H: int) -> int:
    if kv_b.shape[0] % H:
        raise ShapeError(f"kv_b has shape {tuple(kv_b.shape)}, expected a multiple of {H} rows (heads)")
    return kv_b.shape[0] // H


def _key_width(kv_b: Any, H: int, nope: int | None, v_head_dim: int | None) -> int:
    """Key rows of each head of a whole kv_b."""
    P = _rows_per_head(kv_b, H)
    if nope is None and v_head_dim is None:
        raise InvalidArgument("nope and v_head_dim are both left out, expected one of them with a whole kv_b")
    keys = nope if nope is not None else P - (v_head_dim or 0)
    if not 0 < keys < P or (v_head_dim is not None and keys + v_head_dim != P):
        raise ShapeError(f"kv_b has {P} rows per head, expected nope + v_head_dim ({nope} and {v_head_dim} given)")
    return keys


def _per_head(x: Spec, name: str) -> tuple[int, int]:
    check.floating(**{name: x})
    check.axes(f"[T, H, {'R' if name == 'v_combine' else 'nope'}] with T optional", 2, 3, **{name: x})
    check.filled(x.ndim - 2, **{name: x})
    return x.shape[-2], x.shape[-1]


def _q_prime(q_nope: Spec, kv_b: Any) -> Spec:
    H, nope = _per_head(q_nope, "q_nope")
    check.floating(kv_b=kv_b)
    check.axes("[H P, R] or [H, R, nope]", 2, 3, kv_b=kv_b)
    check.filled(0, kv_b=kv_b)
    if len(kv_b.shape) == 3:
        R = kv_b.shape[1]
        check.shape((H, R, nope), "H, R, nope", kv_b=kv_b)
    else:
        R = kv_b.shape[1]
        if _rows_per_head(kv_b, H) < nope:
            raise ShapeError(f"kv_b has {_rows_per_head(kv_b, H)} rows per head, expected at least {nope} (nope)")
    return Spec((*q_nope.shape[:-1], R), q_nope.dtype)


@op(infer=_q_prime)
def mla_q_prime(q_nope: Array, kv_b: QuantizedTensor | Array) -> Array:
    """q'[h, c] = Σ_i q_nope[h, i] · W_K[h, i, c]: queries moved into the latent space.

    q_nope [(T,) H, nope]; kv_b whole [H · P, R], or embed_q [H, R, nope] → [(T,) H, R].
    """
    H, nope = q_nope.shape[-2:]
    w = dense(kv_b)
    if kv_b.ndim == 2:
        w = w.reshape(H, -1, w.shape[-1])[:, :nope].swapaxes(1, 2)  # [H, R, nope]
    return round_to(np.einsum("...hi,hci->...hc", f64(q_nope), w), q_nope.dtype)


def _out_per_head(v_combine: Spec, kv_b: Any, nope: int | None, v_head_dim: int | None) -> Spec:
    H, R = _per_head(v_combine, "v_combine")
    check.floating(kv_b=kv_b)
    check.axes("[H P, R] or [H, v_head_dim, R]", 2, 3, kv_b=kv_b)
    check.filled(0, kv_b=kv_b)
    if kv_b.shape[-1] != R:
        raise ShapeError(f"kv_b has shape {tuple(kv_b.shape)}, expected a last axis of {R} (R)")
    if len(kv_b.shape) == 3:
        check.shape((H, kv_b.shape[1], R), "H, v_head_dim, R", kv_b=kv_b)
        width = kv_b.shape[1]
    else:
        width = _rows_per_head(kv_b, H) - _key_width(kv_b, H, nope, v_head_dim)
    return Spec((*v_combine.shape[:-1], width), v_combine.dtype)


@op(infer=_out_per_head)
def mla_out_per_head(
    v_combine: Array, kv_b: QuantizedTensor | Array, nope: int | None = None, v_head_dim: int | None = None
) -> Array:
    """y[h, f] = Σ_c v_combine[h, c] · W_V[h, f, c]: the latent result of each head as values.

    v_combine [(T,) H, R]; kv_b whole [H · P, R] (then nope or v_head_dim says where its value rows start), or
    unembed_out [H, v_head_dim, R] → [(T,) H, v_head_dim].
    """
    H, R = v_combine.shape[-2:]
    w = dense(kv_b)
    if kv_b.ndim == 2:
        w = w.reshape(H, -1, R)[:, _key_width(kv_b, H, nope, v_head_dim) :]
    return round_to(np.einsum("...hc,hfc->...hf", f64(v_combine), w), v_combine.dtype)


def _expanded(
    latent: Spec, kv_b: Any, unembed_out: Any, heads: int | None, nope: int | None, v_head_dim: int | None
) -> tuple[Spec, Spec]:
    check.floating(latent=latent, kv_b=kv_b, unembed_out=unembed_out)
    check.axes("[T, R]", 2, latent=latent)
    check.filled(latent=latent)
    T, R = latent.shape
    check.axes("[H P, R] or [H, R, nope]", 2, 3, kv_b=kv_b)
    check.filled(0, kv_b=kv_b)
    if len(kv_b.shape) == 3:
        if unembed_out is None:
            raise InvalidArgument("unembed_out is left out, expected it beside an embed_q of three axes")
        check.axes("[H, v_head_dim, R]", 3, unembed_out=unembed_out)
        check.filled(0, unembed_out=unembed_out)
        H, _, keys = kv_b.shape
        values = unembed_out.shape[1]
        check.shape((H, R, keys), "H, R, nope", kv_b=kv_b)
        check.shape((H, values, R), "H, v_head_dim, R", unembed_out=unembed_out)
    else:
        if unembed_out is not None:
            raise InvalidArgument("unembed_out is given with a whole kv_b, expected one or the other")
        if heads is None:
            raise InvalidArgument("heads is left out, expected the number of heads with a whole kv_b")
        check.positive(heads=heads)
        H, keys = heads, _key_width(kv_b, heads, nope, v_head_dim)
        values = _rows_per_head(kv_b, heads) - keys
        if kv_b.shape[1] != R:
            raise ShapeError(f"kv_b has shape {tuple(kv_b.shape)}, expected a last axis of {R} (R)")
    return Spec((T, H, keys), latent.dtype), Spec((T, H, values), latent.dtype)


@op(infer=_expanded)
def mla_expand(
    latent: Array,
    kv_b: QuantizedTensor | Array,
    unembed_out: QuantizedTensor | Array | None = None,
    heads: int | None = None,
    nope: int | None = None,
    v_head_dim: int | None = None,
) -> tuple[Array, Array]:
    """Keys k[t, h] = W_K[h] · latent[t] and values v[t, h] = W_V[h] · latent[t]: the ordinary attention behind MLA.

    latent [T, R]; kv_b whole [H · P, R] with heads and nope (or v_head_dim), or embed_q [H, R, nope] with unembed_out
    [H, v_head_dim, R] → k [T, H, nope] (to be followed by the rope part) and v [T, H, v_head_dim].
    """
    if unembed_out is None:
        assert heads is not None
        w = dense(kv_b).reshape(heads, -1, latent.shape[1])
        cut = _key_width(kv_b, heads, nope, v_head_dim)
        keys, values = w[:, :cut], w[:, cut:]
    else:
        keys, values = dense(kv_b).swapaxes(1, 2), dense(unembed_out)
    x = f64(latent)
    k, v = (round_to(np.einsum("tc,hfc->thf", x, w), latent.dtype) for w in (keys, values))
    return k, v


# -- attention over latents ------------------------------------------------------------------------------------------


def _queries(q_prime: Spec, q_pe: Spec, latent_cache: Spec, rope_k_cache: Spec, lead: int) -> None:
    check.alike(q_prime=q_prime, q_pe=q_pe, latent_cache=latent_cache, rope_k_cache=rope_k_cache)
    check.axes("[T, H, R] or [H, R]", 2, 3, q_prime=q_prime)
    check.filled(q_prime.ndim - 2, q_prime=q_prime, q_pe=q_pe)
    check.axes("the axes of q_prime", q_prime.ndim, q_pe=q_pe)
    check.shape((*q_prime.shape[:-1], q_pe.shape[-1]), "as q_prime but for the last axis", q_pe=q_pe)
    for name, cache, width in (
        ("latent_cache", latent_cache, q_prime.shape[-1]),
        ("rope_k_cache", rope_k_cache, q_pe.shape[-1]),
    ):
        if row_width(name, cache, lead) != width:
            raise ShapeError(f"{name} has shape {cache.shape}, expected rows of {width} as the query")
    if latent_cache.shape[:lead] != rope_k_cache.shape[:lead]:
        front = f"{latent_cache.shape[:lead]} in front as latent_cache"
        raise ShapeError(f"rope_k_cache has shape {rope_k_cache.shape}, expected {front}")


def _sdpa(
    q_prime: Spec,
    q_pe: Spec,
    latent_cache: Spec,
    rope_k_cache: Spec,
    cache_len: Spec | int,
    softmax_scale: float,
    slots: Spec | None,
    block_table: Spec | None,
    starts: Spec | None,
    longest: int | None,
    up_to: int | None,
) -> Spec:
    per_row = batched("cache_len", cache_len)
    rows = q_prime.shape[0] if q_prime.ndim == 3 else 1
    B = rows
    if starts is not None:
        B = sequences(starts)
        if block_table is None or not per_row:
            raise ShapeError("starts goes with block_table [B, n] and one cache_len per sequence")
    if longest is not None:
        check.in_range("longest", longest, 0, 1 << 31)
    if per_row:
        check.axes("[B, H, R]", 3, q_prime=q_prime)
        check.shape((B,), "one per row of q_prime" if starts is None else "one per sequence", cache_len=cache_len)
    check_layout(slots, block_table, per_row, B, "cache_len")
    _queries(q_prime, q_pe, latent_cache, rope_k_cache, 1 if slots is None and block_table is None else 2)
    check.finite(softmax_scale=softmax_scale)
    if isinstance(cache_len, int):
        _check_cache_len(cache_len, rows if q_prime.ndim == 3 else 0, capacity(latent_cache, slots, block_table))
    return q_prime


def _check_cache_len(cache_len: int, rows: int, room: int) -> None:
    if not rows <= cache_len <= room:
        raise InvalidArgument(f"cache_len is {cache_len}, expected {rows} to {room} (rows of the call, positions)")


def _check_sdpa(
    q_prime: Array,
    latent_cache: Array,
    cache_len: Array | int,
    slots: Array | None,
    block_table: Array | None,
    starts: Array | None,
) -> None:
    room = capacity(latent_cache, slots, block_table)
    if starts is not None and not isinstance(cache_len, int):
        check.in_range("cache_len", cache_len, 0, room + 1, f"{room} positions in the cache")
        check_read(latent_cache, None, block_table, run_spans(starts, cache_len, len(q_prime), None, "cache_len"))
        return
    if isinstance(cache_len, int) or cache_len.ndim == 0:
        lengths = [int(cache_len)]
        _check_cache_len(lengths[0], len(q_prime) if q_prime.ndim == 3 else 0, room)
    else:
        check.in_range("cache_len", cache_len, 0, room + 1, f"{room} positions in the cache")
        lengths = cache_len.tolist()
    check_read(latent_cache, slots, block_table, [(0, n) for n in lengths])


def _absorbed(q_prime: Array, q_pe: Array, latent: Array, rope_k: Array, start: int, scale: float) -> Array:
    """Attention with one key-value head: keys [latent | rope_k], values latent. float64 [T, H, R]."""
    q = np.concatenate([f64(q_prime), f64(q_pe)], axis=-1)
    if len(latent) == 0:
        return np.zeros(q_prime.shape)
    return attend(q, np.concatenate([latent, rope_k], axis=-1)[:, None], latent[:, None], start, scale, None)


@op(infer=_sdpa, check=_check_sdpa)
def mla_sdpa(
    q_prime: Array,
    q_pe: Array,
    latent_cache: Array,
    rope_k_cache: Array,
    cache_len: int | Array,
    softmax_scale: float,
    slots: Array | None = None,
    block_table: Array | None = None,
    starts: Array | None = None,
    longest: int | None = None,
    up_to: int | None = None,
) -> Array:
    """softmax_t((q'·latent[t] + q_pe·rope_k[t]) · softmax_scale) over the cache, applied to the latents → like q_prime.

    One token: q_prime [H, R], q_pe [H, rope], caches [max_len, R] and [max_len, rope], t < cache_len. T tokens of one
    sequence: q_prime [T, H, R], the last at position cache_len − 1, causal. B sequences: q_prime [B, H, R], cache_len
    int32 [B], caches with slots or pages (see cache.py). cache_len = 0 gives zeros. With starts int32 [B + 1] q_prime
    has T rows, the runs of B sequences (see ragged.py); runs of more rows than `longest` that end at up to `up_to`
    positions are left out and give zeros.
    """
    lengths = np.asarray(cache_len)
    if starts is not None and block_table is not None:
        y = np.zeros(q_prime.shape)
        for b, low, high in runs(starts):
            end = int(lengths[b])
            if longest is None or high - low <= longest or (up_to is not None and end > up_to):
                latent, rope_k = (read_rows(c, block_table[b], 0, end) for c in (latent_cache, rope_k_cache))
                own = slice(low, high)
                y[own] = _absorbed(q_prime[own], q_pe[own], latent, rope_k, end - (high - low), softmax_scale)
        return round_to(y, q_prime.dtype)
    if lengths.ndim == 0:
        latent, rope_k = (read_rows(c, block_table, 0, int(lengths)) for c in (latent_cache, rope_k_cache))
        rows = q_prime if q_prime.ndim == 3 else q_prime[None]
        pe = q_pe if q_pe.ndim == 3 else q_pe[None]
        y = _absorbed(rows, pe, latent, rope_k, int(lengths) - len(rows), softmax_scale)
        return round_to(y.reshape(q_prime.shape), q_prime.dtype)
    y = np.empty(q_prime.shape)
    for b, n in enumerate(lengths):
        table = table_of(slots, block_table, b)
        latent, rope_k = (read_rows(c, table, 0, int(n)) for c in (latent_cache, rope_k_cache))
        one = slice(b, b + 1)
        y[one] = _absorbed(q_prime[one], q_pe[one], latent, rope_k, int(n) - 1, softmax_scale)
    return round_to(y, q_prime.dtype)


def _prefill(
    q_nope: Spec,
    q_pe: Spec,
    latent_cache: Spec,
    rope_k_cache: Spec,
    start: Spec | int,
    softmax_scale: float,
    kv_b: Any,
    unembed_out: Any,
    block_table: Spec | None,
    starts: Spec | None,
    longer_than: int,
    up_to: int | None,
) -> Spec:
    check.alike(q_nope=q_nope, q_pe=q_pe, latent_cache=latent_cache, rope_k_cache=rope_k_cache)
    check.axes("[T, H, nope]", 3, q_nope=q_nope)
    check.axes("[T, H, rope]", 3, q_pe=q_pe)
    check.filled(q_nope=q_nope, q_pe=q_pe)
    check.shape((*q_nope.shape[:2], q_pe.shape[2]), "as q_nope but for the last axis", q_pe=q_pe)
    T, H, nope = q_nope.shape
    per_row = batched("start", start)
    if starts is None and per_row:
        raise ShapeError("start has one value per row, expected one number: the position of the first row")
    if starts is not None:
        if block_table is None or not per_row:
            raise ShapeError("starts goes with block_table [B, n] and the position of each row as start")
        check.shape((T,), "one per row", start=start)
    check_layout(None, block_table, per_row, T if starts is None else sequences(starts), "start")
    if longer_than < 0:
        raise InvalidArgument(f"longer_than is {longer_than}, expected 0 or more")
    lead = 1 if block_table is None else 2
    R = row_width("latent_cache", latent_cache, lead)
    if row_width("rope_k_cache", rope_k_cache, lead) != q_pe.shape[2]:
        raise ShapeError(f"rope_k_cache has shape {rope_k_cache.shape}, expected rows of {q_pe.shape[2]} as q_pe")
    if latent_cache.shape[:lead] != rope_k_cache.shape[:lead]:
        front = f"{latent_cache.shape[:lead]} in front as latent_cache"
        raise ShapeError(f"rope_k_cache has shape {rope_k_cache.shape}, expected {front}")
    check.finite(softmax_scale=softmax_scale)
    keys, values = _expanded(Spec((T, R), q_nope.dtype), kv_b, unembed_out, H, nope, None)
    check.shape(keys.shape, "T, and heads and width of the keys of kv_b", q_nope=q_nope)
    if isinstance(start, int):
        _check_start(start, T, capacity(latent_cache, None, block_table))
    return values


def _check_start(start: int, rows: int, room: int) -> None:
    if not 0 <= start <= room - rows:
        raise InvalidArgument(f"start is {start}, expected 0 to {room - rows} ({rows} rows in {room} positions)")


def _check_prefill(
    q_nope: Array, latent_cache: Array, start: Array | int, block_table: Array | None, starts: Array | None
) -> None:
    if starts is not None and block_table is not None and not isinstance(start, int):
        check_starts(starts, len(q_nope))
        room = capacity(latent_cache, None, block_table)
        spans = [(0, 0)] * len(block_table)
        for b, low, high in runs(starts):
            _check_start(int(start[low]), high - low, room)
            spans[b] = 0, int(start[low]) + high - low
        check_read(latent_cache, None, block_table, spans)
        return
    _check_start(int(start), len(q_nope), capacity(latent_cache, None, block_table))
    check_read(latent_cache, None, block_table, [(0, int(start) + len(q_nope) if len(q_nope) else 0)])


@op(infer=_prefill, check=_check_prefill)
def mla_prefill(
    q_nope: Array,
    q_pe: Array,
    latent_cache: Array,
    rope_k_cache: Array,
    start: int | Array,
    softmax_scale: float,
    kv_b: QuantizedTensor | Array,
    unembed_out: QuantizedTensor | Array | None = None,
    block_table: Array | None = None,
    starts: Array | None = None,
    longer_than: int = 0,
    up_to: int | None = None,
) -> Array:
    """Causal attention of T rows at positions start … over keys and values expanded from the cached latents.

    k[p, h] = W_K[h] · latent[p] followed by rope_k[p], v[p, h] = W_V[h] · latent[p]; row t sees p ≤ start + t.
    q_nope [T, H, nope], q_pe [T, H, rope], caches [max_len, R] and [max_len, rope] or pages with block_table int32 [n];
    kv_b and unembed_out as in `mla_expand` → [T, H, v_head_dim]. What `mla_q_prime`, `mla_sdpa` and `mla_out_per_head`
    give together, for less work when T is large. With starts int32 [B + 1] the rows are the runs of B sequences (see
    ragged.py): start int32 [T] has the position of each row, block_table [B, n]; runs of up to `longer_than` rows, and
    those that end at more than `up_to` positions, are left out and give zeros.
    """
    T, H, nope = q_nope.shape
    w = dense(kv_b)
    if unembed_out is None:
        w = w.reshape(H, -1, w.shape[-1])
        keys, values = w[:, :nope], w[:, nope:]
    else:
        keys, values = w.swapaxes(1, 2), dense(unembed_out)
    y = np.zeros((T, H, values.shape[1]))
    q = np.concatenate([f64(q_nope), f64(q_pe)], axis=2)

    def run(low: int, high: int, first: int, table: Array | None) -> None:
        end = first + high - low
        latent, rope_k = (read_rows(c, table, 0, end) for c in (latent_cache, rope_k_cache))
        k, v = (np.einsum("pc,hfc->phf", latent, part) for part in (keys, values))
        k = np.concatenate([k, np.broadcast_to(rope_k[:, None], (end, H, rope_k.shape[1]))], axis=2)
        y[low:high] = attend(q[low:high], k, v, first, softmax_scale, None)

    if starts is None:
        run(0, T, int(start), block_table)
    elif block_table is not None and not isinstance(start, int):
        for b, low, high in runs(starts):
            first = int(start[low])
            if high - low > longer_than and (up_to is None or first + high - low <= up_to):
                run(low, high, first, block_table[b])
    return round_to(y, q_nope.dtype)


def _tile(
    running_max: Spec,
    denominator: Spec,
    accumulator: Spec,
    q_prime: Spec,
    q_pe: Spec,
    latent_cache: Spec,
    rope_k_cache: Spec,
    tile_start: int,
    tile_end: int,
    softmax_scale: float,
    first: bool,
) -> None:
    check.axes("[H, R]", 2, q_prime=q_prime)
    _queries(q_prime, q_pe, latent_cache, rope_k_cache, 1)
    check.dtype("float32", running_max=running_max, denominator=denominator, accumulator=accumulator)
    check.shape(q_prime.shape[:1], "H", running_max=running_max, denominator=denominator)
    check.shape(q_prime.shape, "as q_prime", accumulator=accumulator)
    check.finite(softmax_scale=softmax_scale)
    if not 0 <= tile_start <= tile_end <= latent_cache.shape[0]:
        limits = f"0 <= start <= end <= {latent_cache.shape[0]}"
        raise InvalidArgument(f"tile_start and tile_end are {tile_start} and {tile_end}, expected {limits}")


@op(infer=_tile, writes=("running_max", "denominator", "accumulator"))
def mla_sdpa_tile_accumulate(
    running_max: Array,
    denominator: Array,
    accumulator: Array,
    q_prime: Array,
    q_pe: Array,
    latent_cache: Array,
    rope_k_cache: Array,
    tile_start: int,
    tile_end: int,
    softmax_scale: float,
    first: bool = False,
) -> None:
    """One tile of `mla_sdpa` with online softmax: merges positions tile_start … tile_end − 1 into the running state.

    With m = max s, z = Σ exp(s − m), v = Σ exp(s − m) · latent of the tile and M' = max(M, m):
    Z' = Z · exp(M − M') + z · exp(m − M'), V' likewise; a side whose maximum is −inf counts as nothing.
    q_prime [H, R]; running_max, denominator float32 [H], accumulator float32 [H, R]. `first` starts from nothing,
    whatever the state holds, also for an empty tile.
    """
    if first:
        running_max[...], denominator[...], accumulator[...] = -np.inf, 0, 0
    if tile_start == tile_end:
        return
    latent = read_rows(latent_cache, None, tile_start, tile_end)
    rope_k = read_rows(rope_k_cache, None, tile_start, tile_end)
    scores = (f64(q_prime) @ latent.T + f64(q_pe) @ rope_k.T) * softmax_scale  # [H, tile]
    old, top = f64(running_max), scores.max(axis=1)
    new = np.maximum(old, top)
    weights = np.exp(scores - np.where(np.isneginf(top), 0, top)[:, None])
    keep = np.where(np.isneginf(old), 0, np.exp(old - new))
    take = np.where(np.isneginf(top), 0, np.exp(top - new))
    running_max[...] = new
    denominator[...] = f64(denominator) * keep + weights.sum(axis=1) * take
    accumulator[...] = f64(accumulator) * keep[:, None] + (weights @ latent) * take[:, None]


def _finalized(denominator: Spec, accumulator: Spec, dtype: str) -> Spec:
    check.dtype("float32", denominator=denominator, accumulator=accumulator)
    check.axes("[H, R]", 2, accumulator=accumulator)
    check.filled(0, accumulator=accumulator)
    check.shape(accumulator.shape[:1], "H", denominator=denominator)
    return Spec(accumulator.shape, check.result_dtype(accumulator, dtype))


@op(infer=_finalized, alias=True)
def mla_sdpa_finalize(denominator: Array, accumulator: Array, dtype: str = "float32") -> Array:
    """accumulator / denominator per head, 0 where the denominator is not above 0: the end of a tiled `mla_sdpa`."""
    z = f64(denominator)[:, None]
    return round_to(np.where(z > 0, f64(accumulator) / z, 0), dtype)
