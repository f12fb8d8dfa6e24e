"""Conversions of the half formats inside kernels, against NumPy's and ml_dtypes' on every pattern that matters."""

import os
import subprocess
import sys

import numpy as np
import pytest

from penstock.backends.cpu import _formats
from penstock.backends.cpu._formats import BFLOAT16, FLOAT16, load_row, store_row
from penstock.backends.cpu.compile import njit
from penstock.dtypes import bfloat16

DTYPES = {FLOAT16: np.dtype(np.float16), BFLOAT16: np.dtype(bfloat16)}
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def widen(bits: np.ndarray, fmt: int) -> np.ndarray:
    out = np.empty(bits.size, np.float32)
    load_row(bits, fmt, out)
    return out


def narrow(values: np.ndarray, fmt: int) -> np.ndarray:
    out = np.empty(values.size, np.uint16)
    store_row(values, fmt, out)
    return out


def hard_numbers(fmt: int) -> np.ndarray:
    """Every half, what lies half way to the next, the float32 on both sides of each, and the extremes of float32."""
    with np.errstate(all="ignore"):
        exact = PATTERNS[: 1 << 15].view(DTYPES[fmt]).astype(np.float32)
        exact = exact[np.isfinite(exact)]
        ties = exact[:-1] + (exact[1:] - exact[:-1]) / 2
        largest = exact[-1] + (exact[-1] - exact[-2]) / 2  # from here on infinity
        middle = np.concatenate([exact, ties, [largest]]).astype(np.float32)
        numbers = [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))]
        some = np.array([0, 1e-45, 1.2e-38, 3.4028235e38, np.inf], np.float32)
        numbers = np.concatenate([*numbers, some])
    return np.concatenate([numbers, -numbers])


@pytest.mark.parametrize("fmt", DTYPES)
def test_every_pattern_is_widened_exactly(fmt):
    want = PATTERNS.view(DTYPES[fmt]).astype(np.float32)
    got = widen(PATTERNS, fmt)
    number = ~np.isnan(want)
    assert (got.view(np.uint32)[number] == want.view(np.uint32)[number]).all()
    assert np.isnan(got[~number]).all()
    assert (np.signbit(got) == np.signbit(want)).all()


@pytest.mark.parametrize("fmt", DTYPES)
def test_rounding_goes_to_nearest_and_ties_to_even(fmt):
    values = hard_numbers(fmt)
    with np.errstate(over="ignore"):
        want = values.astype(DTYPES[fmt]).view(np.uint16)
    assert (narrow(values, fmt) == want).all()


@pytest.mark.parametrize("fmt, quiet", [(FLOAT16, 0x7E00), (BFLOAT16, 0x7FC0)])
def test_nan_is_rounded_to_the_quiet_one_of_its_sign(fmt, quiet):
    payloads = np.array([0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF], np.uint32)
    values = np.concatenate([payloads, payloads | np.uint32(1 << 31)]).view(np.float32)
    assert narrow(values, fmt).tolist() == [quiet] * 5 + [quiet | 0x8000] * 5


def test_integer_arithmetic_gives_the_bits_of_the_instructions():
    """What CPUs without instructions for float16 run."""

    @njit
    def convert(bits, values, wide, halves):
        for i in range(bits.size):
            wide[i] = _formats._widened_half(bits[i])
        for i in range(values.size):
            halves[i] = _formats._rounded_half(values[i])

    values = hard_numbers(FLOAT16)
    wide, halves = np.empty(PATTERNS.size, np.float32), np.empty(values.size, np.uint16)
    convert(PATTERNS, values, wide, halves)
    number = ~np.isnan(wide)
    assert (wide.view(np.uint32)[number] == widen(PATTERNS, FLOAT16).view(np.uint32)[number]).all()
    assert np.isnan(widen(PATTERNS, FLOAT16)[~number]).all()
    assert (halves == narrow(values, FLOAT16)).all()


CHILD = """
import numpy as np
from penstock.backends.cpu import _formats
values = np.float32([1.5, -65519, 65520, 6e-8, np.nan, 1e-3])
halves, back = np.empty(6, np.uint16), np.empty(6, np.float32)
_formats.store_row(values, _formats.FLOAT16, halves)
_formats.load_row(halves, _formats.FLOAT16, back)
print(_formats._to_half is _formats._rounded_half, halves.tolist(), back.tolist())
"""


GENERIC = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


@pytest.mark.parametrize("setting", [{"NUMBA_DISABLE_JIT": "1"}, GENERIC])
def test_a_cpu_without_float16_converts_in_integers(setting, tmp_path):
    env = {**os.environ, **setting, "PENSTOCK_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, check=False)
    halves = "[15872, 64511, 31744, 1, 32256, 5145]"
    back = "[1.5, -65504.0, inf, 5.960464477539063e-08, nan, 0.0010004043579101562]"
    assert done.stdout.strip() == f"True {halves} {back}", done.stderr[-2000:]
