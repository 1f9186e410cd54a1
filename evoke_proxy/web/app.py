"""The aiohttp application: which request goes where, one place for errors, one line per request."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from evoke_proxy.engine import Front
from evoke_proxy.engine.parsing.body_budget import BodyBudget
from evoke_proxy.engine.parsing.body_checks import BodyChecker
from evoke_proxy.errors import EvokeError, RequestError, UpstreamError
from evoke_proxy.web import admin, connections, dialects, logs, relay
from evoke_proxy.web.active_requests import ACTIVE_REQUESTS, ActiveRequests
from evoke_proxy.web.chat import answer_chat, answer_count
from evoke_proxy.web.client_access import ACCESS, Access, client_access_check
from evoke_proxy.web.coalescing import COALESCER, RequestCoalescer
from evoke_proxy.web.operator_access import OPERATOR_ACCESS, OperatorAccess, apart
from evoke_proxy.web.request_bodies import BODY_BUDGET, CHECKER, measured, read_body
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD, SlowClientGuard, body_deadline

_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# What nginx calls a client that closed its connection before the answer.
_CLIENT_GONE = 499


def create_app(engine: Front) -> web.Application:
    """The proxy in front of `engine`, which the caller has entered and will close."""
    limits = engine.config.limits
    middlewares = [
        _accounted(engine),
        body_deadline,
        _translated(engine),
        connections.checked_head(limits),
        apart,
        client_access_check,
    ]
    limit = limits.body_bytes
    app = web.Application(middlewares=middlewares, client_max_size=limit)
    app[OPERATOR_ACCESS] = OperatorAccess(engine.config)
    app[ACCESS] = Access(engine.config)
    app[SLOW_CLIENT_GUARD] = SlowClientGuard(engine.config.limits, engine.metrics)
    app[CHECKER] = BodyChecker()
    app[BODY_BUDGET] = BodyBudget(lambda: engine.config.limits.bodies_mib)
    app[ACTIVE_REQUESTS] = ActiveRequests(lambda: engine.shared.draining)
    app[COALESCER] = RequestCoalescer()
    app.add_routes(admin.routes(engine))
    # [\s\S], because a dot does not match an encoded newline.
    app.router.add_route("*", r"/{path:[\s\S]*}", _dispatch(engine))
    app.on_response_prepare.append(relay.remove_added_headers)
    app.on_response_prepare.append(logs.add_request_id)
    return app


def _dispatch(engine: Front) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        with request.app[ACTIVE_REQUESTS].track():
            return await _answer(request, engine)

    return handle


async def _answer(request: web.Request, engine: Front) -> web.StreamResponse:
    if request.method == "POST" and request.path in dialects.ANSWER_PATHS:
        return await answer_chat(request, engine, dialects.ANSWER_PATHS[request.path])
    if request.method == "POST" and request.path in dialects.COUNT_PATHS:
        return await answer_count(request, engine, dialects.COUNT_PATHS[request.path])
    if request.path in dialects.HEALTH_PATHS:
        return await relay.health(request, engine.upstream)
    # With keys everything that tenants may send is read; without, where it sets parameters. The
    # structure of other bodies is measured while they are forwarded.
    checked = request.path in dialects.JSON_PATHS or request.path in dialects.FORM_PATHS
    if request.method == "POST" and (checked or engine.config.security.keys_file):
        async with read_body(request, engine.config) as body:
            return await relay.passthrough(request, engine.upstream, body)
    streamed = measured(request, engine.config) if request.can_read_body else None
    return await relay.passthrough(request, engine.upstream, streamed)


def _translated(engine: Front) -> Callable[..., Awaitable[web.StreamResponse]]:
    """The one place where our errors become answers."""

    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        failure: EvokeError
        try:
            return await handler(request)
        except EvokeError as error:
            if isinstance(error, UpstreamError):
                engine.upstream_failed(error)
            failure = error
        except web.HTTPRequestEntityTooLarge:
            failure = _too_large(engine)
        except web.HTTPException as error:
            failure = RequestError(error.text or error.reason, "not_found", error.status)
        except ConnectionResetError:  # the client is gone: nobody reads this
            return web.Response(status=_CLIENT_GONE)
        except Exception:
            _log.exception("unexpected failure in %s %r", request.method, request.path)
            failure = EvokeError("evoke-proxy failed; see its log")
        if request.writer.output_size and request.transport is not None:
            # Part of an answer is out: a second head would be read as its body.
            _log.warning("answer to %s %r broke off: %s", request.method, request.path, failure)
            request.transport.abort()
        return dialects.error_response(request.path, failure)

    return middleware


def _too_large(engine: Front) -> EvokeError:
    limit = engine.config.limits.body_bytes
    message = f"the request body is larger than limits.body_bytes ({limit} bytes)"
    return RequestError(message, "request_too_large", 413)


def _accounted(engine: Front) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        began, status = time.monotonic(), _CLIENT_GONE
        logs.identify(request)
        logs.FACTS.set({"decision": "relay"})
        engine.metrics.in_flight.inc()
        try:
            response = await handler(request)
            status = response.status
            if isinstance(response, relay.Relayed):
                status = _CLIENT_GONE if response.client_left else status
                if response.broken is not None:
                    engine.upstream_failed(response.broken)
            return response
        finally:
            label, seconds = dialects.endpoint_label(request.path), time.monotonic() - began
            engine.metrics.in_flight.dec()
            engine.metrics.requests.labels(endpoint=label, code=str(status)).inc()
            engine.metrics.request_seconds.labels(endpoint=label).observe(seconds)
            _log_summary(request, label, status, seconds)

    return middleware


def _log_summary(request: web.Request, label: str, status: int, seconds: float) -> None:
    """One line, never any text of the prompt."""
    looks = request.method == "GET" and label.startswith("/evoke/")
    quiet = looks or label in ("/metrics", "/health")
    what = {"method": request.method, "path": label, "status": status}
    facts = {**what, **(logs.FACTS.get() or {}), "ms": round(seconds * 1000)}
    logs.summarize(logging.DEBUG if quiet else logging.INFO, facts)
