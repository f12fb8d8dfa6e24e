"""Softmax attention with grouped query heads, over contiguous, slotted and paged caches.

Query head h reads key-value head h // (H / Hkv). Key width D and value width Dv may differ. The scale of the scores
is a required argument: it is D^(−1/2) in most families, 1 in Gemma 4, another number in MLA. cache.py has the layouts.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.dtypes import round_to
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
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
from penstock.ops.elementwise import sigmoid_gate
from penstock.ops.norm import f64, normed
from penstock.ops.op import op
from penstock.ops.ragged import check_starts, runs, sequences
from penstock.ops.rope import rotate, rotated

# -- one launch of the sources each ----------------------------------------------------------------------------------


def _decode_cache(name: str, cache: Spec, H: int, heads_per_kv: int, seq_len: int) -> int:
    """Width of a head in a contiguous cache."""
    check.positive(heads_per_kv=heads_per_kv)
    if H % heads_per_kv:
        raise InvalidArgument(f"heads_per_kv is {heads_per_kv}, expected a divisor of {H} (query heads)")
    width = row_width(name, cache, 1)
    if width % (H // heads_per_kv):
        raise ShapeError(f"{name} has rows of {width}, expected a multiple of {H // heads_per_kv} (key-value heads)")
    if not 0 <= seq_len <= cache.shape[0]:
        raise InvalidArgument(f"seq_len is {seq_len}, expected 0 to {cache.shape[0]} (rows of {name})")
    return width // (H // heads_per_kv)


def _scores(q: Spec, k_cache: Spec, seq_len: int, scale: float, heads_per_kv: int, seq_stride: int) -> Spec:
    check.alike(q=q, k_cache=k_cache)
    check.axes("[H, D]", 2, q=q)
    check.filled(0, q=q)
    check.finite(scale=scale)
    width = _decode_cache("k_cache", k_cache, q.shape[0], heads_per_kv, seq_len)
    if width != q.shape[1]:
        raise ShapeError(f"k_cache has heads of {width}, expected {q.shape[1]} as q")
    if seq_stride < max(seq_len, 1):
        raise InvalidArgument(f"seq_stride is {seq_stride}, expected at least {max(seq_len, 1)} (seq_len)")
    return Spec((q.shape[0], seq_stride), q.dtype)


@op(infer=_scores, partial=True)
def attention_scores(
    q: Array, k_cache: Array, seq_len: int, scale: float, heads_per_kv: int, seq_stride: int, out: Array | None = None
) -> None:
    """scores[h, p] = (Σ_d q[h, d] · k_cache[p, head(h), d]) · scale for p < seq_len.

    q [H, D], k_cache [max_seq, Hkv · D] → [H, seq_stride]; columns from seq_len on keep what `out` held (0 if new).
    """
    H, D = q.shape
    k = k_cache.reshape(len(k_cache), -1, D)[:seq_len].astype(np.float64)
    heads = np.arange(H) // heads_per_kv
    scores = np.einsum("hd,phd->hp", q.astype(np.float64), k[:, heads]) * scale
    assert out is not None
    out[:, :seq_len] = round_to(scores, q.dtype)


def _softmaxed(scores: Spec, seq_len: int) -> Spec:
    check.floating(scores=scores)
    check.axes("[H, seq_stride]", 2, scores=scores)
    check.filled(0, scores=scores)
    if not 0 <= seq_len <= scores.shape[1]:
        raise InvalidArgument(f"seq_len is {seq_len}, expected 0 to {scores.shape[1]} (columns of scores)")
    return scores


def softmax(scores: Array, sinks: Array | None = None) -> Array:
    """Softmax over the last axis in float64; a row of nothing but −inf gives zeros. sinks [..., 1]: scores that take
    part in the sum, and in nothing else.
    """
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    top = top if sinks is None else np.maximum(top, sinks)
    shift = np.where(np.isneginf(top), 0, top)
    e = np.exp(scores - shift)
    total = e.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + np.exp(sinks - shift)
    return e / np.where(total == 0, 1, total)


@op(infer=_softmaxed, alias=True)
def attention_softmax(scores: Array, seq_len: int) -> Array:
    """Softmax of the first seq_len columns of each row; the other columns pass through. `out=scores` is allowed."""
    y = scores.copy()
    y[:, :seq_len] = round_to(softmax(scores[:, :seq_len].astype(np.float64)), scores.dtype)
    return y


def _values(scores: Spec, v_cache: Spec, seq_len: int, heads_per_kv: int) -> Spec:
    _softmaxed(scores, seq_len)
    check.alike(scores=scores, v_cache=v_cache)
    width = _decode_cache("v_cache", v_cache, scores.shape[0], heads_per_kv, seq_len)
    return Spec((scores.shape[0], width), scores.dtype)


@op(infer=_values)
def attention_values(scores: Array, v_cache: Array, seq_len: int, heads_per_kv: int) -> Array:
    """y[h, d] = Σ_{p < seq_len} scores[h, p] · v_cache[p, head(h), d]; v_cache [max_seq, Hkv · Dv] → [H, Dv]."""
    H = scores.shape[0]
    v = v_cache.reshape(len(v_cache), H // heads_per_kv, -1)[:seq_len].astype(np.float64)
    weights = scores[:, :seq_len].astype(np.float64)
    return round_to(np.einsum("hp,phd->hd", weights, v[:, np.arange(H) // heads_per_kv]), scores.dtype)


def _split(q_proj: Spec) -> tuple[Spec, Spec]:
    check.floating(q_proj=q_proj)
    check.axes("[T, H, 2D]", 3, q_proj=q_proj)
    check.filled(q_proj=q_proj)
    if q_proj.shape[2] % 2:
        raise ShapeError(f"q_proj has shape {q_proj.shape}, expected an even last axis (q, then gate)")
    half = Spec((*q_proj.shape[:2], q_proj.shape[2] // 2), q_proj.dtype)
    return half, half


@op(infer=_split)
def split_q_gate(q_proj: Array) -> tuple[Array, Array]:
    """[T, H, 2D] → q and gate [T, H, D]: side by side per head, not all of q before all of gate."""
    D = q_proj.shape[2] // 2
    return q_proj[..., :D].copy(), q_proj[..., D:].copy()


# -- before attention ------------------------------------------------------------------------------------------------


def _prepared(
    q: Spec,
    k: Spec,
    v: Spec | None,
    q_norm: Spec | None,
    k_norm: Spec | None,
    inv_freq: Spec,
    positions: Spec | int,
    key_pages: Spec,
    value_pages: Spec,
    block_table: Spec,
    H: int,
    rotary_dim: int | None,
    mscale: float,
    eps: float,
    gated: bool,
    norm_values: bool,
    sequence: Spec | None,
    q_bias: Spec | None,
    k_bias: Spec | None,
    v_bias: Spec | None,
) -> tuple[Spec, Spec | None]:
    check.positive(H=H)
    check.eps(eps)
    dtype = check.alike(q=q, k=k, v=v)
    check.floating(q_bias=q_bias, k_bias=k_bias, v_bias=v_bias)
    check.floating(q_norm=q_norm, k_norm=k_norm)
    check.axes("[T, H D]", 2, q=q, k=k, v=v)
    check.filled(q=q, k=k, v=v)
    T, width = q.shape
    D = width // H // (2 if gated else 1)
    if D == 0 or width != H * D * (2 if gated else 1):
        form = f"a last axis of {H} heads" + (", each of q and gate" if gated else "")
        raise ShapeError(f"q has shape {q.shape}, expected {form}")
    check.shape((D,), "the width of a head", q_norm=q_norm, k_norm=k_norm)
    check.shape(k.shape, "as k", v=v)
    check.shape(q.shape[1:], "columns of q", q_bias=q_bias)
    check.shape(k.shape[1:], "columns of k", k_bias=k_bias, v_bias=v_bias)
    if v is None and v_bias is not None:
        raise InvalidArgument("v_bias is there without v, expected both")
    Hkv = k.shape[1] // D
    if Hkv == 0 or k.shape[1] % D or H % Hkv:
        raise ShapeError(f"k has shape {k.shape}, expected heads of {D} whose number divides {H} (H)")
    caches = {"key_pages": key_pages, "value_pages": value_pages}
    appended({"k": k, "v": k if v is None else v}, caches, positions, "positions", None, block_table, sequence)
    y = rotated(Spec((T, H, D), dtype), inv_freq, positions, rotary_dim, mscale, False, None)
    return y, y if gated else None


@op(
    infer=_prepared,
    check=lambda k, key_pages, block_table, positions, sequence: check_append(
        "positions", key_pages, len(k), None, block_table, positions, sequence
    ),
    writes=("key_pages", "value_pages"),
)
def attention_prepare(
    q: Array,
    k: Array,
    v: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
    inv_freq: Array,
    positions: int | Array,
    key_pages: Array,
    value_pages: Array,
    block_table: Array,
    H: int,
    rotary_dim: int | None = None,
    mscale: float = 1.0,
    eps: float = 1e-6,
    gated: bool = False,
    norm_values: bool = False,
    sequence: Array | None = None,
    q_bias: Array | None = None,
    k_bias: Array | None = None,
    v_bias: Array | None = None,
) -> tuple[Array, Array | None]:
    """All between the projections of a layer and its attention: q [T, H, D] and, if gated, the gate [T, H, D].

    q and k are normed per head (q_norm, k_norm [D]; None: not at all) and rotated as `head_norm_rope` does; k and v go
    into the pages as `kv_pages_append` puts them. q [T, H · D], or gated [T, H · 2D] as `split_q_gate` takes it; k, v
    [T, Hkv · D]; v None: the values are k as it came; norm_values: they are normed, without a weight. Decode: positions
    int32 [B], block_table int32 [B, n]. Prefill: the position of the first of T tokens, block_table [n]. Ragged:
    positions and sequence int32 [T], block_table [B, n]; rows of no sequence are written nowhere. Biases [H · D] (gated
    [H · 2D]), [Hkv · D] are added first, the sum rounded as `add` rounds it.
    """

    def biased(x: Array, bias: Array | None) -> Array:
        return x if bias is None else round_to(f64(x) + f64(bias), x.dtype)

    q, k, v = biased(q, q_bias), biased(k, k_bias), None if v is None else biased(v, v_bias)
    T, width = len(q), q.shape[1] // H
    D = width // 2 if gated else width
    parts = q.reshape(T, H, width)
    gate = parts[..., D:].copy() if gated else None
    at = np.asarray(positions)

    def turned(x: Array, weight: Array | None) -> Array:
        y = f64(x) if weight is None else normed(f64(x), eps, weight)
        return round_to(rotate(y, inv_freq, at, rotary_dim, mscale, False), x.dtype)

    keys = k.reshape(T, k.shape[1] // D, D)
    values = keys if v is None else v.reshape(keys.shape)
    if norm_values:
        values = round_to(normed(f64(values), eps), k.dtype)
    write_rows(key_pages, turned(keys, k_norm), None, block_table, positions, sequence)
    write_rows(value_pages, values, None, block_table, positions, sequence)
    return turned(parts[..., :D], q_norm), gate


# -- attention -------------------------------------------------------------------------------------------------------


def attend(
    q: Array, k: Array, v: Array, start: int, scale: float, window: int | None, sinks: Array | None = None
) -> Array:
    """Rows q [T, H, D] at positions start … over keys [n, Hkv, D] and values [n, Hkv, Dv] of positions 0 … n − 1.

    Row t sees p ≤ start + t and, with a window, p > start + t − window. sinks [H]: see `softmax`. float64 [T, H, Dv].
    """
    T, H, D = q.shape
    Hkv = k.shape[1]
    y = np.empty((T, H, v.shape[2]))
    for low in range(0, T, 64):  # a block of queries at a time keeps the scores small
        rows = np.arange(low, min(low + 64, T))
        at = start + rows[:, None]
        first = 0 if window is None else max(0, start + low - window + 1)
        p = np.arange(first, start + rows[-1] + 1)
        seen = (p <= at) if window is None else (p <= at) & (p > at - window)
        grouped = q[rows].reshape(len(rows), Hkv, H // Hkv, D)
        scores = np.einsum("tgrd,pgd->grtp", grouped, k[p], optimize=True) * scale
        sunk = None if sinks is None else sinks.astype(np.float64).reshape(Hkv, H // Hkv, 1, 1)
        weights = softmax(np.where(seen, scores, -np.inf), sunk)
        y[rows] = np.einsum("grtp,pgd->tgrd", weights, v[p], optimize=True).reshape(len(rows), H, -1)
    return y


def _heads(q: Spec, k_cache: Spec, v_cache: Spec, lead: int, names: tuple[str, str]) -> int:
    """Checks H, Hkv, D; returns the value width Dv."""
    check.alike(q=q, **dict(zip(names, (k_cache, v_cache), strict=True)))
    H, D = q.shape[-2:]
    k_width, v_width = row_width(names[0], k_cache, lead), row_width(names[1], v_cache, lead)
    if k_cache.shape[:lead] != v_cache.shape[:lead]:
        raise ShapeError(
            f"{names[1]} has shape {v_cache.shape}, expected {k_cache.shape[:lead]} in front as {names[0]}"
        )
    if k_width % D:
        raise ShapeError(f"{names[0]} has rows of {k_width}, expected a multiple of {D} (the width of a head of q)")
    Hkv = k_width // D
    if H % Hkv:
        raise ShapeError(f"q has {H} heads, expected a multiple of {Hkv} (the heads of {names[0]})")
    if v_width % Hkv:
        raise ShapeError(f"{names[1]} has rows of {v_width}, expected a multiple of {Hkv} (the heads of {names[0]})")
    return v_width // Hkv


def _scale_window(scale: float, window: int | None) -> None:
    check.finite(scale=scale)
    if window is not None:
        check.positive(window=window)


def _length(seq_len: int, room: int, name: str = "seq_len") -> None:
    if not 0 <= seq_len <= room:
        raise InvalidArgument(f"{name} is {seq_len}, expected 0 to {room} (positions in the cache)")


def _spans(lengths: Array | int, window: int | None) -> list[tuple[int, int]]:
    each = [lengths] if isinstance(lengths, int) else lengths.ravel().tolist()
    return [(0 if window is None else max(0, n - window), n) for n in each]


def run_spans(
    starts: Array, lengths: Array, rows: int, window: int | None, name: str = "lengths"
) -> list[tuple[int, int]]:
    """Positions that each sequence's run reads. Raises InvalidArgument for a run that is longer than its sequence."""
    check_starts(starts, rows)
    spans = [(0, 0)] * len(lengths)
    for b, low, high in runs(starts):
        end = int(lengths[b])
        if end < high - low:
            raise InvalidArgument(f"{name} has {end} for a run of {high - low} rows, expected at least as many")
        spans[b] = 0 if window is None else max(0, end - (high - low) - window + 1), end
    return spans


