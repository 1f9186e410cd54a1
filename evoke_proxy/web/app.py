"""The aiohttp application: middlewares, routes, and the mapping of errors to responses."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from evoke_proxy.adapters.tracing import Tracing
from evoke_proxy.engine.parsing.body_budget import BodyBudget
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
from evoke_proxy.errors import EvokeError, RequestError, UpstreamError
from evoke_proxy.web import admin, connections, endpoints, error_responses, logs, relay
from evoke_proxy.web.active_requests import ACTIVE_REQUESTS, ActiveRequests
from evoke_proxy.web.chat import TRACING, answer_chat, answer_count
from evoke_proxy.web.client_access import ACCESS, Access, client_access_check
from evoke_proxy.web.coalescing import COALESCER, RequestCoalescer
from evoke_proxy.web.operator_access import OPERATOR_ACCESS, OperatorAccess, admin_only_address
from evoke_proxy.web.relay_queue import RELAY_QUEUE, RelayQueue
from evoke_proxy.web.request_bodies import BODY_BUDGET, measure_parts, read_body
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD, SlowClientGuard, body_deadline

_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The status that nginx logs for a client that disconnected before the answer.
_STATUS_DISCONNECTED = 499
# The facts of a request that is no chat.
_RELAYED = {"decision": "relay"}


def create_app(engine: ProxyGateway) -> web.Application:
    """Make the application in front of `engine`, which the caller enters and leaves.

    Raises ConfigError when traces are to be exported and cannot be. Each request passes the
    middlewares in the order of their list: the first is the outermost.
    """
    limits = engine.config.limits
    middlewares = [
        _measure_and_log(engine),
        body_deadline,
        _map_errors(engine),
        connections.answer_expect,
        connections.check_head,
        admin_only_address,
        client_access_check,
    ]
    limit = limits.body_bytes
    app = web.Application(middlewares=middlewares, client_max_size=limit)
    app[OPERATOR_ACCESS] = OperatorAccess(engine.config)
    app[ACCESS] = Access(engine.config)
    app[SLOW_CLIENT_GUARD] = SlowClientGuard(engine.config.limits, engine.metrics)
    app[BODY_BUDGET] = BodyBudget(lambda: engine.config.limits.bodies_mib)
    app[RELAY_QUEUE] = RelayQueue(engine)
    app[ACTIVE_REQUESTS] = ActiveRequests(lambda: engine.shared.draining)
    app[COALESCER] = RequestCoalescer()
    app[TRACING] = _tracing(app) if engine.config.log.traces else None
    # [\s\S], because a dot does not match an encoded newline.
    routes = [*admin.routes(engine), web.route("*", r"/{path:[\s\S]*}", _dispatch(engine))]
    for route in routes:
        route.kwargs["expect_handler"] = connections.ignore_expect
    app.add_routes(routes)
    app.on_response_prepare.append(relay.remove_added_headers)
    app.on_response_prepare.append(logs.add_request_id)
    app.on_response_prepare.append(connections.announce_close)
    return app


def _tracing(app: web.Application) -> Tracing:
    tracing = Tracing()

    async def close(_: web.Application) -> None:
        await tracing.close()

    app.on_cleanup.append(close)
    return tracing


def _dispatch(engine: ProxyGateway) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        with request.app[ACTIVE_REQUESTS].track():
            return await _answer(request, engine)

    return handle


async def _answer(request: web.Request, engine: ProxyGateway) -> web.StreamResponse:
    if request.method == "POST" and request.path in endpoints.ANSWER_PATHS:
        return await answer_chat(request, engine, endpoints.ANSWER_PATHS[request.path])
    if request.method == "POST" and request.path in endpoints.COUNT_PATHS:
        return await answer_count(request, engine, endpoints.COUNT_PATHS[request.path])
    if request.path in endpoints.HEALTH_PATHS:
        return await relay.health(request, engine.upstream)
    # A body that sets parameters is read and checked whole, as is every body where clients have
    # keys, also that of a GET: each body that llama-server waits for takes one of its threads. A
    # preflight has no key, and llama-server answers it without its body. The structure of other
    # bodies is measured while they are forwarded.
    is_checked = request.path in endpoints.JSON_PATHS or request.path in endpoints.FORM_PATHS
    has_keys, is_post = bool(engine.config.security.keys_file), request.method == "POST"
    is_read = is_post and (is_checked or has_keys)
    if is_read or (has_keys and request.can_read_body and request.method != "OPTIONS"):
        async with read_body(request, engine) as body:
            headers, target = relay.request_headers(request), relay.raw_target(request)
            queue = request.app[RELAY_QUEUE]
            async with queue.open(request, target, headers, body) as reply:
                return await relay.send(request, reply)
    streamed = measure_parts(request, engine.config) if request.can_read_body else None
    return await relay.passthrough(request, engine.upstream, streamed)


def _map_errors(engine: ProxyGateway) -> Callable[..., Awaitable[web.StreamResponse]]:
    """A middleware that maps the errors of handlers to responses; only this one does."""

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
        except ConnectionResetError:  # the client has disconnected and reads no response
            return web.Response(status=_STATUS_DISCONNECTED)
        except Exception:
            _log.exception("unexpected failure in %s %r", request.method, request.path)
            failure = EvokeError("evoke-proxy failed; see its log")
        if request.writer.output_size and request.transport is not None:
            # Part of an answer is sent: the head of another would be read as its body.
            _log.warning("answer to %s %r broke off: %s", request.method, request.path, failure)
            request.transport.abort()
        if isinstance(failure, RequestError) and logs.FACTS.get() == _RELAYED:
            logs.FACTS.set({"decision": "refused"})
        return error_responses.error_response(request.path, failure)

    return middleware


def _too_large(engine: ProxyGateway) -> EvokeError:
    limit = engine.config.limits.body_bytes
    message = f"the request body is larger than limits.body_bytes ({limit} bytes)"
    return RequestError(message, "request_too_large", 413)


def _measure_and_log(engine: ProxyGateway) -> Callable[..., Awaitable[web.StreamResponse]]:
    """A middleware that counts each request, measures its time, and logs one line about it."""

    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        began, status = time.monotonic(), _STATUS_DISCONNECTED
        logs.identify(request)
        logs.FACTS.set(_RELAYED)
        engine.metrics.in_flight.inc()
        try:
            response = await handler(request)
            status = response.status
            if isinstance(response, relay.Relayed):
                status = _STATUS_DISCONNECTED if response.client_left else status
                if response.broken is not None:
                    engine.upstream_failed(response.broken)
            return response
        finally:
            label, seconds = endpoints.endpoint_label(request.path), time.monotonic() - began
            engine.metrics.in_flight.dec()
            engine.metrics.requests.labels(endpoint=label, code=str(status)).inc()
            engine.metrics.request_seconds.labels(endpoint=label).observe(seconds)
            _log_summary(request, label, status, seconds)

    return middleware


def _log_summary(request: web.Request, label: str, status: int, seconds: float) -> None:
    """Log one line about a request; it contains no text of the prompt."""
    is_admin_read = request.method == "GET" and label.startswith("/evoke/")
    is_routine = is_admin_read or label in ("/metrics", "/health")
    line = {"method": request.method, "path": label, "status": status}
    facts = {**line, **(logs.FACTS.get() or {}), "ms": round(seconds * 1000)}
    logs.log_request(logging.DEBUG if is_routine else logging.INFO, facts)
