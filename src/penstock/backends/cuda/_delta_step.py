"""A gated delta net's step, all between the projections of a layer for one token of each sequence.

In one launch every program owns the state of a head and convolves its own channels of v and, beside the GROUP − 1
other programs of that key head, those of q and k. In two launches `mix` convolves, and the state is asked for before
it has ended. Which of them, by rows: DELTA_STEP in `_tuning.py`.
"""

import functools
from collections import namedtuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._launch import pdl_options, prefetch_lines, sigmoid, silu
from penstock.backends.cuda._recurrence import gates_of, moved_on, token_of
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import DELTA_HINTS, DELTA_STEP, DeltaStep
from penstock.ops.op import deterministic

# Numbers from one row to the next in what comes from the projections of a layer, which may be columns of one product.
RowSteps = namedtuple("RowSteps", "x alpha beta")

# -- gates -----------------------------------------------------------------------------------------------------------


@triton.jit
def exp_accurate(x):
    """exp of float32 x <= 88 within 2 ulp: tl.exp, whose error grows with |x|, only of what is left beside a power of
    two; 0 from -126 ln 2 on.
    """
    n = tl.floor(tl.maximum(x, -88.0) * 1.4426950408889634 + 0.5)
    rest = (x - n * 0.693359375) + n * 2.12194440054690583e-4
    return tl.where(x < -87.0, 0.0, tl.exp(rest) * tl.exp2(n))


@triton.jit
def softplus(z):
    """max(z, 0) + log1p(exp(-|z|)) of float32; log1p(e) = 2 atanh(e / (2 + e)) by its series, s <= 1/3."""
    e = exp_accurate(-tl.abs(z))
    s = e / (2.0 + e)
    q = s * s
    series = 0.2 + q * (0.14285715 + q * (0.11111111 + q * (0.09090909 + q * (0.07692308 + q * 0.06666667))))
    return tl.maximum(z, 0.0) + 2.0 * s * (1.0 + q * (0.33333334 + q * series))


@triton.jit
def decay(alpha, A_log, dt_bias):
    """exp(−exp(A_log) · softplus(alpha + dt_bias)) of float32."""
    return exp_accurate(-exp_accurate(A_log) * softplus(alpha + dt_bias))


# -- convolution -----------------------------------------------------------------------------------------------------


@triton.jit
def _rows_of(x_ptr, kept_ptr, c, live, moved, C, W: tl.constexpr):
    """The rows that a convolution reads of channels c: W − 1 that are kept, 0 where not moved, and x."""
    rows = ()
    for j in tl.static_range(W - 1):
        rows += (tl.load(kept_ptr + j * C + c, mask=moved, other=0.0),)
    return rows + (tl.load(x_ptr + c, mask=live, other=0.0),)  # noqa: RUF005  (Triton knows no other way)


@triton.jit
def _taps_of(weight_ptr, c, live, W: tl.constexpr):
    """The weights of channels c for each of W rows."""
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.load(weight_ptr + c * W + j, mask=live, other=0.0),)
    return taps


@triton.jit
def _convolved(rows, taps, W: tl.constexpr):
    """silu(conv1d) of the last row, rounded to its dtype, in float32."""
    total = tl.zeros(rows[0].shape, tl.float32)
    for j in tl.static_range(W):
        total = tl.fma(rows[j].to(tl.float32), taps[j].to(tl.float32), total)
    return rounded(total / (1.0 + tl.exp(-total)), rows[W - 1].dtype).to(tl.float32)


@triton.jit
def _shift(rows, kept_ptr, c, moved, C, W: tl.constexpr):
    """The rows kept of channels c move on by the last one."""
    for j in tl.static_range(1, W):
        tl.store(kept_ptr + (j - 1) * C + c, rows[j].to(kept_ptr.dtype.element_ty), mask=moved)


