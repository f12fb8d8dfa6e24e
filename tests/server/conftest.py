import shutil

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


@pytest.fixture(scope="module")
def browser():
    """Debian's chromium, headless."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("chromium is not installed")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=20_000)  # beside other tests
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser, place):
    """A fresh page, connected; whatever it reports as an error fails the test."""
    from playwright.sync_api import expect

    context = browser.new_context()
    made = context.new_page()
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    asked: list[str] = []
    made.on("request", lambda request: asked.append(request.url))
    made.goto(place.url)
    expect(made.locator("#dot")).to_have_class("dot ok")
    yield made
    blobs = f"blob:{place.url}"  # what the page offers for download
    assert [url for url in asked if not url.startswith((place.url, blobs))] == []  # nothing from elsewhere
    assert not [line for line in problems if "Failed to load resource" not in line]
    context.close()
