"""The engine process of a server: loads the model, then runs requests of the front process.

Started by `RemoteScheduler`, which names this module, with one end of a socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from typing import Any

from penstock.api import LLM, load
from penstock.engine.channel import (
    Close,
    Connection,
    Damaged,
    FromFront,
    NotLoaded,
    Progress,
    Ready,
    Start,
    error_message,
)
from penstock.engine.process import EngineLoop, Inbox
from penstock.engine.protect import protect
from penstock.engine.scheduler import Scheduler
from penstock.errors import EngineDied, PenstockError
from penstock.server.model_info import model_info


def main(descriptor: int) -> None:
    """Until the front says so or ends. Never returns: threads may be in the middle of a kernel."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        connection = Connection(socket.socket(fileno=descriptor), FromFront)
        status = _run(connection, Inbox(connection))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run(connection: Connection, inbox: Inbox) -> int:
    [start, *more] = inbox.take(None)
    assert isinstance(start, Start)
    if any(isinstance(message, Close) for message in more):
        return 0
    try:
        llm, scheduler, note = _load(start, connection)
    except Exception as error:
        if not isinstance(error, PenstockError | OSError):
            traceback.print_exc()
        failed = error_message(0, error)
        connection.send(NotLoaded(failed.kind, failed.message))
        return 1
    queue = start.scheduler.get("queue", scheduler.queue)
    info = model_info(llm).as_dict()
    loop = EngineLoop(connection, inbox, scheduler, llm.tokenizer, llm.config.vocab_size, lambda: vars(llm.stats()))
    connection.send(Progress(1.0, note), Ready(info, scheduler.max_sequences, queue))
    try:
        loop.run()
    except EngineDied as error:  # another rank of the model
        connection.send(Progress(0.0, str(error)))
        return 1
    llm.close()
    return 0


def _load(start: Start, connection: Connection) -> tuple[LLM, Scheduler, str]:
    llm = load(
        **start.model,
        notify=lambda note: connection.send(Progress(0.0, note)),
        progress=lambda share: connection.send(Progress(share)),
    )
    note = protect(llm.engine)
    options: dict[str, Any] = {**start.scheduler, "failed": lambda error: connection.send(Damaged(str(error)))}
    scheduler = Scheduler(llm, **options)
    llm.engine.prepare()
    scheduler.submit(scheduler.request([0], max_tokens=1)).result()  # compiles what is not compiled yet
    return llm, scheduler, note
