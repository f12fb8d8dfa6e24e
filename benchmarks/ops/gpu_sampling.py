"""Times `ops.sample_tokens` on a GPU, by mode, at the vocabularies of Qwen3.6 and Gemma 4.

    python -m benchmarks.ops.gpu_sampling [--json FILE]

Logits are normal with a deviation of 2: with top_p alone tens of thousands of tokens stay, more than a model leaves.
Bytes are the logits, once.
"""

import torch

from benchmarks.ops.gpu_common import compile_ahead, finish, parser, row, seconds, sets_of
from penstock import ops
from penstock.engine.sampling import Sampler, SamplingParams

VOCABULARIES = (248_320, 262_144)
BATCHES = (1, 32)
CALLS = {  # label: mode and parameters
    "greedy": ("greedy", {}),
    "temperature": ("plain", {"temperature": 1.0}),
    "top_k 20, top_p 0.95": ("top_k", {"temperature": 0.7, "top_k": 20, "top_p": 0.95}),
    "top_k 64, top_p 0.95": ("top_k", {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
    "top_k 500, top_p 0.95": ("full", {"temperature": 1.0, "top_k": 500, "top_p": 0.95}),
    "top_p 0.9": ("full", {"temperature": 1.0, "top_p": 0.9}),
}


def columns(B: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> list[torch.Tensor]:
    """positions, temperature, top_k, top_p, min_p and seed, the same in every row but for the seed."""
    whole, wide = ({"dtype": kind, "device": "cuda"} for kind in (torch.int32, torch.float64))
    numbers = (temperature, top_p, 0.0)
    heat, share, least = (torch.full((B,), number, **wide) for number in numbers)
    seeds = torch.arange(B, dtype=torch.int64, device="cuda")
    return [torch.full((B,), 1000, **whole), heat, torch.full((B,), top_k, **whole), share, least, seeds]


def logits(B: int, V: int) -> torch.Tensor:
    return torch.randn(B, V, device="cuda") * 2


def check(V: int, label: str) -> None:
    """The tokens of the host."""
    mode, given = CALLS[label]
    x = logits(32, V)
    got = ops.sample_tokens(x, *columns(32, **given), mode=mode).tolist()
    host = x.cpu().numpy()
    want = [Sampler(SamplingParams(**given, seed=b), V).sample(host[b], 1000).token for b in range(32)]
    if got != want:
        raise SystemExit(f"sample_tokens {label} V={V}: other tokens than the host's")


def launch(V: int, B: int, label: str) -> None:
    """One call of what is timed."""
    mode, given = CALLS[label]
    ops.sample_tokens(logits(B, V), *columns(B, **given), mode=mode)
    torch.cuda.synchronize()


def main() -> None:
    args = parser(__doc__.split("\n", 1)[0]).parse_args()
    calls = [(V, B, label) for V in VOCABULARIES for B in BATCHES for label in CALLS]
    compile_ahead(launch, calls)
    rows = []
    for V, B, label in calls:
        check(V, label)
        mode, given = CALLS[label]
        sets, each = [logits(B, V) for _ in range(sets_of(4 * B * V))], columns(B, **given)
        out = torch.empty(B, dtype=torch.int32, device="cuda")
        took = seconds([lambda x=x, e=each, m=mode, o=out: ops.sample_tokens(x, *e, mode=m, out=o) for x in sets])
        rows.append(row("sample_tokens", f"B={B} V={V} {label}", took, 4 * B * V))
    finish("Sampling, float32 logits", rows, args.json)


if __name__ == "__main__":
    main()
