"""Sampling on the CPU: limits as values, found by sorting little, then one pass for the draw.

What top-k and top-p keep are the ids above a value, and of those that have it the ones up to an id. The draw goes
through the row block by block. Noise is made where a block can still win: the highest logit of a block and the largest
noise there is bound its sums, then each id's random word bounds its own, and few are left to work out in float64.
"""

import math
import threading

import numpy as np

from penstock import ops
from penstock.backends.cpu.compile import njit
from penstock.ops.op import kernel
from penstock.ops.sampling import INACTIVE, NOT_FINITE, ONE, SEEN

_WORD = np.uint64(0xFFFFFFFF)
_EVEN, _ODD = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEP0, _STEP1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_HALF = np.uint64(32)

_BLOCK = 256  # logits of a block: its random words, 1 KB, stay in the first cache
_SORTED = 4096  # the highest top_k whose ids are sorted
_BINS = 4096  # of the histogram in _limit
_MOST = 22.88  # noise
_SLACK = 1e-3  # more than float32 is off in sums that can win
_LN2 = math.log(2)

_rooms = threading.local()


@kernel(ops.sample_tokens, device="cpu")
def sample_tokens(
    logits: np.ndarray,
    positions: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    seed: np.ndarray,
    mode: str = "full",
    slots: np.ndarray | None = None,
    counts: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    penalties: np.ndarray | None = None,
    masked: np.ndarray | None = None,
    masks: np.ndarray | None = None,
    logprobs: int | None = None,
    *,
    out: tuple[np.ndarray | None, ...],
) -> None:
    tokens, own, top_ids, top = out
    for b, position in enumerate(positions.tolist()):
        x = logits[b]
        if position >= 0 and slots is not None and (s := slots[b]) >= 0:
            x = _penalized(x, bias[s], counts[s], *penalties[s])
        if position >= 0 and masked is not None and masked[b] >= 0:
            x = _allowed(x, masks[masked[b]])
        how = (temperature.item(b), top_k.item(b), top_p.item(b), min_p.item(b), seed.item(b))
        tokens[b], highest = _token(x, position, *how)
        if own is not None:
            _logprobs(x, tokens[b], highest, own[b : b + 1], top_ids[b], top[b])


