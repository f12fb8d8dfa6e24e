"""A traced step as one HTML page: where the time of a token goes, before and after fusion side by side."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from penstock.analysis.trace import Group, Line, Report, Side
from penstock.cli._output import css_colours, css_name
from penstock.units import amount

# kinds of work by the families of the ops, with their colours on light and on dark ground
_KINDS = {
    "products": ("linear",),
    "experts": ("moe",),
    "attention": ("attention", "mla", "cache", "rope"),
    "linear attention": ("delta",),
    "norms and sums": ("norm", "elementwise"),
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


def page(report: Report) -> str:
    """The whole page; it needs nothing from anywhere."""
    longest = max(report.before.seconds, report.after.seconds) or 1.0
    title = f"{report.name}: {report.work}"
    sides = (("Before fusion", report.before), ("After fusion", report.after))
    bars = "".join(_bar(name, side, longest) for name, side in sides)
    groups = [group for _, side in sides for group in side.groups()]
    most = max((group.count * line.seconds for group in groups for line in group.lines), default=0) or 1.0
    programs = "".join(_program(name, side, most) for name, side in sides)
    return _PAGE.format(
        title=escape(title),
        colours=css_colours(_COLOURS, 0),
        dark=css_colours(_COLOURS, 1),
        about=escape(_about(report)),
        tiles=_tiles(report),
        bars=bars,
        legend="".join(f'<li><i class="{css_name(kind)}"></i>{escape(kind)}</li>' for kind in _used(report)),
        programs=programs,
        table=_table(report),
    )


def _about(report: Report) -> str:
    what = f"is what the bytes that a node moves need at {report.bandwidth:,.0f} GB/s ({report.how})"
    if report.measured:
        times = f"Bars are measured times; a predicted time {what}."
    else:
        times = f"Bars are predicted times: each {what}. Starting a node costs extra; --measure shows it."
    return f"On {report.device} in {report.dtype}. {times}"


def _kind(line: Line) -> str:
    return _KIND_OF.get(line.family, "the rest")


def _used(report: Report) -> list[str]:
    used = {_kind(line) for side in (report.before, report.after) for line in side.lines}
    return [kind for kind in _KINDS if kind in used]


def _time(seconds: float) -> str:
    if seconds >= 0.01:
        return f"{seconds * 1e3:,.1f} ms"
    return f"{seconds * 1e6:,.0f} µs" if seconds >= 1e-4 else f"{seconds * 1e6:.2f} µs"


def _tiles(report: Report) -> str:
    before, after = report.before, report.after
    tiles = [
        ("nodes", f"{len(before.lines)}", f"{len(after.lines)}"),
        ("moved per step", amount(before.nbytes), amount(after.nbytes)),
        ("predicted", _time(before.predicted), _time(after.predicted)),
        ("arena (without a plan)", *(f"{amount(side.arena)} ({amount(side.apart)})" for side in (before, after))),
    ]
    if before.whole is not None and after.whole is not None:
        tiles.insert(3, ("measured, the whole step", _time(before.whole), _time(after.whole)))
    return "".join(
        f"<div><span>{escape(name)}</span>{escape(old)} → <b>{escape(new)}</b></div>" for name, old, new in tiles
    )


def _bar(name: str, side: Side, longest: float) -> str:
    """All ops of a program in one bar, ordered by kind of work; the longer of both fills the width."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in side.lines:
        sums[_kind(line)][line.op] += line.seconds
    pieces = []
    for kind in _KINDS:
        for op, seconds in sorted(sums[kind].items(), key=lambda item: -item[1]):
            share = seconds / side.seconds if side.seconds else 0
            wide = seconds / longest > 0.09
            pieces.append(
                f'<span class="{css_name(kind)}" style="width:{seconds / longest:.3%}" '
                f'title="{escape(op)}: {_time(seconds)}, {share:.0%}">{escape(op) if wide else ""}</span>'
            )
    return f'<p class="what">{escape(name)} <b>{_time(side.seconds)}</b></p><div class="bar">{"".join(pieces)}</div>'


def _program(name: str, side: Side, most: float) -> str:
    groups = "".join(_group(group, most, side.seconds or 1.0) for group in side.groups())
    return f"<section><h2>{escape(name)}</h2>{groups}</section>"


def _group(group: Group, most: float, total: float) -> str:
    """Nodes of one of the group's layers; a bar is what they take in all of them."""
    share = group.seconds / total
    nodes = f"{len(group.lines)} node{'s' * (len(group.lines) != 1)}"
    rows = "".join(
        f'<tr><td class="op">{escape(line.op)}<small>{escape(", ".join(line.made) or "writes in place")}</small></td>'
        f'<td class="track"><i class="{css_name(_kind(line))}" style="width:{seconds / most:.2%}"></i></td>'
        f"<td>{amount(line.nbytes)}</td><td>{_time(line.seconds)}</td><td>{seconds / total:.1%}</td></tr>"
        for line, seconds in ((line, group.count * line.seconds) for line in group.lines)
    )
    return (
        f"<details{' open' if share > 0.1 else ''}><summary>{escape(group.title)}"
        f"<small>{nodes}{' each' if group.count > 1 else ''}, {_time(group.seconds)}, {share:.0%}</small></summary>"
        f"<table>{rows}</table></details>"
    )


