"""Runs the PTX of inline assembly for one warp in NumPy: what Triton's interpreter cannot, which knows no PTX.

Only the instructions that lanes of products use (`_lanes`, `_lane_blocks`, `_lane_floats`), without loads.
"""

import re
from typing import Any

import numpy as np

LANES = 32
_PLAIN: dict[str, Any] = {
    "mov.b32": np.copy,
    "and.b32": np.bitwise_and,
    "add.u32": np.add,
    "mul.lo.u32": np.multiply,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
}


def _bfloat16(words: np.ndarray) -> np.ndarray:
    """The two numbers in words [...]: float64 [..., 2], the lower half first."""
    halves = np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)], axis=-1)
    return halves.astype(np.uint32).view(np.float32).astype(np.float64)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c of pairs of bfloat16, which has to be exact."""
    y = (_bfloat16(a) * _bfloat16(b) + _bfloat16(c)).astype(np.float32).view(np.uint32)
    assert not (y & 0xFFFF).any()
    return y[..., 0] >> np.uint32(16) | y[..., 1]


def _mma(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
    """m16n8k16: lane 4 r + q has rows r and r + 8 of a, column r of b, and columns 2 q and 2 q + 1 of the sums."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    lane = np.arange(LANES)
    r, q = lane // 4, lane % 4
    for i, word in enumerate(a):
        left[r[:, None] + i % 2 * 8, (2 * q + i // 2 * 8)[:, None] + [0, 1]] = _bfloat16(word)
    for i, word in enumerate(b):
        right[(2 * q + i * 8)[:, None] + [0, 1], r[:, None]] = _bfloat16(word)
    y = left @ right
    return [(y[r + i // 2 * 8, 2 * q + i % 2] + c[i]).astype(np.float32) for i in range(4)]


def _lop3(a: Any, b: Any, c: Any, table: int) -> np.ndarray:
    made = np.zeros(LANES, np.uint32)
    for i in range(8):
        if table >> i & 1:
            made |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return made


def _prmt(a: np.ndarray, b: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    made = np.zeros(LANES, np.uint64)
    for i in range(4):
        byte = (chosen.astype(np.uint64) >> np.uint64(4 * i)) & np.uint64(7)
        made |= ((both >> (byte * np.uint64(8))) & np.uint64(255)) << np.uint64(8 * i)
    return made.astype(np.uint32)


def run(asm: str, constraints: str, inputs: list[Any]) -> list[np.ndarray]:
    """What the assembly gives for inputs [32] of uint32 or float32, one number for each lane: uint32 or float32."""
    kinds = constraints.split(",")
    outputs = sum("=" in kind for kind in kinds)
    values: dict[str, Any] = {f"${outputs + i}": np.broadcast_to(given, LANES) for i, given in enumerate(inputs)}
    assert len(kinds) == outputs + len(inputs)

    def value(name: str, kind: type = np.uint32) -> Any:
        if name in values:
            found = values[name]
            return found if found.dtype == bool else found.view(kind)
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0) & 0xFFFFFFFF
        return np.full(LANES, number, np.uint32).view(kind)

    body = re.sub(r"\.reg [^;]*;", "", asm.strip()[1:-1])
    for statement in filter(None, (part.strip() for part in body.split(";"))):
        op, rest = statement.split(None, 1)
        names = re.findall(r"[$\w]+", rest)
        to, args = names[0], names[1:]
        if op.startswith("mma"):
            made = _mma(
                [value(n) for n in names[4:8]], [value(n) for n in names[8:10]],
                [value(n, np.float32).astype(np.float64) for n in names[10:14]],
            )  # fmt: skip
            values |= dict(zip(names[:4], made, strict=True))
        elif op == "selp.b32":
            values[to] = np.where(value(args[2]), value(args[0]), value(args[1]))
        elif op.startswith("setp"):
            a, b = value(args[0]), value(args[1])
            values[to] = {"ne": a != b, "eq": a == b, "gt": a > b}[op.split(".")[1]]
        elif op.startswith("shfl.sync.bfly"):
            values[to] = value(args[0])[np.arange(LANES) ^ int(args[1])]
        elif op == "prmt.b32":
            values[to] = _prmt(value(args[0]), value(args[1]), value(args[2]))
        elif op == "fma.rn.bf16x2":
            values[to] = _fma(*(value(n) for n in args))
        elif op == "lop3.b32":
            values[to] = _lop3(value(args[0]), value(args[1]), value(args[2]), int(args[3], 0))
        elif op == "shf.l.wrap.b32":
            low, high, by = (value(n).astype(np.uint64) for n in args)
            values[to] = (((high << np.uint64(32) | low) << (by & np.uint64(31))) >> np.uint64(32)).astype(np.uint32)
        else:
            values[to] = _PLAIN[op](*(value(n) for n in args))
    return [values[f"${i}"] for i in range(outputs)]
