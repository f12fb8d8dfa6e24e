"""GGUF blocks as a GPU reads them: the bits of all blocks of a row by what they mean, each meaning a plane of its own.

Blocks have 17 to 210 bytes, so that nothing in them is aligned and neighbours are far apart. Here the fields of a block
move to up to five arrays `[..., N, blocks of a row · share of a block]`; no field changes, so nothing is rounded, and
the way back gives the same bytes:

low    int32: the lower 2 or 4 bits of codes, code j of a row at bits j · bits of the row, as in packed words of MLX
high   int32: the upper 1 or 2 bits of codes. A word has those of several words of `low`: in its lower half those of the
       lower halves of these, word after word, in its upper half those of the upper halves
sub    uint8: scales (and minima) of groups
more   uint8: what does not fit into a byte of these
top    float16 or int32 (two float16, the scale first): what scales (and minima) of a block are multiplied by

type          low, high  group  sub                         more
Q2_K          2, 0       16     4 bits, minimum 4 bits      none
Q3_K          2, 1       16     lower 4 bits of two groups  upper 2 bits of four groups
Q4_K, Q5_K    4, 0 or 1  32     6 bits, minimum lower 2     upper 4 bits of the minima of two groups
Q6_K          4, 2       16     8 bits                      none
IQ4_XS        4, 0       32     6 bits, 2 bits of nothing   none
Q5_0, Q5_1    4, 1       32     none                        none
IQ4_NL        4, 0       32     none                        none
MXFP4         4, 0       32     8 bits                      none

All have the bytes of their blocks but IQ4_XS, which has 138 for 136.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

PLANES = ("low", "high", "sub", "more", "top")


class Moves(NamedTuple):
    """Where the bytes of blocks come from: byte i is the sum over f of (source[from[i, f]] >> right & mask) << left.

    All are int32 [bytes, fields], of NumPy or torch.
    """

    source: Any
    right: Any
    mask: Any
    left: Any


@dataclass(frozen=True)
class Plane:
    """A plane of a type. bits: for each bit of a block's share, lowest first, its place in the block; -1: always 0."""

    name: str
    dtype: str
    bits: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of a block's share."""
        return len(self.bits) // 8

    @property
    def entries(self) -> int:
        """Numbers of a block's share."""
        return self.nbytes // {"int32": 4, "float16": 2, "uint8": 1}[self.dtype]

    @functools.cached_property
    def moves(self) -> Moves:
        return _moves(self.bits)


