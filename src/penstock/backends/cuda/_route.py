"""Routers of mixture-of-experts blocks on CUDA.

Scores are compared as int32 keys of the same order: a maximum of integers over a warp is one instruction, and which
expert wins depends on no rounding. One warp has one token, so that nothing waits at a barrier. With PDL a kernel starts
while the one before it ends, and waits for that end before it reads or writes anything.

`choose` does the same for one row with all warps of a program, at the end of a kernel that made the logits.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._launch import flat_rows, load_by_lane, pdl_options, wait_for_previous
from penstock.errors import BackendError
from penstock.ops.op import kernel

_NONE = tl.constexpr(-(2**31))  # below every key: not there, or taken
_LAST = tl.constexpr(-(2**31) + 1)  # below the key of -inf: ranks after every number
_MINUS_INF = tl.constexpr(-(2**31) + 0x7FFFFF)
_PLUS_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FFFFFFF)  # above every other key
_FAR = tl.constexpr(2**31 - 1)  # no index
_BEYOND = tl.constexpr(2**20)  # above every index

MOST_EXPERTS = 16384
_CHOOSE_EXPERTS, _CHOOSE_PAIRS = 1024, 256  # of `choose`: experts, and best ones of its rows that are compared


@triton.jit
def _key(x):
    """int32 that orders as the float32 does; -0 equals 0, NaN is `_NAN`."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _NONE, 0, bits)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where((bits & 0x7FFFFFFF) > _PLUS_INF, _NAN, key)


@triton.jit
def _key_of_number(x):
    """`_key` of a float32 that is not NaN, in fewer steps."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _first(true, index):
    """The lowest index where `true`, `_BEYOND` or more if there is none. A constant for the others would be folded into
    a chain of selections twice as long.
    """
    return tl.min(tl.where(true, index, index + _BEYOND))


@triton.jit
def _best(keys, index, k, BLOCK_K: tl.constexpr):
    """Indices and keys of the k largest, best first, the lowest index first among equals; `_NONE` behind them."""
    place = tl.arange(0, BLOCK_K)
    ids = tl.full([BLOCK_K], 0, tl.int32)
    found = tl.full([BLOCK_K], _NONE, tl.int32)
    for i in range(k):
        top = tl.max(keys)
        at = _first(keys == top, index)
        ids = tl.where(place == i, at, ids)
        found = tl.where(place == i, top, found)
        keys = tl.where(index == at, _NONE, keys)
    return ids, found


@triton.jit
def _best_of_rows(keys, index, k, BLOCK_K: tl.constexpr):
    """As `_best`, of keys and indices [G, S], S >= BLOCK_K: those of each row, then those of these. With a row for each
    warp the rounds wait at no barrier.
    """
    G: tl.constexpr = keys.shape[0]
    S: tl.constexpr = keys.shape[1]
    column = tl.arange(0, S)[None, :]
    ids = tl.full([G, S], -1, tl.int32)
    found = tl.full([G, S], _NONE, tl.int32)
    for i in range(k):
        top = tl.max(keys, axis=1, keep_dims=True)
        at = tl.min(tl.where(keys == top, index, index + _BEYOND), axis=1, keep_dims=True)
        ids = tl.where(column == i, at, ids)
        found = tl.where(column == i, top, found)
        keys = tl.where(index == at, _NONE, keys)
    ids = tl.max(ids.reshape(G, S // BLOCK_K, BLOCK_K), axis=1).reshape(G * BLOCK_K)
    found = tl.max(found.reshape(G, S // BLOCK_K, BLOCK_K), axis=1).reshape(G * BLOCK_K)
    above = found[None, :] > found[:, None]
    before = above | ((found[None, :] == found[:, None]) & (ids[None, :] < ids[:, None]))
    rank = tl.sum(before.to(tl.int32), axis=1)
    hit = rank[:, None] == tl.arange(0, BLOCK_K)[None, :]  # one of each rank below k: they are there, and differ
    ids = tl.sum(tl.where(hit, ids[:, None], 0), axis=0)
    found = tl.sum(tl.where(hit, found[:, None], 0), axis=0)
    return ids, tl.where(tl.arange(0, BLOCK_K) < k, found, _NONE)


@triton.jit
def _softmax_of(ids, found, top, scale_ptr, chosen):
    """Weights of `route` for the experts ids with the keys `found`; top: the largest key of the row."""
    e = tl.where(chosen, tl.exp(_number(found) - _number(top)), 0.0)
    weights = e / tl.sum(e)
    if scale_ptr is not None:
        weights *= tl.load(scale_ptr + ids, mask=chosen, other=0.0).to(tl.float32)
    return weights


@triton.jit
def _sound(top):
    """Whether a row with this largest key has a softmax: no NaN, no +inf, not all -inf."""
    return (top < _PLUS_INF) & (top > _MINUS_INF)


@triton.jit
def _all_finite(keys):
    """Whether no key is that of NaN or of an infinity; `_NONE` stands for what is not there."""
    return (tl.max(keys) < _PLUS_INF) & (tl.min(tl.where(keys == _NONE, 0, keys)) > _MINUS_INF)


@triton.jit
def _store(row, k, ids, weights, sound, active_ptr, ids_ptr, weights_ptr, NAN: tl.constexpr, BLOCK_K: tl.constexpr):
    """A row that is not sound gets the first expert, with weights of 0 or NaN; one that is not active gets -1 and 0.
    Returns the ids that it has then.
    """
    place = tl.arange(0, BLOCK_K)
    at = row * k + place
    nothing = float("nan") if NAN else 0.0
    ids = tl.where(sound, ids, 0)
    weights = tl.where(sound, weights, nothing)
    if active_ptr is not None:
        active = tl.load(active_ptr + row) >= 0
        ids = tl.where(active, ids, -1)
        weights = tl.where(active, weights, 0.0)
    tl.store(ids_ptr + at, ids, mask=place < k)
    tl.store(weights_ptr + at, weights, mask=place < k)
    return ids


@triton.jit
def route_row(
    logits, row, scale_ptr, active_ptr, ids_ptr, weights_ptr, E, k,
    NAN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`route` of a row of logits: writes ids and weights, and returns the ids."""
    index = tl.arange(0, BLOCK_E)
    live = index < E
    keys = tl.where(live, _key(tl.load(logits + index, mask=live, other=0.0)), _NONE)
    top = tl.max(keys)
    ids, found = _best(keys, index, k, BLOCK_K)
    weights = _softmax_of(ids, found, top, scale_ptr, tl.arange(0, BLOCK_K) < k)
    sound = _all_finite(keys) if NAN else _sound(top)
    return _store(row, k, ids, weights, sound, active_ptr, ids_ptr, weights_ptr, NAN, BLOCK_K)


