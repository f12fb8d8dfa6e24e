"""Times `ops.sample_tokens` on a GPU, by mode, at the vocabularies of Qwen3.6 and Gemma 4.

    python -m benchmarks.ops.gpu_sampling [--rows 1 32 256] [--vocabularies 248320] [--json FILE]

Logits are normal with a deviation of 2: with top_p alone tens of thousands of tokens stay, more than a model leaves.
The token drawn from all ids is kept in a share top_p of the rows, which are done then; the others are gone through. In
a mixed batch the first row asks for more than the others. Bytes are the logits, once.
"""

from typing import Any

import torch

from benchmarks.ops.gpu_common import compile_ahead, finish, parser, row, seconds, sets_of
from penstock import ops
from penstock.engine.sampling import Sampler, SamplingParams

VOCABULARIES = (248_320, 262_144)
BATCHES = (1, 32, 256)
CHECKED = 32  # rows whose tokens are compared with the host's
PLAIN, NUCLEUS, HALF = {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.5}
FEW, MORE, MANY = ({"temperature": heat, "top_k": k, "top_p": 0.95} for k, heat in ((20, 0.7), (64, 1.0), (500, 1.0)))
CALLS = {  # label: mode, parameters of the first row and of the others
    "greedy": ("greedy", {}, {}),
    "temperature": ("plain", PLAIN, PLAIN),
    "top_k 20, top_p 0.95": ("top_k", FEW, FEW),
    "top_k 64, top_p 0.95": ("top_k", MORE, MORE),
    "top_k 500, top_p 0.95": ("full", MANY, MANY),
    "top_p 0.9": ("full", NUCLEUS, NUCLEUS),
    "top_p 0.5": ("full", HALF, HALF),
    "one top_p 0.9, others greedy": ("full", NUCLEUS, {}),
    "one top_p 0.9, others temperature": ("full", NUCLEUS, PLAIN),
}


def parameters(B: int, label: str) -> list[dict[str, Any]]:
    """Of each row."""
    _, first, others = CALLS[label]
    return [first] + [others] * (B - 1)


def columns(B: int, label: str) -> list[torch.Tensor]:
    """positions, temperature, top_k, top_p, min_p and seed; the seed of a row is its number."""
    rows = parameters(B, label)

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype, device="cuda")

    heat, share = column("temperature", 0.0, torch.float64), column("top_p", 1.0, torch.float64)
    positions = torch.full((B,), 1000, dtype=torch.int32, device="cuda")
    seeds = torch.arange(B, dtype=torch.int64, device="cuda")
    return [positions, heat, column("top_k", 0, torch.int32), share, torch.zeros_like(heat), seeds]


def logits(B: int, V: int) -> torch.Tensor:
    return torch.randn(B, V, device="cuda") * 2


def check(V: int, label: str) -> None:
    """The tokens of the host."""
    x = logits(CHECKED, V)
    got = ops.sample_tokens(x, *columns(CHECKED, label), mode=CALLS[label][0]).tolist()
    host, rows = x.cpu().numpy(), parameters(CHECKED, label)
    want = [Sampler(SamplingParams(**rows[b], seed=b), V).sample(host[b], 1000).token for b in range(CHECKED)]
    if got != want:
        raise SystemExit(f"sample_tokens {label} V={V}: other tokens than the host's")


def launch(V: int, B: int, label: str) -> None:
    """One call of what is timed."""
    ops.sample_tokens(logits(B, V), *columns(B, label), mode=CALLS[label][0])
    torch.cuda.synchronize()


def main() -> None:
    options = parser((__doc__ or "").split("\n", 1)[0])
    options.add_argument("--rows", type=int, nargs="+", default=BATCHES)
    options.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    args = options.parse_args()
    calls = [(V, B, label) for V in args.vocabularies for B in args.rows for label in CALLS]
    compile_ahead(launch, calls)
    for V in args.vocabularies:
        for label in CALLS:
            check(V, label)
    rows = []
    for V, B, label in calls:
        if B == 1 and label.startswith("one "):
            continue
        sets, each = [logits(B, V) for _ in range(sets_of(4 * B * V))], columns(B, label)
        out = torch.empty(B, dtype=torch.int32, device="cuda")
        mode = CALLS[label][0]
        took = seconds([lambda x=x, e=each, m=mode, o=out: ops.sample_tokens(x, *e, mode=m, out=o) for x in sets])
        rows.append(row("sample_tokens", f"B={B} V={V} {label}", took, 4 * B * V))
    finish("Sampling, float32 logits", rows, args.json)


if __name__ == "__main__":
    main()
