"""Launches of products with GGUF blocks in other sizes than those in use, on a GPU: checked, then timed side by side.

    python -m benchmarks.ops.gpu_blocks [--json FILE] [--only matvec,lanes,experts] [--formats Q4_K,Q6_K] [--used Q5_K]
    python -m benchmarks.ops.gpu_blocks --shapes 12288x2048 --tokens 1,16 --used Q5_K --expert-tokens 8

Of one token the matvec (rows and warps of a program, blocks at a time), of 4, 16 and 32 the lanes (tiles of rows and of
tokens, warps that share K, warps across, blocks at a time, registers at most) with tiles beside them, of experts of a
Q4_K_M file gate and up, and down. "in use" is what a call takes by itself; formats of --used are timed so alone. All
stand beside 4 bits: "of 4 bits" is the share of that bandwidth. All is compiled first, by processes side by side.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

import penstock
from benchmarks.ops.gpu_common import check, compile_ahead, finish, parser, row, seconds, sets_of, weight_of
from benchmarks.ops.gpu_linear import EXPERTS, QWEN, SHAPES, block_weights, first_rows
from penstock import ops
from penstock.backends.cuda import _few_rows, _matvec
from penstock.backends.cuda._few_rows import Launch

AFFINE, FORMATS = "4 bits", ("Q4_K", "Q6_K")
USED = "in use"
# rows, warps, blocks at a time
MATVECS = ((16, 2, 1), (16, 2, 2), (16, 4, 1), (16, 4, 2), (16, 8, 1), (32, 2, 1), (32, 2, 2), (32, 4, 1), (32, 4, 2))
# tiles, tiles of tokens, warps that share K, warps across, blocks at a time, registers
LANES = {
    4: (
        (2, 1, 8, 1, 1, 128), (2, 1, 8, 1, 1, None), (2, 1, 4, 1, 1, 128), (2, 1, 4, 1, 1, 168), (2, 1, 4, 2, 1, 128),
        (1, 1, 8, 1, 1, 96), (1, 1, 8, 1, 2, 128), (1, 1, 4, 1, 1, 96), (1, 1, 4, 1, 2, 128), (1, 1, 8, 1, 4, None),
        (1, 1, 16, 1, 1, 96), (1, 1, 16, 1, 2, 128),
    ),
    16: (
        (1, 2, 8, 1, 1, 128), (1, 2, 4, 1, 1, 128), (1, 2, 8, 1, 1, 96), (1, 2, 8, 1, 2, 168), (2, 2, 4, 1, 1, 168),
        (2, 2, 8, 1, 1, None), (1, 2, 16, 1, 1, 128),
    ),
    32: ((1, 2, 8, 1, 1, 128), (1, 4, 8, 1, 1, 168), (1, 4, 4, 1, 1, 168), (1, 4, 4, 2, 1, 128), (2, 4, 4, 1, 1, None)),
}  # fmt: skip
# kind, tiles, warps, blocks at a time, x ahead, registers
GROUPS = {
    8: (
        ("gate_up", 4, 4, 1, False, 168), ("gate_up", 4, 4, 1, False, None), ("gate_up", 4, 8, 1, False, 128),
        ("gate_up", 2, 4, 1, False, 128), ("gate_up", 2, 4, 1, True, 128), ("gate_up", 2, 4, 2, False, 168),
        ("gate_up", 2, 8, 1, False, 128), ("down", 2, 4, 1, False, 128), ("down", 2, 4, 1, False, 168),
        ("down", 2, 4, 1, True, 168), ("down", 1, 4, 1, False, 128), ("down", 1, 4, 2, False, 128),
        ("down", 2, 8, 1, False, 128),
    ),
    16: (
        ("gate_up", 4, 4, 1, False, None), ("gate_up", 2, 4, 1, False, 128), ("gate_up", 2, 4, 1, False, 168),
        ("gate_up", 2, 4, 1, True, 168), ("down", 2, 4, 1, False, 168), ("down", 2, 4, 1, False, None),
        ("down", 1, 4, 1, False, 128), ("down", 1, 4, 1, True, 128),
    ),
}  # fmt: skip
EXPERT_TOKENS = {8: 8, 32: 8, 384: 16}  # tokens of 256 experts, pairs of a tile


@contextlib.contextmanager
def sizes(way: str, how: Any) -> Iterator[None]:
    """Launches of these sizes inside the block; USED: as they are."""
    if how == USED:
        yield
        return
    module, name = (_matvec, "config") if way == "matvec" else (_few_rows, f"_{way}_launch")
    before = getattr(module, name)

    def chosen(*given: Any) -> Any:
        if way == "matvec":
            rows, warps, blocks = how
            return _matvec._coded(1, rows, warps, blocks)
        if way == "dense":
            tiles, token_tiles, parts, across, blocks, registers = how
            return Launch(tiles, token_tiles, parts, across, 4, blocks, False, registers)
        kind, tiles, across, blocks, ahead, registers = how
        if kind != given[0]:
            return before(*given)
        return Launch(tiles, given[1] // 8, 1, across, 4, blocks, ahead, registers)

    setattr(module, name, chosen)
    try:
        yield
    finally:
        setattr(module, name, before)


class Case(NamedTuple):
    """A product of T tokens, and by which launch; variant None: by the one that the backend chooses."""

    format: str
    N: int
    K: int
    T: int
    variant: str | None
    way: str
    how: Any

    def __str__(self) -> str:
        return f"{self.format} [{self.N}, {self.K}] T = {self.T} {self.variant or ''} {self.how}"


def product_cases(formats: Sequence[str], used: Sequence[str], shapes: Any, tokens: Any, asked: Any) -> list[Case]:
    """For each shape and number of tokens 4 bits first."""
    cases: list[Case] = []
    for (N, K), T in itertools.product(shapes, tokens):
        kind, way = ("matvec", "matvec") if T == 1 else ("lanes", "dense")
        if kind not in asked:
            continue
        cases.append(Case(AFFINE, N, K, T, None, way, USED))
        for format in formats:
            hows = (USED, *(MATVECS if T == 1 else LANES.get(T, ())))
            cases += [Case(format, N, K, T, kind, way, how) for how in hows]
            cases += [Case(format, N, K, T, "tiles", way, USED)] if T >= 16 else []
        cases += [Case(format, N, K, T, None, way, USED) for format in used]
    return cases


def product(case: Case) -> None:
    """Runs a kernel once: several at a time, before anything is timed."""
    x, w = torch.randn(case.T, case.K, device="cuda").bfloat16(), weight_of(case.format, case.N, case.K)
    with penstock.backend("cuda", variant=case.variant), sizes(case.way, case.how):
        ops.quantized_matmul(x, w)


def product_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Of cases of one shape and number of tokens."""
    rows: list[dict[str, Any]] = []
    for format, some in itertools.groupby(cases, lambda case: case.format):
        N, K, T = cases[0][1:4]
        one = weight_of(format, N, K)
        weights = [one, *(weight_of(format, N, K) for _ in range(sets_of(one.nbytes) - 1))]
        x = torch.randn(T, K, device="cuda").bfloat16()
        want = x.double() @ first_rows(one).T
        out = torch.empty(T, N, device="cuda", dtype=torch.bfloat16)
        for case in some:
            with penstock.backend("cuda", variant=case.variant), sizes(case.way, case.how):
                error = check(str(case), ops.quantized_matmul(x, one)[:, :4096], want, 5e-3)
                took = seconds([lambda w=w, x=x, o=out: ops.quantized_matmul(x, w, out=o) for w in weights], rounds=5)
            how = f"{case.variant or ''} {case.how}".strip()
            made = row(how, f"{format} [{N}, {K}] T = {T}", took, one.nbytes, error=error)
            rows.append(beside(made, rows))
    return rows


