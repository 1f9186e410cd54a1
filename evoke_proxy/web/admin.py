"""Our own paths: health, readiness and metrics for everybody, the rest behind the guard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from evoke_proxy.engine import Front
from evoke_proxy.engine.operator.exposition import exposition
from evoke_proxy.errors import RequestError
from evoke_proxy.web import admin_api, page_files
from evoke_proxy.web.admin_api import json_answer, same_site
from evoke_proxy.web.guard import admit

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def routes(engine: Front) -> list[web.RouteDef]:
    """The paths that are ours; every other path belongs to llama-server."""

    async def ready(_: web.Request) -> web.StreamResponse:
        return await _ready(engine)

    async def metrics(_: web.Request) -> web.StreamResponse:
        body = await exposition(engine.uplinks, engine.metrics) + engine.metrics.exposition()
        return web.Response(body=body, headers={"Content-Type": _EXPOSITION})

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


async def _ready(engine: Front) -> web.StreamResponse:
    checks = await engine.checks()
    failed = [name for name, check in checks.items() if not check["ok"]]
    answer = {
        "status": "not_ready" if failed else "ready",
        "failed": failed,
        "mode": engine.mode,
        "checks": checks,
    }
    return json_answer(answer, 503 if failed else 200)
