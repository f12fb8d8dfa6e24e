"""penstock benchmark: prompts read and answered in trials, with the options and the lines of mlx_lm.benchmark."""

import math
import statistics
import time
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from penstock.cli._foreign import LOADING, refused
from penstock.cli._model import NamedModel, note, rate, verb
from penstock.cli.bench import AHEAD, PREPARING, Drafting, Requests, Test, Times, check_batch, check_room

if TYPE_CHECKING:
    from penstock.api import LLM

_FOREIGN = (*LOADING, refused("--max-kv-size", "a trial takes the context that it needs"))


@verb(_FOREIGN)
def benchmark(
    *,
    model: NamedModel,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", "-p", metavar="N", min=1, help="Length of the prompts.")
    ] = 512,
    generation_tokens: Annotated[
        int, typer.Option("--generation-tokens", "-g", metavar="N", min=2, help="Length of the answers.")
    ] = 1024,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", metavar="N", min=1, help="Prompts that are answered together.")
    ] = 1,
    num_trials: Annotated[int, typer.Option("--num-trials", "-n", metavar="N", min=1, help="Trials that count.")] = 5,
    delay: Annotated[int, typer.Option("--delay", metavar="S", min=0, help="Seconds to rest before every trial.")] = 0,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", metavar="N", min=1, help="Threads; all physical cores if left out.")
    ] = None,
) -> None:
    """Measure a model as mlx_lm.benchmark does: its options, defaults and lines.

    Prompts are random tokens, and nothing but its length ends an answer. prompt_tps counts the tokens of all prompts
    until each answer has its first token, generation_tps those of all answers behind it; peak_memory is in GB. The
    warmup compiles and captures programs. penstock bench measures more, in the form of llama-bench.

    \b
    Examples:
      penstock benchmark -p 128 -g 128
      penstock benchmark --model mlx-community/Qwen3.6-35B-A3B-4bit -p 2048 -g 128 -b 4 -n 3
    """
    model.follow()
    test = Test(prompt_tokens, generation_tokens - 1, 0, batch_size)  # the first token of an answer is the prompt's
    llm = model.load_with(test.positions, threads, note)
    check_batch(llm.engine, batch_size)
    check_room(model.name, llm.engine.device, llm.engine.caches, [(batch_size, test.positions)])
    llm.engine.allocate_for([(batch_size, test.positions)])
    measure(llm, test, num_trials, delay)


def measure(llm: "LLM", test: Test, trials: int, delay: int) -> None:
    """Run and print the trials and their averages."""
    from penstock.engine.scheduler import Scheduler

    size, prompt, generation = test.batch, test.prompt, test.generation + 1
    with (
        Scheduler(
            llm, max_sequences=size, queue=0, prefix_cache=False, buffer=AHEAD, read_timeout=math.inf
        ) as scheduler,
        Requests(llm.engine, scheduler, test, np.random.default_rng(0), Drafting()) as requests,
    ):
        print("Running warmup..", flush=True)
        for _ in range(PREPARING if llm.engine.device.samples_tokens else 1):
            requests.run(test.generation, Times())
        print(f"Timing with prompt_tokens={prompt}, generation_tokens={generation}, batch_size={size}.", flush=True)
        found: list[dict[str, float]] = []
        for trial in range(trials):
            time.sleep(delay)
            times, start = Times(), time.perf_counter()
            requests.run(test.generation, times)
            found.append(
                {
                    "prompt_tps": rate(prompt * size, times.first[0]),
                    "generation_tps": rate(test.generation * size, times.written[0]),
                    "peak_memory": llm.stats().peak_memory / 1e9,
                }
            )
            total = f"total_time={time.perf_counter() - start:.3f}"
            print(f"Trial {trial + 1}:  {_listed(found[-1])}, {total}", flush=True)
    print(f"Averages: {_listed({name: statistics.fmean(one[name] for one in found) for name in found[0]})}")


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name}={value:.3f}" for name, value in values.items())
