"""The token of a step from its logits: edited (bias, penalties, grammar), cut (top-k, top-p, min-p), then drawn; and
how likely a given one is.

The draw is Gumbel-max: every id has noise of its own that depends on the seed, the token's position and the id alone,
so every device gives the same token, alone or in a batch, and two distributions at one position share their noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.op import op

MODES = ("greedy", "plain", "top_k", "full")
FEW = 64  # the highest top_k in mode "top_k"
MAX_TOP = 20  # the highest number of log-probabilities of a row

INACTIVE, NOT_FINITE = -1, -2  # tokens of a row without a sequence, and of one whose logits the host has to look at

SEEN, ONE = 1, 2  # of an entry of counts: the repetition penalty holds for the id; one more token that was generated

_MASK = 0xFFFFFFFF


@dataclass(eq=False)
class Edits:
    """What is done to the logits of one request before its tokens are chosen: a row of each table of `sample_tokens`.

    counts int32 [V], bias float32 [V], penalties float64 [3]. A device has a copy and counts what it draws itself.
    `stale`: the copy lacks something else, and is made again. `forgotten`: ids that the repetition penalty no longer
    holds for, of which the copy does not know yet.
    """

    counts: Array
    bias: Array
    penalties: Array
    stale: bool = True
    forgotten: list[int] = field(default_factory=list)


def mask_words(mask: Array, vocab_size: int) -> Array:
    """The words of a grammar as `sample_tokens` takes them: int32, one for each 32 ids, 0 where there are none."""
    count = -(-vocab_size // 32)
    words = np.ascontiguousarray(mask, np.uint32).view(np.int32)
    return words[:count] if words.size >= count else np.concatenate([words, np.zeros(count - words.size, np.int32)])


def split_mode(name: str) -> tuple[str, bool, bool]:
    """A mode of `sample_tokens`, whether rows have edits and whether some want log-probabilities: "top_k+edits"."""
    mode, *more = name.split("+")
    return mode, "edits" in more, "logprobs" in more


def philox4x32(counter: tuple, key: tuple[int, int]) -> tuple:
    """Ten rounds of Philox 4x32 (Salmon and others, 2011): four random 32-bit words for a counter and a key.

    A word of the counter may be an array of uint64, and the results are arrays then.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = odd >> 32 ^ c1 ^ k0, odd & _MASK, even >> 32 ^ c3 ^ k1, even & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, ids: Array) -> Array:
    """The noise of ids at a position, float64: G = −log(−log(u)), u = (word + 1/2) · 2^−32, between −3.14 and 22.88.

    word is number id % 4 of Philox 4x32-10 with the counter (position, id // 4, 0, 0) and the key (seed, seed >> 32),
    32 bits each.
    """
    ids = np.asarray(ids, np.uint64)
    words = philox4x32((position, ids >> 2, 0, 0), (seed & _MASK, seed >> 32))
    word = np.choose((ids & 3).astype(np.intp), words)
    return -np.log(-np.log((word + 0.5) * 2.0**-32))


