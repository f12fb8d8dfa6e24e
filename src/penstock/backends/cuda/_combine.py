"""Merging the splits of `_attend`: into the result, or into the running state of a tiled attention."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._launch import sigmoid
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._runs import row_of


@triton.jit
def gated(y, gate_ptr, at, mask):
    """y · sigmoid(gate) of a y that was rounded."""
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return rounded(y, gate_ptr.dtype.element_ty).to(tl.float32) * sigmoid(gate)


@triton.jit
def _merged(part_ptr, stats_ptr, line, d, splits, used, WIDTH, S: tl.constexpr):
    """Maximum (in powers of two), denominator and sum of a row over the first `used` of its splits."""
    s = tl.arange(0, S)
    at = line * splits + s
    ok = (s < used)[:, None] & (d < WIDTH)[None, :]
    top = tl.load(stats_ptr + at * 2, mask=s < used, other=float("-inf"))
    total = tl.load(stats_ptr + at * 2 + 1, mask=s < used, other=0.0)
    highest = tl.max(top, axis=0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    # A split without positions has no part. What is there instead is read all the same: not to wait for `total`.
    part = tl.load(part_ptr + at[:, None] * WIDTH + d[None, :], mask=ok, other=0.0)
    part = tl.where((total > 0.0)[:, None], part, 0.0)
    return highest, tl.sum(weight * total, axis=0), tl.sum(weight[:, None] * part, axis=0)


# combine   y[r] = Σ_s 2^(top[r, s] − max) · part[r, s] / Σ_s 2^(top[r, s] − max) · total[r, s], times sigmoid(gate[r])
# shapes    part float32 [rows, splits, WIDTH], stats float32 [rows, splits, 2] (top, total), out, gate [rows, WIDTH];
#           number (or None) int32 [rows / heads], or one number where EACH is 0: with `more` the positions, of which
#           `window` are in sight; splits beyond them are not read. With starts row r is that of sequence r / heads,
#           which is the only one of its run, and goes to it in out; if SHORT, there are so many rows of each sequence,
#           parts are those of the rows of runs, and number goes by sequences
# grid      (rows, ⌈WIDTH / BLOCK⌉): BLOCK columns of a row over all splits at once
# bytes     4 · rows · splits · WIDTH, in L2 since the launch before wrote them
# limits    S = next power of two ≥ splits; S · BLOCK floats in registers
#
# PDL: it starts while `attend` ends, which by then has seen the end of the kernel before itself: so `number` is read
# before it waits.
@triton.jit(do_not_specialize=["splits", "capacity", "window"])
def combine_kernel(
    part_ptr, stats_ptr, gate_ptr, number_ptr, starts_ptr, out_ptr, splits, capacity, window, heads, WIDTH,
    MORE: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = splits
    if SHORT > 0:
        b, row, shift, there = row_of(starts_ptr, line // heads, SHORT)
        line = row.to(tl.int64) * heads + line % heads
        high = tl.minimum(tl.maximum(tl.load(number_ptr + b * EACH) + shift + 1, 0), capacity)
        used = tl.minimum(tl.cdiv(high - tl.maximum(high - window, 0) // N * N, N), splits)
    elif number_ptr is not None:
        high = tl.minimum(tl.maximum(tl.load(number_ptr + line // heads * EACH) + MORE, 0), capacity)
        used = tl.minimum(tl.cdiv(high - tl.maximum(high - window, 0) // N * N, N), splits)
    if PDL:
        gdc_wait()
    to = line
    if SHORT > 0:
        if there == 0:
            return
    elif starts_ptr is not None:
        first = tl.load(starts_ptr + line // heads)
        if tl.load(starts_ptr + line // heads + 1) != first + 1:
            return
        to = first.to(tl.int64) * heads + line % heads
    _, total, acc = _merged(part_ptr, stats_ptr, line, d, splits, used, WIDTH, S)
    y = acc / tl.where(total == 0.0, 1.0, total)
    if gate_ptr is not None:
        y = gated(y, gate_ptr, to * WIDTH + d, d < WIDTH)
    tl.store(out_ptr + to * WIDTH + d, rounded(y, out_ptr.dtype.element_ty), mask=d < WIDTH)


# accumulate  M' = max(M, m), Z' = Z · exp(M − M') + z · exp(m − M'), V' likewise, with m, z, v merged from the splits
# shapes    part float32 [H, splits, R], stats float32 [H, splits, 2]; state M, Z float32 [H], V float32 [H, R]
# grid      (H,): one program owns the state of one head, since all of it changes with M
# bytes     4 · H · R · (splits + 2)
# limits    S = next power of two ≥ splits, BLOCK = next power of two ≥ R; S · BLOCK floats in registers
@triton.jit(do_not_specialize=["splits"])
def accumulate_kernel(
    part_ptr, stats_ptr, max_ptr, sum_ptr, acc_ptr, splits, R, S: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr
):
    line = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    top, total, acc = _merged(part_ptr, stats_ptr, line, d, splits, splits, R, S)
    top = top * 0.6931471805599453  # in powers of e, as the state
    if not FIRST:
        old = tl.load(max_ptr + line)
        new = tl.maximum(old, top)
        keep = tl.where(old == float("-inf"), 0.0, tl.exp(old - new))
        take = tl.where(top == float("-inf"), 0.0, tl.exp(top - new))
        before = tl.load(acc_ptr + line * R + d, mask=d < R, other=0.0)
        total = tl.where(keep == 0.0, 0.0, tl.load(sum_ptr + line) * keep) + total * take
        acc = tl.where(keep == 0.0, 0.0, before * keep) + acc * take
        top = new
    tl.store(max_ptr + line, top)
    tl.store(sum_ptr + line, total)
    tl.store(acc_ptr + line * R + d, acc, mask=d < R)
