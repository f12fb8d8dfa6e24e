"""Launches of products with GGUF blocks in other sizes than those in use, on a GPU: checked, then timed side by side.

    python -m benchmarks.ops.gpu_blocks [--json FILE] [--only matvec,lanes,experts] [--formats Q4_K,Q6_K]

Of one token the matvec (rows and warps of a program, blocks at a time), of 4, 16 and 32 the lanes (tiles of rows and of
tokens, warps that share K, warps across, blocks at a time, registers at most) with tiles beside them, of experts of a
Q4_K_M file gate and up, and down. "in use" is what a call takes by itself.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import penstock
from benchmarks.ops.gpu_common import check, compile_ahead, finish, parser, row, seconds, sets_of, weight_of
from benchmarks.ops.gpu_linear import EXPERTS, QWEN, SHAPES, block_weights, first_rows
from penstock import ops
from penstock.backends.cuda import _few_rows, _matvec
from penstock.backends.cuda._few_rows import Launch

FORMATS = "Q4_K", "Q6_K"
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


def product_cases() -> list[tuple[Any, ...]]:
    """Shape, tokens, variant, way and how."""
    cases = []
    for N, K in SHAPES:
        cases += [(N, K, 1, "matvec", "matvec", how) for how in (USED, *MATVECS)]
        for T, hows in LANES.items():
            cases += [(N, K, T, "lanes", "dense", how) for how in (USED, *hows)]
        cases += [(N, K, T, "tiles", "dense", USED) for T in (16, 32)]
    return cases


def product(format: str, N: int, K: int, T: int, variant: str, way: str, how: Any) -> None:
    """Runs a kernel once: several at a time, before anything is timed."""
    x, w = torch.randn(T, K, device="cuda").bfloat16(), weight_of(format, N, K)
    with penstock.backend("cuda", variant=variant), sizes(way, how):
        for dtype in ("float32", None):
            ops.quantized_matmul(x, w, dtype=dtype)


def product_rows(format: str, N: int, K: int, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    one = weight_of(format, N, K)
    weights = [one, *(weight_of(format, N, K) for _ in range(sets_of(one.nbytes) - 1))]
    dense, rows = first_rows(one), []
    for T, variant, way, how in cases:
        x = torch.randn(T, K, device="cuda").bfloat16()
        out = torch.empty(T, N, device="cuda", dtype=torch.bfloat16)
        with penstock.backend("cuda", variant=variant), sizes(way, how):
            what, most = f"{format} [{N}, {K}] T = {T} {variant} {how}", 5e-3 if variant == "tiles" else 1e-5
            got = ops.quantized_matmul(x, one, dtype="float32")[:, :4096]
            error = check(what, got, x.double() @ dense.T, most)
            took = seconds([lambda w=w, x=x, out=out: ops.quantized_matmul(x, w, out=out) for w in weights], rounds=5)
        rows.append(row(f"{variant} {how}", f"{format} [{N}, {K}] T = {T}", took, one.nbytes, error=error))
        print(f"{format} [{N}, {K}] T = {T} {variant} {how}: {took * 1e6:.2f} µs", flush=True)
    return rows


def expert_call(T: int, rows: int, how: Any) -> None:
    gate, up, down = block_weights("Q4_K", 8)
    x, share = torch.randn(rows, gate.shape[-1], device="cuda").bfloat16(), torch.rand(rows, 8, device="cuda")
    ids = torch.arange(8, device="cuda", dtype=torch.int32).repeat(rows, 1)
    before = _few_rows.FEW_TILES
    _few_rows.FEW_TILES = ((float("inf"), rows),)
    with penstock.backend("cuda", variant="lanes"), sizes("expert", how):
        ops.moe_forward(x, ids, share, gate, up, down)
    _few_rows.FEW_TILES = before


def expert_rows() -> list[dict[str, Any]]:
    stacks, made = block_weights("Q4_K"), []
    dim, _, E, _ = EXPERTS[QWEN]
    for T, rows in EXPERT_TOKENS.items():
        ids = [torch.rand(T, E, device="cuda").topk(8, dim=1).indices.int() for _ in range(8)]
        x, share = torch.randn(T, dim, device="cuda").bfloat16(), torch.rand(T, 8, device="cuda")
        out = torch.empty(T, dim, device="cuda", dtype=x.dtype)
        read = sum(len(i.unique()) for i in ids) / len(ids)
        nbytes = int(read * sum(w.nbytes for w in stacks) / E)
        with penstock.backend("cuda", variant="rows"):
            want = ops.moe_forward(x, ids[0], share, *stacks)
        ways = [("rows" if T < 64 else "grouped", USED), *(("lanes", how) for how in (USED, *GROUPS[rows]))]
        for variant, how in ways:
            with penstock.backend("cuda", variant=variant), sizes("expert", how):
                got = ops.moe_forward(x, ids[0], share, *stacks)
                error = check(f"experts T = {T} {variant} {how}", got, want, 1e-2)
                took = seconds(
                    [lambda i=i, x=x, s=share, o=out: ops.moe_forward(x, i, s, *stacks, out=o) for i in ids], rounds=5
                )
            made.append(row(f"{variant} {how}", f"experts T = {T}", took, nbytes, error=error))
            print(f"experts T = {T} {variant} {how}: {took * 1e6:.2f} µs", flush=True)
    return made


def main() -> None:
    reader = parser(__doc__.split("\n", 1)[0])
    reader.add_argument("--only", default="matvec,lanes,experts", help="some of matvec, lanes and experts")
    reader.add_argument("--formats", default=",".join(FORMATS))
    reader.add_argument("--tokens", default="1,4,16,32", help="of products")
    args = reader.parse_args()
    asked, formats, tokens = args.only.split(","), args.formats.split(","), [int(T) for T in args.tokens.split(",")]
    cases = [case for case in product_cases() if ("matvec" if case[3] == "matvec" else "lanes") in asked]
    cases = [case for case in cases if case[2] in tokens]
    compile_ahead(product, [(format, *case) for format in formats for case in cases], 15)
    rows = []
    for format in formats:
        for N, K in SHAPES:
            rows += product_rows(format, N, K, [case[2:] for case in cases if case[:2] == (N, K)])
    if "experts" in asked:
        compile_ahead(expert_call, [(T, n, how) for T, n in EXPERT_TOKENS.items() for how in (USED, *GROUPS[n])], 15)
        rows += expert_rows()
    finish("Sizes of launches of GGUF blocks", rows, args.json)


if __name__ == "__main__":
    main()
