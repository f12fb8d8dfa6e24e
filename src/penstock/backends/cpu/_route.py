"""Routers of mixture-of-experts blocks and what adds the experts' results to the residual stream, on the CPU.

Few experts pass the bar of `_topk`, and those are ranked. Where many do (ties, more than 16 wanted) experts are ranked
by integers that order as their scores do, the expert's number in the lower half: the largest of them is the best score
and, among equals, the lowest index, and a maximum of integers vectorises.
"""

import functools
import math

import numpy as np
from numba import prange

from penstock import ops
from penstock.backends.cpu._attend import floats, peek
from penstock.backends.cpu._formats import fmt, frozen, pattern_of
from penstock.backends.cpu._math import exp32, sigmoid32
from penstock.backends.cpu._rows import bytes_in, bytes_out, itemsize, load_bytes, store_bytes
from penstock.backends.cpu._threads import run
from penstock.backends.cpu._topk import WORD, kth_peak, lowest, passing, rank, softmax, two_best
from penstock.backends.cpu.compile import FUSED_MULTIPLY_ADD, keep_alive, njit
from penstock.dtypes import round_to
from penstock.ops.op import kernel

_LEAST, _MOST = np.int64(-(2**63)), np.int64(2**63 - 1)
_LAST = np.int64(2**31 - 1)
_FEW = 16  # that `rank` takes
_CHUNK = 32  # rows a thread takes at once
_SERIAL = 1 << 13  # logits up to which one thread is faster than waking the others
_NONE = np.empty(0, np.float32)
_NONE.flags.writeable = False

_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, float.fromhex("0x1.62e42fee00000p-1"), 1.90821492927058770002e-10
_ROUNDER = 1.5 * 2.0**52  # added to a float64, it leaves the nearest integer in the lowest bits
_C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12, _C13 = (1 / math.factorial(n) for n in range(2, 14))

# -- routers ---------------------------------------------------------------------------------------------------------


@kernel(ops.moe_route, device="cpu")
def moe_route(
    logits: np.ndarray,
    per_expert_scale: np.ndarray | None,
    top_k: int,
    propagate_nan: bool = False,
    active: np.ndarray | None = None,
    *,
    out,
) -> None:
    options = (_per_expert(per_expert_scale), propagate_nan)
    _route(_softmax_rows, _softmax_chunks, logits, options, active, out)


@kernel(ops.moe_softmax_topk, device="cpu")
def moe_softmax_topk(
    logits: np.ndarray, k: int, propagate_nan: bool = False, active: np.ndarray | None = None, *, out
) -> None:
    _route(_slots_rows, _slots_chunks, logits, (propagate_nan,), active, out)


@kernel(ops.moe_group_route, device="cpu")
def moe_group_route(
    logits: np.ndarray,
    bias: np.ndarray | None,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    propagate_nan: bool = False,
    active: np.ndarray | None = None,
    norm_eps: float = 1e-20,
    *,
    out,
) -> None:
    factor, norm = float(routed_scaling_factor), float(norm_eps) if norm_topk_prob else -1.0
    options = (_per_expert(bias), n_group, topk_group, norm, factor, propagate_nan)
    _route(_groups_rows, _groups_chunks, logits, options, active, out)


def _route(rows_kernel, chunks_kernel, logits, options, active, out) -> None:
    """options: what the kernels take between the logits and the outputs."""
    if logits.size == 0:
        return
    ids, weights = out
    rows = frozen(logits.reshape(-1, logits.shape[-1]))
    args = (rows, *options, ids.reshape(-1, ids.shape[-1]), weights.reshape(-1, ids.shape[-1]))
    if logits.size <= _SERIAL:
        rows_kernel(*args, 0, len(rows))
    else:
        run(chunks_kernel, *args)
    if active is not None:  # no step of a CPU has such rows: the kernels do without them
        ids[active < 0], weights[active < 0] = -1, 0


def _per_expert(values: np.ndarray | None) -> np.ndarray:
    return _NONE if values is None else frozen(values.astype(np.float32, copy=False))


# route     ids, weights of each row of logits as ops.moe_route, moe_softmax_topk and moe_group_route define them
# shapes    logits float32 [T, E]; per_expert float32 [E] (scale or bias) or [0]; ids int32, weights float32 [T, k]
# threads   prange over chunks of rows; a row belongs to one thread
# bytes     T * E * 4 in, T * k * 8 out; keys and scores of a row stay in cache
# limits    E below 2**31; with k above 16, or many equal scores, k passes over E


