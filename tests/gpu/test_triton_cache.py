"""Triton's compiled kernels are kept under PENSTOCK_CACHE_DIR, and loaded by the rule of the CPU's."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from triton import knobs

from penstock import kernel_cache
from penstock.backends import cuda
from penstock.backends.cuda.runtime.triton_cache import TrustedCacheManager, use_trusted_cache

pytestmark = pytest.mark.usefixtures("fresh_kernel_cache")

ROOT = Path(__file__).parents[2]

# Prints whether each compilation was a load from the cache, and what has happened to its files before.
COMPILED = """
import json, sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock import kernel_cache
from penstock.backends.cuda import cache

@triton.jit
def store(x_ptr):
    tl.store(x_ptr, 1.0)

loaded = {}
triton.knobs.compilation.listener = lambda cache_hit, **rest: loaded.update({what: cache_hit})
target = GPUTarget("cuda", 90, 32)

for what in ("new", "whole", "loose", "replaced", "short", "folder"):
    if what == "loose":
        next(Path(triton.knobs.cache.dir).rglob("*.cubin")).chmod(0o666)
    if what == "short":
        file = next(Path(triton.knobs.cache.dir).rglob("*.cubin"))
        file.write_bytes(file.read_bytes()[:-8])
    if what == "folder":
        Path(sys.argv[1]).chmod(0o777)
        kernel_cache._chosen.clear()
    triton.compile(ASTSource(store, {"x_ptr": "*fp32"}), target)
print(json.dumps([triton.knobs.cache.dir, loaded]))
"""


@pytest.fixture(autouse=True)
def knobs_as_before(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "root"))
    with knobs.cache.scope():
        knobs.cache.reset()  # other tests of the process have imported kernels
        yield


def test_triton_compiles_under_the_folder_of_penstock_and_loads_what_is_trusted(tmp_path):
    root, script = tmp_path / "root", tmp_path / "script.py"
    script.write_text(COMPILED)  # Triton reads the source of its kernels
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *sys.path])
    done = subprocess.run([sys.executable, script, root], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    folder, loaded = json.loads(done.stdout)
    assert folder == str(root / "triton")
    assert loaded == {"new": False, "whole": True, "loose": False, "replaced": True, "short": False, "folder": False}
    said = done.stderr.splitlines()
    assert len(said) == 2
    assert ".cubin can be written by others (mode 0666): it is not read" in said[0]
    assert said[1].startswith(f"{root} can be written by others (mode 0777): compiled kernels in {folder}")


def test_triton_gets_the_folder_that_is_named_or_one_of_the_process(tmp_path, monkeypatch):
    use_trusted_cache()
    assert knobs.cache.dir == str(tmp_path / "root" / "triton")
    assert knobs.cache.manager_class is TrustedCacheManager
    named = tmp_path / "named"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(named))
    use_trusted_cache()
    assert knobs.cache.dir == str(named)
    named.chmod(0o777)
    kernel_cache._chosen.clear()
    use_trusted_cache()
    assert not Path(knobs.cache.dir).is_relative_to(tmp_path)
    assert Path(knobs.cache.dir).stat().st_mode & 0o777 == 0o700


def test_triton_keeps_a_cache_manager_of_the_users_choice(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "triton.runtime.cache:FileCacheManager")
    use_trusted_cache()
    assert knobs.cache.manager_class is not TrustedCacheManager


def kept(key="KEY"):
    """A manager with one file and a group of it."""
    use_trusted_cache()
    manager = TrustedCacheManager(key)
    manager.put_group("k.json", {"k.so": manager.put(b"\x7fELF", "k.so"), "k.json": manager.put("{}", "k.json")})
    return manager, Path(manager.cache_dir)


def test_manager_gives_back_what_it_kept():
    manager, folder = kept()
    assert manager.get_file("k.so") == str(folder / "k.so")
    assert (folder / "k.so").read_bytes() == b"\x7fELF"
    assert manager.get_group("k.json") == {name: str(folder / name) for name in ("k.so", "k.json")}
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert manager.get_file("missing") is manager.get_group("missing") is None


@pytest.mark.parametrize("spoiled", ["k.so", "k.so.sha256", "__grp__k.json"])
@pytest.mark.parametrize("how", ["loose", "link", "missing", "short", "of another", "of another key"])
def test_manager_gives_no_group_with_a_file_that_is_not_its_own(tmp_path, spoiled, how):
    manager, folder = kept()
    file = folder / spoiled
    if how == "loose":
        file.chmod(0o620)
    elif how == "link":
        file.rename(tmp_path / "end")
        file.symlink_to(tmp_path / "end")
    elif how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "of another":
        shutil.copy(folder / spoiled.removeprefix("__grp__").replace(".so", ".json"), file)
    else:
        other = kept("OTHER")[1]
        for name in (spoiled, f"{spoiled}.sha256"):
            if (other / name).exists():
                shutil.copy(other / name, folder / name)
    assert manager.get_group("k.json") is None
    if not spoiled.startswith("__grp__"):
        assert manager.get_file("k.so") is None


def test_manager_takes_no_group_with_files_elsewhere(tmp_path):
    manager, _ = kept()
    (tmp_path / "k.so").write_bytes(b"\x7fELF")
    manager.put_group("k.json", {"k.so": str(tmp_path / "k.so")})
    assert manager.get_group("k.json") is None


def test_manager_compiles_elsewhere_where_a_key_folder_can_be_written_by_others():
    _, folder = kept()
    folder.chmod(0o777)
    kernel_cache._chosen.clear()
    manager = TrustedCacheManager("KEY")
    assert manager.cache_dir != str(folder)
    assert manager.get_group("k.json") is None
    manager.put(b"\x7fELF", "k.so")
    assert manager.get_file("k.so") is not None


def test_manager_leaves_what_a_developer_asks_for_as_triton_has_it(tmp_path):
    knobs.cache.dump_dir, knobs.cache.override_dir = str(tmp_path / "dump"), str(tmp_path / "dump")
    TrustedCacheManager("KEY", dump=True).put("text", "k.ttir")
    assert TrustedCacheManager("KEY", override=True).get_file("k.ttir") == str(tmp_path / "dump" / "KEY" / "k.ttir")


def test_every_module_with_kernels_sets_triton_up():
    """By importing _launch, itself or through others, whichever of them is the first to be imported."""
    imports = {}
    for file in Path(cuda.__file__).parent.glob("*.py"):
        names = set()
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module == cuda.__name__:
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom | ast.Import):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                names |= {m.removeprefix(f"{cuda.__name__}.") for m in modules if m.startswith(f"{cuda.__name__}.")}
        imports[file.stem] = names, "@triton.jit" in file.read_text()
    reached, more = set(), {"_launch"}
    while more:
        reached |= more
        more = {name for name, (names, _) in imports.items() if names & reached} - reached
    assert {name for name, (_, kernels) in imports.items() if kernels} <= reached
