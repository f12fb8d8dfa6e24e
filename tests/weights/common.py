"""What the tests of checkpoints share: files built byte by byte, so that they can be wrong."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from penstock.quant import QuantizedTensor


def safetensors_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file from a header (JSON is made of anything but bytes), its data, and a header length that may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_config(folder: Path, **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "test"} | config))


def write_index(folder: Path, weight_map: Any, **metadata: Any) -> None:
    index = {"metadata": metadata, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def parts(path: str, q: QuantizedTensor) -> dict[str, np.ndarray]:
    """The three tensors of a quantized weight under their names."""
    return {f"{path}.weight": q.packed, f"{path}.scales": q.scales, f"{path}.biases": q.biases}
