"""Launching attention: decode, prefill and latents over every layout of a cache."""

import functools
import math
from dataclasses import dataclass
from operator import le

import torch
import triton

from penstock.backends.cuda import _tuning
from penstock.backends.cuda._attend_decode import decode_kernel
from penstock.backends.cuda._attend_latent import latent_kernel
from penstock.backends.cuda._attend_prefill import prefill_kernel
from penstock.backends.cuda._attend_ragged import ragged_kernel
from penstock.backends.cuda._attend_tile import (
    CONTIGUOUS,
    EXPANDED,
    LATENT,
    PAGE_PER_ROW,
    PAGE_PER_TILE,
    WHOLE,
    Arrays,
    Constants,
    Heads,
)
from penstock.backends.cuda._combine import accumulate_kernel, combine_kernel
from penstock.backends.cuda._launch import compiled_for, multiprocessors, pdl_options, shared_memory
from penstock.backends.cuda._runs import block_of
from penstock.errors import BackendError
from penstock.ops.op import deterministic


@dataclass(frozen=True)
class Cache:
    """Where the rows of a cache lie: `entries` pages of `page` rows per sequence, numbered by `table` (None: one)."""

    table: torch.Tensor | None
    entries: int
    page: int
    pages: int

    @property
    def capacity(self) -> int:
        return self.entries * self.page

    def layout(self, N: int) -> int:
        """How tiles of N positions find their rows."""
        if self.table is None:
            return CONTIGUOUS.value
        return (PAGE_PER_TILE if self.entries == 1 or self.page % N == 0 else PAGE_PER_ROW).value


def cache_of(cache: torch.Tensor, slots: torch.Tensor | None, block_table: torch.Tensor | None) -> Cache:
    """The layouts of ops/cache.py as one: a slot is a table of one page, a contiguous cache is one page."""
    if block_table is not None:
        return Cache(block_table, block_table.shape[-1], cache.shape[1], cache.shape[0])
    if slots is not None:
        return Cache(slots, 1, cache.shape[1], cache.shape[0])
    return Cache(None, 1, cache.shape[0], 1)


@functools.cache
def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


@functools.cache
def key_parts(width: int) -> tuple[int, int]:
    """A head's width as one or two parts whose powers of two waste least: 192 = 128 + 64, 61 = 61 + 0."""
    whole = _padded(width)
    part = whole // 2
    if width <= 32 or part + _padded(width - part) >= whole:
        return width, 0
    return part, width - part


@functools.cache
def _plan(parts: tuple[int, int, int], itemsize: int, rows: int, latent: bool, shared: int) -> tuple[int, ...]:
    """M, N, warps, stages and BV for padded parts of a key, B and B2, and a value of any width, in `shared` KB."""
    B, B2, width = parts
    BV = _padded(width)
    sizes = (rows, max(B + B2, BV), BV)
    row = next(
        row for row in _tuning.ATTEND
        if row.exact == (itemsize == 4) and row.latent in (None, latent)
        and all(map(le, sizes, row[2:5]))
    )  # fmt: skip
    found = row.sizes(shared)
    if len(found) > 4 and width % found[4]:  # values that are not cut evenly
        found = row.medium
    return (*found, BV)[:5]