def _decode_rows(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    scale: float,
    window: int | None,
    slots: Array | None = None,
    block_table: Array | None = None,
    sinks: Array | None = None,
) -> list[Array]:
    """One query row per sequence over its own cache; float64 [H, Dv] each."""
    lead = 1 if slots is None and block_table is None else 2
    D, Dv = q.shape[-1], _value_width(q, k_cache, v_cache, lead)
    results = []
    for b, (low, high) in enumerate(_spans(lengths, window)):
        if high == low:
            results.append(np.zeros((q.shape[1], Dv)))
            continue
        table = table_of(slots, block_table, b)
        k = read_rows(k_cache, table, low, high).reshape(high - low, -1, D)
        v = read_rows(v_cache, table, low, high).reshape(high - low, -1, Dv)
        results.append(attend(q[b : b + 1].astype(np.float64), k, v, high - low - 1, scale, None, sinks)[0])
    return results


def _value_width(q: Array, k_cache: Array, v_cache: Array, lead: int) -> int:
    Hkv = math.prod(k_cache.shape[lead:]) // q.shape[-1]
    return math.prod(v_cache.shape[lead:]) // Hkv


def _decode(
    q: Spec, k_cache: Spec, v_cache: Spec, seq_len: Spec | int, scale: float, window: int | None, slots: Spec | None
) -> Spec:
    per_row = batched("seq_len", seq_len)
    check.axes("[B, H, D]" if per_row else "[H, D]", 3 if per_row else 2, q=q)
    check.filled(1 if per_row else 0, q=q)
    check_layout(slots, None, per_row, q.shape[0], "seq_len")
    if isinstance(seq_len, Spec) and per_row:
        check.shape((q.shape[0],), "one per row of q", seq_len=seq_len)
    _scale_window(scale, window)
    Dv = _heads(q, k_cache, v_cache, 2 if per_row else 1, ("k_cache", "v_cache"))
    if isinstance(seq_len, int):
        _length(seq_len, k_cache.shape[0])
    return Spec((*q.shape[:-1], Dv), q.dtype)