@njit(parallel=True)
def _softmax_chunks(logits, scale, nan, ids, weights):
    T = logits.shape[0]
    for c in prange((T + _CHUNK - 1) // _CHUNK):
        _softmax_rows(logits, scale, nan, ids, weights, c * _CHUNK, min(T, (c + 1) * _CHUNK))


@njit(parallel=True)
def _slots_chunks(logits, nan, ids, weights):
    T = logits.shape[0]
    for c in prange((T + _CHUNK - 1) // _CHUNK):
        _slots_rows(logits, nan, ids, weights, c * _CHUNK, min(T, (c + 1) * _CHUNK))


@njit(parallel=True)
def _groups_chunks(logits, bias, n_group, topk_group, norm, factor, nan, ids, weights):
    T = logits.shape[0]
    for c in prange((T + _CHUNK - 1) // _CHUNK):
        stop = min(T, (c + 1) * _CHUNK)
        _groups_rows(logits, bias, n_group, topk_group, norm, factor, nan, ids, weights, c * _CHUNK, stop)


# Loops over rows are inside of the functions that use arrays: passing ten arrays to a function counts ten references up
# and down, atomically, which takes longer than a row.


@njit(forceinline=True)
def _all_finite(values):
    """Whether none is NaN or infinite. Without a branch, so that it vectorises."""
    bad = np.int32(0)
    for j in range(values.size):
        bad |= np.int32(not (abs(values[j]) < np.float32(np.inf)))
    return bad == 0


@njit(forceinline=True)
def _choose_nothing(t, nan, ids, weights):
    """A row that means nothing: the first expert, with weights of 0 or NaN."""
    for i in range(ids.shape[1]):
        ids[t, i], weights[t, i] = 0, np.float32(np.nan) if nan else np.float32(0)


@njit
def _key(x, j):
    """Orders as (x descending, j ascending) does, largest first; -0 equals 0, NaN has no place."""
    p = np.int64(pattern_of(x + np.float32(0)))
    p = p if p >= 0 else p ^ np.int64(0x7FFFFFFF)
    return (p << np.int64(32)) | (_LAST - j)


@njit
def _best_below(keys, bar):
    """The largest key below `bar`. Keys differ, so that nothing has to be taken out: a scan that follows a store into
    its range waits for it.
    """
    best = _LEAST
    for j in range(keys.size):
        best = max(best, keys[j] if keys[j] < bar else _LEAST)
    return best


@njit(forceinline=True)
def _candidates(scores, start, k, keys, found):
    """Numbers and scores of experts among which are the k best of the keys.size from `start` on, in order of their
    numbers; (how many, the best score). -1: there is NaN. More than 16: these are not all.
    """
    E = keys.size
    bar, top = kth_peak(floats(scores, start), E, min(k, _FEW))
    if bar != bar:
        return -1, top
    if k > _FEW:
        return k, top
    n = 0
    for base in range(0, E, WORD):
        word = passing(floats(scores, start + base), E - base, bar)
        while word != 0:
            if n < _FEW:
                keys[n] = base + lowest(word)
                found[n] = peek(floats(scores, start), keys[n])
            n += 1
            word &= word - 1
    return n, top


@njit
def _best_of_all(scores, start, keys, t, ids):
    """ids[t] = the largest of the keys.size scores from `start` on, best first, ties to the lowest index."""
    for j in range(keys.size):
        keys[j] = _key(peek(floats(scores, start), j), np.int64(j))
    below = _MOST
    for i in range(ids.shape[1]):
        below = _best_below(keys, below)
        ids[t, i] = _LAST - (below & np.int64(0xFFFFFFFF))


@njit
def _softmax_rows(logits, scale, nan, ids, weights, start, stop):
    """The normaliser of the softmax over all experts cancels: only the chosen ones need an exponential."""
    E, k = logits.shape[1], ids.shape[1]
    keys, found, shares = np.empty(E, np.int64), np.empty(_FEW, np.float32), np.empty(_FEW, np.float32)
    places, order = np.empty(_FEW, np.int32), np.empty(_FEW, np.int32)
    for t in range(start, stop):
        n, top = _candidates(logits, t * E, k, keys, found)
        if n < 0 or not np.isfinite(top) or (nan and not _all_finite(logits[t])):
            _choose_nothing(t, nan, ids, weights)
            continue
        if n > _FEW:
            _best_of_all(logits, t * E, keys, t, ids)
            _softmax_of_all(logits, top, t, ids, weights)
        else:
            softmax(floats(found, 0), n, k, places, shares)
            for i in range(n):  # into rows with room for all: no CPU foresees which of them are among the k best
                order[places[i]] = keys[i]
                found[places[i]] = shares[i]
            for i in range(k):
                ids[t, i], weights[t, i] = order[i], found[i]
        if scale.size > 0:
            for i in range(k):
                weights[t, i] *= scale[ids[t, i]]
    keep_alive(found)


@njit
def _softmax_of_all(logits, top, t, ids, weights):
    total = np.float32(0)
    for i in range(ids.shape[1]):
        weights[t, i] = exp32(logits[t, ids[t, i]] - top)
        total += weights[t, i]
    for i in range(ids.shape[1]):
        weights[t, i] /= total


@njit
def _slots_rows(logits, nan, ids, weights, start, stop):
    E, k = logits.shape[1], ids.shape[1]
    held, scores = np.empty(k, np.int64), np.empty(E, np.float32)
    for t in range(start, stop):
        bar, high = kth_peak(floats(logits, t * E), E, 1)
        if not np.isfinite(bar) or (nan and not _all_finite(logits[t])):
            _choose_nothing(t, nan, ids, weights)
            continue
        for j in range(E):
            scores[j] = exp32(logits[t, j] - high)
        total = _any_order_sum(scores)
        for i in range(k):
            ids[t, i] = i
            held[i] = _slot_key(logits[t, i], i)
        slot = _least_slot(held)
        bar = logits[t, ids[t, slot]]
        for base in range(k, E, WORD):
            word = passing(floats(logits, t * E + base), E - base, bar)
            while word != 0:
                j = base + lowest(word)
                if logits[t, j] > bar:
                    ids[t, slot] = j
                    held[slot] = _slot_key(logits[t, j], slot)
                    slot = _least_slot(held)
                    bar = logits[t, ids[t, slot]]
                word &= word - 1
        for i in range(k):
            weights[t, i] = scores[ids[t, i]] / total


@njit
def _slot_key(x, slot):
    """Orders as (x, slot) does."""
    return (_key(x, np.int64(0)) - _LAST) | np.int64(slot)


@njit(forceinline=True)
def _least_slot(held):
    least = held[0]
    for i in range(1, held.size):
        least = min(least, held[i])
    return least & np.int64(0xFFFFFFFF)


@njit(fastmath=frozenset({"reassoc"}), forceinline=True)
def _any_order_sum(values):
    total = np.float32(0)
    for j in range(values.size):
        total += values[j]
    return total


@njit
def _score(logits, bias, scores, choice):
    """The scores of a row and what its choice goes by; False if that has NaN."""
    for j in range(scores.size):
        scores[j] = _sigmoid(logits[j])
    nan = np.int32(0)
    if bias.size > 0:
        for j in range(choice.size):
            choice[j] = scores[j] + bias[j]
            nan |= np.int32(choice[j] != choice[j])
    else:
        for j in range(choice.size):
            choice[j] = scores[j]
            nan |= np.int32(choice[j] != choice[j])
    return nan == 0


@njit
def _groups_rows(logits, bias, n_group, topk_group, norm, factor, nan, ids, weights, start, stop):
    E, k = logits.shape[1], ids.shape[1]
    scores, choice, groups = np.empty(E, np.float32), np.empty(E, np.float32), np.empty(n_group, np.int64)
    keys, found = np.empty(E, np.int64), np.empty(_FEW, np.float32)
    places, order = np.empty(_FEW, np.int32), np.empty(_FEW, np.int32)
    for t in range(start, stop):
        sound = _score(logits[t], bias, scores, choice)
        if not sound or (nan and not (_all_finite(logits[t]) and _all_finite(choice))):
            _choose_nothing(t, nan, ids, weights)
            continue
        if n_group > 1:
            _drop_groups(choice, topk_group, groups)
        n, _ = _candidates(choice, 0, k, keys, found)
        if n > _FEW:
            _best_of_all(choice, 0, keys, t, ids)
        else:
            rank(floats(found, 0), n, places)
            for i in range(n):
                order[places[i]] = keys[i]
            for i in range(k):
                ids[t, i] = order[i]
        total = 0.0
        for i in range(k):
            total += np.float64(scores[ids[t, i]])
        for i in range(k):
            w = np.float64(scores[ids[t, i]])
            weights[t, i] = np.float32((w / (total + norm) if norm >= 0 else w) * factor)
    keep_alive(found)


@njit(forceinline=True)
def _drop_groups(choice, topk_group, groups):
    """Nothing is chosen from groups behind the best ones, by the sums of their two best."""
    size = choice.size // groups.size
    for i in range(groups.size):
        both = two_best(floats(choice, i * size), size)
        # a sum of inf and -inf ranks after everything, as in a sort
        groups[i] = _key(both, np.int64(i)) if both == both else (_LEAST | (_LAST - i))
    bar = _MOST
    for _ in range(topk_group):
        bar = _best_below(groups, bar)
    for i in range(groups.size):
        if groups[i] < bar:
            for j in range(i * size, (i + 1) * size):
                choice[j] = np.float32(-np.inf)


@njit(forceinline=True, fastmath=FUSED_MULTIPLY_ADD)
def _sigmoid(logit):
    """The float64 sigmoid, within 1e-15 of itself, rounded to float32: the same number as the definition's, so that
    choices made with it agree."""
    x = np.float64(logit)
    a = -abs(x)
    a = -700.0 if a < -700.0 else a
    t = a * _LOG2_E + _ROUNDER
    n = t - _ROUNDER
    r = a - n * _LN2_HIGH - n * _LN2_LOW
    p = _C8 + r * (_C9 + r * (_C10 + r * (_C11 + r * (_C12 + r * _C13))))
    p = _C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * (_C7 + r * p)))))
    p = 1.0 + (r + r * r * p)
    power = np.int64((np.float64(t).view(np.int64) << np.int64(52)) + np.int64(1023 << 52))
    e = p * power.view(np.float64)
    return np.float32((1.0 if x >= 0 else e) / (1.0 + e))


