"""mlx-lm's names on penstock: a notebook changes its import line alone.

    from penstock.mlx_lm import load, generate

`load`, `generate`, `stream_generate`, `batch_generate` and `convert` take mlx-lm's arguments and give its results, with
NumPy arrays where it has its own; the modules `sample_utils`, `models.cache`, `tokenizer_utils`, `utils` and `generate`
have their names, which are all here as well. What penstock lacks is refused by name. docs/mlx-lm.md has the rest.
"""

from penstock._version import __version__
from penstock.mlx_lm import models, sample_utils, tokenizer_utils, utils
from penstock.mlx_lm.convert import convert
from penstock.mlx_lm.generate import (
    BatchResponse,
    BatchStats,
    GenerationResponse,
    batch_generate,
    generate,
    generate_step,
    stream_generate,
)
from penstock.mlx_lm.models.base import Model
from penstock.mlx_lm.models.cache import (
    PromptCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from penstock.mlx_lm.sample_utils import make_logits_processors, make_sampler
from penstock.mlx_lm.tokenizer_utils import TokenizerWrapper
from penstock.mlx_lm.utils import load, load_config, load_tokenizer

__all__ = [
    "BatchResponse",
    "BatchStats",
    "GenerationResponse",
    "Model",
    "PromptCache",
    "TokenizerWrapper",
    "__version__",
    "batch_generate",
    "can_trim_prompt_cache",
    "convert",
    "generate",
    "generate_step",
    "load",
    "load_config",
    "load_prompt_cache",
    "load_tokenizer",
    "make_logits_processors",
    "make_prompt_cache",
    "make_sampler",
    "models",
    "sample_utils",
    "save_prompt_cache",
    "stream_generate",
    "tokenizer_utils",
    "trim_prompt_cache",
    "utils",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
