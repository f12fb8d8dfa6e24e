"""mlx-lm on a made-up 4-bit model: tokens per second of reading a prompt and of writing, as `penstock bench --random`.

    python benchmarks/peers/mlx_lm.py qwen3.6-35b-a3b --layers 8 -p 512 -n 128 -d 0,4096 --json mlx.json

Codes are drawn at random in their packed form: arrays of MLX are lazy, so the dense model is described, never made.
Routers take the 8 bits that mlx-lm gives them. Timed is mlx-lm's own loop (generate_step, greedy). Needs mlx-lm.
"""

import copy
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import peer

sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]  # its name is mine
try:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.generate import generate_step, generation_stream
    from mlx_lm.models.cache import make_prompt_cache
except ImportError as error:
    how = "pip install mlx-lm and 'mlx[cuda]' (NVIDIA GPU) or 'mlx[cpu]'"
    peer.stop(f"mlx-lm is not installed here ({error}); {how}", 2)

NORMS = ("norm", "layernorm", "norm_1", "norm_2", "layernorm_1", "layernorm_2")


def build(config: dict[str, Any], dtype: Any) -> Any:
    """The mlx-lm model of a config with random quantized weights, made one array at a time."""
    kind, vocab = config["model_type"], peer.text_config(config)["vocab_size"]
    try:
        module = importlib.import_module(f"mlx_lm.models.{kind}")
    except ModuleNotFoundError:
        peer.stop(f"mlx-lm {peer.versions('mlx-lm').get('mlx-lm')}: does not know the model_type {kind!r}")
    # a copy: some families write into the config; and vocab_size on top, where some look for it
    model = module.Model(module.ModelArgs.from_dict({"vocab_size": vocab} | copy.deepcopy(config)))
    table = config.get("quantization", {})
    group_size, bits = table.get("group_size", 64), table.get("bits", 4)
    own = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def choice(path: str, module: Any) -> Any:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
        return fits and own(path, module)

    nn.quantize(model, group_size, bits, class_predicate=choice)
    cast = getattr(model, "cast_predicate", lambda path: True)
    for path, array in made_up(model, dtype, cast):
        mx.eval(array)
        model.update(tree_unflatten([(path, array)]))
    model.eval()
    return model


def made_up(model: Any, dtype: Any, cast: Any) -> Iterator[tuple[str, Any]]:
    """A random array for every lazy one of a model. Scales keep the activations tame."""
    rng = np.random.Generator(np.random.SFC64(0))
    quantized = {path: module for path, module in model.named_modules() if "scales" in module}
    for path, lazy in tree_flatten(model.parameters()):
        owner, _, name = path.rpartition(".")
        shape = lazy.shape
        if (module := quantized.get(owner)) is not None and name in ("weight", "scales", "biases"):
            if name == "weight":
                yield path, mx.array(rng.integers(0, 2**32, shape, np.uint32))
                continue
            width = module.scales.shape[-1] * module.group_size
            scale = 0.7 * 12**0.5 / 2**module.bits * width**-0.5  # weights of standard deviation 0.7 · K^(-1/2)
            yield path, mx.full(shape, scale if name == "scales" else -scale * (2**module.bits - 1) / 2, dtype)
        elif owner.endswith(NORMS) or "scal" in name:
            yield path, mx.ones(shape, dtype)
        else:
            noise = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5 if len(shape) > 1 else 0.5)
            yield path, mx.array(noise).astype(dtype if cast(path) else mx.float32)


class MlxLm:
    """A model and mlx-lm's loop around it."""

    def __init__(self, model: Any, vocab: int) -> None:
        self.model, self.vocab = model, vocab

    def context(self, tokens: Sequence[int]) -> Any:
        made = make_prompt_cache(self.model)
        if tokens:
            self.read(made, tokens)
        return made

    def copy(self, context: Any) -> Any:
        return copy.deepcopy(context)

    def read(self, context: Any, tokens: Sequence[int]) -> None:
        for _ in generate_step(mx.array(tokens), self.model, max_tokens=0, prompt_cache=context):
            pass

    def write(self, context: Any, tokens: Sequence[int]) -> None:
        # The first step takes a token of ours, the others what came out; the last one is started but not awaited.
        first = mx.array(tokens[:1])
        for _ in generate_step(first, self.model, max_tokens=len(tokens) - 1, prompt_cache=context):
            pass
        mx.synchronize(generation_stream)

    def check(self) -> None:
        """Stops the program unless logits have the vocabulary's size, are finite and differ."""
        logits = self.model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(self.model))[0, -1].astype(mx.float32)
        if logits.shape != (self.vocab,) or not mx.isfinite(logits).all().item() or not mx.std(logits).item() > 0:
            peer.stop(f"mlx-lm: logits of shape {logits.shape}, expected {self.vocab} finite numbers that differ")


def backend() -> str:
    if mx.default_device() == mx.Device(mx.cpu):
        return "CPU"
    return "METAL" if mx.metal.is_available() else "CUDA"


def main(argv: list[str] | None = None) -> None:
    options = peer.parser(__doc__.splitlines()[0])
    options.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        help="of activations and scales; bfloat16 on a GPU, on a CPU float32, which MLX computes much faster there",
    )
    args = options.parse_args(argv)
    tests = peer.planned(args)
    name, config = peer.read_config(args.config, args.layers)
    dtype = args.dtype or ("float32" if backend() == "CPU" else "bfloat16")
    model = build(config, getattr(mx, dtype))
    runner = MlxLm(model, peer.text_config(config)["vocab_size"])
    runner.check()
    facts = {
        "model": name,
        "model_type": config["model_type"],
        "model_size": sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        "model_n_params": parameters(model),
        "backend": backend(),
        "n_threads": None,  # MLX has no say in them
        "dtype": dtype,
    }
    report = peer.Report("mlx-lm", config, peer.versions("mlx-lm", "mlx"), args.json)
    for test in tests:
        report.add(peer.row(test, peer.seconds(runner, test, args.repetitions), **facts))


def parameters(model: Any) -> int:
    """Weights of a model; of quantized ones the codes count, not their scales."""
    total = 0
    for _, module in model.named_modules():
        for name, array in module.items():
            if isinstance(array, mx.array) and not ("scales" in module and name in ("scales", "biases")):
                total += array.size * (32 // module.bits if "scales" in module and name == "weight" else 1)
    return total


if __name__ == "__main__":
    main()
