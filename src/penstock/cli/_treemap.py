"""A model as one HTML page: a map of its bytes in which every tensor is a box, and what of each a token reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.analysis.survey import Machine, Survey
from penstock.analysis.weights import Sum, WeightInfo
from penstock.cli._output import css_name, percent, render, script_json
from penstock.models.family import ROLES
from penstock.units import amount, count

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


def page(found: Survey, machine: Machine, facts: list[tuple[str, str]]) -> str:
    """The whole page; facts: names and values of its table about the model."""
    roles, total = found.by_role(), found.total
    return render(
        "inspect.html",
        title=f"{found.name}: where its bytes are",
        about=f"{found.config.model_type}, {len(found.layers)} layers of width {found.config.dim}",
        colours=_COLOURS,
        tiles=_tiles(found, machine),
        bars={
            "All weights": {role: value.nbytes for role, value in roles.items()},
            "What a token reads": {role: value.active_bytes for role, value in roles.items()},
        },
        roles=roles,
        by_role=_map(found, lambda weight: weight.role, _layer, squarified, in_strips),
        by_layer=_map(found, _layer_or_role, lambda weight: weight.role, in_strips, squarified),
        facts=facts + [("note", notice) for notice in found.notices],
        role_heads=("part", "tensors", "parameters", "bytes", "share", "read per token", "share"),
        role_rows=[
            [*_cells(role, value, total), amount(value.active_bytes), _share(value.active_bytes, total.active_bytes)]
            for role, value in [*roles.items(), ("all", total)]
        ],
        format_heads=("format", "tensors", "parameters", "bytes", "share"),
        format_rows=[_cells(str(format), value, total) for format, value in found.by_format().items()],
        pieces=script_json([_about(weight) for weight in found.weights]),
        amount=amount,
    )


def _tiles(found: Survey, machine: Machine) -> list[tuple[str, str, str]]:
    total = found.total
    tiles = [
        ("parameters", count(total.parameters), f"{count(total.active_parameters)} active per token"),
        ("weights", amount(total.nbytes), f"{8 * total.nbytes / max(total.parameters, 1):.2f} bits per weight"),
        ("read per token", amount(total.active_bytes), f"{_share(total.active_bytes, total.nbytes)} of all weights"),
    ]
    if (limit := machine.limit(total.active_bytes)) is not None:
        tiles.append(("at most", f"{limit:,.0f} tokens/s", f"at {machine.bandwidth:,.0f} GB/s ({machine.how})"))
    per_position, fixed = found.cache_bytes(machine.dtype)
    besides = f", {amount(fixed)} besides" if fixed else ""
    return [*tiles, ("1000 tokens of context", amount(1000 * per_position), f"in {machine.dtype}{besides}")]


def _cells(name: str, value: Sum, total: Sum) -> list[str]:
    shown = [name, f"{value.tensors}", count(value.parameters), amount(value.nbytes)]
    return [*shown, _share(value.nbytes, total.nbytes)]


def _share(nbytes: float, total: float) -> str:
    return percent(nbytes / max(total, 1), 1)


def _about(weight: WeightInfo) -> list[str]:
    """What the tooltip says of a tensor."""
    return [
        weight.path,
        weight.role,
        " × ".join(map(str, weight.shape)) or "scalar",
        str(weight.format),
        amount(weight.nbytes),
        amount(weight.nbytes * weight.share) if weight.share < 1 else "all of it",
    ]


def _layer(weight: WeightInfo) -> str:
    return "" if weight.layer is None else f"{weight.layer}"


def _layer_or_role(weight: WeightInfo) -> str:
    """What stands side by side in the map by layers."""
    return f"layer {weight.layer}" if weight.layer is not None else weight.role


# --------------------------------------------------------------------------------------------------------------------
# The map


Arrange = Callable[[Sequence[float], Box], list[Box]]
Name = Callable[[WeightInfo], str]


class Shape(NamedTuple):
    """A box of the map, of the tensor of a number; or a text, which begins at the box's corner."""

    css: str
    box: Box
    number: int | None = None
    text: str = ""


def _map(found: Survey, outer: Name, inner: Name, places: Arrange, within: Arrange) -> list[Shape]:
    """All tensors as boxes within boxes: the groups that `outer` names, in them those that `inner` names."""
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, weight in enumerate(found.weights):
        groups[outer(weight)][inner(weight)].append(number)
    sizes = [[_bytes(found, members) for members in group.values()] for group in groups.values()]
    boxes = places([sum(group) for group in sizes], Box(0, 0, WIDTH, HEIGHT))
    shapes: list[Shape] = []
    for (name, group), own, box in zip(groups.items(), sizes, boxes, strict=True):
        framed = box.inside(_GAP / 2)
        title = _title(framed, name, sum(own), found.total.nbytes)
        shapes += title
        inside = framed.inside(0.0, _TITLE if title else 0.0)
        for (label, members), place in zip(group.items(), within(own, inside), strict=True):
            shapes += _tensors(found, members, place.inside(0.4), "" if label in (name, *ROLES) else label)
    return shapes


def _bytes(found: Survey, members: Iterable[int]) -> int:
    return sum(found.weights[number].nbytes for number in members)


def _title(box: Box, name: str, nbytes: int, total: int) -> list[Shape]:
    """The name of a group with as much of its size as there is room for, if there is any."""
    texts = (f"{name} {amount(nbytes)}, {_share(nbytes, total)}", f"{name} {amount(nbytes)}", name)
    text = next((text for text in texts if len(text) * 7.4 < box.width), "")
    if box.height < 2 * _TITLE or not text:
        return []
    css = f"title {css_name(name)}" if name in ROLES else "title"
    return [Shape(css, Box(box.x + 1, box.y + 13, 0, 0), text=text)]


def _tensors(found: Survey, members: Sequence[int], box: Box, label: str) -> list[Shape]:
    """The tensors of a group, in full colour if a token reads them; else what it reads of them is a strip below."""
    weights = [found.weights[number] for number in members]
    shapes = []
    for number, weight, place in zip(members, weights, squarified([w.nbytes for w in weights], box), strict=True):
        own = place.inside(0.3 if min(place.width, place.height) > 3 else 0.0)
        if min(own.width, own.height) >= _SMALLEST:
            css = f"{css_name(weight.role)} read" if weight.share == 1 else css_name(weight.role)
            shapes.append(Shape(css, own, number))
    shares = {weight.share for weight in weights}
    if len(shares) == 1 and 0 < (share := shares.pop()) < 1:
        read = Box(box.x, box.y + box.height * (1 - share), box.width, box.height * share)
        shapes.append(Shape(f"{css_name(weights[0].role)} read", read))
    if label and box.width > 24 + 6 * len(label) and box.height > 28:
        css = "label on" if weights[0].share == 1 else "label"
        shapes.append(Shape(css, Box(box.x + 4, box.y + 12, 0, 0), text=label))
    return shapes
