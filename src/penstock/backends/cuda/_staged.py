"""Products of the pairs of tokens and experts whose weights pass through shared memory in bulk copies.

What `_few_rows` does for tiles of pairs of one expert, for weights in rows of a few kilobytes. There a warp loads its
codes into registers, so that what is under way from memory is bounded by registers, and every load asks for parts of
8 rows. Here a thread asks for whole rows of 16 or 64 (a stage) and the copy engine brings them while the warps multiply
the stage before; x stays in registers as long as a program has rows of the same tile.

A program has S · V warps: S share K, each with the x of its own groups, and V the rows of a stage. Partial sums of S
warps meet in shared memory, in the order of the warps. Shared memory of the ring is asked for in PTX: Triton knows
nothing of it. In the interpreter, which knows no PTX, words come from memory and sums are made by the tensor.
"""

import functools
from collections import namedtuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._few_rows import (
    Tiles,
    _Arrays,
    _clear,
    _either,
    _end,
    _store,
    _tile_count,
    _tile_places,
)
from penstock.backends.cuda._lanes import (
    MAGIC,
    Constants,
    _add_tile,
    _load,
    _load_x,
    _sums,
    _types,
    lane_pairs,
    lane_words,
    warps,
    word_parts,
    x_parts,
)
from penstock.backends.cuda._launch import (
    INTERPRETED,
    WIDENED,
    activation,
    capability,
    compiled_for,
    multiprocessors,
    pdl_options,
)
from penstock.backends.cuda._matvec import NO_WEIGHT
from penstock.backends.cuda._tuning import (
    STAGED_NUMBERS,
    STAGED_PROGRAMS,
    STAGED_REGISTERS,
    STAGED_TOKENS,
    STAGED_WARPS,
)
from penstock.quant import GgufTensor, QuantizedTensor

# What a stage holds: ROWS of N rows, CODES and SCALES bytes in each, STRIDE bytes from four rows of codes to the next
# four; bytes of a stage, where barriers and sums of parts begin behind the stages, and bytes of it all.
Ring = namedtuple("Ring", "N ROWS CODES SCALES STRIDE STAGE BARRIERS PARTIALS BYTES")
_STAGES = 2
_SHARED = 48 << 10  # bytes that PTX may ask for by itself


@triton.constexpr_function
def warp_groups(C):
    """Groups of a row that a warp has."""
    return C.K // C.GS // C.S


# -- PTX -------------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def _ring_asm(nbytes):
    return f"{{.shared .align 128 .b8 ring[{nbytes}]; mov.u32 $0, ring; add.u32 $0, $0, $1;}}"


_BARRIER_ASM = tl.constexpr(
    "{.reg .pred p; setp.ne.b32 p, $2, 0; @p mbarrier.init.shared::cta.b64 [$1], 1;"
    " @p fence.mbarrier_init.release.cluster; @p fence.proxy.async.shared::cta; mov.u32 $0, 0;}"
)
_EXPECT_ASM = tl.constexpr(
    "{.reg .pred p; .reg .b64 s; setp.ne.b32 p, $3, 0;"
    " @p mbarrier.arrive.expect_tx.shared::cta.b64 s, [$1], $2; mov.u32 $0, 0;}"
)
_COPY_ASM = tl.constexpr(
    "{.reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [$1], [$2], $3, [$4]; mov.u32 $0, 0;}"
)
_WAIT_ASM = tl.constexpr(
    "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @p bra done; bra again; done:"
    " mov.u32 $0, 0;}"
)


@triton.constexpr_function
def _shared_asm(size, offset):
    if size == 2:
        return f"{{.reg .b16 a, z; mov.b16 z, 0; ld.shared.b16 a, [$1 + {offset}]; mov.b32 $0, {{a, z}};}}"
    count = size // 4
    to = "$0" if count == 1 else "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    return f"ld.shared.{'' if count == 1 else f'v{count}.'}b32 {to}, [${count} + {offset}];"


