"""The proxy's own paths: health, readiness and metrics for everybody, the rest for operators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web

from evoke_proxy.engine.admin.admin import Admin
from evoke_proxy.engine.admin.exposition import UpstreamMetrics
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
from evoke_proxy.errors import RequestError
from evoke_proxy.web import admin_api, page_files, relay
from evoke_proxy.web.admin_api import json_answer, require_same_site
from evoke_proxy.web.operator_access import admit, is_operator

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Checks: TypeAlias = dict[str, dict[str, Any]]
# Seconds for which clients that are no operators share the result of readiness checks.
_SHARED_CHECKS_S = 1.0
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def routes(engine: ProxyGateway) -> list[web.RouteDef]:
    """The routes of the proxy's own paths; every other path belongs to llama-server."""

    admin = Admin(engine)
    readiness = _Readiness(engine)
    upstream_metrics = UpstreamMetrics(engine)

    async def ready(request: web.Request) -> web.StreamResponse:
        return await readiness.answer(request)

    async def metrics(_: web.Request) -> web.StreamResponse:
        upstream = await upstream_metrics.scrape()
        headers = relay.end_to_end_headers(upstream.headers)
        headers["Content-Type"] = _EXPOSITION
        return web.Response(body=upstream.text + engine.metrics.exposition(), headers=headers)

    async def refuse(request: web.Request) -> web.StreamResponse:
        allowed = await _methods_of(request)
        if allowed:
            message = f"{request.method} is not for {request.path}, {' and '.join(allowed)} are"
            raise RequestError(message, "method_not_allowed", 405)
        raise web.HTTPNotFound(text=f"{request.path} is not a path of evoke-proxy")

    return [
        web.get("/evoke/health", _health),
        web.get("/evoke/ready", ready),
        *(web.route(*path, _for_operators(admin, handler)) for path, handler in admin_api.ROUTES),
        *page_files.routes(),
        web.get("/metrics", metrics, allow_head=False),
        # [\s\S], because a dot does not match an encoded newline.
        web.route("*", r"/evoke/{path:[\s\S]*}", refuse),
    ]


async def _methods_of(request: web.Request) -> list[str]:
    """The methods that a path of the proxy accepts."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        methods |= (await resource.resolve(request))[1]
    return sorted(methods - {"*"})


def _for_operators(admin: Admin, handler: admin_api.Handler) -> Handler:
    """The handler behind the checks that only operators pass."""

    async def handle(request: web.Request) -> web.StreamResponse:
        require_same_site(request)
        admit(request)
        return await handler(request, admin)

    return handle


async def _health(_: web.Request) -> web.StreamResponse:
    return json_answer({"status": "ok"})


class _Readiness:
    """Answers whether requests can be served.

    Operators get the details, checked at once. Everybody else gets the names of failed checks,
    which all requests of `_SHARED_CHECKS_S` share: no flood of them reaches llama-server.
    """

    def __init__(self, engine: ProxyGateway) -> None:
        self._engine = engine
        self._checking = asyncio.Lock()
        self._checks: Checks = {}
        self._valid_until = 0.0

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
            if time.monotonic() >= self._valid_until:
                self._checks = await self._engine.checks()
                self._valid_until = time.monotonic() + _SHARED_CHECKS_S
            return self._checks
