"""Servers of the models behind a router: entered once, and exited by the same task."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.config import Config, UpstreamConfig
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.routing.loaded_models import LoadedModels

BODY = b'{"model":"one"}'


class Router(LlamaClient):
    """A router with two models, which loads them immediately."""

    def __init__(self) -> None:
        super().__init__(UpstreamConfig())

    async def call(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"data": [{"id": "one", "aliases": ["first"]}, {"id": "two"}]}


@dataclass
class Entered:
    """A server whose start waits for an event and may fail."""

    may: asyncio.Event
    failures: list[BaseException]
    client: LlamaClient = field(default_factory=Router)
    tasks: list[asyncio.Task[Any] | None] = field(default_factory=list)
    scope: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    async def __aenter__(self) -> Self:
        await self.scope.__aenter__()
        self.tasks.append(asyncio.current_task())
        await self.may.wait()
        if self.failures:
            await self.scope.__aexit__(None, None, None)
            raise self.failures.pop()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.tasks.append(asyncio.current_task())
        await self.scope.__aexit__(None, None, None)


async def _request(models: LoadedModels[Entered], body: bytes = BODY) -> Entered | None:
    chat = parse_chat("chat", {"messages": [{"role": "user", "content": "Hi"}]})
    incoming = IncomingRequest(dialect="chat", body=body, headers={})
    model = str(json.loads(body)["model"])
    return await models.load(
        ParsedChat(incoming=incoming, tenant="", body=body, chat=chat, model=model)
    )


def test_a_cancelled_request_leaves_the_server_of_its_model_entered() -> None:
    async def run() -> None:
        may, servers = asyncio.Event(), list[Entered]()

        def make(_: str) -> Entered:
            servers.append(Entered(may, []))
            return servers[-1]

        loop = asyncio.get_running_loop()
        async with LoadedModels(Router(), make) as models:
            leaving = loop.create_task(_request(models))
            staying = loop.create_task(_request(models, b'{"model":"first"}'))
            while not servers or not servers[0].tasks:
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.sleep(0)
            assert leaving.cancelled() and not list(models)
            may.set()
            assert await staying is servers[0] and list(models) == servers
            assert await _request(models) is servers[0]
            assert await _request(models, b'{"model":"none"}') is None
        (engine,) = servers
        entered, left = engine.tasks
        assert entered is left and entered not in (leaving, staying, asyncio.current_task())

    asyncio.run(run())


def test_entering_a_model_is_retried_after_a_failure() -> None:
    async def run() -> None:
        may, servers, failures = asyncio.Event(), list[Entered](), [OSError("once")]
        may.set()

        def make(_: str) -> Entered:
            servers.append(Entered(may, failures))  # type: ignore[arg-type]
            return servers[-1]

        async with LoadedModels(Router(), make) as models:
            with pytest.raises(OSError, match="once"):
                await _request(models)
            assert not list(models)
            assert await _request(models) is servers[1]

    asyncio.run(run())


def test_a_server_cancelled_while_entering_is_closed(monkeypatch: Any) -> None:
    async def run() -> None:
        engine, hangs = build_router(Config()), asyncio.Event()

        async def look(*_: object) -> None:
            hangs.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(engine.monitor, "ensure_current", look)
        entering = asyncio.get_running_loop().create_task(engine.__aenter__())
        await hangs.wait()
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        client = engine.upstream._transport._session
        assert client is not None and client.closed

    asyncio.run(run())
