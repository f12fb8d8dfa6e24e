"""Small expert files of odd sizes and extents, and what is in them."""

from pathlib import Path

import numpy as np

from penstock.experts.layout import Extent, Layer, TensorExtents, stacked
from penstock.ops.array import Spec

# a matrix of many blocks, sizes that end inside of one, one without a whole block, and one without anything
WIDE = (Spec((17, 3001), "uint32"), Spec((5, 33), "bfloat16"), Spec((9001,), "uint8"), Spec((0, 4), "float32"))
SMALL = (Spec((3, 7), "uint8"), Spec((2, 640), "uint32"))
LAYERS = (("layers.0.experts", WIDE, 5), ("layers.1.experts", SMALL, 9), ("layers.2.experts", WIDE, 3))
FILES = ("one.bin", "two.bin")


def write_files(folder: Path, rng: np.random.Generator, start: int = 13) -> list[Layer]:
    """Two files of random bytes with the experts of LAYERS: each array a stack, the last layer's in the second."""
    layers = layers_in(folder, start)
    for name in FILES:
        ends = [extent.start + extent.nbytes for layer in layers for part in layer.parts for extent in part.extents
                if extent.path.name == name]  # fmt: skip
        (folder / name).write_bytes(rng.bytes(max(ends)))
    return layers


def layers_in(folder: Path, start: int = 13) -> list[Layer]:
    """Where `write_files` puts them."""
    layers, at = [], dict.fromkeys(FILES, start)
    for number, (name, specs, count) in enumerate(LAYERS):
        parts = []
        for spec in specs:
            file = FILES[number == len(LAYERS) - 1]
            parts.append(stacked(folder / file, at[file], count, spec))
            at[file] += count * spec.nbytes
        layers.append(Layer(name, tuple(parts)))
    return layers


def scattered(path: Path, rng: np.random.Generator, count: int = 4) -> Layer:
    """A layer whose experts are stored one by one, their arrays in the opposite order, with small holes between."""
    extents: list[list[Extent]] = [[] for _ in WIDE]
    at = 5
    for expert in range(count):
        for part in reversed(range(len(WIDE))):
            extents[part].append(Extent(path, at, WIDE[part].nbytes))
            at += WIDE[part].nbytes + expert
        at += 10_000
    path.write_bytes(rng.bytes(at))
    return Layer("alone", tuple(TensorExtents(spec, tuple(own)) for spec, own in zip(WIDE, extents, strict=True)))


def stored(layer: Layer, expert: int) -> list[bytes]:
    """The arrays of an expert, as the files have them."""
    return [extent.path.read_bytes()[extent.start : extent.start + extent.nbytes] for extent in layer.extents(expert)]
