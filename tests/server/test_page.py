"""The page in a real browser: Debian's chromium, headless."""

import json

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import expect

from penstock.server.guard import Access
from penstock.server.service import Options
from tests.server.common import serving
from tests.server.pages import say, set_messages, told


def test_send_stream_and_reload(page, place, llm):
    assert page.locator("#model-name").inner_text() == "demo" and "demo" in page.title()
    page.locator("#open-settings").click()
    page.locator("#set-max_tokens").fill("12")
    page.locator("#set-temperature").fill("0")
    page.locator("#set-system").fill("Be brief.")
    page.locator("#settings .primary").click()
    say(page, "Tell me a story about a fox.")
    want = llm.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story about a fox."}],
        max_tokens=12,
    ).text
    answer = page.locator(".message.assistant .body")
    expect(answer).to_have_text(want.strip())
    expect(page.locator(".message.assistant .numbers")).to_contain_text("12 tokens")
    expect(page.locator("#input")).to_have_value("")
    expect(page.locator("#welcome")).to_be_hidden()
    page.reload()  # the conversation and the settings stay
    expect(page.locator(".message.user .body")).to_have_text("Tell me a story about a fox.")
    expect(answer).to_have_text(want.strip())
    page.locator("#open-settings").click()
    expect(page.locator("#set-max_tokens")).to_have_value("12")
    expect(page.locator("#out-temperature")).to_have_text("0.00")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#dot")).to_have_class("dot ok")
    say(page, "And then?")
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator(".message.assistant .numbers").nth(1)).to_contain_text("tokens")
    page.locator("#new").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    place.settled()


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_answer_here_and_there(page, place, how):
    page.evaluate("localStorage.setItem('penstock.settings', JSON.stringify({max_tokens: 1900}))")
    page.reload()
    expect(page.locator("#dot")).to_have_class("dot ok")
    before = place.service.scheduler.metrics().cancelled
    say(page, "Tell me a very long story.")
    expect(page.locator(".message.assistant .body")).to_contain_text(" ")
    expect(page.locator("#send")).to_have_attribute("aria-label", "Stop")
    if how == "button":
        page.locator("#send").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".message.assistant .numbers")).to_contain_text("stopped")
    expect(page.locator("#send")).to_have_attribute("aria-label", "Send")
    place.settled()
    assert place.service.scheduler.metrics().cancelled == before + 1


def test_gauges_show_memory_and_experts(page, place):
    expect(page.locator("#gauge-memory output")).to_contain_text("B of ")
    expect(page.locator("#gauge-pages output")).to_contain_text("%")
    expect(page.locator("#gauge-experts")).to_be_hidden()
    text = place.client.get("/metrics").text + "penstock:expert_hits_total 90.0\npenstock:expert_reads_total 10.0\n"
    page.route("**/metrics", lambda route: route.fulfill(status=200, content_type="text/plain", body=text))
    expect(page.locator("#gauge-experts output")).to_have_text("90 %")


def test_a_server_that_is_down_is_said_and_one_that_is_back_is_used(browser, llm):
    with serving(llm) as first:
        port = first.port
        page = browser.new_page()
        page.goto(first.url)
        expect(page.locator("#dot")).to_have_class("dot ok")
        page.locator("#input").fill("Are you there?")
    page.locator("#input").press("Enter")
    expect(page.locator(".failure")).to_contain_text("cannot be reached")
    expect(page.locator("#banner")).to_contain_text("cannot be reached")
    expect(page.locator("#dot")).to_have_class("dot bad")
    expect(page.locator("#send")).to_be_disabled()
    with serving(llm, Options(max_tokens=8), port=port):
        page.locator("#banner-retry").click()
        expect(page.locator("#dot")).to_have_class("dot ok")
        expect(page.locator("#banner")).to_be_hidden()
        page.locator("[aria-label='Answer again']").click()
        expect(page.locator(".message.assistant .numbers")).to_contain_text("tokens/s")
        expect(page.locator(".failure")).to_have_count(0)
    page.close()


def test_a_key_is_asked_for_and_kept(browser, llm):
    with serving(llm, Options(max_tokens=4), Access(keys=("right",))) as locked:
        page = browser.new_page()
        page.goto(locked.url)
        expect(page.locator("#key")).to_be_visible()
        page.locator("#key-input").fill("wrong")
        page.locator("#key-input").press("Enter")
        expect(page.locator("#key-wrong")).to_be_visible()
        page.locator("#key-input").fill("right")
        page.locator("#key .primary").click()
        expect(page.locator("#dot")).to_have_class("dot ok")
        say(page, "Hello")
        expect(page.locator(".message.assistant .numbers")).to_contain_text("4 tokens")
        page.reload()
        expect(page.locator("#dot")).to_have_class("dot ok")
        expect(page.locator("#key")).to_be_hidden()
        assert page.evaluate("localStorage.getItem('penstock.key')") == '""'  # it was not to be kept longer
        page.close()


