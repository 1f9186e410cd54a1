"""Serves the proxy's own paths: health, readiness, metrics, the admin API and the admin page."""

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
from evoke_proxy.web.active_requests import ACTIVE_REQUESTS
from evoke_proxy.web.admin_api import json_answer, require_same_site
from evoke_proxy.web.endpoints import PREFETCH_PATH
from evoke_proxy.web.operator_access import OPERATOR_ACCESS, admit, is_operator
from evoke_proxy.web.prefetch import answer_prefetch

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Checks: TypeAlias = dict[str, dict[str, Any]]
# Seconds for which the result of readiness checks is reused for clients that are no operators.
_SHARED_CHECKS_S = 1.0
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def routes(engine: ProxyGateway) -> list[web.RouteDef]:
    """The routes of the proxy's own paths; every other path belongs to llama-server."""

    admin = Admin(engine)
    readiness = _Readiness(engine)
    upstream_metrics = UpstreamMetrics(engine)

    async def ready(request: web.Request) -> web.StreamResponse:
        return await readiness.answer(request)

    async def metrics(request: web.Request) -> web.StreamResponse:
        access = request.app[OPERATOR_ACCESS]
        if access.serves_admin(request):
            require_same_site(request)
            access.check_scrape(request)
        upstream = await upstream_metrics.scrape()
        headers = relay.end_to_end_headers(upstream.headers)
        headers["Content-Type"] = _EXPOSITION
        return web.Response(body=upstream.text + engine.metrics.exposition(), headers=headers)

    async def prefetch(request: web.Request) -> web.StreamResponse:
        with request.app[ACTIVE_REQUESTS].track():
            return await answer_prefetch(request, engine)

    async def refuse(request: web.Request) -> web.StreamResponse:
        allowed = await _methods_of(request)
        if allowed:
            message = f"{request.path} does not accept {request.method}: use {' or '.join(allowed)}"
            raise RequestError(message, "method_not_allowed", 405)
        raise web.HTTPNotFound(text=f"{request.path} is not a path of evoke-proxy")

    return [
        web.get("/evoke/health", _health),
        web.get("/evoke/ready", ready),
        *(
            web.route(route.method, route.path, _for_operators(admin, route.handler))
            for route in admin_api.ROUTES
        ),
        web.post(PREFETCH_PATH, prefetch),
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
    """A handler that runs `handler` for operators, and refuses all other requests."""

    async def handle(request: web.Request) -> web.StreamResponse:
        require_same_site(request)
        admit(request)
        return await handler(request, admin)

    return handle


async def _health(_: web.Request) -> web.StreamResponse:
    return json_answer({"status": "ok"})


class _Readiness:
    """Reports whether requests can be served.

    For operators the checks are made for each request, and the details are reported. For other
    clients a result is reused for `_SHARED_CHECKS_S`, so that many requests cause few calls of
    llama-server; they get only the names of failed checks and the codes of degraded ones. A
    degraded proxy serves requests, so its status is 200.
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
        reasons = {
            f"{name}:{check['reason']}" for name, check in checks.items() if check.get("reason")
        }
        answer: dict[str, Any] = {
            "status": "not_ready" if failed else "degraded" if reasons else "ready",
            "failed": failed,
            "reasons": sorted(reasons),
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