def _table(report: Report) -> str:
    before, after = report.before.by_op(), report.after.by_op()
    heads = ["op", "before", "after", "moved before", "moved after", "predicted before", "predicted after"]
    heads += ["measured before", "measured after"] if report.measured else []
    both = {op: [*after.get(op, ()), *before.get(op, ())] for op in before | after}
    rows = []
    for op in sorted(both, key=lambda op: -sum(line.seconds for line in both[op])):
        sides = before.get(op, []), after.get(op, [])
        cells = [f"{len(lines)}" if lines else "–" for lines in sides]
        cells += [amount(sum(line.nbytes for line in lines)) if lines else "" for lines in sides]
        cells += [_time(sum(line.predicted for line in lines)) if lines else "" for lines in sides]
        if report.measured:
            cells += [_time(sum(line.seconds for line in lines)) if lines else "" for lines in sides]
        rows.append(f"<tr><td>{escape(op)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark;
  --ground:#fbfbf9; --card:#fff; --ink:#1c2024; --soft:#626a74; --line:#e2e4e8; {colours} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground:#14171b; --card:#1c2026; --ink:#e8eaed; --soft:#9aa3ad; --line:#2e343c; {dark} }}
}}
* {{ box-sizing: border-box }}
body {{ margin:0 auto; padding:1.5rem 1rem 4rem; max-width:76rem; background:var(--ground); color:var(--ink);
  font:15px/1.5 system-ui, sans-serif; font-variant-numeric:tabular-nums }}
h1 {{ font-size:1.35rem; margin:0 0 .25rem; line-height:1.25 }}
h2 {{ font-size:1.05rem; margin:0 0 .5rem }}
p {{ margin:.25rem 0 }}
.about, small, .what {{ color:var(--soft) }}
.what b {{ color:var(--ink) }}
.tiles {{ display:grid; grid-template-columns:repeat(auto-fit, minmax(11rem, 1fr)); gap:.75rem; margin:1.25rem 0 }}
.tiles div, section, details {{ background:var(--card); border:1px solid var(--line); border-radius:.5rem }}
.tiles div {{ padding:.6rem .8rem }}
.tiles span {{ display:block; color:var(--soft); font-size:.85rem }}
.tiles b {{ font-size:1.15rem }}
.bar {{ display:flex; gap:1px; height:2.2rem; margin-bottom:.75rem; overflow:hidden; border-radius:.35rem }}
.bar span {{ overflow:hidden; white-space:nowrap; font-size:.75rem; line-height:2.2rem; padding:0 .3rem; color:#fff;
  min-width:1px }}
.bar span:empty {{ padding:0 }}
@media (prefers-color-scheme: dark) {{ .bar span {{ color:#14171b }} }}
.legend {{ display:flex; flex-wrap:wrap; gap:.25rem 1rem; list-style:none; padding:0; margin:.25rem 0 1.5rem;
  font-size:.85rem }}
.legend i {{ display:inline-block; width:.8em; height:.8em; border-radius:.2em; margin-right:.4em }}
.products {{ background:var(--products) }} .experts {{ background:var(--experts) }}
.attention {{ background:var(--attention) }} .linear-attention {{ background:var(--linear-attention) }}
.norms-and-sums {{ background:var(--norms-and-sums) }} .the-rest {{ background:var(--the-rest) }}
.sides {{ display:grid; grid-template-columns:repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap:1rem;
  align-items:start }}
section {{ padding:1rem; min-width:0 }}
details {{ margin-bottom:.5rem; overflow-x:auto }}
summary {{ padding:.5rem .75rem; cursor:pointer; font-weight:600 }}
summary small {{ font-weight:400; margin-left:.6rem }}
table {{ border-collapse:collapse; width:100%; font-size:.85rem }}
td, th {{ padding:.3rem .6rem; text-align:right; border-top:1px solid var(--line); white-space:nowrap }}
td:first-child, th:first-child {{ text-align:left }}
th {{ border-top:0; color:var(--soft); font-weight:500; white-space:normal; vertical-align:bottom }}
td.op small {{ white-space:normal }}
.op small {{ display:block }}
.track {{ width:38%; min-width:3rem }}
.track i {{ display:block; height:.8rem; border-radius:.2rem; min-width:1px }}
.wide {{ margin-top:1rem; overflow-x:auto }}
@media (max-width: 32rem) {{
  section {{ padding:.6rem }}
  td, th {{ padding:.3rem }}
  .track {{ width:25%; min-width:2.5rem }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="about">{about}</p>
<div class="tiles">{tiles}</div>
{bars}
<ul class="legend">{legend}</ul>
<div class="sides">{programs}</div>
<section class="wide"><h2>By op</h2>{table}</section>
</body>
</html>
"""