def _one_each(
    logits: Spec,
    positions: Spec,
    temperature: Spec,
    top_k: Spec,
    top_p: Spec,
    min_p: Spec,
    seed: Spec,
    mode: str,
    slots: Spec | None,
    counts: Spec | None,
    bias: Spec | None,
    penalties: Spec | None,
    masked: Spec | None,
    masks: Spec | None,
    logprobs: int | None,
) -> tuple[Spec | None, ...]:
    check.axes("[B, V]", 2, logits=logits)
    check.filled(1, logits=logits)
    check.dtype("float32", logits=logits, bias=bias)
    check.dtype("int32", positions=positions, top_k=top_k, slots=slots, counts=counts, masked=masked, masks=masks)
    check.dtype("float64", temperature=temperature, top_p=top_p, min_p=min_p, penalties=penalties)
    check.dtype("int64", seed=seed)
    rows = {"positions": positions, "temperature": temperature, "top_k": top_k}
    check.shape(logits.shape[:1], "rows of logits", **rows, top_p=top_p, min_p=min_p, seed=seed)
    check.shape(logits.shape[:1], "rows of logits", slots=slots, masked=masked)
    check.one_of(MODES, mode=mode)
    B, V = logits.shape
    _together("slots", slots=slots, counts=counts, bias=bias, penalties=penalties)
    _together("masked", masked=masked, masks=masks)
    if counts is not None:
        check.axes("[S, V]", 2, counts=counts)
        S = counts.shape[0]
        check.shape((S, V), "V of logits", counts=counts)
        check.shape((S, V), "that of counts", bias=bias)
        check.shape((S, 3), "S of counts", penalties=penalties)
    if masks is not None:
        check.axes("[M, words]", 2, masks=masks)
        check.shape((masks.shape[0], -(-V // 32)), "32 ids of logits in a word", masks=masks)
    if logprobs is None:
        return Spec((B,), "int32"), None, None, None
    if not 0 <= logprobs <= MAX_TOP:
        raise InvalidArgument(f"logprobs is {logprobs}, expected None or 0 to {MAX_TOP}")
    top = (B, logprobs)
    return Spec((B,), "int32"), Spec((B,), "float64"), Spec(top, "int32"), Spec(top, "float64")


def _together(first: str, **specs: Spec | None) -> None:
    """All or none of them."""
    for name, spec in specs.items():
        if (spec is None) != (specs[first] is None):
            wanted = "None without" if specs[first] is None else "an array with"
            raise ShapeError(f"{name} is {'None' if spec is None else 'an array'}, expected {wanted} {first}")


def _check_parameters(
    logits: Array,
    positions: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    mode: str,
    slots: Array | None,
    counts: Array | None,
    penalties: Array | None,
    masked: Array | None,
    masks: Array | None,
) -> None:
    active = positions >= 0
    limits = {"temperature": (temperature, np.finfo(np.float64).max), "top_p": (top_p, 1), "min_p": (min_p, 1)}
    for name, (values, most) in limits.items():
        wrong = active & ~((values >= 0) & (values <= most))
        if wrong.any():
            wanted = "a finite number, 0 or more" if name == "temperature" else "0 to 1"
            raise InvalidArgument(f"{name} has {values[wrong][0]}, expected {wanted}")
    if (active & (top_k < 0)).any():
        raise InvalidArgument(f"top_k has {top_k[active].min()}, expected 0 or more")
    if mode == "greedy" and (active & (temperature > 0)).any():
        raise InvalidArgument(f"temperature has {temperature[active].max()}, expected 0 everywhere in mode 'greedy'")
    drawn = active & (temperature > 0)
    many = drawn & ((top_k < 1) | (top_k > FEW))
    if mode == "top_k" and many.any():
        raise InvalidArgument(f"top_k has {top_k[many][0]}, expected 1 to {FEW} in mode 'top_k'")
    cut = drawn & (((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1))
    if mode == "plain" and cut.any():
        raise InvalidArgument(
            f"top_k has {top_k[cut][0]} and top_p {top_p[cut][0]} in one row, expected 0 and 1 in mode 'plain'"
        )
    if slots is not None and counts is not None and penalties is not None:
        check.in_range("slots", slots[active], -1, len(counts), "rows of counts, or −1")
        used = penalties[slots[active & (slots >= 0)]]
        if not np.isfinite(used).all() or (used[:, 0] <= 0).any():
            raise InvalidArgument("penalties has a row in use that is not finite or has no repetition, expected > 0")
    if masked is not None and masks is not None:
        check.in_range("masked", masked[active], -1, len(masks), "rows of masks, or −1")


@op(infer=_one_each, check=_check_parameters)
def sample_tokens(
    logits: Array,
    positions: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    mode: str = "full",
    slots: Array | None = None,
    counts: Array | None = None,
    bias: Array | None = None,
    penalties: Array | None = None,
    masked: Array | None = None,
    masks: Array | None = None,
    logprobs: int | None = None,
) -> tuple[Array | None, ...]:
    """The token of each row, each with its own parameters.

    1. Edits, in float32. x = logits[b]. With s = slots[b] ≥ 0 and r, p, f = penalties[s]: x += bias[s]; where
       counts[s] is odd, x = x / r if x > 0 else x · r; where n = counts[s] // 2 > 0, x −= f · n + p, of which the right
       side is rounded from float64 once. With a = masked[b] ≥ 0: x = −inf where bit id % 32 of masks[a, id // 32] is 0.
    2. m = max(x). temperature 0: the lowest id with x[id] = m. Otherwise, in float64, d = (x − m) / temperature and
       w = exp(d), and of the ids ranked by x, highest first, lower id first among equals: top_k (0: all) keeps the
       first k ranks; top_p keeps of these the fewest leading ranks, at least 1, whose w sum to at least top_p · (the
       sum of w over these); min_p keeps of these the ones with w ≥ min_p.
    3. The token is the kept id with the highest d + `gumbel`(seed, position, id), the lowest of equal ones.
    4. logprobs n, None or 0 to 20: log-probabilities are x − m − log(sum exp(x − m)) in float64, at temperature 1 and
       before any cut; the token's own, and the first n ranks.

    logits float32 [B, V], −inf rules an id out; positions int32 [B], of the token that is drawn; temperature, top_p and
    min_p float64 [B]; top_k int32 [B]; seed int64 [B], the bits of an unsigned seed; slots and masked int32 [B], −1: no
    edits; counts int32 [S, V], bias float32 [S, V], penalties float64 [S, 3]: repetition, presence, frequency; masks
    int32 [M, ceil(V / 32)], the bits of unsigned words. Tokens int32 [B]: −1 where the position is negative (an
    inactive row, whose parameters do not matter), −2 where x holds NaN or +inf or nothing but −inf. With logprobs also
    float64 [B], int32 [B, n] and float64 [B, n]: of ranks whose x is −inf and of rows without a token the ids are −1,
    the log-probabilities −inf.

    Noise is the same 32 bits everywhere. Logarithms, exp and sums may differ in the last bits of float64 from one
    device to another: tokens differ where the two highest sums of step 3 lie within about 1e−14, or where a sum of
    weights falls that close to the edge of top_p, about once in 10^13 tokens.

    mode says what the active rows may ask for, so that a device does no more: "greedy" temperature 0; "plain" that, or
    no top_k and no top_p; "top_k" temperature 0, or top_k from 1 to 64 with any top_p; "full" anything. On the host a
    row that asks for more raises InvalidArgument; a GPU does not look, and gives some token.
    """
    B = len(logits)
    tokens = np.full(B, INACTIVE, np.int32)
    own = np.full(B, -np.inf)
    top_ids, top = np.full((B, logprobs or 0), -1, np.int32), np.full((B, logprobs or 0), -np.inf)
    for b in np.flatnonzero(positions >= 0):
        edits = words = None
        if slots is not None and (s := slots[b]) >= 0:
            assert counts is not None and bias is not None and penalties is not None
            edits = Edits(counts[s], bias[s], penalties[s])
        if masked is not None and masked[b] >= 0:
            assert masks is not None
            words = masks[masked[b]]
        x = edited_logits(logits[b], edits, words)
        ranked = np.argsort(-x, kind="stable")
        tokens[b] = _token(x, ranked, positions[b], temperature[b], top_k[b], top_p[b], min_p[b], seed[b])
        if logprobs is not None and tokens[b] >= 0:
            each = log_probabilities(x)
            first = ranked[:logprobs][each[ranked[:logprobs]] > -np.inf]
            own[b], top_ids[b, : first.size], top[b, : first.size] = each[tokens[b]], first, each[first]
    return (tokens, None, None, None) if logprobs is None else (tokens, own, top_ids, top)


def _of_each(logits: Spec, tokens: Spec, top: int) -> tuple[Spec, ...]:
    check.axes("[R, V]", 2, logits=logits)
    check.filled(1, logits=logits)
    check.dtype("float32", logits=logits)
    check.dtype("int32", tokens=tokens)
    check.shape(logits.shape[:1], "rows of logits", tokens=tokens)
    if not 0 <= top <= MAX_TOP:
        raise InvalidArgument(f"top is {top}, expected 0 to {MAX_TOP}")
    R = logits.shape[0]
    return Spec((R,), "float64"), Spec((R,), "int32"), Spec((R, top), "int32"), Spec((R, top), "float64")


def _check_ids(logits: Array, tokens: Array) -> None:
    check.in_range("tokens", tokens, -1, logits.shape[1], "ids of logits, or −1")


@op(infer=_of_each, check=_check_ids)
def token_logprobs(logits: Array, tokens: Array, top: int = 0) -> tuple[Array, ...]:
    """How likely a given token is by each row of logits: its log-probability and rank, and the first `top` ranks.

    With x = logits[r] and m = max(x), in float64: log-probabilities are x − m − log(sum exp(x − m)); the rank of a
    token is 1 + the number of ids with a higher x; ids are ranked by x, highest first, lower id first among equals.

    logits float32 [R, V]; tokens int32 [R], −1: the row is not read; top 0 to 20. Log-probabilities float64 [R], ranks
    int32 [R], ids int32 [R, top] and their log-probabilities float64 [R, top]. The rank is −1 where the token is, −2
    where x holds NaN or +inf or nothing but −inf; there, and of ranks whose x is −inf, the ids are −1, the
    log-probabilities −inf.
    """
    R = len(logits)
    own, ranks = np.full(R, -np.inf), np.full(R, INACTIVE, np.int32)
    ids, values = np.full((R, top), -1, np.int32), np.full((R, top), -np.inf)
    for r in np.flatnonzero(tokens >= 0):
        x = logits[r]
        if not np.isfinite(x.max()):
            ranks[r] = NOT_FINITE
            continue
        each = log_probabilities(x)
        own[r], ranks[r] = each[tokens[r]], 1 + np.count_nonzero(x > x[tokens[r]])
        first = np.argsort(-x, kind="stable")[:top]
        first = first[x[first] > -np.inf]
        ids[r, : first.size], values[r, : first.size] = first, each[first]
    return own, ranks, ids, values


def edited_logits(x: Array, edits: Edits | None, words: Array | None) -> Array:
    """Step 1 of `sample_tokens` for one row, float32 [V]; words: those of its grammar."""
    if edits is not None:
        x = _penalized(x + edits.bias, edits.counts, *edits.penalties)
    return x if words is None else _allowed(x, words)


def log_probabilities(x: Array) -> Array:
    """x − m − log(sum exp(x − m)) of one row, float64 [V]; m = max(x) is finite."""
    shifted = x.astype(np.float64) - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def _penalized(x: Array, counts: Array, repetition: float, presence: float, frequency: float) -> Array:
    r = np.float32(repetition)
    x = np.where(counts & SEEN, np.where(x > 0, x / r, x * r), x)
    n = counts // ONE
    return np.where(n > 0, x - (frequency * n + presence).astype(np.float32), x)


def _allowed(x: Array, words: Array) -> Array:
    bits = np.unpackbits(words.astype("<i4").view(np.uint8), count=x.size, bitorder="little")
    return np.where(bits == 1, x, np.float32(-np.inf))


def _token(
    x: Array,
    ranked: Array,
    position: np.int32,
    temperature: float,
    top_k: np.int32,
    top_p: float,
    min_p: float,
    seed: np.int64,
) -> int:
    highest = x.max()
    if not np.isfinite(highest):
        return NOT_FINITE
    if temperature == 0:
        return int(x.argmax())
    kept = ranked[:top_k] if top_k > 0 else ranked
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the highest to −inf
        d = (x.astype(np.float64) - highest) / temperature
    w = np.exp(d)
    if top_p < 1:
        sums = np.cumsum(w[kept])
        kept = kept[: np.searchsorted(sums, top_p * sums[-1]) + 1]
    kept = np.sort(kept[w[kept] >= min_p])
    return int(kept[np.argmax(d[kept] + gumbel(int(seed) & 0xFFFFFFFFFFFFFFFF, int(position), kept))])
