"""How every CPU kernel is compiled: `njit` with the project's options and a cache of its machine code.

Numba's own cache misses edits in helper files, and processes that write one index at once can mix up kernels. Here each
compiled signature is one file, put in place by rename, in a folder named after the content of all CPU sources. Other
packages' caches are left alone; a folder that cannot be written only means compiling again in the next process.
"""

import contextlib
import hashlib
import inspect
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import caching, compiler, registry, serialize, sigutils, types
from numba.extending import intrinsic

from penstock import compile_progress, kernel_cache
from penstock.backends.cpu import _parts, compile_lock
from penstock.errors import InvalidArgument

# What a kernel may let LLVM do with its floats. Neither set lets it assume away NaN, infinity or the sign of zero.
FUSED_MULTIPLY_ADD = frozenset({"contract"})
SUM_IN_ANY_ORDER = frozenset({"reassoc", "contract"})

WHERE = "this CPU"  # that kernels are compiled for, as a user reads it


def njit(
    function: Callable | None = None,
    *,
    signature: str | Sequence[str] = (),
    parallel: bool = False,
    fastmath: frozenset[str] = frozenset(),
    cache_dir: str | Path | None = None,
    **options: Any,
) -> Any:
    """numba.njit that releases the GIL, divides by zero as NumPy does and caches in `cache_folder(cache_dir)`.

    Without a signature a kernel is compiled or loaded at its first call with each set of types; with one or several,
    when its module is imported, and other types raise TypeError. `options` go to Numba as they are (inline, locals).
    """
    if isinstance(fastmath, bool):
        raise InvalidArgument(f"njit: fastmath is {fastmath}, expected a set of flags such as SUM_IN_ANY_ORDER")

    def decorate(py_func: Callable) -> Any:
        flags = set(fastmath) or False
        if py_func.__closure__:  # code of two processes may meet in a third: kernels of one factory need names
            py_func.__qualname__ += "_" + hashlib.sha256(repr(_identity(py_func)).encode()).hexdigest()[:12]
        given = {"error_model": "numpy", "nogil": True, "parallel": parallel, "fastmath": flags, **options}
        kernel, part = _parts.compiled_whole(py_func, given)
        if kernel is py_func:  # NUMBA_DISABLE_JIT
            return kernel
        kernel._cache = _KernelCache(py_func, cache_dir)
        part._cache = _PartCache(py_func, cache_dir)
        for one in [signature] if isinstance(signature, str) else signature:
            kernel.compile(one)
            part.compile(one)
        if signature:
            kernel.disable_compile()
            part.disable_compile()
        kernel.compile = _listed_or_shown(kernel, kernel.compile)
        return kernel

    return decorate if function is None else decorate(function)


_here = threading.local()  # of the thread that lists kernels


@contextlib.contextmanager
def listing() -> Iterator[dict[Path, tuple[Any, Any]]]:
    """Inside, kernels that this process has neither compiled nor loaded do nothing when this thread calls them.

    Yields a table that is filled at the end: where the machine code of each belongs, the kernel and its signature.
    """
    listed: dict[Path, tuple[Any, Any]] = {}
    _here.called = called = {}
    try:
        yield listed
    finally:
        _here.called = None
    listed |= {kernel._cache.file(sig, kernel.targetctx.codegen()): (kernel, sig) for kernel, sig in called}


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _listed_or_shown(kernel: Any, compile: Callable) -> Callable:
    """What compiles a kernel that is called with types for the first time."""

    def compile_in_sight(sig: Any) -> Any:
        if getattr(_here, "called", None) is not None:
            _here.called[kernel, sig] = None
            return _nothing
        if (place := kernel._cache.file(sig, kernel.targetctx.codegen())).exists():
            return compile(sig)
        with compile_progress.compiling():
            compile_progress.show(WHERE, kernel_name(kernel))
            with compile_lock.hold(place):
                return compile(sig)

    return compile_in_sight


def compiles() -> bool:
    """Whether kernels are compiled at all; with NUMBA_DISABLE_JIT they are Python."""
    return not numba.config.DISABLE_JIT


if compiles():

    @intrinsic
    def keep_alive(typingctx, arrays):
        """Nothing, behind the last use of pointers to an array that a kernel has made, or a tuple of such: Numba frees
        an array as soon as nothing names it any more.
        """
        sig = types.void(arrays)
        return sig, lambda context, builder, sig, args: context.get_dummy_value()

