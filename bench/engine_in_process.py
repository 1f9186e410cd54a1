"""The engine of the proxy in this process, in front of a server that is an object here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import orjson
from multidict import CIMultiDict

from evoke_proxy.adapters.llama.client import CallOptions
from evoke_proxy.adapters.llama.transport import Reply
from evoke_proxy.config import load
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.gateway import Exchange, RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest
from evoke_proxy.engine.routing.model_router import ModelRouter

DEFAULT_OPTIONS = CallOptions()


class LocalServer(Protocol):
    """What replaces the connection to llama-server."""

    async def call(
        self, method: str, target: str, body: object = None, options: CallOptions = DEFAULT_OPTIONS
    ) -> dict[str, Any]:
        """Replaces `LlamaClient.call`."""
        ...

    def open(
        self, method: str, target: str, headers: Mapping[str, str], body: Any = None
    ) -> AbstractAsyncContextManager[Reply]:
        """Replaces `LlamaClient.open`."""
        ...


class LocalReply(Reply):
    """A reply that is not read from a connection.

    Attributes:
        decoded: What the server says of the prompt that it has decoded.
        content: The body.
    """

    decoded: Any
    content: bytes

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.content


def reply_of(decoded: Any = None, content: bytes = b"") -> LocalReply:
    """Return the reply to a request whose prompt is decoded."""
    reply = LocalReply.__new__(LocalReply)
    members: dict[str, Any] = {"status": 200, "reason": "OK", "headers": CIMultiDict()}
    for name, value in (members | {"decoded": decoded, "content": content}).items():
        object.__setattr__(reply, name, value)
    return reply


@asynccontextmanager
async def engine_before(
    server: LocalServer, settings: Mapping[str, object]
) -> AsyncIterator[ModelRouter]:
    """Run the engine with these settings; it logs nothing but errors."""
    engine = build_router(load(None, {}, {"upstream.url": "http://none", **settings}))
    engine.upstream.call = server.call  # type: ignore[method-assign]
    engine.upstream.open = server.open  # type: ignore[method-assign,assignment]
    log = logging.getLogger("evoke_proxy")
    level = log.level
    async with engine:
        log.setLevel(logging.ERROR)
        try:
            yield engine
        finally:
            log.setLevel(level)


@asynccontextmanager
async def exchanged(
    engine: ModelRouter, body: bytes, headers: Mapping[str, str]
) -> AsyncIterator[tuple[Exchange, RequestTrace]]:
    """Pass a chat request through the engine, until its end."""
    incoming = IncomingRequest(dialect="chat", body=body, headers=headers)
    trace = RequestTrace(asyncio.get_running_loop().time())
    request = await engine.parser.parse(incoming)
    async with engine.exchange(request, trace) as exchange:
        yield exchange, trace


def body_of(body: object) -> bytes:
    """Return the bytes of a call's body, which may come in parts."""
    parts = body if isinstance(body, tuple) else (body,)
    return b"".join(part if isinstance(part, bytes) else orjson.dumps(part) for part in parts)
