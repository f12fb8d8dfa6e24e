"""Times the nodes of a prompt's step of Qwen3.6-35B-A3B on a GPU, those of a block of experts by kernel.

    python -m benchmarks.ops.gpu_prompt [--tokens 4096,512] [--sweep] [--json FILE]

Results are checked first: experts against float64 on dequantized weights. --sweep times sizes of launches instead, each
checked, too. Without --sweep it runs with older sources as well (PYTHONPATH).
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ops.gpu_common import check, finish, parser, random_weight, row, seconds, sets_of
from penstock import ops
from penstock.backends.cuda import _grouped
from penstock.quant import dequantize

DIM, EXPERTS, WIDTH, TOP = 2048, 256, 512, 8
KEYS, VALUES, HEAD, TAPS = 16, 32, 128, 4
CHANNELS = (2 * KEYS + VALUES) * HEAD
JOINED = "key_heads" in inspect.signature(ops.conv1d_causal).parameters  # the convolution takes q and k along


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def chosen(T: int, E: int = EXPERTS) -> torch.Tensor:
    return torch.rand(T, E, device="cuda").topk(TOP, dim=1).indices.int()


def counted(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


# -- checks ------------------------------------------------------------------------------------------------------------


def check_experts(T: int = 600, dim: int = 512, width: int = 256, E: int = 16) -> None:
    """A block with a shared expert against float64 on dequantized weights, with an expert that is absent."""
    stacks = [random_weight(E, *shape) for shape in ((width, dim), (width, dim), (dim, width))]
    own = [random_weight(*shape) for shape in ((width, dim), (width, dim), (dim, width))]
    h, x, ids = normal(T, dim, dtype=torch.float32), normal(T, dim), chosen(T, E)
    ids[3, 2] = -1
    weights, score = torch.rand(T, TOP, device="cuda"), normal(T, 1, dtype=torch.float32)
    got = ops.moe_shared_forward(h, x, ids, weights, *stacks, *own, score)
    gate, up, down = (dequantize(w).double() for w in own)
    hidden = torch.nn.functional.silu(x.double() @ gate.t()) * (x.double() @ up.t())
    want = h.double() + score.double().sigmoid() * (hidden @ down.t())
    for e, (gate, up, down) in enumerate(zip(*(dequantize(w).double() for w in stacks), strict=True)):
        token, place = (ids == e).nonzero(as_tuple=True)
        rows = x[token].double()
        each = (torch.nn.functional.silu(rows @ gate.t()) * (rows @ up.t())) @ down.t()
        want.index_add_(0, token, each * weights[token, place].double()[:, None])
    check("moe_shared_forward", got, want, 5e-3)


def check_conv(T: int = 200) -> None:
    """Convolution, q and k, and the delta rule of two runs against those of each run alone."""
    nodes = Delta(T)
    nodes.starts = counted(0, T // 3, T)
    nodes.slots = counted(1, 0)
    nodes.states = [state[:2].clone().contiguous() for state in nodes.states]
    both = nodes.all()
    for n, (first, last) in enumerate(((0, T // 3), (T // 3, T))):
        part = Delta(T)
        part.qkv, part.alpha, part.beta = (
            each[first:last].contiguous() for each in (nodes.qkv, nodes.alpha, nodes.beta)
        )
        part.starts, part.slots = counted(0, last - first), counted(0)
        part.weights = nodes.weights
        part.states = [torch.zeros_like(state[:1]) for state in part.states]
        check(f"delta rule of run {n}", both[first:last], part.all(), 1e-2)


# -- nodes -------------------------------------------------------------------------------------------------------------


class Delta:
    """A DeltaNet layer's nodes between its projections, over one run of T tokens."""

    def __init__(self, T: int) -> None:
        self.qkv, self.alpha, self.beta = normal(T, CHANNELS), normal(T, VALUES), normal(T, VALUES)
        self.starts, self.slots = counted(0, T), counted(0)
        self.states = [
            torch.zeros(4, TAPS - 1, CHANNELS, device="cuda", dtype=torch.bfloat16),
            torch.zeros(4, VALUES, HEAD, HEAD, device="cuda"),
        ]
        self.weights = normal(CHANNELS, TAPS), normal(VALUES, dtype=torch.float32), normal(VALUES, dtype=torch.float32)

    def convolved(self) -> torch.Tensor:
        where = self.slots, self.starts
        if JOINED:
            return ops.conv1d_causal(self.qkv, self.states[0], self.weights[0], *where, "silu", KEYS, HEAD)
        y = ops.conv1d_causal(self.qkv, self.states[0], self.weights[0], *where)
        return ops.rms_norm_qk(y, KEYS, HEAD, KEYS * HEAD)

    def all(self) -> torch.Tensor:
        y = self.convolved()
        g, b = ops.gdn_decay_beta(self.alpha, self.beta, *self.weights[1:])
        how = (KEYS, VALUES, HEAD, HEAD, "auto", 64, self.slots, self.starts)
        return ops.gated_delta_net(self.states[1], y, g, b, *how)


