"""Write an MLX checkpoint of any config.json with random weights: a large model to stream, without a download.

    python benchmarks/random_checkpoint.py qwen3.6-35b-a3b FOLDER --layers 12

The tokenizer is that of the demo model where its vocabulary is large enough, else one of made-up words, so that the
folder can be loaded and asked. Weights are written as they are drawn: memory stays below the size of one tensor.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from penstock import models
from penstock.cli.bench import layer_count
from penstock.dtypes import dtype_name
from penstock.models.config import first_layers
from penstock.models.random import Random, Shapes
from penstock.models.source import Weight
from penstock.quant import QuantizedTensor
from penstock.weights.resolve import resolve_model

_FORMAT = ("bits", "group_size")
_SPELLED = {"uint32": "U32", "bfloat16": "BF16", "float32": "F32", "float16": "F16"}


class _Named:
    """A source that passes on what another makes, and tells what it is called in a file."""

    layout = "mlx"

    def __init__(self, source: Random, prefix: str, told: Any) -> None:
        self._source, self._prefix = source, prefix
        self._tell, self._told = told, set[str]()
        self.formats: dict[str, tuple[int, int]] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._source

    def weight(self, path: str, *shape: int) -> Weight:
        made = self._source.weight(path, *shape)
        name = path if path == "lm_head" else self._prefix + path
        if isinstance(made, QuantizedTensor):
            self.formats[name] = made.bits, made.group_size
            for part, array in zip(("weight", "scales", "biases"), made.arrays, strict=True):
                self._once(f"{name}.{part}", array)
        else:
            self._once(f"{name}.weight", made)
        return made

    def vector(self, path: str, *shape: int) -> np.ndarray:
        made = self._source.vector(path, *shape)
        bare = path.endswith((".bias", "A_log", "dt_bias", "_bias", "layer_scalar"))
        self._once(self._prefix + path + ("" if bare else ".weight"), made)
        return made

    def _once(self, name: str, array: np.ndarray) -> None:
        if name not in self._told:  # parts of one tensor are asked for with its name
            self._told.add(name)
            self._tell(name, array)

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        return self.weight(path, *shape)

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        return self.weight(paths[0], *shape)


def write(config: Mapping[str, Any], folder: Path, seed: int = 0, eos: bool = False) -> int:
    """Write config.json, model.safetensors and a tokenizer; the bytes of the weights.

    eos: the last token ends a text, else none does.
    """
    folder.mkdir(parents=True)
    table = {"bits": 4, "group_size": 64, **config.get("quantization", {})}
    config = {**config, "quantization": table}
    if eos:
        config["eos_token_id"] = config.get("text_config", config)["vocab_size"] - 1
    family = models.family_of(dict(config))
    read = family.read_config(dict(config))
    entries: dict[str, Any] = {}
    end = 0

    def place(name: str, array: np.ndarray) -> None:
        nonlocal end
        start, end = end, end + array.nbytes
        dtype = _SPELLED[dtype_name(array.dtype)]
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]}

    # Shapes take no memory, so a first pass says where everything goes.
    outline = _Named(Shapes(config, seed), "model.", place)
    family.read_weights(outline, read)
    general = (table["bits"], table["group_size"])
    table |= {name: dict(zip(_FORMAT, own, strict=True)) for name, own in outline.formats.items() if own != general}
    header = json.dumps({"__metadata__": {"format": "mlx"}, **entries}).encode()
    header += b" " * (-len(header) % 4096)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        family.read_weights(_Named(Random(config, seed), "model.", lambda _, array: file.write(array.tobytes())), read)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    demo = resolve_model()
    if read.vocab_size > len(tokenizers.Tokenizer.from_file(str(demo.path / "tokenizer.json")).get_vocab()):
        (folder / "tokenizer.json").write_text(words(read.vocab_size).to_str())
        return end
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (file := demo.path / name).is_file():
            shutil.copy(file, folder)
    return end


def words(count: int) -> tokenizers.Tokenizer:
    """A tokenizer with printable ASCII, so that JSON can be written, and made-up words."""
    characters = ["Ġ", *map(chr, range(33, 127))]
    names = [*characters, *(f"Ġw{n}" for n in range(len(characters), count))][:count]
    vocabulary = {name: n for n, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="Ġ"))
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config.json, or the name of a shipped one")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", help="the first N, or all")
    parser.add_argument(
        "--eos", action="store_true", help="the last token ends a text: JSON schemas need one that does"
    )
    given = parser.parse_args()
    config = resolve_model(given.config, ["config"]).read_config()
    if given.layers is not None:
        config, _ = first_layers(config, layer_count(given.layers), given.config)
    written = write(config, given.folder, eos=given.eos)
    print(f"{given.folder}: {written / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
