"""One request in a dialect: the engine prepares it, the relay carries it and its answer."""

from __future__ import annotations

from aiohttp import web

from evoke_proxy.engine import Engine
from evoke_proxy.engine.forwarding import Forwarding
from evoke_proxy.errors import EvokeError
from evoke_proxy.web import relay
from evoke_proxy.web.access import ACCESS
from evoke_proxy.web.begun import BegunStream, check
from evoke_proxy.web.logs import FACTS

# The body may grow or shrink by the spliced fields; our own header is for us.
_REPLACED = frozenset(("content-length", "x-evoke-session"))


async def answer_chat(request: web.Request, engine: Engine, dialect: str) -> web.StreamResponse:
    """Forward a request with what the engine added, relay the answer as it comes."""
    FACTS.set({"decision": "refused"})
    body = await request.read()
    headers = relay.request_headers(request, _REPLACED)
    client = request.app[ACCESS].client(request)
    way: Forwarding | None = None
    stream = BegunStream(request)
    try:
        async with engine.turn(dialect, body, client, stream.wait) as way:
            target = relay.raw_target(request)
            async with engine.upstream.open("POST", target, headers, way.body) as reply:
                if stream.response is not None:
                    await check(reply)
                asked = way.outcome if way.shows and way.marked else None
                return await relay.send(
                    request, reply, way.observe, way.headers, asked, stream.response
                )
    except (EvokeError, ConnectionResetError) as error:
        if stream.response is None:
            raise
        return await stream.fail(error)
    finally:
        if way is not None:
            FACTS.set(way.facts())


async def answer_count(request: web.Request, engine: Engine, dialect: str) -> web.StreamResponse:
    """Forward a request that only counts tokens, and relay the answer."""
    body = engine.without_fields(dialect, await request.read(), request.app[ACCESS].client(request))
    headers, target = relay.request_headers(request, _REPLACED), relay.raw_target(request)
    async with engine.upstream.open("POST", target, headers, body) as reply:
        return await relay.send(request, reply)
