"""AltUp on the GPU: sums of streams, and passes over rows that need their mean first."""

import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._launch import pdl_options, tanh, wait_for_previous
from penstock.backends.cuda._rows import rounded
from penstock.ops.altup import LEAST
from penstock.ops.op import kernel

_COLUMNS = 512  # of a program of the mix
_BLOCK = 4096  # columns that a program of a row takes at a time


# mix       y[q] = sum_p c[q, p] s[p], c = weight tanh(scores) + bias, s = first, rest, extra; p in order
# shapes    first, y0 [T, D], rest, y [T, P - 1, D], scores [T, P], weight [P N, P], bias [P N] float32; extra [T, D] of
#           any float, or None
# grid      (T, ceil(D / COLUMNS)): COLUMNS columns of a token
# bytes     T * D * (2 P * 4 + itemsize) but for what comes from L1: each program reads its columns P times
# limits    D <= 65535 * COLUMNS
@triton.jit
def _mix_kernel(
    first_ptr, rest_ptr, scores_ptr, weight_ptr, bias_ptr, extra_ptr, y0_ptr, y_ptr, D,
    P: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    t = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = col < D
    k = tl.arange(0, WIDE)
    N: tl.constexpr = P if extra_ptr is None else P + 1
    score = tanh(tl.load(scores_ptr + t * P + k, mask=k < P, other=0.0))
    rest_ptr += t * (P - 1) * D + col
    y_ptr += t * (P - 1) * D + col
    for q in tl.static_range(P):
        total = tl.zeros((COLUMNS,), tl.float32)
        for p in tl.static_range(N):
            at = q * N + p
            c = tl.sum(tl.load(weight_ptr + at * P + k, mask=k < P, other=0.0) * score, axis=0) + tl.load(bias_ptr + at)
            if p == 0:
                s = tl.load(first_ptr + t * D + col, mask=live, other=0.0)
            elif p < P:
                s = tl.load(rest_ptr + (p - 1) * D, mask=live, other=0.0)
            else:
                s = tl.load(extra_ptr + t * D + col, mask=live, other=0.0).to(tl.float32)
            total += c * s
        if q == 0:
            tl.store(y0_ptr + t * D + col, total, mask=live)
        else:
            tl.store(y_ptr + (q - 1) * D, total, mask=live)


@kernel(ops.altup_mix, device="cuda")
def altup_mix(first, rest, scores, weight, bias, extra=None, *, out):
    if first.numel():
        T, D = first.shape
        P = rest.shape[1] + 1
        _mix_kernel[(T, triton.cdiv(D, _COLUMNS))](
            first, rest, scores, weight, bias, extra, *out, D, P=P, WIDE=triton.next_power_of_2(P), COLUMNS=_COLUMNS,
            num_warps=4, **pdl_options(),
        )  # fmt: skip


@triton.jit
def _mean_square(row_ptr, D, about, BLOCK: tl.constexpr):
    """The mean of (x − about)² of a row."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + col, mask=col < D, other=0.0).to(tl.float32)
        total += tl.where(col < D, (x - about) * (x - about), 0.0)
    return tl.sum(total, axis=0) / D


# match     y = x sqrt(mean(like^2) / max(mean(x^2), 1e-5))
# shapes    x, y [T, D] of one dtype, like [T, D] of any
# grid      (T,): one program owns a row
# bytes     T * D * (2 itemsize of x + itemsize of like); x comes from L2 the second time
# limits    none
@triton.jit
def _match_kernel(x_ptr, like_ptr, y_ptr, D, least, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * D
    size = tl.maximum(_mean_square(x_ptr + at, D, 0.0, BLOCK), least)
    factor = tl.sqrt_rn(_mean_square(like_ptr + at, D, 0.0, BLOCK) / size)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at + col, mask=col < D, other=0.0).to(tl.float32)
        tl.store(y_ptr + at + col, rounded(x * factor, y_ptr.dtype.element_ty), mask=col < D)


@kernel(ops.altup_match, device="cuda")
def altup_match(x, like, *, out):
    if x.numel():
        block = min(_BLOCK, triton.next_power_of_2(x.shape[1]))
        _match_kernel[(len(x),)](x, like, out, x.shape[1], LEAST, BLOCK=block, num_warps=8, **pdl_options())


# cut       y = max(x - (mean + factor * std), 0)
# shapes    x, y [T, N] of one dtype
# grid      (T,): one program owns a row
# bytes     2 * T * N * itemsize; x comes from L2 the second and third time
# limits    none
@triton.jit
def _cut_kernel(x_ptr, y_ptr, N, factor, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * N
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at + col, mask=col < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N
    cut = mean + factor * tl.sqrt_rn(_mean_square(x_ptr + at, N, mean, BLOCK))
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at + col, mask=col < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + at + col, rounded(tl.maximum(x - cut, 0.0), y_ptr.dtype.element_ty), mask=col < N)


@kernel(ops.gaussian_topk, device="cuda")
def gaussian_topk(x, factor, *, out):
    if x.numel():
        block = min(_BLOCK, triton.next_power_of_2(x.shape[1]))
        _cut_kernel[(len(x),)](x, out, x.shape[1], factor, BLOCK=block, num_warps=8, **pdl_options())