def _check_decode(k_cache: Array, seq_len: Array | int, window: int | None, slots: Array | None) -> None:
    room = capacity(k_cache, slots, None)
    check.in_range("seq_len", seq_len, 0, room + 1, f"{room} positions in the cache")
    check_read(k_cache, slots, None, _spans(seq_len, window))


@op(infer=_decode, check=_check_decode)
def attention_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    seq_len: int | Array,
    scale: float,
    window: int | None = None,
    slots: Array | None = None,
) -> Array:
    """softmax(scale · q · kᵀ) · v over positions max(0, seq_len − window) … seq_len − 1; the query is the newest of
    them.

    q [H, D], caches [max_seq, Hkv · D] and [max_seq, Hkv · Dv] → [H, Dv]; or q [B, H, D], seq_len int32 [B], caches
    [S, max_seq, …] and slots int32 [B] → [B, H, Dv]. seq_len = 0 gives zeros.
    """
    lengths = np.asarray(seq_len).reshape(-1)
    rows = _decode_rows(q[None] if q.ndim == 2 else q, k_cache, v_cache, lengths, scale, window, slots)
    Dv = _value_width(q, k_cache, v_cache, 1 if slots is None else 2)
    return round_to(np.array(rows).reshape(*q.shape[:-1], Dv), q.dtype)


