"""Rotary tables from the spellings of config.json: which frequencies, and what cosines and sines are multiplied by.

Older files have `rope_theta` and `rope_scaling` (`type` or `rope_type`), newer ones `rope_parameters` with everything
inside. Both are accepted; a kind that is not known is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock import ops
from penstock.errors import CheckpointError
from penstock.models.config import MOST_ROWS, Fields
from penstock.ops.rope import yarn_gain

KINDS = ("default", "linear", "llama3", "yarn", "proportional")


@dataclass(frozen=True)
class Rope:
    """How positions rotate channels: inv_freq float32 [width/2] for the first `width` channels of a head."""

    inv_freq: np.ndarray
    width: int
    mscale: float = 1.0
    score_gain: float = 1.0  # what YaRN multiplies the softmax scale by (models that use mscale_all_dim)


def read_rope(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    parameters: Fields | None = None,
    theta: float | None = None,
    share: float = 1.0,
    whole: bool = False,
) -> Rope:
    """The table of a head of `head_dim` channels; `parameters` overrides `rope_parameters` (one per layer kind).

    theta and share are what a family takes where `rope_theta` and `partial_rotary_factor` are missing. whole: heads of
    the family turn as a whole, `proportional` aside.
    """
    fields.require(head_dim <= MOST_ROWS, f"heads have {head_dim} rotary channels, expected at most {MOST_ROWS}")
    table = parameters or fields.table("rope_parameters", None) or fields.table("rope_scaling", None)
    table = table or Fields({}, fields.where)
    theta = table.number("rope_theta", None, above=0) or fields.number("rope_theta", theta, above=0)
    if theta is None:
        raise fields.error("rope_theta", "a number above 0 (here or in rope_parameters)")
    kind = table.choice("rope_type", (*KINDS, "mrope"), None) or table.choice("type", (*KINDS, "mrope"), "default")
    share = table.number("partial_rotary_factor", None, above=0, most=1) or fields.number(
        "partial_rotary_factor", share, above=0, most=1
    )
    if kind == "proportional":
        factor = table.number("factor", 1.0, above=0)
        return Rope(ops.proportional_inv_freq(head_dim, theta, share, factor), head_dim)
    width = int(head_dim * share)
    fields.require(
        width >= 2 and width % 2 == 0, f"partial_rotary_factor gives {width} rotary channels, expected an even number"
    )
    fields.require(
        not whole or width == head_dim, f"partial_rotary_factor is {share:g}, expected 1: all channels of a head turn"
    )
    if kind == "linear":
        return Rope(ops.rope_inv_freq(width, theta, table.number("factor", above=0)), width)
    if kind == "llama3":
        return Rope(_llama3(table, width, theta), width)
    if kind == "yarn":
        return _yarn(fields, table, width, theta, max_positions)
    return Rope(ops.rope_inv_freq(width, theta), width)


def _llama3(table: Fields, width: int, theta: float) -> np.ndarray:
    """Long waves are divided by `factor`, short ones kept, those between blended by wavelength."""
    factor = table.number("factor", above=0)
    low, high = table.number("low_freq_factor", above=0), table.number("high_freq_factor", above=0)
    original = table.integer("original_max_position_embeddings")
    if high <= low:
        raise table.error("high_freq_factor", f"a number above low_freq_factor ({low:g})")
    freq = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    waves = original * freq / (2 * math.pi)  # how often a channel turns in the original context
    blend = np.clip((waves - low) / (high - low), 0, 1)
    return (freq * (blend + (1 - blend) / factor)).astype(np.float32)


def _yarn(fields: Fields, table: Fields, width: int, theta: float, max_positions: int) -> Rope:
    original = table.integer("original_max_position_embeddings", max_positions)
    factor = table.number("factor", None, above=0) or max_positions / original
    fast, slow = table.number("beta_fast", 32.0, above=0), table.number("beta_slow", 1.0, above=0)
    if slow > fast:
        raise table.error("beta_slow", f"at most beta_fast ({fast:g})")
    mscale, all_dim = table.number("mscale", 0.0), table.number("mscale_all_dim", 0.0)
    gain = table.number("attention_factor", None, above=0)
    if gain is None:
        both = mscale and all_dim
        gain = yarn_gain(factor, mscale) / yarn_gain(factor, all_dim) if both else yarn_gain(factor, 1.0)
    own = yarn_gain(factor, all_dim) if all_dim else 1.0
    score = own * own  # a power of floats raises OverflowError, a product is infinite
    if not math.isfinite(gain) or not math.isfinite(score):
        raise CheckpointError(f"{table.where}: mscale and factor give {gain}, expected a finite gain")
    inv_freq = ops.yarn_inv_freq(width, theta, factor, original, fast, slow, table.boolean("truncate", True))
    return Rope(inv_freq, width, gain, score)
