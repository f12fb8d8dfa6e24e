"""Recorded routes as one HTML page: a heat map of the experts' use, hit rates of caches, and the text with choices."""

from __future__ import annotations

import base64
import json
import re
from html import escape

import numpy as np

from penstock.cli.routes import LayerUse, Report, heading, percent, size
from penstock.experts.policy import AUTO
from penstock.experts.simulate import BEST

_NONE = 0xFFFF  # in the page's array of ids: no choice


def page(report: Report) -> str:
    """The whole page; it needs nothing from anywhere."""
    routes = report.routes
    title, _, about = heading(report).partition(": ")
    parts = {
        "title": escape(f"{title}: which experts tokens choose"),
        "about": escape(about[:1].upper() + about[1:]) + ".",
        "tiles": _tiles(report),
        "caches": _caches(report) if report.rows else "",
        "layers": _layers(report),
        "data": json.dumps(
            {
                "layers": routes.layers,
                "experts": routes.experts,
                "k": routes.ids.shape[2],
                "texts": routes.texts,
                "tokens": routes.tokens.tolist(),
                "decode": routes.decode.astype(int).tolist(),
                "counts": routes.counts().tolist(),
                "ids": base64.b64encode(np.where(routes.ids < 0, _NONE, routes.ids).astype("<u2").tobytes()).decode(),
            },
            separators=(",", ":"),
        ).replace("<", "\\u003c"),  # nothing in a text ends the script
    }
    return re.sub(r"@(\w+)@", lambda found: parts[found[1]], _PAGE)


def _tiles(report: Report) -> str:
    routes, uses = report.routes, report.layers
    tiles = [
        ("experts of a layer that were used", f"{np.mean([use.used for use in uses]):.4g} of {routes.experts}"),
        ("work of the tenth used most", percent(float(np.mean([use.top_share for use in uses])))),
        ("evenness (entropy, 1 = all alike)", f"{np.mean([use.entropy for use in uses]):.3f}"),
        ("chosen by the token before, too", percent(report.repeated)),
        ("all experts", size(routes.nbytes)),
    ]
    return "".join(f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in tiles)


def _caches(report: Report) -> str:
    policies = list(report.rows[0].rates)
    heads = "".join(f"<th>{_policy(name)}</th>" for name in policies)
    lines = []
    for row in report.rows:
        cells = "".join(f'<td class="{name}">{percent(row.rates[name])}</td>' for name in policies)
        lines.append(f"<tr><td>{row.share:.0%}</td><td>{size(report.nbytes(row))}</td><td>{row.slots}</td>{cells}</tr>")
    return (
        "<section><h2>Hit rates, had a cache held the experts</h2>"
        '<p class="about">Share of the choices of the answer\'s tokens that were in the cache when their layer ran: '
        f"a simulation of every <code>--expert-policy</code> (auto is {AUTO}). Best possible knows the future.</p>"
        f'<div class="sides">{_chart(report)}<div class="scroll"><table><thead><tr><th>cache</th><th>bytes</th>'
        f"<th>experts</th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></div></section>"
    )


def _policy(name: str) -> str:
    return "best possible" if name == BEST else name


