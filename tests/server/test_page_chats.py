"""Conversations, branches, files and settings of the page, in a real browser."""

import json
import re

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import Page, expect

from tests.server.pages import say, told


def answering(page: Page, *answers: str, **more) -> list[dict]:
    """From here on requests are answered with these texts in turn, the last one again and again; what was asked."""
    asked, left = [], list(answers)

    def answer(route):
        asked.append(json.loads(route.request.post_data))
        told(route, [{"content": left.pop(0) if len(left) > 1 else left[0]}], **more)

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", answer)
    return asked


def done(page: Page, text: str) -> None:
    """Wait until the last answer shown is this one, and is complete."""
    expect(page.locator(".message.assistant .body").last).to_have_text(text)
    expect(page.locator("#send")).to_have_attribute("aria-label", "Send")
    expect(page.locator(".message.assistant .numbers").last).to_contain_text("tokens")


def row(page: Page, title: str):
    return page.locator("#conversations li").filter(has_text=title)


@pytest.fixture
def three(page):
    """Three conversations: about rivers, hills and trees."""
    answering(page, "It flows.", "It stands.", "It grows.")
    for text, answer in (("Of rivers", "It flows."), ("Of hills", "It stands."), ("Of trees", "It grows.")):
        page.locator("#new").click()
        say(page, text)
        done(page, answer)
    return page


def test_conversations_are_listed_searched_renamed_and_kept(three):
    page = three
    expect(page.locator("#conversations .open")).to_have_text(["Of trees", "Of hills", "Of rivers"])
    expect(page.locator("#conversations [aria-current]")).to_have_text("Of trees")
    page.locator("#search").fill("FLOWS it")  # in the answer, in any order
    expect(page.locator("#conversations .open")).to_have_text(["Of rivers"])
    page.locator("#search").press("Enter")
    expect(page.locator(".message.user .body")).to_have_text("Of rivers")
    page.locator("#search").fill("nowhere")
    expect(page.locator("#no-conversations")).to_have_text("Nothing was found.")
    page.locator("#search").fill("")
    row(page, "Of rivers").get_by_role("button", name="Rename").click()
    page.keyboard.type("The Rhine")
    page.keyboard.press("Enter")
    expect(page.locator("#conversations [aria-current]")).to_have_text("The Rhine")
    page.locator("#conversations [aria-current]").press("F2")
    page.keyboard.type("Never mind")
    page.keyboard.press("Escape")
    page.reload()
    expect(page.locator(".message.user .body")).to_have_text("Of rivers")  # the one that was open
    expect(page.locator("#conversations .open")).to_have_text(["Of trees", "Of hills", "The Rhine"])
    page.locator("#new").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#conversations .open")).to_have_count(3)
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()


def test_a_deleted_conversation_comes_back_whole(three):
    page = three
    row(page, "Of trees").get_by_role("button", name="Delete").click()
    expect(page.locator("#conversations .open")).to_have_text(["Of hills", "Of rivers"])
    expect(page.locator("#welcome")).to_be_visible()
    page.locator("#toast button").click()
    expect(page.locator("#conversations .open")).to_have_text(["Of trees", "Of hills", "Of rivers"])
    done(page, "It grows.")
    row(page, "Of hills").locator(".open").focus()
    page.keyboard.press("Delete")
    expect(page.locator("#conversations .open")).to_have_text(["Of trees", "Of rivers"])
    page.reload()
    expect(page.locator("#conversations .open")).to_have_text(["Of trees", "Of rivers"])
    assert page.evaluate(COUNT) == 4  # messages: none is left of the one that is gone


COUNT = """() => new Promise((found) => {
  const request = indexedDB.open("penstock", 1);
  request.onsuccess = () => {
    const all = request.result.transaction("messages").objectStore("messages").count();
    all.onsuccess = () => found(all.result);
  };
})"""


