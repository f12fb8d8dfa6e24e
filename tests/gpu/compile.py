"""Compiles CUDA kernels on a machine without a GPU and shows what they need.

    python -m tests.gpu.compile norm            every kernel that the cases of a family (or of one op) launch
    python -m tests.gpu.compile norm --arch 80  for another compute capability, or for several one after the other

`pretend(arch)` does the same for any program: inside it a launch compiles the kernel, records it and runs nothing.
"""

import argparse
import contextlib
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled: its constants, and what a thread and a block of it need."""

    name: str
    constants: str
    registers: int
    spilled: int  # bytes of local memory per thread
    shared: int  # bytes per block
    warps: int
    asm: dict[str, Any]


class _Driver:
    """Stands in for a GPU: knows its target, has no memory and no streams."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # a number of its own: Triton keeps what it compiled by device

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _dumped(cubin: bytes, what: str) -> str:
    """What cuobjdump says of a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=False).stdout


def _needs(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a kernel."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _dumped(cubin, "-res-usage"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def first_loop(cubin: bytes) -> list[str]:
    """The instructions of the first loop of a kernel, without what predicates them; none if there is no loop."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ +)?([A-Z][^;]*);", _dumped(cubin, "-sass"))
    made = [(int(at, 16), text.strip()) for at, text in lines]
    for at, text in made:
        back = re.match(r"BRA\b.*0x([0-9a-f]+)", text)
        if back is not None and (start := int(back[1], 16)) < at:
            return [one for where, one in made if start <= where <= at]
    return []


@contextlib.contextmanager
def pretend(arch: int = 90, needs: bool = True) -> Iterator[list[Compiled]]:
    """Inside the block launches compile for a GPU of this compute capability; yields the list of what was compiled.

    needs: with registers and stack, for which a tool is started for every kernel; else both are 0.
    """
    if triton.knobs.runtime.interpret:
        raise SystemExit("compile: TRITON_INTERPRET is set, and interpreted kernels are not compiled: unset it")
    compiled: dict[int, Compiled] = {}
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in compiled and not hasattr(kernel, "result"):  # it is not yet one where others compile it
            names = {n: kwargs[n] for n in self.arg_names if n in kwargs and n.isupper()}
            registers, stack = _needs(kernel.asm["cubin"]) if needs else (0, 0)
            constants = " ".join(f"{n}={v}" for n, v in names.items())
            meta = kernel.metadata
            made = Compiled(meta.name, constants, registers, stack, meta.shared, meta.num_warps, dict(kernel.asm))
            compiled[id(kernel)] = made
            found.append(made)
        return kernel

    before = driver._active
    driver.set_active(_Driver(arch))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = before


def compile_cases(
    names: list[str], arch: int, small: bool = True, first: bool = False, needs: bool = True
) -> tuple[list[Compiled], list[str]]:
    """What calls of these families and ops launch, and what failed: those at the sizes of models (first: one of each
    line of tests/gpu/model_sized.py), and the small ones of tests/ops/cases.py.
    """
    import penstock
    from penstock import ops
    from penstock.backends.cuda._tuning import gpu
    from tests.gpu.common import to_device
    from tests.gpu.model_sized import CALLS
    from tests.ops.cases import CASES

    def asked(name: str) -> bool:
        op = ops.REGISTRY[name]
        return (not names or bool({op.name, op.family} & set(names))) and op.kernel("cuda") is not None

    large = (call for call in CALLS if asked(call.op))
    calls = [
        (f"{call.op} {given}", functools.partial(call.run, *given))
        for call in large
        for given in call.arguments[: 1 if first else None]
    ]
    for case in (case for case in CASES if small and asked(case.op)):
        for dtype in case.dtypes:
            arguments = {name: to_device(value) for name, value in case.arguments(dtype).items()}
            calls.append((f"{case} {dtype}", functools.partial(ops.REGISTRY[case.op], **arguments)))
    failed = []
    with pretend(arch, needs) as found, penstock.backend("cuda"):
        for name, call in calls:
            try:
                call()
            except Exception as error:  # a compiler's errors are of many kinds; each is reported
                failed.append(f"{name}: {type(error).__name__}: {str(error)[:2000]}")
    room = gpu(divmod(arch, 10)).shared << 10
    over = [
        f"{made.name} {made.constants}: {made.shared} B shared, at most {room}" for made in found if made.shared > room
    ]
    other = [f"{made.name}: not for sm_{arch}" for made in found if f".target sm_{arch}" not in made.asm["ptx"]]
    return found, [*failed, *over, *other, *filter(None, map(_impatient, found))]


def _impatient(made: Compiled) -> str:
    """What is wrong with a kernel that may start before the one ahead of it has ended, and never waits for that."""
    waits = "griddepcontrol.wait" in made.asm["ptx"]
    return "" if waits or "PDL=True" not in made.constants else f"{made.name}: has PDL and does not wait"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="families or ops; all if left out")
    parser.add_argument("--arch", type=int, nargs="+", default=[90])
    parser.add_argument("--large", action="store_true", help="only calls at the sizes of models")
    parser.add_argument("--first", action="store_true", help="of those the first of each kind")
    parser.add_argument("--brief", action="store_true", help="do not show what each kernel needs")
    args = parser.parse_args()
    wrong = 0
    for arch in args.arch:
        found, failed = compile_cases(args.names, arch, not args.large, args.first, not args.brief)
        for made in [] if args.brief else found:
            needs = f"{made.registers:4} registers {made.spilled:5} B stack"
            needs = f"{needs} {made.shared:7} B shared {made.warps:2} warps"
            print(f"{needs}  {made.name} {made.constants}")
        for line in failed:
            print("FAILED", line, file=sys.stderr)
        print(f"{len(found)} kernels compiled for sm_{arch}, {len(failed)} calls failed")
        wrong += len(failed)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
