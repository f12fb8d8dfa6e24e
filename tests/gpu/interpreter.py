"""Triton's interpreter without its needless work, where kernels give the same bits in a fifth of the time, with an
error for addresses that a GPU refuses, and with products whose bits do not depend on the shape of their operands.
"""

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
    interpreter._patch_attr = _patch
    interpreter._get_np_dtype = _np_dtype
    interpreter._convert_float = _convert
    interpreter.TensorHandle.__init__ = _init_handle
    interpreter.ScanOps.generic_scan = _scan
    core._unwrap_if_constexpr = _unwrap
    core.block_type.__init__ = _init_block_type
    core.block_type.with_element_ty = lambda self, scalar: _block(scalar, self.sizes)
    core.tensor.__init__ = _init_tensor
    semantic.TritonSemantic.binary_op_type_checking_impl = _operands
    semantic.TritonSemantic.broadcast_impl_value = _broadcast
    semantic.TritonSemantic.cast = _cast


class _Aligned:
    """The interpreter's loads and stores, of numbers that begin at a multiple of their size alone: on a GPU others end
    the process.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.__dict__.update({name: getattr(memory, name) for name in dir(memory) if not name.startswith("_")})
        self.load, self.store = self._load, self._store

    def _load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        _check(addresses, mask, np.dtype(dtype).itemsize, "load")
        return self._memory.load(addresses, mask, other, dtype)

    def _store(self, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        _check(addresses, mask, value.dtype.itemsize, "store")
        self._memory.store(addresses, value, mask)


def _check(addresses: np.ndarray, mask: np.ndarray, size: int, what: str) -> None:
    low = np.uint64(size - 1)
    if size > 1 and np.bitwise_or.reduce(addresses, axis=None) & low and np.any((addresses & low).astype(bool) & mask):
        raise ValueError(f"{what} of numbers of {size} bytes from addresses that are no multiples of it")


def check_alignment() -> None:
    """For this process, if it interprets kernels."""
    if knobs.runtime.interpret:
        interpreter._interpreter = _Aligned(interpreter._interpreter)


def sum_exactly() -> None:
    """For this process, if it interprets kernels: a row of `tl.dot` has the same bits alone and among others, as it has
    on a GPU. In float32 they depend on the processor's BLAS and on where the row stands in its blocks.
    """
    if knobs.runtime.interpret:
        interpreter.InterpreterBuilder.create_dot = _dot


_slow_dot = interpreter.InterpreterBuilder.create_dot


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a · b in float64, rounded to the dtype of d, + d."""
    if d.data.dtype != np.float32 or {a.data.dtype.kind, b.data.dtype.kind} != {"f"}:
        return _slow_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


_slow_np_dtype = interpreter._get_np_dtype
_slow_convert = interpreter._convert_float
_slow_unwrap = core._unwrap_if_constexpr
_slow_operands = semantic.TritonSemantic.binary_op_type_checking_impl
_slow_broadcast = semantic.TritonSemantic.broadcast_impl_value
_slow_cast = semantic.TritonSemantic.cast
_np_dtype_of_scalar = functools.cache(_slow_np_dtype)


# -- functions of the language ---------------------------------------------------------------------------------------

_BUILTIN = core.builtin(lambda: None).__code__  # of what asks for the argument that is given here in any case


def _patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    inner = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **kwargs)

    scope.set_attr(obj, name, call)


_PLAIN = {int, float, bool, type(None), str, core.tensor, core.dtype, core.block_type, core.pointer_type}


def _unwrap(value: Any) -> Any:
    kind = type(value)
    return value.value if kind is core.constexpr else value if kind in _PLAIN else _slow_unwrap(value)


# -- types and tensors -----------------------------------------------------------------------------------------------


def _np_dtype(dtype: Any) -> np.dtype:
    scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
    return _slow_np_dtype(scalar) if isinstance(scalar, core.pointer_type) else _np_dtype_of_scalar(scalar)


@functools.cache
def _sizes(*shape: int) -> tuple[core.tuple, str, int, tuple[core.tuple, core.constexpr], tuple[int, ...]]:
    """Shape and number of elements as a type has them, as a tensor has them, and the shape as NumPy has it."""
    if not shape:
        raise TypeError("0d block_type is forbidden")
    numel, sizes = core.validate_block_shape(list(shape)), core.tuple(shape)
    of_tensor = core.tuple([core.constexpr(size) for size in shape]), core.constexpr(numel)
    return sizes, str(sizes), numel, of_tensor, shape


_SCALAR = core.tuple([]), core.constexpr(1)


def _init_block_type(self: Any, element_ty: core.dtype, shape: Any) -> None:
    sizes = shape.values if isinstance(shape, core.tuple) else shape
    self.element_ty = element_ty
    self.shape, text, self.numel, self.of_tensor, self.sizes = _sizes(*[_unwrap(size) for size in sizes])
    self.name = f"<{text}, {element_ty}>"


