"""A story by the small model that comes with penstock, written while you watch, and how fast it went."""

from __future__ import annotations

import argparse
import sys

import penstock
from penstock.models import qwen3_5
from penstock.units import amount

PROMPT = "Once upon a time there was a king who had a daughter."


def main() -> None:
    argparse.ArgumentParser(prog="python -m penstock.demo", description=__doc__).parse_args()
    penstock.load().generate(PROMPT, max_tokens=2)  # compiles what this machine has not compiled yet
    llm = penstock.load()
    print(f"\n{PROMPT}", end="", flush=True)
    options = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "repetition_penalty": 1.08}
    for chunk in llm.stream(PROMPT, max_tokens=150, stop="\nQuestion", **options):
        print(chunk.text, end="", flush=True)
    print(" …\n")
    stats, cfg = llm.stats(), llm.config
    assert isinstance(cfg, qwen3_5.Config)
    print(
        f"{stats.generation_tps:.0f} tokens per second: {cfg.model_type}, {len(cfg.layer_types)} layers, "
        f"{cfg.top_k} of {cfg.experts} experts per token, {amount(stats.weight_bytes)} of 4-bit weights",
        file=sys.stderr,
    )
    print('next: penstock generate -p "Tell me a story", penstock chat, penstock bench', file=sys.stderr)


if __name__ == "__main__":
    main()