def beside(made: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row with its share of the bandwidth of the first one."""
    made |= {"of 4 bits": made["TB/s"] / (rows[0] if rows else made)["TB/s"]}
    print(f"{made['shape']} {made['op']}: {made['us']:.2f} µs, {made['of 4 bits']:.2f} of 4 bits", flush=True)
    return made


def expert_call(T: int, rows: int, how: Any, name: str = "Q4_K") -> None:
    gate, up, down = block_weights(name, 8)
    x, share = torch.randn(rows, gate.shape[-1], device="cuda").bfloat16(), torch.rand(rows, 8, device="cuda")
    ids = torch.arange(8, device="cuda", dtype=torch.int32).repeat(rows, 1)
    before = _few_rows.FEW_TILES
    _few_rows.FEW_TILES = ((float("inf"), rows),)
    with penstock.backend("cuda", variant="lanes"), sizes("expert", how):
        ops.moe_forward(x, ids, share, gate, up, down)
    _few_rows.FEW_TILES = before


def expert_rows(tokens: Sequence[int]) -> list[dict[str, Any]]:
    files = {name: block_weights(name) for name in (AFFINE, "Q4_K")}
    found: list[dict[str, Any]] = []
    dim, _, E, _ = EXPERTS[QWEN]
    for T in tokens:
        rows, made = EXPERT_TOKENS[T], []
        ids = [torch.rand(T, E, device="cuda").topk(8, dim=1).indices.int() for _ in range(8)]
        x, share = torch.randn(T, dim, device="cuda").bfloat16(), torch.rand(T, 8, device="cuda")
        out = torch.empty(T, dim, device="cuda", dtype=x.dtype)
        read = sum(len(i.unique()) for i in ids) / len(ids)
        ways = [("Q4_K", "rows" if T < 64 else "grouped", USED)]
        ways = [(AFFINE, "lanes", USED), *ways, *(("Q4_K", "lanes", how) for how in (USED, *GROUPS[rows]))]
        want = {}
        for name, stacks in files.items():
            with penstock.backend("cuda", variant="rows"):
                want[name] = ops.moe_forward(x, ids[0], share, *stacks)
        for name, variant, how in ways:
            stacks = files[name]
            nbytes = int(read * sum(w.nbytes for w in stacks) / E)
            with penstock.backend("cuda", variant=variant), sizes("expert", how):
                got = ops.moe_forward(x, ids[0], share, *stacks)
                error = check(f"experts of {name} T = {T} {variant} {how}", got, want[name], 1e-2)
                calls = [lambda i=i, x=x, s=share, o=out, w=stacks: ops.moe_forward(x, i, s, *w, out=o) for i in ids]
                took = seconds(calls, rounds=5)
            one = row(f"{variant} {how}", f"{name} experts T = {T}", took, nbytes, error=error)
            made.append(beside(one, made))
        found += made
    return found


def compiled(kind: str, *arguments: Any) -> None:
    (product if kind == "product" else expert_call)(*arguments)


def main() -> None:
    reader = parser(__doc__.split("\n", 1)[0])
    reader.add_argument("--only", default="matvec,lanes,experts", help="some of matvec, lanes and experts")
    reader.add_argument("--formats", default=",".join(FORMATS))
    reader.add_argument("--used", default="", help="formats whose launches in use are timed alone")
    reader.add_argument("--shapes", default=",".join(f"{N}x{K}" for N, K in SHAPES), help="of weights: NxK,NxK")
    reader.add_argument("--tokens", default="1,4,16,32", help="of products")
    reader.add_argument("--expert-tokens", default=",".join(map(str, EXPERT_TOKENS)), help="some of these")
    args = reader.parse_args()
    formats, used, asked = (text.split(",") if text else [] for text in (args.formats, args.used, args.only))
    tokens, expert_tokens = ([int(T) for T in text.split(",")] for text in (args.tokens, args.expert_tokens))
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    cases = product_cases(formats, used, shapes, tokens, asked)
    jobs: list[tuple[Any, ...]] = [("product", case) for case in cases]
    if "experts" in asked:
        jobs += [("experts", T, EXPERT_TOKENS[T], USED, AFFINE) for T in expert_tokens]
        jobs += [
            ("experts", T, EXPERT_TOKENS[T], how) for T in expert_tokens for how in (USED, *GROUPS[EXPERT_TOKENS[T]])
        ]
    compile_ahead(compiled, jobs, 15)
    rows = []
    for _, some in itertools.groupby(cases, lambda case: case[1:4]):
        rows += product_rows(list(some))
    if "experts" in asked:
        rows += expert_rows(expert_tokens)
    finish("Sizes of launches of GGUF blocks", rows, args.json)


if __name__ == "__main__":
    main()