def block_of(T: int) -> Callable[[], Any]:
    """A call of the experts of a layer."""
    stacks = random_weight(EXPERTS, WIDTH, DIM), random_weight(EXPERTS, WIDTH, DIM), random_weight(EXPERTS, DIM, WIDTH)
    own = random_weight(WIDTH, DIM), random_weight(WIDTH, DIM), random_weight(DIM, WIDTH)
    h, out = normal(T, DIM, dtype=torch.float32), torch.empty(T, DIM, device="cuda")
    rows = normal(T, DIM), chosen(T), torch.rand(T, TOP, device="cuda")
    score = normal(T, 1, dtype=torch.float32)
    return lambda: ops.moe_shared_forward(h, *rows, *stacks, *own, score, out=out)


def by_kernel(call: Callable[[], Any], times: int = 5) -> list[tuple[str, float]]:
    """Seconds of each kernel of a call, in the order in which they run; those of one name that follow each other are
    one.
    """
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    found = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda event: event.time_range.start)
    each, took = len(found) // times, defaultdict(float)
    for n, event in enumerate(found):
        took[n % each, event.name[:60]] += event.time_range.elapsed_us() * 1e-6 / times
    return [(f"{n} {name}", total) for (n, name), total in took.items()]


def node_rows(T: int) -> list[dict[str, Any]]:
    shape = f"T={T}"
    rows = []

    def timed(name: str, make: Callable[[], Callable[[], Any]], nbytes: int) -> None:
        rows.append(row(name, shape, seconds([make() for _ in range(sets_of(nbytes, 4))]), nbytes))

    def norm() -> Callable[[], Any]:
        h, w, out = normal(T, DIM, dtype=torch.float32), normal(DIM, dtype=torch.float32), normal(T, DIM)
        return lambda: ops.rms_norm(h, w, 1e-6, "bfloat16", out=out)

    def sum_norm() -> Callable[[], Any]:
        h, w, x = normal(T, DIM, dtype=torch.float32), normal(DIM, dtype=torch.float32), normal(T, DIM)
        out = normal(T, DIM), torch.empty_like(h)
        return lambda: ops.residual_norm(h, x, w, 1e-6, True, out=out)

    def gated() -> Callable[[], Any]:
        values, z, w = normal(T, VALUES, HEAD), normal(T, VALUES, HEAD), normal(HEAD, dtype=torch.float32)
        return lambda: ops.gated_rms_norm(values, z, w, 1e-6, out=values)

    def router() -> Callable[[], Any]:
        x, w = normal(T, DIM), random_weight(EXPERTS, DIM, bits=8)
        out = torch.empty(T, EXPERTS, device="cuda")
        return lambda: ops.quantized_matmul(x, w, dtype="float32", out=out)

    timed("rms_norm", norm, T * DIM * 6)
    timed("residual_norm", sum_norm, T * DIM * 12)
    timed("gated_rms_norm", gated, T * VALUES * HEAD * 6)
    timed("router product", router, T * DIM * 2 + EXPERTS * (DIM + 4 * T))
    timed("convolution, q and k", lambda: Delta(T).convolved, 4 * T * CHANNELS)
    timed("all of the delta rule", lambda: Delta(T).all, 4 * T * CHANNELS)
    call = block_of(T)
    flops = 6 * T * (TOP + 1) * DIM * WIDTH
    rows.append(row("experts", shape, seconds([call]), flops=flops))
    rows += [row(f"  {name}", shape, took) for name, took in by_kernel(call)]
    return rows


