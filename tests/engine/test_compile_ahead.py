"""The helper process that compiles kernels: it works where the first process looks for them."""

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from penstock.api import load
from penstock.backends.cpu import compile_lock
from penstock.backends.cpu.compile import trusted_folder
from penstock.engine import compile_ahead
from penstock.engine.compile_families import shipped_by_family
from penstock.weights.resolve import shipped_configs


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


def test_missing_kernels_lists_what_steps_call_and_changes_nothing(tmp_path):
    """In a process of its own: kernels that are loaded already are not listed."""
    script = (
        "import penstock; from penstock.engine import compile_ahead as ahead\n"
        "compile_model, ahead.compile_model = ahead.compile_model, lambda *given: None\n"
        "ahead.start = lambda *given, **more: None\n"
        "llm = penstock.load(); before = llm.engine.caches.nbytes\n"
        "few, many = ahead.missing_kernels(llm.engine), ahead.missing_kernels(llm.engine, (2, 20, 200), (1, 2))\n"
        "names = {file.name.partition('-')[0].rpartition('.')[2] for file in few}\n"
        "print(len(few) >= 20, set(few) < set(many), {'_norm_blocks', '_softmax_rows'} <= names)\n"
        "print(sorted(file.suffix for file in many if file.exists()), llm.engine.programs.wrap)\n"
        "ahead.compile_kernels = lambda missing: print(set(missing) == set(few))\n"
        "compile_model(llm.engine, penstock.load, {}); compile_model(llm.engine, penstock.load, {})\n"
    )
    environment = os.environ | {"PENSTOCK_CACHE_DIR": str(tmp_path)}
    child = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert child.stdout.splitlines() == ["True True True", "[] None", "True"]  # looked at once


def test_missing_kernels_are_listed_on_cpus_with_fewer_instructions(tmp_path):
    """Where no kernel is loaded yet none gives a number, and a product must not want one."""
    script = (
        "import penstock\n"
        "from penstock.backends.cpu import linear\n"
        "from penstock.engine import compile_ahead as ahead\n"
        "ahead.compile_model = ahead.start = lambda *given, **more: None\n"
        "llm = penstock.load(device='cpu', activations='int8')\n"
        "for variant in filter(linear._runs_here, linear.VARIANTS):\n"
        "    linear._best = lambda: linear.VARIANTS[variant]\n"
        "    print(len(ahead.missing_kernels(llm.engine, (2, 20), (1, 2))) >= 20)\n"
    )
    environment = os.environ | {"PENSTOCK_CACHE_DIR": str(tmp_path)}
    child = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert set(child.stdout.splitlines()) == {"True"}


def test_compile_families_know_kernels_of_every_family():
    families = shipped_by_family()
    assert list(families) == "deepseek_v3 gemma3 gemma3n gemma4 gpt_oss kimi_linear lfm2 llama qwen3_5".split()
    assert sum(map(len, families.values())) == len(shipped_configs())
