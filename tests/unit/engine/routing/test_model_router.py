"""The model router: a turn of a model that has to be loaded first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from evoke_proxy.config import Config
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.engine.assembly import build_router, build_server
from evoke_proxy.engine.gateway import Exchange, RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.server.reply import ReplyReader


def test_the_time_to_load_a_model_counts_as_waiting(monkeypatch: Any) -> None:
    preempted: list[int] = []

    async def turn() -> tuple[float, bool]:
        router = build_router(Config())
        inner = build_server(router.config, router.shared, router.upstream, model="other")
        trace = RequestTrace(asyncio.get_running_loop().time())

        async def loaded(*_: object) -> Any:
            assert trace.waiting_since is not None, (
                "the client must get keep-alives while the model loads"
            )
            await asyncio.sleep(0.05)
            return inner

        async def look(*_: object) -> None:
            return None

        @asynccontextmanager
        async def exchange(_: object, trace: RequestTrace) -> AsyncIterator[Exchange]:
            reader, reply = ReplyReader(trace), object()
            reader.feed(b"{")
            assert reader.first_byte_s is not None and reader.first_byte_s >= 0.05
            yield Exchange(reply=reply, observe=reader.feed)  # type: ignore[arg-type]

        router._models._servers["other"] = inner
        monkeypatch.setattr(router._models, "load", loaded)
        monkeypatch.setattr(router.monitor, "ensure_current", look)
        monkeypatch.setattr(type(router), "_is_router", property(lambda _: True))
        monkeypatch.setattr(inner.server, "exchange", exchange)
        monkeypatch.setattr(inner.server.slots, "preempt", lambda _: preempted.append(1))
        chat = parse_chat("chat", {"messages": [{"role": "user", "content": "Hi"}]})
        incoming = IncomingRequest(dialect="chat", body=b"{}", headers={})
        request = ParsedChat(incoming=incoming, tenant="", body=b"{}", chat=chat)
        async with router.exchange(request, trace):
            return trace.attempted_at - trace.arrived_at, trace.waiting_since is None

    waited_s, is_over = asyncio.run(turn())
    assert waited_s >= 0.05 and is_over
    assert preempted == [1], "look-ahead of one model must not delay another"
