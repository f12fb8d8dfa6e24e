"""How far predictions by bytes are from what was measured: the share of them that decoding reaches, a launch's cost.

Bytes over bandwidth bound a step's speed; nothing reaches the bound. The shares below are of one sequence's answers
with everything in memory, from files of `benchmarks/` that name machine and date. Where none fits nothing is expected.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from penstock import models
from penstock.analysis.bandwidth import H200
from penstock.weights.resolve import resolve_model


@dataclass(frozen=True)
class MeasuredShare:
    """The share of the bandwidth that a family's answers reached, and where that was measured."""

    share: float
    source: str

    def __str__(self) -> str:
        return f"{self.share:.0%} of the speed by bytes, as measured with {self.source}"


_H200_ROWS = "on an H200, benchmarks/NOTES.md"
_CPU = "on 2 cores of an AMD EPYC, benchmarks/results"

# By device and the shipped config of a family that was measured. An H200's are tokens/s by bytes of a token by GB/s of
# a copy: 690 by 1.672 GB by 4204.
SHARES = {
    ("cuda", "qwen3.6-35b-a3b"): MeasuredShare(0.27, f"Qwen3.6-35B-A3B {_H200_ROWS}"),
    ("cuda", "gemma4-26b-a4b"): MeasuredShare(0.26, f"Gemma 4 26B-A4B {_H200_ROWS}"),
    ("cuda", "deepseek-v3"): MeasuredShare(
        0.52, "8 layers of DeepSeek-V3 on an H200, benchmarks/results/h200_deepseek.json"
    ),
    ("cpu", "qwen3.6-35b-a3b"): MeasuredShare(0.64, f"8 layers of Qwen3.6-35B-A3B {_CPU}/cpu_decode_qwen3.6.json"),
    ("cpu", "gemma4-26b-a4b"): MeasuredShare(0.53, f"6 layers of Gemma 4 26B-A4B {_CPU}/cpu_decode_gemma4.json"),
    ("cpu", "deepseek-v3"): MeasuredShare(0.55, f"4 layers of DeepSeek-V3 {_CPU}/cpu_decode_deepseek.json"),
    ("cpu", "llama-3.2-3b"): MeasuredShare(0.55, "4 layers of Llama 3.2 3B on one core, peers_penstock_llama3.2.json"),
}
_ALIKE = 0.25  # a GPU whose memory's speed differs by more is another kind of GPU

# Seconds of a node beside those of its bytes: on a GPU in a captured graph (833 launches of Qwen3.6's plain ops on an
# H200), on a CPU what 163 calls of 8 of its layers spend outside of kernels.
LAUNCH_SECONDS = {"cuda": 2.5e-6, "cpu": 12e-6}


def measured_share(device: str, family: str, bandwidth: float | None) -> MeasuredShare | None:
    """What is known of a family's models on a device whose memory gives so many GB/s."""
    if device == "cuda" and (bandwidth is None or abs(bandwidth / H200 - 1) > _ALIKE):
        return None
    here = ((name, found) for (where, name), found in SHARES.items() if where == device)
    return next((found for name, found in here if family_of(name) == family), None)


@functools.cache
def family_of(config: str) -> str:
    """The family of a shipped config."""
    return models.family_of(resolve_model(config, ["config"]).read_config()).name
