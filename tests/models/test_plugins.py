"""Families of other packages: registered, or found by an entry point when a config.json asks for one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock import models
from penstock.errors import CheckpointError, InvalidArgument
from penstock.models import llama
from tests.models.test_llama import config_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "penstock-my-llama"
CODE = """
import json, sys
from penstock import models
from penstock.errors import CheckpointError
config = json.loads(sys.argv[1])
assert "penstock_my_llama" not in sys.modules and list(models.plugins()) == json.loads(sys.argv[2])
try:
    print(models.family_of(config).read_config(config).mlp_width)
except CheckpointError as error:
    print(error)
"""


def test_a_registered_family_runs_its_model_types_and_no_others(monkeypatch):
    monkeypatch.setattr(models, "_registered", {})
    made = replace(llama.FAMILY, name="mine", model_types=("mine", "mine2"))
    models.register(made)
    models.register(made)  # again is no error
    assert models.family_of({"model_type": "mine2"}) is made
    with pytest.raises(InvalidArgument, match="model_type 'llama' is built in"):
        models.register(llama.FAMILY)
    with pytest.raises(InvalidArgument, match="'mine' is registered already"):
        models.register(replace(made, name="other"))
    with pytest.raises(InvalidArgument, match="family is a str"):
        models.register("mine")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="model_type is 'theirs', expected one of .*, mine, mine2"):
        models.family_of({"model_type": "theirs"})


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the example package in it, as pip installs it."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(folder)]
    source = tmp_path_factory.mktemp("source")
    for file in EXAMPLE.iterdir():
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, capture_output=True)
    return folder


def run(installed, *command, **more):
    home = str(Path(penstock.__file__).parents[1])
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(installed), home)), **more}
    return subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, check=True).stdout


def test_an_installed_family_is_imported_when_a_config_asks_for_it(installed):
    config = config_of("llama") | {"model_type": "my_llama", "mlp_width": 96}
    assert run(installed, "-c", CODE, json.dumps(config), '["my_llama"]') == "96\n"
    assert "model_type is 'my_llama', expected one of" in run(
        installed, "-c", CODE, json.dumps(config), "[]", PENSTOCK_PLUGINS="0"
    )
    assert json.loads(run(installed, "-m", "penstock", "doctor", "--json"))["families"] == {
        "my_llama": "penstock-my-llama 0.1.0"
    }


def test_an_entry_point_that_cannot_be_used_is_named(installed, tmp_path):
    info = tmp_path / "broken-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[penstock.families]\nbroken = no_such_module:FAMILY\nllama = x:y\n")
    found = run(tmp_path, "-c", CODE, json.dumps({"model_type": "broken"}), '["broken"]')
    assert "in the package broken 1.2 cannot be used: ModuleNotFoundError" in found
