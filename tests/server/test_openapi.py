"""The server against its own description, by schemathesis."""

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


def loaded(coverage: bool):
    """The description; with coverage every keyword of every schema is violated once, which is hundreds of requests."""
    phases = PhasesConfig(coverage=CoveragePhaseConfig(enabled=coverage))
    config = SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(phases=phases)))
    return schemathesis.openapi.from_dict(described(), config=config)


settings = hypothesis.settings(
    max_examples=8, derandomize=True, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


@pytest.fixture(scope="module")
def place(llm):
    with serving(llm, Options(max_tokens=1, limits=Limits(tokens=1))) as made:
        yield made


@loaded(coverage=False).parametrize()
@settings
def test_every_endpoint_does_what_its_description_says(place, case):
    case.call_and_validate(base_url=place.url, checks=CHECKED, timeout=60)


@pytest.fixture(scope="module")
def covered():
    return loaded(coverage=True)


@pytest.mark.slow
@schemathesis.pytest.from_fixture("covered").parametrize()  # not at the top: it takes seconds to find all violations
@settings
def test_every_endpoint_refuses_what_its_description_does_not_have(place, case):
    case.call_and_validate(base_url=place.url, checks=CHECKED, timeout=60)


def test_the_description_names_every_endpoint():
    application = Application(Service(Options()), Access())
    paths = set(described()["paths"])
    routed = {route.path for route in application._routes()}
    public = {*FILES, "/openapi.json"}
    doubles = {"/models", "/chat/completions", "/completions", "/embeddings", "/responses", "/v1/health"}
    assert routed - public - doubles == {path.replace("{model}", "{name:path}") for path in paths}
    assert "/metrics" not in described(metrics=False)["paths"]