# -- sizes of launches -------------------------------------------------------------------------------------------------

# Tiles of experts: rows of a short tile, BN, BK, warps, stages; registers of a thread at most (0: any); whether a tile
# may have the rows of a short one more. The first is compared with.
EXPERT_TILES = (
    ((32, 128, 64, 4, 3), 0, False),
    ((32, 128, 64, 4, 3), 0, True),
    ((32, 128, 32, 4, 4), 0, True),
    ((16, 128, 64, 4, 3), 0, True),
    ((16, 128, 64, 4, 3), 0, False),
    ((64, 128, 64, 4, 3), 0, False),
    ((32, 128, 32, 4, 4), 0, False),
    ((32, 128, 64, 8, 3), 0, False),
    ((32, 128, 64, 8, 3), 128, False),
    ((32, 128, 128, 8, 3), 128, False),
    ((32, 128, 32, 8, 4), 128, False),
)
# Tiles of a router's scores: BM, BN, warps, stages.
SCORE_TILES = ((64, 128, 4, 3), (64, 64, 4, 3), (32, 128, 4, 3), (64, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 4))
# Rows of a program and its warps, of a norm with the sum before it.
NORM_SHARES = ((1, 4), (1, 2), (1, 8), (2, 4), (2, 8), (4, 8))


class Limited:
    """A kernel with at most so many registers for a thread."""

    def __init__(self, kernel: Any, registers: int) -> None:
        self.kernel, self.registers = kernel, registers

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.kernel[grid], **({"maxnreg": self.registers} if self.registers else {}))