def test_errors_of_the_server_are_shown(page):
    error = json.dumps({"error": {"message": "queue: it is full"}})
    page.route("**/completions", lambda route: route.fulfill(status=429, content_type="application/json", body=error))
    say(page, "Hello")
    expect(page.locator(".failure")).to_have_text("queue: it is full")
    page.unroute("**/completions")
    cut = 'data: {"choices":[{"index":0,"delta":{"content":"One"}}]}\n\ndata: {"error":{"message":"it broke"}}\n\n'
    page.route("**/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=cut))
    page.locator("[aria-label='Answer again']").click()
    expect(page.locator(".failure")).to_have_text("it broke")
    expect(page.locator(".message.assistant .body")).to_have_text("One")


def test_loading_is_shown_until_the_model_is_there(page):
    states = [{"status": "loading", "progress": 0.4, "error": {"message": "the model is being loaded (40%)"}}]
    page.route("**/health", lambda route: route.fulfill(status=503, json=states[0]) if states else route.continue_())
    page.reload()
    expect(page.locator("#loading-text")).to_have_text("the model is being loaded (40%)")
    expect(page.locator("#send")).to_be_disabled()
    states.clear()
    expect(page.locator("#dot")).to_have_class("dot ok")
    expect(page.locator("#loading")).to_be_hidden()


MARKDOWN = """\
# Title
Some **bold**, *soft*, ~~gone~~ and `code` with [a link](https://example.org/x) and [a bad one](javascript:alert(1)).

- one
  - inner **deep**
- two

3. three
4. four

> quoted

| a | b |
|---|---|
| 1 | `2` |

```python
print("<b>hi</b>")
```
<img src=x onerror="window.hurt = true"><script>window.hurt = true</script>
snake_case_name and 2 * 3 * 4
"""


def test_markdown_becomes_elements_and_markup_stays_text(page):
    set_messages(page, {"role": "user", "content": "<b>x</b>"}, {"role": "assistant", "content": MARKDOWN})
    body = page.locator(".message.assistant .body")
    expect(body.locator("h1")).to_have_text("Title")
    expect(body.locator("strong").first).to_have_text("bold")
    expect(body.locator("em")).to_have_text("soft")
    expect(body.locator("del")).to_have_text("gone")
    expect(body.locator("p code").first).to_have_text("code")
    links = body.locator("a")
    expect(links).to_have_count(1)
    expect(links).to_have_attribute("href", "https://example.org/x")
    expect(links).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(body.locator("> ul > li")).to_have_count(2)
    expect(body.locator("> ul > li ul li strong")).to_have_text("deep")
    expect(body.locator("ol")).to_have_attribute("start", "3")
    expect(body.locator("blockquote")).to_have_text("quoted")
    expect(body.locator("td")).to_have_text(["1", "2"])
    expect(body.locator("pre code")).to_have_text('print("<b>hi</b>")')
    expect(body.locator(".block header span")).to_have_text("python")
    assert body.locator("img, script, b").count() == 0
    expect(body).to_contain_text('<img src=x onerror="window.hurt = true">')
    expect(body).to_contain_text("snake_case_name and 2 * 3 * 4")
    expect(page.locator(".message.user .body")).to_have_text("<b>x</b>")
    assert page.evaluate("window.hurt") is None


def test_reasoning_is_folded(page):
    deltas = [{"reasoning_content": "First "}, {"reasoning_content": "this."}, {"content": "So **that**."}]
    page.route("**/completions", lambda route: told(route, deltas))
    say(page, "Why?")
    thought = page.locator("details.thought")
    expect(page.locator(".message.assistant .body strong")).to_have_text("that")
    expect(thought).not_to_have_attribute("open", "")
    expect(thought.locator("div")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator("div")).to_have_text("First this.")


def test_the_keyboard_is_enough(page):
    set_messages(page, {"role": "user", "content": "First"}, {"role": "assistant", "content": "Second"})
    expect(page.locator("#dot")).to_have_class("dot ok")
    page.locator("#scroller").focus()
    page.keyboard.press("/")
    expect(page.locator("#input")).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#input")).to_have_value("First")
    expect(page.locator(".message")).to_have_count(0)
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    expect(page.locator("#input")).to_have_value("First\nline two")


@pytest.mark.parametrize("width, height", [(360, 640), (1280, 800)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_is_readable_on_phones_and_screens(browser, place, width, height, scheme):
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(place.url)
    set_messages(page, {"role": "user", "content": "x" * 300}, {"role": "assistant", "content": MARKDOWN + "y" * 300})
    expect(page.locator("#dot")).to_have_class("dot ok")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#composer").bounding_box()
    assert box["y"] + box["height"] <= height
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 22)"
    assert dark == (scheme == "dark")
    page.close()
