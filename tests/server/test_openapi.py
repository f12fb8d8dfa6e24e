"""The server against its own description, by schemathesis."""

import re
import subprocess
import sys

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import CHECKS
from schemathesis.config import CoveragePhaseConfig, PhasesConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig

from penstock.server.app import Application
from penstock.server.guard import Access
from penstock.server.limits import Limits
from penstock.server.openapi import described
from penstock.server.service import Options, Service
from penstock.server.static import FILES
from tests.server.common import serving

# Some texts have no tokens and some schemas no grammar: 400 is right for them, though a schema cannot say so.
CHECKED = [check for check in CHECKS.get_all() if check.__name__ != "positive_data_acceptance"]


def loaded():
    """The description, without the phase that violates every keyword: it takes seconds to find all violations."""
    phases = PhasesConfig(coverage=CoveragePhaseConfig(enabled=False))
    config = SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(phases=phases)))
    return schemathesis.openapi.from_dict(described(), config=config)


settings = hypothesis.settings(
    max_examples=8, derandomize=True, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


@pytest.fixture(scope="module")
def place(llm):
    with serving(llm, Options(max_tokens=1, limits=Limits(tokens=1))) as made:
        yield made


@loaded().parametrize()
@settings
def test_every_endpoint_does_what_its_description_says(place, case):
    case.call_and_validate(base_url=place.url, checks=CHECKED, timeout=60)


@pytest.mark.slow
def test_every_endpoint_refuses_what_its_description_does_not_have(place, tmp_path):
    """Every keyword of every schema violated once (thousands of requests), and more that are drawn, by the program."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{place.url}/openapi.json", "--no-color"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", "20", "--generation-deterministic"]
    command += ["--exclude-checks", "positive_data_acceptance", "--request-timeout", "120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    assert int(re.findall(r"(\d+) generated, \1 passed", done.stdout)[0]) > 1000, done.stdout[-1000:]


def test_the_description_names_every_endpoint():
    application = Application(Service(Options()), Access())
    paths = set(described()["paths"])
    routed = {route.path for route in application._routes()}
    public = {*FILES, "/openapi.json"}
    doubles = {"/models", "/chat/completions", "/completions", "/embeddings", "/responses", "/v1/health"}
    assert routed - public - doubles == {path.replace("{model}", "{name:path}") for path in paths}
    assert "/metrics" not in described(metrics=False)["paths"]