@dataclass(frozen=True)
class Layout:
    """The planes of a type: bits of codes in `low` and `high`, weights of a group, and those planes that there are."""

    low: int
    high: int
    group: int
    planes: tuple[Plane, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(plane.nbytes for plane in self.planes)

    @functools.cached_property
    def restored(self) -> Moves:
        """From the shares of a block in all planes, end to end, back to the block."""
        places = np.concatenate([plane.bits for plane in self.planes])
        known = np.flatnonzero(places >= 0)
        return _moves(known[np.argsort(places[known])])


def _moves(bits: np.ndarray) -> Moves:
    """Neighbouring bits that stay neighbours in a byte move together."""
    found: list[list[tuple[int, int, int, int]]] = []
    for byte in bits.reshape(-1, 8).tolist():
        fields, at = [], 0
        while at < 8:
            end = at + 1
            while end < 8 and byte[at] >= 0 and byte[end] == byte[end - 1] + 1 and byte[end] % 8:
                end += 1
            if byte[at] >= 0:
                fields.append((byte[at] // 8, byte[at] % 8, (1 << (end - at)) - 1, at))
            at = end
        found.append(fields)
    most = max(map(len, found))
    table = np.array([fields + [(0, 0, 0, 0)] * (most - len(fields)) for fields in found], np.int32)
    return Moves(*np.ascontiguousarray(np.moveaxis(table, -1, 0)))


def moved(source: Any, moves: Moves) -> Any:
    """Bytes uint8 [n, to] from bytes uint8 [n, from], of NumPy or of torch."""
    kind = source.dtype
    made: Any = None
    for f in range(moves.source.shape[1]):
        at, right, mask, left = (table[:, f] for table in moves)
        if isinstance(source, np.ndarray):
            part = ((source[:, at] >> right.astype(kind)) & mask.astype(kind)) << left.astype(kind)
        else:
            part = ((source[:, at] >> right.to(kind)) & mask.to(kind)) << left.to(kind)
        made = part if made is None else made | part
    return made


# -- the types -------------------------------------------------------------------------------------------------------

_ZERO = -1


def _fields(bits: np.ndarray, width: int) -> np.ndarray:
    """Fields of bytes from the lowest on, those of one place together: [..., b, 8] → [..., 8 / width, b, width]."""
    return np.swapaxes(bits.reshape(*bits.shape[:-1], 8 // width, width), -3, -2)


def _codes(bits: np.ndarray, width: int) -> np.ndarray:
    return _fields(bits, width).reshape(-1, width)


def _high(codes: np.ndarray, low: int) -> np.ndarray:
    """Upper bits of codes [W, high] in the order of the plane `high`: the lower halves of the words of `low`, then the
    upper ones.
    """
    count, high = codes.shape
    words = 16 // (16 // low * high)  # of `low` for one of `high`
    halves = codes.reshape(-1, words, 2, 16 // low, high)
    return np.swapaxes(halves, 1, 2).reshape(count, high)


def _six(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima [8, 6] of Q4_K and Q5_K."""
    first, second, third = block[4:8], block[8:12], block[12:16]
    scales = np.concatenate([first[:, :6], np.concatenate([third[:, :4], first[:, 6:]], axis=1)])
    minima = np.concatenate([second[:, :6], np.concatenate([third[:, 4:], second[:, 6:]], axis=1)])
    return scales, minima


def _layout(low: np.ndarray, group: int, **planes: np.ndarray) -> Layout:
    width, high = low.shape[1], planes["high"].shape[1] if "high" in planes else 0
    if high:
        planes["high"] = _high(planes["high"], width)
    kinds = {"low": "int32", "high": "int32", "sub": "uint8", "more": "uint8", "top": "float16"}
    if "top" in planes and planes["top"].size == 32:
        kinds["top"] = "int32"
    found = {"low": low} | planes
    made = (Plane(name, kinds[name], found[name].reshape(-1)) for name in PLANES if name in found)
    return Layout(width, high, group, tuple(made))


def _q2_k(b: np.ndarray) -> Layout:
    return _layout(_codes(b[16:80].reshape(2, 32, 8), 2), 16, sub=b[:16], top=b[80:84])


def _q3_k(b: np.ndarray) -> Layout:
    lower, upper = _codes(b[96:104], 4), _codes(b[104:108], 2)
    low, high = _codes(b[32:96].reshape(2, 32, 8), 2), _codes(b[:32], 1)
    return _layout(low, 16, high=high, sub=lower, more=upper, top=b[108:110])


def _q4_k(b: np.ndarray) -> Layout:
    scales, minima = _six(b)
    sub = np.concatenate([scales, minima[:, :2]], axis=1)
    return _layout(_codes(b[16:].reshape(4, 32, 8), 4), 32, sub=sub, more=minima[:, 2:], top=b[:4])


def _q5_k(b: np.ndarray) -> Layout:
    scales, minima = _six(b)
    sub = np.concatenate([scales, minima[:, :2]], axis=1)
    low, high = _codes(b[48:].reshape(4, 32, 8), 4), _codes(b[16:48], 1)
    return _layout(low, 32, high=high, sub=sub, more=minima[:, 2:], top=b[:4])


def _q6_k(b: np.ndarray) -> Layout:
    low, high = _codes(b[:128].reshape(2, 64, 8), 4), _codes(b[128:192].reshape(2, 32, 8), 2)
    return _layout(low, 16, high=high, sub=b[192:208], top=b[208:210])


def _q5_0(b: np.ndarray) -> Layout:
    return _layout(_codes(b[6:], 4), 32, high=b[2:6].reshape(32, 1), top=b[:2])


def _q5_1(b: np.ndarray) -> Layout:
    return _layout(_codes(b[8:], 4), 32, high=b[4:8].reshape(32, 1), top=b[:4])


def _iq4_nl(b: np.ndarray) -> Layout:
    return _layout(_codes(b[2:], 4), 32, top=b[:2])


def _iq4_xs(b: np.ndarray) -> Layout:
    lower, upper = np.swapaxes(_fields(b[4:8], 4), 0, 1).reshape(8, 4), b[2:4].reshape(8, 2)
    sub = np.concatenate([lower, upper, np.full((8, 2), _ZERO)], axis=1)
    return _layout(_codes(b[8:].reshape(8, 16, 8), 4), 32, sub=sub, top=b[:2])


def _mxfp4(b: np.ndarray) -> Layout:
    return _layout(_codes(b[1:], 4), 32, sub=b[:1])


_MADE: dict[str, tuple[int, Callable[[np.ndarray], Layout]]] = {
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
    "MXFP4": (17, _mxfp4),
}


@functools.cache
def layout_in_planes(type: str) -> Layout:
    """The planes of a type of blocks."""
    nbytes, made = _MADE[type]
    return made(np.arange(8 * nbytes).reshape(nbytes, 8))
