"""Kernels are compiled whole: the functions that they call become LLVM modules that are linked into them, no more.

Numba makes machine code, and a wrapper for Python, of every function that a kernel calls, optimised for itself, though
LLVM optimises it again inside of the kernel and only that is run. The demo model's 24 kernels call 210 functions:
without all that its first run compiles for 44 instead of 86 seconds of a core.
"""

from collections.abc import Callable
from typing import Any

import numba
from numba.core import codegen, compiler, environment

_ENVIRONMENT = "_ZN08NumbaEnv"  # how the names of global variables begin that point to Python objects of a function


class PartLibrary(codegen.JITCodeLibrary):
    """Code of a function that other functions are compiled with: it is linked into theirs and never run from here.

    Of LLVM's passes it gets those of single functions: without them kernels of prompts are 5 to 8 % slower.
    """

    @property
    def codegen(self) -> Any:
        return _WithoutEnvironments()

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class _WithoutEnvironments:
    """What Numba asks of a part's code generator once it is there. The kernel's own copy of an environment counts."""

    def set_env(self, env_name: str, env: Any) -> None:
        pass


class KernelCompiler(compiler.Compiler):
    """Makes machine code of one function alone; all others that this needs are parts."""

    def __init__(
        self, typingctx: Any, targetctx: Any, library: Any, args: Any, return_type: Any, flags: Any, locals: Any
    ) -> None:
        if library is None:
            library = codegen.JITCodeLibrary(targetctx.codegen(), "kernel")
            library.enable_object_caching()
        super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)

    def compile_extra(self, func: Callable) -> Any:
        generator = self.state.targetctx.codegen()
        # Numba holds its lock: all that is compiled meanwhile is for this kernel
        generator._library_class = PartLibrary
        try:
            result = super().compile_extra(func)
        finally:
            del generator._library_class  # that of its class shows again
        for variable in result.library._final_module.global_variables:
            if variable.name.startswith(_ENVIRONMENT):
                found = environment.lookup_environment(variable.name)
                if found is not None:
                    generator.set_env(variable.name, found)
        return result


def compiled_whole(py_func: Callable, options: dict[str, Any]) -> tuple[Any, Any]:
    """numba.njit of a function twice: as a kernel that Python calls, and as the part that it is of other kernels."""
    kernel = numba.njit(**options, pipeline_class=KernelCompiler)(py_func)
    if kernel is py_func:  # NUMBA_DISABLE_JIT
        return kernel, kernel
    part = numba.njit(**options, no_cpython_wrapper=True, no_cfunc_wrapper=True)(py_func)
    kernel.get_call_template, kernel.get_overload = part.get_call_template, part.get_overload
    return kernel, part