@kernel(ops.moe_normalize_weights, device="cpu")
def moe_normalize_weights(weights: np.ndarray, *, out: np.ndarray) -> None:
    if out.size:
        k = out.shape[-1]
        _normalize(frozen(weights.reshape(-1, k)), out.reshape(-1, k))


# normalize out[t] = weights[t] / sum(weights[t]) where the sum is above 0, else weights[t]; sum in float64
# shapes    weights, out float32 [T, k]; out may be weights
# threads   one: a few kilobytes
# bytes     2 * T * k * 4
# limits    none
@njit
def _normalize(weights, out):
    for t in range(weights.shape[0]):
        total = 0.0
        for i in range(weights.shape[1]):
            total += np.float64(weights[t, i])
        inverse = 1.0 / total if total > 0 else 1.0
        for i in range(weights.shape[1]):
            out[t, i] = np.float32(np.float64(weights[t, i]) * inverse)


# -- combination -----------------------------------------------------------------------------------------------------


@kernel(ops.moe_combine_residual, device="cpu")
def moe_combine_residual(
    h_mid: np.ndarray | None,
    expert_out: np.ndarray | None,
    weights: np.ndarray | None,
    shared_out: np.ndarray | None,
    shared_gate: np.ndarray | float | None = None,
    moe_sum: np.ndarray | None = None,
    *,
    out: np.ndarray,
) -> None:
    if out.size == 0:
        return
    added = expert_out if moe_sum is None else moe_sum
    if added.dtype != out.dtype:  # rows of one format in float32 copies
        arrays = [None if a is None else np.array(a, np.float32) for a in (h_mid, expert_out, shared_out, moe_sum)]
        y = np.empty(out.shape, np.float32)
        moe_combine_residual(arrays[0], arrays[1], weights, arrays[2], shared_gate, arrays[3], out=y)
        np.copyto(out, round_to(y, out.dtype))
        return
    T = out.size // out.shape[-1]
    if weights is None:  # the given sum is one expert of weight 1
        expert_out, weights = moe_sum, _ones(T)
    k = weights.size // T
    scores = _NONE if shared_gate is None else _of_rows(shared_gate, T)
    experts = bytes_in(expert_out if k else None)
    args = (bytes_in(h_mid), experts, frozen(weights.reshape(-1)), bytes_in(shared_out), frozen(scores))
    args = (*args, k, fmt(out), bytes_out(out))
    if T * (k + 2) * out.shape[-1] <= 1 << 16:
        _combine_some(*args, 0, T)
    else:
        run(_combine_rows, *args)