@triton.jit
def _convolved_here(x_ptr, kept_ptr, weight_ptr, c, live, C, W: tl.constexpr):
    """`_convolved` of channels c that all have kept rows, a row and its weights at a time."""
    total = tl.zeros(c.shape, tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(weight_ptr + c * W + j, mask=live, other=0.0).to(tl.float32)
        if j < W - 1:
            x = tl.load(kept_ptr + j * C + c, mask=live, other=0.0)
        else:
            x = tl.load(x_ptr + c, mask=live, other=0.0)
        total = tl.fma(x.to(tl.float32), tap, total)
    return rounded(total / (1.0 + tl.exp(-total)), x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _shift_here(x_ptr, kept_ptr, c, moved, C, W: tl.constexpr):
    """`_shift` of rows that are read again: no register holds them meanwhile."""
    for j in tl.static_range(1, W):
        if j < W - 1:
            x = tl.load(kept_ptr + j * C + c, mask=moved, other=0.0)
        else:
            x = tl.load(x_ptr + c, mask=moved, other=0.0)
        tl.store(kept_ptr + (j - 1) * C + c, x.to(kept_ptr.dtype.element_ty), mask=moved)


@triton.jit
def _unit(y, eps, dtype: tl.constexpr):
    """A head of q or k divided by its length and rounded, in float32."""
    return rounded(y / tl.sqrt_rn(tl.sum(y * y, axis=0) + eps), dtype).to(tl.float32)


@triton.jit
def _unit_query(y, Dk, eps, dtype: tl.constexpr):
    """The same of q, by sqrt(Dk) too."""
    length = tl.sqrt_rn(tl.sum(y * y, axis=0) + eps)
    return rounded(y / length * (1.0 / tl.sqrt_rn(tl.cast(Dk, tl.float32))), dtype).to(tl.float32)


# mix      y = silu(conv1d(x)) of a row, its q and k heads divided by their lengths (q by sqrt(Dk) too); the rows kept
#          for the convolution move on; g and b as in gdn_decay_beta
# shapes   x, y [B, C], C = 2 Hk Dk + Hv Dv; kept [S, depth, C], its first W - 1 rows; weight [C, W]; alpha, beta, g,
#          b [B, Hv]; slots [B]; where CHANNELS alpha, g [B, Hv, Dk]; rows of x, alpha and beta `steps` apart
# grid     (B, 2 Hk + Hv): one program owns a head of q, k or v; those of v have the gates of their head
# bytes    B * C * (2 + 2 * (W - 1)) * itemsize and the weight
# limits   a head is at most 16384 wide
#
# PDL: weights and kept rows come to the L2 cache before it waits; what it reads of them it reads after that, all at
# once: kept rows from the slot that it saw before, and again if another one is there by then.
@triton.jit(do_not_specialize=["slots"])
def _mix_kernel(
    x_ptr, kept_ptr, weight_ptr, alpha_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, slots_ptr, y_ptr, g_ptr, b_ptr,
    slots, depth, steps, Hk, Hv, Dk, Dv, eps, W: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = part - 2 * Hk  # of v if not negative
    i = tl.arange(0, BLOCK)
    wide = tl.where(head < 0, Dk, Dv)
    first = tl.where(head < 0, part * Dk, 2 * Hk * Dk + head * Dv)
    C = 2 * Hk * Dk + Hv * Dv
    c = first + i
    live = i < wide
    seen = row * 0 - 1
    if PDL:
        prefetch_lines(weight_ptr + first * W, wide * W, BLOCK * W)
        seen = tl.load(slots_ptr + row).to(tl.int64)
        if (seen >= 0) & (seen < slots):
            for j in tl.static_range(W - 1):
                prefetch_lines(kept_ptr + (seen * depth + j) * C + first, wide, BLOCK)
        else:
            seen = row * 0 - 1
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row, cache_modifier=".cg").to(tl.int64)
    x_ptr += row * steps.x
    rows = _rows_of(x_ptr, kept_ptr + seen * depth * C, c, live, i < tl.where(seen >= 0, wide, 0), C, W)
    taps = _taps_of(weight_ptr, c, live, W)
    own = tl.maximum(head, 0)
    at = row * Hv + own
    alpha_ptr += row * steps.alpha
    A, beta = tl.load(A_log_ptr + own).to(tl.float32), tl.load(beta_ptr + row * steps.beta + own).to(tl.float32)
    if CHANNELS:
        bias = tl.load(dt_bias_ptr + own * Dk + i, mask=i < Dk, other=0.0).to(tl.float32)
        alpha = tl.load(alpha_ptr + own * Dk + i, mask=i < Dk, other=0.0).to(tl.float32)
    else:
        bias, alpha = tl.load(dt_bias_ptr + own).to(tl.float32), tl.load(alpha_ptr + own).to(tl.float32)
    active = (slot >= 0) & (slot < slots)
    moved = i < tl.where(active, wide, 0)
    if slot != seen:
        rows = _rows_of(x_ptr, kept_ptr + slot * depth * C, c, live, moved, C, W)
    y = _convolved(rows, taps, W)
    _shift(rows, kept_ptr + slot * depth * C, c, moved, C, W)
    if part < Hk:
        y = _unit_query(y, Dk, eps, dtype)
    elif head < 0:
        y = _unit(y, eps, dtype)
    tl.store(y_ptr + row * C + c, rounded(tl.where(active, y, 0.0), dtype), mask=live)
    if head >= 0:
        if CHANNELS:
            tl.store(g_ptr + at * Dk + i, decay(alpha, A, bias), mask=i < Dk)
        else:
            tl.store(g_ptr + at, decay(alpha, A, bias))
        tl.store(b_ptr + at, sigmoid(beta))


# -- the state -------------------------------------------------------------------------------------------------------


@triton.jit
def _gate(z, ACT: tl.constexpr):
    if ACT == "sigmoid":
        y = sigmoid(z)
    else:
        y = silu(z)
    return y


@triton.jit
def _advance(S, q, k, kq, v, g, b, CHANNELS: tl.constexpr):
    """The state [WIDE, ROWS, LINE] after a token and its output; y = S q as g (S q) + d (k.q) of the old S.

    A line has 128 bytes of a row and a warp 4 rows in 8 lanes each: a sum over columns takes 3 shuffles for 4 rows. k.q
    comes from elsewhere: by itself the product here would get another layout, and the state with it.
    """
    if CHANNELS:
        S *= g
        g = 1.0
    known = tl.sum(tl.sum(S * k, axis=0), axis=1)
    read = tl.sum(tl.sum(S * q, axis=0), axis=1)
    d = (v - g * known) * b
    return g * S + d[None, :, None] * k, g * read + d * kq


@triton.jit
def _row(x, number: tl.constexpr):
    """x[number] of x [N, M]."""
    if x.shape[0] == 1:
        y = tl.reshape(x, (x.shape[1],))
    else:
        y = tl.sum(tl.where(tl.arange(0, x.shape[0])[:, None] == number, x, 0.0), axis=0)
    return y


@triton.jit
def _load_part(tile, inside, EXACT: tl.constexpr, HINT: tl.constexpr):
    """Value rows of a state; where EXACT all of the tile is inside."""
    if EXACT:
        S = tl.load(tile, eviction_policy=HINT)
    else:
        S = tl.load(tile, mask=inside, other=0.0, eviction_policy=HINT)
    return S


@triton.jit
def _store_part(tile, S, inside, EXACT: tl.constexpr, HINT: tl.constexpr):
    S = rounded(S, tile.dtype.element_ty)
    if EXACT:
        tl.store(tile, S, eviction_policy=HINT)
    else:
        tl.store(tile, S, mask=inside, eviction_policy=HINT)


# step      silu(conv1d(x)) of a head's channels, q and k divided by their lengths, g and b (as `mix`), `recurrence` of
#           one token and, of its y rounded, out = y * rinv(y) * act(z) * norm
# shapes    as in `mix` and `recurrence`; z, out [B, Hv, Dv], rows of z z_step apart; norm [Dv]; arrived int32 [S, Hk],
#           0 before and after
# grid      (B * Hv,): one program owns the state of a head, PARTS * ROWS value rows, ROWS at a time and the next ones
#           under way
# bytes     2 * B * Hv * Dv * Dk * itemsize for the state, read and written once, and those of `mix`
# limits    Dv * Dk, each up to a power of two, at most 16384: the state lies in the registers of a program
#
# The rows kept of q and k are read by the GROUP programs of a key head. Which of them is the last to have read them,
# it finds out by counting (`arrived`), and that one moves them on: no program waits for another.
# PDL: values are read after the wait, since the kernel before may be one that wrote them or that did not wait itself;
# what is likely needed is asked for before, into the L2 cache.
@triton.jit(do_not_specialize=["slots"])
def _step_kernel(
    x_ptr, kept_ptr, weight_ptr, alpha_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, slots_ptr, arrived_ptr, state_ptr,
    z_ptr, norm_ptr, out_ptr, slots, depth, steps, z_step, unit_eps, eps,
    Hk: tl.constexpr, Hv: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, W: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, LINE: tl.constexpr,
    LOAD: tl.constexpr, STORE: tl.constexpr, PREFETCH: tl.constexpr, CHANNELS: tl.constexpr, ACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = out_ptr.dtype.element_ty
    DK: tl.constexpr = WIDE * LINE
    C: tl.constexpr = 2 * Hk * Dk + Hv * Dv
    GROUP: tl.constexpr = Hv // Hk
    EXACT: tl.constexpr = Dk == WIDE * LINE and Dv == PARTS * ROWS
    token = (tl.program_id(0) // Hv).to(tl.int64)
    head = tl.program_id(0) % Hv
    key = head // GROUP
    v_first = 2 * Hk * Dk + head * Dv
    if PDL:
        if PREFETCH:
            slot = tl.load(slots_ptr + token).to(tl.int64)
            if (slot >= 0) & (slot < slots):
                prefetch_lines(state_ptr + (slot * Hv + head) * Dv * Dk, Dv * Dk, PARTS * ROWS * DK)
                for j in tl.static_range(W - 1):
                    row_ptr = kept_ptr + (slot * depth + j) * C
                    prefetch_lines(row_ptr + key * Dk, Dk, DK)
                    prefetch_lines(row_ptr + (Hk + key) * Dk, Dk, DK)
                    prefetch_lines(row_ptr + v_first, Dv, PARTS * ROWS)
            prefetch_lines(weight_ptr + key * Dk * W, Dk * W, DK * W)
            prefetch_lines(weight_ptr + (Hk + key) * Dk * W, Dk * W, DK * W)
            prefetch_lines(weight_ptr + v_first * W, Dv * W, PARTS * ROWS * W)
        gdc_wait()
        gdc_launch_dependents()

    slot = tl.load(slots_ptr + token).to(tl.int64)
    at = token * Hv + head
    value = tl.arange(0, PARTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    if (slot < 0) | (slot >= slots):
        tl.store(out_ptr + at * Dv + value, tl.zeros((PARTS, ROWS), kind), mask=value < Dv)
        return
    rows = tl.arange(0, ROWS)[None, :, None]
    cols = LINE * tl.arange(0, WIDE)[:, None, None] + tl.arange(0, LINE)[None, None, :]
    tile = state_ptr + (slot * Hv + head) * Dv * Dk + (rows * Dk + cols)
    S = _load_part(tile, (rows < Dv) & (cols < Dk), EXACT, LOAD)
    z = tl.load(z_ptr + token * z_step + head * Dv + value, mask=value < Dv, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + value, mask=value < Dv, other=0.0).to(tl.float32)

    x_ptr += token * steps.x
    alpha_ptr += token * steps.alpha
    kept_ptr += slot * depth * C
    i = tl.arange(0, DK)
    c = key * Dk + i
    last = slot >= 0
    A = tl.load(A_log_ptr + head).to(tl.float32)
    if CHANNELS:
        alpha = tl.load(alpha_ptr + head * Dk + i, mask=i < Dk, other=0.0).to(tl.float32)
        g = decay(alpha, A, tl.load(dt_bias_ptr + head * Dk + i, mask=i < Dk, other=0.0).to(tl.float32))
        g = tl.reshape(g, (WIDE, LINE))[:, None, :]
    else:
        alpha = tl.load(alpha_ptr + head).to(tl.float32)
        g = decay(alpha, A, tl.load(dt_bias_ptr + head).to(tl.float32))
    b = sigmoid(tl.load(beta_ptr + token * steps.beta + head).to(tl.float32))
    q = _convolved_here(x_ptr, kept_ptr, weight_ptr, c, i < Dk, C, W)
    k = _convolved_here(x_ptr, kept_ptr, weight_ptr, Hk * Dk + c, i < Dk, C, W)
    v = _convolved_here(x_ptr, kept_ptr, weight_ptr, v_first + value, value < Dv, C, W)
    q, k = _unit_query(q, Dk, unit_eps, kind), _unit(k, unit_eps, kind)
    if GROUP > 1:  # behind the sums above, for which every thread has what it read: no fence waits for the state
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + slot * Hk + key, 1, sem="relaxed") == GROUP - 1
    kq = tl.sum(k * q, axis=0)
    q, k = tl.reshape(q, (WIDE, LINE))[:, None, :], tl.reshape(k, (WIDE, LINE))[:, None, :]

    y_all = tl.zeros((PARTS, ROWS), tl.float32)
    for part in tl.static_range(PARTS):
        S_next = S
        if part + 1 < PARTS:
            inside = (rows + (part + 1) * ROWS < Dv) & (cols < Dk)
            S_next = _load_part(tile + (part + 1) * ROWS * Dk, inside, EXACT, LOAD)
        S, y = _advance(S.to(tl.float32), q, k, kq, _row(v, part), g, b, CHANNELS)
        inside = (rows + part * ROWS < Dv) & (cols < Dk)
        _store_part(tile + part * ROWS * Dk, S, inside, EXACT, STORE)
        y = rounded(y, kind).to(tl.float32)
        y_all = tl.where(tl.arange(0, PARTS)[:, None] == part, y[None, :], y_all)
        S = S_next
    length = tl.sum(tl.sum(y_all * y_all, axis=1), axis=0)
    y_all *= tl.rsqrt(length / Dv + eps) * _gate(z, ACT) * norm
    tl.store(out_ptr + at * Dv + value, rounded(y_all, kind), mask=value < Dv)
    # Behind the sum above: all rows kept of v have been read.
    row = tl.arange(0, PARTS * ROWS)
    _shift_here(x_ptr, kept_ptr, v_first + row, row < Dv, C, W)
    if last:
        _shift_here(x_ptr, kept_ptr, c, i < Dk, C, W)
        _shift_here(x_ptr, kept_ptr, Hk * Dk + c, i < Dk, C, W)
        if GROUP > 1:
            tl.store(arrived_ptr + slot * Hk + key, 0)


# head      `recurrence` of one token behind `mix` and, of its y rounded, out = y * rinv(y) * act(z) * norm
# shapes    as in `recurrence`; z, out [B, Hv, Dv], rows of z z_step apart; norm [Dv]
# grid      (B, Hv): one program owns the state of a head
# bytes     2 * B * Hv * Dv * Dk * itemsize for the state, read and written once
# limits    Dv * Dk, each up to a power of two, at most 16384: the state lies in the registers of a program
#
# PDL: it starts while `mix` ends, which writes neither state nor z nor slots and by then has seen the end of the kernel
# before itself: so it asks for those before it waits.
@triton.jit
def _head_kernel(
    state_ptr, qkv_ptr, g_ptr, b_ptr, z_ptr, norm_ptr, slots_ptr, out_ptr, slots, z_step, Hk, Hv, Dk, Dv, eps,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, ACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    cols = 32 * tl.arange(0, WIDE)[None, :, None] + tl.arange(0, 32)[None, None, :]
    slot = tl.load(slots_ptr + token).to(tl.int64)
    active = (slot >= 0) & (slot < slots)
    moved = (rows[:, None, None] < tl.where(active, Dv, 0)) & (cols < Dk)
    tile = state_ptr + ((slot * Hv + head) * Dv + rows[:, None, None]) * Dk + cols
    S = tl.load(tile, mask=moved, other=0.0).to(tl.float32)
    at = (token * Hv + head) * Dv + rows
    z = tl.load(z_ptr + token * z_step + head * Dv + rows, mask=rows < Dv, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + rows, mask=rows < Dv, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q, k, v = token_of(qkv_ptr, token, head, rows, cols, Hk, Hv, Dk, Dv, GROUP)
    g, b = gates_of(g_ptr, b_ptr, token * Hv + head, cols, Hv, Dk, CHANNELS)
    S, y = moved_on(S, q, k, v, g, b, state_ptr.dtype.element_ty, CHANNELS)
    tl.store(tile, rounded(S, state_ptr.dtype.element_ty), mask=moved)
    y = rounded(y, kind).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, axis=0) / Dv + eps) * _gate(z, ACT) * weight
    tl.store(out_ptr + at, rounded(tl.where(active, y, 0.0), kind), mask=rows < Dv)


# -- launches --------------------------------------------------------------------------------------------------------


@functools.cache
def _tile(Dk: int, Dv: int, itemsize: int, parts: int, warps: int) -> tuple[dict[str, int], int] | None:
    """Parts, value rows of a part, lines of a row and columns of a line; warps of a program. None: it is too large.

    `parts` and `warps` are those of a head of 128 × 128.
    """
    line = min(128 // itemsize, max(32, triton.next_power_of_2(Dk)))
    rows, wide = triton.next_power_of_2(Dv), triton.next_power_of_2(triton.cdiv(Dk, line))
    size, parts = rows * wide * line, min(parts, rows)
    tile = {"PARTS": parts, "ROWS": rows // parts, "WIDE": wide, "LINE": line}
    return None if size > 16384 else (tile, max(1, warps * size // 16384))


def _choice(B: int) -> DeltaStep:
    """The row of DELTA_STEP for B rows; where bits may not depend on them, that of many."""
    return DELTA_STEP[-1] if deterministic() else next(row for row in DELTA_STEP if row.rows >= B)


@functools.cache
def _arrivals(kept: int, slots: int, Hk: int, device: torch.device) -> torch.Tensor:
    """Zeros int32 [S, Hk] for the rows kept at address `kept`: launches that may run at the same time have others."""
    return torch.zeros((slots, Hk), dtype=torch.int32, device=device)


def takes_steps(Dk: int, Dv: int) -> bool:
    """Whether a program's registers hold the state of a head."""
    return _tile(Dk, Dv, 4, 1, 1) is not None


def row_steps(qkv: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor) -> RowSteps:
    return RowSteps(*(rows.stride(0) for rows in (qkv, alpha, beta)))


def mix(
    qkv, alpha, beta, conv_state, slots, conv_weight, A_log, dt_bias, Hk: int, Hv: int, Dk: int, Dv: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y [B, C] in qkv's dtype, g like alpha and b [B, Hv], float32; the rows kept in conv_state move on."""
    B = len(qkv)
    y = qkv.new_empty(qkv.shape)
    g, b = (qkv.new_empty(like.shape, dtype=torch.float32) for like in (alpha, beta))
    _mix_kernel[(B, 2 * Hk + Hv)](
        qkv, conv_state, conv_weight, alpha, beta, A_log, dt_bias, slots, y, g, b, *conv_state.shape[:2],
        row_steps(qkv, alpha, beta), Hk, Hv, Dk, Dv, 1e-6, W=conv_weight.shape[1],
        BLOCK=triton.next_power_of_2(max(Dk, Dv)), CHANNELS=alpha.ndim == 3, num_warps=1, **pdl_options(),
    )  # fmt: skip
    return y, g, b


def step(
    qkv, z, alpha, beta, conv_state, state, slots, conv_weight, A_log, dt_bias, norm_weight, Hk: int, eps: float,
    act: str, out,
) -> None:  # fmt: skip
    """`gated_delta_step` where `takes_steps`."""
    B, (S, Hv, Dv, Dk) = len(qkv), state.shape
    choice = _choice(B)
    if choice.launches == 2:
        y, g, b = mix(qkv, alpha, beta, conv_state, slots, conv_weight, A_log, dt_bias, Hk, Hv, Dk, Dv)
        rows, wide = triton.next_power_of_2(Dv), triton.next_power_of_2(triton.cdiv(Dk, 32))
        _head_kernel[(B, Hv)](
            state, y, g, b, z, norm_weight, slots, out, S, z.stride(0), Hk, Hv, Dk, Dv, eps, GROUP=Hv // Hk, ROWS=rows,
            WIDE=wide, CHANNELS=alpha.ndim == 3, ACT=act, num_warps=max(1, min(8, rows * wide // 64)), **pdl_options(),
        )  # fmt: skip
        return
    found = _tile(Dk, Dv, state.element_size(), choice.parts, choice.warps)
    assert found is not None
    tile, warps = found
    arrived = _arrivals(conv_state.data_ptr(), S, Hk, conv_state.device) if Hv > Hk else None
    load, store = DELTA_HINTS
    registers = max(choice.registers, 160) if alpha.ndim == 3 else choice.registers  # decays would spill 176 bytes
    _step_kernel[(B * Hv,)](
        qkv, conv_state, conv_weight, alpha, beta, A_log, dt_bias, slots, arrived, state, z, norm_weight, out,
        S, conv_state.shape[1], row_steps(qkv, alpha, beta), z.stride(0), 1e-6, eps, Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv,
        W=conv_weight.shape[1], **tile, LOAD=load, STORE=store, PREFETCH=choice.prefetch, CHANNELS=alpha.ndim == 3,
        ACT=act, num_warps=warps, maxnreg=registers, **pdl_options(),
    )  # fmt: skip
