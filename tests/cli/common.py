"""What the tests of the command line share."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from penstock.cli.main import run


@dataclass
class Outcome:
    status: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Run the program in this process."""
    status = run(list(arguments))
    captured = capsys.readouterr()
    return Outcome(status, captured.out, captured.err)


def program(*arguments: str, shell: str = "", **environ: str) -> Outcome:
    """Run the program in a process of its own, its standard output a pipe; `shell` is appended to the command."""
    command = [sys.executable, "-m", "penstock", *arguments]
    env = os.environ | environ
    if shell:
        ran = subprocess.run(f"{' '.join(command)} {shell}", shell=True, capture_output=True, text=True, env=env)
    else:
        ran = subprocess.run(command, capture_output=True, text=True, env=env)
    return Outcome(ran.returncode, ran.stdout, ran.stderr)
