"""njit: its cache folder follows the sources, a second process loads from it, and it never gets in the way."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock.errors
from penstock import kernel_cache
from penstock.backends.cpu import compile as compiler
from penstock.backends.cpu.compile import FUSED_MULTIPLY_ADD, SUM_IN_ANY_ORDER, cache_folder, njit
from penstock.errors import InvalidArgument

PACKAGE = Path(penstock.errors.__file__).parent

KERNELS = """
import sys

import numpy as np

from penstock.backends.cpu import helper
from penstock.backends.cpu.compile import njit

@njit
def twice(x):
    return 2 * helper.step(x)

def scaled_by(factor, inner=helper.step):
    @njit
    def scaled(x):
        return factor * inner(x)
    return scaled

def largest_by(factor):
    @njit
    def ordered(x, y):  # too long for LLVM to put it into its caller: there it stays a symbol
        order = np.argsort(x)
        for i in range(x.size):
            for j in range(x.size):
                y[i] = factor * x[order[j]] if i == j else y[i]

    @njit
    def largest(x):
        n, y = np.arange(x + 1), np.zeros(x + 1, np.int64)
        ordered(n, y)
        ordered(n[::-1].copy(), y)
        return y[x]
    return largest

def report(kernel, x):
    print(kernel(x), sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()), flush=True)

if __name__ == "__main__":
    from penstock.backends.cpu import kernels
    for factor in map(int, sys.argv[1:]):
        kernels.report(kernels.largest_by(factor), 10)
    if not sys.argv[1:]:
        kernels.report(kernels.twice, 10)
        kernels.report(kernels.scaled_by(3), 10)
        kernels.report(kernels.scaled_by(5, kernels.scaled_by(1)), 10)
"""
HELPER = """
from penstock.backends.cpu.compile import njit

@njit
def step(x):
    return x + 1
"""


@pytest.fixture
def package(tmp_path):
    """A copy of what kernels need of penstock, with a helper file and a kernel file of its own."""
    cpu = tmp_path / "penstock" / "backends" / "cpu"
    cpu.mkdir(parents=True)
    parts = [f"backends/cpu/{part}.py" for part in ("compile", "compile_lock", "_parts")]
    for name in ("errors.py", "settings.py", "kernel_cache.py", "progress.py", "compile_progress.py", *parts):
        shutil.copy(PACKAGE / name, tmp_path / "penstock" / name)
    for folder in (cpu, cpu.parent, cpu.parent.parent):  # a regular package wins over an installed penstock
        (folder / "__init__.py").touch()
    (cpu / "helper.py").write_text(HELPER)
    (cpu / "kernels.py").write_text(KERNELS)
    return tmp_path


def run(package, cache, *factors):
    """Value, cache hits and cache misses in a fresh process: of three kernels, or of one for each factor."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "NUMBA_"))}
    child = subprocess.run(
        [sys.executable, "-W", "error", "-m", "penstock.backends.cpu.kernels", *map(str, factors)],
        env={**clean, "PYTHONPATH": str(package), "PENSTOCK_CACHE_DIR": str(cache)},
        cwd=package,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.stderr == ""
    return [tuple(map(int, line.split())) for line in child.stdout.splitlines()]


def test_njit_loads_in_a_second_process_and_sees_an_edited_helper(package):
    cache = package / "cache"
    assert run(package, cache) == [(22, 0, 1), (33, 0, 1), (55, 0, 1)]
    assert run(package, cache) == [(22, 1, 0), (33, 1, 0), (55, 1, 0)]
    assert len(list((cache / "numba").iterdir())) == 1

    helper = package / "penstock" / "backends" / "cpu" / "helper.py"
    helper.write_text(HELPER.replace("x + 1", "x + 2"))
    assert run(package, cache) == [(24, 0, 1), (36, 0, 1), (60, 0, 1)]
    assert len(list((cache / "numba").iterdir())) == 2


@pytest.mark.slow  # four processes that import Numba and compile
def test_kernels_of_one_factory_run_their_own_code_wherever_they_were_compiled(package):
    """Each process numbers what it compiles from the start: without names of their own, functions of two processes
    would meet in a third under one symbol, and one of them would run for both.
    """
    cache = package / "cache"
    assert run(package, cache, 3) == [(30, 0, 1)]
    assert run(package, cache, 5) == [(50, 0, 1)]
    assert run(package, cache, 3, 5) == [(30, 1, 0), (50, 1, 0)]
    assert run(package, cache, 5, 3) == [(50, 1, 0), (30, 1, 0)]


def test_njit_compiles_where_the_folder_cannot_be_written(package):
    (package / "file").write_text("")
    assert run(package, package / "file" / "cache") == [(22, 0, 1), (33, 0, 1), (55, 0, 1)]


def test_cache_folder_is_where_it_is_told(monkeypatch, tmp_path):
    for name in ("PENSTOCK_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    key = cache_folder().name
    assert len(key) == 16
    assert cache_folder() == tmp_path / ".cache" / "penstock" / "numba" / key
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "penstock" / "numba" / key
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/penstock/numba", key)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", "~/mine")
    assert cache_folder() == tmp_path / "mine" / "numba" / key
    assert cache_folder("/told") == Path("/told/numba", key)
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache_folder() == Path(os.devnull, "numba", key)


def test_source_hash_follows_names_and_contents(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = compiler._source_hash(tmp_path)
    (tmp_path / "a.py").write_text("2")
    second = compiler._source_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, compiler._source_hash(tmp_path)}) == 3


