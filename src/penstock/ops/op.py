"""What an op is: a NumPy definition, checks on specs, and kernels found by device.

A call runs: bind the arguments → survey the arrays (where they are, how they lie) → infer the outputs from specs
(cached by shapes, dtypes and scalars) → check values on host arrays → run the kernel of the device, or the definition.
Only the last step touches data, so graph symbols pass through everything before it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from penstock.backend_module import backend_module
from penstock.dtypes import numpy_dtype
from penstock.errors import (
    BackendError,
    DTypeError,
    InvalidArgument,
    KernelNotFound,
    OutOfMemory,
    PenstockError,
    ShapeError,
)
from penstock.ops.array import (
    Array,
    Spec,
    Symbol,
    is_array,
    is_contiguous,
    leaves,
    location_of,
    numpy_view,
    overlap,
    same_memory,
    spec_of,
    torch_view,
)
from penstock.quant import ExpertBlobs, QuantizedTensor, fault_of

DEVICES = ("cpu", "cuda")
REGISTRY: dict[str, Op] = {}


Outputs: TypeAlias = "Spec | tuple[Spec | None, ...] | None"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function registered for one device. `variants` are its names for `backend(device, variant=…)`."""

    run: Callable[..., None]
    variants: tuple[str, ...] = ()
    composed: bool = False
    choosing: Callable[..., None] = field(init=False)  # `run` with the choice of a variant left to it

    def __post_init__(self) -> None:
        choosing = functools.partial(self.run, variant=None) if self.variants else self.run
        object.__setattr__(self, "choosing", choosing)


@dataclass(frozen=True, slots=True)
class _Forced:
    device: str
    variant: str | None


_FORCED: ContextVar[_Forced | None] = ContextVar("penstock_backend", default=None)
_DETERMINISTIC: ContextVar[bool] = ContextVar("penstock_deterministic", default=False)


@contextlib.contextmanager
def backend(device: str, variant: str | None = None, deterministic: bool | None = None) -> Iterator[None]:
    """Force the kernels of one device inside a `with` block: "cpu", "cuda", "reference" (the definitions) or "auto".

    A forced device is strict: an op without a kernel there raises KernelNotFound, and so does an op without `variant`.
    deterministic=True: a row's bits do not depend on how many rows the call has (on the CPU they never do).
    """
    if device not in ("auto", "reference", *DEVICES):
        raise InvalidArgument(f"backend: device is {device!r}, expected 'auto', 'reference', 'cpu' or 'cuda'")
    if variant is not None and device not in DEVICES:
        raise InvalidArgument(f"backend: variant {variant!r} needs device 'cpu' or 'cuda', not {device!r}")
    token = _FORCED.set(None if device == "auto" else _Forced(device, variant))
    flag = _DETERMINISTIC.set(_DETERMINISTIC.get() if deterministic is None else deterministic)
    try:
        yield
    finally:
        _DETERMINISTIC.reset(flag)
        _FORCED.reset(token)


def deterministic() -> bool:
    """Whether a kernel must give a row the same bits in a call of one row and of many."""
    return _DETERMINISTIC.get()


# --------------------------------------------------------------------------------------------------------------------
# Argument types, read from the annotations of the definition

_SCALARS = frozenset((int, float, str, bool, type(None)))
_ORDERLY = 0x101  # of an array's flags.num: C-contiguous and aligned


_LARGEST = float(np.finfo(np.float32).max)


def _shown(scalar: float | str | None) -> str:
    """A scalar for a message; Python does not write out ints of thousands of digits."""
    if isinstance(scalar, int) and scalar.bit_length() > 128:
        return f"an int of {scalar.bit_length()} bits"
    return f"{scalar!r:.80}"


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    if value is None:
        return "None" in kinds
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int):
        return "int" in kinds or "float" in kinds
    if isinstance(value, float):
        return "float" in kinds
    if isinstance(value, str):
        return "str" in kinds
    if isinstance(value, QuantizedTensor):
        return "QuantizedTensor" in kinds
    if isinstance(value, ExpertBlobs):
        return "ExpertBlobs" in kinds
    if isinstance(value, list | tuple):
        each = all(isinstance(item, QuantizedTensor) for item in value)
        return "Sequence[QuantizedTensor]" in kinds and len(value) > 0 and each
    return "Array" in kinds and is_array(value)


