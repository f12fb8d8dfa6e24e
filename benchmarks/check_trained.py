"""A trained checkpoint against transformers in float32: logits, perplexity, and what int8 activations change.

    python benchmarks/check_trained.py FOLDER --text FILE [--expected 21.98] [--bits 4] [--json FILE]

FOLDER is a Hugging Face checkpoint (float32 answers come from transformers), FILE plain text that it was not trained
on. Checked are the error of the logits on 200 and 1000 tokens (max |difference| / max |logit|), and perplexity over the
first rows of 256 tokens, no BOS, the 255 predictions of each. A dense checkpoint has no quantized products, so for the
int8 rows mlx-lm converts it, and int8 is compared with exact products of the same quantized weights. Ends with status 1
if anything is out of bounds.

    python benchmarks/check_trained.py FOLDER --text FILE --device cuda

compares a GPU (in float32 and bfloat16) with exact products on the CPU instead; FOLDER may be any checkpoint.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import machine

import penstock
from penstock.api import LLM

ROW = 256
SHORT, LONG = 1e-5, 5e-5  # error of the logits up to 200 and up to 1000 tokens
PERPLEXITY = 0.005  # relative
COSINE, COSINE_SHARE, ARGMAX = 0.999, 0.95, 0.97


def transformers_logits(folder: Path) -> Callable[[Sequence[int]], np.ndarray]:
    """The model in float32, as a function of token ids."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    nested = "text_config" in json.loads((folder / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)

    def logits(tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([list(tokens)])).logits[0].numpy()

    return logits


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())


