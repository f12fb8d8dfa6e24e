import os
from pathlib import Path

# On some virtual CPUs torch's bfloat16 kernels choose instructions that are listed but not usable, and the process dies
# with SIGILL. This keeps them below that; it has to be set before torch is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads anything
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two test processes share the cores: waiting threads must not spin
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU its kernels run in Triton's interpreter

import functools
import gc
import importlib.util
import re
import zlib

import hypothesis
import numpy as np
import pytest

from penstock import kernel_cache

gc.disable()  # until all tests are collected, see pytest_collection_finish

hypothesis.settings.register_profile("penstock", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("penstock")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the name of the test (with its parameters) alone."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def fresh_kernel_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of compiled kernels are looked at again, as in a new process."""
    monkeypatch.setattr(kernel_cache, "_chosen", {})
    monkeypatch.setattr(kernel_cache, "_warned", set())
    monkeypatch.setattr(kernel_cache, "_process_folder", functools.cache(kernel_cache._process_folder.__wrapped__))


_IMPORTS_TORCH = re.compile(r"^(?:import|from) (?:torch|triton|transformers)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch (see the Makefile) the modules that import it at their top are left out."""
    if collection_path.suffix != ".py" or importlib.util.find_spec("torch") is not None:
        return None
    return True if _IMPORTS_TORCH.search(collection_path.read_text()) else None


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: no later garbage collection looks through it again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries complain at the exit of objects that were never freed