def attempt(name: str, call: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of a call, or none and what is wrong."""
    try:
        return call()
    except SystemExit as error:
        print(f"{name}: WRONG: {error}")
    except Exception as error:  # of any kind: too large for a GPU, not compiled
        print(f"{name}: {type(error).__name__} {str(error)[:200]}")
    return []


def expert_sizes(T: int, even: bool) -> list[dict[str, Any]]:
    """Gate and up, and down, with each of `EXPERT_TILES`; even: every expert has as many pairs."""
    gate, up = (random_weight(EXPERTS, WIDTH, DIM) for _ in range(2))
    down = random_weight(EXPERTS, DIM, WIDTH)
    x, ids, kernel = normal(T, DIM), chosen(T), _grouped._grouped_kernel
    if even:
        ids = (torch.arange(T * TOP, device="cuda") % EXPERTS).int().view(T, TOP)
    wants: list[torch.Tensor] = []

    def timed(name: str, long: bool) -> list[dict[str, Any]]:
        plan = _grouped.group_pairs(ids, EXPERTS, long=long)
        h = torch.empty(T, TOP, WIDTH, device="cuda", dtype=torch.bfloat16)
        each = torch.empty(T, TOP, DIM, device="cuda", dtype=torch.bfloat16)
        first = functools.partial(_grouped.grouped_gate_up, x, gate, up, ids, None, "silu", h, plan)
        second = functools.partial(_grouped._grouped_down, h, down, plan, each, False)
        first()
        second()
        wants.extend([] if wants else [h.clone(), each.clone()])
        check(f"gate and up, {name}", h, wants[0], 2e-3)
        check(f"down, {name}", each, wants[1], 5e-3)
        flops = 2 * T * TOP * DIM * WIDTH
        return [
            row("gate and up", f"T={T} {name}", seconds([first]), flops=2 * flops),
            row("down", f"T={T} {name}", seconds([second]), flops=flops),
        ]

    rows = []
    for sizes, registers, long in EXPERT_TILES[: 2 if even else None]:
        _grouped.GROUPED = dict.fromkeys(_grouped.GROUPED, sizes)
        _grouped._grouped_kernel = Limited(kernel, registers)
        _grouped._config.cache_clear()
        name = f"{sizes} {registers or ''}{' long' if long else ''}{' even' if even else ''}"
        rows += attempt(name, functools.partial(timed, name, long))
    _grouped._grouped_kernel = kernel
    return rows


def score_sizes(T: int) -> list[dict[str, Any]]:
    """A router's scores with each of `SCORE_TILES`, checked against float64."""
    from penstock.backends.cuda import _exact

    x, w = normal(T, DIM), random_weight(EXPERTS, DIM, bits=8)
    want, got = x.double() @ dequantize(w).double().t(), torch.empty(T, EXPERTS, device="cuda")

    def timed(name: str) -> list[dict[str, Any]]:
        _exact.exact_product(x, w, got)
        check(name, got, want, 2e-6)
        return [row("scores", name, seconds([lambda: _exact.exact_product(x, w, got)]), T * DIM * 2 + got.nbytes)]

    rows = []
    for sizes in SCORE_TILES:
        _exact.SCORES = (1, 1024, *sizes)
        name = f"T={T} {sizes}"
        rows += attempt(name, functools.partial(timed, name))
    return rows


def norm_sizes(T: int) -> list[dict[str, Any]]:
    """A norm with the sum before it, with each of `NORM_SHARES`."""
    from penstock.backends.cuda import norm

    w, out = normal(DIM, dtype=torch.float32), (normal(T, DIM), torch.empty(T, DIM, device="cuda"))
    sets = [(normal(T, DIM, dtype=torch.float32), normal(T, DIM)) for _ in range(4)]
    total = sets[0][0].double() + sets[0][1].double()
    want = total * (total.square().mean(1, keepdim=True) + 1e-6).rsqrt() * w.double()
    whole, rows = norm.tile, []

    def timed(name: str) -> list[dict[str, Any]]:
        ops.residual_norm(*sets[0], w, 1e-6, True, out=out)
        check(name, out[0], want, 4e-3)
        calls = [functools.partial(ops.residual_norm, *each, w, 1e-6, True, out=out) for each in sets]
        return [row("residual_norm", name, seconds(calls), T * DIM * 12)]

    for R, warps in NORM_SHARES:
        norm.tile = lambda op, dim, *more, R=R, warps=warps: whole(op, dim, *more)._replace(R=R, warps=warps)
        rows += attempt(f"T={T} {R} rows, {warps} warps", functools.partial(timed, f"T={T} {R} rows, {warps} warps"))
    norm.tile = whole
    return rows


def sweep_rows(T: int) -> list[dict[str, Any]]:
    return [*expert_sizes(T, True), *expert_sizes(T, False), *score_sizes(T), *norm_sizes(T)]


def main() -> None:
    made = parser(__doc__.split("\n", 1)[0])
    made.add_argument("--tokens", default="4096,512")
    made.add_argument("--sweep", action="store_true", help="sizes of launches instead")
    args = made.parse_args()
    tokens = [int(T) for T in args.tokens.split(",")]
    if args.sweep:
        rows = [line for T in tokens for line in sweep_rows(T)]
    else:
        check_experts()
        check_conv()
        rows = [line for T in tokens for line in node_rows(T)]
    finish("a prompt's step", rows, args.json)


if __name__ == "__main__":
    main()
