import importlib.util
import os
import zlib
from pathlib import Path

import pytest
import torch

from tests.gpu import interpreter

HERE = Path(__file__).parent
collect_ignore = [] if importlib.util.find_spec("gguf") else ["test_gguf.py"]  # what writes files of models

interpreter.quicken()
interpreter.check_alignment()
interpreter.sum_exactly()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a machine with a GPU all tests here are GPU tests (`pytest -m cuda`); elsewhere only the marked ones.

    SHARD=3/12 keeps the fourth of twelve parts, chosen by name: kernels compile on one core per process, so
    benchmarks/gpu.sh runs several.
    """
    if torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.cuda)
    part, _, parts = os.environ.get("SHARD", "0/1").partition("/")
    gone = [item for item in items if zlib.crc32(item.nodeid.encode()) % int(parts) != int(part)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in set(gone)]
