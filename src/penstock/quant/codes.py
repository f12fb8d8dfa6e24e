"""Codes in packed words: a row is one little-endian bit stream."""

import functools
import math

import numpy as np

from penstock.dtypes import dtype_name
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.quant.formats import check_bits


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Integer codes `[..., K]` below 2**bits to uint32 `[..., K * bits / 32]`, the inverse of `unpack_codes`.

    A row is one little-endian bit stream: code j occupies the bits from j * bits on, bit i being bit i % 32 of word
    i // 32. Raises InvalidArgument for a code out of range, ShapeError unless K * bits is a multiple of 32.
    """
    check_bits("pack_codes", bits)
    codes = np.asarray(codes)
    if codes.dtype.kind not in "iu":
        raise DTypeError(f"pack_codes: codes has dtype {dtype_name(codes.dtype)}, expected integers")
    if codes.ndim < 1 or codes.shape[-1] < 1 or codes.shape[-1] * bits % 32:
        raise ShapeError(f"pack_codes: codes has shape {codes.shape}, expected K * bits to be a multiple of 32")
    if codes.size and (codes.min() < 0 or codes.max() >> bits):
        raise InvalidArgument(f"pack_codes: codes has {codes.min()} to {codes.max()}, expected 0 to {2**bits - 1}")
    cycle = math.lcm(bits, 32)  # after so many bits a code starts with a word again
    lanes = codes.reshape(*codes.shape[:-1], codes.shape[-1] * bits // cycle, cycle // bits)
    words = np.zeros((*lanes.shape[:-1], cycle // 32), np.uint32)
    for j in range(lanes.shape[-1]):
        word, shift = divmod(j * bits, 32)
        code = lanes[..., j].astype(np.uint32)
        words[..., word] |= code << np.uint32(shift)
        if shift + bits > 32:
            words[..., word + 1] |= code >> np.uint32(32 - shift)
    return words.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 32)


@functools.cache
def _in_bytes(bits: int) -> np.ndarray:
    """The codes in each value of a byte [256], all of a byte as one item."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & 2**bits - 1
    return codes.astype(np.uint8).view(f"u{8 // bits}")[:, 0]


def unpack_codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """uint32 `[..., W]` to codes uint8 `[..., K]`, K = 32 * W / bits, the inverse of `pack_codes`.

    Raises DTypeError for another dtype, ShapeError unless 32 * W is a multiple of bits.
    """
    check_bits("unpack_codes", bits)
    packed = np.asarray(packed)
    if packed.dtype != np.uint32:
        raise DTypeError(f"unpack_codes: packed has dtype {dtype_name(packed.dtype)}, expected uint32")
    if packed.ndim < 1 or packed.shape[-1] < 1 or packed.shape[-1] * 32 % bits:
        raise ShapeError(f"unpack_codes: packed has shape {packed.shape}, expected words that {bits}-bit codes fill")
    if 8 % bits == 0:  # whole codes in a byte
        octets = np.ascontiguousarray(packed, "<u4").view(np.uint8)
        return octets.copy() if bits == 8 else _in_bytes(bits).take(octets).view(np.uint8)
    cycle = math.lcm(bits, 32)
    words = packed.reshape(*packed.shape[:-1], packed.shape[-1] * 32 // cycle, cycle // 32)
    codes = np.empty((*words.shape[:-1], cycle // bits), np.uint8)
    for j in range(codes.shape[-1]):
        word, shift = divmod(j * bits, 32)
        code = words[..., word] >> np.uint32(shift)
        if shift + bits > 32:
            code |= words[..., word + 1] << np.uint32(32 - shift)
        codes[..., j] = code & np.uint32(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 32 // bits)
