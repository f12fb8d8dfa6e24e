"""Answers in the shape of /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.response import ResponseHandle, wait_any
from penstock.server.errors import dumps

if TYPE_CHECKING:
    from penstock.engine.request import Request
    from penstock.server.service import AnyScheduler


async def vectors(
    requests: Sequence[Request], scheduler: AnyScheduler, client: str, handles: list[ResponseHandle]
) -> list[np.ndarray]:
    """Run a request for each text, as many at a time as the scheduler runs: thousands would fill its queue.

    handles: gets those of requests that were submitted. Raises what one of them failed with.
    """
    running: list[ResponseHandle] = []
    for request in requests:
        while len(running) >= scheduler.max_sequences:
            await wait_any(running)
            for handle in running:
                handle.read()  # raises what it failed with
            running = [handle for handle in running if not handle.ended]
        running.append(scheduler.submit(request, client))
        handles.append(running[-1])
    for handle in handles:
        await handle.wait()
    return [handle.pieces[0][0] for handle in handles]


def body(found: Sequence[np.ndarray], encoding: str | None, model: str, tokens: int) -> bytes:
    """The response. A list is written a vector at a time: the numbers of many would hold other threads up."""
    parts = []
    for n, vector in enumerate(found):
        values = vector.astype("<f4", copy=False)
        shown = base64.b64encode(values.tobytes()).decode() if encoding == "base64" else values.tolist()
        parts.append(dumps({"object": "embedding", "index": n, "embedding": shown}))
    rest = dumps({"model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
    return b'{"object":"list","data":[' + b",".join(parts) + b"]," + rest[1:]