def test_export_and_import_bring_everything_to_another_browser(three, browser, place, tmp_path):
    page = three
    page.locator("[aria-label='Answer again']").click()
    expect(page.locator(".message.assistant .branches")).to_contain_text("2/2")
    row(page, "Of hills").hover()
    with page.expect_download() as one:
        row(page, "Of hills").get_by_role("button", name="Export").click()
    assert one.value.suggested_filename == "Of-hills.json"
    with page.expect_download() as whole:
        page.locator("#export-all").click()
    one.value.save_as(tmp_path / "one.json")
    whole.value.save_as(tmp_path / "all.json")
    data = json.loads((tmp_path / "all.json").read_text())
    assert [len(one["messages"]) for one in data["conversations"]] == [3, 2, 2]
    (tmp_path / "bad.json").write_text('{"format": "penstock-conversations", "version": 1, "conversations": [{}]}')
    (tmp_path / "other.json").write_text("[1]")

    other = browser.new_page()
    other.goto(place.url)
    other.locator("#import-file").set_input_files(tmp_path / "one.json")
    expect(other.locator("#conversations .open")).to_have_text(["Of hills"])
    other.locator("#import-file").set_input_files(tmp_path / "all.json")  # what is there already is not there twice
    expect(other.locator("#conversations .open")).to_have_text(["Of trees", "Of hills", "Of rivers"])
    other.locator("#toast button").click()
    expect(other.locator(".message.assistant .branches")).to_contain_text("2/2")
    assert other.evaluate(COUNT) == 7
    data["conversations"] = [data["conversations"][0] | {"id": "another"}]
    (tmp_path / "foreign.json").write_text(json.dumps(data))
    wrong = {"bad.json": "conversation 1", "other.json": "no export", "foreign.json": "messages of another"}
    for name, why in wrong.items():
        other.locator("#import-file").set_input_files(tmp_path / name)
        expect(other.locator("#toast")).to_contain_text(f"{name} cannot be imported: ")
        expect(other.locator("#toast")).to_contain_text(why)
    expect(other.locator("#conversations .open")).to_have_count(3)
    other.close()


def test_a_full_storage_is_said_and_what_was_written_is_kept_when_there_is_room(page, place):
    session = page.context.new_cdp_session(page)
    session.send("Storage.overrideQuotaForOrigin", {"origin": place.url, "quotaSize": 1000})
    answering(page, "One.", "Two.")
    say(page, "First")
    done(page, "One.")  # it is here all the same
    expect(page.locator("#notice")).to_contain_text("The browser's storage is full")
    page.locator("#new").click()
    row(page, "First").locator(".open").click()  # and still when one comes back to it
    done(page, "One.")
    session.send("Storage.overrideQuotaForOrigin", {"origin": place.url})
    say(page, "Second")
    done(page, "Two.")
    expect(page.locator("#notice")).to_be_hidden()
    page.reload()
    expect(page.locator(".message.user .body")).to_have_text(["First", "Second"])
    expect(page.locator(".message.assistant .body")).to_have_text(["One.", "Two."])


def test_without_storage_conversations_live_as_long_as_the_page(browser, place):
    page = browser.new_page()
    page.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new Error('not here'); } })")
    page.goto(place.url)
    expect(page.locator("#dot")).to_have_class("dot ok")
    expect(page.locator("#notice")).to_contain_text("lets the page keep nothing")
    answering(page, "One.", "Two.")
    say(page, "First")
    done(page, "One.")
    page.locator("#new").click()
    say(page, "Second")
    done(page, "Two.")
    row(page, "First").locator(".open").click()
    done(page, "One.")
    page.locator("#search").fill("two")
    expect(page.locator("#conversations .open")).to_have_text(["Second"])
    page.locator("#search").fill("")
    row(page, "First").get_by_role("button", name="Delete").click()
    page.locator("#toast button").click()
    done(page, "One.")
    page.close()


