"""A traced step as one HTML page: where the time of a token goes, before and after fusion side by side."""

from __future__ import annotations

from collections import defaultdict

from penstock.analysis.trace import Line, Side, TraceReport
from penstock.cli._output import render
from penstock.units import amount

# kinds of work by the families of the ops, with their colours on light and on dark ground
_KINDS = {
    "products": ("linear",),
    "experts": ("moe",),
    "attention": ("attention", "mla", "cache", "rope"),
    "linear attention": ("delta",),
    "norms and sums": ("norm", "elementwise", "altup"),
    "the rest": (),
}
_COLOURS = {
    "products": ("#2f6fd0", "#78a9f5"),
    "experts": ("#c96a12", "#f0a860"),
    "attention": ("#168a72", "#52c7ae"),
    "linear attention": ("#8450bd", "#b995ea"),
    "norms and sums": ("#a8881a", "#dcc25c"),
    "the rest": ("#78808c", "#9aa3b0"),
}
_KIND_OF = {family: kind for kind, families in _KINDS.items() for family in families}


def page(report: TraceReport) -> str:
    """The whole page."""
    sides = {"Before fusion": report.before, "After fusion": report.after}
    groups = [group for side in sides.values() for group in side.groups()]
    used = {_kind(line) for side in sides.values() for line in side.lines}
    return render(
        "trace.html",
        title=f"{report.name}: {report.work}",
        about=_about(report),
        colours=_COLOURS,
        tiles=_tiles(report),
        sides=sides,
        longest=max(side.seconds for side in sides.values()) or 1.0,
        most=max((group.count * line.seconds for group in groups for line in group.lines), default=0) or 1.0,
        ops=_ops,
        used=[kind for kind in _KINDS if kind in used],
        kind_of=_kind,
        time=_time,
        amount=amount,
        heads=_HEADS if report.measured else _HEADS[:-2],
        rows=_rows(report),
    )


def _about(report: TraceReport) -> str:
    what = f"is what the bytes that a node moves need at {report.bandwidth:,.0f} GB/s ({report.how})"
    if report.measured:
        times = f"Bars are measured times; a predicted time {what}."
    else:
        times = f"Bars are predicted times: each {what}. Starting a node costs extra; --measure shows it."
    return f"On {report.device} in {report.dtype}. {times}"


def _kind(line: Line) -> str:
    return _KIND_OF.get(line.family, "the rest")


def _time(seconds: float) -> str:
    if seconds >= 0.01:
        return f"{seconds * 1e3:,.1f} ms"
    return f"{seconds * 1e6:,.0f} µs" if seconds >= 1e-4 else f"{seconds * 1e6:.2f} µs"


def _tiles(report: TraceReport) -> list[tuple[str, str, str]]:
    before, after = report.before, report.after
    tiles = [
        ("nodes", f"{len(before.lines)}", f"{len(after.lines)}"),
        ("moved per step", amount(before.nbytes), amount(after.nbytes)),
        ("predicted", _time(before.predicted), _time(after.predicted)),
    ]
    if before.whole is not None and after.whole is not None:
        tiles.append(("measured, the whole step", _time(before.whole), _time(after.whole)))
    arenas = [f"{amount(side.arena)} ({amount(side.apart)})" for side in (before, after)]
    return [*tiles, ("arena (without a plan)", arenas[0], arenas[1])]


def _ops(side: Side) -> list[tuple[str, str, float]]:
    """Kind of work, name and seconds of every op of a program, ordered by kind."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in side.lines:
        sums[_kind(line)][line.op] += line.seconds
    ordered = ((kind, sorted(sums[kind].items(), key=lambda item: -item[1])) for kind in _KINDS)
    return [(kind, op, seconds) for kind, ops in ordered for op, seconds in ops]


_HEADS = (
    "op",
    *("before", "after"),
    *("moved before", "moved after"),
    *("predicted before", "predicted after"),
    *("measured before", "measured after"),
)


def _rows(report: TraceReport) -> list[list[str]]:
    """A row per op, the longest first."""
    before, after = report.before.by_op(), report.after.by_op()
    both = {op: [*after.get(op, ()), *before.get(op, ())] for op in before | after}
    rows = []
    for op in sorted(both, key=lambda op: -sum(line.seconds for line in both[op])):
        sides = before.get(op, []), after.get(op, [])
        cells = [op, *(f"{len(lines)}" if lines else "–" for lines in sides)]
        cells += [amount(sum(line.nbytes for line in lines)) if lines else "" for lines in sides]
        cells += [_time(sum(line.predicted for line in lines)) if lines else "" for lines in sides]
        if report.measured:
            cells += [_time(sum(line.seconds for line in lines)) if lines else "" for lines in sides]
        rows.append(cells)
    return rows
