"""One request in a dialect: the engine prepares it, the relay carries it and its answer."""

from __future__ import annotations

from aiohttp import web

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.engine import Front
from evoke_proxy.engine.parsing.body_budget import COPIES
from evoke_proxy.engine.turns.forwarding import Forwarding
from evoke_proxy.errors import EvokeError
from evoke_proxy.web import relay
from evoke_proxy.web.begun import BegunStream, check
from evoke_proxy.web.client_access import ACCESS
from evoke_proxy.web.logs import FACTS
from evoke_proxy.web.request_bodies import read_body

# The body may grow or shrink by the spliced fields; our own header is for us.
_REPLACED = frozenset(("content-length", "x-evoke-session", "x-evoke-server"))


async def answer_chat(request: web.Request, engine: Front, dialect: str) -> web.StreamResponse:
    """Forward a request with what the engine added, relay the answer as it comes."""
    FACTS.set({"decision": "refused"})
    async with read_body(request, engine.config, COPIES) as body:
        return await _answer_chat(request, engine, dialect, body)


async def _answer_chat(
    request: web.Request, engine: Front, dialect: str, body: bytes
) -> web.StreamResponse:
    headers = relay.request_headers(request, _REPLACED)
    client = request.app[ACCESS].client(request)
    ways: list[Forwarding] = []
    stream = BegunStream(request, engine.upstream)

    async def send(way: Forwarding, upstream: LlamaClient) -> web.StreamResponse:
        ways.append(way)
        target = relay.raw_target(request)
        async with upstream.open("POST", target, headers, way.forwarded) as reply:
            way.answered = True
            if stream.response is not None:
                await check(reply)
            asked = way.outcome if way.shows and way.marked else None
            options = relay.RelayOptions(
                observe=way.observe,
                headers=way.headers,
                usage_extra=asked,
                stream=stream.response,
            )
            response = await relay.send(request, reply, options)
            if isinstance(response, relay.Relayed) and response.broken is not None:
                response.broken.counted |= way.has_failed
            return response

    try:
        return await engine.answer(dialect, body, client, send, stream.wait)
    except (EvokeError, ConnectionResetError) as error:
        if stream.response is None:
            raise
        return await stream.fail(error)
    finally:
        if ways:
            FACTS.set(ways[-1].facts())


async def answer_count(request: web.Request, engine: Front, dialect: str) -> web.StreamResponse:
    """Forward a request that only counts tokens, and relay the answer."""
    async with read_body(request, engine.config, COPIES) as read:
        body = await engine.without_fields(dialect, read, request.app[ACCESS].client(request))
        headers, target = relay.request_headers(request, _REPLACED), relay.raw_target(request)
        async with engine.upstream.open("POST", target, headers, body) as reply:
            return await relay.send(request, reply)
