"""What stands before every endpoint: which hosts, origins and keys may come in, headers that go out, errors, the log.

The log has request id, client, method, path, status, seconds and tokens. It never has a query, a header other than a
well-formed x-request-id, or anything of a body.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.body import Disconnected
from penstock.server.errors import ApiError, anthropic_body, as_api_error, dumps
from penstock.server.limits import Limits
from penstock.server.static import FILES

log = logging.getLogger("penstock.server")

# open without a key: there is nothing to hide
PUBLIC = frozenset({"/health", "/v1/health", *FILES})

_OFTEN = PUBLIC | {"/metrics"}  # asked for again and again by pages and watchers

_SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Access:
    """Which clients may use the server.

    keys: any of them is enough, none means that no key is needed. origins: pages of other sites that may call, "*" for
    all. hosts: names under which the server may be addressed, None for any; a page of another site that gives its own
    name the address of this machine (DNS rebinding) is turned away by them.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = _LOOPBACK_NAMES
    digests: tuple[bytes, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digests", tuple(_digest(key.encode()) for key in self.keys))

    def check_host(self, headers: Headers) -> None:
        if self.hosts is None:
            return
        given = headers.get("host", "")
        name = host_name(given)
        if name is None or (name not in self.hosts and not name.endswith(".localhost")):
            raise ApiError(
                403, f"Host is {given[:80]!r}, expected one of {', '.join(sorted(self.hosts))}", code="host_not_allowed"
            )

    def allows(self, origin: str, headers: Headers) -> bool:
        """Whether a page of this origin may call: one of the list, or one that came from this very server."""
        same = origin.partition("://")[2] == headers.get("host", "") and bool(headers.get("host"))
        return same or "*" in self.origins or origin in self.origins

    def check_key(self, headers: Headers) -> int | None:
        """The number of the key that was sent, None where none is needed. Raises ApiError 401.

        Every key is compared, in a time that does not depend on what is right about it.
        """
        if not self.digests:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given.encode("latin-1"))
        right = [hmac.compare_digest(digest, known) for known in self.digests]
        if not any(right):
            message = "the API key is not valid" if given else "an API key is needed: Authorization: Bearer <key>"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return right.index(True)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


_REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)


def request_id(headers: Headers) -> str:
    """The client's own where it can stand in a log as it is, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?))(?::[0-9]{0,5})?", re.ASCII)


def host_name(host: str) -> str | None:
    """The name in a Host header, without port and brackets, in lower case; None if it is no host with or without one.

    Strict, because a name is compared with those that are allowed: nothing may stand before, behind or between.
    """
    host = host.strip().lower()
    found = _HOST.fullmatch(host)
    if found is not None and found[2] is not None:
        return found[2]
    try:
        return ipaddress.IPv6Address(host if found is None else found[1]).compressed
    except ValueError:
        return None


def client_of(key: int | None, peer: tuple[str, int] | None) -> str:
    """The client of a request: a key, else an address, of IPv6 the network that one customer gets (/64)."""
    if key is not None:
        return f"key {key}"
    if peer is None:
        return "unknown"
    try:
        address = ipaddress.ip_address(peer[0])
    except ValueError:
        return peer[0]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address), 64), strict=False))


def is_loopback(host: str) -> bool:
    """Whether a host to listen on can be reached from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def hosts_of(host: str, more: Iterable[str] = ()) -> frozenset[str] | None:
    """Names for a server on `host`: those of this machine, and `more`. None, any, on a host that others can reach."""
    more = frozenset(name.strip().lower() for name in more if name.strip())
    if "*" in more or not (is_loopback(host) or more):
        return None
    return _LOOPBACK_NAMES | {host_name(host) or host.lower(), *more}


