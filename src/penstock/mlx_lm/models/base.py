"""What `load` returns in place of mlx-lm's model: a loaded penstock model, which can also be called for logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.api import LLM
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.mlx_lm._arrays import as_numpy
from penstock.mlx_lm.models.cache import PromptCache, make_prompt_cache
from penstock.models.family import ModelConfig


class Model:
    """A model for the functions of this package. llm: penstock's own; config: what config.json says.

    Weights cannot be looked at or changed: what mlx-lm does with parameters (training, fusing, saving) is not here.
    """

    def __init__(self, llm: LLM, config: Mapping[str, Any]) -> None:
        self.llm = llm
        self.config = dict(config)

    def __repr__(self) -> str:
        return f"Model({self.llm!r})"

    @property
    def args(self) -> ModelConfig:
        return self.llm.config

    @property
    def model_type(self) -> str:
        return self.llm.config.model_type

    @property
    def layers(self) -> range:
        """Numbers of the layers: `len(model.layers)` is how many there are."""
        return range(self.llm.engine.layers)

    def make_cache(self) -> PromptCache:
        return make_prompt_cache(self)

    def __call__(self, inputs: Any, cache: PromptCache | None = None, input_embeddings: Any = None) -> np.ndarray:
        """Logits float32 [B, T, V] after each of the token ids [B, T]; with a cache B is 1, and it goes on from there.

        Raises ShapeError for other shapes, InvalidArgument for input_embeddings.
        """
        if input_embeddings is not None:
            raise InvalidArgument("model: input_embeddings is not supported by penstock, expected token ids alone")
        ids = as_numpy(inputs)
        if ids.ndim != 2 or ids.dtype.kind not in "iu" or (cache is not None and len(ids) != 1):
            found = f"{ids.dtype} of shape {ids.shape}"
            raise ShapeError(
                f"model: inputs is {found}, expected token ids [B, T]{', B 1' if cache is not None else ''}"
            )
        if cache is None:
            return np.stack([self.llm.logits(row.tolist()) for row in ids])
        session = cache.session_of(self.llm)
        rows = []
        for token in ids[0].tolist():
            session.append([token])
            rows.append(np.array(session.logits))
        return np.stack(rows)[None] if rows else np.empty((1, 0, self.llm.config.vocab_size), np.float32)


def llm_of(model: Any) -> LLM:
    """The penstock model behind what a caller gives. Raises DTypeError for anything else."""
    if isinstance(model, LLM):
        return model
    if isinstance(model, Model):
        return model.llm
    raise DTypeError(f"model is a {type(model).__name__}, expected what penstock.mlx_lm.load returned")
