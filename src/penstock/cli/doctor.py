"""penstock doctor: what penstock finds on this machine, what it can use of it, and what is missing."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock import kernel_cache
from penstock._version import __version__
from penstock.backends.cuda.runtime.features import CAPABILITY, INSTALL, unusable
from penstock.cli._model import cached_models, hub_cache
from penstock.cli._output import print_json, print_table
from penstock.parallel.launch import Torchrun, joined_by_torchrun
from penstock.settings import Settings, shown, variable
from penstock.units import amount

if TYPE_CHECKING:
    from penstock.parallel.measure import SumTimes

_SUPPORTED = {"torch": ((2, 11), (2, 13)), "triton": ((3, 6), (3, 9))}  # first and last minor version
_DIED = "the process that tried torch died"
_LIBRARIES = ("ml_dtypes", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "typer", "rich")
# What the extras of pyproject.toml bring besides torch and triton, and what for.
_EXTRAS = {
    "server": (("starlette", "uvicorn", "pydantic", "prometheus_client", "msgspec"), "to serve models over HTTP"),
    "grammar": (("llguidance",), "for answers that follow a JSON schema or a grammar"),
    "gguf": (("gguf",), "to convert GGUF files of types that no kernel reads"),
    "distributed": (("msgspec",), "to split a model over ranks"),
}
_DISK_BYTES = 64 << 20  # written and read to measure a disk
_DISK_SECONDS = 2.0  # a slow disk is measured with less
_COUNT_SECONDS = 2.0  # for the files of a cache
_DISK_ROOM = 1 << 30  # free bytes below which a disk is left alone
_TORCHRUN = "torchrun --nproc-per-node N -m penstock doctor"


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what penstock finds on this machine and what is missing.

    Every SIMD instruction set is tried in a child process, because using one that the machine lists but does not
    really have kills the process. The disk on which models are kept is measured with a temporary file of 64 MB.
    Things that are missing are named with the way to get them; they are no error. Under torchrun (torchrun
    --nproc-per-node 2 -m penstock doctor) the sums over ranks that a split model needs are measured, at the sizes of
    its steps, for penstock plan.

    \b
    Examples:
      penstock doctor
      penstock doctor --json
    """
    joined = joined_by_torchrun()
    sums = None if joined is None else _measured_sums(joined)
    if joined is not None and joined.rank > 0:
        return
    report = examined()
    report["ranks"] = None if joined is None or sums is None else _described(joined, sums)
    if as_json:
        print_json(report)
    else:
        print_table(("", "value"), _rows(report), wrap=("value",), header=False)
        for note in report["notes"]:
            print(f"note: {note}")
        if sums is not None:
            _print_sums(sums)


def _measured_sums(joined: Torchrun) -> "SumTimes":
    """Sums over all processes that torchrun has started."""
    from penstock.engine.options import resolve_device
    from penstock.engine.rank import rank_backend
    from penstock.parallel.launch import RankOptions, join_torchrun
    from penstock.parallel.measure import measure_sums

    backend = rank_backend(resolve_device("auto"), joined.local_size)
    if backend == "nccl":
        import torch

        torch.cuda.set_device(joined.local_rank)
    group = join_torchrun(joined, RankOptions(backend))
    try:
        return measure_sums(group)
    finally:
        group.close()


def _described(joined: Torchrun, sums: "SumTimes") -> dict[str, Any]:
    return {
        "size": sums.size,
        "local_size": joined.local_size,
        "backend": sums.backend,
        "dtype": sums.dtype,
        "sums": [
            {
                "rows": one.rows,
                "columns": one.columns,
                "bytes": one.nbytes,
                "seconds": one.seconds,
                "gb_per_s": sums.rate(one),
            }
            for one in sums.times
        ],
        "latency_us": sums.latency * 1e6,
        "gb_per_s": sums.bandwidth,
        "plan_options": _plan_options(sums),
    }


def _plan_options(sums: "SumTimes") -> list[str]:
    """What `penstock plan` takes."""
    if sums.bandwidth is None:
        return []
    latency, bandwidth = f"{sums.latency * 1e6:.1f}", f"{sums.bandwidth:.3g}"
    return ["-tp", str(sums.size), "--rank-latency", latency, "--rank-bandwidth", bandwidth]


