"""Sizes of launches, chosen on an H200. Times beside a size were measured there; a size that has none beside it has no
measurement on record. Other GPUs take the same, but for the tables that have a column for less shared memory: those
follow from what fits, and are unmeasured.

Functions beside the kernels choose from these by the sizes of a call; what only has to fit (registers, shared memory,
powers of two) stays with them.
"""

from typing import NamedTuple

_ANY = 1 << 30


class Gpu(NamedTuple):
    """GPUs of one compute capability: multiprocessors, MB of L2 cache and TB/s of memory of the usual one, KB of shared
    memory of a block, and whether sizes of launches were measured there.
    """

    name: str
    multiprocessors: int
    l2: int
    bandwidth: float
    shared: int
    measured: bool = False


GPUS = {
    (8, 0): Gpu("A100", 108, 40, 1.9, 163),
    (8, 6): Gpu("RTX 3090", 82, 6, 0.94, 99),
    (8, 9): Gpu("L40S, RTX 4090", 142, 96, 0.86, 99),
    (9, 0): Gpu("H100, H200", 132, 50, 4.8, 227, measured=True),
    (10, 0): Gpu("B200", 148, 126, 8.0, 227),
    (12, 0): Gpu("RTX 5090", 170, 96, 1.79, 99),
}


def gpu(capability: tuple[int, int]) -> Gpu:
    """Of this compute capability, or of the last one before it that is known."""
    return GPUS[max(known for known in GPUS if known <= max(capability, min(GPUS)))]


class Attend(NamedTuple):
    """A row of ATTEND: what it is for (None: both), up to which sizes, and M, N, warps, stages (and columns of values
    where they are cut) by the shared memory of a block: 227 KB (Hopper, B200), 163 (A100), 99 (L40S, RTX).
    """

    exact: bool
    latent: bool | None
    rows: int
    wide: int
    values: int
    large: tuple[int, ...]
    medium: tuple[int, ...]
    small: tuple[int, ...]

    def sizes(self, shared: int) -> tuple[int, ...]:
        """For a GPU with so many KB."""
        return self.large if shared >= 227 else self.medium if shared >= 163 else self.small


class FewRows(NamedTuple):
    """A row of FEW_ROWS: up to which tokens and from which rows for each multiprocessor; tiles of 16 rows and of 8
    tokens of a warp, warps that share K, warps with rows of their own, groups of a block, blocks at a time, and
    registers of a thread at most.
    """

    tokens: int
    rows: int
    tiles: int
    token_tiles: int
    parts: int
    across: int
    groups: int
    ahead: int
    registers: int | None = None


class FewGroups(NamedTuple):
    """Tiles of 16 rows of a warp, warps of a program, groups of a block, whether x comes a block ahead, registers of a
    thread at most.
    """

    tiles: int
    across: int
    groups: int
    x_ahead: bool
    registers: int | None = None


class ExactTiles(NamedTuple):
    """A row of EXACT_TILES: up to which tokens and from which rows for each multiprocessor; tokens and rows of a tile,
    groups at a time, warps, stages.
    """

    tokens: int
    rows: int
    BM: int
    BN: int
    groups: int
    warps: int
    stages: int


class DeltaStep(NamedTuple):
    """A row of DELTA_STEP."""

    rows: int
    launches: int
    parts: int
    warps: int
    registers: int
    prefetch: bool