def test_two_tabs_show_one_list_and_both_keep_what_they_write(page, place):
    answering(page, "One.")
    say(page, "First")
    done(page, "One.")
    other = page.context.new_page()
    other.goto(place.url)
    expect(other.locator("#dot")).to_have_class("dot ok")
    expect(other.locator(".message.user .body")).to_have_text("First")
    for tab, text in ((page, "Of one"), (other, "Of the other")):
        answering(tab, "Yes.")
        say(tab, text)
        done(tab, "Yes.")
    other.locator("#new").click()
    say(other, "Elsewhere")
    done(other, "Yes.")
    expect(page.locator("#conversations .open")).to_have_text(["Elsewhere", "First"])
    other.close()
    page.reload()  # as two versions of what follows
    expect(page.locator(".message.user .branches")).to_contain_text("2/2")
    expect(page.locator(".message.user .body")).to_have_text(["First", "Of the other"])
    page.locator(".message.user [aria-label='Version before']").click()
    expect(page.locator(".message.user .body")).to_have_text(["First", "Of one"])


def test_editing_and_answering_again_keep_what_was_there(page):
    asked = answering(page, "One.", "Two.", "Three.", "Four.")
    say(page, "First")
    done(page, "One.")
    say(page, "Second")
    done(page, "Two.")
    page.locator("[aria-label='Answer again']").last.click()
    done(page, "Three.")
    expect(page.locator(".branches")).to_have_text("2/2")
    page.locator(".message.user").first.hover()
    page.locator("[aria-label='Edit and send again']").first.click()
    expect(page.locator("#editing")).to_be_visible()
    expect(page.locator(".message")).to_have_count(0)
    page.keyboard.press("Escape")  # and all is as it was
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator("#input")).to_have_value("")
    page.locator("[aria-label='Edit and send again']").first.click()
    say(page, "Another first")
    done(page, "Four.")
    assert [m["content"] for m in asked[-1]["messages"]] == ["Another first"]
    expect(page.locator(".message.user .branches")).to_have_text("2/2")
    page.reload()
    expect(page.locator(".message.user .body")).to_have_text(["Another first"])
    page.locator("[aria-label='Version before']").press("Enter")
    expect(page.locator(".message.user .body")).to_have_text(["First", "Second"])
    expect(page.locator(".message.assistant .body")).to_have_text(["One.", "Three."])
    expect(page.locator("[aria-label='Version after']").first).to_be_focused()
    page.locator(".message.assistant [aria-label='Version before']").click()
    expect(page.locator(".message.assistant .body")).to_have_text(["One.", "Two."])
    page.locator(".message.user [aria-label='Version after']").click()
    expect(page.locator(".message.user .body")).to_have_text(["Another first"])


def test_an_answer_goes_on_while_another_conversation_is_looked_at(page, place):
    page.evaluate("localStorage.setItem('penstock.settings', JSON.stringify({max_tokens: 60, temperature: 0}))")
    page.reload()
    expect(page.locator("#dot")).to_have_class("dot ok")
    say(page, "Tell me a story about a fox.")
    page.locator("#new").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#send")).to_have_attribute("aria-label", "Send")
    say(page, "Hello")
    expect(page.locator(".message.assistant .numbers")).to_contain_text("first after")
    row(page, "a fox").locator(".open").click()
    expect(page.locator(".message.assistant .numbers")).to_contain_text("60 tokens")
    place.settled()


def test_what_was_written_and_not_sent_is_not_lost(page):
    answering(page, "Yes.")
    say(page, "First")
    done(page, "Yes.")
    page.locator("#input").fill("A draft here")
    page.locator(".message.user").hover()
    page.locator("[aria-label='Edit and send again']").click()
    expect(page.locator("#input")).to_have_value("First")
    page.locator("#editing-cancel").click()
    expect(page.locator("#input")).to_have_value("A draft here")
    page.locator("#new").click()
    page.locator("#input").fill("Another there")
    row(page, "First").locator(".open").click()
    expect(page.locator("#input")).to_have_value("A draft here")
    page.locator("#new").click()
    expect(page.locator("#input")).to_have_value("Another there")


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(page, place):
    page.evaluate("localStorage.setItem('penstock.settings', JSON.stringify({max_tokens: 1900}))")
    page.reload()
    expect(page.locator("#dot")).to_have_class("dot ok")
    say(page, "Tell me a very long story.")
    expect(page.locator(".message.assistant .body")).to_contain_text(" ")
    row(page, "long story").get_by_role("button", name="Delete").click()
    place.settled()
    expect(page.locator("#conversations .open")).to_have_count(0)
    page.reload()
    expect(page.locator("#no-conversations")).to_be_visible()
    assert page.evaluate(COUNT) == 0


