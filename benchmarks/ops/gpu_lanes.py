"""Launches of products by lanes on a GPU, for every format that lanes take: timed beside what is in use.

    python -m benchmarks.ops.gpu_lanes [--formats "4 bits,mxfp4,mxfp8,nvfp4"] [--tokens 1,8,16]
                                       [--expert-tokens 4,8,12,32] [--best 4] [--json FILE]

Dense products of three shapes, and the blocks of experts of Qwen3.6-35B-A3B and gpt-oss-20b (with biases, mxfp4).
"other ways" is what a call takes that may not go by lanes. A launch whose results are off is named and left out.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import penstock
from benchmarks.ops.gpu_common import compile_ahead, finish, parser, relative_error, row, seconds, sets_of, weight_of
from benchmarks.ops.gpu_linear import SHAPES, first_rows
from penstock import ops
from penstock.backends.cuda import _few_rows, linear, moe
from penstock.backends.cuda._few_rows import Launch
from penstock.quant import QuantizedTensor

MOST = 5e-3  # relative error of bfloat16 results
FORMATS = ("4 bits", "mxfp4", "mxfp8", "nvfp4")
# Tiles of 16 rows, warps that share K, groups of 64 in a block, blocks at a time, registers of a thread at most.
Dense = tuple[int, int, int, int, int | None]
DENSE: dict[int, tuple[Dense, ...]] = {
    1: (
        (2, 8, 2, 1, None), (2, 8, 2, 1, 128), (1, 8, 4, 2, None), (1, 8, 4, 1, 128), (1, 8, 2, 2, 128),
        (2, 4, 2, 1, None), (2, 4, 4, 1, None), (1, 4, 4, 1, None), (2, 8, 4, 1, 128), (2, 4, 2, 1, 80),
        (1, 4, 2, 1, 80), (1, 16, 2, 1, 64),
    ),
    2: (
        (2, 4, 2, 1, None), (1, 8, 2, 1, None), (1, 4, 2, 1, None), (1, 8, 2, 1, 128), (2, 8, 2, 1, 128),
        (2, 4, 2, 1, 128), (1, 4, 4, 1, None), (1, 8, 2, 1, 80),
    ),
}  # fmt: skip
# Tiles, groups of 32 in a block, whether x comes a block ahead, registers; the first are those in use of floats.
Grouped = tuple[int, int, bool, int | None]
GROUPED: tuple[Grouped, ...] = (
    (2, 4, False, 168), (4, 4, False, None), (4, 2, False, None), (2, 4, False, 128), (2, 8, False, None),
    (2, 4, True, None),
)  # fmt: skip
MODELS = {"qwen3.6-35b-a3b": (2048, 512, 256, 8), "gpt-oss-20b": (2880, 2880, 32, 4)}  # dim, width, experts, chosen


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def no_lanes(*_: Any) -> bool:
    return False


def only_lanes(*_: Any) -> bool:
    return True


def dense_launch(sizes: tuple[Any, ...], how: Dense) -> Launch:
    """For the arguments of `_few_rows._dense_launch`."""
    T, _, K, bits, gs, gated = sizes[:6]
    tiles, parts, groups, ahead, registers = how
    groups *= 2 if gs == 32 else 1
    P = _few_rows._groups(K, bits, gs, groups)
    U = max(1, min(ahead * max(1, groups // P), -(-(K // gs // P) // parts)))
    return Launch(max(2, tiles) if gated else tiles, 2 if T > 8 else 1, parts, 1, P, U, False, registers)


def expert_launch(kind: str, how: Grouped, *sizes: Any) -> Launch:
    """For the arguments of `_few_rows._expert_launch`; another product than `kind` goes as it does now."""
    which, rows, K, bits, gs = sizes[:5]
    if which != kind:
        return EXPERT_LAUNCH(*sizes)
    tiles, groups, ahead, registers = how
    groups //= gs // 32
    P = _few_rows._groups(K, bits, gs, max(1, groups))
    return Launch(tiles, rows // 8, 1, 4, P, max(1, min(groups // P, K // gs // P)), ahead, registers)


EXPERT_LAUNCH = _few_rows._expert_launch


@contextlib.contextmanager
def dense_by_lanes(how: Dense) -> Iterator[None]:
    launch = replaced(_few_rows, "_dense_launch", lambda *sizes: dense_launch(sizes, how))
    with penstock.backend("cuda", variant="lanes"), launch:
        yield


def dense_ways(T: int) -> Iterator[tuple[str, Any]]:
    """Names of ways, and contexts in which a product of T rows goes so."""
    yield "as it goes", contextlib.nullcontext
    yield "other ways", functools.partial(replaced, linear, "takes", no_lanes)
    for how in DENSE[2 if T > 8 else 1]:
        yield str(how), functools.partial(dense_by_lanes, how)


def compile_dense(format: str, N: int, K: int, T: int) -> None:
    x, w = torch.randn(T, K, device="cuda").bfloat16(), weight_of(format, N, K)
    for _, way in dense_ways(T):
        with way():
            ops.quantized_matmul(x, w)


def dense_rows(format: str, N: int, K: int, tokens: list[int]) -> Iterator[dict[str, Any]]:
    one = weight_of(format, N, K)
    weights = [one, *(weight_of(format, N, K) for _ in range(sets_of(one.nbytes) - 1))]
    for T in tokens:
        x, out = torch.randn(T, K, device="cuda").bfloat16(), torch.empty(T, N, device="cuda", dtype=torch.bfloat16)
        want = x.double() @ first_rows(one).T
        for name, way in dense_ways(T):
            with way():
                ops.quantized_matmul(x, one, out=out)
                error = relative_error(out[:, :4096], want)
                if not error <= MOST:
                    print(f"{format} [{N}, {K}] T = {T} {name}: relative error {error:.3g}: left out")
                    continue
                took = seconds([functools.partial(ops.quantized_matmul, x, w, out=out) for w in weights], 1e-3, 5)
            yield row(f"quantized_matmul, {format}", f"[{N}, {K}] T = {T}", took, one.nbytes, error=error, launch=name)


def block(model: str, format: str, experts: int | None = None) -> tuple[QuantizedTensor, ...]:
    dim, width, E, _ = MODELS[model]
    E = experts or E
    return weight_of(format, E, width, dim), weight_of(format, E, width, dim), weight_of(format, E, dim, width)


def call_of(model: str, stacks: tuple[QuantizedTensor, ...], T: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The block as a function of ids."""
    dim, width, _, k = MODELS[model]
    E = stacks[0].shape[0]
    x, share = torch.randn(T, dim, device="cuda").bfloat16(), torch.rand(T, k, device="cuda")
    if model != "gpt-oss-20b":
        return lambda ids: ops.moe_forward(x, ids, share, *stacks)
    biases = [torch.randn(E, n, device="cuda") for n in (width, width, dim)]
    residual = torch.randn(T, dim, device="cuda")
    return lambda ids: ops.moe_biased_forward(x, ids, share, *stacks, *biases, None, 7.0, residual=residual)


