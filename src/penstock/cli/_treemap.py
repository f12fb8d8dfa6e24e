"""A model as one HTML page: a map of its bytes in which every tensor is a box, and what of each a token reads."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from penstock.analysis.survey import Survey
from penstock.analysis.weights import ROLES, WeightInfo
from penstock.cli._output import css_colours, css_name
from penstock.cli.inspect import Machine, count, facts, size

WIDTH, HEIGHT = 1200.0, 640.0
_TITLE = 18.0  # height of a group's title
_GAP = 2.0
_SMALLEST = 0.15  # boxes with a side below this many units would not be seen

# Colours of the parts on light and on dark ground.
_COLOURS = {
    "embedding": ("#2f6fd0", "#6ea3f5"),
    "attention": ("#168a72", "#4cc4aa"),
    "linear attention": ("#8450bd", "#b48fe8"),
    "router": ("#c0405c", "#ef7f97"),
    "shared expert": ("#9a7b12", "#d9bc50"),
    "experts": ("#c96a12", "#f0a45a"),
    "dense MLP": ("#5a8a2c", "#96c862"),
    "norms": ("#78808c", "#9aa3b0"),
    "head": ("#1b86b4", "#5cc0e8"),
    "other": ("#8a6d5c", "#c0a594"),
}
assert set(_COLOURS) == set(ROLES)


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float

    def inside(self, gap: float, title: float = 0.0) -> Box:
        """What is left within a margin, below a title."""
        width, height = max(0.0, self.width - 2 * gap), max(0.0, self.height - 2 * gap - title)
        return Box(self.x + gap, self.y + gap + title, width, height)


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """Boxes of areas in the proportion of `sizes` that fill a box, as square as rows of them can be.

    Sizes come in any order; each answer stands at the place of its size. A size of 0 is a box without area. Bruls,
    Huizing and van Wijk, "Squarified Treemaps" (2000).
    """
    found = [Box(box.x, box.y, 0.0, 0.0)] * len(sizes)
    total = sum(sizes)
    if total <= 0 or box.width <= 0 or box.height <= 0:
        return found
    scale = box.width * box.height / total
    left = sorted((n for n, value in enumerate(sizes) if value > 0), key=lambda n: -sizes[n])
    while left:
        side = min(box.width, box.height)
        row, worst = 1, _worst(scale * sizes[left[0]], scale * sizes[left[0]], scale * sizes[left[0]], side)
        area = scale * sizes[left[0]]
        for number in left[1:]:
            more = area + scale * sizes[number]
            shape = _worst(scale * sizes[left[0]], scale * sizes[number], more, side)
            if shape > worst:
                break
            row, worst, area = row + 1, shape, more
        depth = area / side if side else 0.0
        at = 0.0
        for number in left[:row]:
            length = scale * sizes[number] / depth if depth else 0.0
            if box.width >= box.height:
                found[number] = Box(box.x, box.y + at, depth, length)
            else:
                found[number] = Box(box.x + at, box.y, length, depth)
            at += length
        if box.width >= box.height:
            box = Box(box.x + depth, box.y, max(0.0, box.width - depth), box.height)
        else:
            box = Box(box.x, box.y + depth, box.width, max(0.0, box.height - depth))
        left = left[row:]
    return found


def in_strips(sizes: Sequence[float], box: Box) -> list[Box]:
    """As `squarified`, but in the order of `sizes`, as text runs: in strips from left to right, below each other.

    A strip takes the next box as long as that makes its boxes squarer on average. Bederson, Shneiderman and Wattenberg,
    "Ordered and Quantum Treemaps" (2002).
    """
    total = sum(sizes)
    if total <= 0 or box.width <= 0 or box.height <= 0:
        return [Box(box.x, box.y, 0.0, 0.0)] * len(sizes)
    scale = box.width * box.height / total
    strips: list[list[float]] = [[]]
    for value in (scale * one for one in sizes):
        if strips[-1] and _mean_shape([*strips[-1], value], box.width) > _mean_shape(strips[-1], box.width) * 1.0001:
            strips.append([])
        strips[-1].append(value)
    found, y = [], box.y
    for strip in strips:
        height, x = sum(strip) / box.width, box.x
        for area in strip:
            width = area / height if height else 0.0
            found.append(Box(x, y, width, height))
            x += width
        y += height
    return found


def _mean_shape(areas: Sequence[float], width: float) -> float:
    """The mean of longer by shorter side in a strip of these areas; areas of 0 do not count."""
    height = sum(areas) / width
    shapes = [max(area / height**2, height**2 / area) for area in areas if area > 0]
    return sum(shapes) / len(shapes) if shapes else float("inf")


def _worst(largest: float, smallest: float, area: float, side: float) -> float:
    """How far from a square the worst box of a row is; 1 is a square."""
    if not (area and side and smallest):
        return float("inf")
    return max(side * side * largest / area**2, area**2 / (side * side * smallest))


def page(found: Survey, machine: Machine) -> str:
    """The whole page; it needs nothing from anywhere."""
    parts = found.by_role()
    total = found.total
    limit = machine.limit(total.active_bytes)
    tiles = [
        ("parameters", count(total.parameters), f"{count(total.active_parameters)} active per token"),
        ("weights", size(total.nbytes), f"{8 * total.nbytes / max(total.parameters, 1):.2f} bits per weight"),
        (
            "read per token",
            size(total.active_bytes),
            f"{total.active_bytes / max(total.nbytes, 1):.1%} of all weights",
        ),
    ]
    if limit is not None:
        tiles.append(("at most", f"{limit:,.0f} tokens/s", f"at {machine.bandwidth:,.0f} GB/s ({machine.how})"))
    per_position, fixed = found.cache_bytes(machine.dtype)
    tiles.append(
        (
            "1000 tokens of context",
            size(1000 * per_position),
            f"in {machine.dtype}" + (f", {size(fixed)} besides" if fixed else ""),
        )
    )
    return _PAGE.format(
        title=escape(f"{found.name}: where its bytes are"),
        colours=css_colours(_COLOURS, 0),
        dark=css_colours(_COLOURS, 1),
        classes="".join(f".{css_name(part)} {{ --c:var(--{css_name(part)}) }} " for part in ROLES),
        about=escape(f"{found.config.model_type}, {len(found.layers)} layers of width {found.config.dim}"),
        tiles="".join(
            f"<div><span>{escape(what)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>"
            for what, value, more in tiles
        ),
        bars=_bar("All weights", {part: value.nbytes for part, value in parts.items()})
        + _bar("What a token reads", {part: value.active_bytes for part, value in parts.items()}),
        legend="".join(f'<li class="{css_name(part)}"><i></i>{escape(part)}</li>' for part in parts),
        by_part=_map(found, lambda piece: piece.role, _layer, squarified, in_strips),
        by_layer=_map(found, _layer_or_part, lambda piece: piece.role, in_strips, squarified),
        facts=_facts(found, machine),
        table=_table(found),
        formats=_formats(found),
        pieces=_pieces(found.weights),
    )


def _layer(piece: WeightInfo) -> str:
    return "" if piece.layer is None else f"{piece.layer}"


def _layer_or_part(piece: WeightInfo) -> str:
    """What stands side by side in the map by layers."""
    return f"layer {piece.layer}" if piece.layer is not None else piece.role


# --------------------------------------------------------------------------------------------------------------------
# The map


Arrange = Callable[[Sequence[float], Box], list[Box]]


def _map(
    found: Survey,
    outer: Callable[[WeightInfo], str],
    inner: Callable[[WeightInfo], str],
    places: Arrange,
    within: Arrange,
) -> str:
    """All tensors as boxes within boxes: the groups that `outer` names, in them those that `inner` names."""
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, piece in enumerate(found.weights):
        groups[outer(piece)][inner(piece)].append(number)
    sizes = [[_bytes(found, members) for members in group.values()] for group in groups.values()]
    boxes = places([sum(group) for group in sizes], Box(0, 0, WIDTH, HEIGHT))
    shapes: list[str] = []
    for (name, group), own, box in zip(groups.items(), sizes, boxes, strict=True):
        framed = box.inside(_GAP / 2)
        title = _title(framed, name, sum(own), found.total.nbytes)
        shapes.append(title)
        inside = framed.inside(0.0, _TITLE if title else 0.0)
        for (label, members), place in zip(group.items(), within(own, inside), strict=True):
            shapes += _tensors(found, members, place.inside(0.4), "" if label in (name, *ROLES) else label)
    return "".join(shapes)


def _bytes(found: Survey, members: Iterable[int]) -> int:
    return sum(found.weights[number].nbytes for number in members)


def _title(box: Box, name: str, nbytes: int, total: int) -> str:
    """The name of a group with as much of its size as there is room for; "" if there is none."""
    if box.height < 2 * _TITLE:
        return ""
    texts = (f"{name} {size(nbytes)}, {nbytes / max(total, 1):.1%}", f"{name} {size(nbytes)}", name)
    text = next((text for text in texts if len(text) * 7.4 < box.width), "")
    css = f"title {css_name(name)}" if name in ROLES else "title"
    return text and f'<text class="{css}" x="{box.x + 1:.1f}" y="{box.y + 13:.1f}">{escape(text)}</text>'


def _tensors(found: Survey, members: Sequence[int], box: Box, label: str) -> list[str]:
    """The tensors of a group, in full colour if a token reads them; else what it reads of them is a strip below."""
    pieces = [found.weights[number] for number in members]
    shapes = []
    for number, piece, place in zip(members, pieces, squarified([p.nbytes for p in pieces], box), strict=True):
        own = place.inside(0.3 if min(place.width, place.height) > 3 else 0.0)
        if min(own.width, own.height) >= _SMALLEST:
            css = f"{css_name(piece.role)} read" if piece.share == 1 else css_name(piece.role)
            shapes.append(f'<rect {_at(own)} class="{css}" data-i="{number}"/>')
    shares = {piece.share for piece in pieces}
    if len(shares) == 1 and 0 < (share := shares.pop()) < 1:
        read = Box(box.x, box.y + box.height * (1 - share), box.width, box.height * share)
        shapes.append(f'<rect {_at(read)} class="{css_name(pieces[0].role)} read"/>')
    if label and box.width > 24 + 6 * len(label) and box.height > 28:
        on = " on" if pieces[0].share == 1 else ""
        shapes.append(f'<text class="label{on}" x="{box.x + 4:.1f}" y="{box.y + 12:.1f}">{escape(label)}</text>')
    return shapes


def _at(box: Box) -> str:
    return f'x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}"'


def _pieces(pieces: Sequence[WeightInfo]) -> str:
    """What the tooltip says of each tensor, as JSON that may stand in a page."""
    rows = [
        [
            piece.path,
            piece.role,
            " × ".join(map(str, piece.shape)) or "scalar",
            str(piece.format),
            size(piece.nbytes),
            size(piece.nbytes * piece.share) if piece.share < 1 else "all of it",
        ]
        for piece in pieces
    ]
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


# --------------------------------------------------------------------------------------------------------------------
# Around it


def _bar(name: str, values: dict[str, float]) -> str:
    total = sum(values.values()) or 1.0
    pieces = "".join(
        f'<span class="{css_name(part)}" style="width:{value / total:.3%}" title="{escape(part)}: {size(value)}, '
        f'{value / total:.1%}">{f"{escape(part)} {value / total:.0%}" if value / total > 0.085 else ""}</span>'
        for part, value in values.items()
        if value / total > 0.0005
    )
    return f'<p class="what">{escape(name)} <b>{size(total)}</b></p><div class="bar">{pieces}</div>'


def _facts(found: Survey, machine: Machine) -> str:
    rows = facts(found, machine) + [("note", notice) for notice in found.notices]
    return "<table>" + "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows) + "</table>"


def _table(found: Survey) -> str:
    heads = ("part", "tensors", "parameters", "bytes", "share", "read per token", "share")
    total, rows = found.total, []
    for part, value in [*found.by_role().items(), ("all", total)]:
        cells = [
            f"{value.tensors}",
            count(value.parameters),
            size(value.nbytes),
            f"{value.nbytes / max(total.nbytes, 1):.1%}",
            size(value.active_bytes),
            f"{value.active_bytes / max(total.active_bytes, 1):.1%}",
        ]
        mark = f'<i class="{css_name(part)}"></i>' if part in ROLES else ""
        rows.append(f"<tr><td>{mark}{escape(part)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return _framed(heads, rows)


def _formats(found: Survey) -> str:
    rows = [
        f"<tr><td>{escape(str(format))}</td><td>{value.tensors}</td><td>{count(value.parameters)}</td>"
        f"<td>{size(value.nbytes)}</td><td>{value.nbytes / max(found.total.nbytes, 1):.1%}</td></tr>"
        for format, value in found.by_format().items()
    ]
    return _framed(("format", "tensors", "parameters", "bytes", "share"), rows)


def _framed(heads: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --on:#fff;
  --ground:#fbfbf9; --card:#fff; --ink:#1c2024; --soft:#626a74; --line:#e2e4e8; --pale:24%; {colours} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --on:#14171b; --ground:#14171b; --card:#1c2026; --ink:#e8eaed; --soft:#9aa3ad; --line:#2e343c; --pale:30%;
    {dark} }}
}}
{classes}
* {{ box-sizing: border-box }}
body {{ margin:0 auto; padding:1.5rem 1rem 4rem; max-width:78rem; background:var(--ground); color:var(--ink);
  font:15px/1.5 system-ui, sans-serif; font-variant-numeric:tabular-nums }}
h1 {{ font-size:1.35rem; margin:0 0 .25rem; line-height:1.25 }}
h2 {{ font-size:1.05rem; margin:0 0 .5rem }}
p {{ margin:.25rem 0 }}
.about, small, .what, .hint {{ color:var(--soft) }}
.what b {{ color:var(--ink) }}
.tiles {{ display:grid; grid-template-columns:repeat(auto-fit, minmax(10rem, 1fr)); gap:.75rem; margin:1.25rem 0 }}
.tiles div, section {{ background:var(--card); border:1px solid var(--line); border-radius:.5rem }}
.tiles div {{ padding:.6rem .8rem }}
.tiles span, .tiles small {{ display:block; color:var(--soft); font-size:.85rem }}
.tiles b {{ font-size:1.25rem }}
.bar {{ display:flex; gap:1px; height:2rem; margin-bottom:.75rem; overflow:hidden; border-radius:.35rem }}
.bar span {{ overflow:hidden; white-space:nowrap; font-size:.75rem; line-height:2rem; padding:0 .3rem; min-width:1px;
  color:var(--on); background:var(--c) }}
.bar span:empty {{ padding:0 }}
.map {{ position:relative; padding:.75rem; margin:1rem 0 }}
.map input {{ position:absolute; opacity:0; pointer-events:none }}
.map label {{ display:inline-block; padding:.15rem .7rem; border:1px solid var(--line); border-radius:1rem;
  font-size:.85rem; color:var(--soft); cursor:pointer; margin-right:.25rem }}
#parts:checked ~ [for=parts], #layers:checked ~ [for=layers] {{ background:var(--ink); color:var(--ground);
  border-color:var(--ink) }}
#parts:focus-visible ~ [for=parts], #layers:focus-visible ~ [for=layers] {{ outline:2px solid var(--soft) }}
#parts:checked ~ .by-layer, #layers:checked ~ .by-part {{ display:none }}
.hint {{ font-size:.85rem; display:inline-block; margin-left:.5rem }}
svg {{ display:block; width:100%; height:auto; margin-top:.6rem; font-family:inherit }}
rect {{ fill:color-mix(in srgb, var(--c) var(--pale), var(--card)) }}
rect.read {{ fill:var(--c) }}
rect:not([data-i]) {{ pointer-events:none }}
rect.over {{ stroke:var(--ink); stroke-width:1.5 }}
text {{ pointer-events:none; fill:var(--ink) }}
.title {{ font-size:12px; font-weight:600; fill:var(--c, var(--ink)) }}
.label {{ font-size:10.5px; fill:var(--soft) }}
.label.on {{ fill:var(--on) }}
.legend {{ display:flex; flex-wrap:wrap; gap:.25rem 1rem; list-style:none; padding:0; margin:.7rem 0 0;
  font-size:.85rem }}
.legend i, td i {{ display:inline-block; width:.8em; height:.8em; border-radius:.2em; margin-right:.4em;
  background:var(--c) }}
#tip {{ position:fixed; z-index:1; max-width:24rem; padding:.5rem .7rem; border-radius:.4rem; background:var(--ink);
  color:var(--ground); font-size:.82rem; line-height:1.45; pointer-events:none; overflow-wrap:anywhere }}
#tip[hidden] {{ display:none }}
#tip b {{ display:block }}
.tables {{ display:grid; grid-template-columns:3fr 2fr; gap:1rem; align-items:start }}
.facts {{ grid-column:1 / -1 }}
@media (max-width: 60rem) {{ .tables {{ grid-template-columns:minmax(0, 1fr) }} }}
section {{ padding:1rem; min-width:0; overflow-x:auto }}
table {{ border-collapse:collapse; width:100%; font-size:.85rem }}
td, th {{ padding:.3rem 0 .3rem .7rem; text-align:right; border-top:1px solid var(--line); white-space:nowrap }}
td:first-child, th:first-child {{ text-align:left; padding-left:0 }}
th {{ border-top:0; color:var(--soft); font-weight:500; white-space:normal; vertical-align:bottom }}
tbody tr:last-child td {{ font-weight:600 }}
.facts td, .formats td {{ font-weight:400 !important }}
.facts td {{ text-align:left; white-space:normal; vertical-align:top }}
.facts td:first-child {{ color:var(--soft); white-space:nowrap }}
.facts tr:first-child td {{ border-top:0 }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="about">{about}</p>
<div class="tiles">{tiles}</div>
{bars}
<section class="map">
<input type="radio" name="view" id="parts" checked><input type="radio" name="view" id="layers">
<label for="parts">by part</label><label for="layers">by layer</label>
<p class="hint">Areas are bytes. Full colour is what one token reads.</p>
<svg class="by-part" viewBox="0 0 1200 640" role="img" aria-label="bytes by part">{by_part}</svg>
<svg class="by-layer" viewBox="0 0 1200 640" role="img" aria-label="bytes by layer">{by_layer}</svg>
<ul class="legend">{legend}</ul>
</section>
<div class="tables">
<section><h2>By part</h2>{table}</section>
<section class="formats"><h2>By format</h2>{formats}</section>
<section class="facts"><h2>About the model</h2>{facts}</section>
</div>
<div id="tip" hidden></div>
<script>
const pieces = {pieces};
const tip = document.getElementById("tip");
let over = null;
for (const map of document.querySelectorAll("svg")) {{
  map.addEventListener("pointermove", event => {{
    const at = event.target.dataset.i;
    if (over !== event.target) {{
      over?.classList.remove("over");
      over = at === undefined ? null : event.target;
      over?.classList.add("over");
      tip.hidden = over === null;
      if (over) {{
        const [path, part, shape, format, bytes, read] = pieces[at];
        const name = document.createElement("b");
        name.textContent = path;
        tip.replaceChildren(name, `${{part}}, ${{shape}}, ${{format}}`, document.createElement("br"),
          `${{bytes}}, a token reads ${{read}}`);
      }}
    }}
    if (over) {{
      const room = tip.getBoundingClientRect();
      tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - room.width - 8)) + "px";
      tip.style.top = (event.clientY + room.height + 24 > innerHeight ? event.clientY - room.height - 10
        : event.clientY + 16) + "px";
    }}
  }});
  map.addEventListener("pointerleave", () => {{ over?.classList.remove("over"); over = null; tip.hidden = true; }});
}}
</script>
</body>
</html>
"""
