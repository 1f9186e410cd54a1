"""Serves the static files of the admin page, which loads nothing from other sites."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from evoke_proxy.errors import RequestError
from evoke_proxy.web.operator_access import admit_page

_FOLDER = Path(__file__).with_name("page")
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_FILES = frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in _TYPES)
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def routes() -> list[web.RouteDef]:
    """The routes of the admin page at /evoke/ and of its files."""

    async def page(request: web.Request) -> web.StreamResponse:
        admit_page(request)
        return _answer(request, "index.html")

    async def file(request: web.Request) -> web.StreamResponse:
        admit_page(request)
        return _answer(request, request.match_info["name"])

    async def redirect(_: web.Request) -> web.StreamResponse:
        return web.Response(status=308, headers={"Location": "/evoke/"})

    return [
        web.get("/evoke", redirect),
        web.get("/evoke/", page),
        web.get("/evoke/page/{name}", file),
    ]


def _answer(request: web.Request, name: str) -> web.Response:
    if name not in _FILES:
        raise RequestError(f"{request.path} is not a path of evoke-proxy", "not_found", 404)
    path = _FOLDER / name
    return web.Response(
        body=path.read_bytes(),
        content_type=_TYPES[path.suffix],
        charset="utf-8",
        headers=_HEADERS,
    )
