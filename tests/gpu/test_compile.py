"""Every kernel compiles for the oldest and for a current GPU, on a machine that has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAMILIES = ("norm", "elementwise", "rope", "embed", "cache", "linear", "moe", "attention", "mla", "delta", "sampling")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_without_a_gpu(family, arch):
    root = Path(__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    command = [sys.executable, "-m", "tests.gpu.compile", family, "--arch", str(arch)]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert " 0 calls failed" in done.stdout
