"""What one call of a model works on, and the caches it reads and writes.

A step is T tokens of B sequences in any mix (see ops/ragged.py). On devices that do not take such yet there are two
kinds: `prefill`, T tokens of one sequence, and `decode`, one token of each of B sequences. Models are written once for
all; the difference is in the ops' arguments and lives here. Axis letters: T tokens, B sequences, P pages, S slots (one
per sequence), H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock import ops
from penstock.ops.array import Array

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
    """Cache of a linear-attention layer: last rows of the convolution [S, W − 1, C], the state [S, Hv, Dv, Dk]."""

    conv: tuple[int, int]
    state: tuple[int, int, int]


Layout = PagedKV | RecurrentState


@dataclass(frozen=True)
class Step:
    """One call. Ragged: tokens, positions, sequence int32 [T], starts [B + 1], lengths, slots [B], tables [B, n] per
    window. Decode, each row a run of its own: tokens, positions, lengths, slots [B], tables [B, n]. Prefill: tokens
    [T], positions a 0-d array (that of the first token, which `start` is on the host), lengths None, slots None and
    `slot` the sequence's, tables [n]. active int32 [T]: negative for a row of no sequence, which chooses no expert;
    None: all rows are of one.
    """

    tokens: Array
    positions: Array
    tables: Mapping[int | None, Array]
    start: int = 0
    slot: int = 0
    slots: Array | None = None
    lengths: Array | None = None
    sequence: Array | None = None
    starts: Array | None = None
    active: Array | None = None
    activations: str = "float32"  # how quantized products round x
    dtype: str = "float32"  # of the residual stream

    @property
    def decoding(self) -> bool:
        return self.slots is not None


def attend(
    step: Step, cache: tuple[Array, Array], q: Array, k: Array, v: Array, scale: float, window: int | None = None
) -> Array:
    """Append k, v [T, Hkv, D] to the cache and attend with q [T, H, D] over it → [T, H, Dv]."""
    ops.kv_pages_append(k, v, *cache, step.tables[window], step.positions, step.sequence)
    return attend_only(step, cache, q, scale, window)


def attend_only(step: Step, cache: tuple[Array, Array], q: Array, scale: float, window: int | None = None) -> Array:
    """Attend with q [T, H, D] over a cache that already holds this step's keys and values → [T, H, Dv]."""
    keys, values = cache
    table = step.tables[window]
    if step.lengths is not None:
        return ops.attention_paged(q, keys, values, table, step.lengths, scale, window, starts=step.starts)
    return ops.attention_prefill(q, keys, values, step.positions, scale, window, block_table=table)


def convolve(step: Step, cache: tuple[Array, Array], x: Array, weight: Array) -> Array:
    """Causal convolution of x [T, C] with what the sequence had before, whose last rows move on."""
    rows = cache[0] if step.decoding else cache[0][step.slot]
    y = ops.conv1d_causal(x, rows, weight, step.slots, step.starts)
    ops.conv1d_state_update(rows, x, step.slots, step.starts)
    return y


def delta_rule(
    step: Step, cache: tuple[Array, Array], qkv: Array, g: Array, b: Array, Hk: int, Hv: int, Dk: int, Dv: int
) -> Array:
    """The gated delta rule from the sequence's state, which moves on → [T, Hv, Dv]."""
    state = cache[1] if step.decoding else cache[1][step.slot]
    return ops.gated_delta_net(state, qkv, g, b, Hk, Hv, Dk, Dv, slots=step.slots, starts=step.starts)


def empty(
    layout: Layout, pages: int, slots: int, dtype: str, zeros: Callable[[tuple[int, ...], str], Array]
) -> tuple[Array, Array]:
    """Arrays of one layer's cache, made by `zeros`. A recurrent state is float32 whatever the activations are."""
    if isinstance(layout, PagedKV):
        return zeros((pages, PAGE, layout.key_width), dtype), zeros((pages, PAGE, layout.value_width), dtype)
    return zeros((slots, *layout.conv), dtype), zeros((slots, *layout.state), "float32")
