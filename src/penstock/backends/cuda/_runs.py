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
