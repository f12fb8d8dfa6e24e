"""The gated delta net on a GPU at the shapes of Qwen3.6-35B-A3B: checked, then timed for decode and prefill.

    python -m benchmarks.ops.gpu_delta [--json FILE]
    python -m benchmarks.ops.gpu_delta --sweep [--rows 1,8,32] [--json FILE]    steps in every arrangement

Decode goes over states that together do not fit in the L2 cache, as the layers of a model do. TFLOP/s of the prefill
count 6 Dk Dv operations per token and value head, what the recurrence would take; the chunks do more.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ops import gpu_common as common
from penstock import ops
from penstock.backends.cuda import _delta_step
from penstock.backends.cuda._tuning import DELTA_HINTS, DeltaStep

Hk, Hv, D, W = 16, 32, 128, 4
HEADS = (Hk, Hv, D, D)
CHANNELS = 2 * Hk * D + Hv * D


def tokens(T: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv, g and b of T tokens: unit keys, queries of length 1 / sqrt(D), decays from 0.9 to 1."""
    made = torch.Generator("cuda").manual_seed(seed)
    qkv = torch.randn(T, CHANNELS, device="cuda", generator=made)
    heads = qkv[:, : 2 * Hk * D].view(T, 2 * Hk, D)
    heads /= heads.norm(dim=-1, keepdim=True)
    qkv[:, : Hk * D] *= D**-0.5
    g, b = (torch.rand(T, Hv, device="cuda", generator=made) for _ in range(2))
    return qkv.bfloat16(), 0.9 + 0.1 * g, b


