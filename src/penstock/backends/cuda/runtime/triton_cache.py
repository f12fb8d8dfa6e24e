"""Triton's cache of compiled kernels, under the rule of penstock/kernel_cache.py: libraries are loaded from it.

Triton has one cache per process: kernels of other packages are kept there too, once one of penstock's is imported.
"""

import json
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from penstock import kernel_cache


class TrustedCacheManager(FileCacheManager):
    """Files of one kernel or launcher. Each has its digest in a file beside it; one without is compiled again."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._plain = override or dump  # what a developer asked for, in folders of their own and edited by hand
        if self._plain:
            super().__init__(key, override, dump)
        else:
            self.key = key
            self.cache_dir = str(kernel_cache.trusted(Path(knobs.cache.dir), key, to_write=True))

    def get_file(self, filename: str) -> str | None:
        if self._plain:
            return super().get_file(filename)
        return None if self._content(filename) is None else self._make_path(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The files of a kernel by name, all of them or none."""
        if self._plain:
            return super().get_group(filename)
        written = self._content(f"__grp__{filename}")  # by put_group
        group = {} if written is None else json.loads(written)["child_paths"]
        return group if group and all(self.get_file(name) == path for name, path in group.items()) else None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        if self._plain:
            return super().put(data, filename, binary)
        path, content = self._make_path(filename), data if isinstance(data, bytes) else str(data).encode()
        kernel_cache.write(Path(path), content)
        kernel_cache.write(Path(f"{path}.sha256"), self._digest(filename, content))
        return path

    def _content(self, filename: str) -> bytes | None:
        """Of a file that was put here under this name."""
        path = self._make_path(filename)
        data = kernel_cache.read(path)
        if data is None or kernel_cache.read(f"{path}.sha256") != self._digest(filename, data):
            return None
        return data

    def _digest(self, filename: str, data: bytes) -> bytes:
        return kernel_cache.digest(f"{self.key}/{filename}", data)


def use_trusted_cache() -> None:
    """Let Triton keep compiled kernels in TRITON_CACHE_DIR or PENSTOCK_CACHE_DIR and load only what is trusted."""
    knobs.cache.dir = str(kernel_cache.trusted(*kernel_cache.triton_root(), to_write=True))
    if knobs.cache.manager_class is None:  # TRITON_CACHE_MANAGER is the user's word
        knobs.cache.manager_class = TrustedCacheManager
