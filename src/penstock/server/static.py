"""The files of the page: what is served under which path, and how browsers may use it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "page"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
# Nothing from elsewhere, nothing inline, and no text becomes markup or script, in no library either.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


def _paths() -> dict[str, Path]:
    found = sorted(path for path in _FOLDER.rglob("*") if path.suffix in _KINDS)
    return {f"/{path.relative_to(_FOLDER).as_posix()}".replace("/index.html", "/"): path for path in found}


FILES = _paths()


async def page_file(path: str, request: Request) -> Response:
    """The file, or that it is still the one which the browser has."""
    data = FILES[path].read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {"content-security-policy": _POLICY, "x-frame-options": "DENY", "cache-control": "no-cache", "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=_KINDS[FILES[path].suffix], headers=headers)
