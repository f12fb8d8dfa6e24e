"""Times the router of an MoE block on a GPU: norm, product and choice in one launch, and in one launch each.

    python -m benchmarks.ops.gpu_router [--json FILE]

Bytes are the router's weight, rows in and normed rows out. `last` is the number of tokens up to which the launch of the
product chooses, too (`_tuning.ROUTER_LAST`): 0 gives the choice a launch of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch

import penstock
from benchmarks.ops.gpu_common import check, compile_ahead, finish, parser, random_weight, row, seconds, sets_of
from penstock import ops
from penstock.backends.cuda import _tuning
from penstock.quant import QuantizedTensor

TOP = 8
TOKENS = (1, 2, 4, 8)
FETCHERS = (0, 16, 32, 64, 115)  # `_tuning.ROUTER_FETCH`


@dataclass(frozen=True)
class Model:
    name: str
    dim: int
    experts: int
    scores: int  # rows of the weight that are no experts'
    normed: bool
    groups: int = 0
    bits: int = 8


MODELS = (
    Model("Qwen3.6-35B-A3B", 2048, 256, 1, True),
    Model("Qwen3.6-35B-A3B dense", 2048, 256, 1, True, bits=0),
    Model("Gemma 4 26B-A4B", 2816, 128, 0, False),
    Model("DeepSeek-V3", 7168, 256, 0, True, groups=8),
)


def made(model: Model, T: int) -> dict[str, Any]:
    """The arguments of a call."""
    N, K = model.experts + model.scores, model.dim
    w = random_weight(N, K, bits=8) if model.bits else torch.randn(N, K, device="cuda").bfloat16() * K**-0.5
    norm = torch.rand(K, device="cuda").bfloat16() + 0.5
    x = torch.randn(T, K, device="cuda").bfloat16()
    return {"x": x, "norm_weight": norm if model.normed else None, "w": w}


def whole(model: Model, x: Any, norm_weight: Any, w: Any, fetch: Any = None, out: Any = None) -> Any:
    more = {"scores": model.scores, "propagate_nan": True, "write_normed": model.normed, "fetch": fetch, "out": out}
    if model.groups:
        return ops.moe_norm_group_route(x, norm_weight, w, None, model.groups, model.groups // 2, TOP, **more)
    return ops.moe_norm_route(x, norm_weight, w, None, TOP, **more)


def in_parts(model: Model, x: Any, norm_weight: Any, w: Any) -> Any:
    h = ops.rms_norm(x, norm_weight) if model.normed else x
    product = ops.quantized_matmul if model.bits else ops.matmul
    logits = product(h, w, dtype="float32")
    if model.scores and len(x) > 1:
        logits = ops.split_columns(logits, model.experts, model.scores)[0]
    logits = logits[:, : model.experts]
    if model.groups:
        return ops.moe_group_route(logits, None, model.groups, model.groups // 2, TOP, propagate_nan=True)
    return ops.moe_route(logits, None, TOP, propagate_nan=True)


def _on_host(value: Any) -> Any:
    return value.to("torch") if isinstance(value, QuantizedTensor) else None if value is None else value.cpu()


def check_call(model: Model, T: int, last: int) -> None:
    """Experts and weights of the definition, of which a near tie may be decided otherwise."""
    call = made(model, T)
    got = whole(model, **call)
    with penstock.backend("reference"):
        want = whole(model, **{name: _on_host(value) for name, value in call.items()})
    ids, weights = (1, 2) if model.normed else (0, 1)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        if number not in (ids, weights):
            check(f"{model.name} T={T} last={last}, output {number}", a.cpu().float(), b.float(), 1e-2)
    none = torch.zeros(T, model.experts)
    ours, theirs = (none.scatter(1, found[ids].cpu().long(), found[weights].cpu()) for found in (got, want))
    check(f"{model.name} T={T} last={last}, weights", ours, theirs, 2e-2)


def times(model: Model, T: int) -> list[dict[str, Any]]:
    call = made(model, T)
    nbytes = call["w"].nbytes + T * model.dim * 2 * (1 + model.normed)
    sets = [made(model, T) for _ in range(sets_of(nbytes))]
    shape, found = f"{model.name} T={T}", []
    for last in (0, T):
        _tuning.ROUTER_LAST = last
        check_call(model, T, last)
        outs = [whole(model, **each) for each in sets]
        calls = [lambda each=each, out=out: whole(model, **each, out=out) for each, out in zip(sets, outs, strict=True)]
        found.append(row(f"moe_norm_route, last={last}", shape, seconds(calls), nbytes))
    calls = [lambda each=each: in_parts(model, **each) for each in sets]
    return [*found, row("norm, product, choice", shape, seconds(calls), nbytes)]


def times_with_next(fetchers: int) -> dict[str, Any]:
    """The router of a token and the projection behind it, which programs of the router's launch fetch."""
    _tuning.ROUTER_LAST, _tuning.ROUTER_FETCH = 1, fetchers
    model, N = MODELS[0], 12352
    sets = [(made(model, 1), random_weight(N, model.dim)) for _ in range(24)]
    outs = [(whole(model, **each), ops.quantized_matmul(each["x"], w)) for each, w in sets]

    def call(each: Any, w: Any, routed: Any, y: Any) -> None:
        whole(model, **each, fetch=w, out=routed)
        ops.quantized_matmul(each["x"], w, out=y)

    calls = [lambda given=given, out=out: call(*given, *out) for given, out in zip(sets, outs, strict=True)]
    nbytes = sets[0][0]["w"].nbytes + sets[0][1].nbytes
    took = seconds(calls)
    _tuning.ROUTER_FETCH = 0
    return row(f"router and product, {fetchers} fetch", f"{model.name} [{N}, {model.dim}]", took, nbytes)


def launch(number: int, T: int) -> None:
    """What is timed, once."""
    for _tuning.ROUTER_LAST in (0, T):
        whole(MODELS[number], **made(MODELS[number], T))
    in_parts(MODELS[number], **made(MODELS[number], T))
    torch.cuda.synchronize()


def main() -> None:
    args = parser(__doc__.split("\n", 1)[0]).parse_args()
    compile_ahead(launch, [(number, T) for number in range(len(MODELS)) for T in TOKENS])
    rows = [line for model in MODELS for T in TOKENS for line in times(model, T)]
    rows += [times_with_next(fetchers) for fetchers in FETCHERS]
    finish("Routers, bfloat16, 8-bit weights in groups of 64, top 8", rows, args.json)


if __name__ == "__main__":
    main()
