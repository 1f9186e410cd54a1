"""Our own paths: health, readiness and metrics for everybody, the rest behind the guard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from evoke_proxy.engine import Engine
from evoke_proxy.errors import EvokeError, UpstreamRejected
from evoke_proxy.web import admin_api, page_files
from evoke_proxy.web.admin_api import json_answer, same_site
from evoke_proxy.web.guard import admit

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Half of what Prometheus waits unless it is told otherwise.
_SCRAPE_S = 5.0
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def routes(engine: Engine) -> list[web.RouteDef]:
    """The paths that are ours; every other path belongs to llama-server."""

    async def ready(_: web.Request) -> web.StreamResponse:
        return await _ready(engine)

    async def metrics(_: web.Request) -> web.StreamResponse:
        body = await _upstream_exposition(engine) + engine.metrics.exposition()
        return web.Response(body=body, headers={"Content-Type": _EXPOSITION})

    async def unknown(request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound(text=f"{request.path} is not a path of evoke-proxy")

    return [
        web.get("/evoke/health", _health),
        web.get("/evoke/ready", ready),
        *(web.route(*path, _guarded(engine, handler)) for path, handler in admin_api.ROUTES),
        *page_files.routes(engine),
        web.get("/metrics", metrics, allow_head=False),
        # [\s\S], because a dot does not match an encoded newline.
        web.route("*", r"/evoke/{path:[\s\S]*}", unknown),
    ]


def _guarded(engine: Engine, handler: admin_api.Handler) -> Handler:
    """The only way to an admin handler."""

    async def handle(request: web.Request) -> web.StreamResponse:
        same_site(request)
        await admit(request, engine)
        return await handler(request, engine)

    return handle


async def _health(_: web.Request) -> web.StreamResponse:
    return json_answer({"status": "ok"})


async def _ready(engine: Engine) -> web.StreamResponse:
    checks = await engine.checks()
    failed = [name for name, check in checks.items() if not check["ok"]]
    answer = {
        "status": "not_ready" if failed else "ready",
        "failed": failed,
        "mode": engine.mode,
        "checks": checks,
    }
    return json_answer(answer, 503 if failed else 200)


async def _upstream_exposition(engine: Engine) -> bytes:
    """llama-server's own metrics, empty when it has none, is down, or sleeps (never wake it).

    It answers between two decodes. A scraper has less patience than some decodes take, and is to
    have our part then.
    """
    try:
        async with asyncio.timeout(_SCRAPE_S):
            body = await _asked_for_metrics(engine)
    except (EvokeError, TimeoutError) as error:
        return f"# llama-server has no metrics now: {str(error) or 'it is too slow'}\n".encode()
    return body if not body or body.endswith(b"\n") else body + b"\n"


async def _asked_for_metrics(engine: Engine) -> bytes:
    engine.metrics.upstream_up.set(0)
    try:
        sleeping = (await engine.upstream.info()).sleeping
    except UpstreamRejected:
        engine.metrics.upstream_up.set(1)
        raise
    engine.metrics.upstream_up.set(1)
    if sleeping:
        return b"# llama-server sleeps: its metrics are left out\n"
    headers = engine.upstream.own_headers()
    async with engine.upstream.open("GET", "/metrics", headers) as reply:
        return await reply.read() if reply.status == 200 else b""
