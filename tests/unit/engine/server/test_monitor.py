"""The server monitor: which replies and failures mean that llama-server was restarted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
import virtual_time

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, PolicyConfig, SnapshotsConfig, UpstreamConfig
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
class MonitoredServer:
    """A monitor of a server with prepared answers."""

    answers: list[ServerInfo | EvokeError]
    starts: list[ServerInfo] = field(default_factory=list)
    n_calls: int = 0

    def __post_init__(self) -> None:
        self.upstream: Any = LlamaClient(UpstreamConfig())
        self.upstream.info = self._info
        self.monitor = ServerMonitor(self.upstream, Config(), Metrics())
        self.monitor.on_start.append(self.starts.append)

    async def _info(self) -> ServerInfo:
        self.n_calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await asyncio.sleep(0)
        if isinstance(answer, EvokeError):
            raise answer
        return answer

    def check(self, *doubted: bool) -> list[ServerInfo]:
        """Checks once per value, after a doubt if true; returns the starts detected so far."""

        async def run() -> None:
            for doubt in doubted:
                if doubt:
                    self.monitor.doubt()
                await self.monitor.ensure_current()

        virtual_time.run(run())
        return self.starts


def test_a_server_is_checked_once_until_there_is_a_doubt() -> None:
    monitored = MonitoredServer([FIRST])
    assert monitored.check(False, False, False) == [FIRST] and monitored.n_calls == 1
    assert monitored.check(True, False) == [FIRST] and monitored.n_calls == 2


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
def test_the_same_instance_id_is_no_restart_whatever_failed(error: EvokeError) -> None:
    monitored = MonitoredServer([FIRST, error, FIRST, SECOND])
    assert monitored.check(False, True) == [FIRST]
    rejected = isinstance(error, UpstreamRejected) and error.status == 401
    assert (monitored.monitor.server is UNKNOWN_SERVER) is not rejected
    monitored.monitor._retry_at = 0.0
    assert monitored.check(True) == [FIRST] and monitored.monitor.server is FIRST
    assert monitored.check(True) == [FIRST, SECOND]


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
def test_a_stock_server_counts_as_restarted_if_its_port_was_closed(
    error: EvokeError, restarted: bool
) -> None:
    monitored = MonitoredServer([STOCK, error, STOCK])
    monitored.check(False, True)
    monitored.monitor._retry_at = 0.0
    assert monitored.check(True) == [STOCK] * (1 + restarted)


def test_a_sleeping_stock_server_does_not_count_as_restarted() -> None:
    asleep = ServerInfo("unpatched", "it is not patched", sleeping=True)
    larger = ServerInfo("unpatched", "it is not patched", n_slots=4)
    monitored = MonitoredServer([STOCK, asleep, STOCK, larger])
    assert monitored.check(False, True, True) == [STOCK]
    assert monitored.check(True) == [STOCK, larger]


def test_a_doubt_during_a_check_causes_another_check() -> None:
    """The answer of the first check may be older than the failure."""

    async def run() -> None:
        monitored = MonitoredServer([FIRST, SECOND])
        asking = asyncio.get_running_loop().create_task(monitored.monitor.ensure_current())
        await asyncio.sleep(0)
        monitored.monitor.doubt()
        await asking
        await monitored.monitor.ensure_current()
        assert monitored.starts == [FIRST, SECOND]

    asyncio.run(run())


def test_concurrent_doubts_cause_one_check() -> None:
    async def run() -> None:
        monitored = MonitoredServer([FIRST, SECOND])
        await monitored.monitor.ensure_current()
        monitored.monitor.doubt()
        await asyncio.gather(*[monitored.monitor.ensure_current() for _ in range(20)])
        assert monitored.n_calls == 2 and monitored.starts == [FIRST, SECOND]

    asyncio.run(run())


def test_a_reply_with_another_instance_id_causes_a_check() -> None:
    async def run() -> None:
        monitored = MonitoredServer([FIRST, SECOND])
        await monitored.monitor.ensure_current()
        for instance in (FIRST.instance, ""):  # older patches name none
            await monitored.monitor.confirm(instance, monitored.upstream)
            assert monitored.n_calls == 1
        await monitored.monitor.confirm(SECOND.instance, monitored.upstream)
        assert monitored.starts == [FIRST, SECOND]
        await monitored.monitor.confirm(SECOND.instance, monitored.upstream)
        assert monitored.n_calls == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("props", "budget", "advice"),
    [
        ({}, None, "; to evict, build the patched llama-server with `evoke-proxy build-server`"),
        ({"role": "router"}, None, "; that needs a patched llama-server and a proxy for each"),
        ({"evoke": {"unsupported": "context shift is on"}}, None, "; patches/SUPPORT.md lists"),
        ({}, 4096, ". Change this: the budget of 4096 tokens is not in force at this llama-server"),
    ],
)
def test_a_server_that_cannot_evict_is_described_once_with_what_to_do(
    props: dict[str, Any], budget: int | None, advice: str
) -> None:
    config = Config(policy=PolicyConfig(budget=budget))
    monitor = ServerMonitor(LlamaClient(config.upstream), config, Metrics())
    monitor.server = ServerInfo.parse(props)
    text = monitor.describe()
    assert f"nothing is evicted{advice}" in text
    assert text.count("build-server") <= 1
    assert "start it with --slot-save-path DIR and set snapshots.directory to DIR" in text
    assert f"`evoke-proxy doctor --upstream {config.upstream.url}`" in text
    snapshots = SnapshotsConfig(directory="/slots")
    monitor.config = Config(policy=PolicyConfig(budget=budget), snapshots=snapshots)
    assert "--slot-save-path" not in monitor.describe()


def test_the_same_failure_is_logged_once_a_minute_until_the_server_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loading = UpstreamRejected(503, b"loading")
    answers = [REFUSED, REFUSED, loading, loading, REFUSED, REFUSED, REFUSED, FIRST, REFUSED]
    monitored = MonitoredServer(list(answers))

    async def run() -> None:
        for seconds in (0, 1, 1, 1, 1, 40, 30, 1, 1):
            await asyncio.sleep(seconds)
            monitored.monitor.doubt()
            await monitored.monitor.ensure_current()

    virtual_time.run(run())
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    refused, other = str(REFUSED), str(loading)
    assert warnings == [refused, other, refused, refused, refused]


def test_a_readiness_check_of_a_hanging_server_ends_after_seconds() -> None:
    monitored = MonitoredServer([FIRST])

    async def hang() -> ServerInfo:
        await asyncio.sleep(60)
        raise UpstreamTimeout("silent")

    async def run() -> tuple[float, dict[str, Any]]:
        assert (await monitored.monitor.check())["ok"]
        monitored.upstream.info = hang
        check = await monitored.monitor.check()
        return asyncio.get_running_loop().time(), check

    elapsed, check = virtual_time.run(run())
    assert elapsed == 5 and not check["ok"] and "did not answer within 5 s" in check["detail"]
    assert monitored.monitor.server is UNKNOWN_SERVER
    monitored.upstream.info = monitored._info
    assert monitored.check(False) == [FIRST], "the same process answers again"
    assert monitored.monitor.server is FIRST


def test_a_server_that_is_away_is_not_taken_for_an_unpatched_one() -> None:
    config = Config(policy=PolicyConfig(budget=4096))
    monitor = ServerMonitor(LlamaClient(config.upstream), config, Metrics())
    assert monitor.server is UNKNOWN_SERVER
    assert "does not answer" in monitor.describe() and "patched" not in monitor.describe()
