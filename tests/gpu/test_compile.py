"""Every kernel compiles for every kind of GPU and fits its shared memory, on a machine that has none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FAMILIES = tuple("norm elementwise rope embed cache linear moe attention mla delta drafts sampling collective".split())
ARCHS = (80, 89, 90, 100, 120)
QUICK = "embed"  # compiled for GPUs other than Hopper in any case; its kernels are short


def compile_for(archs: tuple[int, ...], *what: str) -> None:
    root = Path(__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    command = [sys.executable, "-m", "tests.gpu.compile", *what, "--brief", "--arch", *map(str, archs)]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.findall(r"^\d+ kernels compiled for sm_(\d+), 0 calls failed$", done.stdout, re.MULTILINE)
    assert said == [str(arch) for arch in archs]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_without_a_gpu(family, arch):
    compile_for((arch,), family)


def test_one_family_compiles_for_every_gpu():
    compile_for((80, 100, 120), QUICK)  # 89 has the instructions of 80 and the shared memory of 120


LARGE = ("linear", "moe", "attention", "mla", "delta", "sampling", "--large")


def test_a_call_of_each_kind_at_the_sizes_of_models_compiles_for_hopper():
    compile_for((90,), *LARGE, "--first")


@pytest.mark.slow
def test_calls_at_the_sizes_of_models_compile_for_hopper():
    compile_for((90,), *LARGE)


MATVEC = """
import re, torch
from tests.gpu.compile import pretend
from tests.gpu.model_sized import codes
from penstock.backends.cuda._matvec import matvec

with pretend(90, needs=False) as made:
    matvec(torch.zeros(1, 5120, dtype=torch.bfloat16), codes(512, 5120), torch.zeros(1, 512))
print(len(re.findall(r"st[.]shared", made[0].asm["ptx"])))
"""


def said_by(program: str) -> str:
    """What a program that compiles kernels writes."""
    root = Path(__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_codes_of_one_row_do_not_pass_through_shared_memory():
    """Only sums over warps do, a few words of a thread; hundreds if Triton lays out what is loaded otherwise."""
    assert 0 < int(said_by(MATVEC)) <= 16


LOOP = """
import torch
from tests.gpu.compile import first_loop, pretend
from tests.gpu.model_sized import float_codes
from penstock.backends.cuda._matvec import matvec

x, w, y = torch.zeros(1, 10240, dtype=torch.bfloat16), float_codes(512, 10240), torch.zeros(1, 512)
for more in ((), (float_codes(512, 10240), "silu")):
    with pretend(90, needs=False) as made:
        matvec(x, w, y, *more)
    print(*(line.partition(" ")[0] for line in first_loop(made[0].asm["cubin"])))
"""


def test_a_round_of_one_row_asks_for_all_its_codes_before_the_first_product():
    """Else it waits for memory once for each tile, with a part of its bytes under way."""
    for line in said_by(LOOP).splitlines():
        names = line.split()
        first = next(i for i, name in enumerate(names) if name.startswith("HMMA"))
        assert sum(name.startswith("LDG.E.128") for name in names[:first]) >= 2
        assert not any(name.startswith("LDG.E.128") for name in names[first:])
        assert len(names) <= 1024  # for 16 words of a thread: thousands if what the first product waits for is moved