@functools.lru_cache(maxsize=64)
def _ones(count: int) -> np.ndarray:
    return np.ones(count, np.float32)


def _of_rows(score: np.ndarray | float, rows: int) -> np.ndarray:
    """A number for each row, float32, from as many or from one."""
    if isinstance(score, np.ndarray) and score.size == rows:
        return score.reshape(rows).astype(np.float32, copy=False)
    return np.resize(np.asarray(score, np.float32), rows)


# combine   out[t] = (h[t] + sum_i weights[t, i] * experts[t, i]) + shared[t] * (1 or sigmoid(gate[t])), slots in order
# shapes    rows of one format as bytes: out [T, dim], experts [T * k, dim], h, shared [T, dim] or no bytes; float32:
#           weights [T * k], gate [T] or [0]; out may be h, shared or the experts if k = 1
# threads   prange over rows; a row belongs to one thread
# bytes     (k + 3) * T * dim * itemsize, each once
# limits    none
@njit(parallel=True)
def _combine_rows(h, experts, weights, shared, gate, k, fmt, out):
    T = out.shape[0]
    for c in prange((T + 3) // 4):
        _combine_some(h, experts, weights, shared, gate, k, fmt, out, 4 * c, min(T, 4 * c + 4))


@njit
def _combine_some(h, experts, weights, shared, gate, k, fmt, out, start, stop):
    dim = out.shape[1] // itemsize(fmt)
    total, row = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for t in range(start, stop):
        for j in range(dim):
            total[j] = np.float32(0)
        for i in range(t * k, (t + 1) * k):
            load_bytes(experts[i], fmt, row)
            _add_scaled(total, row, weights[i])
        if h.shape[1] > 0:
            load_bytes(h[t], fmt, row)
            _add_scaled(total, row, np.float32(1))
        if shared.shape[1] > 0:
            load_bytes(shared[t], fmt, row)
            _add_scaled(total, row, sigmoid32(gate[t]) if gate.size > 0 else np.float32(1))
        store_bytes(total, fmt, out[t])


@njit(fastmath=FUSED_MULTIPLY_ADD)
def _add_scaled(total, row, scale):
    for j in range(total.size):
        total[j] += row[j] * scale


@kernel(ops.moe_bucket_accumulate, device="cpu")
def moe_bucket_accumulate(
    out_sum: np.ndarray, bucket_out: np.ndarray, token_idx: np.ndarray, weights: np.ndarray
) -> None:
    if bucket_out.size == 0:
        return
    args = (bytes_in(bucket_out), frozen(token_idx), frozen(weights), fmt(out_sum), bytes_out(out_sum))
    following, first = np.empty(token_idx.size, np.int32), np.empty(token_idx.size, np.bool_)
    _find_repeats(args[1], len(out_sum), following, first)
    if bucket_out.size <= 1 << 14:
        _accumulate_some(*args, following, first, 0, token_idx.size)
    else:
        run(_accumulate_rows, *args, following, first)


@njit
def _find_repeats(token_idx, T, following, first):
    """following[b]: the next row of the same token or -1; first[b]: no row before b has its token."""
    last = np.full(T, -1, np.int32)
    for b in range(token_idx.size):
        token = token_idx[b]
        first[b] = last[token] < 0
        if not first[b]:
            following[last[token]] = b
        following[b] = -1
        last[token] = b


# accumulate total[token_idx[b]] += bucket[b] * weights[b], rounded once for each token
# shapes    bucket [B, dim], total [T, dim]: rows of one format as bytes; token_idx int32, weights float32 [B]
# threads   prange over rows b; the first row of a token takes the others of that token along, so no two threads meet
# bytes     3 * B * dim * itemsize
# limits    none
@njit(parallel=True)
def _accumulate_rows(bucket, token_idx, weights, fmt, total, following, first):
    B = token_idx.size
    for c in prange((B + 7) // 8):
        _accumulate_some(bucket, token_idx, weights, fmt, total, following, first, 8 * c, min(B, 8 * c + 8))


@njit
def _accumulate_some(bucket, token_idx, weights, fmt, total, following, first, start, stop):
    dim = total.shape[1] // itemsize(fmt)
    sums, row = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for begin in range(start, stop):
        if not first[begin]:
            continue
        token = token_idx[begin]
        load_bytes(total[token], fmt, sums)
        b = begin
        while b >= 0:
            load_bytes(bucket[b], fmt, row)
            _add_scaled(sums, row, weights[b])
            b = following[b]
        store_bytes(sums, fmt, total[token])
