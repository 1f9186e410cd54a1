"""Requests other than chats at two servers on real sockets: which one gets them, and failover."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from pool_fixtures import set_healthy

from evoke_proxy.config import Config, EmbedderConfig, PoolConfig
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.routing.least_loaded_proxy import SERVER_HEADER, LeastLoadedProxy
from evoke_proxy.engine.routing.pool_gateway import PoolGateway
from evoke_proxy.errors import NoServer, RequestError, UpstreamUnavailable

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LOADING = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Servers:
    """Two servers, `a` and `b`; each answers every request with the same bytes, or is away."""

    answers: dict[str, bytes | None]
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    # A proxy in front of them.
    proxy: LeastLoadedProxy | None = None

    async def listener(self, name: str, answer: bytes) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.requests.append((name, await reader.readuntil(b"\r\n\r\n")))
            writer.write(answer)
            writer.close()

        return await asyncio.start_server(serve, "127.0.0.1", 0)

    async def ask(self, method: str = "GET", target: str = "/x", server: str = "") -> str:
        """Send a request; returns the name of the server whose reply is relayed."""
        assert self.proxy is not None
        headers = {SERVER_HEADER: server} if server else {}
        async with self.proxy.open(method, target, headers) as reply:
            await reply.read()
            return reply.headers[SERVER_HEADER]


def served(
    use: Callable[[Servers], Awaitable[None]], a: bytes | None = OK, b: bytes | None = OK
) -> list[tuple[str, bytes]]:
    servers = Servers({"a": a, "b": b})

    async def work() -> None:
        listeners, urls = [], []
        for name, answer in servers.answers.items():
            listener = await servers.listener(name, answer or b"")
            urls.append(f"{name}=http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
            if answer is None:
                listener.close()
            listeners.append(listener)
        gateway = build_gateway(
            Config(pool=PoolConfig(tuple(urls)), embedder=EmbedderConfig("none"))
        )
        assert isinstance(gateway, PoolGateway)
        set_healthy(gateway, 0, 1)
        servers.proxy = gateway.upstream
        async with gateway.servers[0].upstream, gateway.servers[1].upstream:
            await use(servers)
        for listener in listeners:
            listener.close()

    asyncio.run(work())
    return servers.requests


def test_a_named_server_gets_the_request_and_does_not_see_its_name() -> None:
    async def use(servers: Servers) -> None:
        assert [await servers.ask(server=name) for name in "ba"] == ["b", "a"]
        with pytest.raises(RequestError):
            await servers.ask(server="nothing")

    requests = served(use)
    assert [name for name, _ in requests] == ["b", "a"]
    assert all(SERVER_HEADER.lower().encode() not in head.lower() for _, head in requests)


def test_a_running_request_makes_the_other_server_the_least_loaded() -> None:
    async def use(servers: Servers) -> None:
        assert servers.proxy is not None
        async with servers.proxy.open("GET", "/x", {}) as reply:
            first = reply.headers[SERVER_HEADER]
            assert {first, await servers.ask()} == {"a", "b"}

    served(use)


@pytest.mark.parametrize(
    "target", ["/slots/0?action=erase", "/props", "/lora-adapters", "/models/load"]
)
def test_a_request_that_changes_one_server_must_name_it(target: str) -> None:
    async def use(servers: Servers) -> None:
        with pytest.raises(RequestError, match=SERVER_HEADER):
            await servers.ask("POST", target)
        assert await servers.ask("POST", target, server="b") == "b"
        assert await servers.ask("GET", target) in ("a", "b")

    assert len(served(use)) == 2


def test_a_server_that_refuses_the_connection_is_replaced_and_without_any_it_fails() -> None:
    async def use(servers: Servers) -> None:
        assert [await servers.ask() for _ in range(2)] == ["b", "b"]

    async def fail(servers: Servers) -> None:
        with pytest.raises(NoServer):
            await servers.ask()

    served(use, a=None)
    served(fail, a=None, b=None)


def test_a_post_that_a_server_has_received_is_not_sent_again() -> None:
    async def use(servers: Servers) -> None:
        with pytest.raises(UpstreamUnavailable):
            await servers.ask("POST", "/tokenize")

    assert [name for name, _ in served(use, a=b"")] == ["a"]


def test_while_a_server_loads_its_model_the_other_one_answers() -> None:
    async def use(servers: Servers) -> None:
        assert await servers.ask() == "b"

    assert [name for name, _ in served(use, a=LOADING)] == ["a", "b"]