class Guard:
    """ASGI application around another one."""

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, count: Callable[[str, int], None]) -> None:
        self._app, self._access, self._limits, self._count = app, access, limits, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path, start = Headers(scope=scope), scope["path"], time.perf_counter()
        origin, status = headers.get("origin"), 0
        allowed = origin is not None and self._access.allows(origin, headers)
        mark, client = request_id(headers), client_of(None, scope.get("client"))
        notes: list[Callable[[], dict[str, int]]] = []  # numbers that an endpoint wants to have in the line of the log
        scope.setdefault("state", {})["note"] = notes

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                for name, value in _SECURITY.items():
                    out.setdefault(name, value)
                out["x-request-id"] = mark
                if origin is not None:
                    out.add_vary_header("Origin")
                if origin is not None and allowed:
                    out["access-control-allow-origin"] = "*" if "*" in self._access.origins else origin
                    out["access-control-expose-headers"] = "x-request-id, retry-after"
                    out["cross-origin-resource-policy"] = "cross-origin"
            await send(message)

        try:
            self._check_head(scope)
            self._access.check_host(headers)
            if origin is not None and not allowed:
                raise ApiError(403, "pages of this origin may not call this server", code="origin_not_allowed")
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _answer(send_with_headers, 204, b"", _preflight(headers))
            else:
                key = None if path in PUBLIC else self._access.check_key(headers)
                scope["state"]["client"] = client = client_of(key, scope.get("client"))
                await self._app(scope, receive, send_with_headers)
        except HTTPException as error:
            allow = (error.headers or {}).get("Allow")
            if scope["method"] == "OPTIONS" and allow is not None:
                await _answer(send_with_headers, 204, b"", {"allow": f"{allow}, OPTIONS"})
            else:
                told = _unrouted(error, scope)
                await _answer(send_with_headers, told.status, _refusal(told, path), told.headers)
        except Disconnected:
            status = status or 499  # it is not read; in the log as nginx writes it
        except Exception as error:
            told = as_api_error(error)
            if told.status == 500:
                found = mark, client, scope["method"], _shown(path), traced(error)
                fields = {"request_id": mark, "client": client}
                log.error("%s %s %s %s failed: %s", *found, extra={"fields": fields})
            if status == 0:
                await _answer(send_with_headers, told.status, _refusal(told, path), told.headers)
        finally:
            seconds = time.perf_counter() - start
            self._count(path, status)
            level = logging.DEBUG if path in _OFTEN and status < 400 else logging.INFO
            if log.isEnabledFor(level):
                line = {"request_id": mark, "client": client, "method": scope["method"], "path": _shown(path)}
                line |= {"status": status, "seconds": round(seconds, 6)}
                for note in notes:
                    line |= note()
                log.log(level, "%s", _line(line), extra={"fields": line})

    def _check_head(self, scope: Scope) -> None:
        """What h11 lets through: other versions, a length that is said in two ways, and a head that is large but came
        at once.
        """
        if scope["http_version"] not in ("1.0", "1.1"):
            end = {"connection": "close"}
            raise ApiError(505, f"HTTP/{scope['http_version']} is not spoken here", code="http_version", headers=end)
        found, most = scope["headers"], self._limits.headers
        names = {name for name, _ in found}
        if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
            # a proxy in front may believe the other one, and take what we take for a body for the next request
            other = "Content-Length" if b"content-length" in names else "HTTP/1.0"
            message = f"not a valid HTTP request: Transfer-Encoding with {other}, expected one length of the body"
            raise ApiError(400, message, code="invalid_http", headers={"connection": "close"})
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(a) + len(b) + 4 for a, b in found)
        if size > most or len(found) > self._limits.header_count:
            raise ApiError(
                431,
                f"the head of the request has {size} bytes and {len(found)} headers, "
                f"expected at most {most} and {self._limits.header_count}",
                code="head_too_large",
            )


def traced(error: BaseException) -> str:
    """Where an error came from and of what kind it is. Its message may quote a request, so it is left out."""
    lines = traceback.format_tb(error.__traceback__)
    return f"{type(error).__name__}\n{''.join(lines)}".rstrip()


def _unrouted(error: HTTPException, scope: Scope) -> ApiError:
    """What the router says about a path or method that it does not have."""
    path, status = _shown(scope["path"]), error.status_code
    if status == 405:
        message = f"{scope['method']} is no method of {path}"
        return ApiError(status, message, code="method_not_allowed", headers=error.headers)
    return ApiError(status, f"there is no {path}", code="not_found", headers=error.headers)


def _refusal(error: ApiError, path: str) -> bytes:
    """The body of an error: on Anthropic's path in the shape of that API."""
    return dumps(anthropic_body(error) if path.startswith("/v1/messages") else error.body)


def _preflight(headers: Headers) -> dict[str, str]:
    asked = [name.strip() for name in headers.get("access-control-request-headers", "").split(",")]
    about = [
        name for name in asked if name.lower().startswith(("x-stainless-", "anthropic-"))
    ]  # clients of OpenAI and Anthropic tell about themselves
    return {
        "access-control-allow-methods": "GET, HEAD, POST",
        "access-control-allow-headers": ", ".join(
            ["authorization", "content-type", "x-api-key", "x-request-id", *about]
        ),
        "access-control-max-age": "600",
    }


def _line(found: dict[str, Any]) -> str:
    """A request for people to read."""
    text = "{request_id} {client} {method} {path} {status} {seconds:.3f} s".format(**found)
    if "prompt_tokens" not in found:
        return text
    return text + ", {prompt_tokens} tokens in ({cached_tokens} cached), {completion_tokens} out".format(**found)


def _shown(path: str) -> str:
    return ascii(path[:80])[1:-1]


async def _answer(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    if status != 204:
        sent += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})
