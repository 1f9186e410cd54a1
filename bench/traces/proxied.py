"""The proxy as an arm of the replay: the engine in this process, in front of a patched server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from bench.traces.patched import PatchedServer
from bench.traces.replay import Costs, Counts, now
from bench.traces.texts import Prompt, Tokens
from evoke_proxy.config import load
from evoke_proxy.core.model.block_table import Mask
from evoke_proxy.core.retrieval.encoding import Encoder
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.shared import Shared
from evoke_proxy.errors import CapacityError

# Seconds after which a client repeats a request that was answered 503.
_RETRY_S = 1.0


@dataclass(slots=True)
class ProxiedServer:
    """A server behind the proxy; an arm of the replay."""

    engine: ModelRouter  # the proxy
    server: PatchedServer
    costs: Costs
    has_names: bool = False  # whether clients send a header with an id of the conversation
    n_busy: int = 0  # requests that were answered 503 because no slot became free in time

    async def ask(self, prompt: Prompt, label: str) -> Counts:
        """See Arm; a request that is refused because all slots are busy is sent again."""
        began, reply = now(), None
        name = label.partition("#")[0].partition("/")[0]  # sub-agents send that of their parent
        headers = {"X-Claude-Code-Session-Id": name} if self.has_names else {}
        while reply is None:
            await asyncio.sleep(self.costs.proxy_s)
            try:
                reply = await self.chat(prompt.body(), headers, prompt.answer)
            except CapacityError:
                self.n_busy += 1
                await asyncio.sleep(_RETRY_S)
        beside = self.server.prefilled.pop(reply.session, 0)  # counts as recovered
        return Counts(
            decoded=reply.usage["decoded"] + beside,
            loaded=max(0, reply.usage["recovered"] - beside),
            omitted=reply.usage["omitted"],
            first_token_s=reply.began - began,
            session=reply.session,
        )

    async def chat(self, body: object, headers: Mapping[str, str], answer: Tokens) -> Served:
        """Serve a chat, which the server answers with these tokens."""
        incoming = IncomingRequest(dialect="chat", body=orjson.dumps(body), headers=headers)
        trace = RequestTrace(now())
        request = await self.engine.parser.parse(incoming)
        async with self.engine.exchange(request, trace) as exchange:
            reply: Any = exchange.reply
            answer_began, rows = now(), reply.decoded.slot.rows.copy()
            timings = await self.server.answer(reply.decoded, answer)
            exchange.observe(orjson.dumps({"choices": [], "timings": timings}))
        session = str((trace.facts or {}).get("session") or "")
        return Served(timings["evoke"], session, answer_began, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A chat that was served."""

    usage: Mapping[str, Any]  # the token accounting of the server
    session: str  # the session of the proxy
    began: float  # when the answer began, virtual time
    rows: Mask  # which positions had rows then


@asynccontextmanager
async def proxied(
    server: PatchedServer,
    settings: Mapping[str, object],
    costs: Costs,
    has_names: bool = False,
    encoder: Encoder | None = None,
) -> AsyncIterator[ProxiedServer]:
    """Run the proxy with these settings in front of a server; it logs nothing but errors.

    An `encoder` replaces that of the settings.
    """
    config = load(None, {}, {"upstream.url": "http://none", **settings})
    shared = Shared(config)
    if encoder is not None:
        shared.embedding = EmbeddingService(config.embedder, shared.metrics, lambda _: encoder)
    engine = build_router(config, shared)
    engine.upstream.call = server.call  # type: ignore[method-assign]
    engine.upstream.open = server.open  # type: ignore[method-assign]
    log = logging.getLogger("evoke_proxy")
    level = log.level
    async with shared, engine:
        log.setLevel(logging.ERROR)
        try:
            yield ProxiedServer(engine, server, costs, has_names)
        finally:
            log.setLevel(level)
