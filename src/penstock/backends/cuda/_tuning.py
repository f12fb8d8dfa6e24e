"""Sizes of launches, chosen on an H200; other GPUs take the same. Times beside a size were measured there; a size that
has none beside it has no measurement on record.

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
ATTEND_AT_ONCE = ((256, 2), (_ANY, 1))  # of one token, by the width of a head: programs at once on a multiprocessor
# Of one token where a launch has fewer programs than run at once: positions of a tile at least, warps and stages; of
# latents rows of a tile, warps and stages. Qwen3.6's heads over a table of 1024 positions with N = 16: 4.0 µs at length
# 100 and 5.8 at 1000, with N = 64 4.7 and 5.9; heads of 512 5.1 and 7.0 against 5.9 and 8.7; DeepSeek's latents with
# M = 16 8.0 and 10.0, with M = 64, which reads them less often, 11.7 and 13.0.
ATTEND_FEW, ATTEND_FEW_LATENT = (16, 4, 2), (16, 8, 2)
COMBINE = (4096, 4)  # splits × columns, and warps, of a program that puts the parts together

MATVEC_TOKENS = 8  # rows of x that one pass over the weights takes
MATVEC_BUSY = 2.5  # tiles of 16 rows for each multiprocessor from which on 4 warps take a tile, below 8 or 16
# From so many with short rows, and from so many blocks of several experts, twice the rows: more is on its way.
# DeepSeek's down 28 µs instead of 37.
MATVEC_TWICE, MATVEC_BLOCKS = 5.5, 16
# Warps of a tile: with many tiles; with few; with one at most for each multiprocessor, where a warp has one block of
# several experts. Up to so many blocks, such a tile takes twice as many that are half as long.
MATVEC_WARPS, MATVEC_SHORT = (4, 8, 16), 4
MATVEC_AHEAD = {1: 1, 2: 2, 4: 2, 8: 4}  # blocks of a warp at a time by tokens: with several, blocks are short
# With these numbers of blocks, warps and blocks of a warp where every program norms x: smaller ones of fewer warps.
# [9216, 2048] 6.2 µs, with 32 rows and 4 warps 7.8.
MATVEC_NORMED = {3: (2, 2), 4: (2, 2)}
MATVEC_DENSE = (16, 8, 2, 4)  # dense weights: with so many rows for each multiprocessor 8 in a program, else 2; warps
MATVEC_EXACT = (64, 1024)  # tokens up to which it takes a weight of so few rows that may not be rounded

GEMM_WIDE = (64, 32, 2, 2)  # BN, BK, warps, stages of float32 operands
GEMM = {16: (128, 128, 4, 4), 32: (128, 128, 4, 4), 64: (128, 64, 4, 4), 128: (128, 64, 4, 3)}  # by rows of a tile
GEMM_ORDERED = 64  # up to so many rows x is brought into dot order by each program, above by a copy
# Programs for each multiprocessor up to which K is cut, by rows of a tile: up to 64 3 to 5 run at a time, with 128 2.
GEMM_SPLIT = {16: 4, 32: 4, 64: 4, 128: 1}
GEMM_PART = 512  # of K at least
# Rows of x from which a dense copy of the weight and cuBLAS take less time than tiles, for a weight of fewer rows than
# that. Tiles and copy in µs: T = 64 20.6 and 34.3 for [12288, 2048], 11.8 and 15.3 for [2048, 4096]; T = 128 26.9 and
# 36.1, 19.6 and 16.5; T = 256 37.5 and 40.3, 27.7 and 19.3; T = 4096 435 and 296, 191 and 93.
GEMM_DENSE = ((65, 8192), (256, _ANY))

# Tiles of pairs of one expert: rows of a short tile (0: none), BN, BK, warps, stages. Short tiles take what is left of
# an expert beyond whole ones: 1129 → 699 µs at 128 rows and pairs per expert.
GROUPED = {16: (0, 128, 128, 4, 4), 32: (16, 128, 128, 4, 3), 64: (16, 128, 128, 4, 3), 128: (32, 128, 64, 4, 3)}
# Rows of a tile by the mean of pairs per expert. With 256 experts of 2048 × 512, the whole block in µs: 8 pairs per
# expert 214 with 16 rows and 225 with 32; 32 pairs 351 with 32 and 360 with 64; 64 pairs 493 with 64 and 538 with 128;
# 128 pairs 820 and 700.
GROUPED_ROWS = ((10, 16), (40, 32), (90, 64), (float("inf"), 128))

# Grouping pairs by expert pays once chosen experts have several tokens: with 4 bits from T = 60 on for 256 experts of
# [512, 2048], from 14 on for 128 experts of [704, 2816].
MOE_GROUPED = 1  # pairs per expert up to which they are taken one by one
# Then their order by expert pays where many tokens choose the same ones: with 256 experts of [512, 2048] a block takes
# 162 µs instead of 183 at T = 32, and 53 instead of 54 at T = 8.
MOE_IN_TURN = 3  # experts per pair up to which pairs are sorted
MOE_NORMED = 4096  # widest row that every program norms for itself: at 7168 73 µs against 62 and 1.6 for a norm

# Whole rows: numbers of a program at least, numbers of a thread in long rows (8 in short ones), fewest and most warps.
# At 4096 rows: dim 2816 13.7 µs, with 16 per thread 14.5; dim 7168 30.7 against 32.4; heads of 128 26.6, with 16 per
# thread 27.4, and for one token 1.4 against 1.9.
ROW_NUMBERS, ROW_THREAD, ROW_WARPS = 1024, 32, (4, 16)
ROW_PAIRS = (4096, 2048)  # width up to which and rows from which a norm has two: dim 2816 3 % faster, three norms 5 %
TRIPLE_THREAD = 16  # numbers of a thread in three norms of a row
QK_NUMBERS = 2048  # of a program at least, in heads of q and k
SAMPLE_PARTS = 128  # blocks that a row of logits is cut into, or up to half of it
SAMPLE_BLOCK = (256, 4096)  # logits of a block: fewest, most
SAMPLE_CHUNK, SAMPLE_WARPS = 512, 8  # logits at a time of a program that counts digits; warps of the search for limits
PER_HEAD_COPY = 256  # tokens from which a dense copy of a quantized weight, one more write and read of it, pays
DELTA_STEPS = 16  # tokens up to which the recurrence is faster than the chunks
DELTA_RUNS = 16  # programs that share the sequences of a ragged call in the recurrence
DELTA_AHEAD = 4  # tokens whose q, k and v are under way in the recurrence of one sequence
CONV_DOWN = (32, 512, 4)  # tokens, channels and warps of a program that goes down a long sequence
PREPARE_ONE = 64  # tokens up to which a program of attention_prepare has one
PREPARE_NUMBERS = 2048  # of a program with several
ROPE_NUMBERS, ROPE_WARPS = 4096, 4  # of a program: heads × tokens × width of a head
ELEMENTS, ELEMENT_WARPS = 1024, 4  # 8 per thread: twice as many are no faster, and 0.5 µs slower for one token
EMBED_COLUMNS = 2048  # of one program: 16 numbers for each of 128 threads
COPIED_COLUMNS = 4096  # of a program that only copies