def _prefill(
    q: Spec, k_cache: Spec, v_cache: Spec, start: Spec | int, scale: float, window: int | None, block_table: Spec | None
) -> Spec:
    check.axes("[T, H, D]", 3, q=q)
    check.filled(q=q)
    if batched("start", start):
        raise ShapeError("start has one value per row, expected one number: the position of the first row")
    check_layout(None, block_table, False, q.shape[0], "start")
    _scale_window(scale, window)
    Dv = _heads(q, k_cache, v_cache, 1 if block_table is None else 2, ("k_cache", "v_cache"))
    if isinstance(start, int):
        _length(start + q.shape[0], capacity(k_cache, None, block_table), "start + T")
    return Spec((*q.shape[:-1], Dv), q.dtype)


def _check_prefill(q: Array, k_cache: Array, start: Array | int, window: int | None, block_table: Array | None) -> None:
    first, room = int(start), capacity(k_cache, None, block_table)
    if first < 0 or first + len(q) > room:
        raise InvalidArgument(f"start is {first}, expected 0 to {room - len(q)} ({len(q)} rows in {room} positions)")
    low = 0 if window is None else max(0, first - window + 1)
    check_read(k_cache, None, block_table, [(low, first + len(q) if len(q) else low)])


@op(infer=_prefill, check=_check_prefill)
def attention_prefill(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    start: int | Array,
    scale: float,
    window: int | None = None,
    block_table: Array | None = None,
) -> Array:
    """Causal attention of T rows at positions start … start + T − 1, whose keys and values are already in the cache.

    Row t sees p ≤ start + t and, with a window W, p > start + t − W: W positions, itself included.
    q [T, H, D], caches [max_seq, Hkv · D] and [max_seq, Hkv · Dv], or pages with block_table int32 [n] → [T, H, Dv].
    """
    D, first = q.shape[2], int(start)
    Dv = _value_width(q, k_cache, v_cache, 1 if block_table is None else 2)
    if not len(q):
        return np.empty((*q.shape[:-1], Dv), q.dtype)
    low = 0 if window is None else max(0, first - window + 1)  # pages in front of the window may be gone
    k = read_rows(k_cache, block_table, low, first + len(q)).reshape(first + len(q) - low, -1, D)
    v = read_rows(v_cache, block_table, low, first + len(q)).reshape(len(k), -1, Dv)
    return round_to(attend(q.astype(np.float64), k, v, first - low, scale, window), q.dtype)