def _chart(report: Report) -> str:
    """Hit rate over cache size, a line per policy."""
    width, height, left, low = 460, 300, 44, 36  # room for the numbers at the axes

    def at(share: float, rate: float) -> str:
        return f"{left + share * (width - left - 90):.1f},{(1 - rate) * (height - low - 12) + 12:.1f}"

    grid, labels, ends = [], [], []
    for tenth in range(0, 11, 2):
        share = tenth / 10
        grid.append(f"M{at(0, share)} L{at(1, share)}")
        x, y = at(0, share).split(",")
        labels.append(f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{share:.0%}</text>')
        x, y = at(share, 0).split(",")
        labels.append(f'<text x="{x}" y="{float(y) + 18}" text-anchor="middle">{share:.0%}</text>')
    lines = []
    marked = report.rows[len(report.rows) // 2]
    names = sorted(marked.rates, key=lambda name: -marked.rates[name])
    for name in names:
        points = " ".join(at(row.share, row.rates[name]) for row in report.rows)
        dots = "".join(
            f'<circle r="3.5" cx="{at(row.share, row.rates[name]).replace(",", chr(34) + " cy=" + chr(34))}">'
            f"<title>{_policy(name)}, {row.share:.0%}: {percent(row.rates[name])}</title></circle>"
            for row in report.rows
        )
        lines.append(f'<g class="{name}"><polyline points="{points}"/>{dots}</g>')
    for place, name in enumerate(names):
        y = 30 + 18 * place
        ends.append(
            f'<g class="{name}"><polyline points="{width - 84},{y - 4} {width - 66},{y - 4}"/></g>'
            f'<text x="{width - 62}" y="{y}">{"best" if name == BEST else name}</text>'
        )
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="hit rate over cache size">'
        f'<path class="grid" d="{" ".join(grid)}"/>{"".join(labels)}{"".join(lines)}{"".join(ends)}'
        f'<text x="{left + (width - left - 90) / 2}" y="{height - 2}" text-anchor="middle">cache, share of all experts'
        "</text></svg>"
    )


def _layers(report: Report) -> str:
    def row(use: LayerUse) -> str:
        cells = (f"{use.used}", percent(use.top_share), f"{use.entropy:.3f}", percent(use.repeated))
        return f"<tr><td>{use.layer}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"

    heads = ("layer", "experts used", "work of the top tenth", "entropy", "repeated")
    return (
        f"<table><thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead>"
        f"<tbody>{''.join(map(row, report.layers))}</tbody></table>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@title@</title>
<style>
:root { color-scheme: light dark;
  --ground:#fbfbf9; --card:#fff; --ink:#1c2024; --soft:#626a74; --line:#e2e4e8; --answer:#eef3fb; --mark:#1c2024;
  --cold:#f1f2f4; --warm:#f0a860; --hot:#a3330b; --again:201,106,18;
  --lru:#78808c; --lfru:#c96a12; --pin:#2f6fd0; --min:#168a72 }
@media (prefers-color-scheme: dark) {
  :root { --ground:#14171b; --card:#1c2026; --ink:#e8eaed; --soft:#9aa3ad; --line:#2e343c; --answer:#1f2835;
    --mark:#fff; --cold:#252a31; --warm:#b3621c; --hot:#ffd08a; --again:240,168,96;
    --lru:#9aa3b0; --lfru:#f0a860; --pin:#78a9f5; --min:#52c7ae }
}
* { box-sizing: border-box }
body { margin:0 auto; padding:1.5rem 1rem 4rem; max-width:76rem; background:var(--ground); color:var(--ink);
  font:15px/1.5 system-ui, sans-serif; font-variant-numeric:tabular-nums }
h1 { font-size:1.35rem; margin:0 0 .25rem; line-height:1.25 }
h2 { font-size:1.05rem; margin:0 0 .25rem }
p { margin:.25rem 0 }
.about { color:var(--soft) }
.tiles { display:grid; grid-template-columns:repeat(auto-fit, minmax(11rem, 1fr)); gap:.75rem; margin:1.25rem 0 }
.tiles div, section { background:var(--card); border:1px solid var(--line); border-radius:.5rem }
.tiles div { padding:.6rem .8rem }
.tiles span { display:block; color:var(--soft); font-size:.85rem }
.tiles b { font-size:1.15rem }
section { padding:1rem; margin-bottom:1rem; min-width:0 }
.bar { display:flex; flex-wrap:wrap; gap:.5rem 1.25rem; align-items:center; margin:.5rem 0; font-size:.85rem;
  color:var(--soft) }
.bar label { display:flex; gap:.35rem; align-items:center; cursor:pointer }
.scale { display:flex; align-items:center; gap:.4rem }
.scale i { width:7rem; height:.7rem; border-radius:.2rem;
  background:linear-gradient(90deg, var(--cold), var(--warm), var(--hot)) }
#map { position:relative; padding-left:2.2rem }
#map canvas { display:block; width:100%; cursor:crosshair }
#rows { position:absolute; left:0; top:0; width:2rem; height:100%; color:var(--soft); font-size:.72rem }
#rows span { position:absolute; right:0; transform:translateY(-50%) }
.axis { display:flex; justify-content:space-between; padding-left:2.2rem; color:var(--soft); font-size:.75rem }
#tip { position:fixed; display:none; z-index:2; pointer-events:none; max-width:22rem; padding:.4rem .6rem;
  background:var(--ink); color:var(--ground); border-radius:.35rem; font-size:.82rem; line-height:1.35 }
.sides { display:grid; grid-template-columns:repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap:1rem;
  align-items:center }
.chart { width:100%; max-width:34rem }
.chart text { fill:var(--soft); font-size:11px }
.chart .grid { stroke:var(--line); fill:none }
.chart polyline { fill:none; stroke-width:2 }
.chart .min polyline { stroke-dasharray:5 4 }
.lru polyline { stroke:var(--lru) } .lru circle { fill:var(--lru) }
.lfru polyline { stroke:var(--lfru) } .lfru circle { fill:var(--lfru) }
.pin polyline { stroke:var(--pin) } .pin circle { fill:var(--pin) }
.min polyline { stroke:var(--min) } .min circle { fill:var(--min) }
.scroll { overflow-x:auto }
table { border-collapse:collapse; width:100%; font-size:.85rem }
td, th { padding:.3rem .6rem; text-align:right; border-top:1px solid var(--line); white-space:nowrap }
td:first-child, th:first-child { text-align:left }
th { border-top:0; color:var(--soft); font-weight:500; white-space:normal; vertical-align:bottom }
.reading { display:grid; grid-template-columns:minmax(0, 1fr) 17rem; gap:1rem }
#text { white-space:pre-wrap; overflow-wrap:anywhere; font:14px/1.75 ui-monospace, monospace; max-height:32rem;
  overflow-y:auto; padding-right:.5rem }
#text span { border-radius:.2rem; padding:.1rem 0; cursor:pointer }
#text span.answer { border-bottom:2px solid var(--pin) }
#text span.blank { color:var(--soft) }
#text span:hover, #text span.on { background:var(--mark) !important; color:var(--ground) }
#choice { font-size:.82rem; max-height:32rem; overflow-y:auto }
#choice td { padding:.15rem .4rem; white-space:normal; text-align:left; vertical-align:top }
#choice td:first-child { white-space:nowrap }
#choice i { font-style:normal; color:var(--lfru); font-weight:600 }
@media (max-width: 48rem) { .reading { grid-template-columns:1fr } section { padding:.6rem } td, th { padding:.3rem } }
</style>
</head>
<body>
<h1>@title@</h1>
<p class="about">@about@</p>
<div class="tiles">@tiles@</div>
<section>
<h2>Use of the experts</h2>
<p class="about">A row is a layer, a column an expert, and its colour how often tokens chose it. Point at a cell for the
numbers, or at a word below: its choices light up here.</p>
<div class="bar"><label><input type="checkbox" id="sort"> experts of each layer by use</label>
<label><input type="checkbox" id="only"> the answer's tokens only</label>
<span class="scale">never <i></i> <span id="most"></span></span></div>
<div id="map"><div id="rows"></div><canvas id="heat" role="img" aria-label="heat map of expert use per layer"></canvas>
</div>
<div class="axis"><span id="first"></span><span id="last"></span></div>
</section>
@caches@
<section>
<h2>The text and its choices</h2>
<p class="about">The stronger a word's colour, the more of its experts the word before had chosen too. Underlined is the
answer. Point at a word; click to keep it.</p>
<div class="reading"><div id="text"></div><div id="choice"></div></div>
</section>
<section><h2>Layer by layer</h2><div class="scroll">@layers@</div></section>
<div id="tip"></div>
<script type="application/json" id="data">@data@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const L = data.layers.length, E = data.experts, k = data.k, T = data.tokens.length, NONE = 0xffff;
const bytes = Uint8Array.from(atob(data.ids), c => c.charCodeAt(0));
const ids = new DataView(bytes.buffer);
const by = id => document.getElementById(id);
const at = (token, layer) => {
  const found = [];
  for (let i = 0; i < k; i++) {
    const id = ids.getUint16(2 * ((token * L + layer) * k + i), true);
    if (id !== NONE) found.push(id);
  }
  return found;
};

// counts of all tokens, and of those of the answer
const every = data.counts, answer = every.map(row => row.map(() => 0));
let answers = 0;
for (let t = 0; t < T; t++) if (data.decode[t]) {
  answers++;
  for (let l = 0; l < L; l++) for (const e of at(t, l)) answer[l][e]++;
}
by("only").disabled = !answers;
const counts = () => by("only").checked ? answer : every;
const tokens = () => by("only").checked ? answers : T;

// the order of each layer's columns
const plain = every.map(row => row.map((_, e) => e));
const order = () => !by("sort").checked ? plain
  : counts().map(row => row.map((_, e) => e).sort((a, b) => row[b] - row[a] || a - b));

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rgb = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
const mix = (a, b, x) => "rgb(" + a.map((v, i) => Math.round(v + (b[i] - v) * x)).join() + ")";

let shown = -1, kept = -1, columns = plain;
const canvas = by("heat");
function draw() {
  const width = canvas.parentElement.clientWidth - 36, scale = window.devicePixelRatio || 1;
  const row = Math.max(5, Math.min(26, Math.round(460 / L))), height = row * L;
  canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const now = counts(), most = Math.max(1, ...now.map(r => Math.max(...r)));
  const stops = ["--cold", "--warm", "--hot"].map(name => rgb(colour(name)));
  const gap = width / E > 6 ? 1 : 0, tall = row > 8 ? 1 : 0;
  columns = order();
  for (let l = 0; l < L; l++) for (let c = 0; c < E; c++) {
    const x = Math.sqrt(now[l][columns[l][c]] / most);
    pen.fillStyle = x < .5 ? mix(stops[0], stops[1], 2 * x) : mix(stops[1], stops[2], 2 * x - 1);
    const from = Math.floor(c * width / E), to = Math.floor((c + 1) * width / E);
    pen.fillRect(from, l * row, Math.max(1, to - from - gap), row - tall);
  }
  if (shown >= 0) {
    pen.strokeStyle = colour("--mark"); pen.lineWidth = 2;
    for (let l = 0; l < L; l++) for (const e of at(shown, l)) {
      const c = columns[l].indexOf(e), wide = Math.max(4, width / E - gap);
      pen.strokeRect(c * width / E + 1, l * row + 1, wide - 2, row - tall - 2);
    }
  }
  by("most").textContent = "by " + most + " of " + tokens() + " tokens";
  by("first").textContent = by("sort").checked ? "used most" : "expert 0";
  by("last").textContent = by("sort").checked ? "used least" : "expert " + (E - 1);
  const step = Math.ceil(14 / row), names = [];
  for (let l = 0; l < L; l += step)
    names.push('<span style="top:' + (l + .5) * row + 'px">' + data.layers[l] + "</span>");
  by("rows").innerHTML = names.join("");
}

const tip = by("tip");
function point(event, lines) {
  tip.replaceChildren(...lines.map(line => Object.assign(document.createElement("div"), { textContent: line })));
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
  tip.style.top = (event.clientY + box.height + 24 > innerHeight ? event.clientY - box.height - 10
    : event.clientY + 16) + "px";
}
canvas.addEventListener("mousemove", event => {
  const box = canvas.getBoundingClientRect();
  const l = Math.floor((event.clientY - box.top) / box.height * L);
  const c = Math.floor((event.clientX - box.left) / box.width * E);
  if (l < 0 || l >= L || c < 0 || c >= E) return;
  const e = columns[l][c], n = counts()[l][e], even = tokens() * k / E;
  point(event, ["layer " + data.layers[l] + ", expert " + e, "chosen by " + n + " of " + tokens() + " tokens ("
    + (100 * n / Math.max(1, tokens())).toFixed(1) + "%)", (n / Math.max(even, 1e-9)).toFixed(2) + " × an even share"]);
});
canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });

