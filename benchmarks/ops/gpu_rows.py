"""Norms, activations and rope on a GPU: checked against the definitions, then timed for one token and for a prompt.

python -m benchmarks.ops.gpu_rows [--tokens 1 4096] [--json FILE]
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import penstock
from benchmarks.ops import gpu_common as common
from penstock import ops

KIND = torch.bfloat16
CHECKED = 33  # tokens of the check: the definitions run on the host
MOST = 4e-3  # relative error of bfloat16 outputs; half an ulp is 2e-3

Call = tuple[str, str, Callable[..., Any], tuple[Any, ...], tuple[torch.Tensor, ...]]  # op, shape, op, inputs, outputs


def made(*shape: int, dtype: torch.dtype = KIND) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def table(width: int, theta: float) -> torch.Tensor:
    return torch.from_numpy(ops.rope_inv_freq(width, theta)).cuda()


def norms(T: int, dim: int) -> Iterator[Call]:
    """Around the layers of a model of this width."""
    x, a, b, w = made(T, dim), made(T, dim), made(T, dim), made(dim)
    y = tuple(torch.empty_like(x) for _ in range(4))
    shape = f"[{T}, {dim}]"
    yield "rms_norm", shape, ops.rms_norm, (x, w), y[:1]
    yield "residual_norm with sum", shape, ops.residual_norm, (a, x, w, 1e-6, True), y[:2]
    h = made(T, dim, dtype=torch.float32)  # the residual stream of a model
    total = torch.empty_like(h)
    yield "rms_norm of the stream", shape, ops.rms_norm, (h, w, 1e-6, "bfloat16"), y[:1]
    yield "residual_norm with the stream", shape, ops.residual_norm, (h, x, w, 1e-6, True), (y[0], total)
    if dim == 2816:  # the fusions of Gemma 4
        slots, experts = made(T, 8, dtype=torch.float32), made(T, 8, dim)
        wide = f"[{T}, 8, {dim}]"
        yield "norm_add", shape, ops.norm_add, (a, x, w), y[:1]
        yield "post_attn_triple_norm", shape, ops.post_attn_triple_norm, (a, x, w, w, w, w), y
        yield "post_ff_norm2_endlayer", shape, ops.post_ff_norm2_endlayer, (a, x, b, w, w, 0.7, 1e-6, True), y[:2]
        yield "three norms of the stream", shape, ops.post_attn_triple_norm, (h, x, w, w, w, w), (total, *y[1:])
        last = (a, x, h, w, w, 0.7, 1e-6, True)
        yield "post_ff_norm2_endlayer of the stream", shape, ops.post_ff_norm2_endlayer, last, (y[0], total)
        yield "moe_wsum_norm_add", wide, ops.moe_wsum_norm_add, (experts, slots, a, w), y[:1]


def heads(T: int) -> Iterator[Call]:
    """Norms and rotations of heads."""
    v, z, w = made(T, 32, 128), made(T, 32, 128), made(128)
    yield "gated_rms_norm", f"[{T}, 32, 128]", ops.gated_rms_norm, (v, z, w), (torch.empty_like(v),)
    qkv = made(T, 8192)
    yield "rms_norm_qk", f"[{T}, 8192]", ops.rms_norm_qk, (qkv, 16, 128, 2048), (torch.empty_like(qkv),)
    at = torch.arange(T, dtype=torch.int32, device="cuda") + 1000
    for H, D, width, theta in ((16, 256, 64, 1e7), (2, 256, 64, 1e7), (16, 256, 256, 1e4), (16, 512, 512, 1e6)):
        x, w = made(T, H, D), made(D)
        arguments = (x, w, table(width, theta), at, 1e-6, width)
        yield "head_norm_rope", f"[{T}, {H}, {D}], {width}", ops.head_norm_rope, arguments, (torch.empty_like(x),)
    x = made(T, 128, 64)
    arguments = (x, table(64, 1e4), at, 64, 1.0, True)
    yield "rope, interleaved", f"[{T}, 128, 64]", ops.rope, arguments, (torch.empty_like(x),)


def maps(T: int) -> Iterator[Call]:
    """Elementwise ops and expert sums."""
    for op, dim in ((ops.residual_add, 2048), (ops.swiglu, 4096), (ops.geglu, 2112), (ops.sigmoid_gate, 4096)):
        a, b = made(T, dim), made(T, dim)
        yield op.name, f"[{T}, {dim}]", op, (a, b), (torch.empty_like(a),)
    a, b = made(T, 2816), made(2816)
    yield "mul by a vector", f"[{T}, 2816]", ops.mul, (a, b), (torch.empty_like(a),)
    logits = made(T if T == 1 else 16, 262144)
    yield "softcap", f"[{logits.shape[0]}, 262144]", ops.softcap, (logits, 30.0), (torch.empty_like(logits),)
    experts, slots = made(T, 8, 2048), made(T, 8, dtype=torch.float32)
    yield "weighted_sum", f"[{T}, 8, 2048]", ops.weighted_sum, (experts, slots), (torch.empty_like(experts[:, 0]),)


def calls(T: int) -> Iterator[Call]:
    for dim in (2048, 2816, 7168):
        yield from norms(T, dim)
    yield from heads(T)
    yield from maps(T)


def moved(call: Call) -> int:
    """Bytes of all inputs and outputs."""
    _, _, _, inputs, outputs = call
    return sum(a.nbytes for a in (*inputs, *outputs) if isinstance(a, torch.Tensor))


def copied(call: Call) -> Call:
    name, shape, op, inputs, outputs = call
    again = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in inputs)
    return name, shape, op, again, tuple(torch.empty_like(y) for y in outputs)


def run(call: Call) -> Any:
    _, _, op, inputs, outputs = call
    return op(*inputs, out=outputs if len(outputs) > 1 else outputs[0])


def prepare(number: int) -> None:
    """Compile what one of the calls needs; the kernels of a prompt differ from those of few tokens."""
    for T in (CHECKED, 4096):
        run(next(itertools.islice(calls(T), number, None)))
    torch.cuda.synchronize()


def check() -> None:
    for call in calls(CHECKED):
        name, shape, op, inputs, outputs = call
        for y in outputs:
            y.fill_(float("nan"))
        run(call)
        with penstock.backend("reference"):
            want = op(*inputs)
        for y, z in zip(outputs, want if isinstance(want, tuple) else (want,), strict=True):
            common.check(f"{name} {shape}", y, z, MOST)


def main() -> None:
    parser = common.parser("Time the norms, activations and rotations on a GPU.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4096])
    args = parser.parse_args()
    common.compile_ahead(prepare, [(number,) for number in range(sum(1 for _ in calls(1)))])
    check()
    rows = []
    for T in args.tokens:
        for call in calls(T):
            nbytes = moved(call)
            sets = [copied(call) for _ in range(common.sets_of(nbytes))]
            took = common.seconds([lambda each=each: run(each) for each in sets])
            rows.append(common.row(call[0], call[1], took, nbytes))
    common.finish("Norms, activations and rotations", rows, args.json)


if __name__ == "__main__":
    main()