else:

    def keep_alive(arrays):
        pass


def this_cpu() -> tuple[str, ...]:
    """Tells the machine code of this CPU from that of others."""
    return registry.cpu_target.target_context.codegen().magic_tuple()


def kernel_name(kernel: Any) -> str:
    return kernel.py_func.__qualname__.rpartition(".")[2].lstrip("_")


def cache_folder(root: str | Path | None = None) -> Path:
    """`root/numba/<hash of sources and compiler>`; without root: PENSTOCK_CACHE_DIR, then the user's cache folder."""
    return kernel_cache.cache_root(root) / _BELOW


def trusted_folder(root: str | Path | None = None) -> Path:
    """`cache_folder(root)`, or the same in a folder of this process where others could have put their code there."""
    return kernel_cache.trusted(kernel_cache.cache_root(root), _BELOW)


def _source_hash(path: Path) -> str:
    """Of a Python file, or all of a folder, and of the versions whose machine code or pickles may differ."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.implementation.cache_tag}".encode())
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        digest.update(f"\0{file.relative_to(path).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


_SOURCES = _source_hash(Path(__file__).parent)
_BELOW = f"numba/{_SOURCES}"


def _identity(py_func: Callable) -> tuple:
    """Tells a function from others of its file: name, line and what it closes over."""
    values = [inspect.unwrap(cell.cell_contents) for cell in py_func.__closure__ or ()]
    closure = [_identity(value) if inspect.isfunction(value) else serialize.dumps(value) for value in values]
    return py_func.__module__, py_func.__qualname__, py_func.__code__.co_firstlineno, closure


class _KernelCache(caching.NullCache):
    """Machine code of one kernel, a file per signature and CPU: digest of its full name and a pickle, then the pickle.

    The file's own name has only a part of that, so it does not say what the content is.
    """

    _kind, _suffix = "kernel", "nbc"

    def __init__(self, py_func: Callable, root: str | Path | None) -> None:
        self._py_func, self._root = py_func, root
        self._source = _source_hash(Path(py_func.__code__.co_filename))  # counts for kernels outside of this folder

    @property
    def cache_path(self) -> Any:
        return trusted_folder(self._root)

    def _full_name(self, sig: Any, codegen: Any) -> str:
        """All that tells the machine code of one signature on one CPU from any other."""
        types = map(str, sigutils.normalize_signature(sig))
        return repr((self._kind, *types, codegen.magic_tuple(), _SOURCES, self._source, _identity(self._py_func)))

    def _place(self, full_name: str) -> Path:
        key = hashlib.sha256(full_name.encode()).hexdigest()
        return self.cache_path / f"{self._py_func.__module__}.{self._py_func.__qualname__}-{key[:32]}.{self._suffix}"

    def file(self, sig: Any, codegen: Any) -> Path:
        """Where the machine code of one signature on one CPU belongs."""
        return self._place(self._full_name(sig, codegen))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        full_name = self._full_name(sig, target_context.codegen())
        data = kernel_cache.read(self._place(full_name)) or b""
        if kernel_cache.digest(full_name, data[32:]) != data[:32]:
            return None
        return compiler.CompileResult._rebuild(target_context, *pickle.loads(data[32:]))

    def save_overload(self, sig: Any, cres: Any) -> None:
        if cres.library.has_dynamic_globals or cres.lifted:  # holds addresses that only this process knows
            return
        if _source_hash(Path(__file__).parent) != _SOURCES:  # edited since the import: what was compiled is not known
            return
        full_name, data = self._full_name(sig, cres.codegen), serialize.dumps(self._reduced(cres))
        with contextlib.suppress(OSError):
            kernel_cache.write(self._place(full_name), kernel_cache.digest(full_name, data) + data)

    def _reduced(self, cres: Any) -> tuple[Any, ...]:
        return cres._reduce()


class _PartCache(_KernelCache):
    """The same for a function as a part of kernels: its code as LLVM has it."""

    _kind, _suffix = "part", "part"

    def _reduced(self, cres: Any) -> tuple[Any, ...]:
        return cres._replace(library=_Bitcode(cres.library))._reduce()


class _Bitcode:
    """A library that has no machine code."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def serialize_using_object_code(self) -> tuple[Any, ...]:
        return self._library.serialize_using_bitcode()