# route     ids of the k largest logits, w = exp(l - max) / sum over the chosen * scale: the sum over all cancels
# shapes    logits float32 [T, E]; scale [E] of any float or None; active int32 [T] or None: all; ids int32, weights
#           float32 [T, k]
# grid      (T,): a program, one warp up to 1024 experts, has one token; BLOCK_E, BLOCK_K powers of two >= E, k
# bytes     T * E * 4 in, T * k * 8 out; k passes over registers
# limits    E <= 16384
@triton.jit
def _route_kernel(
    logits_ptr, scale_ptr, active_ptr, ids_ptr, weights_ptr, E, k,
    NAN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    route_row(
        logits_ptr + row * E, row, scale_ptr, active_ptr, ids_ptr, weights_ptr, E, k, NAN, BLOCK_E, BLOCK_K
    )  # fmt: skip


# slots     experts 0 ... k - 1 in slots, each later one into the slot of the smallest if it is larger; softmax weights
# shapes    logits float32 [T, E]; active int32 [T] or None: all; ids int32, weights float32 [T, k]
# grid      (T,): a program, one warp up to 1024 experts, has one token; BLOCK_E, BLOCK_K powers of two >= E, k
# bytes     T * E * 4 in, T * k * 8 out; one round for each expert that enters, about k * ln(E / k) in a random row
# limits    E <= 16384
@triton.jit
def _slots_kernel(
    logits_ptr, active_ptr, ids_ptr, weights_ptr, E, k,
    NAN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_E)
    live = index < E
    logits = logits_ptr + row * E
    keys = tl.where(live, _key(tl.load(logits + index, mask=live, other=0.0)), _NONE)
    top = tl.max(keys)
    sound = _all_finite(keys) if NAN else _sound(top)
    slot = tl.arange(0, BLOCK_K)
    held = tl.where(slot < k, _key(tl.load(logits + slot, mask=slot < k, other=0.0)), _NAN)
    ids = slot
    rest = tl.where((index >= k) & sound, keys, _NONE)
    bar = tl.min(held)
    at = _first(held == bar, slot)
    j = _first(rest > bar, index)
    while j < E:
        # j goes; those before it that are still there are not above any later bar
        rest = tl.where(index == j, _NONE, rest)
        held = tl.where(slot == at, _key_of_number(tl.load(logits + j)), held)
        ids = tl.where(slot == at, j, ids)
        bar = tl.min(held)
        j = _first(rest > bar, index)
        at = _first(held == bar, slot)
    total = tl.sum(tl.where(live, tl.exp(_number(keys) - _number(top)), 0.0))
    weights = tl.exp(_number(held) - _number(top)) / total
    _store(row, k, ids, weights, sound, active_ptr, ids_ptr, weights_ptr, NAN, BLOCK_K)


@triton.jit
def _sigmoid64(x):
    """The float64 sigmoid of float32 rounded to float32: the definition's bits, so that choices by it agree."""
    x = x.to(tl.float64)
    small = tl.exp(-tl.abs(x))
    return (tl.where(x >= 0, 1.0, small) / (1.0 + small)).to(tl.float32)


@triton.jit
def _keep_groups(keys, live, place, topk_group, BLOCK_G: tl.constexpr):
    """Keys [BLOCK_G, BLOCK_S] with -inf in all but the groups of the largest sum of two best."""
    group = tl.arange(0, BLOCK_G)
    first = tl.max(keys, axis=1)
    at = tl.min(tl.where(keys == first[:, None], place, _FAR), axis=1)
    second = tl.max(tl.where(place == at[:, None], _NONE, keys), axis=1)
    both = _key(_number(first) + _number(second))
    both = tl.where(both == _NAN, _LAST, both)  # inf - inf
    sums = tl.where(tl.max(live.to(tl.int32), axis=1) > 0, both, _NONE)
    if BLOCK_G <= 32:  # how many come before: one step instead of topk_group
        other, there = sums[None, :], group[None, :]
        before = (other > sums[:, None]) | ((other == sums[:, None]) & (there < group[:, None]))
        kept = tl.sum(before.to(tl.int32), axis=1) < topk_group
    else:
        kept = group < 0
        for _ in range(topk_group):
            best = tl.min(tl.where(sums == tl.max(sums, axis=0), group, _FAR), axis=0)
            kept = kept | (group == best)
            sums = tl.where(group == best, _NONE, sums)
    return tl.where(live, tl.where(kept[:, None], keys, _MINUS_INF), _NONE)


@triton.jit
def _sigmoids_of(logits, chosen, factor, NORM: tl.constexpr):
    """Weights of `group_route` for the logits of the chosen experts."""
    weights = tl.where(chosen, _sigmoid64(logits), 0.0).to(tl.float64)
    if NORM >= 0:
        weights = weights / (tl.sum(weights) + NORM)
    return (weights * factor).to(tl.float32)


# group_route s = sigmoid(logits), c = s + bias; the k largest c of the best groups; w = s, / (sum + NORM) if that
#           is not negative, * factor
# shapes    logits float32 [T, n_group * size]; bias of any float or None; active int32 [T] or None: all; ids int32,
#           weights float32 [T, k]
# grid      (T,): a program, one warp up to 1024 experts, has one token; BLOCK_* powers of two >= what they hold
# bytes     T * E * 4 in, T * k * 8 out; one float64 exp and division for each logit
# limits    BLOCK_G * BLOCK_S <= 16384
@triton.jit
def _group_route_kernel(
    logits_ptr, bias_ptr, active_ptr, ids_ptr, weights_ptr, n_group, size, topk_group, k, factor,
    NORM: tl.constexpr, NAN: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    place = tl.arange(0, BLOCK_S)[None, :]
    index = group * size + place
    live = (group < n_group) & (place < size)
    logits = logits_ptr + row * n_group * size
    seen = tl.load(logits + index, mask=live, other=0.0)
    choice = _sigmoid64(seen)
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + index, mask=live, other=0.0).to(tl.float32)
    keys = tl.where(live, _key(choice), _NONE)
    sound = _all_finite(_key(seen)) & _all_finite(keys) if NAN else tl.max(keys) < _NAN
    if BLOCK_G > 1:
        keys = _keep_groups(keys, live, place, topk_group, BLOCK_G)
    ids, _ = _best(keys, index, k, BLOCK_K)
    chosen = tl.arange(0, BLOCK_K) < k
    weights = _sigmoids_of(tl.load(logits + ids, mask=chosen, other=0.0), chosen, factor, NORM)
    _store(row, k, ids, weights, sound, active_ptr, ids_ptr, weights_ptr, NAN, BLOCK_K)


# What a router reads and writes besides logits; by: scales of `route` or biases of `group_route`, one per expert.
Routing = namedtuple("Routing", "by active ids weights factor")
# What `choose` is compiled for: E experts, GROUPS of `group_route` or 0 for `route`, K chosen; rows of SIZE experts in
# BLOCK_G rows of BLOCK_S.
Router = namedtuple("Router", "E K GROUPS TOPK_GROUP NORM NAN SIZE BLOCK_G BLOCK_S BLOCK_K")


@triton.jit
def choose(logits, r, row, C: tl.constexpr):
    """`route` or `group_route` of one row of logits, past the L1 cache, by all warps of a program."""
    group = tl.arange(0, C.BLOCK_G)[:, None]
    place = tl.arange(0, C.BLOCK_S)[None, :]
    index = group * C.SIZE + place
    live = (place < C.SIZE) & (index < C.E)
    seen = tl.load(logits + index, mask=live, other=0.0, cache_modifier=".cg")
    chosen = tl.arange(0, C.BLOCK_K) < C.K
    if C.GROUPS == 0:
        keys = tl.where(live, _key(seen), _NONE)
        top = tl.max(keys)
        ids, found = _best_of_rows(keys, index, C.K, C.BLOCK_K)
        weights = _softmax_of(ids, found, top, r.by, chosen)
        sound = _all_finite(keys) if C.NAN else _sound(top)
    else:
        choice = _sigmoid64(seen)
        if r.by is not None:
            choice += tl.load(r.by + index, mask=live, other=0.0).to(tl.float32)
        keys = tl.where(live, _key(choice), _NONE)
        sound = _all_finite(_key(seen)) & _all_finite(keys) if C.NAN else tl.max(keys) < _NAN
        if C.GROUPS > 1:
            keys = _keep_groups(keys, live, place, C.TOPK_GROUP, C.BLOCK_G)
        ids, _ = _best_of_rows(keys, index, C.K, C.BLOCK_K)
        own = tl.load(logits + ids, mask=chosen, other=0.0, cache_modifier=".cg")
        weights = _sigmoids_of(own, chosen, r.factor, C.NORM)
    _store(row, C.K, ids, weights, sound, r.active, r.ids, r.weights, C.NAN, C.BLOCK_K)


@triton.jit
def expert_in_place(logits, active_ptr, row, place, C: tl.constexpr, S: tl.constexpr, BLOCK_E: tl.constexpr):
    """The expert in one place of `route` of a row of logits, as `choose` gives it: a number, found by each of S warps
    for itself, which goes down the distinct keys of the row. Where some of those before it are equal, once more with
    barriers.
    """
    EACH: tl.constexpr = min(4, BLOCK_E // 32)  # in one load of a lane
    active = row >= 0
    if active_ptr is not None:
        active = tl.load(active_ptr + row) >= 0
    lane = tl.arange(0, 4)[:, None, None, None, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    at = (tl.arange(0, BLOCK_E // 32 // EACH)[:, None] * 32 + lane) * EACH + tl.arange(0, EACH)
    at += tl.zeros((S, 1, 1), tl.int32)
    seen = load_by_lane(logits + at, at < C.E).permute(2, 3, 0, 1, 4).reshape(S, BLOCK_E)
    index = tl.arange(0, BLOCK_E)[None, :]
    live = index < C.E
    keys = tl.where(live, _key(seen), _NONE)
    top = tl.max(keys, axis=1, keep_dims=True)
    sound = _sound(top)
    if C.NAN:
        sound &= tl.min(tl.where(live, keys, 0), axis=1, keep_dims=True) > _MINUS_INF
    bar = top
    for _ in range(place):
        bar = tl.max(tl.where(keys < bar, keys, _NONE), axis=1, keep_dims=True)
    expert = tl.min(tl.where(keys == bar, index, index + _BEYOND), axis=1, keep_dims=True)
    ahead = tl.sum((keys > bar).to(tl.int32), axis=1, keep_dims=True)
    expert = tl.max(tl.where(sound, tl.where(ahead == place, expert, _FAR), 0))
    if expert == _FAR:
        for _ in range(place + 1):
            expert = _first(keys == tl.max(keys), index)
            keys = tl.where(index == expert, _NONE, keys)
    return tl.where(active, expert, -1)


def router(E: int, k: int, groups: int, topk_group: int, norm: float, nan: bool) -> Router | None:
    """The constants of `choose` for these sizes, None where a kernel of its own is faster: many experts or choices."""
    block_k = triton.next_power_of_2(k)
    if groups > 1:
        size, rows = E // groups, triton.next_power_of_2(groups)
        width = max(32, block_k, triton.next_power_of_2(size))
    else:
        block = max(32, block_k, triton.next_power_of_2(E))
        size = width = max(32, block_k, block // 8)
        rows = block // width
    if rows * width > _CHOOSE_EXPERTS or rows * block_k > _CHOOSE_PAIRS:
        return None
    return Router(E, k, groups, topk_group, norm, nan, size, rows, width, block_k)


# normalize out[t] = weights[t] / sum(weights[t]) where the sum is above 0, else weights[t]; sum in float64
# shapes    weights, out float32 [T, k]; out may be weights
# grid      (ceil(T / ROWS),): a program has ROWS tokens
# bytes     2 * T * k * 4
# limits    k <= 16384
@triton.jit
def _normalize_kernel(weights_ptr, out_ptr, T, k, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    place = tl.arange(0, BLOCK_K)[None, :]
    live = (row < T) & (place < k)
    w = tl.load(weights_ptr + row * k + place, mask=live, other=0.0).to(tl.float64)
    total = tl.sum(w, axis=1)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * k + place, (w * inverse[:, None]).to(tl.float32), mask=live)


def _block(name: str, experts: int, block: int) -> tuple[int, int]:
    """The block and its warps; one warp has 32 numbers per lane at most."""
    if block > MOST_EXPERTS:
        raise BackendError(f"{name}: logits has {experts} experts, expected at most {MOST_EXPERTS} on cuda")
    return block, max(1, block // 1024)


@kernel(ops.moe_route, device="cuda")
def moe_route(
    logits: torch.Tensor,
    per_expert_scale: torch.Tensor | None,
    top_k: int,
    propagate_nan: bool = False,
    active: torch.Tensor | None = None,
    *,
    out,
) -> None:
    ids, weights = out
    rows, E = flat_rows(logits).shape
    if rows == 0:
        return
    block, warps = _block("moe_route", E, triton.next_power_of_2(E))
    _route_kernel[(rows,)](
        logits, per_expert_scale, active, ids, weights, E, top_k, NAN=propagate_nan,
        BLOCK_E=block, BLOCK_K=triton.next_power_of_2(top_k), num_warps=warps, **pdl_options(),
    )  # fmt: skip


@kernel(ops.moe_softmax_topk, device="cuda")
def moe_softmax_topk(
    logits: torch.Tensor, k: int, propagate_nan: bool = False, active: torch.Tensor | None = None, *, out
) -> None:
    ids, weights = out
    rows, E = flat_rows(logits).shape
    if rows == 0:
        return
    block, warps = _block("moe_softmax_topk", E, triton.next_power_of_2(E))
    _slots_kernel[(rows,)](
        logits, active, ids, weights, E, k, NAN=propagate_nan,
        BLOCK_E=block, BLOCK_K=max(32, triton.next_power_of_2(k)), num_warps=warps, **pdl_options(),
    )  # fmt: skip


@kernel(ops.moe_group_route, device="cuda")
def moe_group_route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    propagate_nan: bool = False,
    active: torch.Tensor | None = None,
    norm_eps: float = 1e-20,
    *,
    out,
) -> None:
    ids, weights = out
    rows, E = flat_rows(logits).shape
    if rows == 0:
        return
    groups, width = triton.next_power_of_2(n_group), triton.next_power_of_2(E // n_group)
    _, warps = _block("moe_group_route", E, groups * width)
    _group_route_kernel[(rows,)](
        logits, bias, active, ids, weights, n_group, E // n_group, topk_group, top_k, float(routed_scaling_factor),
        NORM=float(norm_eps) if norm_topk_prob else -1.0, NAN=propagate_nan, BLOCK_G=groups, BLOCK_S=width,
        BLOCK_K=triton.next_power_of_2(top_k), num_warps=warps, **pdl_options(),
    )  # fmt: skip


@kernel(ops.moe_normalize_weights, device="cuda")
def moe_normalize_weights(weights: torch.Tensor, *, out: torch.Tensor) -> None:
    rows, k = flat_rows(weights).shape
    if rows == 0:
        return
    block = triton.next_power_of_2(k)
    if block > MOST_EXPERTS:
        raise BackendError(f"moe_normalize_weights: weights has {k} columns, expected at most {MOST_EXPERTS} on cuda")
    tokens = max(1, 256 // block)
    _normalize_kernel[(triton.cdiv(rows, tokens),)](
        weights, out, rows, k, ROWS=tokens, BLOCK_K=block, num_warps=max(1, block // 1024), **pdl_options()
    )
