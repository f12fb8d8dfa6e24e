"""`convert` with mlx-lm's arguments: a model as an MLX folder, the same tensors bit for bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from penstock.convert.recipe import MIXED
from penstock.convert.run import Options
from penstock.convert.run import convert as run
from penstock.dtypes import FLOATS
from penstock.errors import InvalidArgument

__all__ = ["MODEL_CONVERSION_DTYPES", "QUANT_RECIPES", "convert"]

QUANT_RECIPES = list(MIXED)
MODEL_CONVERSION_DTYPES = list(FLOATS)


def convert(
    hf_path: str | os.PathLike[str],
    mlx_path: str | os.PathLike[str] = "mlx_model",
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str = "affine",
    dtype: str | None = None,
    upload_repo: str | None = None,
    revision: str | None = None,
    dequantize: bool = False,
    quant_predicate: Callable[..., Any] | str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write a model as an MLX folder, which must not exist; quantize rounds weights, dequantize makes them dense.

    q_bits and q_group_size are those of q_mode unless given, affine 4 and 64; quant_predicate: one of QUANT_RECIPES, or
    a .json file of patterns (docs/convert.md). Without quantize the four have no meaning, as in mlx-lm. Refused are a
    function as quant_predicate and upload_repo. Raises InvalidArgument, CheckpointError.
    """
    if upload_repo is not None:
        raise InvalidArgument(
            f"convert: upload_repo is {upload_repo!r:.60}, expected None: penstock uploads nothing; "
            f"`hf upload {upload_repo} {os.fspath(mlx_path)}` does"
        )
    if callable(quant_predicate):
        raise InvalidArgument(
            "convert: quant_predicate is a function, expected one of "
            f"{', '.join(QUANT_RECIPES)} or a .json file of patterns"
        )
    if trust_remote_code:
        logging.getLogger("penstock").warning("convert: trust_remote_code: no code from model folders is run")
    rounding: dict[str, Any] = {"q_bits": q_bits, "q_group_size": q_group_size, "q_mode": q_mode}
    rounding = {**rounding, "quant_predicate": quant_predicate} if quantize else {}
    options = Options(quantize=quantize, dtype=dtype, dequantize=dequantize, **rounding)
    report = run(hf_path, mlx_path, options, revision=revision, notify=lambda remark: print(f"[INFO] {remark}"))
    size = f"{report.parameters / 1e6:.1f} M parameters, {report.bits_per_weight:.3f} bits per weight"
    print(f"[INFO] {report.target}: {size}")
