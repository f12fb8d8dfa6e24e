"""Recorded routes as one HTML page: a heat map of the experts' use, hit rates of caches, and the text with choices."""

from __future__ import annotations

import base64
from typing import NamedTuple

import numpy as np

from penstock.analysis.expert_routes import ExpertRoutesReport, LayerUse
from penstock.cli._output import percent, render, script_json
from penstock.experts.policy import AUTO
from penstock.experts.simulate import BEST
from penstock.units import spelled

_NONE = 0xFFFF  # in the page's array of ids: no choice
_WIDTH, _HEIGHT, _LEFT, _LOW = 460, 300, 44, 36  # of the chart of hit rates, with room for the numbers at the axes


def page(report: ExpertRoutesReport, heading: str) -> str:
    """The whole page; heading: "model: what was recorded"."""
    routes = report.routes
    title, _, about = heading.partition(": ")
    rates = report.rows[len(report.rows) // 2].rates if report.rows else {}
    return render(
        "routes.html",
        title=f"{title}: which experts tokens choose",
        about=f"{about[:1].upper()}{about[1:]}.",
        tiles=_tiles(report),
        report=report,
        policies={name: "best possible" if name == BEST else name for name in rates},
        ranked=sorted(rates, key=lambda name: -rates[name]),
        auto=AUTO,
        at=_at,
        shares=[tenth / 10 for tenth in range(0, 11, 2)],
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        size=spelled,
        layer_heads=("layer", "experts used", "work of the top tenth", "entropy", "repeated"),
        layer_rows=map(_cells, report.layers),
        data=script_json(
            {
                "layers": routes.layers,
                "experts": routes.experts,
                "k": routes.ids.shape[2],
                "texts": routes.texts,
                "tokens": routes.tokens.tolist(),
                "decode": routes.decode.astype(int).tolist(),
                "counts": routes.counts().tolist(),
                "ids": base64.b64encode(np.where(routes.ids < 0, _NONE, routes.ids).astype("<u2").tobytes()).decode(),
            }
        ),
    )


def _tiles(report: ExpertRoutesReport) -> list[tuple[str, str]]:
    routes, uses = report.routes, report.layers
    return [
        ("experts of a layer that were used", f"{np.mean([use.used for use in uses]):.4g} of {routes.experts}"),
        ("work of the tenth used most", percent(float(np.mean([use.top_share for use in uses])), 1)),
        ("evenness (entropy, 1 = all alike)", f"{np.mean([use.entropy for use in uses]):.3f}"),
        ("chosen by the token before, too", percent(report.repeated, 1)),
        ("all experts", spelled(routes.nbytes)),
    ]


class _Point(NamedTuple):
    x: float
    y: float

    def __str__(self) -> str:
        return f"{self.x},{self.y}"


def _at(share: float, rate: float) -> _Point:
    """Where a hit rate over a share of the experts stands in the chart."""
    x, y = _LEFT + share * (_WIDTH - _LEFT - 90.0), (1 - rate) * (_HEIGHT - _LOW - 12.0) + 12
    return _Point(round(x, 1), round(y, 1))


def _cells(use: LayerUse) -> list[str]:
    return [f"{use.layer}", f"{use.used}", percent(use.top_share, 1), f"{use.entropy:.3f}", percent(use.repeated, 1)]
