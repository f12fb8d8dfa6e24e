"""Prompt caches: what a model has read stays for the next call. They are penstock's sessions, in files as well.

mlx-lm has one object per layer; here the list stands for one session of the model, and its entries show its length.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from penstock.api import LLM
from penstock.engine.session import Session, metadata_of, read_about, restore_into
from penstock.errors import CheckpointError, DTypeError, InvalidArgument
from penstock.mlx_lm._arrays import integer
from penstock.weights.safetensors import SafetensorsFile

__all__ = [
    "PromptCache",
    "can_trim_prompt_cache",
    "load_prompt_cache",
    "make_prompt_cache",
    "save_prompt_cache",
    "trim_prompt_cache",
]


class LayerCache:
    """An entry of a prompt cache: what mlx-lm's caches say of themselves."""

    def __init__(self, cache: PromptCache) -> None:
        self._cache = cache

    @property
    def offset(self) -> int:
        """Tokens that have been read."""
        return len(self._cache.tokens)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """The layer's share of the memory."""
        return self._cache.nbytes // max(1, len(self._cache))

    def is_trimmable(self) -> bool:
        return can_trim_prompt_cache(self._cache)

    def __repr__(self) -> str:
        return f"LayerCache(offset={self.offset})"


class PromptCache(Sequence[LayerCache]):
    """What has been read and written in calls with `prompt_cache=`; the next one goes on from there.

    Made by `make_prompt_cache` or `load_prompt_cache`; one of a file gets its model with its first use. It is for one
    call at a time. `copy.deepcopy` gives another that goes on by itself.
    """

    def __init__(self, layers: int, max_size: int | None = None) -> None:
        self.max_size = max_size
        self._layers = layers
        self._session: Session | None = None
        self._file: tuple[Path, SafetensorsFile, dict[str, str]] | None = None

    @classmethod
    def of_session(cls, session: Session) -> PromptCache:
        """A cache that holds a session."""
        made = cls(session.engine.layers)
        made._session = session
        return made

    @classmethod
    def of_file(cls, path: Path) -> PromptCache:
        """A cache that `save_prompt_cache` has written. The file stays open: one that replaces it is not looked at."""
        file, about = _read(path)
        made = cls(sum(name.endswith(".first") for name in file.tensors))
        made._file = path, file, about
        return made

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens that have been read or written."""
        if self._session is not None:
            return self._session.tokens
        return [] if self._file is None else self._file[1].array("tokens").tolist()

    @property
    def nbytes(self) -> int:
        """Memory that its positions take."""
        if self._session is not None:
            return self._session.engine.caches.bytes_of(len(self._session.tokens))
        return 0 if self._file is None else self._file[1].size

    @property
    def session(self) -> Session:
        """The session. Raises InvalidArgument before a model is known."""
        if self._session is None:
            raise InvalidArgument("prompt_cache: it was not used with a model yet, expected one in `generate` first")
        return self._session

    def session_of(self, llm: LLM) -> Session:
        """The session on a model. Raises InvalidArgument if the cache belongs to another one, CheckpointError if its
        file does.
        """
        if self._session is None:
            session = llm.session()
            if self._file is not None:
                path, file, about = self._file
                try:
                    restore_into(session, path, (file, about))
                except BaseException:
                    session.close()
                    raise
            self._session, self._file = session, None
        if self._session.engine is not llm.engine:
            raise InvalidArgument(
                "prompt_cache: it belongs to another model, expected one that was made for this model"
            )
        return self._session

    def __len__(self) -> int:
        return self._layers

    @overload
    def __getitem__(self, index: int) -> LayerCache: ...
    @overload
    def __getitem__(self, index: slice) -> list[LayerCache]: ...
    def __getitem__(self, index: int | slice) -> LayerCache | list[LayerCache]:
        if isinstance(index, slice):
            return [LayerCache(self) for _ in range(self._layers)[index]]
        range(self._layers)[index]  # raises IndexError
        return LayerCache(self)

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self[:])

    def __repr__(self) -> str:
        return f"PromptCache({self._layers} layers, {len(self.tokens)} tokens)"

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptCache:
        made = PromptCache(self._layers, self.max_size)
        made._file = self._file
        made._session = None if self._session is None else self._session.fork()
        return made


def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> PromptCache:
    """An empty cache for a model, to be given to `generate` as prompt_cache.

    max_kv_size: the most positions it is used for. mlx-lm drops old ones there; penstock does not, and refuses a call
    that would need more.
    """
    llm = model if isinstance(model, LLM) else getattr(model, "llm", None)
    if not isinstance(llm, LLM):
        raise DTypeError(f"model is a {type(model).__name__}, expected what penstock.mlx_lm.load returned")
    size = None if max_kv_size is None else integer(max_kv_size, "max_kv_size", 1)
    made = PromptCache(llm.engine.layers, size)
    made.session_of(llm)
    return made


def save_prompt_cache(
    file_name: str | os.PathLike[str], cache: PromptCache, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a cache as a file, which `penstock.restore` reads as well. Raises CheckpointError, InvalidArgument."""
    _checked(cache).session.save(file_name, metadata)


