"""A model small enough for the NumPy definitions: the first layer of the demo model, with its tokenizer."""

import json
import shutil
from pathlib import Path

import penstock.demo

DEMO = Path(penstock.demo.__file__).parent / "model"


def write_small_model(folder: Path, **changes: object) -> str:
    """Write it into a folder; `changes` are those of tokenizer_config.json (None removes a key). Its path."""
    folder.mkdir()
    for name in ("generation_config.json", "special_tokens_map.json", "tokenizer.json"):
        shutil.copy(DEMO / name, folder)
    (folder / "model.safetensors").symlink_to(DEMO / "model.safetensors")
    config = json.loads((DEMO / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((DEMO / "tokenizer_config.json").read_text()) | changes
    kept = {key: value for key, value in tokenizer.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    return str(folder)