@kernel(ops.token_logprobs, device="cpu")
def token_logprobs(
    logits: np.ndarray, tokens: np.ndarray, top: int = 0, *, out: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> None:
    own, ranks, ids, values = out
    for r, token in enumerate(tokens.tolist()):
        x = logits[r]
        highest = float(x[x.argmax()])  # the first NaN, if there is one
        if token >= 0 and not math.isfinite(highest):
            token = NOT_FINITE
        _logprobs(x, token, highest, own[r : r + 1], ids[r], values[r])
        ranks[r] = token if token < 0 else 1 + np.count_nonzero(x > x[token])


def _token(
    x: np.ndarray, position: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> tuple[int, float]:
    """The token of a row, and its highest logit."""
    if position < 0:
        return INACTIVE, 0.0
    best = int(x.argmax())  # the first of equal ones, or the first NaN
    highest = float(x[best])
    if not math.isfinite(highest):
        return NOT_FINITE, highest
    if temperature == 0:
        return best, highest
    key, limit, last = np.uint64(seed & 0xFFFFFFFFFFFFFFFF), -math.inf, x.size
    maxima = _maxima(x)
    if 0 < top_k <= min(_SORTED, x.size - 1):
        ids = _leading(x, maxima, top_k)
        if top_p < 1:
            sums = np.cumsum(_weigh(x[ids], highest, temperature, np.empty(top_k)))
            ids = ids[: int(sums.searchsorted(top_p * sums[-1])) + 1]
        return _draw_of(x, ids, best, temperature, min_p, key, position), highest
    if 0 < top_k < x.size or top_p < 1:
        limit, last = _limit(x, highest, temperature, top_k if 0 < top_k < x.size else x.size, top_p)
    return _draw(x, maxima, best, temperature, min_p, limit, last, key, position), highest


def _logprobs(x, token: int, highest: float, own: np.ndarray, top_ids: np.ndarray, top: np.ndarray) -> None:
    own[0], top_ids[:], top[:] = -np.inf, -1, -np.inf
    if token < 0:
        return
    log_sum = math.log(_weigh(x, highest, 1.0, _scratch(x.size)).sum())
    own[0] = float(x[token]) - highest - log_sum
    n = min(top.size, x.size)
    if n:
        ids = _leading(x, _maxima(x), n)
        ids = ids[x[ids] > -np.inf]
        top_ids[: ids.size], top[: ids.size] = ids, x[ids].astype(np.float64) - highest - log_sum


# -- edits -----------------------------------------------------------------------------------------------------------


@njit
def _penalized(x, bias, counts, repetition, presence, frequency):
    y = np.empty_like(x)
    r = np.float32(repetition)
    for i in range(x.size):
        value = x[i] + bias[i]
        if counts[i]:
            if counts[i] & SEEN:
                value = value / r if value > 0 else value * r
            n = counts[i] // ONE
            if n > 0:
                value -= np.float32(frequency * n + presence)
        y[i] = value
    return y


@njit
def _allowed(x, words):
    y = np.empty_like(x)
    for i in range(x.size):
        y[i] = x[i] if words[i >> 5] >> (i & 31) & 1 else np.float32(-np.inf)
    return y


# -- limits ----------------------------------------------------------------------------------------------------------


@njit
def _highest_bits(bits):
    """Bits of the highest of some float32, none NaN, from their bits: LLVM has vector code for integers alone."""
    most = np.int32(-(2**31))
    for i in range(bits.size):
        ordered = bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
        most = ordered if ordered > most else most
    return most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit
def _maxima(x):
    """The highest logit of each block; none is NaN."""
    maxima = np.empty((x.size + _BLOCK - 1) // _BLOCK, np.float32)
    bits, highest = x.view(np.int32), maxima.view(np.int32)
    for block in range(maxima.size):
        highest[block] = _highest_bits(bits[block * _BLOCK : block * _BLOCK + _BLOCK])
    return maxima


@njit
def _at_least(x, maxima, value):
    """Ids, ascending, whose logits reach a value."""
    count = 0
    for block in range(maxima.size):
        if maxima[block] >= value:
            part = x[block * _BLOCK : block * _BLOCK + _BLOCK]
            for i in range(part.size):
                count += part[i] >= value
    ids = np.empty(count + 1, np.int64)  # the last one is written to for nothing
    count = 0
    for block in range(maxima.size):
        if maxima[block] >= value:
            part = x[block * _BLOCK : block * _BLOCK + _BLOCK]
            for i in range(part.size):
                ids[count] = block * _BLOCK + i
                count += part[i] >= value
    return ids[:count]


def _leading(x: np.ndarray, maxima: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k first ranks, in their order. k blocks whose maxima reach a bound hold k logits that do."""
    bound = float(np.partition(maxima, maxima.size - k)[maxima.size - k]) if k < maxima.size else -math.inf
    ids = _at_least(x, maxima, bound)
    return ids[np.argsort(-x[ids], kind="stable")[:k]]


def _weigh(x: np.ndarray, highest: float, temperature: float, out: np.ndarray) -> np.ndarray:
    """out = exp((x − highest) / temperature) in float64. The difference comes first: it cannot overflow."""
    np.copyto(out, x)
    out -= highest
    if temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the highest to −inf, and their weight to 0
            out /= temperature
    return np.exp(out, out=out)


def _scratch(size: int) -> np.ndarray:
    """Float64 room of this thread: fresh pages would take as long as the exponentials."""
    room = getattr(_rooms, "room", None)
    if room is None or room.size < size:
        room = _rooms.room = np.empty(size)
    return room[:size]


@njit
def _histogram(x, weights, highest, depth, counts, sums):
    """Number and weight of logits in bins of equal width, from the highest down to a depth; their ids and bins."""
    floor = np.float32(max(highest - 1.001 * depth - 1e-6 * abs(highest), -3.4e38))
    count = 0
    for i in range(x.size):
        count += x[i] >= floor
    ids, bins = np.empty(count + 1, np.int32), np.empty(count, np.int32)  # one more, which is written to for nothing
    count = 0
    for i in range(x.size):
        ids[count] = i
        count += x[i] >= floor
    for j in range(count):
        below = (highest - np.float64(x[ids[j]])) * (counts.size / depth)
        bins[j] = min(int(below), counts.size - 1)
        counts[bins[j]] += 1
        sums[bins[j]] += weights[ids[j]]
    return ids[:count], bins


def _limit(x: np.ndarray, highest: float, temperature: float, top_k: int, top_p: float) -> tuple[float, int]:
    """Value and id of the last rank that top_k and then top_p keep.

    A histogram finds the range of values that the last rank lies in, and only that is sorted.
    """
    weights = None if top_p == 1 else _weigh(x, highest, temperature, _scratch(x.size))
    if top_k < x.size:
        value = np.partition(x, x.size - top_k)[x.size - top_k]
        last = int(np.flatnonzero(x == value)[top_k - int(np.count_nonzero(x > value)) - 1])
        if weights is None:
            return float(value), last
        weights[x < value] = 0
        weights[last + 1 :][x[last + 1 :] == value] = 0
    assert weights is not None
    total = float(weights.sum())
    goal = top_p * total
    # What lies deeper weighs less than half of 1 − top_p together, so that top_p cuts above it.
    depth = min(max(temperature * math.log(2 * x.size / ((1 - top_p) * total)), 1e-30), 1e39)
    counts, sums = np.zeros(_BINS, np.int64), np.zeros(_BINS)
    ids, bins = _histogram(x, weights, highest, depth, counts, sums)
    reached = np.cumsum(sums)
    at = min(int(reached.searchsorted(goal)), int(np.flatnonzero(sums)[-1]))
    before, weight_before = int(counts[:at].sum()), float(reached[at - 1]) if at else 0.0
    near = ids[bins == at]
    near = near[np.argsort(-x[near], kind="stable")][: top_k - before]
    running = np.cumsum(_weigh(x[near], highest, temperature, np.empty(near.size)))
    last = int(near[min(int(running.searchsorted(goal - weight_before)), near.size - 1)])
    return float(x[last]), last


# -- the draw --------------------------------------------------------------------------------------------------------


@njit
def _words(first, count, seed, position, words):
    """The random words of ids 4 · first to 4 · (first + count) − 1."""
    for i in range(count):
        c0, c1, c2, c3 = np.uint64(position), np.uint64(first + i), np.uint64(0), np.uint64(0)
        k0, k1 = seed & _WORD, seed >> _HALF
        for _ in range(10):
            even, odd = c0 * _EVEN, c2 * _ODD
            c0, c1, c2, c3 = (odd >> _HALF) ^ c1 ^ k0, odd & _WORD, (even >> _HALF) ^ c3 ^ k1, even & _WORD
            k0, k1 = (k0 + _STEP0) & _WORD, (k1 + _STEP1) & _WORD
        words[4 * i] = c0
        words[4 * i + 1] = c1
        words[4 * i + 2] = c2
        words[4 * i + 3] = c3


@njit
def _noise(word):
    return -math.log(-math.log((np.float64(word) + 0.5) * 2.0**-32))


@njit
def _chances(words, n, chances):
    """chances[i] = a lower bound of (1 − u) · 2^31 of a word."""
    for i in range(n):
        chances[i] = np.float32(np.int32(words[i] >> np.uint32(1)) ^ np.int32(0x7FFFFFFF)) + np.float32(0.25)


@njit
def _sums_at_most(x, highest, rate, bits, sums):
    """sums[i] = an upper bound of the sum of each id of a block, about.

    G ≤ −log(1 − u), as −log(u) ≥ 1 − u; and log2(v) ≥ what a straight line between powers of two gives, which the bits
    of a float are: those of `_chances`.
    """
    for i in range(x.size):
        noise = np.float32(np.int32((127 + 31) << 23) - bits[i]) * np.float32(_LN2 / (1 << 23))
        sums[i] = (x[i] - highest) * rate + noise


@njit
def _draw(x, maxima, best, temperature, min_p, limit, last, seed, position):
    """The id with the highest sum of logit and noise, of those above the limit, and of those at it up to `last`."""
    highest = x[best]
    rate = np.float32(max(min(1 / temperature, 1e30), 2e-38))  # times −inf is −inf, times 0 is 0
    least = np.float32(math.log(min_p) - _SLACK) if min_p > 0 else np.float32(-np.inf)
    words, chances = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32)
    sums, top = np.empty(_BLOCK, np.float32), np.empty(1, np.float32)
    bits, sum_bits, top_bits = chances.view(np.int32), sums.view(np.int32), top.view(np.int32)
    _words(best // 4, 1, seed, position, words)
    token, found = best, _noise(words[best % 4])  # its logit is the highest: it is kept
    for block in range(maxima.size):
        most = (maxima[block] - highest) * rate
        if maxima[block] < limit or most < least or most + _MOST < found - _SLACK:
            continue
        start = block * _BLOCK
        part = x[start : start + _BLOCK]
        n = part.size
        _words(start // 4, (n + 3) // 4, seed, position, words)
        _chances(words, n, chances)
        _sums_at_most(part, highest, rate, bits, sums)
        top_bits[0] = _highest_bits(sum_bits[:n])
        if top[0] < found - _SLACK:
            continue
        for i in range(n):
            value = part[i]
            if sums[i] >= found - _SLACK and (value > limit or (value == limit and start + i <= last)):
                d = (np.float64(value) - np.float64(highest)) / temperature
                total = d + _noise(words[i])
                if (total > found or (total == found and start + i < token)) and (min_p == 0 or math.exp(d) >= min_p):
                    token, found = start + i, total
    return token


@njit
def _draw_of(x, ids, best, temperature, min_p, seed, position):
    """As `_draw`, of some ids in any order."""
    words = np.empty(4, np.uint32)
    token, found = best, -np.inf
    for i in ids:
        d = (np.float64(x[i]) - np.float64(x[best])) / temperature
        if math.exp(d) >= min_p:
            _words(i // 4, 1, seed, position, words)
            total = d + _noise(words[i % 4])
            if total > found or (total == found and i < token):
                token, found = i, total
    return token
