"""The front's side of an engine process: which one is started, and what it tells the service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.engine.channel import Start
from penstock.engine.remote import RemoteScheduler
from penstock.server.model_info import RemoteModel
from penstock.server.service import Service

ENGINE_MODULE = "penstock.server.engine_process"


def engine_starter(load: Mapping[str, Any], notify: Callable[[str], None]) -> Callable[..., RemoteScheduler]:
    """For `Service`: makes the scheduler of a RemoteModel, in a process that calls `penstock.load(**load)`.

    load has nothing but texts and numbers. notify gets remarks of loading, and of engines that end.
    """

    def start(model: RemoteModel, service: Service, **options: Any) -> RemoteScheduler:
        model.scheduler = RemoteScheduler(
            ENGINE_MODULE,
            Start(dict(load), options),
            model.tokenizer,
            progress=service.report,
            notify=notify,
            damaged=service.weights_failed,
            given_up=service.give_up,
        )
        return model.scheduler

    return start