def _paged(
    q: Spec,
    k_pages: Spec,
    v_pages: Spec,
    block_table: Spec,
    lengths: Spec,
    scale: float,
    window: int | None,
    gate: Spec | None,
    starts: Spec | None,
    sinks: Spec | None,
) -> Spec:
    check.axes("[T, H, D]", 3, q=q)
    check.filled(q=q)
    check.dtype("int32", lengths=lengths)
    check.dtype("float32", sinks=sinks)
    check.shape((q.shape[1],), "one per head of q", sinks=sinks)
    B = q.shape[0] if starts is None else sequences(starts)
    check.shape((B,), "one per row of q" if starts is None else "one per sequence", lengths=lengths)
    check_layout(None, block_table, True, B, "lengths")
    _scale_window(scale, window)
    y = Spec((*q.shape[:-1], _heads(q, k_pages, v_pages, 2, ("k_pages", "v_pages"))), q.dtype)
    check.alike(q=q, gate=gate)
    check.shape(y.shape, "as the result", gate=gate)
    return y


def _check_paged(
    q: Array, k_pages: Array, block_table: Array, lengths: Array, window: int | None, starts: Array | None
) -> None:
    room = capacity(k_pages, None, block_table)
    check.in_range("lengths", lengths, 0, room + 1, f"{room} positions in block_table")
    if starts is None:
        check_read(k_pages, None, block_table, _spans(lengths, window))
    else:
        check_read(k_pages, None, block_table, run_spans(starts, lengths, len(q), window))


