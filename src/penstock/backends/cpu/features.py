"""What the CPU under this process can really do: instruction sets, cores, memory.

A machine may list an instruction that its hypervisor or emulator then refuses, and whoever tries such an instruction
is killed by SIGILL. So every one is tried in a process of its own. Only the standard library is imported: this file is
also the script of the process that tries.
"""

import ctypes
import functools
import math
import mmap
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
SYS = Path("/sys")

# feature: (flag in /proc/cpuinfo, machine code of a function void f(const void *tile_config))
_VZEROUPPER_RET = "c5f877 c3"
_TILES = "c4e2784907 c4e27b49c0 c4e27b49c8 c4e27b49d0"  # ldtilecfg [rdi]; tilezero tmm0, tmm1, tmm2
_TILERELEASE_RET = "c4e27849c0 c3"
_X86 = {
    "sse4.2": ("sse4_2", "660f3837c1 c3"),  # pcmpgtq xmm0, xmm1
    "avx": ("avx", f"c5fc58c0 {_VZEROUPPER_RET}"),  # vaddps ymm0, ymm0, ymm0
    "avx2": ("avx2", f"c5fdfec0 {_VZEROUPPER_RET}"),  # vpaddd ymm0, ymm0, ymm0
    "fma": ("fma", f"c4e27db8c0 {_VZEROUPPER_RET}"),  # vfmadd231ps ymm0, ymm0, ymm0
    "f16c": ("f16c", f"c4e27d13c0 {_VZEROUPPER_RET}"),  # vcvtph2ps ymm0, xmm0
    "avx_vnni": ("avx_vnni", f"c4e27d50c0 {_VZEROUPPER_RET}"),  # {vex} vpdpbusd ymm0, ymm0, ymm0
    "avx512f": ("avx512f", f"62f17c4858c0 {_VZEROUPPER_RET}"),  # vaddps zmm0, zmm0, zmm0
    "avx512bw": ("avx512bw", f"62f17d48fcc0 {_VZEROUPPER_RET}"),  # vpaddb zmm0, zmm0, zmm0
    "avx512vl": ("avx512vl", f"62f37d2825c0ff {_VZEROUPPER_RET}"),  # vpternlogd ymm0, ymm0, ymm0, 255
    "avx512dq": ("avx512dq", f"62f2fd4840c0 {_VZEROUPPER_RET}"),  # vpmullq zmm0, zmm0, zmm0
    "avx512_vnni": ("avx512_vnni", f"62f27d4850c0 {_VZEROUPPER_RET}"),  # vpdpbusd zmm0, zmm0, zmm0
    "avx512_bf16": ("avx512_bf16", f"62f27e4852c0 {_VZEROUPPER_RET}"),  # vdpbf16ps zmm0, zmm0, zmm0
    "avx512_vbmi": ("avx512vbmi", f"62f27d488dc0 {_VZEROUPPER_RET}"),  # vpermb zmm0, zmm0, zmm0
    "amx_tile": ("amx_tile", f"{_TILES} {_TILERELEASE_RET}"),
    "amx_int8": ("amx_int8", f"{_TILES} c4e26b5ec1 {_TILERELEASE_RET}"),  # tdpbssd tmm0, tmm1, tmm2
    "amx_bf16": ("amx_bf16", f"{_TILES} c4e26a5cc1 {_TILERELEASE_RET}"),  # tdpbf16ps tmm0, tmm1, tmm2
}
_ARM = {
    "neon": ("asimd", "0084a04e c0035fd6"),  # add v0.4s, v0.4s, v0.4s; ret
    "dotprod": ("asimddp", "2094814e c0035fd6"),  # sdot v0.4s, v1.16b, v1.16b
    "i8mm": ("i8mm", "20a4814e c0035fd6"),  # smmla v0.4s, v1.16b, v1.16b
    "bf16": ("bf16", "20fc416e c0035fd6"),  # bfdot v0.4s, v1.8h, v1.8h
    "sve": ("sve", "0000a004 c0035fd6"),  # add z0.s, z0.s, z0.s
}
_BY_MACHINE = {"x86_64": _X86, "aarch64": _ARM}

USABLE = "usable"
NOT_LISTED = "not listed"


