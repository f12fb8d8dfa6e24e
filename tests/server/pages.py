"""What tests do with the page in a browser."""

import json
from typing import Any

from playwright.sync_api import Page, Route


def say(page: Page, text: str) -> None:
    page.locator("#input").fill(text)
    page.locator("#input").press("Enter")


def set_messages(page: Page, *messages: dict[str, str]) -> None:
    page.evaluate("messages => localStorage.setItem('penstock.messages', JSON.stringify(messages))", list(messages))
    page.reload()


def told(route: Route, deltas: list[dict[str, str]], status: int = 200, reason: str = "stop", **more: Any) -> None:
    """Answer a request of the page with a stream of these deltas."""
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    usage = {"completion_tokens": 3, "prompt_tokens": 9}
    events.append({"choices": [], "usage": usage, "timings": {}, **more})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    route.fulfill(status=status, content_type="text/event-stream", body=body)
