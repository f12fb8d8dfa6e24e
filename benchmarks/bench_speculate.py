"""Speed with drafts over how many of them are accepted, as ratios to the same model without.

    python benchmarks/bench_speculate.py [--model M | --random CONFIG] [--device cpu|cuda] [--threads 1] [--json FILE]
                                         [--svg FILE]
    python benchmarks/bench_speculate.py --text FILE [--model M] [--draft-model HEAD] [--threads 1]
    python benchmarks/bench_speculate.py --read benchmarks/results/cpu_speculate.json --svg docs/images/speculation.svg

First the texts with and without drafts are compared. Then answers with a made-up acceptance are timed, each beside one
without drafts, so that both see the same machine: 1, 2 and 3 drafts in every step, and as many as the gate takes. The
head and the verification run as they would. Last, texts that repeat themselves with n-gram drafts. Medians of ratios.
With --text drafts are accepted as they are: prompts of 32 tokens are cut out of FILE, each answer with drafts is
timed beside the one without, greedy and at temperature 0.8. With --threads 1 a CPU is timed by this thread's own clock:
other programs count less. --read takes an earlier result in place of a measurement. The picture has a second part where
--gpu, the result of `gpu_speculate.py --parts curve`, is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from penstock.api import LLM, load_random
from penstock.engine.request import Request
from penstock.engine.sampling import SamplingParams
from penstock.engine.scheduler import Scheduler
from penstock.weights.resolve import resolve_model

ACCEPTED = (0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 1.0)
FORMS: dict[str, int | None] = {"1 draft": 1, "2 drafts": 2, "3 drafts": 3, "gate": None}
COLOURS = {"1 draft": "#9467bd", "2 drafts": "#1f77b4", "3 drafts": "#2ca02c", "gate": "#d62728"}
GPU = Path(__file__).parent / "results" / "h200_speculate_curve.json"
REPEATED = 'item = {"name": "apple", "count": 3, "price": 1.5}\n' * 6


clock = time.perf_counter


def seconds(
    scheduler: Scheduler, prompt: list[int], count: int, seed: int, temperature: float = 1.0, **drafting: Any
) -> tuple[float, float]:
    """Per token of an answer behind its first one, and drafts per step that were verified."""
    params = SamplingParams(temperature=temperature, seed=seed)
    handle = scheduler.submit(Request(prompt, params, count + 1, frozenset(), **drafting))
    next(handle)
    begin, got, before = clock(), 0, scheduler.metrics()
    for _ in handle:
        got += 1
    spent, after = clock() - begin, scheduler.metrics()
    steps = max(1, after.decode_steps - before.decode_steps)
    return spent / got, (after.draft_tokens - before.draft_tokens) / steps


def swept(llm: LLM, prompt: list[int], count: int, rounds: int) -> dict[str, dict[float, tuple[float, float]]]:
    """By form and acceptance: speed as a ratio, and drafts per step."""
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for form, fixed in FORMS.items():
        for accepted in ACCEPTED:
            drafting = {"speculate": "mtp", "acceptance": (accepted,) * 7, "num_draft_tokens": fixed or 3}
            drafting["fixed_drafts"] = fixed is not None
            ratios, taken = [], []
            with Scheduler(llm, max_sequences=1, prefix_cache=False) as scheduler:  # the gate has to learn anew
                seconds(scheduler, prompt, 2 * count, 0, **drafting)
                for n in range(rounds):
                    plain, _ = seconds(scheduler, prompt, count, n, speculate="off")
                    own, drafts = seconds(scheduler, prompt, count, n, **drafting)
                    ratios.append(plain / own)
                    taken.append(drafts)
            found.setdefault(form, {})[accepted] = statistics.median(ratios), statistics.median(taken)
            speed, drafts = found[form][accepted]
            print(f"{form:>9}  accepted {accepted:4.2f}  {speed:5.2f} x  {drafts:4.2f} drafts a step", flush=True)
    return found


def on_text(llm: LLM, text: str, count: int, prompts: int) -> None:
    """Speed as a ratio and tokens of a step behind prompts from a text, by form and temperature."""
    ids = llm.tokenizer.encode(text)
    step = max(32, len(ids) // prompts)
    cut = [ids[at : at + 32] for at in range(0, step * prompts, step)]
    for temperature in (0.0, 0.8):
        for form, fixed in FORMS.items():
            drafting = {"speculate": "mtp", "num_draft_tokens": fixed or 3, "fixed_drafts": fixed is not None}
            with Scheduler(llm, max_sequences=1, prefix_cache=False) as scheduler:
                seconds(scheduler, cut[0], count, 0, temperature, **drafting)
                plain, own, steps = [], [], 0
                for n, prompt in enumerate(cut):
                    plain.append(seconds(scheduler, prompt, count, n, temperature, speculate="off")[0])
                    before = scheduler.metrics().decode_steps
                    own.append(seconds(scheduler, prompt, count, n, temperature, **drafting)[0])
                    steps += scheduler.metrics().decode_steps - before
            ratios = [without / drafted for without, drafted in zip(plain, own, strict=True)]
            speed = f"{statistics.median(ratios):5.3f} x (median), {sum(plain) / sum(own):5.3f} (sums)"
            tokens = count * len(cut) / steps
            print(f"{form:>9}  temperature {temperature:3.1f}  {speed}  {tokens:4.2f} tokens a step", flush=True)


def repeated(llm: LLM, rounds: int) -> float:
    """Of a text that repeats itself, with n-gram drafts."""
    ratios = []
    for _ in range(rounds):
        times = []
        for kind in ("off", "ngram"):
            chunks = llm.stream(REPEATED, max_tokens=96, speculate=kind)
            next(chunks)
            begin = clock()
            count = sum(1 for _ in chunks)
            times.append((clock() - begin) / max(1, count))
        ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def check(llm: LLM, prompts: list[list[int]]) -> None:
    for n, prompt in enumerate(prompts):
        for temperature in (0.0, 0.8):
            texts = [
                llm.generate(prompt, max_tokens=24, temperature=temperature, seed=n, speculate=kind).tokens
                for kind in ("off", "mtp", "ngram")
            ]
            assert texts[0] == texts[1] == texts[2], f"another text with drafts: prompt {n}, {temperature}"


@dataclass(frozen=True)
class Line:
    """Speed over acceptance."""

    label: str
    colour: str
    points: list[tuple[float, float]]
    dashes: str = ""


def lines_of(rows: list[dict[str, Any]]) -> list[Line]:
    """Of points with form, accepted and speed; with a number of answers those of more than one are dashed."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault((row.get("answers", 1), row["form"]), []).append((row["accepted"], row["speed"]))
    several = len({answers for answers, _ in found}) > 1
    return [
        Line(f"{form}, {answers} answer{'s' * (answers > 1)}" if several else form, COLOURS[form], sorted(points), dash)
        for (answers, form), points in found.items()
        for dash in ["5 4" if answers > 1 else ""]
    ]


