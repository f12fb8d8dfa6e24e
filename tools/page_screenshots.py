"""Make the pictures of the chat page in docs/images: at 1280 and 390 px, light and dark, with Debian's chromium.

    python tools/page_screenshots.py

The demo model writes the story; the conversation with formulas and code is imported, to show how text is set.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

import penstock
from penstock.server.guard import Access
from penstock.server.run import background
from penstock.server.service import Options, Service

IMAGES = Path(__file__).parents[1] / "docs/images"
SIZES = {"chat": (1280, 800), "chat-phone": (390, 844)}

QUESTION = "How do I solve a quadratic equation, and what does that look like in Python?"
ANSWER = r"""
For $ax^2 + bx + c = 0$ with $a \ne 0$, **completing the square** gives

$$x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

so the sign of \(b^2 - 4ac\) says how many real roots there are:

```python
from math import sqrt

def roots(a: float, b: float, c: float) -> tuple[float, float]:
    d = sqrt(b * b - 4 * a * c)  # ValueError: none is real
    return (-b + d) / (2 * a), (-b - d) / (2 * a)

print(f"{roots(1, -3, 2)} are the roots")
```

- [x] two real roots
- [ ] complex ones: use `cmath.sqrt`
"""


def conversations() -> str:
    """An export as the page makes them."""
    now = 1000 * int(time.time())
    made = []
    for n, title in enumerate((QUESTION, "Notes of the meeting", "A regular expression for dates")):
        asked = {"id": f"q{n}", "parent": "", "role": "user", "content": title, "time": now}
        if n == 0:
            asked["files"] = [{"name": "homework.txt", "text": "x" * 1830}]
        answer = {"id": f"a{n}", "parent": f"q{n}", "role": "assistant", "content": ANSWER.strip(), "time": now}
        about = {"id": f"c{n}", "title": title, "updated": now - 60_000 * (n + 1), "chosen": {}}
        made.append(about | {"messages": [asked, answer]})
    return json.dumps({"format": "penstock-conversations", "version": 1, "conversations": made})


def take(browser: Browser, url: str, name: str, scheme: str, export: Path) -> None:
    width, height = SIZES[name]
    phone = width < 500
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=phone, is_mobile=phone
    )
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#dot")).to_have_class("dot ok")
    page.locator("#import-file").set_input_files(export)
    expect(page.locator("#toast")).to_be_visible()
    if scheme == "light":
        page.locator("#toast button").click()
        expect(page.locator(".katex").first).to_be_visible()
        expect(page.locator(".hl-keyword").first).to_be_visible()
    else:
        page.locator("#toast").evaluate("toast => { toast.hidden = true; }")
        story(page)
    page.evaluate("document.fonts.ready")
    page.locator("#scroller").evaluate("view => { view.scrollTop = 0; }")
    page.locator("#input").blur()
    page.wait_for_timeout(2500)  # gauges
    page.screenshot(path=IMAGES / f"{name}{'-dark' * (scheme == 'dark')}.png")
    context.close()


def story(page: Page) -> None:
    """Two answers of the demo model, cut at a limit."""
    page.locator("#open-settings").click()
    page.locator("#set-max_tokens").fill("120")
    page.locator("#set-seed").fill("7")
    page.locator("#settings .primary").click()
    page.locator("#input").fill("Tell me a story about a fox.")
    page.locator("#input").press("Enter")
    for _ in range(2):
        expect(page.locator("canvas.heat")).to_be_visible(timeout=60_000)
        if page.locator(".branches").count() == 0:
            page.locator("[aria-label='Answer again']").click()
            expect(page.locator("#send")).to_have_attribute("aria-label", "Stop")


def main() -> None:
    service = Service(Options())
    service.load(lambda _: (penstock.load(), {"temperature": 0.8}))
    chromium = shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, background(service, Access()) as url, sync_playwright() as playwright:
        export = Path(folder) / "conversations.json"
        export.write_text(conversations())
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in SIZES:
            for scheme in ("light", "dark"):
                take(browser, url, name, scheme, export)
        browser.close()


if __name__ == "__main__":
    main()
