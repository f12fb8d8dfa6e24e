from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a machine with a GPU all tests here are GPU tests (`pytest -m cuda`); elsewhere only the marked ones."""
    if torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.cuda)
