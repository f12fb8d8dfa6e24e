"""Drafts that a GPU verifies, accepts and makes in one replay: the same text, what they bring, and where a replay goes.

python benchmarks/gpu_speculate.py                                      all parts: text, speed, curve, replays, profile
python benchmarks/gpu_speculate.py --parts speed --rows 1,8 --output speculate.json
python benchmarks/gpu_speculate.py --parts curve --output benchmarks/results/h200_speculate_curve.json

text      small random models with a head, `deterministic`: texts with and without drafts are the same, at several
          temperatures, batches and numbers of drafts
speed     as `penstock bench` on the config: answers without drafts, with up to --drafts in each step at a made-up
          acceptance, and with as many as the gate takes
curve     the same over the chance of each draft to be accepted, as ratios to answers without drafts: one and three
          drafts in every step, and as many as the gate takes; `bench_speculate.py --svg` draws it
replays   milliseconds of a captured step by sequences and drafts, as the gate has them
profile   kernels of one replay of one sequence with --drafts, by name: launches and microseconds
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.api import LLM, load_random
from penstock.cli._model import resolved
from penstock.cli.bench import Drafting, Test, measured
from penstock.engine.buckets import PREPARED, drafts_to_prepare
from penstock.engine.request import Request
from penstock.engine.sampling import SamplingParams
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculate import MOST_DRAFTS
from penstock.models.config import first_layers

PARTS = ("text", "speed", "curve", "replays", "profile")
ACCEPTED = (0.1, 0.3, 0.5, 0.7, 0.9)
FORMS: dict[str, int | None] = {"1 draft": 1, "3 drafts": 3, "gate": None}
SMALL: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 256, "num_hidden_layers": 4, "full_attention_interval": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "vocab_size": 1024, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "0.7": {"temperature": 0.7},
    "1.0, top-k 40, top-p 0.9": {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
}


def answers(scheduler: Scheduler, prompts: list[list[int]], count: int, draw: dict[str, Any], **more: Any) -> list[Any]:
    """Completions of these prompts, all at once."""
    requests = [
        Request(prompt, SamplingParams(seed=n, **draw), count, frozenset(), **more) for n, prompt in enumerate(prompts)
    ]
    return [handle.result(300) for handle in [scheduler.submit(one, buffer=1 << 20) for one in requests]]


def compared(dtype: str) -> dict[str, Any]:
    """How many texts are the same, and how many drafts were accepted; drafts with a fixed number in each step."""
    llm = load_random(SMALL, device="cuda", dtype=dtype, max_context=1024, deterministic=True, speculate="mtp")
    prompts = [[(7 * n + 3 * i) % 1000 for i in range(4 + 37 * n)] for n in range(8)]
    same = total = drafted = 0
    with Scheduler(llm, max_sequences=8, prefix_cache=False) as scheduler:
        for draw in DRAWS.values():
            for batch in (1, 3, 8):
                want = answers(scheduler, prompts[:batch], 48, draw, speculate="off")
                for drafts in (1, 3):
                    more = {"speculate": "mtp", "num_draft_tokens": drafts, "fixed_drafts": True}
                    found = answers(scheduler, prompts[:batch], 48, draw, **more)
                    same += sum(one.tokens == other.tokens for one, other in zip(found, want, strict=True))
                    total += batch
                    drafted += sum(one.timings.draft_n for one in found)
    return {"dtype": dtype, "same": same, "of": total, "drafts": drafted}


def loaded(config: str, memory: int, speculate: str) -> LLM:
    raw, _ = first_layers(resolved(config, ("config",), files="config").read_config(), "all", config)
    return load_random(raw, device="cuda", max_context=1024, cache_memory=memory, speculate=speculate, on_device=True)


def speeds(
    llm: LLM, name: str, rows: list[int], tokens: int, drafting: Drafting, repetitions: int = 2
) -> dict[str, Any]:
    """Tokens per second of all answers by their number."""
    found: dict[str, Any] = {}
    for batch in rows:
        test = drafting.with_spare(Test(0, tokens, 0, batch))
        (row,) = measured(llm, name, [test], repetitions, 1, drafting)
        found[str(batch)] = round(row.avg_ts, 1)
        print(f"{name}: {batch} rows {row.avg_ts:8.1f} tokens/s, host {row.host_us} us", flush=True)
    return found


def curve(llm: LLM, rows: list[int], tokens: int, off: dict[str, Any], note: Callable[[Any], None]) -> None:
    """Speed by the number of answers, form and acceptance, which is that of every draft; off: tokens per second without
    drafts. Numbers of answers come one after the other: caches and captured steps are made anew for another one.
    """
    points: list[dict[str, Any]] = []
    for batch in rows:
        for form, count in FORMS.items():
            for accepted in ACCEPTED:
                drafting = Drafting("mtp", count, (accepted,) * MOST_DRAFTS)
                (speed,) = speeds(llm, f"{form}, {accepted}", [batch], tokens, drafting, 1).values()
                point = {"answers": batch, "form": form, "accepted": accepted, "tokens_per_second": speed}
                points.append(point | {"speed": round(speed / off[str(batch)], 4)})
                note({"tokens": tokens, "off": off, "points": points})


def replays(llm: LLM) -> dict[str, Any]:
    """Milliseconds of captured steps, by sequences and drafts."""
    engine = llm.engine
    engine.ensure_allocated()
    assert engine.programs is not None
    steps: Any = engine.programs.steps
    counts = [n for n in PREPARED if n <= engine.caches.slots]
    for n in counts:
        engine.prepare_drafting(n, drafts_to_prepare(n, MOST_DRAFTS))
    found = {str(n): steps.draft_seconds(n) for n in counts}
    table = {n: {str(k): round(1e3 * took, 4) for k, took in one.items()} for n, one in found.items()}
    for n, one in table.items():
        print(f"{n} sequences, ms by drafts: {one}", flush=True)
    return table


def profiled(llm: LLM, drafts: int, replays: int = 5) -> dict[str, Any]:
    """Kernels of a replay of one sequence: by name launches and microseconds, and how long the whole takes."""
    steps: Any = llm.engine.programs.steps  # type: ignore[union-attr]
    runner = next(
        runner for (bucket, _), runner in steps._drafting.items() if bucket.sequences == 1 and bucket.rows == 1 + drafts
    )
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        begin = time.perf_counter()
        for _ in range(replays):
            runner.run()
        torch.cuda.synchronize()
        whole = (time.perf_counter() - begin) / replays
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            kernels[event.name][0] += 1
            kernels[event.name][1] += event.time_range.elapsed_us()
    table = {
        name: [round(count / replays, 1), round(took / replays, 1)]
        for name, (count, took) in sorted(kernels.items(), key=lambda item: -item[1][1])
    }
    print(f"replay of 1 x {1 + drafts}: {1e3 * whole:.3f} ms, {sum(v[0] for v in table.values()):.0f} launches")
    for name, (count, took) in list(table.items())[:40]:
        print(f"{took:9.1f} us {count:7.1f} x  {name[:100]}", flush=True)
    return {"ms": round(1e3 * whole, 4), "kernels": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--config", default="qwen3.6-35b-a3b")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--acceptance", default="0.85,0.75,0.65")
    parser.add_argument("--memory", type=int, default=24, help="GB of caches")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    parts, rows = options.parts.split(","), [int(part) for part in options.rows.split(",")]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: has {', '.join(unknown)}, expected some of {', '.join(PARTS)}")
    chances = tuple(float(part) for part in options.acceptance.split(","))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about: dict[str, Any] = {"commit": commit, "date": time.strftime("%Y-%m-%d"), "config": options.config}
    about |= {"gpu": torch.cuda.get_device_name(), "drafts": options.drafts, "acceptance": chances}

    def note(name: str, value: Any) -> None:
        about[name] = value
        if options.output is not None:
            options.output.write_text(json.dumps(about, indent=1) + "\n")

    if "text" in parts:
        found = [compared(dtype) for dtype in ("float32", "bfloat16")]
        note("text", found)
        print(*found, sep="\n", flush=True)
    memory = options.memory << 30
    speed: dict[str, Any] = {}
    if {"speed", "curve"} & set(parts):
        llm = loaded(options.config, memory, "off")
        speed["off"] = speeds(llm, "off", rows, options.tokens, Drafting("off"))
        if "speed" in parts:
            note("speed", speed)
        llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    if set(parts) - {"text"}:
        llm = loaded(options.config, memory, "mtp")
        if "speed" in parts:
            for count in range(options.drafts, 0, -1):
                name = f"{count} drafts"
                own = rows if count in (1, options.drafts) else rows[:1]
                speed[name] = speeds(llm, name, own, options.tokens, Drafting("mtp", count, chances))
                note("speed", speed)
            speed["gate"] = speeds(llm, "gate", rows, options.tokens, Drafting("mtp", None, chances))
            note("speed", speed)
        if "curve" in parts:
            curve(llm, rows, options.tokens, speed["off"], lambda found: note("curve", found))
        if {"replays", "profile"} & set(parts):
            note("replays", replays(llm))
        if "profile" in parts:
            note("profile", profiled(llm, options.drafts))


if __name__ == "__main__":
    main()