def plotted(panels: dict[str, list[Line]]) -> str:
    """An SVG of speed over acceptance, a part beside the other, by their titles."""
    across, height, left, right, top = 600, 350, 56, 140, 30
    most = max(2.0, *(speed for lines in panels.values() for line in lines for _, speed in line.points)) * 1.05
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across * len(panels)}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (title, lines) in enumerate(panels.items()):
        text.append(f'<g transform="translate({across * number},0)">')
        text += _panel(title, lines, most, (left, across - right, top, height - 44))
        text.append("</g>")
    return "\n".join([*text, "</svg>", ""])


def _panel(title: str, lines: list[Line], most: float, box: tuple[int, int, int, int]) -> list[str]:
    left, right, top, bottom = box

    def at(accepted: float, speed: float) -> tuple[float, float]:
        return left + accepted * (right - left), top + (1 - speed / most) * (bottom - top)

    middle = (left + right) / 2
    text = [f'<text x="{middle}" y="{top - 12}" text-anchor="middle">{title}</text>']
    for n in range(int(most * 2) + 1):
        (x1, y), (x2, _) = (at(share, n / 2) for share in (0, 1))
        text.append(f'<path d="M{x1:.1f},{y:.1f}H{x2:.1f}" stroke="{"#555" if n == 2 else "#ddd"}"/>')
        text.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{n / 2:g} x</text>')
    for accepted in sorted({accepted for line in lines for accepted, _ in line.points}):
        text.append(f'<text x="{at(accepted, 0)[0]:.1f}" y="{bottom + 18}" text-anchor="middle">{accepted:g}</text>')
    text.append(f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">chance of a draft to be accepted</text>')
    below = -1e9
    for line in sorted(lines, key=lambda line: -line.points[-1][1]):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        text.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes}/>')
        below = max(at(*line.points[-1])[1] + 4, below + 14)  # labels do not cover each other
        text.append(f'<text x="{right + 8}" y="{below:.1f}" fill="{line.colour}">{line.label}</text>')
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--draft-model", help="a folder with the head")
    parser.add_argument("--text", type=Path, help="a text from which prompts are cut; drafts are accepted as they are")
    parser.add_argument("--prompts", type=int, default=16, help="with --text: how many")
    parser.add_argument("--random")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--read", type=Path, help="an earlier result, which is drawn")
    parser.add_argument("--gpu", type=Path, default=GPU, help="points of a GPU for the picture")
    options = parser.parse_args()
    if options.read is not None:
        if options.svg is None:
            parser.error("--read: expected together with --svg")
        draw(options.svg, json.loads(options.read.read_text()), options.gpu)
        return
    if options.device == "cpu" and options.threads == 1:
        global clock
        clock = time.thread_time
    if options.random is not None:
        raw = resolve_model(options.random, ("config",), files="config").read_config()
        llm = load_random(raw, device=options.device, max_context=2048, on_device=True)
    else:
        own = {"max_context": 1024, "threads": options.threads, "draft_model": options.draft_model}
        llm = penstock.load(options.model, device=options.device, **own)
    if options.text is not None:
        on_text(llm, options.text.read_text(), options.tokens, options.prompts)
        return
    prompts = [list(range(5 + n, 45 + n)) for n in range(4)]
    if options.random is None:
        check(llm, prompts)
    found = swept(llm, prompts[0], options.tokens, options.rounds)
    ngram = repeated(llm, options.rounds) if options.random is None else None
    if ngram is not None:
        print(f"repeated text, n-gram drafts: {ngram:.2f} x")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows = [
        {"form": form, "accepted": accepted, "speed": speed, "drafts_per_step": drafts}
        for form, points in found.items()
        for accepted, (speed, drafts) in points.items()
    ]
    about = {"commit": commit, "date": time.strftime("%Y-%m-%d"), "model": options.random or options.model or "demo"}
    about |= {"device": options.device, "threads": options.threads, "rows": rows, "ngram_repeated": ngram}
    if options.json:
        Path(options.json).write_text(json.dumps(about, indent=1) + "\n")
    if options.svg is not None:
        draw(options.svg, about, options.gpu)


def draw(path: Path, about: dict[str, Any], gpu: Path) -> None:
    """Write the picture of a result, and of a GPU's where there is one."""
    threads = f", {about['threads']} thread{'s' * (about['threads'] > 1)}" if about["threads"] else ""
    panels = {f"{about['model']}, {about['device']}{threads}": lines_of(about["rows"])}
    if gpu.exists():
        other = json.loads(gpu.read_text())
        panels[f"{other['config']}, {other['gpu']}"] = lines_of(other["curve"]["points"])
    path.write_text(plotted(panels))


if __name__ == "__main__":
    main()
