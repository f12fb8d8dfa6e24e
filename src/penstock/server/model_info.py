"""What the endpoints tell about a model, wherever it runs; and a model that runs in another process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from penstock.analysis.weights import distinct, expert_layers, walk
from penstock.models.gguf import open_gguf
from penstock.quant import QuantizedTensor
from penstock.text.gguf_tokenizer import gguf_tokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.weights.resolve import ResolvedModel

if TYPE_CHECKING:
    from penstock.api import LLM, Stats
    from penstock.engine.remote import RemoteScheduler
    from penstock.engine.replicas import Replicas


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of a model, and where it runs."""

    max_context: int
    max_positions: int
    vocab_size: int
    parameters: int
    quantization: str | None
    weight_bytes: int
    device: str
    expert_layers: list[int]  # numbers of the layers whose chosen experts are told; none where they are not

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def model_info(llm: LLM) -> ModelInfo:
    parameters, quantization = _parameters(llm)
    return ModelInfo(
        max_context=llm.max_context,
        max_positions=llm.config.max_positions,
        vocab_size=llm.config.vocab_size,
        parameters=parameters,
        quantization=quantization,
        weight_bytes=llm.stats().weight_bytes,
        device=llm.engine.device.name,
        expert_layers=expert_layers(walk(llm.engine.model)) if llm.engine.tells_experts else [],
    )


def _parameters(llm: LLM) -> tuple[int, str | None]:
    """How many numbers the weights stand for, and the bits of most of those that are quantized."""
    total, by_bits = 0, Counter[str]()
    for weight in distinct(llm.engine.model):
        total += weight.parameters
        if isinstance(weight.array, QuantizedTensor):
            mode = weight.array.mode
            by_bits[f"{weight.array.bits}-bit" if mode == "affine" else mode] += weight.parameters
    return total, by_bits.most_common(1)[0][0] if by_bits else None


class ServedModel(Protocol):
    """What the server needs of a model besides its scheduler: `penstock.LLM` has it."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_context(self) -> int: ...

    @property
    def config(self) -> Any: ...  # vocab_size, max_positions

    def stats(self) -> Stats: ...


class RemoteModel:
    """A model whose tokenizer is here and whose engines are in other processes, known once its scheduler is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.scheduler: RemoteScheduler | Replicas | None = None

    @property
    def info(self) -> ModelInfo:
        assert self.scheduler is not None
        return ModelInfo(**self.scheduler.ready.model)

    @property
    def config(self) -> ModelInfo:
        return self.info

    @property
    def max_context(self) -> int:
        return self.info.max_context

    def stats(self) -> Stats:
        from penstock.api import Stats

        assert self.scheduler is not None
        return Stats(**{"weight_bytes": self.info.weight_bytes, **self.scheduler.stats})


def info_of(model: ServedModel) -> ModelInfo:
    return model.info if isinstance(model, RemoteModel) else model_info(cast("LLM", model))


def read_tokenizer(model: ResolvedModel) -> Tokenizer:
    """The tokenizer of a model, without its weights. Raises CheckpointError."""
    if model.kind == "gguf":
        return gguf_tokenizer(open_gguf(model.path).file)
    return Tokenizer.from_folder(Path(model.path))