def decode(B: int) -> dict[str, Any]:
    nbytes = 2 * B * Hv * D * D * 4
    sets = common.sets_of(nbytes // 2)
    states, rows = 0.1 * torch.randn(sets * B, Hv, D, D, device="cuda"), tokens(B)
    slots = torch.arange(sets * B, dtype=torch.int32, device="cuda").split(B)
    one = [ops.gated_delta_net(states[i].clone(), *(r[i : i + 1] for r in rows), *HEADS, "step") for i in range(B)]
    got = ops.gated_delta_net(states.clone(), *rows, *HEADS, slots=slots[0])
    common.check("gated_delta_net by slots", got, torch.cat(one), 4e-3)
    calls = [lambda at=at: ops.gated_delta_net(states, *rows, *HEADS, slots=at) for at in slots]
    return common.row("gated_delta_net", f"B={B} {Hv}x{D}x{D}", common.seconds(calls), nbytes)


def prefill(T: int) -> dict[str, Any]:
    sets = common.sets_of(2 * T * CHANNELS, 8)
    calls: list[Callable[[], object]] = []
    for number in range(sets):
        rows, state = tokens(T, number), 0.1 * torch.randn(Hv, D, D, device="cuda")
        if number == 0:
            states = state.clone(), state.clone()
            want = ops.gated_delta_net(states[0], *rows, *HEADS, "sequential")
            common.check("gated_delta_net by chunks", ops.gated_delta_net(states[1], *rows, *HEADS), want, 6e-3)
            common.check("its state", states[1], states[0], 2e-5)
        calls.append(lambda s=state, r=rows: ops.gated_delta_net(s, *r, *HEADS))
    took = common.seconds(calls)
    return common.row("gated_delta_net", f"T={T} {Hv}x{D}x{D}", took, flops=6 * T * Hv * D * D)


def convolution(T: int) -> list[dict[str, Any]]:
    nbytes, weight = 2 * T * CHANNELS * 2, torch.randn(CHANNELS, W, device="cuda").bfloat16()
    inputs = [(tokens(T, i)[0], torch.randn(W - 1, CHANNELS, device="cuda").bfloat16()) for i in range(4)]
    x, state = inputs[0]
    seq = torch.cat([state, x]).double().T[None]
    want = torch.nn.functional.conv1d(seq, weight.double()[:, None], groups=CHANNELS)[0].T
    common.check("conv1d_causal", ops.conv1d_causal(x, state, weight), torch.nn.functional.silu(want), 4e-3)
    causal = common.seconds([lambda x=x, s=s: ops.conv1d_causal(x, s, weight) for x, s in inputs])
    update = common.seconds([lambda x=x, s=s: ops.conv1d_state_update(s, x) for x, s in inputs])
    return [
        common.row("conv1d_causal", f"[{T}, {CHANNELS}]", causal, nbytes),
        common.row("conv1d_state_update", f"[{T}, {CHANNELS}]", update, 2 * (W - 1) * CHANNELS * 2),
    ]


def gates(T: int) -> dict[str, Any]:
    alpha, beta = (torch.randn(T, Hv, device="cuda").bfloat16() for _ in range(2))
    A_log, dt_bias = torch.randn(Hv, device="cuda"), torch.randn(Hv, device="cuda").bfloat16()
    g, b = ops.gdn_decay_beta(alpha, beta, A_log, dt_bias)
    softplus = torch.nn.functional.softplus(alpha.double() + dt_bias.double())
    common.check("gdn_decay_beta", g, torch.exp(-torch.exp(A_log.double()) * softplus), 1e-6)
    common.check("gdn_decay_beta", b, torch.sigmoid(beta.double()), 1e-6)
    took = common.seconds([lambda: ops.gdn_decay_beta(alpha, beta, A_log, dt_bias)])
    return common.row("gdn_decay_beta", f"[{T}, {Hv}]", took, T * Hv * 12)


class Layer:
    """`gated_delta_step` over sets of B states, and what it stands for, op by op."""

    def __init__(self, B: int, dtype: torch.dtype = torch.float32) -> None:
        state = B * Hv * D * D * dtype.itemsize
        self.B, self.sets, self.nbytes = B, common.sets_of(state), 2 * state
        shapes = ((CHANNELS,), (Hv, D), (Hv,), (Hv,))
        self.x, self.z, self.alpha, self.beta = (torch.randn(B, *s, device="cuda").bfloat16() for s in shapes)
        self.kept = torch.randn(self.sets * B, W - 1, CHANNELS, device="cuda").bfloat16()
        self.weight = torch.randn(CHANNELS, W, device="cuda").bfloat16()
        self.gates, self.norm = torch.randn(2, Hv, device="cuda"), torch.randn(D, device="cuda")
        self.states = (0.1 * torch.randn(self.sets * B, Hv, D, D, device="cuda")).to(dtype)
        self.slots = torch.arange(self.sets * B, dtype=torch.int32, device="cuda").split(B)

    def fused(self, kept: torch.Tensor, states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        rows = (self.x, self.z, self.alpha, self.beta)
        return ops.gated_delta_step(*rows, kept, states, at, self.weight, *self.gates, self.norm, Hk)

    def apart(self, kept: torch.Tensor, states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = ops.conv1d_causal(self.x, kept, self.weight, at)
        ops.conv1d_state_update(kept, self.x, at)
        y = ops.rms_norm_qk(y, Hk, D, Hk * D)
        gates = ops.gdn_decay_beta(self.alpha, self.beta, *self.gates)
        return ops.gated_rms_norm(ops.gated_delta_net(states, y, *gates, *HEADS, slots=at), self.z, self.norm)

    def check(self) -> None:
        """Two steps of the first set, so that what the first leaves behind is seen."""
        states = [(self.kept[: self.B].clone(), self.states[: self.B].clone()) for _ in range(2)]
        for _ in range(2):
            got, want = (call(*s, self.slots[0]) for call, s in zip((self.fused, self.apart), states, strict=True))
            common.check("gated_delta_step", got, want, 8e-3)
        common.check("its rows kept", states[0][0], states[1][0], 0)
        common.check("its states", states[0][1], states[1][1], 8e-3)

    def seconds(self, call: Callable[..., object]) -> float:
        return common.seconds([lambda at=at: call(self.kept, self.states, at) for at in self.slots])


def whole_step(B: int, dtype: torch.dtype) -> dict[str, Any]:
    layer = Layer(B, dtype)
    layer.check()
    shape = f"B={B} {Hv}x{D}x{D} {str(dtype).removeprefix('torch.')}"
    by_ops = {"us by ops": layer.seconds(layer.apart) * 1e6} if B <= 8 else {}
    return common.row("gated_delta_step", shape, layer.seconds(layer.fused), layer.nbytes) | by_ops


# Launches, parts of a head's state, warps and registers of a thread: what fits a multiprocessor two times and more.
ARRANGEMENTS = [
    (1, 1, 8, 128), (1, 1, 8, 255), (1, 2, 8, 128), (1, 4, 8, 128), (1, 4, 4, 128), (1, 8, 4, 96), (1, 8, 2, 128),
    (2, 1, 8, 128), (2, 4, 4, 128), (2, 8, 2, 128),
]  # fmt: skip
HINTS = (("", ""), ("evict_first", ""), ("evict_first", "evict_first"))


def sweep(B: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Every arrangement with the hints in use and, of the fastest, other hints and whether it prefetches."""
    layer, rows = Layer(B, dtype), []

    def timed(arrangement: tuple[int, int, int, int], prefetch: bool, hints: tuple[str, str]) -> None:
        _delta_step.DELTA_STEP = (DeltaStep(1 << 30, *arrangement, prefetch),)
        _delta_step.DELTA_HINTS = hints
        layer.check()
        launches, parts, warps, registers = arrangement
        shape = f"B={B} {str(dtype).removeprefix('torch.')}"
        made = common.row("gated_delta_step", shape, layer.seconds(layer.fused), layer.nbytes)
        made |= {"launches": launches, "parts": parts, "warps": warps, "registers": registers}
        rows.append(made | {"prefetch": prefetch, "hints": "/".join(hint or "none" for hint in hints)})

    for arrangement in ARRANGEMENTS:
        timed(arrangement, arrangement[0] == 1 and B <= 8, DELTA_HINTS)
    best = min(rows, key=lambda row: row["us"])
    fastest = (best["launches"], best["parts"], best["warps"], best["registers"])
    for hints, prefetch in itertools.product(HINTS, (False, True)):
        if (hints, prefetch) != (DELTA_HINTS, best["prefetch"]) and (fastest[0] == 1 or not prefetch):
            timed(fastest, prefetch, hints)
    return rows


def main() -> None:
    parser = common.parser(__doc__.split("\n", 1)[0])
    parser.add_argument("--sweep", action="store_true", help="time gated_delta_step in every arrangement instead")
    parser.add_argument("--rows", default="1,8,32,64,128,256", help="numbers of sequences of a step")
    parser.add_argument("--state", default="float32,bfloat16", help="dtypes of the states of a step")
    args = parser.parse_args()
    steps = list(itertools.product(map(int, args.rows.split(",")), (getattr(torch, d) for d in args.state.split(","))))
    if args.sweep:
        rows = [row for B, dtype in steps for row in sweep(B, dtype)]
        common.finish("gated_delta_step, Qwen3.6-35B-A3B", rows, args.json)
        return
    rows = [decode(B) for B in (1, 8, 64)] + [whole_step(B, dtype) for B, dtype in steps]
    rows += [prefill(T) for T in (256, 4096, 16384)]
    for T in (1, 4096):
        rows += [*convolution(T), gates(T)]
    common.finish("Gated delta net, bfloat16, Qwen3.6-35B-A3B", rows, args.json)


if __name__ == "__main__":
    main()
