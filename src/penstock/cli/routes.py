"""penstock routes: which experts the tokens of a text chose, and what a cache of experts would have made of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from penstock.cli._foreign import LOADING, SAMPLING
from penstock.cli._model import SEED, ModelOptions, Reading, SamplingOptions, UsageError, note, verb
from penstock.cli._output import check_output, percent, print_json, print_table, write_page
from penstock.units import spelled

if TYPE_CHECKING:
    from penstock.analysis.expert_routes import ExpertRoutes, ExpertRoutesReport, LayerUse


@verb((*LOADING, *SAMPLING))
def routes(
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="As --model; by default the demo model.", show_default=False)
    ] = None,
    *,
    model: ModelOptions,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="As in generate; - reads stdin. By default hello."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", metavar="N", min=1, help="Most tokens to generate.")
    ] = 100,
    sampling: SamplingOptions,
    seed: Annotated[int | None, SEED] = None,
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="Continue the prompt as it is.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page: heat map, hit rates, the text.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE.npz", help="Keep the recording; penstock plan reads it too.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option("--load", metavar="FILE.npz", help="Show a kept recording; no model runs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Record which experts each token chose, and show the hit rates that caches of experts would have had.

    Per layer: how many experts were used, how much of the work the tenth of them that is used most did, how even the
    use was (entropy; 1 is all alike), and how many of a token's experts the token before had chosen too. Then a
    simulation: a cache of 10 to 100 % of the experts under each --expert-policy, while the answer was written, beside
    the most that any policy could have had (min, which knows the future).

    \b
    Examples:
      penstock routes -p "Once upon a time" --max-tokens 200 --temp 0.8
      penstock routes ./my-model -p hello --html routes.html --save routes.npz
      penstock routes --load routes.npz --json
    """
    from penstock.analysis.expert_routes import expert_routes_report, load_expert_routes

    if name is not None and model.model is not None:
        raise UsageError(f"MODEL: is {name!r} beside --model {model.model!r}, expected one of the two")
    if name is not None:
        model = replace(model, model=name)
    for option, file in (("--html", html), ("--save", save)):
        if file is not None:
            check_output(option, file)
    if load is not None:
        for option, given in (("MODEL", model.model), ("--prompt", prompt), ("--save", save)):
            if given is not None:
                raise UsageError(f"{option}: expected without --load, which shows what was recorded before")
        recorded = load_expert_routes(load)
    else:
        recorded = _recorded(model, prompt, max_tokens, sampling, seed, ignore_chat_template, as_json)
    if save is not None:
        recorded.save(save)
    report = expert_routes_report(recorded)
    if html is not None:
        from penstock.cli._expert_routes_html import page

        write_page("--html", html, page(report, heading(report)))
    if as_json:
        print_json(_described(report))
    else:
        _print(report)


def _recorded(
    model: ModelOptions,
    prompt: str | None,
    max_tokens: int,
    sampling: SamplingOptions,
    seed: int | None,
    ignore_template: bool,
    quiet: bool,
) -> "ExpertRoutes":
    from penstock.analysis.expert_routes import record
    from penstock.cli.generate import PromptOptions, encoded

    arguments = sampling.arguments()
    messages = [{"role": "user", "content": PromptOptions(prompt).read()}]
    llm = model.load(None if quiet else note)
    tokens = encoded(llm, messages, None, {}, ignore_template)
    reading = Reading(len(tokens))
    try:
        made = {"progress": reading, "name": model.name, "seed": seed, **arguments}
        return record(llm, tokens, max_tokens, **made)
    finally:
        reading.close()


# --------------------------------------------------------------------------------------------------------------------
# Output


def heading(report: "ExpertRoutesReport") -> str:
    """What was recorded, in a sentence."""
    routes = report.routes
    answer = int(np.count_nonzero(routes.decode))
    layers = len(routes.layers)
    return (
        f"{routes.model}: {len(routes.tokens) - answer} tokens of a prompt and {answer} of an answer, "
        f"{layers} layer{'s' * (layers != 1)} of {routes.experts} experts, {routes.ids.shape[2]} per token"
    )


def _print(report: "ExpertRoutesReport") -> None:
    print(f"{heading(report)}\n")
    rows = [_cells(str(use.layer), [use], report) for use in report.layers]
    rows.append(_cells("mean", report.layers, report))
    print_table(("layer", "used", "top 10%", "entropy", "repeated"), rows, wrap=())
    if not report.rows:
        print("\nNo token was decoded by itself, so there is nothing to simulate; --max-tokens 2 or more has some.")
        return
    from penstock.experts.policy import AUTO

    policies = list(report.rows[0].rates)
    print("\nHit rates of the answer, had a cache of this size held the experts:\n")
    cells = [
        [f"{row.share:.0%}", spelled(report.nbytes(row)), str(row.slots), *(percent(row.rates[p], 1) for p in policies)]
        for row in report.rows
    ]
    print_table(("cache", "bytes", "experts", *policies), cells, wrap=())
    print(
        f"\n--expert-policy auto is {AUTO}; min is the most that any policy could have had. Reading ahead what\n"
        f"the last token chose would have been right for {percent(report.repeated, 1)} of the choices."
    )


def _cells(title: str, uses: Sequence["LayerUse"], report: "ExpertRoutesReport") -> list[str]:
    known = [use.repeated for use in uses if use.repeated is not None]
    return [
        title,
        f"{np.mean([use.used for use in uses]):.4g}/{report.routes.experts}",
        percent(float(np.mean([use.top_share for use in uses])), 1),
        f"{np.mean([use.entropy for use in uses]):.3f}",
        percent(float(np.mean(known)) if known else None, 1),
    ]


def _described(report: "ExpertRoutesReport") -> dict[str, Any]:
    """As --json prints it."""
    from penstock.experts.policy import AUTO

    routes = report.routes
    return {
        "model": routes.model,
        "prompt_tokens": int(np.count_nonzero(~routes.decode)),
        "answer_tokens": int(np.count_nonzero(routes.decode)),
        "text": "".join(routes.texts),
        "experts": routes.experts,
        "top_k": routes.ids.shape[2],
        "expert_bytes": routes.nbytes,
        "layers": [
            {
                "layer": use.layer,
                "used": use.used,
                "top_tenth_share": use.top_share,
                "entropy": use.entropy,
                "repeated": use.repeated,
                "counts": use.counts.tolist(),
            }
            for use in report.layers
        ],
        "repeated": report.repeated,
        "auto_policy": AUTO,
        "hit_rates": [
            {"share": row.share, "experts": row.slots, "bytes": report.nbytes(row)} | row.rates for row in report.rows
        ],
    }