@op(infer=_paged, check=_check_paged)
def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    lengths: Array,
    scale: float,
    window: int | None = None,
    gate: Array | None = None,
    starts: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    """`attention_decode` of B sequences over shared pages, and with a gate `sigmoid_gate` of what it gives.

    q [B, H, D], k_pages [P, page, Hkv · D], v_pages [P, page, Hkv · Dv], block_table int32 [B, n], lengths int32 [B]
    (the new token counted), gate [B, H, Dv] → [B, H, Dv]. Only pages inside the window are read. With starts int32
    [B + 1] q and gate have T rows, the runs of B sequences (see ragged.py); each row sees what comes up to itself.
    sinks float32 [H]: a score of each head that takes part in the sum of its softmax and has no value.
    """
    D, Dv = q.shape[-1], _value_width(q, k_pages, v_pages, 2)
    if starts is None:
        rows = _decode_rows(q, k_pages, v_pages, lengths, scale, window, block_table=block_table, sinks=sinks)
        y = round_to(np.array(rows).reshape(*q.shape[:-1], Dv), q.dtype)
        return y if gate is None else sigmoid_gate.body(y, gate)
    y = np.zeros((*q.shape[:-1], Dv))
    for b, low, high in runs(starts):
        end = int(lengths[b])
        first = end - (high - low)
        seen = 0 if window is None else max(0, first - window + 1)
        k = read_rows(k_pages, block_table[b], seen, end).reshape(end - seen, -1, D)
        v = read_rows(v_pages, block_table[b], seen, end).reshape(end - seen, -1, Dv)
        y[low:high] = attend(q[low:high].astype(np.float64), k, v, first - seen, scale, window, sinks)
    y = round_to(y, q.dtype)
    return y if gate is None else sigmoid_gate.body(y, gate)
