"""The helper process that compiles kernels: it works where the first process looks for them."""

import io
import subprocess
from types import SimpleNamespace

import pytest

from penstock.api import load
from penstock.backends.cpu import compile_lock
from penstock.backends.cpu.compile import trusted_folder
from penstock.engine import compile_ahead


@pytest.mark.parametrize("mode", [0o700, 0o777], ids="{:03o}".format)
def test_helper_gets_the_folder_that_the_first_process_uses(tmp_path, monkeypatch, fresh_kernel_cache, mode):
    started = []

    def start(command, env, **streams):
        started.append(env)
        return SimpleNamespace(stdin=io.BytesIO())

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(compile_lock, "helper", None)
    monkeypatch.setattr(compile_ahead, "usable_threads", lambda: 2)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(mode)
    used = trusted_folder()
    assert used.is_relative_to(tmp_path) == (mode == 0o700)
    compile_ahead.start(load, {})
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", started[0]["PENSTOCK_CACHE_DIR"])
    assert trusted_folder() == used
