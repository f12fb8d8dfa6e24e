"""Triton's interpreter without its needless work: kernels give the same bits in a fourth of the time."""

import dataclasses
import functools
from typing import Any

import numpy as np
import triton
from triton import knobs
from triton.language import core, semantic
from triton.runtime import interpreter

VERSION = "3.9."  # whose source the functions below replace; another one runs as it came


def quicken() -> None:
    """For this process, if it interprets kernels."""
    if not (knobs.runtime.interpret and triton.__version__.startswith(VERSION)):
        return
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    # without debug the test for overflow behind every sum and product of integers is computed and not looked at
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # every call of a function in a kernel gives all names of the language their meaning in the interpreter again: once
    # is enough if a launch does not take it back
    interpreter._LangPatchScope.restore = lambda self: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._get_np_dtype = _np_dtype
    interpreter.ScanOps.generic_scan = _scan
    core._unwrap_if_constexpr = _unwrap
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    semantic.TritonSemantic.broadcast_impl_value = _broadcast


_slow_np_dtype = interpreter._get_np_dtype
_np_dtype_of_scalar = functools.cache(_slow_np_dtype)
_slow_unwrap = core._unwrap_if_constexpr
_slow_broadcast = semantic.TritonSemantic.broadcast_impl_value


def _np_dtype(dtype: Any) -> np.dtype:
    scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
    return _slow_np_dtype(scalar) if isinstance(scalar, core.pointer_type) else _np_dtype_of_scalar(scalar)


def _unwrap(value: Any) -> Any:
    kind = type(value)
    return value.value if kind is core.constexpr else value if kind is int else _slow_unwrap(value)


@functools.cache
def _sizes(*shape: int) -> tuple[core.tuple, str, int, tuple[core.tuple, core.constexpr]]:
    """Shape and number of elements as a type has them, and as a tensor has them."""
    if not shape:
        raise TypeError("0d block_type is forbidden")
    numel, sizes = core.validate_block_shape(list(shape)), core.tuple(shape)
    return sizes, str(sizes), numel, (core.tuple([core.constexpr(size) for size in shape]), core.constexpr(numel))


_SCALAR = core.tuple([]), core.constexpr(1)


def _init_block_type(self: Any, element_ty: core.dtype, shape: Any) -> None:
    sizes = shape.values if isinstance(shape, core.tuple) else shape
    self.element_ty = element_ty
    self.shape, text, self.numel, self.of_tensor = _sizes(*[_unwrap(size) for size in sizes])
    self.name = f"<{text}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensor if type.is_block() else _SCALAR


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    if isinstance(lhs.type, core.block_type) and lhs.type.shape is getattr(rhs.type, "shape", None):
        return lhs, rhs
    return _slow_broadcast(self, lhs, rhs)


def _scan(self: Any, input: Any) -> list[Any]:
    """One call of the function for each position of the axis, not for each element."""
    along = [np.moveaxis(arg.handle.data, self.axis, 0) for arg in input]
    found = [values.copy() for values in along]
    for i in range(1, len(along[0])):
        before, here = (
            [self.to_tensor(values[at], arg.dtype) for values, arg in zip(arrays, input, strict=True)]
            for arrays, at in ((found, i - 1), (along, i))
        )
        results = self.combine_fn.fn(*before, *here)
        for values, result in zip(found, results if isinstance(results, tuple) else (results,), strict=True):
            values[i] = result.handle.data.reshape(values[i].shape)
    return [
        self.to_tensor(np.ascontiguousarray(np.moveaxis(values, 0, self.axis)), arg.dtype)
        for values, arg in zip(found, input, strict=True)
    ]