def _print_sums(sums: "SumTimes") -> None:
    ranks = f"{sums.size} rank{'s' * (sums.size != 1)}"
    print(f"\nsums over {ranks} by {sums.backend}, {sums.dtype}, median of the slowest rank:")
    rows = [
        [str(one.rows), str(one.columns), amount(one.nbytes), f"{one.seconds * 1e6:.1f}", f"{sums.rate(one):.2f}"]
        for one in sums.times
    ]
    print_table(("rows", "columns", "bytes", "µs", "GB/s"), rows, wrap=())
    if options := _plan_options(sums):
        print(f"penstock plan MODEL {' '.join(options)}")


def examined() -> dict[str, Any]:
    """The whole report, as `--json` prints it. A missing package has version null, a broken one an error too."""
    from penstock import machine
    from penstock.backends.cpu import features
    from penstock.models import plugins

    outcomes = features.probe()
    total, free = machine.memory()
    report: dict[str, Any] = {
        "penstock": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {},
        "errors": {},
        "families": {
            name: None if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
            for name, entry in sorted(plugins().items())
        },
        "cpu": {
            "model": machine.cpu_model(),
            "architecture": platform.machine(),
            "physical_cores": machine.physical_cores(),
            "threads": machine.usable_threads(),
            "features": [name for name, outcome in outcomes.items() if outcome == features.USABLE],
            "unusable": {
                name: outcome
                for name, outcome in outcomes.items()
                if outcome not in (features.USABLE, features.NOT_LISTED)
            },
        },
        "memory": {"total": total, "free": free},
        "cuda": {"available": False, "driver": _driver(), "torch_built_for": None, "devices": [], "unusable": _DIED},
        "disk": _disk(hub_cache()),
        "caches": {"kernels": {}, "triton": _compiled(*kernel_cache.triton_root()), "models": _folder(hub_cache())},
        "settings": shown(Settings.from_env()),
    }
    for name in ("numpy", "numba", "llvmlite"):
        _note_package(report, name)
    for name in (*_LIBRARIES, *(name for names, _ in _EXTRAS.values() for name in names)):
        report["packages"][name] = _version(name)
    report["caches"]["kernels"] = _kernel_cache()
    report["caches"]["models"]["models"] = cached_models()
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


def _version(name: str) -> str | None:
    """Of a package, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folder(path: Path) -> dict[str, Any]:
    """A folder, the files in it and their bytes (links do not count), and whether it can be written.

    Counting ends after a while; then there are more than it says, and `complete` is false.
    """
    count = nbytes = 0
    left, end = [str(path)], time.perf_counter() + _COUNT_SECONDS
    while left and time.perf_counter() < end:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        count, nbytes = count + 1, nbytes + entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue  # not there, or not ours to look at
    found = {"folder": str(path), "files": count, "bytes": nbytes, "complete": not left}
    return found | {"writable": os.access(_there(path), os.W_OK)}


def _there(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


def _compiled(root: Path, below: str) -> dict[str, Any]:
    """A folder of compiled kernels, and why what is in it is not used, if it is not."""
    folder = root / below
    return _folder(folder) | {"distrusted": kernel_cache.distrust(root, folder)}


def _kernel_cache() -> dict[str, Any]:
    """Compiled kernels of all versions of penstock, and how many bytes are of this one's."""
    found = _compiled(kernel_cache.cache_root(), "numba")
    try:
        from penstock.backends.cpu.compile import cache_folder
    except Exception:  # numba is broken, which is noted elsewhere
        return found | {"current_bytes": 0}
    current = cache_folder()
    why = kernel_cache.distrust(kernel_cache.cache_root(), current)
    return found | {"current_bytes": _folder(current)["bytes"], "distrusted": why}


