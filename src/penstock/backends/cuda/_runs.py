"""Finding the runs of several sequences in the rows of a ragged call (ops/ragged.py)."""

import triton
import triton.language as tl

import penstock.backends.cuda._launch  # noqa: F401  (sets Triton up)


def block_of(sequences: int) -> int:
    """Sequences that a program looks at at once: one number for all calls of up to 256, so that they share kernels."""
    return max(256, triton.next_power_of_2(sequences))


@triton.jit
def sequence_of(starts_ptr, B, t, SEQUENCES: tl.constexpr):
    """Whose rows t [N] are: the number of runs that end in front of them; B for rows of no sequence."""
    b = tl.arange(0, SEQUENCES)[None, :]
    end = tl.load(starts_ptr + 1 + b, mask=b < B, other=0)
    return tl.sum(((b < B) & (end <= t[:, None])).to(tl.int32), axis=1)


@triton.jit
def row_of(starts_ptr, number, SHORT: tl.constexpr):
    """Row number % SHORT of the run of sequence number // SHORT: that sequence, the row, minus how many of the run come
    from it on, and whether there is such a row, in a run of up to SHORT.
    """
    b, place = number // SHORT, number % SHORT
    first = tl.load(starts_ptr + b)
    T = tl.load(starts_ptr + b + 1) - first
    return b, first + place, place - T, (place < T) & (T <= SHORT)


@triton.jit
def by_chunks(length, kept, longest):
    """Whether a run of the delta rule goes by chunks: one of more than `longest` rows that is not kept."""
    return (length > longest) & (kept == 0)


@triton.jit
def chunked_lengths(starts_ptr, slots_ptr, keep_ptr, B, slots, longest, SEQUENCES: tl.constexpr):
    """Rows [SEQUENCES] of the runs that go by chunks, 0 for all others."""
    n = tl.arange(0, SEQUENCES)
    first = tl.load(starts_ptr + n, mask=n < B, other=0)
    length = tl.load(starts_ptr + n + 1, mask=n < B, other=0) - first
    slot = tl.load(slots_ptr + n, mask=n < B, other=-1)
    kept = tl.zeros((SEQUENCES,), tl.int32)
    if keep_ptr is not None:
        kept = tl.load(keep_ptr + n, mask=n < B, other=0)
    return tl.where(by_chunks(length, kept, longest) & (slot >= 0) & (slot < slots), length, 0)
