"""penstock doctor: what penstock finds on this machine, what it can use of it, and what is missing."""

import importlib
import importlib.util
import json
import platform
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock._version import __version__
from penstock.backends.cuda.features import CAPABILITY, INSTALL, unusable
from penstock.cli._output import print_json, print_table
from penstock.settings import Settings, shown, variable

_SUPPORTED = {"torch": ((2, 11), (2, 13)), "triton": ((3, 6), (3, 9))}  # first and last minor version
_DIED = "the process that tried torch died"


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what penstock finds on this machine and what it can use.

    Every SIMD instruction set is tried in a child process, because using one that the machine lists but does not
    really have kills the process. Things that are missing are named with the way to get them; they are no error.

    \b
    Examples:
      penstock doctor
      penstock doctor --json
    """
    report = examined()
    if as_json:
        print_json(report)
    else:
        print_table(("", "value"), _rows(report), wrap=("value",), header=False)
        for note in report["notes"]:
            print(f"note: {note}")


def examined() -> dict[str, Any]:
    """The whole report, as `--json` prints it. A missing package has version null, a broken one an error too."""
    from penstock.backends.cpu import features

    outcomes = features.probe()
    total, free = features.memory()
    report: dict[str, Any] = {
        "penstock": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {},
        "errors": {},
        "cpu": {
            "model": features.cpu_model(),
            "architecture": platform.machine(),
            "physical_cores": features.physical_cores(),
            "threads": features.usable_threads(),
            "features": [name for name, outcome in outcomes.items() if outcome == features.USABLE],
            "unusable": {
                name: outcome
                for name, outcome in outcomes.items()
                if outcome not in (features.USABLE, features.NOT_LISTED)
            },
        },
        "memory": {"total": total, "free": free},
        "cuda": {"available": False, "driver": _driver(), "torch_built_for": None, "devices": [], "unusable": _DIED},
        "settings": shown(Settings.from_env()),
    }
    for name in ("numpy", "numba", "llvmlite"):
        _note_package(report, name)
    _ask_accelerator(report)
    report["notes"] = _notes(report)
    return report


def _note_package(report: dict[str, Any], name: str) -> None:
    report["packages"][name] = None
    if importlib.util.find_spec(name) is None:
        return
    try:
        report["packages"][name] = importlib.import_module(name).__version__
    except Exception as error:  # a broken package may raise anything, and that is what is asked here
        report["errors"][name] = _first_line(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _driver() -> str | None:
    """Version of the NVIDIA kernel driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else "unknown"


def _ask_accelerator(report: dict[str, Any]) -> None:
    """Add triton, torch and the GPUs that torch sees, asked in a child process: a broken torch can end the process."""
    report["packages"] |= {"torch": None, "triton": None}
    code = "from penstock.cli.doctor import print_accelerator; print_accelerator()"
    try:
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        report["errors"]["torch"] = _first_line(error)
        return
    for line in child.stdout.splitlines():
        if line.startswith("{"):
            for part, found in json.loads(line).items():
                report[part] |= found
    if child.returncode != 0:
        report["errors"]["torch"] = f"the process that tried it ended with {child.returncode}"


def print_accelerator() -> None:
    """The child process: print findings as soon as they are there, so that an early death loses only the rest."""
    report: dict[str, Any] = {"packages": {}, "errors": {}}
    for name in ("triton", "torch"):
        _note_package(report, name)
        print(json.dumps(report), flush=True)
    if report["packages"]["torch"] is None:
        print(json.dumps({"cuda": {"unusable": unusable()}}), flush=True)
        return
    torch = sys.modules["torch"]
    print(json.dumps({"cuda": {"torch_built_for": torch.version.cuda}}), flush=True)
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        devices.append({"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory": gpu.total_memory})
    found = {"available": bool(devices), "devices": devices, "unusable": unusable()}
    print(json.dumps({"cuda": found}), flush=True)


def _notes(report: dict[str, Any]) -> list[str]:
    """What is missing or unused, and what to do about it."""
    notes = [
        f"{name} is listed by the system, but {outcome} when tried; penstock does without it"
        for name, outcome in report["cpu"]["unusable"].items()
    ]
    notes += [f"{name} is installed but cannot be used: {error}" for name, error in report["errors"].items()]
    for name, (first, last) in _SUPPORTED.items():
        version = report["packages"][name]
        if version is None and name not in report["errors"]:
            notes.append(f"{name} is not installed; only GPUs and torch tensors need it: {INSTALL}")
        elif version is not None and not first <= _minor(version) <= last:
            tested = " to ".join(".".join(map(str, bound)) for bound in (first, last))
            notes.append(f"{name} {version} is outside the tested range {tested}: {INSTALL}")
    if not report["cuda"]["devices"]:
        notes.append(_why_no_gpu(report))
    for gpu in report["cuda"]["devices"]:
        if _minor(gpu["capability"]) < CAPABILITY:
            notes.append(f"{gpu['name']} has compute capability {gpu['capability']}, expected 8.0 or newer")
    return notes


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _why_no_gpu(report: dict[str, Any]) -> str:
    driver, torch = report["cuda"]["driver"], report["packages"]["torch"]
    if driver is None:
        return "no NVIDIA driver is loaded here; penstock runs on the CPU"
    if torch is None:
        return f"an NVIDIA driver ({driver}) is loaded, but there is no torch to reach the GPU: {INSTALL}"
    if report["cuda"]["torch_built_for"] is None:
        return f"torch {torch} is built without CUDA; install a CUDA build of torch to use the GPU"
    return f"torch sees no GPU, although an NVIDIA driver ({driver}) is loaded; check CUDA_VISIBLE_DEVICES"


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, memory = report["cpu"], report["memory"]
    rows = [
        ("penstock", report["penstock"]),
        ("python", f"{report['python']} ({report['executable']})"),
        ("platform", report["platform"]),
        *((name, report["packages"][name] or "not found") for name in ("numpy", "numba", "llvmlite")),
        ("cpu", f"{cpu['model']} ({cpu['architecture']})"),
        ("cores", f"{cpu['physical_cores']} physical, {cpu['threads']} threads usable"),
        ("memory", f"{_gib(memory['total'])} usable, {_gib(memory['free'])} free"),
        ("simd usable", " ".join(cpu["features"]) or "none of those that penstock knows"),
    ]
    if cpu["unusable"]:
        rows.append(("simd listed only", " ".join(cpu["unusable"])))
    rows += ((name, report["packages"][name] or "not found") for name in ("torch", "triton"))
    gpus = [
        f"{gpu['name']}, compute capability {gpu['capability']}, {_gib(gpu['memory'])}"
        for gpu in report["cuda"]["devices"]
    ]
    rows.append(("cuda", "; ".join(gpus) or "not available"))
    why = report["cuda"]["unusable"]
    rows.append(("models run on", "cuda" if why is None else f"cpu ({why})"))
    values = report["settings"]
    changed = [f"{variable(f)}={values[f.name]}" for f in fields(Settings) if values[f.name] != f.default]
    rows.append(("settings", " ".join(changed) or "defaults"))
    return rows


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size else "unknown"