def test_a_cut_answer_is_continued_in_place(page, llm):
    page.evaluate("localStorage.setItem('penstock.settings', JSON.stringify({max_tokens: 10, temperature: 0}))")
    page.reload()
    expect(page.locator("#dot")).to_have_class("dot ok")
    say(page, "Tell me a story about a fox.")
    expect(page.locator(".message.assistant .numbers")).to_contain_text("cut at the limit of tokens")
    first = page.locator(".message.assistant .body").inner_text()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Continue").click()
    body = json.loads(asked.value.post_data)
    assert body["continue_final_message"] is True and body["messages"][-1]["role"] == "assistant"
    want = llm.chat([{"role": "user", "content": "Tell me a story about a fox."}], max_tokens=20).text
    expect(page.locator(".message.assistant .body")).to_have_text(want.strip())
    assert want.startswith(first) and len(want) > len(first)
    expect(page.locator(".message")).to_have_count(2)
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
    page.reload()  # what the page had when it went can be continued, too
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
    asked = answering(page, " The end.")
    expect(page.locator("#dot")).to_have_class("dot ok")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".message.assistant .body")).to_contain_text("The end.")
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()


def test_a_cut_reasoning_is_continued_in_place(page):
    page.route("**/v1/chat/completions", lambda route: told(route, [{"reasoning_content": "First, "}], reason="length"))
    say(page, "Why?")
    expect(page.locator("details.thought div")).to_have_text("First,")
    page.unroute("**/v1/chat/completions")
    asked = []

    def answer(route):
        asked.append(json.loads(route.request.post_data))
        told(route, [{"reasoning_content": " this."}, {"content": "So that."}])

    page.route("**/v1/chat/completions", answer)
    page.get_by_role("button", name="Continue").click()
    done(page, "So that.")
    expect(page.locator("details.thought div")).to_have_text("First, this.")
    begun = {"role": "assistant", "content": "", "reasoning_content": "First,"}
    assert asked[0]["continue_final_message"] is True and asked[0]["messages"][-1] == begun