def losses(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """−log p of each token after the first."""
    x = logits[:-1].astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return np.log(np.exp(x).sum(axis=1)) - x[np.arange(len(x)), list(tokens[1:])]


def perplexity(logits: Callable[[Sequence[int]], np.ndarray], rows: Sequence[Sequence[int]]) -> float:
    return float(np.exp(np.mean([losses(logits(row), row) for row in rows])))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sum(a * b, axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def quantized(folder: Path, target: Path, bits: int) -> tuple[LLM, LLM]:
    """The same model with quantized weights, with exact products and with int8 activations."""
    import mlx_lm

    mlx_lm.convert(str(folder), str(target), quantize=True, q_bits=bits, q_group_size=64)
    exact, int8 = (penstock.load(target, device="cpu", activations=kind) for kind in ("float32", "int8"))
    return exact, int8


def check_gpu(folder: Path, exact: LLM, rows: Sequence[Sequence[int]], checks: "Checks") -> None:
    """The model on a GPU against exact products on the CPU: float32 to the last digits, bfloat16 as promised."""
    long = [token for row in rows for token in row][:1000]
    want = exact.logits(long)
    full = penstock.load(folder, device="cuda", dtype="float32").logits(long)
    checks.most("float32: error of the logits, 200 tokens", error(full[:200], want[:200]), SHORT)
    checks.most("float32: error of the logits, 1000 tokens", error(full, want), LONG)
    half = penstock.load(folder, device="cuda")
    a, b = (np.concatenate([model.logits(row) for row in rows]) for model in (exact, half))
    predicted = [losses(each, list(row)) for each, row in zip(np.split(b, len(rows)), rows, strict=True)]
    base = perplexity(exact.logits, rows)
    checks.note("perplexity, exact on the CPU", base)
    checks.near("perplexity, bfloat16", float(np.exp(np.mean(predicted))), base, PERPLEXITY)
    checks.least(f"bfloat16: share with cosine ≥ {COSINE}", float(np.mean(cosines(a, b) >= COSINE)), COSINE_SHARE)
    checks.least("bfloat16: equal argmax", float(np.mean(a.argmax(1) == b.argmax(1))), ARGMAX)


class Checks:
    """Rows of the table: what was measured, what is allowed, whether it is."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def most(self, name: str, value: float, bound: float) -> None:
        self.rows.append({"check": name, "value": value, "bound": f"≤ {bound:g}", "ok": value <= bound})

    def least(self, name: str, value: float, bound: float) -> None:
        self.rows.append({"check": name, "value": value, "bound": f"≥ {bound:g}", "ok": value >= bound})

    def near(self, name: str, value: float, wanted: float, share: float) -> None:
        ok = abs(value / wanted - 1) <= share
        self.rows.append({"check": name, "value": value, "bound": f"{wanted:.3f} ± {share:.1%}", "ok": ok})

    def note(self, name: str, value: float) -> None:
        self.rows.append({"check": name, "value": value, "bound": "", "ok": True})

    def show(self) -> None:
        table = Table("check", "value", "bound", "", title="trained checkpoint")
        for row in self.rows:
            table.add_row(row["check"], f"{row['value']:.6g}", row["bound"], "ok" if row["ok"] else "OUT OF BOUNDS")
        Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--expected", type=float, help="perplexity of the checkpoint as its README states it")
    parser.add_argument("--rows", type=int, default=24, help="rows of 256 tokens for the perplexity")
    parser.add_argument("--bits", type=int, default=4, help="of the weights in the int8 checks; 0 leaves them out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU against the CPU")
    parser.add_argument("--json", type=Path, help="also write the rows and the machine to this file")
    args = parser.parse_args()

    exact = penstock.load(args.folder, device="cpu", activations="float32")
    tokens = exact.tokenizer.encode(args.text.read_text(encoding="utf-8"))
    rows = [tokens[start : start + ROW] for start in range(0, args.rows * ROW, ROW)]
    if len(rows[-1]) < ROW:
        raise SystemExit(f"{args.text}: has {len(tokens)} tokens, expected at least {args.rows * ROW}")
    checks = Checks()
    if args.device == "cuda":
        check_gpu(args.folder, exact, rows, checks)
    else:
        check_cpu(args, exact, tokens, rows, checks)
    checks.show()
    if args.json:
        about = {"model": args.folder.name, "machine": machine(), "rows": checks.rows}
        args.json.write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n")
    sys.exit(0 if all(row["ok"] for row in checks.rows) else 1)


def check_cpu(
    args: argparse.Namespace, exact: LLM, tokens: Sequence[int], rows: Sequence[Sequence[int]], checks: Checks
) -> None:
    """The model on the CPU against transformers, and int8 activations against exact products."""
    oracle = transformers_logits(args.folder)
    want = oracle(tokens[:1000])
    got = exact.logits(tokens[:1000])
    checks.most("error of the logits, 200 tokens", error(got[:200], want[:200]), SHORT)
    checks.most("error of the logits, 1000 tokens", error(got, want), LONG)
    checks.least("equal argmax, 1000 tokens", float(np.mean(got.argmax(1) == want.argmax(1))), 0.999)
    stated = args.expected or perplexity(oracle, rows)
    checks.near("perplexity, exact", perplexity(exact.logits, rows), stated, PERPLEXITY)
    rounded = penstock.load(args.folder, device="cpu", activations="int8")
    checks.near("perplexity, int8 activations", perplexity(rounded.logits, rows), stated, PERPLEXITY)

    if args.bits:
        with tempfile.TemporaryDirectory() as scratch:
            same, int8 = quantized(args.folder, Path(scratch) / "model", args.bits)
            few = rows[: max(1, len(rows) // 4)]
            a, b = (np.concatenate([model.logits(row) for row in few]) for model in (same, int8))
            name = f"{args.bits}-bit weights"
            base = perplexity(same.logits, rows)
            checks.note(f"perplexity, {name}, exact", base)
            checks.near(f"perplexity, {name}, int8", perplexity(int8.logits, rows), base, PERPLEXITY)
            checks.least(
                f"{name}, int8: share with cosine ≥ {COSINE}", float(np.mean(cosines(a, b) >= COSINE)), COSINE_SHARE
            )
            checks.least(f"{name}, int8: equal argmax", float(np.mean(a.argmax(1) == b.argmax(1))), ARGMAX)


if __name__ == "__main__":
    main()
