"""The token of a step from its logits: greedy, or drawn at a temperature from what top-k, top-p and min-p leave.

The draw is counter-based: its random number depends on the seed and the token's position alone, so every device gives
the same token.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import InvalidArgument
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.op import op

MODES = ("greedy", "plain", "top_k", "full")
FEW = 64  # the highest top_k in mode "top_k"

INACTIVE, NOT_FINITE = -1, -2  # tokens of a row without a sequence, and of one whose logits the host has to look at

_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox 4x32 (Salmon and others, 2011): four random 32-bit words for a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = odd >> 32 ^ c1 ^ k0, odd & _MASK, even >> 32 ^ c3 ^ k1, even & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: 53 bits of Philox 4x32-10 keyed by the seed, stream 0."""
    first, second, _, _ = philox4x32((position & _MASK, position >> 32, 0, 0), (seed & _MASK, seed >> 32))
    return ((second << 32 | first) >> 11) * 2.0**-53


def _one_each(
    logits: Spec, positions: Spec, temperature: Spec, top_k: Spec, top_p: Spec, min_p: Spec, seed: Spec, mode: str
) -> Spec:
    check.axes("[B, V]", 2, logits=logits)
    check.filled(1, logits=logits)
    check.dtype("float32", logits=logits)
    check.dtype("int32", positions=positions, top_k=top_k)
    check.dtype("float64", temperature=temperature, top_p=top_p, min_p=min_p)
    check.dtype("int64", seed=seed)
    rows = {"positions": positions, "temperature": temperature, "top_k": top_k}
    check.shape(logits.shape[:1], "rows of logits", **rows, top_p=top_p, min_p=min_p, seed=seed)
    check.one_of(MODES, mode=mode)
    return Spec(logits.shape[:1], "int32")


def _check_parameters(
    logits: Array, positions: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array, mode: str
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
) -> Array:
    """The token of each row, each with its own parameters.

    x = logits[b], m = max(x). temperature 0: the lowest id with x[id] = m. Otherwise, in float64,
    w[id] = exp((x[id] − m) / temperature), and of the ids ranked by x, highest first, lower id first among equals:
    top_k (0: all) keeps the first k ranks; top_p keeps of these the fewest leading ranks, at least 1, whose w sum to at
    least top_p · (the sum of w over these); min_p keeps of these the ones with w ≥ min_p. With the number u of
    `uniform` for seed and position the token is the first kept id, from the lowest up, whose running sum of w exceeds
    u · (the sum of all kept w); if rounding lets none exceed it, the last that added to it.

    logits float32 [B, V], −inf rules an id out; positions int32 [B], of the token that is drawn; temperature, top_p and
    min_p float64 [B]; top_k int32 [B]; seed int64 [B], the bits of an unsigned seed. Tokens int32 [B]: −1 where the
    position is negative (an inactive row, whose parameters do not matter), −2 where logits hold NaN or +inf or nothing
    but −inf. Sums and exp may differ in the last bits of float64 from one device to another: then tokens differ where u
    falls that close to an edge.

    mode says what the active rows may ask for, so that a device does no more: "greedy" temperature 0; "plain" that, or
    no top_k and no top_p; "top_k" temperature 0, or top_k from 1 to 64 with any top_p; "full" anything. On the host a
    row that asks for more raises InvalidArgument; a GPU does not look, and gives some token.
    """
    rows = zip(logits, positions, temperature, top_k, top_p, min_p, seed, strict=True)
    return np.array([_token(*row) for row in rows], np.int32)


def _token(
    x: Array, position: np.int32, temperature: float, top_k: np.int32, top_p: float, min_p: float, seed: np.int64
) -> int:
    if position < 0:
        return INACTIVE
    highest = x.max()
    if not np.isfinite(highest):
        return NOT_FINITE
    if temperature == 0:
        return int(x.argmax())
    kept = np.argsort(-x, kind="stable")
    if top_k > 0:
        kept = kept[:top_k]
    w = np.exp((x.astype(np.float64) - highest) / temperature)
    if top_p < 1:
        sums = np.cumsum(w[kept])
        kept = kept[: np.searchsorted(sums, top_p * sums[-1]) + 1]
    kept = np.sort(kept[w[kept] >= min_p])
    sums = np.cumsum(w[kept])
    at = np.searchsorted(sums, uniform(int(seed) & 0xFFFFFFFFFFFFFFFF, int(position)) * sums[-1], side="right")
    if at == sums.size:
        at = np.searchsorted(sums, sums[-1])
    return int(kept[at])
