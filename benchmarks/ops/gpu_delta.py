"""The gated delta net on a GPU at the shapes of Qwen3.6-35B-A3B: checked, then timed for decode and prefill.

    python -m benchmarks.ops.gpu_delta [--json FILE]

Decode goes over states that together do not fit in the L2 cache, as the layers of a model do. TFLOP/s of the prefill
count 6 Dk Dv operations per token and value head, what the recurrence would take; the chunks do more.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ops import gpu_common as common
from penstock import ops

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


def whole_step(B: int) -> dict[str, Any]:
    """`gated_delta_step`, and in the last column what it stands for, op by op."""
    sets = common.sets_of(B * Hv * D * D * 4)
    x, z, alpha, beta = (torch.randn(B, *s, device="cuda").bfloat16() for s in ((CHANNELS,), (Hv, D), (Hv,), (Hv,)))
    kept, weight = (torch.randn(*s, device="cuda").bfloat16() for s in ((sets * B, W - 1, CHANNELS), (CHANNELS, W)))
    gates, norm = torch.randn(2, Hv, device="cuda"), torch.randn(D, device="cuda")
    states = 0.1 * torch.randn(sets * B, Hv, D, D, device="cuda")

    def fused(kept: torch.Tensor, states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return ops.gated_delta_step(x, z, alpha, beta, kept, states, at, weight, *gates, norm, Hk)

    def apart(kept: torch.Tensor, states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = ops.conv1d_causal(x, kept, weight, at)
        ops.conv1d_state_update(kept, x, at)
        y = ops.rms_norm_qk(y, Hk, D, Hk * D)
        d = ops.gated_delta_net(states, y, *ops.gdn_decay_beta(alpha, beta, *gates), *HEADS, slots=at)
        return ops.gated_rms_norm(d, z, norm)

    slots = torch.arange(sets * B, dtype=torch.int32, device="cuda").split(B)
    both = [call(kept.clone(), states.clone(), slots[0]) for call in (fused, apart)]
    common.check("gated_delta_step", *both, 8e-3)
    took, by_ops = (
        common.seconds([lambda at=at, call=call: call(kept, states, at) for at in slots]) for call in (fused, apart)
    )
    nbytes = 2 * B * Hv * D * D * 4
    return common.row("gated_delta_step", f"B={B} {Hv}x{D}x{D}", took, nbytes) | {"us by ops": by_ops * 1e6}


def main() -> None:
    args = common.parser(__doc__.split("\n", 1)[0]).parse_args()
    rows = [decode(B) for B in (1, 8, 64)] + [whole_step(B) for B in (1, 8)] + [prefill(T) for T in (256, 4096, 16384)]
    for T in (1, 4096):
        rows += [*convolution(T), gates(T)]
    common.finish("Gated delta net, bfloat16, Qwen3.6-35B-A3B", rows, args.json)


if __name__ == "__main__":
    main()
