"""penstock inspect: what a model is made of, where its bytes are, and how fast a token can be at best."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli._model import ANY_MODEL, SAME_MODEL, UsageError, named, note, resolved
from penstock.cli._output import print_json, print_table, write_page
from penstock.errors import BackendError
from penstock.units import amount, count

if TYPE_CHECKING:
    from penstock.analysis.measured import MeasuredShare
    from penstock.analysis.survey import Machine, Survey


def inspect(
    argument: Annotated[str | None, ANY_MODEL] = None,
    model: Annotated[str | None, SAME_MODEL] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use only what has been downloaded before.")] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Whose memory limits the speed.")
    ] = "auto",
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", metavar="GB/S", help="Of the memory, instead of measuring it.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with a map of the bytes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a model is made of, without loading its weights.

    Parameters, bytes by part and by format, and the bytes that one token reads: all but the experts that are not
    chosen, and of the embedding table one row. The memory's bandwidth by these bytes is the most tokens per second that
    one sequence can get; on the CPU it is measured with a plain read, on a GPU with a copy. What is expected is the
    share of that which a model of the family was measured to reach, where one was.

    Of a hub model that is not in the local cache only the small files are downloaded, and sizes are those that its
    config.json implies.

    \b
    Examples:
      penstock inspect
      penstock inspect qwen3.6-35b-a3b --html map.html
      penstock inspect mlx-community/Qwen3.6-35B-A3B-4bit --json
      penstock inspect ./model.gguf --bandwidth 800
    """
    if bandwidth is not None and not 0 < bandwidth < float("inf"):
        raise UsageError(f"--bandwidth: is {bandwidth}, expected GB/s above 0")
    from penstock.analysis.survey import survey
    from penstock.weights.resolve import ANY

    found = survey(resolved(named(argument, model), ANY, revision, offline, files="small"))
    machine = _machine(device, bandwidth)
    if html is not None:
        from penstock.cli._treemap import page

        write_page("--html", html, page(found, machine, facts(found, machine)))
    if as_json:
        print_json(described(found, machine))
        return
    _print(found, machine)
    for notice in found.notices:
        note(notice)


def _machine(device: str, bandwidth: float | None) -> Machine:
    from penstock.analysis.bandwidth import bandwidth_of
    from penstock.analysis.survey import Machine
    from penstock.engine.options import resolve_options

    chosen, dtype, _ = resolve_options(device)
    chosen = "cpu" if chosen == "reference" else chosen
    try:
        rate, how = bandwidth_of(chosen, bandwidth)
    except BackendError:  # a machine on which nothing can be measured still has models to look at
        rate, how = None, "not measured"
    return Machine(chosen, dtype, rate, how)


def described(found: Survey, machine: Machine) -> dict[str, Any]:
    """As --json prints it; bytes are bytes, speeds GB/s and tokens per second."""
    from penstock.analysis.weights import Sum

    def sums(value: Sum) -> dict[str, Any]:
        return {
            "tensors": value.tensors,
            "parameters": value.parameters,
            "active_parameters": round(value.active_parameters),
            "bytes": value.nbytes,
            "active_bytes": round(value.active_bytes),
        }

    config, total = found.config, found.total
    limit, measured = machine.limit(total.active_bytes), expected_share(found, machine)
    per_position, fixed = found.cache_bytes(machine.dtype)
    facts = {
        name: getattr(config, name, None)
        for name in ("heads", "kv_heads", "head_dim", "experts", "top_k", "expert_width", "shared_width")
    }
    return {
        "model": found.name,
        "source": found.source,
        "files": found.files,
        "file_bytes": found.file_bytes,
        "model_type": config.model_type,
        "layers": found.kinds,
        "dim": config.dim,
        "vocab_size": config.vocab_size,
        **facts,
        "tied": found.tied,
        **sums(total),
        "bits_per_weight": 8 * total.nbytes / max(total.parameters, 1),
        "parts": {part: sums(value) for part, value in found.by_role().items()},
        "formats": [
            {
                "bits": format.bits,
                "group_size": format.group_size,
                "mode": None if format.group_size is None else format.mode,
                "dtype": format.dtype or None,
                **sums(value),
            }
            for format, value in found.by_format().items()
        ],
        "draft_head": {
            **sums(Sum.of(found.draft_head)),
            "bytes_per_draft": round(found.draft_bytes()),
            "cache_bytes_per_1000_tokens": 1000 * found.draft_cache_bytes(machine.dtype),
        }
        if found.draft_head
        else None,
        "skipped": [{"what": part.what, "tensors": part.tensors, "bytes": part.nbytes} for part in found.skipped],
        "context": config.max_positions,
        "cache_dtype": machine.dtype,
        "cache_bytes_per_1000_tokens": 1000 * per_position,
        "cache_bytes_fixed": fixed,
        "device": machine.device,
        "gb_per_s": machine.bandwidth,
        "gb_per_s_from": machine.how,
        "limit_tokens_per_s": limit,
        "expected_tokens_per_s": None if limit is None or measured is None else limit * measured.share,
        "expected_from": None if measured is None else measured.source,
        "tokenizer": found.tokenizer,
        "notices": list(found.notices),
    }


