"""What the CPU under this process can really do: which instruction sets are usable.

A machine may list an instruction that its hypervisor or emulator then refuses, and a process that tries such an
instruction is killed by SIGILL. So every one is tried in a process of its own (`try_codes.py`).
"""

import functools
import platform
import signal
import subprocess
import sys
from pathlib import Path

from penstock.machine import cpu_flags

_SCRIPT = Path(__file__).with_name("try_codes.py")

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
    listed = cpu_flags()
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
    command = [sys.executable, "-P", "-S", str(_SCRIPT), *(f"{name}={code}" for name, code in codes.items())]
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
