"""penstock convert: models of Hugging Face and GGUF files as MLX folders, dense or quantized."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli._foreign import TRUST, refused
from penstock.cli._model import UsageError, complete_model, note, verb
from penstock.cli._output import print_json, progress_bar
from penstock.errors import InvalidArgument
from penstock.units import amount

_FOREIGN = (TRUST, refused("--upload-repo", "hf upload OWNER/NAME FOLDER puts a folder on the hub"))


@verb(_FOREIGN)
def convert(
    model: Annotated[
        str,
        typer.Option(
            "--hf-path", "--model", metavar="M", help="Folder, .gguf file or hub id.", autocompletion=complete_model
        ),
    ],
    mlx_path: Annotated[str, typer.Option("--mlx-path", metavar="FOLDER", help="Where to write; must not exist.")] = (
        "mlx_model"
    ),
    quantize: Annotated[bool, typer.Option("-q", "--quantize", help="Quantize the matrices.")] = False,
    q_bits: Annotated[
        int | None, typer.Option("--q-bits", metavar="N", help="Bits of a weight: 1, 2, 3, 4 (default), 5, 6 or 8.")
    ] = None,
    q_group_size: Annotated[
        int | None, typer.Option("--q-group-size", metavar="N", help="Weights that share a scale: 32, 64, 128.")
    ] = None,
    q_mode: Annotated[
        Literal["affine", "mxfp4", "mxfp8", "nvfp4"] | None,
        typer.Option("--q-mode", help="How weights are rounded: affine (default), or to small floats."),
    ] = None,
    quant_predicate: Annotated[
        str | None,
        typer.Option(
            "--quant-predicate",
            metavar="RECIPE",
            help="mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6, or a .json file of patterns.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"] | None,
        typer.Option("--dtype", help="Of what is not quantized; by default as config.json says."),
    ] = None,
    dequantize: Annotated[bool, typer.Option("-d", "--dequantize", help="Make a quantized model dense.")] = False,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Round again what is quantized already, in another way.")
    ] = False,
    calibrate: Annotated[
        str | None,
        typer.Option("--calibrate", metavar="FILE", help="Choose codes by what this text lets the model compute."),
    ] = None,
    calibrate_tokens: Annotated[
        int | None, typer.Option("--calibrate-tokens", metavar="N", min=1, help="Tokens of it to look at: 16384.")
    ] = None,
    keep_mtp: Annotated[
        bool, typer.Option("--keep-mtp", help="Keep the layers that predict further tokens, in mtp.safetensors.")
    ] = False,
    mtp: Annotated[
        bool, typer.Option("--mtp", help="Write the head that drafts alone, as a folder for --draft-model.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use only what has been downloaded before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Write a model as an MLX folder, which penstock and mlx-lm load; -q quantizes it, -d makes it dense again.

    Options are those of mlx_lm.convert, and so are the tensors, bit for bit. Rows are read, quantized and written in
    small pieces, so that a model may be larger than the memory. The work is done in FOLDER.converting, which gets its
    final name at the end; after an interruption the same command goes on. A .gguf file of Q4_0, Q4_1 or Q8_0 becomes
    groups of 32 without loss.

    \b
    Examples:
      penstock convert --model Qwen/Qwen3-0.6B -q --mlx-path qwen3-4bit
      penstock convert --model bf16-folder -q --q-mode mxfp4
      penstock convert --model bf16-folder -q --quant-predicate mixed_3_6
      penstock convert --model bf16-folder -q --q-bits 3 --calibrate book.txt
      penstock convert --model qwen3-4bit -d --mlx-path qwen3-dense
      penstock convert --model bf16-folder -q --mtp --mlx-path drafter
      penstock convert --model llama-q4_0.gguf --mlx-path llama-4bit
    """
    from penstock.convert.run import Options
    from penstock.convert.run import convert as run

    try:
        options = Options(
            quantize=quantize,
            q_bits=q_bits,
            q_group_size=q_group_size,
            q_mode=q_mode,
            quant_predicate=quant_predicate,
            dtype=dtype,
            dequantize=dequantize,
            requantize=requantize,
            keep_mtp=keep_mtp,
            mtp=mtp,
            calibrate=calibrate,
            calibrate_tokens=calibrate_tokens,
        )
    except InvalidArgument as error:
        raise UsageError(str(error)) from None
    try:
        report = run(
            model, mlx_path, options, revision=revision, offline=offline or None, progress=progress_bar, notify=note
        )
    except KeyboardInterrupt:
        left = Path(mlx_path).expanduser()
        left = left.with_name(f"{left.name}.converting")
        kept = f"finished files are in {left}, the same command goes on" if left.exists() else "nothing was written"
        note(f"penstock: interrupted; {kept}")
        raise
    if as_json:
        print_json(asdict(report) | {"bits_per_weight": report.bits_per_weight})
        return
    files = "1 file" if report.files == 1 else f"{report.files} files"
    kept = f" ({report.kept} from before)" if report.kept else ""
    print(
        f"{report.target}: {report.parameters / 1e6:.1f} M parameters, {amount(report.nbytes)} in {files}{kept}, "
        f"{report.bits_per_weight:.3f} bits per weight, {report.seconds:.1f} s"
    )
    if (found := report.perplexity) is not None:
        print(
            f"perplexity on {found.windows} x {found.length} tokens that were not looked at: {found.dense:.3f} dense, "
            f"{found.plain:.3f} rounded plainly, {found.calibrated:.3f} calibrated"
        )