def _print(found: Survey, machine: Machine) -> None:
    print(f"{found.name}: {found.config.model_type}, {len(found.layers)} layers of width {found.config.dim}\n")
    print_table(("", "value"), facts(found, machine), wrap=("value",), header=False)
    total = found.total
    print()
    rows = [
        [
            part,
            count(value.parameters),
            amount(value.nbytes),
            f"{value.nbytes / max(total.nbytes, 1):.1%}",
            count(value.active_parameters),
            amount(value.active_bytes),
            f"{value.active_bytes / max(total.active_bytes, 1):.1%}",
        ]
        for part, value in [*found.by_role().items(), ("all", total)]
    ]
    columns = ("part", "parameters", "bytes", "share", "active", "read per token", "share")
    print_table(columns, rows, wrap=())
    print()
    rows = [
        [str(format), str(value.tensors), count(value.parameters), amount(value.nbytes)]
        for format, value in found.by_format().items()
    ]
    print_table(("format", "tensors", "parameters", "bytes"), rows, wrap=())


def expected_share(found: Survey, machine: Machine) -> MeasuredShare | None:
    """Of the limit, what such a model was measured to reach on such a machine, where that is known."""
    from penstock import models
    from penstock.analysis.measured import measured_share

    family = models.family_of({"model_type": found.config.model_type}).name
    return measured_share(machine.device, family, machine.bandwidth)


def facts(found: Survey, machine: Machine) -> list[tuple[str, str]]:
    """What is worth a line, for the terminal and for the page."""
    from penstock.analysis.weights import Sum

    config, total = found.config, found.total
    rows = [("layers", ", ".join(f"{number} × {kind}" for kind, number in found.kinds.items()))]
    if getattr(config, "experts", 0):
        shared = getattr(config, "shared_width", 0)
        rows.append(
            (
                "experts",
                f"{config.experts} of width {config.expert_width}, {config.top_k} per token"
                + (f", a shared one of width {shared}" if shared else ""),
            )
        )
    bits = 8 * total.nbytes / max(total.parameters, 1)
    rows.append(("parameters", f"{count(total.parameters)}, {count(total.active_parameters)} active per token"))
    where = f" in {found.files} file{'s' * (found.files != 1)}" if found.files else ""
    rows.append(("weights", f"{amount(total.nbytes)}{where}, {bits:.2f} bits per weight"))
    if found.draft_head:
        drafts = Sum.of(found.draft_head)
        own = f"{count(drafts.parameters)} parameters, {amount(drafts.nbytes)}"
        cache = f"{amount(1000 * found.draft_cache_bytes(machine.dtype))} per 1000 tokens"
        rows.append(("draft head", f"{own}; a draft reads {amount(found.draft_bytes())}; its cache takes {cache}"))
    rows += [("not run", f"{part.what}: {part.tensors} tensors, {amount(part.nbytes)}") for part in found.skipped]
    read = f"{amount(total.active_bytes)} per token"
    if (limit := machine.limit(total.active_bytes)) is not None:
        read += f": at most {limit:,.1f} tokens/s at {machine.bandwidth:,.1f} GB/s ({machine.how})"
        if (measured := expected_share(found, machine)) is not None:
            read += f", expected {limit * measured.share:,.1f} ({measured})"
    rows.append(("reads", read))
    per_position, fixed = found.cache_bytes(machine.dtype)
    cache = f"{amount(1000 * per_position)} per 1000 tokens in {machine.dtype}" + (
        f", {amount(fixed)} besides" if fixed else ""
    )
    rows.append(("context", f"{config.max_positions:,} tokens, {cache}"))
    rows.append(("vocabulary", f"{config.vocab_size:,}" + (", head tied to the embedding" if found.tied else "")))
    return rows + _tokenizer(found)


def _tokenizer(found: Survey) -> list[tuple[str, str]]:
    about = found.tokenizer
    if about is None:
        return []
    kind = ("byte-level " if about["byte_level"] else "") + str(about["type"])
    ends = " ".join(f"{text} ({number})" for number, text in about["eos"].items()) or "no token"
    text = f"{kind}, {about['tokens']:,} tokens, ends at {ends}"
    if about["bos"] is not None:
        text += f", {'begins' if about['adds_bos'] else 'may begin'} with {about['bos']}"
    rows = [("tokenizer", text)]
    if about["templates"]:
        knows = [word for word in ("tools", "thinking") if about[f"template_{word}"]]
        named = ", ".join(about["templates"])
        rows.append(("template", f"{named}, {about['template_characters']:,} characters" + _knows(knows)))
    else:
        rows.append(("template", "none"))
    return rows


def _knows(words: list[str]) -> str:
    return f", knows {' and '.join(words)}" if words else ""
