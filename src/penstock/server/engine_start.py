"""The front's side of engine processes: which are started, and what they tell the service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.engine.channel import Start
from penstock.engine.remote import RemoteScheduler
from penstock.engine.replicas import Replicas
from penstock.engine.resources import Resources
from penstock.server.model_info import RemoteModel
from penstock.server.service import Service
from penstock.units import parse_size

ENGINE_MODULE = "penstock.server.engine_process"


def engine_starter(
    load: Mapping[str, Any], notify: Callable[[str], None], resources: Sequence[Resources] = ()
) -> Callable[..., RemoteScheduler | Replicas]:
    """For `Service`: makes the scheduler of a RemoteModel, in a process that calls `penstock.load(**load)`.

    load has nothing but texts and numbers. notify gets remarks of loading, and of engines that end. resources: of each
    replica, where there are several; memory, threads and places in the queue are shared out among them.
    """

    def start(model: RemoteModel, service: Service, **options: Any) -> RemoteScheduler | Replicas:
        def engine(start: Start, **own: Any) -> RemoteScheduler:
            hooks = {"damaged": service.weights_failed, "record": service.record}
            return RemoteScheduler(ENGINE_MODULE, start, model.tokenizer, **hooks, **own)

        def replica(number: int, given_up: Callable[[str], None]) -> RemoteScheduler:
            def progress(share: float) -> None:
                shares[number] = share
                service.report(sum(shares) / len(shares))

            def note(text: str) -> None:
                notify(f"replica {number}: {text}")

            part = replica_start(load, options, resources[number], len(resources))
            return engine(part, progress=progress, notify=note, given_up=given_up, resources=resources[number])

        if len(resources) > 1:
            shares = [0.0] * len(resources)
            model.scheduler = Replicas(len(resources), replica, notify=notify, given_up=service.give_up)
        else:
            whole = Start(dict(load), options)
            model.scheduler = engine(whole, progress=service.report, notify=notify, given_up=service.give_up)
        return model.scheduler

    return start


def replica_start(load: Mapping[str, Any], options: Mapping[str, Any], own: Resources, count: int) -> Start:
    """What one of `count` replicas is to load. What was said of a CPU's memory and threads is for all of them."""
    load, options = dict(load), dict(options)
    options["queue"] = -(-options["queue"] // count)
    if not own.gpus:
        load["threads"] = own.threads
        if load.get("cache_memory") is not None:
            load["cache_memory"] = max(1, parse_size(load["cache_memory"], "--memory") // count)
        if options.get("prefix_memory") is not None:
            options["prefix_memory"] //= count
    return Start(load, options)