def _expected(kinds: frozenset[str]) -> str:
    words = {"Array": "an array (NumPy or torch)", "int": "an int", "float": "a float", "str": "a string"}
    words |= {"bool": "a bool", "None": "None", "QuantizedTensor": "a QuantizedTensor"}
    words |= {"Sequence[QuantizedTensor]": "a sequence of QuantizedTensor"}
    return " or ".join(words.get(kind, kind) for kind in sorted(kinds, key=lambda kind: (kind == "None", kind)))


def _made_binder(name: str, signature: inspect.Signature) -> Callable[..., tuple[Any, ...]]:
    """A function with the op's signature that returns its arguments as one tuple.

    inspect's own bind takes 5 µs a call; this takes 0.3 and raises Python's own messages under the op's name.
    """
    defaults: dict[str, Any] = {}
    parts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if parameter.default is parameter.empty:
            parts.append(parameter.name)
        else:
            defaults[f"_{parameter.name}"] = parameter.default
            parts.append(f"{parameter.name}=_{parameter.name}")
    names = "".join(f"{parameter}, " for parameter in signature.parameters)
    exec(f"def {name}({', '.join(parts)}): return ({names})", defaults)
    return defaults[name]


@dataclass(slots=True)
class _Plan:
    """What one combination of shapes, dtypes and scalars leads to."""

    specs: tuple[Spec | None, ...]
    single: bool  # one output asked for: return it bare, not in a tuple
    empty: tuple[tuple[tuple[int, ...], np.dtype] | None, ...] = field(init=False)
    whole: bool = field(init=False)  # every output is asked for

    def __post_init__(self) -> None:
        self.empty = tuple(None if s is None else (s.shape, numpy_dtype(s.dtype)) for s in self.specs)
        self.whole = None not in self.specs

    def result(self, outputs: tuple[Any, ...]) -> Any:
        if self.whole:
            return outputs[0] if self.single else outputs or None
        wanted = tuple(output for output, spec in zip(outputs, self.specs, strict=True) if spec is not None)
        return wanted[0] if self.single else (wanted or None)


