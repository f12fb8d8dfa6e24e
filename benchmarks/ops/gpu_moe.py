"""Times MoE blocks on a GPU: routers, combination, and routed experts through `ops.moe_forward`.

    python -m benchmarks.ops.gpu_moe [--json FILE]

Bytes of `moe_forward` are the weights of the experts that the tokens chose, each once, with tokens in and out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import penstock
from benchmarks.ops.gpu_common import check, compile_ahead, finish, parser, row, seconds, sets_of
from penstock import ops
from penstock.quant import QuantizedTensor, dequantize

TOP = 8


@dataclass(frozen=True)
class Model:
    name: str
    router: str
    dim: int
    experts: int
    width: int


MODELS = (
    Model("Qwen3.6-35B-A3B", "moe_softmax_topk", 2048, 256, 512),
    Model("Gemma 4 26B-A4B", "moe_route", 2816, 128, 704),
    Model("DeepSeek-V3", "moe_group_route", 7168, 256, 2048),
)
DECODE, PREFILL = 1, 4096


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def timed(name: str, shape: str, make: Callable[[], Any], call: Callable[..., Any], nbytes: int, flops: int = 0) -> Any:
    sets = [make() for _ in range(sets_of(nbytes, 8))]
    return row(name, shape, seconds([lambda s=s: call(*s) for s in sets]), nbytes, flops)


# -- routers and combination -----------------------------------------------------------------------------------------


def choice(T: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(T, TOP, device="cuda", dtype=torch.int32), torch.empty(T, TOP, device="cuda")


def routed(model: Model, logits: torch.Tensor, each: torch.Tensor, out: Any) -> Any:
    if model.router == "moe_route":
        return ops.moe_route(logits, each, TOP, out=out)
    if model.router == "moe_group_route":
        return ops.moe_group_route(logits, each, 8, 4, TOP, True, 2.5, out=out)
    return ops.moe_softmax_topk(logits, TOP, out=out)


def check_router(model: Model) -> None:
    """The ids of the definition on a thousand rows."""
    logits, each = normal(1000, model.experts, dtype=torch.float32), normal(model.experts, dtype=torch.float32)
    got, want = routed(model, logits, each, None), _by_definition(model, logits, each)
    if not torch.equal(got[0].cpu(), want[0]):
        raise SystemExit(f"{model.router}: other experts than the definition's")
    check(model.router, got[1].cpu(), want[1], 2e-6)


def _by_definition(model: Model, logits: torch.Tensor, each: torch.Tensor) -> Any:
    with penstock.backend("reference"):
        return routed(model, logits.cpu(), each.cpu(), None)


def small_rows(model: Model) -> list[dict[str, Any]]:
    check_router(model)
    E, dim = model.experts, model.dim
    rows = []
    for T in (DECODE, PREFILL):
        rows.append(
            timed(
                model.router,
                f"{model.name} T={T} E={E}",
                lambda T=T: (normal(T, E, dtype=torch.float32), normal(E, dtype=torch.float32), choice(T)),
                lambda *args: routed(model, *args),
                T * E * 4 + T * TOP * 8,
            )
        )
        rows.append(
            timed(
                "moe_combine_residual",
                f"{model.name} T={T} dim={dim}",
                lambda T=T: (*(normal(T, dim) for _ in range(4)), normal(T, dtype=torch.float32)),
                lambda h, shared, routed, out, gate: ops.moe_combine_residual(
                    h, None, None, shared, gate, moe_sum=routed, out=out
                ),
                4 * T * dim * 2,
            )
        )
    return rows


# -- experts ---------------------------------------------------------------------------------------------------------


def stack(E: int, N: int, K: int) -> QuantizedTensor:
    """Random codes with the scales of quantized weights of size K^(−1/2)."""
    words = torch.randint(-(2**31), 2**31, (E, N, K // 8), device="cuda", dtype=torch.int32)
    scales = normal(E, N, K // 64).abs() * (0.5 * K**-0.5)
    return QuantizedTensor(words, scales, scales * -7.5, 4, 64)


def check_experts() -> None:
    """One small block against float64 on dequantized weights."""
    dim, width, E = 512, 256, 16
    weights = [stack(E, *shape) for shape in ((width, dim), (width, dim), (dim, width))]
    dense = [dequantize(w).double() for w in weights]
    for T in (DECODE, 300):
        x, ids, share = tokens(T, dim, E)
        gate, up, down = (w[ids.long()] for w in dense)
        g, u = (torch.einsum("tknd,td->tkn", w, x.double()) for w in (gate, up))
        each = torch.einsum("tkdn,tkn->tkd", down, torch.nn.functional.silu(g) * u)
        want = torch.einsum("tk,tkd->td", share.double(), each)
        check(f"moe_forward T={T}", ops.moe_forward(x, ids, share, *weights), want, 1e-2)


def tokens(T: int, dim: int, E: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.rand(T, E, device="cuda").topk(TOP, dim=1).indices.int()
    return normal(T, dim), ids, torch.rand(T, TOP, device="cuda")


def expert_rows(model: Model) -> list[dict[str, Any]]:
    dim, width, E = model.dim, model.width, model.experts
    weights = stack(E, width, dim), stack(E, width, dim), stack(E, dim, width)
    one = sum(w.nbytes for w in weights) // E
    rows = []
    for T in (DECODE, PREFILL):
        sets = [tokens(T, dim, E) for _ in range(16 if T == DECODE else 2)]
        used = sum(s[1].unique().numel() for s in sets) / len(sets)
        out = torch.empty(T, dim, device="cuda", dtype=torch.bfloat16)
        took = seconds([lambda s=s, out=out: ops.moe_forward(*s, *weights, out=out) for s in sets])
        nbytes = int(used * one) + 4 * T * dim
        flops = 6 * T * TOP * dim * width if T == PREFILL else 0
        rows.append(row("moe_forward", f"{model.name} T={T}", took, nbytes, flops))
    return rows


def launch(number: int, T: int) -> None:
    """One call of what is timed for a model, or of the checks (number −1)."""
    if number < 0:
        check_experts()
        return
    model = MODELS[number]
    E, dim, width = model.experts, model.dim, model.width
    routed(model, normal(T, E, dtype=torch.float32), normal(E, dtype=torch.float32), None)
    weights = stack(E, width, dim), stack(E, width, dim), stack(E, dim, width)
    y = ops.moe_forward(*tokens(T, dim, E), *weights)
    ops.moe_combine_residual(y, None, None, y, normal(T, dtype=torch.float32), moe_sum=y)
    torch.cuda.synchronize()


def main() -> None:
    args = parser(__doc__.split("\n", 1)[0]).parse_args()
    calls = [(-1, 0), *((number, T) for number in range(len(MODELS)) for T in (PREFILL, DECODE))]
    compile_ahead(launch, calls, len(calls))
    check_experts()
    rows = [line for model in MODELS for line in (*small_rows(model), *expert_rows(model))]
    finish("MoE blocks, bfloat16, 4-bit weights in groups of 64, top 8", rows, args.json)


if __name__ == "__main__":
    main()