// the text
const again = t => {
  let same = 0, all = 0;
  if (t) for (let l = 0; l < L; l++) {
    const before = at(t - 1, l);
    for (const e of at(t, l)) { all++; same += before.includes(e); }
  }
  return all ? same / all : 0;
};
const spans = data.texts.map((text, t) => {
  const span = document.createElement("span"), blank = text === "";
  span.textContent = blank ? "·" : text;
  if (blank) span.classList.add("blank");
  if (data.decode[t]) span.classList.add("answer");
  span.style.backgroundColor = "rgba(" + colour("--again") + "," + (.75 * again(t)).toFixed(3) + ")";
  span.addEventListener("mouseenter", () => show(t));
  span.addEventListener("mouseleave", () => show(kept));
  span.addEventListener("click", () => { kept = kept === t ? -1 : t; show(t); });
  return span;
});
by("text").replaceChildren(...spans);
function show(t) {
  if (shown >= 0) spans[shown].classList.remove("on");
  shown = t;
  const lines = [];
  if (t >= 0) {
    spans[t].classList.add("on");
    lines.push("<p><b>token " + t + "</b>, id " + data.tokens[t] + (data.decode[t] ? ", of the answer" : "")
      + "<br>" + Math.round(100 * again(t)) + "% of its experts were those of the token before (marked)</p><table>");
    for (let l = 0; l < L; l++) {
      const before = t ? at(t - 1, l) : [];
      const names = at(t, l).sort((a, b) => a - b).map(e => before.includes(e) ? "<i>" + e + "</i>" : e);
      lines.push("<tr><td>layer " + data.layers[l] + "</td><td>" + names.join(" ") + "</td></tr>");
    }
    lines.push("</table>");
  }
  by("choice").innerHTML = lines.join("") || '<p class="about">Point at a word.</p>';
  draw();
}
by("sort").addEventListener("change", draw);
by("only").addEventListener("change", draw);
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
show(-1);
</script>
</body>
</html>
"""
