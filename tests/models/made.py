"""Random models of the families around transformers' own classes, written in the layout of the released files.

transformers makes the modules and saves them; the values come from here, are bfloat16 numbers, and keep the residual
branches small, so that a layer does not amplify the rounding of the one before it. transformers and mlx-lm are imported
where they are needed: they take seconds.
"""

import functools
import itertools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.api import LLM
from tests.models.common import error, some_tokens, write_tokenizer

# max |difference| / max |logit|: what penstock promises is 1e-5 up to 200 tokens and 5e-5 up to 1000
SHORT, LONG = 5e-6, 2e-5


class Case(NamedTuple):
    """A model folder and what an oracle answers to some tokens, in float32."""

    folder: Path
    tokens: list[int]
    want: np.ndarray


def values(name: str, shape: Sequence[int], factors: Mapping[str, float], seed: int) -> np.ndarray:
    """Values of one tensor by its name, times the factor of the first of `factors` that the name ends with."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    drawn = rng.standard_normal(shape)
    end = name.removesuffix(".weight")
    if name.endswith(("per_expert_scale", "layer_scalar")):
        made = rng.uniform(0.6, 1.4, shape)
    elif name.endswith(("e_score_correction_bias", "expert_bias")):
        made = 0.2 * drawn
    elif name.endswith(".bias"):
        made = 0.3 * drawn
    elif len(shape) == 1:  # norms, and the scale of Gemma's router
        made = 1 + 0.2 * drawn
    elif end.endswith("embed_tokens"):
        made = drawn
    elif end.endswith("router.proj"):
        made = 2 * drawn  # its input is short
    elif end.endswith(("mlp.gate", "feed_forward.gate")):
        made = 2 * shape[-1] ** -0.5 * drawn
    else:
        made = shape[-1] ** -0.5 * drawn
    return made * next((factor for part, factor in factors.items() if end.endswith(part)), 1.0)


def fill(model: Any, factors: Mapping[str, float], seed: int) -> None:
    """Draw all weights of a torch model, each a bfloat16 number."""
    import torch

    tied = model.config.get_text_config().tie_word_embeddings
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not (tied and name == "lm_head.weight"):
                drawn = torch.from_numpy(values(name, tensor.shape, factors, seed)).to(torch.bfloat16)
                tensor.copy_(drawn)


def torch_model(folder: Path, load: bool = False) -> Any:
    """The float32 model of a folder's config.json, with `load` also of its weights. Skips the test without torch."""
    torch = pytest.importorskip("torch")
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(folder)
    nested = "text_config" in json.loads((folder / "config.json").read_text())
    kind: Any = transformers.AutoModelForCausalLM
    if (
        nested or type(config) not in kind._model_mapping
    ):  # where transformers has the text model of Mistral Small 4, too
        kind = transformers.AutoModelForImageTextToText
    options = {"dtype": torch.float32, "experts_implementation": "eager"}  # which takes any width
    if load:
        model, about = kind.from_pretrained(folder, output_loading_info=True, **options)
        assert not about["missing_keys"] and not about["mismatched_keys"], about
        return model
    return kind.from_config(config, **options).eval()


def torch_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float().numpy()


def save(model: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """The model in bfloat16, names and layout as transformers writes them, with `config` as it was given."""
    import torch

    biases = {
        name: value.clone()
        for name, value in model.named_buffers()
        if name.endswith(("correction_bias", "expert_bias"))
    }
    model.to(torch.bfloat16)
    for name, value in biases.items():  # float32 in the released files
        model.get_buffer(name).data = value
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)


def make(
    folder: Path,
    config: Mapping[str, Any],
    factors: Mapping[str, float],
    count: int = 600,
    seed: int = 3,
    change: Callable[[Any], None] | None = None,
) -> Case:
    """A random model of a config and the logits of transformers; `change` edits the torch model before either."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = torch_model(folder)
    fill(model, factors, seed)
    if change is not None:
        change(model)
    tokens = some_tokens(count, seed=count)
    want = torch_logits(model, tokens)
    save(model, folder, config)
    return Case(folder, tokens, want)


FOUR = {"quantize": True, "q_bits": 4, "q_group_size": 32}


def converted(case: Case, folder: Path, count: int = 200, **options: Any) -> Case:
    """The model of a case as mlx-lm converts it, and what mlx-lm answers with everything in float32."""
    import mlx_lm

    mlx_lm.convert(str(case.folder), str(folder), **options)
    tokens = case.tokens[:count]
    return Case(folder, tokens, mlx_logits(folder, tokens))


def mlx_logits(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    """Scales and biases become float32 with the rest, which changes no value, and so does every product."""
    import mlx.core as mx
    import mlx_lm.utils

    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([list(tokens)]))[0])


# -- penstock --------------------------------------------------------------------------------------------------------


@functools.cache
def load(folder: Path, device: str = "cpu", activations: str = "float32") -> LLM:
    return penstock.load(folder, device=device, activations=activations)


def reference_error(case: Case, count: int = 60) -> float:
    """Of the definitions, loaded anew, so that what a test has replaced counts."""
    llm = penstock.load(case.folder, device="reference", activations="float32")
    return error(llm.logits(case.tokens[:count]), case.want[:count])


def in_pieces(llm: LLM, tokens: Sequence[int], cuts: Sequence[int]) -> np.ndarray:
    """Logits after each token, from one prefill per piece."""
    engine = llm.engine
    sequence = engine.open()
    edges = [0, *cuts, len(tokens)]
    pieces = [engine.prefill(sequence, tokens[a:b], every=True) for a, b in itertools.pairwise(edges)]
    engine.close(sequence)
    return np.concatenate(pieces)


def decoded(llm: LLM, tokens: Sequence[int], prompt: int) -> np.ndarray:
    """Logits after each token from the last of the prompt on, token by token."""
    engine = llm.engine
    sequence = engine.open()
    rows = [engine.prefill(sequence, tokens[:prompt])] if prompt else []
    rows += [engine.decode([sequence], [token])[0] for token in tokens[prompt:]]
    engine.close(sequence)
    return np.array(rows)


def check_several(llm: LLM, lengths: Sequence[int], steps: int = 4) -> None:
    """Sequences decoded together get the bits that each gets alone."""
    engine = llm.engine
    texts = [some_tokens(length + steps, seed=n) for n, length in enumerate(lengths)]
    alone = [decoded(llm, text, length)[1:] for text, length in zip(texts, lengths, strict=True)]
    together = [engine.open() for _ in lengths]
    for sequence, text, length in zip(together, texts, lengths, strict=True):
        engine.prefill(sequence, text[:length])
    for step in range(steps):
        rows = engine.decode(together, [text[length + step] for text, length in zip(texts, lengths, strict=True)])
        for row, expected in zip(rows, alone, strict=True):
            np.testing.assert_array_equal(row, expected[step])
    for sequence in together:
        engine.close(sequence)


def check_cosines(got: np.ndarray, want: np.ndarray) -> None:
    """int8 activations: nearly all rows point the same way, and something was rounded."""
    cosines = np.sum(got * want, axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert np.mean(cosines >= 0.995) >= 0.95 and cosines.min() >= 0.95
    assert np.mean(got.argmax(axis=1) == want.argmax(axis=1)) >= 0.9
    assert error(got, want) > SHORT


class With:
    """`penstock.ops` with some ops replaced."""

    def __init__(self, **replaced: Any) -> None:
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)