def test_njit_keeps_nothing_when_the_sources_changed_under_it(tmp_path, monkeypatch):
    def triple(x):
        return 3 * x

    monkeypatch.setattr(compiler, "_source_hash", lambda path: "another")
    assert njit(triple, cache_dir=tmp_path)(5) == 15
    assert not list(tmp_path.rglob("*.nbc"))
    monkeypatch.undo()
    assert njit(triple, cache_dir=tmp_path)(5) == 15
    assert len(list(tmp_path.rglob("*.nbc"))) == 1


def test_njit_compiles_again_where_a_file_was_cut_short(tmp_path):
    def triple(x):
        return 3 * x

    for length, hits in ((None, 0), (None, 1), (-100, 0), (0, 0)):
        for file in tmp_path.rglob("*.nbc"):
            file.write_bytes(file.read_bytes()[:length])
        kernel = njit(triple, cache_dir=tmp_path)
        assert kernel(5) == 15
        assert sum(kernel.stats.cache_hits.values()) == hits


def hits(function, folder):
    """Loads from the cache, not compilations, of a new kernel."""
    kernel = njit(function, cache_dir=folder)
    assert kernel(5) == function(5)
    return sum(kernel.stats.cache_hits.values())


def written(folder):
    """What writing changes of the files below; reading a folder changes its st_atime."""
    found = {file: file.stat() for file in folder.rglob("*")}
    return {file: (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in found.items()}


@pytest.mark.parametrize("spoiled", [".", "numba", "numba/*", "numba/*/*.nbc"])
def test_njit_loads_nothing_that_others_could_have_written(tmp_path, fresh_kernel_cache, caplog, spoiled):
    def triple(x):
        return 3 * x

    assert [hits(triple, tmp_path) for _ in range(2)] == [0, 1]
    (path,) = tmp_path.glob(spoiled) if spoiled != "." else [tmp_path]
    path.chmod(path.stat().st_mode | 0o020)
    kernel_cache._chosen.clear()
    before = written(tmp_path)
    assert [hits(triple, tmp_path) for _ in range(2)] == [0, 1]  # compiled in its own folder, and loaded from there
    (record,) = caplog.records
    assert str(path) in record.message
    if path.is_dir():
        assert written(tmp_path) == before
    else:
        assert path.stat().st_mode & 0o777 == 0o600  # replaced, not written to


def test_njit_loads_no_file_of_another_kernel_or_signature(tmp_path):
    def triple(x):
        return 3 * x

    def negated(x):
        return -x

    for function in (triple, negated):
        hits(function, tmp_path)
    first, second = (next(tmp_path.rglob(f"*{name}*.nbc")) for name in ("triple", "negated"))
    shutil.copy(first, second)
    assert hits(negated, tmp_path) == 0
    assert hits(negated, tmp_path) == 1

    kernel = njit(triple, cache_dir=tmp_path)
    kernel(5.0)
    whole, of_floats = sorted(tmp_path.rglob("*triple*.nbc"), key=lambda file: file != first)
    shutil.copy(whole, of_floats)
    again = njit(triple, cache_dir=tmp_path)
    assert again(0.5) == 1.5
    assert not again.stats.cache_hits


def test_njit_with_a_signature_compiles_at_once_and_takes_no_other(tmp_path):
    @njit(signature=["float32(float32[::1])", "float64(float64[::1])"], cache_dir=tmp_path)
    def first(x):
        return x[0]

    assert len(first.signatures) == 2
    assert first(np.ones(3, np.float32)) == 1
    with pytest.raises(TypeError, match="No matching definition"):
        first(np.ones(3, np.int32))


def test_njit_divides_as_numpy_and_takes_named_fastmath_only(tmp_path):
    @njit(cache_dir=tmp_path)
    def inverse(x):
        return 1.0 / x

    @njit(fastmath=SUM_IN_ANY_ORDER, cache_dir=tmp_path)
    def total(x):
        result = np.float32(0)
        for value in x:
            result += value
        return result

    assert inverse(0.0) == np.inf
    assert np.isnan(total(np.float32([1, np.nan, np.inf])))
    assert total.targetoptions["fastmath"] == {"reassoc", "contract"}
    assert FUSED_MULTIPLY_ADD < SUM_IN_ANY_ORDER
    for value in (True, False):
        with pytest.raises(InvalidArgument, match=rf"^njit: fastmath is {value}, expected a set of flags"):
            njit(fastmath=value)