@functools.cache
def probe() -> dict[str, str]:
    """Every instruction set that matters on this kind of machine, and how it fared.

    "usable"; "not listed" by the system; "killed by SIGILL"; or "not tried" with the reason. Empty where penstock knows
    no way to ask: the portable kernels need none of these.
    """
    known = _BY_MACHINE.get(platform.machine(), {}) if sys.platform == "linux" else {}
    listed = _listed_flags()
    tried = try_codes({name: code for name, (flag, code) in known.items() if flag in listed})
    return {name: tried.get(name, NOT_LISTED) for name in known}


@functools.cache
def usable_features() -> frozenset[str]:
    """Names of the instruction sets that a process on this machine can use; the AMX ones after `allow_amx()`."""
    return frozenset(name for name, outcome in probe().items() if outcome == USABLE)


def try_codes(codes: dict[str, str], timeout: float = 20.0) -> dict[str, str]:
    """Run machine code (hexadecimal, by name) in a child process, one fork each; the outcome by name."""
    if not codes:
        return {}
    command = [sys.executable, "-P", "-S", __file__, *(f"{name}={code}" for name, code in codes.items())]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout
        )
        printed, reason = child.stdout, f"child process ended with {child.returncode}"
    except subprocess.TimeoutExpired as late:
        printed, reason = late.stdout or b"", f"no answer in {timeout:g} s"
    except OSError as error:
        printed, reason = b"", f"no child process: {error.strerror}"
    exits = dict(line.split("=") for line in printed.decode().splitlines())
    return {name: _outcome(int(exits[name])) if name in exits else f"not tried: {reason}" for name in codes}


def _outcome(exit_code: int) -> str:
    if exit_code == 0:
        return USABLE
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return "not tried: no executable memory"


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


def _try_each(arguments: list[str]) -> None:
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


# --------------------------------------------------------------------------------------------------------------------
# Cores and memory, as far as affinity and control groups let this process use them


def cpu_model() -> str:
    """The name of the CPU, or of its architecture where the system does not tell."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def usable_threads() -> int:
    """Hardware threads this process may run on."""
    return min(len(_allowed_cpus()), _cpu_quota())


def physical_cores() -> int:
    """Physical cores this process may run on: hardware threads that share a core count once."""
    cores = {
        _read(SYS / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in _allowed_cpus()
    }
    return min(len(cores), _cpu_quota())


def memory(reclaim: bool = False) -> tuple[int, int]:
    """Bytes of memory this process may use, and how much of it is free now; zeros where the system does not tell.

    With `reclaim` page cache that a control group counts as used, and could drop, is free.
    """
    sizes = {}
    for line in _read(PROC / "meminfo").splitlines():
        name, _, value = line.partition(":")
        sizes[name] = int(value.split()[0]) * 1024
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    for group in _control_groups("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit_bytes, used_bytes = _read(group / limit), _read(group / used)
            if limit_bytes.isdigit() and used_bytes.isdigit():
                total = min(total, int(limit_bytes))
                cached = _page_cache(group) if reclaim else 0
                free = min(free, max(0, int(limit_bytes) - int(used_bytes) + cached))
    return total, free


def _page_cache(group: Path) -> int:
    """Bytes of files that a control group keeps in memory."""
    lines = _read(group / "memory.stat").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def _read(path: Path) -> str:
    """A small system file without the newline at its end; empty if there is none or it may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    first = _read(PROC / "cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _listed_flags() -> frozenset[str]:
    info = _cpuinfo()
    return frozenset((info.get("flags") or info.get("Features", "")).split())


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _control_groups(controller: str) -> list[Path]:
    """The control group of this process and all above it, in version 2 or 1."""
    groups: list[Path] = []
    for line in _read(PROC / "self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = SYS / "fs/cgroup" / (controller if controllers else "")
        path = PurePosixPath(name.lstrip("/"))
        groups += (root / part for part in (path, *path.parents))
    return groups


def _cpu_quota() -> int:
    """CPUs' worth of time that the control groups grant, rounded up; a large number if there is no limit."""
    granted = [math.inf]
    for group in _control_groups("cpu"):
        limit = _read(group / "cpu.max").split() or [
            _read(group / "cpu.cfs_quota_us"),
            _read(group / "cpu.cfs_period_us"),
        ]
        if len(limit) == 2 and limit[0].isdigit() and limit[1].isdigit():
            granted.append(int(limit[0]) / int(limit[1]))
    least = min(granted)
    return sys.maxsize if least == math.inf else max(1, math.ceil(least))


if __name__ == "__main__":
    _try_each(sys.argv[1:])