class Op:
    """A public operation. Calling it looks at its arrays and runs the definition or a kernel; see the module's
    docstring.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        infer: Callable[..., Outputs],
        check: Callable[..., None] | None,
        writes: tuple[str, ...],
        alias: bool,
        partial: bool,
        wide: bool,
    ) -> None:
        functools.update_wrapper(self, body)
        self.name: str = body.__name__
        self.family: str = body.__module__.rpartition(".")[2]
        self.doc: str = inspect.getdoc(body) or ""
        self.body, self.infer, self.check = body, infer, check
        self.writes, self.alias, self.partial, self.wide = writes, alias, partial, wide
        own = inspect.signature(body)
        parameters = [p for p in own.parameters.values() if not (partial and p.name == "out")]
        self.params = tuple(p.name for p in parameters)
        self.kinds = tuple(frozenset(k.strip() for k in str(p.annotation).split("|")) for p in parameters)
        out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Array | tuple | None")
        self.signature = own.replace(parameters=[*parameters, out])
        self.__signature__ = self.signature
        self._checked = tuple(map(self.params.index, inspect.signature(check).parameters)) if check else ()
        self._bind = _made_binder(self.name, own.replace(parameters=parameters))
        written = [self.params.index(name) for name in writes]
        rest = [i for i in range(len(self.params)) if i not in written]
        self._written = tuple((place, [*rest, *written[:number]]) for number, place in enumerate(written))
        self._plans: dict[Any, _Plan] = {}
        self._kernels: dict[str, Kernel] = {}
        self._searched: set[str] = set()

    def __repr__(self) -> str:
        return f"<op {self.name}{self.signature}>"

    # -- the call ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        values, place, key = self._survey(self._bind(*args, **kwargs))
        plan = self._plan(values, key)
        outputs = self._given(out, plan, place)
        if (outputs is not None or self.writes) and not self._apart(values, outputs or ()):
            self._check_memory(values, outputs or ())
        if place == "symbol":
            symbol = next(leaf for leaf in leaves(values) if isinstance(leaf, Symbol))
            return symbol.record(self, dict(zip(self.params, values, strict=True)), plan.specs, out)

        device, run = self._route(place)
        if device == "cuda":
            return self._on_cuda(values, outputs, plan, run, place)
        if place == "numpy":
            return plan.result(self._on_host(values, outputs, plan, run))
        if place != "cpu":
            return self._through_host(values, outputs, plan, run, place)
        shared = None if outputs is None else numpy_view(outputs)
        results = self._on_host(numpy_view(values), shared, plan, run)
        if outputs is None:
            outputs = (None,) * len(results)
        fresh = (r if r is None or o is not None else torch_view(r) for r, o in zip(results, outputs, strict=True))
        return plan.result(tuple(f if o is None else o for f, o in zip(fresh, outputs, strict=True)))

    def inferred(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], tuple[Spec | None, ...]]:
        """The arguments of a call by name, defaults filled in, and its outputs' specs; raises as the call does."""
        values, _, key = self._survey(self._bind(*args, **kwargs))
        return dict(zip(self.params, values, strict=True)), self._plan(values, key).specs

    def _survey(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], str, tuple[Any, ...]]:
        """The values, where their arrays are, and a key of all that `infer` looks at; strided or mixed ones raise."""
        key: list[Any] = []
        for value in values:  # the usual case, all NumPy, in half the time
            kind = type(value)
            if kind is np.ndarray:
                if value.flags.num & _ORDERLY != _ORDERLY:
                    return self._survey_closely(values)
                key += (value.shape, value.dtype)
            elif kind in _SCALARS:
                key += (kind, value)
            elif kind is QuantizedTensor and type(value.packed) is np.ndarray:
                value.check()
                key.append(value.key)
            else:
                return self._survey_closely(values)
        return values, "numpy", tuple(key)

    def _survey_closely(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], str, tuple[Any, ...]]:
        """`_survey` of arrays of any kind: says what is wrong with which."""
        place, owner = "", ""
        key: list[Any] = []
        for name, value in zip(self.params, values, strict=True):
            kind = type(value)
            if kind in _SCALARS:
                key += (kind, value)
                continue
            if kind is np.ndarray:
                here = "numpy"
                key += (value.shape, value.dtype)
                if value.flags.num & _ORDERLY != _ORDERLY:
                    raise self._strided(name, value)
            elif kind is QuantizedTensor:
                value.check()
                here = location_of(value.packed)
                key.append(value.key)
            elif isinstance(value, Symbol):
                here = "symbol"
                key.append(value.spec)
            elif isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
                # NumPy's scalars are Python's numbers here, except those that Python has no number for
                return self._survey(tuple(v.item() if v is value else v for v in values))
            else:
                here = self._survey_other(name, value, key)
            if here == place or not here:
                continue
            if not place or here == "symbol":
                place, owner = here, name
            elif place != "symbol":
                raise InvalidArgument(
                    f"{self.name}: {name} is on {_spelled(here)}, expected {_spelled(place)}, where {owner} is"
                )
        return values, place or "numpy", tuple(key)

    def _survey_other(self, name: str, value: Any, key: list[Any]) -> str:
        place = ""
        arrays = leaves(value)
        for leaf in arrays:
            if fault := fault_of(leaf):
                raise DTypeError(f"{self.name}: {name} is {fault}")
            if not is_contiguous(leaf):
                raise self._strided(name, leaf)
            here = location_of(leaf)
            if place and here != place:
                raise InvalidArgument(f"{self.name}: {name} has parts on {_spelled(place)} and on {_spelled(here)}")
            place = here
        key += (type(value), tuple(spec_of(leaf) for leaf in arrays))
        if not arrays:
            key.append(value)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, QuantizedTensor):
                item.check()
            if isinstance(item, QuantizedTensor | ExpertBlobs):
                key += item.key
        return place

    def _strided(self, name: str, array: Any) -> ShapeError:
        if array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous():
            return ShapeError(f"{self.name}: {name} is not aligned in memory, expected an aligned array: pass a copy")
        found = f"{self.name}: {name} is not contiguous (shape {tuple(array.shape)})"
        return ShapeError(f"{found}, expected a C-contiguous array: pass a copy")

    def _plan(self, values: tuple[Any, ...], key: tuple[Any, ...]) -> _Plan:
        try:
            plan = self._plans.get(key)
        except TypeError:  # an argument that cannot be hashed is one that cannot be right: say so
            plan = None
        if plan is not None:
            return plan
        specs = []
        for name, kinds, value in zip(self.params, self.kinds, values, strict=True):
            if not _fits(value, kinds):
                shown = _shown(value) if type(value) in _SCALARS else f"a {type(value).__name__}"
                raise DTypeError(f"{self.name}: {name} is {shown}, expected {_expected(kinds)}")
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise InvalidArgument(f"{self.name}: {name} is {_shown(value)}, expected an integer of 64 bits")
            if isinstance(value, float) and not self.wide and _LARGEST < abs(value) < float("inf"):
                raise InvalidArgument(
                    f"{self.name}: {name} is {_shown(value)}, expected a number that float32 can hold"
                )
            specs.append(spec_of(value) if is_array(value) else value)
        try:
            inferred = self.infer(*specs)
        except InvalidArgument as error:
            raise type(error)(f"{self.name}: {error}") from None
        outputs = inferred if isinstance(inferred, tuple) else () if inferred is None else (inferred,)
        if any(spec is not None and spec.nbytes >= 1 << 62 for spec in outputs):
            shapes = ", ".join(str(spec.shape) for spec in outputs if spec is not None)
            raise ShapeError(
                f"{self.name}: the output would have shape {shapes:.200}, expected one that memory can hold"
            )
        plan = _Plan(outputs, single=sum(spec is not None for spec in outputs) == 1)
        if len(self._plans) >= 4096:  # positions given as ints make a new key each step
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def forget_plans(self) -> None:
        """Infer anew: something besides the arguments, which `infer` looks at, has changed."""
        self._plans.clear()

    def _given(self, out: Any, plan: _Plan, place: str) -> tuple[Any, ...] | None:
        """`out=` as one entry per output (None: allocate), checked against the specs."""
        if out is None:
            return None
        given = out if isinstance(out, tuple | list) else (out,)
        if len(given) != len(plan.specs):
            wanted = sum(spec is not None for spec in plan.specs)
            if len(given) != wanted:
                raise ShapeError(f"{self.name}: out has {len(given)} arrays, expected {wanted}")
            rest = iter(given)
            given = [next(rest) if spec is not None else None for spec in plan.specs]
        if place == "numpy" and all(map(_ready, given, plan.empty)):
            return tuple(given)
        checked = []
        for number, (array, spec) in enumerate(zip(given, plan.specs, strict=True)):
            name = "out" if len(plan.specs) == 1 else f"out[{number}]"
            if array is None or spec is None:  # a buffer for an output that was not asked for stays as it is
                checked.append(None)
                continue
            if not is_array(array):
                raise DTypeError(f"{self.name}: {name} is a {type(array).__name__}, expected an array")
            if fault := fault_of(array):
                raise DTypeError(f"{self.name}: {name} is {fault}")
            found = spec_of(array)
            if found.dtype != spec.dtype:
                raise DTypeError(f"{self.name}: {name} has dtype {found.dtype}, expected {spec.dtype}")
            if found.shape != spec.shape:
                raise ShapeError(f"{self.name}: {name} has shape {found.shape}, expected {spec.shape}")
            if location_of(array) != place:
                raise InvalidArgument(
                    f"{self.name}: {name} is on {_spelled(location_of(array))}, expected {_spelled(place)}"
                )
            if not is_contiguous(array):
                raise self._strided(name, array)
            self._check_writable(name, array)
            checked.append(array)
        return tuple(checked)

    def _check_writable(self, name: str, array: Any) -> None:
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise InvalidArgument(f"{self.name}: {name} is read-only, expected a writable array")

    def _apart(self, values: tuple[Any, ...], outputs: tuple[Any, ...]) -> bool:
        """True if all that is written is writable and lies apart from the rest, which is the usual case and found
        quickly. `_check_memory` looks closer.
        """
        for place, others in self._written:
            state = values[place]
            if state is None:
                continue
            if type(state) is not np.ndarray or not state.flags.writeable or not _clear(state, values, others):
                return False
        for number, output in enumerate(outputs):
            if output is None:
                continue
            if type(output) is not np.ndarray or not _clear(output, outputs, range(number)):
                return False
            if not _clear(output, values, range(len(values)), self.alias and not self.writes):
                return False
        return True

    def _check_memory(self, values: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Outputs and written state overlap nothing, except that an aliasing op may write over an input of its
        shape.
        """
        inputs = [(name, leaf) for name, value in zip(self.params, values, strict=True) for leaf in leaves(value)]
        written = [(name, array) for name, array in inputs if name in self.writes]
        for name, array in written:
            self._check_writable(name, array)
        for number, (name, array) in enumerate(written):
            others = [item for item in inputs if item[0] not in self.writes] + written[:number]
            for other, memory in others:
                if overlap(array, memory):
                    raise InvalidArgument(f"{self.name}: {name} overlaps {other} in memory, expected separate arrays")
        results = [(f"out[{i}]" if len(outputs) > 1 else "out", a) for i, a in enumerate(outputs) if a is not None]
        for number, (name, array) in enumerate(results):
            for other, memory in results[:number]:
                if overlap(array, memory):
                    raise InvalidArgument(f"{self.name}: {name} overlaps {other} in memory, expected separate arrays")
            for other, memory in inputs:
                if overlap(array, memory) and not (
                    self.alias and other not in self.writes and same_memory(array, memory)
                ):
                    rule = "the same start and shape, or no overlap" if self.alias else "no overlap"
                    raise InvalidArgument(f"{self.name}: {name} overlaps {other} in memory, expected {rule}")

    # -- where it runs -----------------------------------------------------------------------------------------------

    def _route(self, place: str) -> tuple[str, Callable[..., None] | None]:
        """Device to run on and the kernel there; None stands for the definition."""
        device = "cpu" if place in ("numpy", "cpu") else "cuda"
        forced = _FORCED.get()
        if forced is None:
            kernel = self.kernel(device)
            if kernel is None:
                if device == "cpu":
                    return device, None
                raise KernelNotFound(f"{self.name}: no kernel is registered for device 'cuda'")
            return device, kernel.choosing
        if forced.device == "reference":
            return "cpu", None
        if forced.device != device and not (forced.device == "cuda" and place == "cpu"):
            # Triton's interpreter runs GPU kernels on torch CPU tensors; that is how they are tested without a GPU.
            raise InvalidArgument(
                f"{self.name}: backend {forced.device!r} is forced, but the arrays are on {_spelled(place)}"
            )
        kernel = self.kernel(forced.device)
        if kernel is None:
            raise KernelNotFound(f"{self.name}: no kernel is registered for device {forced.device!r}")
        if forced.variant is not None and forced.variant not in kernel.variants:
            known = ", ".join(kernel.variants) or "none"
            raise KernelNotFound(
                f"{self.name}: variant {forced.variant!r} does not exist on {forced.device!r}, expected one of: {known}"
            )
        chosen = kernel.choosing if forced.variant is None else functools.partial(kernel.run, variant=forced.variant)
        return forced.device, chosen

    def kernel(self, device: str) -> Kernel | None:
        """The kernel of a device, importing the backend module of this family on first use."""
        found = self._kernels.get(device)
        if found is None and device not in self._searched:
            try:
                backend_module(device, self.family)
            except ModuleNotFoundError as error:
                if error.name is None or not f"penstock.backends.{device}.{self.family}".startswith(error.name):
                    raise BackendError(
                        f"{self.name}: the {device} backend needs {error.name}, which is not installed"
                    ) from error
            self._searched.add(device)
            found = self._kernels.get(device)
        return found

    def backends(self) -> dict[str, Kernel | None]:
        """Kernel per device, None where there is none or the backend cannot be imported here."""
        found: dict[str, Kernel | None] = {}
        for device in DEVICES:
            try:
                found[device] = self.kernel(device)
            except PenstockError:
                found[device] = None
        return found

    def _check_values(self, values: tuple[Any, ...]) -> None:
        assert self.check is not None
        try:
            self.check(*[values[i] for i in self._checked])
        except InvalidArgument as error:
            raise type(error)(f"{self.name}: {error}") from None

    def _on_host(
        self, values: tuple[Any, ...], outputs: tuple[Any, ...] | None, plan: _Plan, run: Callable[..., None] | None
    ) -> tuple[Any, ...]:
        if self.check is not None:
            self._check_values(values)
        try:
            return self._computed(values, outputs, plan, run)
        except MemoryError:
            shapes = ", ".join(f"{spec.dtype} {spec.shape}" for spec in plan.specs if spec is not None)
            raise OutOfMemory(f"{self.name}: memory is too short for {shapes or 'its work'}") from None

    def _computed(
        self, values: tuple[Any, ...], outputs: tuple[Any, ...] | None, plan: _Plan, run: Callable[..., None] | None
    ) -> tuple[Any, ...]:
        if run is not None or self.partial:
            fresh = np.zeros if self.partial else np.empty
            if outputs is None:
                outputs = tuple([None if e is None else fresh(*e) for e in plan.empty])
            else:
                pairs = zip(outputs, plan.empty, strict=True)
                outputs = tuple(fresh(*e) if o is None and e is not None else o for o, e in pairs)
            target = outputs[0] if len(outputs) == 1 else outputs
            if run is None:
                with np.errstate(all="ignore"):
                    self.body(*values, out=target)
            elif outputs:
                run(*values, out=target)
            else:
                run(*values)
            return outputs
        with np.errstate(all="ignore"):
            returned = self.body(*values)
        results = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
        assert len(results) == len(plan.specs), (
            f"{self.name}: definition gave {len(results)} outputs, not {len(plan.specs)}"
        )
        for result, spec in zip(results, plan.specs, strict=True):
            if spec is None:
                continue
            assert spec_of(result) == spec, f"{self.name}: definition gave {spec_of(result)}, infer says {spec}"
        if outputs is None:
            return results
        pairs = zip(outputs, results, strict=True)
        return tuple(result if output is None else _copied(output, result) for output, result in pairs)

    def _on_cuda(
        self, values: tuple[Any, ...], outputs: tuple[Any, ...] | None, plan: _Plan, run: Any, place: str
    ) -> Any:
        import torch

        given = outputs or (None,) * len(plan.specs)
        fresh = torch.zeros if self.partial else torch.empty
        outputs = tuple(
            fresh(s.shape, dtype=getattr(torch, s.dtype), device=place) if o is None and s is not None else o
            for o, s in zip(given, plan.specs, strict=True)
        )
        with _current(torch, place):
            if outputs:
                run(*values, out=outputs[0] if len(outputs) == 1 else outputs)
            else:
                run(*values)
        return plan.result(outputs)

    def _through_host(
        self, values: tuple[Any, ...], outputs: tuple[Any, ...] | None, plan: _Plan, run: Any, place: str
    ) -> Any:
        """The definition on copies of GPU tensors (a forced "reference"); results and written state go back."""
        copies = tuple(_host_copy(value) for value in values)
        given = outputs or (None,) * len(plan.specs)
        start = tuple(None if o is None else numpy_view(o.cpu()) for o in given)
        results = self._on_host(copies, start if outputs else None, plan, run)
        for name, value, copy in zip(self.params, values, copies, strict=True):
            if name in self.writes and value is not None:
                value.copy_(torch_view(copy))
        back = []
        for output, result in zip(given, results, strict=True):
            tensor = None if result is None else torch_view(result)
            back.append(output.copy_(tensor) if output is not None else None if tensor is None else tensor.to(place))
        return plan.result(tuple(back))


_HERE = contextlib.nullcontext()


def _current(torch: Any, place: str) -> Any:
    """Makes the GPU of the arrays the current one, where kernels are launched, if it is not already."""
    if place == "cpu" or f"cuda:{torch.cuda.current_device()}" == place:
        return _HERE
    return torch.cuda.device(place)


def _ready(array: Any, empty: tuple[tuple[int, ...], np.dtype] | None) -> bool:
    """True if a kernel can write this NumPy array as the output it was made for, or is to make one (None)."""
    if array is None:
        return True
    if type(array) is not np.ndarray or empty is None or array.shape != empty[0] or array.dtype != empty[1]:
        return False
    flags = array.flags
    return flags.num & _ORDERLY == _ORDERLY and flags.writeable


def _clear(array: np.ndarray, others: tuple[Any, ...], places: Iterable[int], may_be: bool = False) -> bool:
    """False if the array shares memory with one of the others at these places, or might; `may_be`: it may be one."""
    for i in places:
        other = others[i]
        kind = type(other)
        if kind in _SCALARS or (may_be and other is array):
            continue
        if kind is np.ndarray:
            if np.may_share_memory(array, other):
                return False
        elif not issubclass(kind, QuantizedTensor) or not _clear(array, other.arrays, range(len(other.arrays))):
            return False
    return True


def _copied(output: Array, result: Array) -> Array:
    np.copyto(output, result)
    return output


def _host_copy(value: Any) -> Any:
    if isinstance(value, QuantizedTensor):
        return value.to("cpu")
    if isinstance(value, list | tuple):
        return type(value)(_host_copy(item) for item in value)
    return numpy_view(value.detach().cpu()) if is_array(value) else value


def _spelled(place: str) -> str:
    return {"numpy": "the host (NumPy)", "cpu": "the host (torch)"}.get(place, place)


def op(
    *,
    infer: Callable[..., Outputs],
    check: Callable[..., None] | None = None,
    writes: tuple[str, ...] = (),
    alias: bool = False,
    partial: bool = False,
    wide: bool = False,
) -> Callable[[Callable[..., Any]], Op]:
    """Make an op of a NumPy definition.

    infer    the definition's parameters, arrays as Spec → the outputs' Spec, or a tuple of them (None: not asked for)
    check    those of the parameters that it names, with host arrays; raises on values (ids, positions) out of range
    writes   arguments that the op changes in place; everything else is only read
    alias    `out=` may be an input of the same start, shape and dtype
    partial  the definition takes `out` and leaves some of it as it was; a new output starts at zero
    wide     kernels take scalars as float64: they may lie beyond float32
    """

    def decorate(body: Callable[..., Any]) -> Op:
        made = Op(body, infer, check, writes, alias, partial, wide)
        if made.name in REGISTRY:
            raise InvalidArgument(f"op: {made.name} is defined twice")
        REGISTRY[made.name] = made
        return made

    return decorate


def kernel(
    op: Op, *, device: str, variants: tuple[str, ...] = (), composed: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a kernel: called with the op's arguments by position and `out=` (an array, or a tuple with None for an
    output that is not wanted), and with `variant=` (None: choose) if it has variants. It writes `out`.
    """
    if device not in DEVICES:
        raise InvalidArgument(f"kernel: device is {device!r}, expected one of {', '.join(DEVICES)}")

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        if device in op._kernels:
            raise InvalidArgument(f"kernel: {op.name} has two kernels for device {device!r}")
        op._kernels[device] = Kernel(run, variants, composed)
        return run

    return decorate
