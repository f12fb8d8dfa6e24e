"""penstock convert on this machine: checked against mlx-lm, then timed beside a plain copy of the same files.

    python benchmarks/bench_convert.py [--gigabytes 1] [--bits 4] [--folder DIR] [--json FILE]

A made-up Llama checkpoint in bfloat16 is written to a temporary folder, converted, and removed. The check is a small
model of the same kind: every tensor has to be that of `mlx_lm.convert`, bit for bit. The copy reads and writes the
checkpoint in pieces of 4 MB and flushes it to the disk, as convert does. GB/s are bytes read and written together.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import machine

from penstock.backends.cpu._threads import threads
from penstock.convert.run import Options, Report, convert

PIECE = 4 << 20


def write_model(folder: Path, dim: int, layers: int, vocab: int) -> Path:
    """A Llama checkpoint whose matrices repeat 16 million random numbers."""
    width, heads = 3 * dim, dim // 128 or 1
    rng = np.random.default_rng(0)
    drawn = (rng.standard_normal(1 << 24, np.float32) * dim**-0.5).astype(ml_dtypes.bfloat16)

    def array(*shape: int) -> np.ndarray:
        return np.resize(drawn, shape)

    tensors = {"model.embed_tokens.weight": array(vocab, dim), "lm_head.weight": array(vocab, dim)}
    tensors["model.norm.weight"] = array(dim)
    for n in range(layers):
        path = f"model.layers.{n}."
        for part in "qkvo":
            tensors[f"{path}self_attn.{part}_proj.weight"] = array(dim, dim)
        for part, shape in (("gate", (width, dim)), ("up", (width, dim)), ("down", (dim, width))):
            tensors[f"{path}mlp.{part}_proj.weight"] = array(*shape)
        for part in ("input", "post_attention"):
            tensors[f"{path}{part}_layernorm.weight"] = array(dim)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check(folder: Path, bits: int) -> None:
    """Stops unless a small model gets the tensors of mlx-lm."""
    import mlx_lm.utils

    source = write_model(folder / "small", 256, 2, 512)
    convert(source, folder / "ours", Options(quantize=True, q_bits=bits))
    with contextlib.redirect_stdout(io.StringIO()):
        model, config = mlx_lm.utils.load_model(source, lazy=True)
        model, _ = mlx_lm.utils.quantize_model(model, config, 64, bits)
        mlx_lm.utils.save_model(folder / "theirs", model)
    got, want = (load_file(folder / name / "model.safetensors") for name in ("ours", "theirs"))
    if got.keys() != want.keys() or any(got[name].tobytes() != want[name].tobytes() for name in want):
        raise SystemExit("convert: the tensors differ from those of mlx-lm; nothing was timed")


def copied(source: Path, target: Path) -> float:
    """Seconds of a plain copy, flushed."""
    began = time.perf_counter()
    with source.open("rb") as file, target.open("wb") as out:
        shutil.copyfileobj(file, out, PIECE)
        out.flush()
        os.fsync(out.fileno())
    seconds = time.perf_counter() - began
    target.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many runs counts")
    parser.add_argument("--folder", type=Path, help="where to work; by default that of temporary files")
    parser.add_argument("--json", type=Path, help="also write the rows and the machine to this file")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        check(folder, 4)
        layers = max(1, round((args.gigabytes * 1e9 / 2 - 2 * 32000 * 2048) / (13 * 2048 * 2048)))
        source = write_model(folder / "source", 2048, layers, 32000)
        file = source / "model.safetensors"
        size = file.stat().st_size
        kinds: list[tuple[str, Options]] = [("convert, dense", Options())]
        kinds += [(f"convert, {bits} bits", Options(quantize=True, q_bits=bits)) for bits in args.bits]
        print(f"{machine()['cpu']}, {threads()} threads, {size / 1e9:.2f} GB of bfloat16")
        print(f"{'what':<18} {'seconds':>8} {'Mweights/s':>10} {'GB/s':>6} {'of copy':>8}")
        rows: list[dict[str, Any]] = []

        def show(what: str, seconds: float, moved: int) -> None:
            rate = moved / seconds / 1e9
            base = rows[0]["GB_per_s"] if rows else rate
            row = {"what": what, "seconds": seconds, "Mweights_per_s": size / 2 / seconds / 1e6, "GB_per_s": rate}
            rows.append(row | {"share_of_copy": rate / base})
            print(f"{what:<18} {seconds:8.2f} {row['Mweights_per_s']:10.0f} {rate:6.2f} {rate / base:8.0%}", flush=True)

        show("copy", min(copied(file, folder / "copy") for _ in range(args.repeat)), 2 * size)
        for what, options in kinds:
            best: Report | None = None
            for _ in range(args.repeat):
                report = convert(source, folder / "made", options)
                shutil.rmtree(folder / "made")
                best = report if best is None or report.seconds < best.seconds else best
            assert best is not None
            show(what, best.seconds, best.source_nbytes + best.nbytes)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "bytes": size, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