@contextlib.contextmanager
def block_by_lanes(launch: Any) -> Iterator[None]:
    with replaced(moe, "_by_lanes", only_lanes), replaced(_few_rows, "_expert_launch", launch):
        yield


def block_ways() -> Iterator[tuple[str, Any]]:
    """As `dense_ways`, of a block of experts."""
    yield "as it goes", contextlib.nullcontext
    yield "other ways", functools.partial(replaced, moe, "takes", no_lanes)
    for kind, how in itertools.product(("gate_up", "down"), GROUPED):
        yield f"{kind} {how}", functools.partial(block_by_lanes, functools.partial(expert_launch, kind, how))


def compile_block(model: str, format: str, T: int) -> None:
    k = MODELS[model][3]
    ids = torch.arange(T * k, device="cuda", dtype=torch.int32).view(T, k) % MODELS[model][2]
    call = call_of(model, block(model, format), T)
    for _, way in block_ways():
        with way():
            call(ids)


def block_rows(model: str, format: str, tokens: list[int]) -> Iterator[dict[str, Any]]:
    stacks, (_, _, E, k) = block(model, format), MODELS[model]
    for T in tokens:
        ids = [torch.rand(T, E, device="cuda").topk(k, dim=1).indices.int() for _ in range(12)]
        read = sum(len(i.unique()) for i in ids) / len(ids)
        nbytes = int(read * sum(w.nbytes for w in stacks) / E)
        call, want = call_of(model, stacks, T), None
        for name, way in block_ways():
            with way():
                got = call(ids[0])
                want = got if name == "other ways" else want
                error = 0.0 if want is None else relative_error(got, want)
                if not error <= MOST:
                    print(f"{model} {format} T = {T} {name}: relative error {error:.3g}: left out")
                    continue
                took = seconds([functools.partial(call, i) for i in ids], 1e-3, 5)
            yield row(f"experts, {format}", f"{model} T = {T}", took, nbytes, error=error, launch=name)


def main() -> None:
    reader = parser(__doc__.split("\n", 1)[0])
    reader.add_argument("--formats", default=",".join(FORMATS))
    reader.add_argument("--tokens", default="1,8,16")
    reader.add_argument("--expert-tokens", default="4,8,12,32")
    reader.add_argument("--best", type=int, default=4, help="how many launches of each to print")
    args = reader.parse_args()
    formats = args.formats.split(",")
    tokens, expert_tokens = ([int(T) for T in some.split(",") if T] for some in (args.tokens, args.expert_tokens))
    blocks = [("gpt-oss-20b", "mxfp4")] if "mxfp4" in formats else []
    blocks += [("qwen3.6-35b-a3b", format) for format in formats]
    work = [("dense", format, N, K, T) for format in formats for N, K in SHAPES for T in tokens]
    work += [("block", *which, T) for which in blocks for T in expert_tokens]
    compile_ahead(compile_one, work, 15)
    rows: list[dict[str, Any]] = []
    calls = [dense_rows(format, N, K, tokens) for format in formats for N, K in SHAPES]
    calls += [block_rows(*which, expert_tokens) for which in blocks] if expert_tokens else []
    for call in calls:
        for (op, shape), some in itertools.groupby(call, lambda each: (each["op"], each["shape"])):
            found = list(some)
            rows += found
            best = [*found[:2], *sorted(found[2:], key=lambda each: each["us"])[: args.best]]
            print(f"{op} {shape}:", ", ".join(f"{one['launch']} {one['us']:.2f}" for one in best), flush=True)
    finish("Launches of lanes", rows, args.json)


def compile_one(kind: str, *sizes: Any) -> None:
    (compile_dense if kind == "dense" else compile_block)(*sizes)


if __name__ == "__main__":
    main()