def _disk(path: Path) -> dict[str, Any]:
    """The disk of a folder: bytes, and GB/s of writing and of reading, null where that cannot be measured."""
    folder = _there(path)
    total, _, free = shutil.disk_usage(folder)
    found: dict[str, Any] = {"folder": str(folder), "total": total, "free": free}
    found |= {"write_gb_per_s": None, "read_gb_per_s": None}
    if free < _DISK_ROOM:
        return found
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            block, written = bytearray(os.urandom(4 << 20)), 0
            start = time.perf_counter()
            while written < _DISK_BYTES and time.perf_counter() - start < _DISK_SECONDS:
                written += file.write(block)
            os.fsync(file.fileno())
            found["write_gb_per_s"] = written / (time.perf_counter() - start) / 1e9
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is read from the disk
            file.seek(0)
            start = time.perf_counter()
            while file.readinto(block):
                pass
            found["read_gb_per_s"] = written / (time.perf_counter() - start) / 1e9
    except (OSError, AttributeError):  # read-only, full, or a system that has no such advice
        pass
    return found


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
        free = torch.cuda.mem_get_info(index)[0]
        capability = f"{gpu.major}.{gpu.minor}"
        devices.append({"name": gpu.name, "capability": capability, "memory": gpu.total_memory, "free": free})
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
    for extra, (names, purpose) in _EXTRAS.items():
        if missing := [name for name in names if report["packages"][name] is None]:
            verb = "is" if len(missing) == 1 else "are"
            install = f"pip install 'penstock[{extra}]'"
            notes.append(f"{', '.join(missing)} {verb} not installed; only needed {purpose}: {install}")
    for why in dict.fromkeys(report["caches"][name]["distrusted"] for name in ("kernels", "triton")):
        if why is not None:
            notes.append(f"{why}: compiled kernels there are not used, every process compiles its own")
    if not report["caches"]["kernels"]["writable"]:
        folder = report["caches"]["kernels"]["folder"]
        notes.append(f"{folder} cannot be written: every process compiles its kernels; PENSTOCK_CACHE_DIR moves it")
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
        ("libraries", ", ".join(f"{name} {report['packages'][name] or 'not found'}" for name in _LIBRARIES)),
        *((extra, _extra(report, extra)) for extra in _EXTRAS),
        ("cpu", f"{cpu['model']} ({cpu['architecture']})"),
        ("cores", f"{cpu['physical_cores']} physical, {cpu['threads']} threads usable"),
        ("memory", f"{_gib(memory['total'])} usable, {_gib(memory['free'])} free"),
        ("simd usable", " ".join(cpu["features"]) or "none of those that penstock knows"),
    ]
    if report["families"]:
        rows.append(("families", ", ".join(f"{name} ({of})" for name, of in report["families"].items())))
    if cpu["unusable"]:
        rows.append(("simd listed only", " ".join(cpu["unusable"])))
    rows += ((name, report["packages"][name] or "not found") for name in ("torch", "triton"))
    gpus = [
        f"{gpu['name']}, compute capability {gpu['capability']}, {_gib(gpu['memory'])}, {_gib(gpu.get('free', 0))} free"
        for gpu in report["cuda"]["devices"]
    ]
    rows.append(("cuda", "; ".join(gpus) or "not available"))
    why = report["cuda"]["unusable"]
    rows.append(("models run on", "cuda" if why is None else f"cpu ({why})"))
    disk, caches = report["disk"], report["caches"]
    speeds = (f", {what} {_rate(disk[f'{what}_gb_per_s'])}" for what in ("write", "read"))
    rows.append(("disk", f"{_gib(disk['free'])} of {_gib(disk['total'])} free{''.join(speeds)} ({disk['folder']})"))
    count = len(caches["models"]["models"])
    rows.append(("model cache", f"{count} model{'s' * (count != 1)}, {_held(caches['models'])}"))
    rows.append(("kernel cache", f"{_held(caches['kernels'])}, {_mib(caches['kernels']['current_bytes'])} in use"))
    rows.append(("triton cache", _held(caches["triton"])))
    ranks = report.get("ranks")
    how = f"not measured ({_TORCHRUN})" if ranks is None else f"{ranks['size']} by {ranks['backend']}, see below"
    rows.append(("sums over ranks", how))
    values = report["settings"]
    changed = [f"{variable(f)}={values[f.name]}" for f in fields(Settings) if values[f.name] != f.default]
    rows.append(("settings", " ".join(changed) or "defaults"))
    return rows


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size else "unknown"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def _rate(speed: float | None) -> str:
    return "not measured" if speed is None else f"{speed:.2f} GB/s"


def _held(cache: dict[str, Any]) -> str:
    return f"{'' if cache['complete'] else 'more than '}{_mib(cache['bytes'])} in {cache['folder']}"


def _extra(report: dict[str, Any], name: str) -> str:
    names, purpose = _EXTRAS[name]
    found = [f"{package} {report['packages'][package]}" for package in names if report["packages"][package]]
    return ", ".join(found) if len(found) == len(names) else f"not installed ({purpose})"
