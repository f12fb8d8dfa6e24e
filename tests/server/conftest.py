import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")

import penstock
from tests.server.common import Place, serving


@pytest.fixture(scope="session")
def llm():
    return penstock.load()


@pytest.fixture(scope="module")
def place(llm):
    """A server with the demo model and default options, one for each file of tests."""
    with serving(llm) as made:
        yield made


@pytest.fixture
def quiet(place: Place):
    """The same server, looked at afterwards: whatever a test did to it, nothing may be left running or held."""
    yield place
    place.settled()