@overload
def load_prompt_cache(file_name: str | os.PathLike[str]) -> PromptCache: ...
@overload
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool
) -> PromptCache | tuple[PromptCache, dict[str, str]]: ...
def load_prompt_cache(file_name: str | os.PathLike[str], return_metadata: bool = False) -> Any:
    """A cache that `save_prompt_cache` has written, with return_metadata also the metadata it was given.

    It is checked against the model with its first use. Raises CheckpointError for other files, one of mlx-lm included.
    """
    path = Path(file_name)
    cache = PromptCache.of_file(path)
    if not return_metadata:
        return cache
    assert cache._file is not None
    return cache, metadata_of(cache._file[2], path)


def can_trim_prompt_cache(cache: PromptCache) -> bool:
    """Whether `trim_prompt_cache` can take tokens away: no layer has a recurrent state or has left a window."""
    held = _checked(cache)
    return held._session is not None and held._session.can_truncate


def trim_prompt_cache(cache: PromptCache, num_tokens: int) -> int:
    """Take the last num_tokens away; how many were: 0 where `can_trim_prompt_cache` says no."""
    integer(num_tokens, "num_tokens", 0)
    if not can_trim_prompt_cache(cache):
        return 0
    session = cache.session
    count = min(num_tokens, len(session.tokens))
    session.truncate(len(session.tokens) - count)
    return count


def _checked(cache: Any) -> PromptCache:
    if not isinstance(cache, PromptCache):
        raise DTypeError(f"prompt_cache is a {type(cache).__name__}, expected what make_prompt_cache returned")
    return cache


def checked_cache(cache: Any) -> PromptCache | None:
    """A cache, or None. Raises DTypeError for anything else."""
    return None if cache is None else _checked(cache)


def _read(path: Path) -> tuple[SafetensorsFile, dict[str, str]]:
    """`read_about`, with a word of its own about files of mlx-lm."""
    try:
        file, about = read_about(path)
    except CheckpointError:
        kinds = _mlx_caches(path)
        if not kinds:
            raise
        raise CheckpointError(
            f"{path}: is a prompt cache of mlx-lm ({', '.join(kinds)}), expected one of penstock; let `generate` read "
            "the prompt with a new one (make_prompt_cache), and save that"
        ) from None
    if "tokens" not in file.tensors:
        raise CheckpointError(f"{path}: tokens is missing, expected a whole session")
    return file, about


def _mlx_caches(path: Path) -> list[str]:
    """Kinds of caches that a file of mlx-lm names in its metadata, under 1.0, 1.1 and so on."""
    try:
        metadata = SafetensorsFile.open(path).metadata
    except CheckpointError:
        return []
    named = {text for key, text in metadata.items() if key.startswith("1.") and text.endswith(("Cache", "List"))}
    return sorted(named)