_known_block = functools.cache(core.block_type)


def _block(scalar: Any, sizes: tuple[int, ...]) -> Any:
    return _known_block(scalar, sizes) if type(scalar) is core.dtype else core.block_type(scalar, sizes)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensor if type.is_block() else _SCALAR


_SCALARS = (core.int1, core.int8, core.int16, core.int32, core.int64, core.uint8, core.uint16, core.uint32)
_SCALARS += (core.uint64, core.float16, core.bfloat16, core.float32, core.float64, core.float8e5, core.float8e4nv)
_ITEMSIZES = {dtype.name: max(dtype.primitive_bitwidth, 8) // 8 for dtype in _SCALARS}


def _init_handle(self: Any, data: Any, dtype: Any, attr: dict | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > _ITEMSIZES.get(dtype.name, 0):
        self.__post_init__()


# -- operands --------------------------------------------------------------------------------------------------------


def _cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
    return input if input.dtype is dst_ty.scalar else _slow_cast(self, input, dst_ty, fp_downcast_rounding)


def _convert(input: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """float32 and bfloat16: the upper half of the bits, cut off, if no number is subnormal."""
    narrow = source.name == "fp32"
    if rounding is not None or (source.name, target.name) not in (("fp32", "bf16"), ("bf16", "fp32")):
        return _slow_convert(input, source, target, rounding)
    bits = np.ascontiguousarray(input).view(np.uint32 if narrow else np.uint16)  # products go by the memory's order
    word = bits.dtype.type
    if np.any((bits << word(1)) - word(2) < word((2 << source.fp_mantissa_width) - 2)):
        return _slow_convert(input, source, target, rounding)
    found = (bits >> word(16)).astype(np.uint16) if narrow else bits.astype(np.uint32) << np.uint32(16)
    return found.reshape(input.shape)


@functools.cache
def _constant(dtype: Any, sizes: Any, kind: type, value: Any, zero: str, div_or_mod: bool) -> tuple[Any, Any]:
    """A number beside a tensor of this dtype and shape: as an array that nothing may write, and its type."""
    own = interpreter.interpreter_semantic
    meant = own.computation_type_impl(dtype, False, own.to_tensor_type(value), True, div_or_mod)
    made = own._cast_to_computation_type(value, meant).handle.data
    array = made.copy() if sizes is None else np.full(sizes, made, made.dtype)
    array.flags.writeable = False
    return array, meant if sizes is None else _block(meant, sizes)


def _operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    lhs_ptr: bool = False,
    rhs_ptr: bool = False,
    arithmetic: bool = True,
    div: bool = False,
) -> tuple[Any, Any]:
    if type(lhs) is core.tensor and type(rhs) is core.tensor:
        if lhs.dtype is rhs.dtype and type(lhs.dtype) is core.dtype and not div:
            return _broadcast(self, lhs, rhs)
    elif arithmetic and type(lhs) is core.tensor and type(rhs) in _NUMBERS and type(lhs.dtype) is core.dtype:
        return _beside(self, lhs, rhs, div)
    elif arithmetic and type(rhs) is core.tensor and type(lhs) in _NUMBERS and type(rhs.dtype) is core.dtype:
        return _beside(self, rhs, lhs, div)[::-1]
    return _slow_operands(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, div)


_NUMBERS = (int, float, bool)


def _beside(self: Any, tensor: Any, value: Any, div: bool) -> tuple[Any, Any]:
    sizes = tensor.type.sizes if tensor.type.is_block() else None
    array, kind = _constant(tensor.dtype, sizes, type(value), value, str(value) if value == 0 else "", div)
    number = core.tensor(interpreter.TensorHandle(array, kind.scalar), kind)
    return _cast(self, tensor, kind.scalar), number


@functools.cache
def _common(lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of both, if one of each two sizes is 1 or both are equal."""
    fit = len(lhs) == len(rhs) and all(a == b or 1 in (a, b) for a, b in zip(lhs, rhs, strict=True))
    return tuple(b if a == 1 else a for a, b in zip(lhs, rhs, strict=True)) if fit else None


def _stretched(tensor: Any, sizes: tuple[int, ...]) -> Any:
    if tensor.type.sizes == sizes:
        return tensor
    handle = interpreter.TensorHandle(np.broadcast_to(tensor.handle.data, sizes), tensor.handle.dtype.scalar)
    return core.tensor(handle, _block(tensor.dtype, sizes))


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    if isinstance(lhs.type, core.block_type) and isinstance(rhs.type, core.block_type):
        if lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        if (sizes := _common(lhs.type.sizes, rhs.type.sizes)) is not None:
            return _stretched(lhs, sizes), _stretched(rhs, sizes)
    return _slow_broadcast(self, lhs, rhs)


# -- scans -----------------------------------------------------------------------------------------------------------


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
