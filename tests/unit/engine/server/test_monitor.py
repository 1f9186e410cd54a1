"""Which answers of llama-server, and which failures, say that it was started again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
import virtual_time

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, UpstreamConfig
from evoke_proxy.core.servers.server_info import UNKNOWN_SERVER, ServerInfo
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.errors import (
    EvokeError,
    UpstreamProtocolError,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnavailable,
)

FIRST, SECOND = (ServerInfo("", "", n_slots=2, instance=id) for id in ("a" * 16, "b" * 16))
STOCK = ServerInfo("unpatched", "it is not patched")
REFUSED = UpstreamUnavailable("refused", reached=False)


@dataclass
class Watched:
    """A watch of a server that answers as told."""

    answers: list[ServerInfo | EvokeError]
    starts: list[ServerInfo] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.upstream: Any = LlamaClient(UpstreamConfig())
        self.upstream.info = self._info
        self.watch = ServerMonitor(self.upstream, Config(), Metrics())
        self.watch.on_start.append(self.starts.append)

    async def _info(self) -> ServerInfo:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await asyncio.sleep(0)
        if isinstance(answer, EvokeError):
            raise answer
        return answer

    def looks(self, *doubted: bool) -> list[ServerInfo]:
        """What has started after these looks, each with or without a doubt before."""

        async def run() -> None:
            for doubt in doubted:
                if doubt:
                    self.watch.doubt()
                await self.watch.ensure_current()

        virtual_time.run(run())
        return self.starts


def test_a_server_is_asked_once_until_there_is_a_doubt() -> None:
    watched = Watched([FIRST])
    assert watched.looks(False, False, False) == [FIRST] and watched.asked == 1
    assert watched.looks(True, False) == [FIRST] and watched.asked == 2


@pytest.mark.parametrize(
    "error",
    [
        UpstreamUnavailable("broke off"),
        REFUSED,
        UpstreamProtocolError("odd"),
        UpstreamTimeout("silent"),
        UpstreamRejected(503, b"{}"),
        UpstreamRejected(401, b"{}"),
    ],
)
def test_the_same_instance_is_the_same_server_whatever_failed_between(error: EvokeError) -> None:
    watched = Watched([FIRST, error, FIRST, SECOND])
    assert watched.looks(False, True) == [FIRST]
    rejected = isinstance(error, UpstreamRejected) and error.status == 401
    assert (watched.watch.server is UNKNOWN_SERVER) is not rejected
    watched.watch._retry_at = 0.0
    assert watched.looks(True) == [FIRST] and watched.watch.server is FIRST
    assert watched.looks(True) == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("error", "restarted"),
    [
        (UpstreamUnavailable("broke off"), False),
        (UpstreamTimeout("silent"), False),
        (UpstreamProtocolError("odd"), False),
        (UpstreamRejected(403, b"{}"), False),
        (UpstreamRejected(503, b"{}"), True),
        (REFUSED, True),
    ],
)
def test_a_stock_server_was_restarted_if_its_port_was_closed(
    error: EvokeError, restarted: bool
) -> None:
    watched = Watched([STOCK, error, STOCK])
    watched.looks(False, True)
    watched.watch._retry_at = 0.0
    assert watched.looks(True) == [STOCK] * (1 + restarted)


def test_a_stock_server_that_sleeps_is_the_same_one() -> None:
    asleep = ServerInfo("unpatched", "it is not patched", sleeping=True)
    larger = ServerInfo("unpatched", "it is not patched", n_slots=4)
    watched = Watched([STOCK, asleep, STOCK, larger])
    assert watched.looks(False, True, True) == [STOCK]
    assert watched.looks(True) == [STOCK, larger]


def test_a_doubt_that_comes_while_it_is_asked_is_looked_into() -> None:
    """The answer may be older than what failed."""

    async def run() -> None:
        watched = Watched([FIRST, SECOND])
        asking = asyncio.get_running_loop().create_task(watched.watch.ensure_current())
        await asyncio.sleep(0)
        watched.watch.doubt()
        await asking
        await watched.watch.ensure_current()
        assert watched.starts == [FIRST, SECOND]

    asyncio.run(run())


def test_requests_that_doubt_at_once_ask_once() -> None:
    async def run() -> None:
        watched = Watched([FIRST, SECOND])
        await watched.watch.ensure_current()
        watched.watch.doubt()
        await asyncio.gather(*[watched.watch.ensure_current() for _ in range(20)])
        assert watched.asked == 2 and watched.starts == [FIRST, SECOND]

    asyncio.run(run())


def test_an_answer_that_names_another_instance_is_followed_by_a_question() -> None:
    async def run() -> None:
        watched = Watched([FIRST, SECOND])
        await watched.watch.ensure_current()
        for instance in (FIRST.instance, ""):  # older patches name none
            await watched.watch.confirm(instance, watched.upstream)
            assert watched.asked == 1
        await watched.watch.confirm(SECOND.instance, watched.upstream)
        assert watched.starts == [FIRST, SECOND]
        await watched.watch.confirm(SECOND.instance, watched.upstream)
        assert watched.asked == 2

    asyncio.run(run())
