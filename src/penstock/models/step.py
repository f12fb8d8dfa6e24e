"""What one call of a model works on, and the caches it reads and writes.

A step is T tokens of B sequences in any mix (see ops/ragged.py); a step of one token of each sequence says no more than
that. Models are written once for both; the difference is in the ops' arguments and lives here. Axis letters: T tokens,
B sequences, P pages, S slots (one per sequence), H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock import ops
from penstock.errors import InvalidArgument
from penstock.models.split import Mesh
from penstock.ops.array import Array

STREAM = "float32"  # the residual stream's dtype, whatever the activations': routers flip where it is rounded
PAGE = 256  # positions in a page; chunks of a prompt are cut at its multiples, so that a page is written by one chunk


@dataclass(frozen=True)
class PagedKV:
    """Cache of a layer that attends: two arrays of rows per position, in pages [P, PAGE, width].

    Keys and values for attention, or latent and rotary key for MLA. window: positions that are still read, None for
    all; layers of one window share their block tables.
    """

    key_width: int
    value_width: int
    window: int | None = None


@dataclass(frozen=True)
class RecurrentState:
    """Cache of a linear-attention layer: last rows of the convolution [S, W − 1, C], the state [S, Hv, Dv, Dk].

    state: (0, 0, 0) where there is a convolution alone.

    dtype: of the state, whatever the activations are; the rows have theirs. room: tokens of a run that can be kept
    until it is known how many of them count; then there are as many rows more, and gates [S, room, decays + 1, Hv].
    decays: of a head, one or one for each of its Dk channels.
    """

    conv: tuple[int, int]
    state: tuple[int, int, int]
    dtype: str = "float32"
    room: int = 0
    decays: int = 1

    @property
    def conv_rows(self) -> tuple[int, int]:
        """Of a slot, with those of a kept run."""
        return self.conv[0] + self.room, self.conv[1]

    @property
    def gates(self) -> tuple[int, int, int]:
        """Of a slot: decays and strength of the tokens of a kept run."""
        return self.room, self.decays + 1, self.state[0]


Layout = PagedKV | RecurrentState

Cache = tuple[Any, ...]
"""Arrays of one layer: two, and the gates of kept runs where a recurrent state has room for them."""


def with_state_dtype(layouts: Sequence[Layout], dtype: str) -> tuple[Layout, ...]:
    """The layouts with recurrent states of this dtype. Raises InvalidArgument for another than float32 of no states."""
    if dtype != "float32" and not any(isinstance(layout, RecurrentState) and any(layout.state) for layout in layouts):
        raise InvalidArgument(f"load: state_dtype is {dtype!r}, expected 'auto': the model has no recurrent states")
    return tuple(replace(layout, dtype=dtype) if isinstance(layout, RecurrentState) else layout for layout in layouts)


def with_room(layouts: Sequence[Layout], tokens: int) -> tuple[Layout, ...]:
    """The layouts with room for kept runs of so many tokens."""
    return tuple(replace(layout, room=tokens) if isinstance(layout, RecurrentState) else layout for layout in layouts)


@dataclass(frozen=True)
class Step:
    """One call: tokens, positions int32 [T]; of each sequence its length with this step's tokens, its slot, int32 [B],
    and tables int32 [B, n] of its n pages per window. sequence int32 [T] and starts [B + 1] say which rows are whose;
    without them each row is of a sequence of its own. active int32 [T]: negative for a row of no sequence, which
    chooses no expert; None: all rows are of one. keep int32 [B]: 0, or the length of a run whose recurrent states wait
    for `accepted` (see ops/delta.py); accepted int32 [B]: tokens that were accepted of the run kept before this step.
    """

    tokens: Array
    positions: Array
    lengths: Array
    slots: Array
    tables: Mapping[int | None, Array]
    sequence: Array | None = None
    starts: Array | None = None
    active: Array | None = None
    keep: Array | None = None
    accepted: Array | None = None
    activations: str = "float32"  # how quantized products round x
    dtype: str = "float32"  # of activations; the residual stream has STREAM
    mesh: Mesh | None = None  # the model is split over ranks


def attend(
    step: Step, cache: tuple[Array, Array], q: Array, k: Array, v: Array, scale: float, window: int | None = None,
    sinks: Array | None = None,
) -> Array:  # fmt: skip
    """Append k, v [T, Hkv, D] to the cache and attend with q [T, H, D] over it → [T, H, Dv]."""
    ops.kv_pages_append(k, v, *cache, step.tables[window], step.positions, step.sequence)
    return attend_only(step, cache, q, scale, window, sinks)


def attend_only(
    step: Step, cache: tuple[Array, Array], q: Array, scale: float, window: int | None = None,
    sinks: Array | None = None,
) -> Array:  # fmt: skip
    """Attend with q [T, H, D] over a cache that already holds this step's keys and values → [T, H, Dv]."""
    table = step.tables[window]
    return ops.attention_paged(q, *cache, table, step.lengths, scale, window, starts=step.starts, sinks=sinks)


def convolve(step: Step, cache: Cache, x: Array, weight: Array, act: str = "silu") -> Array:
    """Causal convolution of x [T, C] with what the sequence had before, whose last rows move on; those of a kept run
    go behind them.
    """
    y = ops.conv1d_causal(x, cache[0], weight, step.slots, step.starts, act)
    room = len(cache) == 3  # for kept runs
    ops.conv1d_state_update(cache[0], x, step.slots, step.starts, step.keep, weight.shape[1] if room else None)
    return y


def delta_rule(step: Step, cache: Cache, qkv: Array, g: Array, b: Array, Hk: int, Hv: int, Dk: int, Dv: int) -> Array:
    """The gated delta rule from the sequence's state, which moves on unless the run is kept → [T, Hv, Dv]."""
    gates = None if step.keep is None else cache[2]
    where = {"slots": step.slots, "starts": step.starts, "keep": step.keep, "gates": gates}
    return ops.gated_delta_net(cache[1], qkv, g, b, Hk, Hv, Dk, Dv, **where)


def commit_convolution(step: Step, cache: Cache, taps: int) -> None:
    """Moves the rows of a convolution on by the accepted tokens of the run that was kept, where there is no state."""
    assert step.accepted is not None
    ops.conv1d_commit(cache[0], step.slots, step.accepted, taps)


def commit_delta(step: Step, cache: Cache, conv_weight: Array, Hk: int) -> None:
    """Moves the state on by the accepted tokens of the run that was kept."""
    assert step.accepted is not None
    conv_state, state, gates = cache
    ops.delta_commit(conv_state, state, gates, step.slots, step.accepted, conv_weight, Hk)


def empty(
    layout: Layout, pages: int, slots: int, dtype: str, zeros: Callable[[tuple[int, ...], str], Array]
) -> tuple[Array, Array]:
    """Arrays of one layer's cache, made by `zeros`; dtype: of the activations."""
    if isinstance(layout, PagedKV):
        return zeros((pages, PAGE, layout.key_width), dtype), zeros((pages, PAGE, layout.value_width), dtype)
    return zeros((slots, *layout.conv_rows), dtype), zeros((slots, *layout.state), layout.dtype)