# Attention, the first row that fits. exact: float32 products run without tensor cores, operands in registers. Of wide
# heads M · 512 sums do not fit the registers: two programs for their halves, each with all scores. Without Hopper's
# instructions a block has about 2 · (M · key + (stages - 1) · N · (key + value) + M · N) bytes of shared memory.
ATTEND = (
    Attend(True, None, _ANY, 128, _ANY, (16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
    Attend(True, None, _ANY, _ANY, _ANY, (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    Attend(False, None, 16, 256, _ANY, (16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 2)),
    Attend(False, None, 16, _ANY, _ANY, (16, 32, 8, 3), (16, 32, 8, 2), (16, 32, 8, 2)),
    Attend(False, None, _ANY, 128, _ANY, (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3)),
    Attend(False, True, _ANY, _ANY, _ANY, (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
    Attend(False, None, 64, 256, 128, (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    Attend(False, None, 64, 256, _ANY, (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2)),
    Attend(False, None, _ANY, 256, 128, (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 2)),
    Attend(False, None, _ANY, 256, _ANY, (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
    Attend(False, None, _ANY, 512, _ANY, (128, 32, 8, 2, 256), (64, 32, 8, 2), (64, 16, 8, 2)),
    Attend(False, None, _ANY, _ANY, _ANY, (64, 16, 8, 2), (64, 16, 8, 2), (32, 16, 4, 2)),
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
# Of GGUF blocks, codes of a row that a warp takes at a time, by tokens: as many bytes as with 4 bits. One token of
# [12288, 2048] in Q4_K, µs: 6.1 by 2 warps of 16 rows with 512 codes, 10.6 with 256, 7.9 by 4 warps of 32 rows.
MATVEC_BLOCK_CODES = {1: 512, 2: 256, 4: 128, 8: 64}
# With these numbers of blocks, warps and blocks of a warp where every program norms x: smaller ones of fewer warps.
# [9216, 2048] 6.2 µs, with 32 rows and 4 warps 7.8.
MATVEC_NORMED = {3: (2, 2), 4: (2, 2)}
# One token and rows of more than 4 blocks of 512 codes, which took 4 or 8 warps in rounds of which the last was half
# empty; gate and up of experts likewise. From so many tiles for each multiprocessor on 2 warps go round: [8192, 3072]
# gated 12.4 → 9.5 µs, [248320, 5120] 218 → 194, [128256, 3072] 77 → 62, [262144, 2816] 153 → 119, experts of
# DeepSeek-V3 81 → 75, of Gemma 4 at 8 tokens 92 → 78. From so many on (and below so many blocks) 2 warps with 3 blocks:
# [5120, 3072] 5.5 → 4.5, [5120, 6144] 12.4 → 8.9; fewer, with up to 16 blocks, 8 warps go round: 8 layers
# of Llama 3.2 3B take 341 µs with 4 warps of 4 blocks for [3072, 8192], which alone are quicker (6.2), and 335 so.
# In a whole step of Qwen3.6-35B-A3B 2 warps are quicker for rows of 4 blocks, too: 8 layers take 338 µs with [12352,
# 2048] by 2 warps, 352 with 32 rows by 4.
# With so many blocks and two to three tiles programs share K, about so many for each multiprocessor: [5120, 17408] 29.9
# → 19.3, unshared at best 23.4. (Above three it is unmeasured alone.)
MATVEC_LONG = (5.0, 2.0, 24, 14)
# One token of codes in bytes and of mxfp4, rows of more than 4 blocks. Bytes: from so many tiles on 32 rows by 2 warps,
# from so many on 16, below 4 warps of two programs that share K. In a step of 4 layers and the head of gpt-oss-20b, µs:
# q, k, v and o so 458 → 440, the head [201088, 2880] 440 → 426 (16 rows 432, 3 blocks 448). Experts in mxfp4: gate and
# up by 4 warps of 3 blocks 440 → 436 (2 blocks 467, 2 warps of 3 441), down by 4 warps of 3 blocks, so many programs
# sharing a row, 440 → 435 (8 warps of 3 blocks 455, 16 443).
MATVEC_WIDE = (5.0, 2.0, 4)
MATVEC_NORM = 0  # widest row that a product of one row norms for itself
MATVEC_DENSE = (16, 8, 2, 4)  # dense weights: with so many rows for each multiprocessor 8 in a program, else 2; warps
MATVEC_EXACT = (64, 1024)  # tokens up to which it takes a weight of so few rows that may not be rounded

# Tokens up to which norm and product of a router are one launch: 8 take 9.0 µs so with the choice, 6.4 in three.
ROUTER_FUSED = 4
ROUTER_LAST = 1  # tokens up to which the launch that makes the logits of a router chooses, too; above another one does
# Programs of that launch that bring the next dense weight to the L2 cache, 0: none, and bytes of it at most.
ROUTER_FETCH, ROUTER_FETCH_BYTES = 0, 16 << 20

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
GEMM_BLOCKS = (64, 64, 4, 3)  # BN, BK, warps, stages of tiles of GGUF blocks, of experts too
DENSE_BLOCKS = (8, 256)  # rows and columns of GGUF blocks that a program makes dense

# Tiles of pairs of one expert: rows of a short tile (0: none), BN, BK, warps, stages. Short tiles take what is left of
# an expert beyond whole ones: 1129 → 699 µs at 128 rows and pairs per expert.
GROUPED = {16: (0, 128, 128, 4, 4), 32: (16, 128, 128, 4, 3), 64: (16, 128, 128, 4, 3), 128: (32, 128, 64, 4, 3)}
# Rows of a tile that may have those of a short one more, for which its weights are made dense once: 128 pairs per
# expert, gate and up, and down in µs 424 → 384 and 239 → 209.
GROUPED_LONG = (128,)
# Rows of a tile by the mean of pairs per expert. With 256 experts of 2048 × 512, the whole block in µs: 8 pairs per
# expert 214 with 16 rows and 225 with 32; 32 pairs 351 with 32 and 360 with 64; 64 pairs 493 with 64 and 538 with 128;
# 128 pairs 820 and 700.
GROUPED_ROWS = ((10, 16), (40, 32), (90, 64), (float("inf"), 128))

# Pairs from which they are counted by blocks, then placed: below, a program for each slot goes through all of them,
# which takes 41.6 µs with 32768 pairs and 256 slots (by blocks 11.5), and 7.4 with 4096. Counts of blocks that a
# program has at a time, and pairs that it compares its own with.
PLAN_MANY, PLAN_COUNTS, PLAN_COLUMNS = 8192, 8192, 32

# Grouping pairs by expert pays once chosen experts have several tokens: with 4 bits from T = 60 on for 256 experts of
# [512, 2048], from 14 on for 128 experts of [704, 2816].
MOE_GROUPED = 1  # pairs per expert up to which they are taken one by one
# Then their order by expert pays where many tokens choose the same ones: with 256 experts of [512, 2048] a block takes
# 162 µs instead of 183 at T = 32, and 53 instead of 54 at T = 8.
MOE_IN_TURN = 3  # experts per pair up to which pairs are sorted
# Tokens up to which gate and up choose their experts from the router's logits: 8 layers and the head of Qwen3.6-35B-A3B
# at one token 315 µs, with a choice at the end of the router's launch 336; at 2, 3 and 4 tokens 417, 482 and 535, 465,
# 538 and 584 with launches of their own for norm, product and choice (and columns copied, down as below without).
MOE_CHOOSES = 4
# Blocks of all routed experts of a token with which down has a warp for each, all of which share the common expert:
# with 8 the same step takes 313.6 µs instead of 315.4. 4 are unmeasured. Several tokens, up to so many, were measured
# together with the above alone.
SHARED_DOWN, SHARED_DOWN_TOKENS = (4, 8), 4
MOE_NORMED = 4096  # widest row that every program norms for itself: at 7168 73 µs against 62 and 1.6 for a norm

# Products of 2 rows and more by lanes, the first row that fits. In µs on an H200, [12352, 2048] and [2048, 4096]: 8
# rows 6.9 and 4.0 (matvec 9.8 and 10.0), 16 rows 8.0 and 6.2 (with 4 tiles 10.9), 32 rows 19.6 and 6.7 (tiles 15.5 and
# 9.7); [248320, 2048] with float32 results 102 at 8 rows, 146 at 16 and 207 at 32 (matvec 317, tiles 783).
FEW_ROWS = (
    FewRows(8, 512, 2, 1, 4, 1, 2, 1),
    FewRows(8, 64, 2, 1, 8, 1, 2, 1),
    FewRows(8, 0, 1, 1, 8, 1, 4, 2),
    FewRows(16, 64, 2, 2, 4, 1, 2, 1),
    FewRows(16, 0, 1, 2, 8, 1, 2, 1),
    FewRows(_ANY, 512, 2, 4, 1, 4, 2, 1),
    FewRows(256, 0, 1, 2, 8, 1, 2, 1),
    FewRows(_ANY, 0, 2, 4, 4, 1, 2, 1),
)
# Of affine 4 bits and 8 rows, µs: [12288, 2048] 9.34 → 7.25, [17408, 5120] 24.4 → 22.3; [2048, 4096] 3.66 as it is.
FEW_FOUR = (FEW_ROWS[0], FewRows(8, 64, 2, 1, 4, 1, 4, 1), *FEW_ROWS[2:])
# Of floats, two groups of 32 for one. mxfp4 [12288, 2048] at 8 rows 6.99 µs (8.3 to 10.6 in others, matvec 20.0), at
# 16 rows 9.12 (matvec 23.9); the rest was not measured. A row of nvfp4 goes by lanes from so many rows of a weight for
# each multiprocessor on: its matvec takes 10.1 µs for [2048, 4096], that of affine 4 bits 2.8, lanes of these 3.5.
FEW_FLOATS = (FEW_ROWS[0], FewRows(8, 64, 1, 1, 4, 1, 2, 1, 80), *FEW_ROWS[2:])
FEW_ONE = {"nvfp4": 0}
# Of GGUF blocks by their type, 128 codes for two groups. With at most 128 registers two programs of 8 warps run at once
# on a multiprocessor: Q4_K would take 170, Q6_K 193, and one would. [17408, 5120] of Q4_K with 4 rows 34.5 → 27.1 µs,
# of Q6_K 41.4 (matvec 91); 16 rows of Q4_K with the launch of Q6_K 42.9, of [12288, 2048] 14.4. Others were not tried,
# Q5_K not at all.
FEW_BLOCKS: dict[str | None, tuple[FewRows, ...]] = {
    None: FEW_ROWS,
    "Q4_K": (
        FewRows(8, 64, 2, 1, 8, 1, 2, 1, 128),
        FewRows(8, 0, 1, 1, 8, 1, 4, 2),
        *(row for row in FEW_ROWS if row.tokens > 8),
    ),
    "Q5_K": (
        FewRows(8, 64, 2, 1, 8, 1, 2, 1, 128),
        FewRows(8, 0, 1, 1, 8, 1, 4, 2),
        FewRows(_ANY, 0, 1, 2, 8, 1, 2, 1, 128),
    ),
    "Q6_K": (
        FewRows(8, 64, 2, 1, 8, 1, 2, 1, 128),
        FewRows(8, 0, 1, 1, 8, 1, 4, 2),
        FewRows(_ANY, 0, 1, 2, 8, 1, 2, 1, 128),
    ),
    **dict.fromkeys(("mxfp4", "mxfp8", "nvfp4"), FEW_FLOATS),
}
FEW_WORDS = 8  # of a row that a lane loads for the groups of one block of scales, at most
FEW_MOST = 16  # rows up to which lanes take a product; up to twice as many of a weight with so few rows
FEW_NARROW = 4096
# Float32 results: rows of a weight for any number of tokens, and tokens for any weight that `EXACT_FEWEST` is not for.
FEW_EXACT = (1024, 256)
# Products of many rows whose groups are scaled behind tensor cores, the first row that fits. In µs on an H200 with 4
# bits, float32 results of [248320, 2048] at 32, 64, 128, 256 and 512 rows 136, 194, 351, 687 and 1374 (lanes 209, 374,
# 723 and 1390, tiles of float32 9473 at 512). Weights that may be rounded, in a step of 8 layers and the head of
# Qwen3.6-35B-A3B with [12352, 2048] by tiles of rounded weights and so: 1525 → 1493 at 32 rows, 2093 → 2059 at 64, 3013
# → 2940 at 128 (tiles of 128 rows 3079), 4692 → 4699 at 256.
EXACT_TILES = (
    ExactTiles(32, 0, 32, 64, 2, 4, 3),
    ExactTiles(64, 0, 64, 64, 1, 4, 4),
    ExactTiles(_ANY, 512, 128, 64, 1, 4, 4),
    ExactTiles(_ANY, 0, 64, 64, 1, 4, 4),
)
EXACT_PROGRAMS = 3  # for each multiprocessor up to which K is shared
# Rows from which weights that may not be rounded go this way; of rounded ones fewest and most, and rows of a weight at
# least.
EXACT_FEWEST = 17
EXACT_ROUNDED = (17, 192, 4097)
# Scores of a router of codes in bytes: tokens from which, rows of a weight up to which, BM, BN, warps, stages. [256,
# 2048] at 4096 tokens 46 → 30 µs; at 512 lanes take 11.
SCORES = (1024, 1024, 64, 128, 4, 3)
# Experts by pairs of a tile. 256 experts of [512, 2048], gate and up, and down in µs: 32 tokens 62 and 34 (tiles of
# `GROUPED` 84 and 44), 128 tokens 97 and 58, 256 tokens 127 and 81 (tiles of 16: 132 and 81). Gate and up with 2 tiles:
# 62 at 32 tokens, 101 at 128, 138 at 256. In a step of 8 layers down with 2 tiles instead of 4: 765 µs instead of 787
# at 8 tokens, 1691 instead of 1700 at 32.
FEW_GROUPS = {
    ("gate_up", 8): FewGroups(4, 4, 4, False),
    ("gate_up", 16): FewGroups(4, 4, 2, True),
    ("down", 8): FewGroups(2, 4, 2, False),
    ("down", 16): FewGroups(4, 4, 2, True),
}
# Of GGUF blocks, four groups of 32 codes each; none but these were tried, with Q4_K and Q6_K for down: 79 µs at 8
# tokens and 173 at 32, affine 45 and 115.
FEW_BLOCK_GROUPS = {
    ("Q4_K", "gate_up", 8): FewGroups(4, 4, 4, False),
    ("Q4_K", "gate_up", 16): FewGroups(2, 4, 4, False, 168),
    ("Q4_K", "down", 8): FewGroups(2, 4, 4, False, 128),
    ("Q4_K", "down", 16): FewGroups(2, 4, 4, False, 128),
    ("Q5_K", "gate_up", 8): FewGroups(2, 4, 4, False, 128),
    ("Q5_K", "gate_up", 16): FewGroups(2, 4, 4, False, 168),
    ("Q5_K", "down", 8): FewGroups(2, 4, 4, False, 128),
    ("Q5_K", "down", 16): FewGroups(2, 4, 4, False, 168),
    ("Q6_K", "gate_up", 8): FewGroups(2, 4, 4, False, 128),
    ("Q6_K", "gate_up", 16): FewGroups(2, 4, 4, False, 168),
    ("Q6_K", "down", 8): FewGroups(2, 4, 4, False, 128),
    ("Q6_K", "down", 16): FewGroups(2, 4, 4, False, 168),
}
# Of floats, groups of 32: not measured.
FEW_BLOCK_GROUPS |= {
    (mode, *which): FewGroups(2, 4, 4, False, 168) for mode in ("mxfp4", "mxfp8", "nvfp4") for which in FEW_GROUPS
}
FEW_TILES = ((10, 8), (float("inf"), 16))  # pairs per expert up to which a tile has so many
FEW_PROGRAMS = 8  # for each multiprocessor
# Pairs of an expert up to which the choice of experts puts them into buckets; above, where many experts have several
# tiles, which are to be neighbours, a launch sorts them. A step of 256 tokens of Qwen3.6-35B-A3B took 4 % more so.
ROUTED_PAIRS = 5
TILES_PAIRS = 4096  # that a program has in registers while it puts those of its expert in their place
# Experts through shared memory: tokens from which on; codes of a row that a warp has at most, warps of a program,
# registers of a thread and programs for each multiprocessor. 256 experts of [512, 2048], gate and up, and down in µs,
# by lanes and so: 8 tokens 24 and 15, 26 and 15; 32 tokens 63 and 37, 59 and 33; 128 tokens 98 and 65, 85 and 47. With
# 8 warps 66 and 37 at 32 tokens, with 128 registers and 4 programs 76 and 43.
STAGED_TOKENS, STAGED_NUMBERS, STAGED_WARPS, STAGED_REGISTERS, STAGED_PROGRAMS = 12, 512, 4, 168, 3
# Tokens from which lanes take experts, where they have MOE_GROUPED pairs each or fewer (streamed ones come all at once
# then, so that they go the same way) and where they have more; pairs per expert up to which they do. A step of 8 layers
# in µs, pair by pair and by lanes: 803 and 765 at 8 tokens. A block alone at 32: 162 and 118.
FEW_EXPERTS = (8, 17, 10)

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
SAMPLE_DRAW_WARPS = 4  # of a program that draws from a block
SAMPLE_LIST = 4096  # logits that a program has in registers, of which one is where top-k or top-p cuts
SAMPLE_BINS = 128  # of weight that logits are counted in for top-p
SAMPLE_BIN_WARPS, SAMPLE_LIST_WARPS = 1, 8  # of a program that finds a window in bins, and of one that lists its logits
SAMPLE_REGISTERS = 128  # of a thread that lists logits or finds a limit: 2 programs of 8 warps run at once
SAMPLE_SPANS = ((8, 1), (64, 4), (_ANY, 8))  # rows up to which a program that sums, counts or lists has so many blocks
SAMPLE_DECIDED = 4  # one of so many rows is counted, if tokens drawn from all ids are kept as a rule
# Programs for each multiprocessor that count, list and draw in rows whose token is open: as many as run at once, but
# more of those that list, which have a share each where all rows are listed.
SAMPLE_OPEN_PROGRAMS = (5, 16, 5)
PER_HEAD_COPY = 256  # tokens from which a dense copy of a quantized weight, one more write and read of it, pays
DELTA_STEPS = 16  # tokens up to which the recurrence is faster than the chunks
# A step by rows up to which: launches, parts of a head's state and warps (of a head of 128 × 128), registers of a
# thread at most, and whether what one launch reads is asked for while the kernel before it ends. With 128 registers 16
# warps run at once on a multiprocessor: some load while others compute and store. Hints: how long the L2 cache keeps a
# state that was read, and one that was written.
DELTA_STEP = (DeltaStep(24, 2, 1, 8, 255, False), DeltaStep(_ANY, 1, 4, 4, 128, False))
DELTA_HINTS = ("evict_first", "evict_first")
DELTA_RUNS = 16  # programs that share the sequences of a ragged call in the recurrence
DELTA_AHEAD = 4  # tokens whose q, k and v are under way in the recurrence of one sequence
CONV_DOWN = (32, 512, 4)  # tokens, channels and warps of a program that goes down a long sequence
PREPARE_ONE = 64  # tokens up to which a program of attention_prepare has one
PREPARE_NUMBERS = 2048  # of a program with several
ROPE_NUMBERS, ROPE_WARPS = 4096, 4  # of a program: heads × tokens × width of a head
ELEMENTS, ELEMENT_WARPS = 1024, 4  # 8 per thread: twice as many are no faster, and 0.5 µs slower for one token
EMBED_COLUMNS = 2048  # of one program: 16 numbers for each of 128 threads
COPIED_COLUMNS = 4096  # of a program that only copies
