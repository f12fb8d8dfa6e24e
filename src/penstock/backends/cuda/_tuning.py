"""Sizes of launches as they were measured on an H200. Other GPUs take the same.

Functions beside the kernels choose from these by the sizes of a call; what only has to fit (registers, shared memory,
powers of two) stays with them.
"""

from typing import NamedTuple

_ANY = 1 << 30


class Attend(NamedTuple):
    """A row of ATTEND: what it is for (None: both), up to which sizes, and M, N, warps, stages (and columns of values
    where they are cut) on Hopper, 227 KB of shared memory, and before it, 163 KB.
    """

    exact: bool
    latent: bool | None
    rows: int
    wide: int
    values: int
    hopper: tuple[int, ...]
    older: tuple[int, ...]


# Attention, the first row that fits. exact: float32 products run without tensor cores, operands in registers. Of wide
# heads M · 512 sums do not fit the registers: two programs for their halves, each with all scores.
ATTEND = (
    Attend(True, None, _ANY, 128, _ANY, (16, 32, 4, 1), (16, 32, 4, 1)),
    Attend(True, None, _ANY, _ANY, _ANY, (16, 16, 8, 1), (16, 16, 8, 1)),
    Attend(False, None, 16, 256, _ANY, (16, 64, 4, 2), (16, 64, 4, 2)),
    Attend(False, None, 16, _ANY, _ANY, (16, 32, 8, 3), (16, 32, 8, 2)),
    Attend(False, None, _ANY, 128, _ANY, (64, 64, 4, 3), (64, 64, 4, 3)),
    Attend(False, True, _ANY, _ANY, _ANY, (64, 64, 8, 2), (64, 32, 8, 2)),
    Attend(False, None, 64, 256, 128, (64, 64, 4, 2), (64, 64, 4, 2)),
    Attend(False, None, 64, 256, _ANY, (64, 32, 4, 2), (64, 32, 4, 2)),
    Attend(False, None, _ANY, 256, 128, (128, 64, 8, 3), (128, 32, 8, 2)),
    Attend(False, None, _ANY, 256, _ANY, (128, 64, 8, 2), (128, 32, 8, 2)),
    Attend(False, None, _ANY, 512, _ANY, (128, 32, 8, 2, 256), (64, 32, 8, 2)),
    Attend(False, None, _ANY, _ANY, _ANY, (64, 16, 8, 2), (64, 16, 8, 2)),
)
ATTEND_SPLITS = 128  # parts of the positions at most

MATVEC_TOKENS = 8  # rows of x that one pass over the weights takes
MATVEC_BUSY = 2.5  # tiles of 16 rows for each multiprocessor from which on 4 warps take a tile, below 8 or 16
# From so many with short rows, and from so many blocks of several experts, twice the rows: more is on its way.
# DeepSeek's down 28 µs instead of 37.
MATVEC_TWICE, MATVEC_BLOCKS = 5.5, 16

GEMM_WIDE = (64, 32, 2, 2)  # BN, BK, warps, stages of float32 operands
GEMM = {16: (128, 128, 4, 4), 32: (128, 128, 4, 4), 64: (128, 64, 4, 4), 128: (128, 64, 4, 3)}  # by rows of a tile
GEMM_ORDERED = 64  # up to so many rows x is brought into dot order by each program, above by a copy

# Tiles of pairs of one expert: rows of a short tile (0: none), BN, BK, warps, stages. Short tiles take what is left of
# an expert beyond whole ones: 1129 → 699 µs at 128 rows and pairs per expert.
GROUPED = {16: (0, 128, 128, 4, 4), 32: (16, 128, 128, 4, 3), 64: (16, 128, 128, 4, 3), 128: (32, 128, 64, 4, 3)}
# Rows of a tile by the mean of pairs per expert. With 256 experts of 2048 × 512, the whole block in µs: 8 pairs per
# expert 214 with 16 rows and 225 with 32; 32 pairs 351 with 32 and 360 with 64; 64 pairs 493 with 64 and 538 with 128;
# 128 pairs 820 and 700.
GROUPED_ROWS = ((10, 16), (40, 32), (90, 64), (float("inf"), 128))

PER_HEAD_COPY = 256  # tokens from which a dense copy of a quantized weight, one more write and read of it, pays
DELTA_STEPS = 16  # tokens up to which the recurrence is faster than the chunks
DELTA_AHEAD = 4  # tokens whose q, k and v are under way in the recurrence of one sequence
CONV_DOWN = (32, 512, 4)  # tokens, channels and warps of a program that goes down a long sequence
PREPARE_ONE = 64  # tokens up to which a program of attention_prepare has one
PREPARE_NUMBERS = 2048  # of a program with several
ROPE_NUMBERS, ROPE_WARPS = 4096, 4  # of a program: heads × tokens × width of a head
ELEMENTS, ELEMENT_WARPS = 1024, 4  # 8 per thread: twice as many are no faster, and 0.5 µs slower for one token
EMBED_COLUMNS = 2048  # of one program: 16 numbers for each of 128 threads
COPIED_COLUMNS = 4096  # of a program that only copies
