"""Running the server: a socket, the event loop, the model in a thread, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import uvicorn

from penstock.errors import PenstockError
from penstock.server.app import Application
from penstock.server.guard import Access
from penstock.server.listen import removed_at_end
from penstock.server.protocol import protocol_of
from penstock.server.service import AnyScheduler, Options, Service

if TYPE_CHECKING:
    from penstock.server.model_info import ServedModel

log = logging.getLogger("penstock.server")

Loader = Callable[[Callable[[float], None]], "tuple[ServedModel, Mapping[str, Any]]"]


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one. Raises PenstockError if that is impossible."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)  # localhost has two addresses
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise PenstockError(f"serve: cannot listen on {host}: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        used = f"port {port} of {host} is in use (another server?); choose one with --port"
        reason = (
            used if error.errno == errno.EADDRINUSE else f"cannot listen on {host}:{port}: {error.strerror or error}"
        )
        raise PenstockError(f"serve: {reason}") from None
    return bound


class Server(uvicorn.Server):
    """uvicorn with our limits. The first signal ends it in order, the second one at once."""

    def __init__(
        self,
        service: Service,
        access: Access,
        listening: Callable[[], None] = lambda: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        limits = service.options.limits
        self._service, self._listening, self._tls = service, listening, tls
        super().__init__(
            uvicorn.Config(
                Application(service, access),
                http=protocol_of(limits),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=round(limits.idle_seconds),
                h11_max_incomplete_event_size=limits.headers,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.ssl = self._tls
        await super().startup(sockets)
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Requests under way may still finish, within the limit. Meanwhile others are turned away and /health says
        `draining`, so that a balancer sends its clients elsewhere; then nothing listens any more.
        """
        deadline = self._service.options.limits.shutdown_seconds
        if self._service.failure is None:
            log.info("ending: answers under way have %g s; a second Ctrl-C ends at once", deadline)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await loop.run_in_executor(None, self._service.close, deadline)
        self.config.timeout_graceful_shutdown = 5 + round(max(0.0, begin + deadline - loop.time()))  # to write the rest
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            os._exit(130)  # the second signal does not wait for a step of a large model
        self.should_exit = True


def serve(
    loader: Loader,
    options: Options,
    access: Access,
    bound: socket.socket,
    listening: Callable[[], None],
    ready: Callable[[Service], None],
    make_scheduler: Callable[..., AnyScheduler] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Service:
    """Serve until a signal comes. `listening` is called when requests and signals are taken; the model is loaded
    meanwhile, and `ready` is called when it is there or has failed: then /health says why.
    """
    service = Service(options, make_scheduler)

    def load() -> None:
        service.load(loader)
        gc.collect()
        gc.freeze()  # what is there now stays: collections that walk through it took a quarter of the time of a token
        ready(service)

    loading = threading.Thread(target=load, name="penstock-load", daemon=True)

    def started() -> None:
        listening()
        loading.start()

    server = Server(service, access, started, tls)
    service.stop = lambda: setattr(server, "should_exit", True)
    with removed_at_end(bound):
        server.run(sockets=[bound])
    if loading.is_alive():  # it cannot be interrupted, and must not run while the interpreter is taken down
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return service


@contextlib.contextmanager
def background(
    service: Service,
    access: Access,
    port: int = 0,
    bound: socket.socket | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """A server in a thread of this process, for tests and measurements: its address, while the block runs; on a
    Unix socket only the rest of an address is of use.
    """
    bound = bind("127.0.0.1", port) if bound is None else bound
    server = Server(service, access, tls=tls)
    scheme, where = "http" if tls is None else "https", bound.getsockname()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="penstock-server", daemon=True)
    thread.start()
    try:
        yield f"{scheme}://localhost" if isinstance(where, str) else f"{scheme}://127.0.0.1:{where[1]}"
    finally:
        server.should_exit = True
        thread.join()
