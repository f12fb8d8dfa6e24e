"""penstock kernels: which ops there are and where each has a kernel; which of them a model's step runs."""

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli._model import UsageError, resolved
from penstock.cli._output import print_json, print_table, write_page
from penstock.cli.bench import check_room, layer_count
from penstock.errors import InvalidArgument, KernelNotFound

if TYPE_CHECKING:
    from penstock.analysis.trace import Line, Side, TracedModel, TraceReport, Work
    from penstock.ops.op import Op
    from penstock.weights.resolve import ResolvedModel


def kernels(
    op: Annotated[
        str | None,
        typer.Argument(metavar="OP | MODEL", help="Show this op alone; with --trace the model, by default the demo."),
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", "-f", metavar="F", help="Only the ops of one family, such as norm.")
    ] = None,
    traced: Annotated[
        bool, typer.Option("--trace", help="Show what a step of MODEL runs, before and after fusion.")
    ] = False,
    step: Annotated[
        Literal["decode", "prefill"] | None, typer.Option("--step", help="Of the trace; decode if left out.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", "-b", metavar="N", min=1, help="Sequences of a decode; 1 if left out.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", min=1, help="Of a prefill; 512 if left out, 256 on the CPU.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", metavar="N", min=0, help="Positions that are there before.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="N", help="Of a config.json: the first N layers.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        typer.Option("--device", help="Whose kernels; a trace for cuda needs no GPU."),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", metavar="GB/S", help="For predictions, instead of this machine's.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run the nodes, too, and show their times.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Show every node, not one layer of those alike.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the trace as a page with bars.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the ops and where each has a kernel, or trace where the time of a model's step goes.

    Every op has a NumPy definition (ref). On cpu and cuda "yes" is a kernel of its own, with its variants in
    parentheses; "composed" calls other ops' kernels; "–" is none: there the definition runs (cpu) or the call is
    refused (cuda). The last column counts the kernels of the source programs whose work the op does.

    With --trace: MODEL is a folder, a .gguf file, a hub id, a config.json or the name of a shipped one, whose weights
    are not needed. The predicted time of a node is what the bytes that it reads and writes need at the memory's
    bandwidth: at least that. "launches" adds what a launch was measured to cost, so that it shows what fusing saves;
    "expected" is what such models were measured to reach, where that is known.

    \b
    Examples:
      penstock kernels --family norm
      penstock kernels rms_norm
      penstock kernels --trace --measure
      penstock kernels --trace qwen3.6-35b-a3b --device cuda --html trace.html
    """
    options = {
        "--step": step, "--batch": batch, "--tokens": tokens, "--depth": depth, "--layers": layers,
        "--device": device, "--bandwidth": bandwidth, "--measure": measure, "--all": every, "--html": html,
    }  # fmt: skip
    if traced:
        if family is not None:
            raise UsageError("--family: expected without --trace")
        work = _work(step or "decode", batch, tokens, depth or 0, chosen := _device(device))
        report = _report(op, layers, chosen, work, bandwidth, measure)
        _show(report, every, html, as_json)
        return
    for name, value in options.items():
        if value:
            raise UsageError(f"{name}: expected together with --trace")
    from penstock.ops import REGISTRY

    chosen_ops = _chosen(REGISTRY, op, family)
    if as_json:
        print_json({"ops": [_described(each) for each in chosen_ops], "count": len(chosen_ops)})
    elif op is not None:
        _print_one(chosen_ops[0])
    else:
        _print_all(chosen_ops)


# --------------------------------------------------------------------------------------------------------------------
# Ops


def _chosen(registry: "dict[str, Op]", name: str | None, family: str | None) -> "list[Op]":
    families = sorted({op.family for op in registry.values()})
    if family is not None and family not in families:
        raise InvalidArgument(f"kernels: family is {family!r}, expected one of {', '.join(families)}")
    if name is not None and name not in registry:
        close = difflib.get_close_matches(name, registry, n=3)
        known = f"did you mean {' or '.join(close)}?" if close else "penstock kernels lists them"
        raise KernelNotFound(f"kernels: there is no op {name!r}; {known}")
    chosen = [op for op in registry.values() if name in (None, op.name) and family in (None, op.family)]
    if not chosen:
        raise InvalidArgument(f"kernels: op {name!r} is of family {registry[str(name)].family!r}, not {family!r}")
    return sorted(chosen, key=lambda op: (op.family, op.name))


def _described(op: "Op") -> dict[str, Any]:
    """One op as a JSON object."""
    return {
        "name": op.name,
        "family": op.family,
        "reference": True,
        "backends": {
            device: {"kind": _kind(kernel), "variants": list(kernel.variants) if kernel else []}
            for device, kernel in op.backends().items()
        },
        "writes": list(op.writes),
        "signature": _signature(op),
        "doc": op.doc.partition("\n")[0],
    }


def _kind(kernel: Any) -> str:
    if kernel is None:
        return "none"
    return "composed" if kernel.composed else "kernel"


def _signature(op: "Op", one_line: bool = True) -> str:
    """The call as it stands in the source, on one line or with a line per parameter."""
    parts: list[str] = []
    for parameter in op.signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{parameter.name}: {parameter.annotation}{default}")
    listed = ", ".join(parts) if one_line else "".join(f"\n    {part}," for part in parts) + "\n"
    return f"{op.name}({listed}) -> {op.signature.return_annotation}"


_MARK = {"kernel": "yes", "composed": "composed", "none": "–"}


def _mark(kernel: Any) -> str:
    """A cell of the table: the kind of kernel and its variants."""
    variants = f" ({', '.join(kernel.variants)})" if kernel and kernel.variants else ""
    return _MARK[_kind(kernel)] + variants


def _print_all(ops: "list[Op]") -> None:
    rows, count = [], {"cpu": 0, "cuda": 0}
    for op in ops:
        found = op.backends()
        for device in count:
            count[device] += found[device] is not None
        rows.append([op.name, op.family, "yes", *(_mark(found[device]) for device in count)])
    print_table(("op", "family", "ref", "cpu", "cuda"), rows, wrap=("cpu", "cuda"))
    print(
        f"{len(ops)} ops, all with a NumPy definition (ref); "
        f"{count['cpu']} have a cpu kernel, {count['cuda']} a cuda kernel."
    )


def _print_one(op: "Op") -> None:
    signature = _signature(op)
    print((signature if len(signature) < 80 else _signature(op, one_line=False)) + "\n")
    print(op.doc + "\n")
    rows = [("family", op.family), ("reference", "yes")]
    rows += ((device, _mark(kernel)) for device, kernel in op.backends().items())
    if op.writes:
        rows.append(("writes", ", ".join(op.writes)))
    print_table(("", "value"), rows, wrap=("value",), header=False)


# --------------------------------------------------------------------------------------------------------------------
# Traces


def _device(given: str | None) -> str:
    from penstock.engine.options import resolve_options

    device = resolve_options(given or "auto").device
    if device == "reference":  # by PENSTOCK_DEVICE
        raise InvalidArgument("kernels: device is 'reference', expected cpu or cuda: the definitions are not fused")
    return device


def _work(step: str, batch: int | None, tokens: int | None, depth: int, device: str) -> "Work":
    """The step that the options describe. Raises UsageError for options that do not belong together."""
    from penstock.analysis.trace import Work
    from penstock.ops.device import device_type

    if step == "decode":
        if tokens is not None:
            raise UsageError("--tokens: expected with --step prefill; a decode takes one token of every sequence")
        return Work(step, batch or 1, depth)
    if batch is not None:
        raise UsageError("--batch: expected with --step decode; a prefill reads one sequence")
    chunk = device_type(device).chunk_alignment
    most = chunk - depth % chunk
    if tokens is not None and tokens > most:
        raise UsageError(f"--tokens: is {tokens}, expected at most {most}: prompts are cut at multiples of {chunk}")
    return Work(step, tokens or min(512, most), depth)


def _report(
    model: str | None, layers: str | None, device: str, work: "Work", bandwidth: float | None, measure: bool
) -> "TraceReport":
    from penstock.analysis.bandwidth import bandwidth_of
    from penstock.analysis.trace import outlined, reported
    from penstock.engine.options import resolve_options
    from penstock.weights.resolve import ANY

    if bandwidth is not None and not 0 < bandwidth < float("inf"):
        raise UsageError(f"--bandwidth: is {bandwidth}, expected GB/s above 0")
    count = layer_count(layers)
    _, dtype, activations = resolve_options(device)
    found = resolved(model, ANY, files="all" if measure else "config")
    if count is not None and found.kind != "config":
        raise UsageError("--layers: expected with a config.json; a stored model is traced whole")
    if measure:
        subject = _loaded(found, count, device, dtype, work)
    else:
        subject = outlined(found, count, device, dtype, activations, work)
    rate, how = bandwidth_of(device, bandwidth)
    return reported(subject, dtype, work, rate, how, measure)


def _loaded(
    found: "ResolvedModel", layers: int | Literal["all"] | None, device: str, dtype: str, work: "Work"
) -> "TracedModel":
    """A model that can run: stored weights, or those that a config.json describes, made up."""
    from penstock import api, models
    from penstock.analysis.trace import TracedModel, taken_layers
    from penstock.engine.cache import Caches
    from penstock.ops.device import device_for

    (name, raw), batches = taken_layers(found, layers), [(work.sequences, work.positions)]
    if raw is not None:
        family = models.family_of(raw)
        caches = Caches(family.caches(family.read_config(raw)), dtype)
        check_room(name, device_for(device), caches, batches, api.random_nbytes(raw))
        llm = api.load_random(raw, device=device, max_context=work.positions, on_device=True)
    else:
        llm = api.load(found.path, device=device, max_context=work.positions)
        check_room(name, llm.engine.device, llm.engine.caches, batches)
    programs = llm.engine.programs
    assert programs is not None
    return TracedModel(name, device, programs, llm.engine)


def _show(report: "TraceReport", every: bool, html: Path | None, as_json: bool) -> None:
    if html is not None:
        from penstock.cli._trace_html import page

        write_page("--html", html, page(report))
    if as_json:
        print_json(_json(report))
        return
    print(
        f"{report.name}: {report.work} on {report.device} in {report.dtype}; "
        f"predicted at {report.bandwidth:,.0f} GB/s ({report.how})\n"
    )
    _print_ops(report)
    for name, side in (("before", report.before), ("after", report.after)):
        if every or name == "after":
            print(f"\n{name} fusion" + ("" if every else ", of layers that are alike one:"))
            _print_nodes(side, every, report.measured)
    print("\n" + "\n".join(_totals(report)))


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.3f}" if nbytes < 1e7 else f"{nbytes / 1e6:,.1f}"


def _print_ops(report: "TraceReport") -> None:
    """A line per op, before and after, the longest after fusion first."""
    before, after = report.before.by_op(), report.after.by_op()

    def seconds(lines: "list[Line]") -> float:
        return sum(line.seconds for line in lines)

    names = sorted(before | after, key=lambda op: (-seconds(after.get(op, [])), -seconds(before.get(op, []))))
    columns = ["op", "before", "after", "MB before", "MB after", "us before", "us after", "share"]
    columns += ["took before", "took after"] if report.measured else []
    rows = []
    for op in names:
        sides = before.get(op, []), after.get(op, [])
        row = [op, *(str(len(lines) or "–") for lines in sides)]
        row += [_mb(sum(line.nbytes for line in lines)) if lines else "" for lines in sides]
        row += [_us(sum(line.predicted for line in lines)) if lines else "" for lines in sides]
        row.append(f"{seconds(sides[1]) / (report.after.seconds or 1):.1%}" if sides[1] else "")
        row += [_us(seconds(lines)) if lines else "" for lines in sides] if report.measured else []
        rows.append(row)
    print_table(columns, rows, wrap=())


def _print_nodes(side: "Side", every: bool, measured: bool) -> None:
    """A line per node: of all layers, or of one of those that are alike."""
    columns = ["where", "op", "makes", "MB", "us"] + (["took us"] if measured else [])
    rows = []
    if every:
        parts = [("" if line.layer is None else f"layer {line.layer}", (line,)) for line in side.lines]
    else:
        parts = [(group.title, group.lines) for group in side.groups()]
    for where, lines in parts:
        for number, line in enumerate(lines):
            row = ["" if number else where, line.op, ", ".join(line.made) or "–", _mb(line.nbytes), _us(line.predicted)]
            rows.append(row + ([_us(line.seconds)] if measured else []))
    print_table(columns, rows, wrap=("where", "makes"))


def _totals(report: "TraceReport") -> list[str]:
    before, after, work = report.before, report.after, report.work
    speed, launched = work.rows / after.predicted, after.with_launches(report.launch)
    lines = [
        f"nodes      {len(before.lines)} → {len(after.lines)}",
        f"moved      {before.nbytes / 1e6:,.1f} → {after.nbytes / 1e6:,.1f} MB",
        f"predicted  {_us(before.predicted)} → {_us(after.predicted)} us by bytes, at most {speed:,.0f} tokens/s",
        f"launches   {_us(before.with_launches(report.launch))} → {_us(launched)} us with {_us(report.launch)} "
        f"for each node's launch, at most {work.rows / launched:,.0f} tokens/s",
    ]
    if report.expected is not None:
        lines.append(f"expected   {speed * report.expected.share:,.0f} tokens/s, {report.expected}")
    if before.whole is not None and after.whole is not None:
        lines.append(f"sum of us  {_us(before.seconds)} → {_us(after.seconds)}, measured node by node")
        lines.append(f"took us    {_us(before.whole)} → {_us(after.whole)}, {work.rows / after.whole:,.0f} tokens/s")
    arena = (f"{side.arena / 1e6:,.2f} MB instead of {side.apart / 1e6:,.2f}" for side in (before, after))
    return [*lines, f"arena      {' → '.join(arena)}"]


def _json(report: "TraceReport") -> dict[str, Any]:
    def described(side: "Side") -> dict[str, Any]:
        return {
            "nodes": [
                {
                    "op": line.op,
                    "layer": line.layer,
                    "makes": list(line.made),
                    "read_bytes": line.reads,
                    "written_bytes": line.writes,
                    "predicted_us": line.predicted * 1e6,
                    "measured_us": None if line.measured is None else line.measured * 1e6,
                }
                for line in side.lines
            ],
            "count": len(side.lines),
            "bytes": side.nbytes,
            "predicted_us": side.predicted * 1e6,
            "with_launches_us": side.with_launches(report.launch) * 1e6,
            "measured_us": None if side.whole is None else side.whole * 1e6,
            "arena_bytes": side.arena,
            "arena_bytes_without_plan": side.apart,
        }

    work, share = report.work, report.expected
    return {
        "model": report.name,
        "device": report.device,
        "dtype": report.dtype,
        "step": work.step,
        "batch": work.sequences,
        "tokens": work.rows,
        "depth": work.depth,
        "gb_per_s": report.bandwidth,
        "gb_per_s_from": report.how,
        "launch_us": report.launch * 1e6,
        "expected_tokens_per_s": None if share is None else work.rows / report.after.predicted * share.share,
        "expected_from": None if share is None else share.source,
        "before": described(report.before),
        "after": described(report.after),
    }
