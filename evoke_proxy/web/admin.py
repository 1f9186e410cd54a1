"""Our own paths: health, readiness and metrics for everybody, the rest behind the guard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web

from evoke_proxy.engine import Front
from evoke_proxy.engine.admin.exposition import UpstreamMetrics
from evoke_proxy.errors import RequestError
from evoke_proxy.web import admin_api, page_files, relay
from evoke_proxy.web.admin_api import json_answer, same_site
from evoke_proxy.web.operator_access import admit, is_operator

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Checks: TypeAlias = dict[str, dict[str, Any]]
_FRESH_S = 1.0
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def routes(engine: Front) -> list[web.RouteDef]:
    """The paths that are ours; every other path belongs to llama-server."""

    readiness = _Readiness(engine)
    upstream_metrics = UpstreamMetrics(engine.uplinks, engine.metrics)

    async def ready(request: web.Request) -> web.StreamResponse:
        return await readiness.answer(request)

    async def metrics(_: web.Request) -> web.StreamResponse:
        theirs = await upstream_metrics.scrape()
        headers = relay.end_to_end_headers(theirs.headers)
        headers["Content-Type"] = _EXPOSITION
        return web.Response(body=theirs.text + engine.metrics.exposition(), headers=headers)

    async def unknown(request: web.Request) -> web.StreamResponse:
        allowed = await _methods_of(request)
        if allowed:
            message = f"{request.method} is not for {request.path}, {' and '.join(allowed)} are"
            raise RequestError(message, "method_not_allowed", 405)
        raise web.HTTPNotFound(text=f"{request.path} is not a path of evoke-proxy")

    return [
        web.get("/evoke/health", _health),
        web.get("/evoke/ready", ready),
        *(web.route(*path, _guarded(engine, handler)) for path, handler in admin_api.ROUTES),
        *page_files.routes(),
        web.get("/metrics", metrics, allow_head=False),
        # [\s\S], because a dot does not match an encoded newline.
        web.route("*", r"/evoke/{path:[\s\S]*}", unknown),
    ]


async def _methods_of(request: web.Request) -> list[str]:
    """What a path of ours may be asked with."""
    found: set[str] = set()
    for resource in request.app.router.resources():
        found |= (await resource.resolve(request))[1]
    return sorted(found - {"*"})


def _guarded(engine: Front, handler: admin_api.Handler) -> Handler:
    """The only way to an admin handler."""

    async def handle(request: web.Request) -> web.StreamResponse:
        same_site(request)
        admit(request)
        return await handler(request, engine)

    return handle


async def _health(_: web.Request) -> web.StreamResponse:
    return json_answer({"status": "ok"})


class _Readiness:
    """Answers whether requests can be served.

    Operators get the details, checked at once. Everybody else gets the names of what failed, from
    checks that are shared by all who ask within `_FRESH_S`: no flood of them reaches llama-server.
    """

    def __init__(self, engine: Front) -> None:
        self._engine = engine
        self._checking = asyncio.Lock()
        self._checks: Checks = {}
        self._fresh_until = 0.0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        operator = is_operator(request)
        checks = await (self._engine.checks() if operator else self._shared())
        failed = [name for name, check in checks.items() if not check["ok"]]
        answer: dict[str, Any] = {
            "status": "not_ready" if failed else "ready",
            "failed": failed,
            "mode": self._engine.mode,
        }
        if operator:
            answer["checks"] = checks
        return json_answer(answer, 503 if failed else 200)

    async def _shared(self) -> Checks:
        async with self._checking:
            if time.monotonic() >= self._fresh_until:
                self._checks = await self._engine.checks()
                self._fresh_until = time.monotonic() + _FRESH_S
            return self._checks