@triton.constexpr_function
def _shared_constraints(size):
    return ",".join(["=r"] * max(1, size // 4) + ["r"])


@triton.jit
def _from_ring(at, SIZE: tl.constexpr, OFFSET: tl.constexpr):
    """SIZE bytes, 2 to 16, at OFFSET from addresses of shared memory, as a tuple of words."""
    words = ()
    if SIZE <= 4:
        words += (
            tl.inline_asm_elementwise(
                _shared_asm(SIZE, OFFSET), _shared_constraints(SIZE), [at], dtype=tl.int32, is_pure=False, pack=1
            ),
        )
    else:
        kinds: tl.constexpr = _types(tl.int32, SIZE // 4)
        words += tl.inline_asm_elementwise(
            _shared_asm(SIZE, OFFSET), _shared_constraints(SIZE), [at], dtype=kinds, is_pure=False, pack=1
        )
    return words


# -- the ring --------------------------------------------------------------------------------------------------------


@triton.jit
def _ring(thread, R: tl.constexpr):
    """The address of the ring for each thread; its barriers are ready."""
    ring = thread * 0
    if not WIDENED:
        ring = tl.inline_asm_elementwise(_ring_asm(R.BYTES), "=&r,r", [ring], dtype=tl.int32, is_pure=False, pack=1)
        first = (thread < 2).to(tl.int32)
        at = ring + R.BARRIERS + 8 * (thread % 2)
        tl.inline_asm_elementwise(_BARRIER_ASM, "=r,r,r", [at, first], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
    return ring


@triton.jit
def _fill(ring, stage, source, thread, C: tl.constexpr, R: tl.constexpr):
    """Ask for the rows at `source`, addresses of codes, scales and biases, for a stage: a thread for each four rows of
    codes, in different warps where that goes, one for the scales and one for the biases.
    """
    if not WIDENED:
        COPIES: tl.constexpr = R.ROWS // 4
        EVERY: tl.constexpr = warps(C) // COPIES
        SCALES: tl.constexpr = R.ROWS * R.SCALES
        barrier = ring + R.BARRIERS + 8 * stage
        total, first = thread * 0 + (R.ROWS * R.CODES + 2 * SCALES), (thread == 0).to(tl.int32)
        tl.inline_asm_elementwise(
            _EXPECT_ASM, "=r,r,r,r", [barrier, total, first], dtype=tl.int32, is_pure=False, pack=1
        )
        codes, number = thread % EVERY == 0, thread // EVERY
        start = tl.where(codes, source[0] + number * (4 * R.CODES), tl.where(thread == 1, source[1], source[2]))
        behind = tl.where(codes, number * R.STRIDE, COPIES * R.STRIDE + tl.where(thread == 1, 0, SCALES))
        size = tl.where(codes, 4 * R.CODES, tl.where(thread < 3, SCALES, 0))
        tl.inline_asm_elementwise(
            _COPY_ASM, "=r,r,l,r,r", [ring + stage * R.STAGE + behind, start, size, barrier], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _arrived(ring, stage, parity, R: tl.constexpr):
    """Wait until a stage of the ring is there, for the time that parity tells."""
    if not WIDENED:
        barrier = ring + R.BARRIERS + 8 * stage
        tl.inline_asm_elementwise(
            _WAIT_ASM, "=r,r,r", [barrier, barrier * 0 + parity], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.constexpr_function
def _scale_bytes(groups):
    """Bytes of the scales of so many groups that one load takes."""
    return min(16, 2 * groups & -2 * groups)


@triton.jit
def _place(f):
    """The row of 16 that is the f-th of a product. Its neighbours there are of other copies, which begin in other banks
    of shared memory.
    """
    return f % 4 * 4 + f // 4


@triton.jit
def _load_stage(ring, stage, source, lanes, C: tl.constexpr, R: tl.constexpr):
    """Words, scales and biases of a lane in the 16 rows of its warp in a stage: of each group those of the r-th row,
    then those of the (r + 8)-th; all scales and biases of the first, then of the second.
    """
    part, v, r, q = lanes
    GROUPS: tl.constexpr = warp_groups(C)
    WORDS: tl.constexpr = lane_words(C.BITS, C.GS)
    BYTES: tl.constexpr = C.GS * C.BITS // 8
    SIZE: tl.constexpr = _scale_bytes(GROUPS)
    row = v * 16 + _place(r)  # the one 8 further in a product is 2 further here
    codes_at = row * R.CODES + part * (GROUPS * BYTES) + q * (4 * WORDS)
    scales_at = row * R.SCALES + part * (2 * GROUPS)
    PAD: tl.constexpr = R.STRIDE - 4 * R.CODES
    codes_in = ring + stage * R.STAGE + codes_at + row // 4 * PAD
    scales_in = ring + stage * R.STAGE + R.ROWS // 4 * R.STRIDE + scales_at
    words, scales, biases = (), (), ()
    for half in tl.static_range(2):
        for i in tl.static_range(2 * GROUPS // SIZE):
            if WIDENED:
                here = scales_at.to(tl.int64) + (half * 2 * R.SCALES + i * SIZE)
                scales += _load(source[1] + here, SIZE, "")
                biases += _load(source[2] + here, SIZE, "")
            else:
                scales += _from_ring(scales_in, SIZE, half * 2 * R.SCALES + i * SIZE)
                biases += _from_ring(scales_in, SIZE, (R.ROWS + half * 2) * R.SCALES + i * SIZE)
    for g in tl.static_range(GROUPS):
        for half in tl.static_range(2):
            if WIDENED:
                here = source[0] + codes_at.to(tl.int64) + (half * 2 * R.CODES + g * BYTES)
                words += (tl.load(here.to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, WORDS)[None, :]),)
            else:
                words += _from_ring(codes_in, 4 * WORDS, half * 2 * R.CODES + g * BYTES)
    return words, scales, biases


@triton.jit
def _multiply(loaded, xs, sums, magic, KIND: tl.constexpr, C: tl.constexpr):
    """The 4 products of a lane, as of `_products`, with what `_load_stage` loaded."""
    words, scales, biases = loaded
    WORDS: tl.constexpr = 2 * word_parts(C.BITS, C.GS)
    PARTS: tl.constexpr = x_parts(C.BITS, C.GS)
    total = ()
    for _ in tl.static_range(4):
        total += (tl.zeros([warps(C)], tl.float32),)
    for g in tl.static_range(warp_groups(C)):
        mine, x = words[g * WORDS : (g + 1) * WORDS], xs[g * PARTS : (g + 1) * PARTS]
        total = _add_tile(total, mine, scales, biases, x, sums[2 * g : 2 * g + 2], magic, g, KIND, C)
    return total


# -- sums of parts of K ----------------------------------------------------------------------------------------------


_PARTIAL_ASM = tl.constexpr(
    "{st.shared.f32 [$1], $2; st.shared.f32 [$1 + 64], $3; st.shared.f32 [$1 + 32], $4; st.shared.f32 [$1 + 96], $5;"
    " mov.u32 $0, 0;}"
)


@triton.jit
def _keep(ring, which, total, lanes, C: tl.constexpr, R: tl.constexpr):
    """Write the sums of a warp over its part of K, if there are several: [V, S, 8 tokens, 16 rows]."""
    if C.S > 1 and not WIDENED:
        part, v, r, q = lanes
        at = ring + (R.PARTIALS + which * (C.S * C.V * 512)) + (v * C.S + part) * 512 + q * 128 + r * 4
        tl.inline_asm_elementwise(_PARTIAL_ASM, "=r,r,f,f,f,f", (at,) + total, dtype=tl.int32, is_pure=False, pack=1)  # noqa: RUF005


@triton.jit
def _sum_of_parts(ring, which, total, thread, C: tl.constexpr, R: tl.constexpr):
    """Σ over the parts of K of the products of row o % 16 and token o // 16, o = thread % (32 · S) + i · 32 · S, for
    each i.
    """
    made = ()
    if WIDENED:
        y = ()
        for i in tl.static_range(4):
            y += (tl.sum(tl.reshape(total[i], [C.V, C.S, 8, 4]), 1),)
        both = tl.join(tl.join(y[0], y[1]), tl.join(y[2], y[3]))  # [V, r, q, token, half]
        every = tl.reshape(tl.permute(both, (0, 2, 3, 4, 1)), [C.V, 4 // C.S, 32 * C.S])
        for i in tl.static_range(4 // C.S):
            mine = tl.arange(0, 4 // C.S)[None, :, None] == i
            made += (tl.reshape(tl.sum(tl.where(mine, every, 0.0), 1), [warps(C)]),)
    else:
        v, rest = thread // (32 * C.S), thread % (32 * C.S)
        at = ring + (R.PARTIALS + which * (C.S * C.V * 512)) + v * (C.S * 512) + rest * 4
        for i in tl.static_range(4 // C.S):
            y = _from_ring(at, 4, i * 128 * C.S)[0].to(tl.float32, bitcast=True)
            for s in tl.static_range(1, C.S):
                y += _from_ring(at, 4, s * 512 + i * 128 * C.S)[0].to(tl.float32, bitcast=True)
            made += (y,)
    return made


# -- the kernel ------------------------------------------------------------------------------------------------------

@triton.jit
def _source(a, this, other, item, matrix, stack, R: tl.constexpr):
    """Addresses of the codes, scales and biases of an item's rows in a weight."""
    ACROSS: tl.constexpr = R.N // R.ROWS
    slot = tl.load(a.tiles + item // ACROSS, cache_modifier=".cg")
    row = item % ACROSS * R.ROWS + tl.where(slot < stack, slot, 0).to(tl.int64) * matrix
    codes, scales, biases = _either(this, other, slot == stack)
    at = row * R.SCALES
    return codes.to(tl.int64) + row * R.CODES, scales.to(tl.int64) + at, biases.to(tl.int64) + at


@triton.jit
def _x_of(a, start, end, pairs_per_x, lanes, C: tl.constexpr):
    """x of a lane in the groups of its warp, and the sums over these groups."""
    part, _, r, q = lanes
    GROUPS: tl.constexpr = warp_groups(C)
    PARTS: tl.constexpr = x_parts(C.BITS, C.GS)
    there = start + r < end
    row = tl.load(a.order + start + r, mask=there, other=0, cache_modifier=".cg") // pairs_per_x
    at = a.x.to(tl.int64) + row.to(tl.int64) * (2 * C.K) + part * (2 * GROUPS * C.GS) + q * (C.GS // 2)
    xs, sums = (), ()
    for g in tl.static_range(GROUPS):
        xs += _load_x(at + g * (2 * C.GS), there.to(tl.int32), C.BITS, C.GS)
    for g in tl.static_range(GROUPS):
        sums += _sums(xs[g * PARTS : (g + 1) * PARTS], lane_pairs(C.BITS, C.GS), warps(C))
    return xs, sums


# staged    y[q] = W[e] . x[q // pairs_per_x] for the pairs q of a tile, with ACT act(W[e] . x) * (U[e] . x), times its
#           weight if there are some; the expert of a tile is its slot, `stack` stands for the shared one; 0 for the
#           pairs without an expert
# shapes    as `few` of `_few_rows`, GROUPED
# grid      (programs,): items of R.ROWS rows of a tile, each program as many neighbours as the others
# bytes     the weights that are named, once for each tile; x and y from L2
# limits    N a multiple of R.ROWS; rows of codes and scales of a stage in multiples of 16 bytes, two stages in 48 KB;
#           even numbers of groups for a warp, or one; compute capability 9.0 on
@triton.jit(do_not_specialize=["magic", "P", "NT", "stack", "pairs_per_x"])
def _staged_kernel(
    a, magic, P, matrix, NT, stack, pairs_per_x, C: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    KIND: tl.constexpr = a.w[1].dtype.element_ty
    AHEAD: tl.constexpr = 2 if C.ACT is None else 1
    thread = tl.arange(0, warps(C))
    lanes = (thread // 32 % C.S, thread // (32 * C.S), thread % 32 // 4, thread % 4)
    _, v, r, q = lanes
    ring = _ring(thread, R)
    across: tl.constexpr = R.N // R.ROWS
    N: tl.constexpr = R.N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    items = _tile_count(a, NT, stack) * across
    begin = (items.to(tl.int64) * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
    after = (items.to(tl.int64) * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
    if begin < after:
        _fill(ring, 0, _source(a, a.w, a.common, begin, matrix, stack, R), thread, C, R)
        if C.ACT is not None:
            _fill(ring, 1, _source(a, a.up, a.common_up, begin, matrix, stack, R), thread, C, R)
        elif begin + 1 < after:
            _fill(ring, 1, _source(a, a.w, a.common, begin + 1, matrix, stack, R), thread, C, R)
    item = begin
    while item < after:
        tile = item // across
        last = tl.minimum(after, (tile + 1) * across)
        slot = tl.load(a.tiles + tile, cache_modifier=".cg")
        start, end = _tile_places(a, tile, slot, NT, C)
        xs, sums = _x_of(a, start, end, pairs_per_x, lanes, C)
        ends = ()
        if C.S == 1:
            for i in tl.static_range(2):
                ends += (_end(a, start + 2 * q + i, end, C),)
        else:
            for i in tl.static_range(4 // C.S):
                ends += (_end(a, start + thread % (32 * C.S) // 16 + i * 2 * C.S, end, C),)
        for now in range(item, last):
            turn = now - begin
            stage, parity = (turn % 2, turn // 2 % 2) if C.ACT is None else (turn * 0, turn % 2)
            source = _source(a, a.w, a.common, now, matrix, stack, R)
            _arrived(ring, stage, parity, R)
            loaded = _load_stage(ring, stage, source, lanes, C, R)
            tl.debug_barrier()
            if now + AHEAD < after:
                _fill(ring, stage, _source(a, a.w, a.common, now + AHEAD, matrix, stack, R), thread, C, R)
            total = _multiply(loaded, xs, sums, magic, KIND, C)
            _keep(ring, 0, total, lanes, C, R)
            if C.ACT is not None:
                source = _source(a, a.up, a.common_up, now, matrix, stack, R)
                _arrived(ring, 1, parity, R)
                loaded = _load_stage(ring, 1, source, lanes, C, R)
                tl.debug_barrier()
                if now + 1 < after:
                    _fill(ring, 1, _source(a, a.up, a.common_up, now + 1, matrix, stack, R), thread, C, R)
                above = _multiply(loaded, xs, sums, magic, KIND, C)
                _keep(ring, 1, above, lanes, C, R)
            if C.S > 1:
                tl.debug_barrier()
                total = _sum_of_parts(ring, 0, total, thread, C, R)
                if C.ACT is not None:
                    above = _sum_of_parts(ring, 1, above, thread, C, R)
            if C.ACT is not None:
                made = ()
                for i in tl.static_range(len(total)):
                    made += (activation(total[i], C.ACT) * above[i],)
                total = made
            first = now % across * R.ROWS + v * 16
            if C.S == 1:
                for i in tl.static_range(4):
                    _store(a, total[i], first + _place(i // 2 * 8 + r), ends[i % 2], N, C)
            else:
                for i in tl.static_range(4 // C.S):
                    _store(a, total[i], first + _place(thread % 16), ends[i], N, C)
        item = last
    _clear(a, P, NT, stack, N, C)


# -- launches --------------------------------------------------------------------------------------------------------


@functools.cache
def _shape(N: int, K: int, bits: int, gs: int, gated: bool) -> tuple[int, int, Ring] | None:
    """Warps that share K and those that share rows, and the ring; None: too long rows, or such that do not divide."""
    parts = max(1, triton.next_power_of_2(-(-K // STAGED_NUMBERS)))
    across = STAGED_WARPS // parts
    if across == 0 or lane_words(bits, gs) not in (1, 2, 4) or K // gs % parts or N % (16 * across):
        return None
    groups, rows = K // gs // parts, 16 * across
    codes, scales = K * bits // 8, K // gs * 2
    stride = 4 * codes + (16 * lane_words(bits, gs) - 4 * codes) % 128
    stage = -(-(rows // 4 * stride + 2 * rows * scales) // 128) * 128
    partials = _STAGES * stage + 128
    nbytes = partials + ((1 + gated) * parts * across * 512 if parts > 1 else 0)
    if codes % 16 or rows * scales % 16 or (groups > 1 and groups % 2) or nbytes > _SHARED:
        return None
    return parts, across, Ring(N, rows, codes, scales, stride, stage, _STAGES * stage, partials, nbytes)


def stages(x: torch.Tensor, N: int, tiles: Tiles, act: str | None, *weights: QuantizedTensor | None) -> bool:
    """Whether `staged_products` takes these products, which lanes can take, and takes less time for them."""
    there = [w for w in weights if w is not None]
    if tiles.rows != 8 or tiles.pairs < STAGED_TOKENS * tiles.every or capability(x) < (9, 0):
        return False
    if any(isinstance(w, GgufTensor) or w.mode != "affine" for w in there):
        return False
    if _shape(N, there[0].shape[-1], there[0].bits, there[0].group_size, act is not None) is None:
        return False
    return all(part.data_ptr() % 16 == 0 for w in there for part in w.arrays)


def staged_products(
    x: torch.Tensor, w: QuantizedTensor, up: QuantizedTensor | None, tiles: Tiles, pairs_per_x: int, act: str | None,
    out: torch.Tensor, common: QuantizedTensor | None = None, common_up: QuantizedTensor | None = None,
    weights: torch.Tensor | None = None, score: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """As `expert_products` of `_few_rows`, in tiles of 8 pairs."""
    N, K = out.shape[-1], w.shape[-1]
    shape = _shape(N, K, w.bits, w.group_size, act is not None)
    assert shape is not None and tiles.rows == 8
    parts, across, R = shape
    every = tiles.every if tiles.shared else 0
    fixed = (1, 1, parts, across, K // w.group_size // parts, 1, act, True, False, True, every, None)
    C = Constants(K, w.bits, w.group_size, *fixed)
    ups, *shared = (NO_WEIGHT if one is None else one.arrays for one in (up, common, common_up))
    if act is not None and up is None:
        ups = tuple(part[:, N:] for part in w.arrays)
    a = _Arrays(w.arrays, ups, *shared, x, None, tiles.order, tiles.tiles, weights, score, out, tiles.counts)
    P, NT = tiles.pairs, tiles.most
    programs = 3 if INTERPRETED else STAGED_PROGRAMS * multiprocessors(x)
    _staged_kernel[(min(NT * (N // R.ROWS), programs),)](
        a, MAGIC[w.bits], P, w.shape[-2], NT, w.shape[0], pairs_per_x, C=compiled_for(C), R=compiled_for(R),
        num_warps=STAGED_WARPS, num_stages=1, maxnreg=STAGED_REGISTERS, **pdl_options(),
    )  # fmt: skip
