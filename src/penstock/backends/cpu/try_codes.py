"""The process that tries machine code: one fork for each piece, since an instruction that is refused kills.

Run as a script with the standard library alone, by `features.try_codes`.
"""

import ctypes
import mmap
import os
import platform
import signal
import sys


def allow_amx() -> bool:
    """Ask the kernel to let this process use AMX tiles; every process has to, once. False if it refuses."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0


def _run_code(code: bytes) -> None:
    """Call machine code with a tile configuration as its argument: palette 1, eight tiles of 16 rows of 64 bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # Written first, made executable afterwards: hardened systems forbid both at once.
    if libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    tile_config = bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8)
    ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)(tile_config)


def try_each(arguments: list[str]) -> None:
    """The child process: fork once per name=code and print name=exit code."""
    pr_set_dumpable = 4
    ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0)  # no core files of processes that die on purpose
    for argument in arguments:
        name, _, code = argument.partition("=")
        pid = os.fork()
        if pid == 0:
            exit_code = 1
            signal.alarm(5)  # for code that neither dies nor returns
            try:
                if name.startswith("amx"):
                    allow_amx()
                _run_code(bytes.fromhex(code))
                exit_code = 0
            finally:
                os._exit(exit_code)
        print(f"{name}={os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)


if __name__ == "__main__":
    try_each(sys.argv[1:])