def test_text_files_are_attached_shown_and_sent_as_text(page, tmp_path):
    (tmp_path / "notes.md").write_text("# Notes\n```js\n1\n```\n")
    (tmp_path / "a.py").write_text("print(1)\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
    (tmp_path / "large.txt").write_text("x" * 600_000)
    asked = answering(page, "Read.")
    page.locator("#attach-file").set_input_files([tmp_path / name for name in ("notes.md", "image.png", "large.txt")])
    expect(page.locator("#composer .chip .name")).to_have_text(["notes.md"])
    expect(page.locator("#toast")).to_contain_text("image.png is no text")
    expect(page.locator("#toast")).to_contain_text("large.txt has 600 kB, at most 524 kB")
    transfer = page.evaluate_handle(
        "() => { const made = new DataTransfer(); made.items.add(new File(['print(1)\\n'], 'a.py')); return made; }"
    )
    page.dispatch_event("body", "dragover", {"dataTransfer": transfer})
    expect(page.locator(".drop")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    expect(page.locator("#composer .chip .name")).to_have_text(["notes.md", "a.py"])
    page.evaluate(
        """() => { const data = new DataTransfer(); data.items.add(new File(['pasted'], 'p.txt'));
        document.getElementById('input').dispatchEvent(new ClipboardEvent('paste', {clipboardData: data})); }"""
    )
    expect(page.locator("#composer .chip .name")).to_have_text(["notes.md", "a.py", "p.txt"])
    page.locator("[aria-label='Remove p.txt']").click()
    say(page, "What is this?")
    done(page, "Read.")
    text = "File: notes.md\n````md\n# Notes\n```js\n1\n```\n````\n\nFile: a.py\n```py\nprint(1)\n```\n\nWhat is this?"
    assert asked[-1]["messages"][-1]["content"] == text
    expect(page.locator("#composer .chip")).to_have_count(0)
    expect(page.locator(".message.user .body")).to_contain_text("What is this?")
    page.reload()
    page.locator(".message.user .chip").nth(1).locator("button").click()
    expect(page.locator("#file-text")).to_have_text("print(1)")
    page.keyboard.press("Escape")
    page.locator(".message.user").hover()
    page.locator("[aria-label='Edit and send again']").click()
    expect(page.locator("#composer .chip .name")).to_have_text(["notes.md", "a.py"])


def test_settings_are_sent_where_they_are_set(page):
    asked = answering(page, "Yes.")
    say(page, "Defaults")
    done(page, "Yes.")
    assert set(asked[-1]) <= {"messages", "stream", "stream_options", "expert_heat"}
    page.locator("#open-settings").click()
    boxes = page.get_by_role("checkbox", name="server default")
    expect(boxes).to_have_count(7)
    for box in boxes.all():
        expect(box).to_be_checked()
    values = {
        "temperature": "0.35", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "repetition_penalty": "1.1",
        "presence_penalty": "-0.5", "frequency_penalty": "0.7", "max_tokens": "33", "seed": "7",
    }  # fmt: skip
    for name, value in values.items():
        page.locator(f"#set-{name}").fill(value)
    expect(page.locator("#default-top_k")).not_to_be_checked()  # moving a slider sets it
    expect(page.locator("#out-top_k")).to_have_text("40")
    page.locator("#set-json").check()
    page.locator("#default-min_p").check()
    page.locator("#settings .primary").click()
    say(page, "Set")
    done(page, "Yes.")
    sent = {name: asked[-1].get(name) for name in values}
    assert sent == {name: float(value) for name, value in values.items() if name != "min_p"} | {"min_p": None}
    assert asked[-1]["response_format"] == {"type": "json_object"}
    page.reload()
    page.locator("#open-settings").click()
    expect(page.locator("#out-presence_penalty")).to_have_text("-0.50")
    expect(page.locator("#default-min_p")).to_be_checked()
    page.locator("#reset-settings").click()
    expect(page.locator("#default-temperature")).to_be_checked()
    expect(page.locator("#set-json")).not_to_be_checked()


TEMPLATES = {
    "{% if enable_thinking %}a{% endif %}": {"chat_template_kwargs": {"enable_thinking": False}},
    "{{ thinking and 1 }}": {"chat_template_kwargs": {"thinking": False}},
    "{{ reasoning_effort }}": {"reasoning_effort": "minimal"},
    "{% if message.thinking %}{{ x['thinking'] }}{% endif %}": {},
    "thinking enable_thinking {{ messages }}": {},
}


def test_thinking_is_switched_where_the_template_knows_it(page, place):
    template = next(iter(TEMPLATES))
    props = place.client.get("/props").json() | {"chat_template": template}
    page.route("**/props", lambda route: route.fulfill(json=props))
    page.reload()
    expect(page.locator("#dot")).to_have_class("dot ok")
    page.locator("#open-settings").click()
    page.locator("#set-thinking").select_option("off")
    page.keyboard.press("Escape")
    asked = answering(page, "Yes.")
    say(page, "Now")
    done(page, "Yes.")
    assert asked[-1]["chat_template_kwargs"] == TEMPLATES[template]["chat_template_kwargs"]
    found = page.evaluate(
        """async (templates) => { const { learn, options } = await import("./settings.js");
        return templates.map((chat_template) => {
          learn({ chat_template });
          return [options(), document.getElementById("row-thinking").hidden];
        }); }""",
        list(TEMPLATES),
    )
    assert found == [[sent, not sent] for sent in TEMPLATES.values()]


def test_the_experts_of_an_answer_are_drawn(page, place):
    page.locator("#open-settings").click()
    page.locator("#set-max_tokens").fill("6")
    page.locator("#settings .primary").click()
    say(page, "Hello")
    layers = len(place.client.get("/v1/models").json()["data"][0]["meta"]["expert_layers"])
    expect(page.locator("canvas.heat")).to_have_attribute("aria-label", re.compile(f"answer: {layers} layers of \\d+,"))
    counts = [[0, 4, 0, 1], [2, 2, 0, 0], [5, 0, 0, 0]]
    asked = answering(page, "Yes.", expert_heat={"counts": counts})
    page.locator("#new").click()
    say(page, "Now")
    strip = page.locator("canvas.heat")
    expect(strip).to_have_attribute("aria-label", "Experts of this answer: 3 layers of 4, 42 % were used")
    drawn = """canvas => [canvas.width, canvas.height,
      ...[...canvas.getContext("2d").getImageData(0, 0, 4, 3).data].filter((_, n) => n % 4 == 3)]"""
    width, height, *alphas = strip.evaluate(drawn)
    assert (width, height) == (4, 3)
    assert [alpha > 0 for alpha in alphas] == [count > 0 for row in counts for count in row]
    assert alphas[8] == max(alphas) == 255 and alphas[1] > alphas[4] > alphas[3]
    assert asked  # and a model without experts shows nothing
    answering(page, "No.")
    page.locator("[aria-label='Answer again']").click()
    done(page, "No.")
    expect(strip).to_have_count(0)


RICH = r"""
The root $x = \sqrt{2}$ costs $5 or $10, \(a_1\) and \*this\* is not soft. So:

$$
\int_0^1 x^2 dx = \frac{1}{3}
$$

\[ y \]

- [x] done
- [ ] to do

```python
def f(x):  # why
    return "text" if x else None
```

```nonsense
plain <b>
```
"""


def test_formulas_colours_and_task_lists(page):
    answering(page, RICH)
    say(page, "Show")
    body = page.locator(".message.assistant .body")
    expect(body.locator(".katex")).to_have_count(4)
    expect(body.locator(".katex-display")).to_have_count(2)
    expect(body.locator("math mfrac")).to_have_count(1)  # for screen readers
    expect(body.locator("p").first).to_contain_text("costs $5 or $10")
    expect(body.locator("p").first).to_contain_text("*this* is not soft")
    boxes = body.get_by_role("checkbox")
    expect(boxes).to_have_count(2)
    expect(boxes.first).to_be_checked()
    expect(boxes.first).to_be_disabled()
    expect(body.locator(".hl-keyword").first).to_have_text("def")
    expect(body.locator(".hl-comment")).to_have_text("# why")
    expect(body.locator("pre").first).to_have_text(re.compile(r'def f\(x\):  # why\s+return "text" if x else None'))
    expect(body.locator("pre").nth(1)).to_have_text("plain <b>")
    assert page.evaluate("document.fonts.ready.then(() => [...document.fonts].some(f => f.status == 'loaded'))")


HOSTILE = r"""
$\href{javascript:window.hurt=1}{x}$ $\url{javascript:window.hurt=1}$
$\includegraphics{https://example.org/x.png}$
$\htmlStyle{background:url(https://example.org/y)}{x}$ $\htmlData{x=1}{y}$
$\def\a{\a\a}\a$ $\rule{100000em}{100000em}$
$\text{<img src=x onerror=window.hurt=1>}$ $\unknown{<script>window.hurt=1</script>}$ $\boxed{\cancel{x}}$ ${$

$$\begin{matrix}<svg onload=window.hurt=1>\end{matrix}$$

- [x] <input onfocus=window.hurt=1 autofocus>

```html
<img src=x onerror="window.hurt = 1"><script>window.hurt = 1</script>
```

```"><img src=x onerror=window.hurt=1>
x
```
[a](javascript:window.hurt=1) [b](https://example.org/"onmouseover="window.hurt=1) <https://example.org>
| <b>x</b> |
|-|
| [c](data:text/html,x) |
"""


def test_hostile_text_stays_text(page):
    """Nothing is fetched from elsewhere (the page fixture looks), nothing runs, and nothing hangs."""
    answering(page, HOSTILE)
    say(page, "<img src=x onerror=window.hurt=1>")
    body = page.locator(".message.assistant .body")
    expect(body.locator(".hl-tag").first).to_be_visible()
    expect(body.locator(".katex").first).to_be_visible()
    assert body.locator("img, script, iframe, object, style, link, svg[onload], [onerror], [onfocus]").count() == 0
    links = body.locator("a").evaluate_all("links => links.map(link => link.href)")
    assert len(links) == 2 and all(link.startswith("https://example.org") for link in links)
    widths = body.locator(".katex *").evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
    assert max(widths) < 1000
    assert page.evaluate("window.hurt") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def test_long_hostile_text_is_shown_in_time(page):
    spent = page.evaluate(
        """async (texts) => { const { render } = await import("./markdown.js"); const spent = {};
        for (const text of texts) {
          const begin = performance.now();
          render(document.createElement("div"), text.repeat(20_000 / text.length));
          spent[text] = performance.now() - begin;
        }
        return spent; }""",
        [*"`*_[$|{", "$$ ", "**a ", "> ", "- ", "  - ", "|-", "\\(", "(a_", "~~", "`` `", "[a](", "http://"],
    )
    assert max(spent.values()) < 3000, spent


def test_no_script_can_make_markup_of_text(browser, place):
    page = browser.new_page()
    page.goto(place.url)
    tried = "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } }"
    assert page.evaluate(tried) == "TypeError"
    page.close()


def test_the_list_lies_over_a_narrow_page_and_keys_close_it(browser, place):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(place.url)
    expect(page.locator("#dot")).to_have_class("dot ok")
    answering(page, "Yes.")
    say(page, "Narrow")
    done(page, "Yes.")
    expect(page.locator("#side")).to_be_hidden()
    page.locator("#open-list").press("Enter")
    expect(page.locator("#side")).to_be_visible()
    expect(page.locator("#close-list")).to_be_focused()
    assert page.evaluate("document.getElementById('page').inert")
    page.keyboard.press("Escape")
    expect(page.locator("#side")).to_be_hidden()
    expect(page.locator("#open-list")).to_be_focused()
    page.locator("#open-list").click()
    page.locator("#conversations .open").click()
    expect(page.locator("#side")).to_be_hidden()
    page.locator("#open-list").click()
    row(page, "Narrow").get_by_role("button", name="Delete").click()
    page.locator("#toast button").click()  # over the list
    expect(page.locator("#conversations .open")).to_have_text(["Narrow"])
    page.close()


def test_long_names_errors_and_gauges_fit_a_narrow_page(browser, place):
    """The banner went over both edges, and gauges moved the composer when requests ran."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    name = "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit"
    models = place.client.get("/v1/models").json()
    models["data"][0]["id"] = name
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    text = place.client.get("/metrics").text + "penstock:expert_hits_total 90.0\npenstock:expert_reads_total 10.0\n"
    page.goto(place.url)
    expect(page.locator("#model-name")).to_have_text(name)
    page.wait_for_selector("#gauge-memory output")
    before = page.locator("#composer").bounding_box()
    busy = re.sub(r"(penstock:requests_\w+) 0.0", r"\1 123.0", text)
    page.route("**/metrics", lambda route: route.fulfill(content_type="text/plain", body=busy))
    expect(page.locator("#gauge-queue output")).to_have_text("123 running, 123 waiting")
    assert page.locator("#composer").bounding_box() == before
    error = {"status": "error", "progress": 0, "error": {"message": "/a/long/path" * 12 + ": config.json is missing"}}
    page.route("**/health", lambda route: route.fulfill(status=503, json=error))
    page.reload()
    expect(page.locator("#banner")).to_contain_text("config.json is missing")
    for part in ("#banner-text", "#banner-retry", "#model", "#open-settings"):
        box = page.locator(part).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390, part
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()