@functools.cache
def _spread(
    plan: tuple[int, ...], rows: int, programs: int, positions: int, wanted: int, latent: bool
) -> tuple[int, ...]:
    """The plan for one token of each sequence with smaller tiles, where a launch has fewer than run at once.

    programs: sequences × key-value heads.
    """
    M, N, *_, BV = plan
    short, *latents = _tuning.ATTEND_FEW_LATENT
    if short < M:
        few = latent and 2 * programs * -(-rows // M) * (positions // N) < wanted
        return (short, N, *latents, BV) if few else plan
    least, *others = _tuning.ATTEND_FEW
    while least < N and programs * (positions // N) < wanted:
        N //= 2
    return plan if plan[1] == N else (M, N, *others, BV)


@functools.cache
def _splits(programs: int, positions: int, wanted: int, N: int) -> int:
    """Parts of a range of positions, so that a launch of few programs has as many as are wanted."""
    return max(1, min(positions // N, wanted // programs, _tuning.ATTEND_SPLITS))


@functools.cache
def _combined(splits: int, width: int) -> dict[str, int]:
    """The launch of `combine`: splits up to a power of two, columns of a program."""
    S = triton.next_power_of_2(splits)
    numbers, warps = _tuning.COMBINE
    return {"S": S, "BLOCK": max(16, min(_padded(width), numbers // S)), "num_warps": warps}


def _sizes(
    q: torch.Tensor, C: Constants, cache: Cache, number: torch.Tensor | int, shift: int, window: int | None,
    sizes: tuple[int, int, int, int, int], steps: bool,
) -> tuple[tuple[int, ...], int, int]:  # fmt: skip
    """M, N, warps, stages and BV of a launch, tiles of rows of a sequence, splits of the positions."""
    B, T, H, heads, WV = sizes
    group, fixed, latent = H // heads, deterministic(), LATENT.value == C.KEYS
    itemsize = 4 if C.EXACT else q.element_size()
    parts = (C.B, C.B2 if C.W2 else 0, WV)
    plan = _plan(parts, itemsize, 1 << 30 if fixed and steps else T * group, latent, shared_memory(q))
    at_once = next(n for most, n in _tuning.ATTEND_AT_ONCE if max(C.B, C.B2, C.BV) <= most) if T == 1 else 1
    wanted = multiprocessors(q) * at_once
    # In fixed order, what a row is cut into must not depend on the other rows, nor on the room they need.
    known = min(cache.capacity, number + shift + T) if isinstance(number, int) else cache.capacity
    positions = 1 << 30 if fixed else known
    if T == 1 and itemsize == 2 and not fixed:
        in_sight = positions if window is None else min(positions, window + plan[1])
        plan = _spread(plan, group, B * heads, in_sight, wanted, latent)
    M, N, *_ = plan
    if window is not None:
        positions = min(positions, window + N)  # in sight of the rows of a tile
    tiles = -(-T * group // M)
    programs = tiles * heads if fixed else B * tiles * heads
    splits = 1 if fixed and steps else _splits(programs, positions, wanted, N)
    return plan, tiles, min(splits, 16) if C.EXACT else splits  # 16: one program merges them


def _constants(
    q: torch.Tensor, q2: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, heads: tuple[int, int, int],
    window: int | None,
) -> Constants:  # fmt: skip
    """What a launch is compiled for but for its tiles. heads: of queries, of keys and values, width of a value."""
    H, Hkv, WV = heads
    keys = WHOLE if q2 is None else LATENT if v is k else EXPANDED
    W, W2 = (q.shape[-1], q2.shape[-1]) if q2 is not None else key_parts(q.shape[-1])
    if W + W2 > 576 or WV > 512:
        raise BackendError(f"attention: keys are {W + W2} and values {WV} wide, expected at most 576 and 512 on cuda")
    return Constants(
        GROUP=H // Hkv, W=W, W2=W2, WV=WV, B=_padded(W), B2=_padded(W2), BV=_padded(WV), M=0, N=0, COUNTED=2,
        KEYS=keys.value, LAYOUT=0, WINDOWED=window is not None, SPLIT=False, EXACT=False, ONE=False, BY_ROW=False,
    )  # fmt: skip


def attend(
    q: torch.Tensor,
    q2: torch.Tensor | None,
    k: torch.Tensor,
    k2: torch.Tensor | None,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cache: Cache,
    number: torch.Tensor | int,
    shift: int,
    scale: float,
    window: int | None,
    sizes: tuple[int, int, int, int, int],
    steps: bool = False,
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool] | None = None,
    gate: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    short: int = 0,
) -> None:
    """Launch the attention of these keys and, if the positions were split, what puts the parts together.

    sizes: sequences B, tokens T of each, query heads, key-value heads, width of a value. q2 and k2: the second part of
    the keys if it has arrays of its own (with v = k: latents). steps: T may be any number, so `deterministic` forbids
    to look at it. state: instead of writing `out`, merge into float32 (running max, denominator, accumulator, first),
    with the weights of the values in float32 as well. gate: like out, which is multiplied by its sigmoid. starts: of
    sequences whose run is one row, which is where starts says; T is 1, and rows of other runs stay as they are. short:
    with starts, of all rows of runs of up to so many, each as if it were its sequence's only one. sinks [H]: scores of
    heads without a value.
    """
    B, T, H, heads, WV = sizes
    if scale < 0:
        q, q2, scale = -q, None if q2 is None else -q2, -scale
    if window is not None and window >= cache.capacity:
        window = None
    counted = 0 if isinstance(number, int) else 1 + number.ndim
    C = _constants(q, q2, k, v, (H, heads, WV), window)._replace(COUNTED=counted, EXACT=state is not None, ONE=T == 1)
    C = C._replace(BY_ROW=short > 0)
    keys = C.KEYS
    (M, N, warps, stages, BV), tiles, splits = _sizes(q, C, cache, number, shift, window, sizes, steps)
    split = splits > 1 or state is not None
    C = C._replace(BV=BV, M=M, N=N, LAYOUT=cache.layout(N), SPLIT=split)
    part, stats = out, out
    if split:
        lines = (len(q) if short else B * T) * H * splits
        part = torch.empty(lines * WV, dtype=torch.float32, device=q.device)
        stats = torch.empty(lines * 2, dtype=torch.float32, device=q.device)
    table = q if cache.table is None else cache.table
    second = (q if q2 is None else q2, k, k if k2 is None else k2)
    arrays = Arrays(q, *second, v, table, None if split else gate, part, stats, starts, sinks)
    model = Heads(heads, cache.page, scale * math.log2(math.e) or 1e-30)  # 0 · −inf is not −inf
    rows = (cache.entries, cache.pages, cache.capacity)
    each = max(1, short)  # programs for each row of a run
    grid, options = (B * each * tiles * splits * heads * -(-WV // BV),), {"num_warps": warps, "num_stages": stages}
    if T == 1 and keys != LATENT.value:
        decode_kernel[grid](
            arrays, number, *rows, window or 0, splits, model, C=compiled_for(C), SHIFT=shift, SHORT=short, **options,
            **pdl_options(),
        )  # fmt: skip
    else:
        kernel = latent_kernel if keys == LATENT.value else prefill_kernel
        assert shift == (-T if keys == LATENT.value else 0)
        kernel[grid](
            arrays, number, T, *rows, window or 0, tiles, splits, model, C=compiled_for(C), **options, **pdl_options()
        )
    if state is not None:
        top, total, acc, first = state
        S = triton.next_power_of_2(splits)
        accumulate_kernel[(H,)](part, stats, top, total, acc, splits, WV, S=S, BLOCK=_padded(WV), FIRST=first)
    elif split:
        tile = _combined(splits, WV)
        combine_kernel[(B * each * T * H, -(-WV // tile["BLOCK"]))](
            part, stats, gate, number if counted and T == 1 else None, starts, out, splits, cache.capacity,
            cache.capacity if window is None else window, H, WV, MORE=shift + 1, N=N, EACH=counted - 1, SHORT=short,
            **tile, **pdl_options(),
        )  # fmt: skip


ANSWER_ROWS = 8  # of a run up to which each is attended to as a step of decoding; of latents one
_ANY = (1 << 31) - 1
ALL_RUNS = (0, _ANY, _ANY)  # limits of a launch that leaves none out


def attend_runs(
    q: torch.Tensor,
    q2: torch.Tensor | None,
    k: torch.Tensor,
    k2: torch.Tensor | None,
    v: torch.Tensor,
    out: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    window: int | None,
    heads: tuple[int, int, int],
    gate: torch.Tensor | None = None,
    longest: int | None = None,
    up_to: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """The attention of the runs of sequences: `attend` of those of ANSWER_ROWS (of latents: one row), tiles of the rows
    of all others.

    heads: of queries, of keys and values, width of a value. longest, up_to: runs of more rows than `longest` that end
    at up to `up_to` positions are left out. Those and the rows of no sequence are 0.
    """
    B = len(lengths)
    short = ANSWER_ROWS if q2 is None and longest is None else 0
    few = short or (0 if longest is not None and longest < 1 else 1)
    if few and B:
        sizes, more = (B, 1, *heads), {"gate": gate, "starts": starts, "sinks": sinks}
        attend(q, q2, k, k2, v, out, cache, lengths, -1, scale, window, sizes, **more, short=short)
    limits = (few, _ANY if longest is None else longest, _ANY if up_to is None else up_to)
    attend_tiles(q, q2, k, k2, v, out, cache, lengths, starts, scale, window, heads, gate, limits, len(q), sinks)


def attend_tiles(
    q: torch.Tensor,
    q2: torch.Tensor | None,
    k: torch.Tensor,
    k2: torch.Tensor | None,
    v: torch.Tensor,
    out: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    window: int | None,
    heads: tuple[int, int, int],
    gate: torch.Tensor | None,
    limits: tuple[int, int, int],
    rows: int,
    sinks: torch.Tensor | None = None,
) -> None:
    """One launch of `ragged`: limits are its above, longest and up_to; rows where those of no sequence end."""
    if scale < 0:
        q, q2, scale = -q, None if q2 is None else -q2, -scale
    if window is not None and window >= cache.capacity:
        window = None
    _, Hkv, WV = heads
    C = _constants(q, q2, k, v, heads, window)
    # By the widths alone: what a row gives does not depend on the rows beside it.
    parts = (C.B, C.B2 if C.W2 else 0, WV)
    M, N, warps, stages, BV = _plan(
        parts, q.element_size(), 1 << 30, LATENT.value == C.KEYS, shared_memory(q)
    )  # fmt: skip
    C = C._replace(BV=BV, M=M, N=N, LAYOUT=cache.layout(N))
    B = len(lengths)
    tiles = len(q) * C.GROUP // M + B + 1
    table = q if cache.table is None else cache.table
    arrays = Arrays(q, q if q2 is None else q2, k, k if k2 is None else k2, v, table, gate, out, out, starts, sinks)
    model = Heads(Hkv, cache.page, scale * math.log2(math.e) or 1e-30)
    ragged_kernel[(tiles * Hkv * -(-WV // BV),)](
        arrays, lengths, rows, B, *limits, cache.entries, cache.pages, cache.capacity, window or 0, tiles, 1, model,
        C=compiled_for(C), SEQUENCES=block_of(B), num_warps=warps, num_stages=stages, **pdl_options(),
    )  # fmt: skip
