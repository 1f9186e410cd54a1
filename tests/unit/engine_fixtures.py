"""An engine without a server, and requests whose reply has ended."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
import virtual_time

from evoke_proxy.config import Config
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedRequest
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.reply import ReplyReader
from evoke_proxy.engine.server.turn import TurnScope


def prompt(*tokens: int) -> Rendered:
    return Rendered(np.array(tokens or (1, 2, 3), np.int32), 1, ())


def with_engine(work: Callable[[ModelRouter], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        engine = build_router(Config())
        async with engine.server.resources.background:
            await work(engine)

    virtual_time.run(run())


@dataclass
class Ending:
    """A request whose reply has ended."""

    engine: ModelRouter
    scope: TurnScope
    reply: ReplyReader

    def finish(self) -> None:
        server = self.engine.server
        server._finalizer.finish(server.strategies.budgeted, self.scope, self.reply)


def ending_request(engine: ModelRouter) -> Ending:
    incoming = IncomingRequest(dialect="chat", body=b"{}", headers={})
    request, trace = ParsedRequest(incoming=incoming, tenant="", body=b"{}"), RequestTrace(0.0)
    server = engine.server
    scope = TurnScope(
        request, trace, server.slots, server.resources.metrics, server.resources.calls
    )
    return Ending(engine, scope, ReplyReader(trace))


def is_free(engine: ModelRouter, conversation: Conversation) -> bool:
    pool = engine.server.slots.pool
    return pool.idle() and not pool.is_locked(conversation.id) and not conversation.in_use
