"""Answers chat requests: opens an exchange for each request, and relays the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from aiohttp import web
from multidict import CIMultiDict

from evoke_proxy.adapters.tracing import PROPAGATED, TRACEPARENT, Tracing
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.body_budget import COPIES
from evoke_proxy.engine.parsing.body_parsing import LARGE_BYTES
from evoke_proxy.engine.parsing.request import IncomingRequest
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
from evoke_proxy.errors import EvokeError
from evoke_proxy.web import relay
from evoke_proxy.web.client_access import ACCESS
from evoke_proxy.web.logs import FACTS, TRACE_ID
from evoke_proxy.web.relay_queue import RELAY_QUEUE
from evoke_proxy.web.request_bodies import read_body
from evoke_proxy.web.sse_keepalive import KeepaliveStream, PrefillComments, check

# Headers that are not forwarded: inserted fields change the length, the others are the proxy's.
_REPLACED = frozenset(("content-length", "x-evoke-session", "x-evoke-server"))
# Exports traces; None while none are exported.
TRACING: web.AppKey[Tracing | None] = web.AppKey("tracing")


async def answer_chat(
    request: web.Request, gateway: ProxyGateway, dialect: str
) -> web.StreamResponse:
    """Open a request at the gateway, and relay the reply as it arrives."""
    FACTS.set({"decision": "refused"})
    async with read_body(request, gateway, COPIES) as body:
        headers = relay.request_headers(request, _REPLACED)
        with _traced(request, headers) as trace:
            incoming = _incoming(request, dialect, body, headers)
            response = await _exchange(request, gateway, incoming, trace)
        await _pause_to_free(body)
        return response


@contextmanager
def _traced(request: web.Request, headers: CIMultiDict[str]) -> Iterator[RequestTrace]:
    """Measure a request, and export its trace if traces are exported.

    `headers` are those to forward; they then name the span of the request.
    """
    tracing, now = request.app[TRACING], asyncio.get_running_loop().time()
    if tracing is None:
        yield RequestTrace(now)
        return
    parent = {name: request.headers[name] for name in PROPAGATED if name in request.headers}
    span = tracing.begin(request.path, parent)
    TRACE_ID.set(span.trace_id)
    headers[TRACEPARENT] = span.traceparent
    trace = RequestTrace(now, records_steps=True)
    try:
        yield trace
    finally:
        span.end(trace.steps or (), FACTS.get() or {})


async def _exchange(
    request: web.Request, gateway: ProxyGateway, incoming: IncomingRequest, trace: RequestTrace
) -> web.StreamResponse:
    interval_s = gateway.config.limits.keepalive_s
    keepalive = KeepaliveStream(request, gateway.upstream, interval_s)
    try:
        parsed = await gateway.parser.parse(incoming)
        async with AsyncExitStack() as stack:
            opening = gateway.exchange(parsed, trace)
            if parsed.streams:
                exchange = await keepalive.enter(stack, opening, trace)
            else:
                exchange = await stack.enter_async_context(opening)
            if keepalive.response is not None:
                await check(exchange)
            options = relay.RelayOptions(
                observe=exchange.observe,
                headers=exchange.headers,
                usage_extra=exchange.usage_extra,
                edit_error=exchange.edit_error,
                stream=keepalive.response,
                add_comments=PrefillComments(trace, interval_s).added,
            )
            response = await relay.send(request, exchange.reply, options)
            if isinstance(response, relay.Relayed) and response.broken is not None:
                trace.note_failure(response.broken)
        await _pause_to_free(incoming.body)
        return response
    except (EvokeError, ConnectionResetError) as error:
        if keepalive.response is None:
            raise
        return await keepalive.fail(keepalive.response, error)
    finally:
        if trace.facts:
            FACTS.set(trace.facts)


async def _pause_to_free(body: bytes) -> None:
    """Let other tasks run before a copy of a large body is freed, which takes milliseconds."""
    if len(body) > LARGE_BYTES:
        await asyncio.sleep(0)


async def answer_count(
    request: web.Request, gateway: ProxyGateway, dialect: str
) -> web.StreamResponse:
    """Forward a request that only counts tokens, and relay the reply."""
    async with read_body(request, gateway, COPIES) as body:
        headers = relay.request_headers(request, _REPLACED)
        incoming = _incoming(request, dialect, body, headers)
        parsed = await gateway.parser.parse(incoming)
        opening = request.app[RELAY_QUEUE].open(
            request, incoming.target, incoming.forwarded_headers, parsed.body
        )
        async with opening as reply:
            return await relay.send(request, reply)


def _incoming(
    request: web.Request, dialect: str, body: bytes, headers: CIMultiDict[str]
) -> IncomingRequest:
    return IncomingRequest(
        dialect=dialect,
        body=body,
        headers=request.app[ACCESS].client(request),
        target=relay.raw_target(request),
        forwarded_headers=headers,
    )
