"""The draw of ops.sample_tokens: noise of ids, and the best sum of logit and noise among those that are kept."""

import triton
import triton.language as tl

from penstock.backends.cuda._launch import WIDENED

_FAR = tl.constexpr(2**31 - 1)  # beyond every id
_SLACK = tl.constexpr(1e-3)  # more than float32 is off in sums that can win


@triton.jit
def words_from(seed, position, start, BLOCK: tl.constexpr):
    """The random words of ids start … start + BLOCK − 1; start is a multiple of 4."""
    quads = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, quads * 0 + position.to(tl.uint32), quads, quads * 0, quads * 0)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def words_of(seed, position, ids):
    """The random words of any ids."""
    quads = (ids // 4).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, quads * 0 + position.to(tl.uint32), quads, quads * 0, quads * 0)
    return tl.where((ids & 2) == 0, tl.where((ids & 1) == 0, w0, w1), tl.where((ids & 1) == 0, w2, w3))


@triton.jit
def _log_about(x):
    """The logarithm of a normal float32, off by less than 2^-21 of it, and by no more than that near 1."""
    if WIDENED:  # the interpreter knows no PTX
        log2 = tl.log2(x)
    else:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return log2 * 0.6931471805599453


@triton.jit
def _noise_about(word):
    """−log(−log(u)) in float32, off by less than 1e-4."""
    v = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * (1.0 / (1 << 32))  # 1 − u, which float32 has near u = 1
    small = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * 0.25)))
    u = (word.to(tl.float32) + 0.5) * (1.0 / (1 << 32))
    return -_log_about(tl.where(v < 0.0625, small, -_log_about(u)))


@triton.jit
def _noise(word):
    return -tl.log(-tl.log((word.to(tl.float64) + 0.5) * (1.0 / (1 << 32))))


@triton.jit
def best_of(x, words, kept, logits_ptr, ids_ptr, start, highest, rate, temperature, min_p, seed, position):
    """The best sum of the kept logits and its id, −inf and _FAR if none is kept.

    x: the logits from logits_ptr on. Their ids are those from ids_ptr on, or start, start + 1, … if that is None. rate:
    1 / temperature in float32. Sums in float32 say which come into question; these, one as a rule, are worked out in
    float64.
    """
    slots = tl.arange(0, x.shape[0])
    about = tl.where(kept, (x - highest) * rate, float("-inf"))
    about = tl.where(about >= tl.log(min_p.to(tl.float32)) - _SLACK, about + _noise_about(words), float("-inf"))
    found, token = tl.full((), float("-inf"), tl.float64), tl.full((), _FAR, tl.int32)
    most = tl.max(about, axis=0)
    while (most > float("-inf")) & (most >= found - _SLACK):
        slot = tl.min(tl.where(about == most, slots, _FAR), axis=0)
        value = tl.load(logits_ptr + slot)
        at = start + slot if ids_ptr is None else tl.load(ids_ptr + slot)
        d = (value.to(tl.float64) - highest.to(tl.float64)) / temperature
        total = tl.where(tl.exp(d) >= min_p, d + _noise(words_of(seed, position, at)), float("-inf"))
        better = (total > found) | ((total == found) & (at < token))
        found, token = tl.where(better, total, found), tl.where(better, at, token)
        about = tl.where(slots == slot, float("-inf"), about)
        most = tl.max(about, axis=0)
    return found, token


@triton.jit
def winner_of(best_ptr, tokens_ptr, row, blocks, BLOCKS: tl.constexpr):
    """The id of the highest of what blocks of a row have found, the lowest of equal ones."""
    block = tl.arange(0, BLOCKS)
    there, at = block < blocks, row * blocks + block
    best = tl.load(best_ptr + at, mask=there, other=float("-inf"))
    tokens = tl.load(tokens_ptr + at, mask=there, other=_FAR)
    return tl.min(tl.where(best == tl.max(best, axis=0), tokens, _FAR), axis=0)
