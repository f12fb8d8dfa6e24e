"""The commands of README.md run from the wheel, in an environment that has nothing of this checkout."""

import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_readme import COMMANDS, ROOT, needs_elsewhere

pytestmark = pytest.mark.slow  # builds a wheel, and every command is a process


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [file] = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def program(wheel, tmp_path_factory):
    """`penstock` of a new environment with the wheel; what it depends on is that of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, str(wheel)],
        check=True,
        capture_output=True,
    )
    packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    Path(site, "zz_dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(packages)))
    return [str(python), "-m", "penstock"]


def ran(program: list[str], *arguments: str, cwd: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*program, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, input=given, capture_output=True, text=True, timeout=600)


def test_wheel_has_what_commands_read(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    own = {f"penstock/{path.relative_to(ROOT / 'src/penstock')}" for path in (ROOT / "src/penstock").rglob("*.*")}
    kinds = (".json", ".txt", ".html", ".css", ".js", ".svg", ".woff2", ".safetensors", ".typed")
    data = {name for name in own if name.endswith(kinds)}
    assert "penstock/demo/tale.txt" in data and data <= names
    texts = [name for name in names if name.endswith(("/LICENSE", "/NOTICE")) and ".dist-info/" in name]
    assert len(texts) == 5 and "penstock/server/page/vendor/highlight/LICENSE" in names


def test_wheel_runs_from_its_own_files(program, tmp_path):
    shown = subprocess.run(
        [program[0], "-c", "import penstock; print(penstock.__file__)"], cwd=tmp_path, capture_output=True, text=True
    )
    assert shown.stdout.startswith(str(Path(program[0]).parent.parent))


@pytest.mark.parametrize(
    "command",
    [one for one in COMMANDS if one.startswith("penstock ") and not needs_elsewhere(one) and " serve" not in one],
)
def test_readme_commands_run_from_the_wheel(program, tmp_path, command):
    _, *arguments = shlex.split(command)
    done = ran(program, *arguments, cwd=tmp_path, given="Hello\n/exit\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout
