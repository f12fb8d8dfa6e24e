"""Make the demo model: a trained Qwen3.5 MoE checkpoint (Hugging Face layout, bf16) as a 4-bit MLX checkpoint.

    python tools/make_demo_model.py SOURCE HEAD src/penstock/demo/model

HEAD is a folder with the tensors `mtp.*` of the head that drafts. The result is what mlx-lm would write for the same
settings: 4-bit matrices in groups of 64, 8-bit routers, norm weights with their 1 added, the convolution turned. mlx-lm
loads it; the head is in mtp.safetensors, which it does not read.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import penstock
from penstock.quant import QuantizedTensor
from penstock.weights.checkpoint import Checkpoint

BITS, GROUP = 4, 64
EIGHT_BITS = ("mlp.gate", "shared_expert_gate")
OFFSET_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm", "mtp.norm")
OFFSET_NORMS += ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    checkpoint, head = Checkpoint.open(args.source), Checkpoint.open(args.head)
    args.target.mkdir(parents=True, exist_ok=True)
    exceptions: dict[str, dict[str, int]] = {}
    for file, tensors in (
        ("model.safetensors", converted(checkpoint, exceptions)),
        ("mtp.safetensors", converted(head, exceptions)),
    ):
        save_file(tensors, args.target / file, {"format": "mlx"})
        print(f"{args.target / file}: {sum(a.nbytes for a in tensors.values()) / 1e6:.1f} MB in {len(tensors)} tensors")
    config = {key: value for key, value in head.config.items() if key != "vision_config"}
    table = {"group_size": GROUP, "bits": BITS, "mode": "affine", **exceptions}
    config |= {"quantization": table, "quantization_config": table}
    (args.target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in COPIED:
        shutil.copyfile(args.source / name, args.target / name)


def converted(checkpoint: Checkpoint, exceptions: dict[str, dict[str, int]]) -> dict[str, np.ndarray]:
    """The tensors of the text model or of its head as mlx-lm has them; modules of other bits go into `exceptions`."""
    tensors: dict[str, np.ndarray] = {}

    def put(path: str, array: np.ndarray) -> None:
        if array.ndim < 2 or path.endswith("conv1d"):
            name = path if path.endswith(("A_log", "dt_bias")) else f"{path}.weight"
            tensors[name] = np.ascontiguousarray(array)
            return
        bits = 8 if path.endswith(EIGHT_BITS) else BITS
        if bits != BITS:
            exceptions[path] = {"group_size": GROUP, "bits": bits}
        made: QuantizedTensor = penstock.quantize(array, bits, GROUP)
        tensors.update({f"{path}.weight": made.packed, f"{path}.scales": made.scales, f"{path}.biases": made.biases})

    for name in sorted(checkpoint.names):
        if not name.startswith(("model.language_model.", "lm_head", "mtp.")):
            continue
        path = name.removesuffix(".weight").replace("model.language_model.", "language_model.model.")
        path = path if path.startswith("language_model.") else f"language_model.{path}"
        array = np.array(checkpoint.array(name))
        if path.endswith(OFFSET_NORMS):
            array = (array.astype(np.float32) + np.float32(1)).astype(array.dtype)
        if path.endswith("conv1d"):
            array = array.swapaxes(1, 2)
        if path.endswith("experts.gate_up_proj"):
            half = array.shape[1] // 2
            base = path.replace("experts.gate_up_proj", "switch_mlp.")
            put(f"{base}gate_proj", array[:, :half].copy())
            put(f"{base}up_proj", array[:, half:].copy())
        else:
            put(path.replace(".experts.", ".switch_mlp."), array)
    return tensors


if __name__ == "__main__":
    main()
