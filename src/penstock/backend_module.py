"""Where lower layers find a backend: the one import that goes upwards, by name and at first use."""

import importlib
from types import ModuleType


def backend_module(backend: str, family: str) -> ModuleType:
    """`penstock.backends.<backend>.<family>`, which registers its kernels or its device. Raises ModuleNotFoundError."""
    return importlib.import_module(f"penstock.backends.{backend}.{family}")
