"""The pool gateway, without servers: routes, failover, migration, health checks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_fixtures import session_record

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.cli.main import main
from evoke_proxy.config import Config, PoolConfig, SnapshotsConfig
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.servers.affinity import Route
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.core.session.identity import Hint
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.gateway import Exchange, RequestTrace
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedRequest, tenant_of
from evoke_proxy.engine.routing.least_loaded_proxy import SERVER_HEADER
from evoke_proxy.engine.routing.migration import migrate_conversation
from evoke_proxy.engine.routing.pool_gateway import Origin, PoolGateway, _Routed
from evoke_proxy.engine.strategies.budgeted.session_records import _belongs_to
from evoke_proxy.engine.strategies.budgeted.turn import SlotJob
from evoke_proxy.errors import ConfigError, NoServer, RequestError, UpstreamUnavailable

CONFIG = Config(pool=PoolConfig(("a=http://one:1", "b=http://two:2")))
NAMED = {"X-Evoke-Session": "mine"}
WORDS = (
    *("role", "content", "text", "type", "tool_calls", "function", "name", "arguments", "id"),
    *("input", "output", "user", "assistant", "tool_use", "tool_result", "reasoning_content"),
)
BODY = b'{"messages":[{"role":"user","content":"Hi"}]}'


def _gateway(config: Config = CONFIG) -> PoolGateway:
    gateway = build_gateway(config)
    assert isinstance(gateway, PoolGateway)
    return gateway


def _parsed(dialect: str, body: bytes, headers: dict[str, str]) -> ParsedRequest:
    incoming = IncomingRequest(dialect=dialect, body=body, headers=headers)
    return asyncio.run(RequestParser(Config(), Metrics()).parse(incoming))


def _origin(dialect: str, body: bytes, headers: dict[str, str]) -> Origin:
    try:
        return Origin.of(_parsed(dialect, body, headers))
    except RequestError:
        return Origin(tenant_of(headers))


def _records(gateway: PoolGateway, at: int) -> Any:
    return gateway.servers[at].server.strategies.budgeted._records


def _set_healthy(gateway: PoolGateway, *healthy: int) -> None:
    pool = gateway.servers.pool
    assert pool.due_checks(0.0)
    for at in range(2):
        (pool.check_passed(at, 0.0, 1, "m") if at in healthy else pool.check_failed(at, 0.0))


def test_a_recorded_session_is_routed_to_its_server_by_name() -> None:
    gateway = _gateway()
    conversation = replace(session_record(), hint=Hint("mine", "X-Evoke-Session"))
    gateway.servers[1].conversations.recall(conversation)
    tenant = conversation.session.tenant
    origin = replace(_origin("chat", BODY, NAMED), tenant=tenant)
    route = gateway._find_route(origin)
    assert route is not None and (route.server, route.session) == (1, conversation.session.id)
    assert gateway._find_route(origin) is route, (
        "the route is remembered even if no server accepts the request"
    )
    assert gateway._affinity.bound == [0, 1]
    assert gateway._find_route(replace(origin, name="other")) is None
    assert gateway._find_route(replace(origin, tenant="other")) is None


def test_records_are_loaded_at_the_server_they_belong_to() -> None:
    gateway = _gateway()
    for home, expected in (("http://one:1", [0]), ("http://two:2", [1]), ("http://gone:3", [0])):
        records = [_records(gateway, at) for at in range(2)]
        indices = [
            at for at in range(2) if _belongs_to(home, records[at]._home, records[at]._homes)
        ]
        assert indices == expected


def test_a_migrated_session_keeps_its_identity_and_loses_its_rows() -> None:
    async def moved() -> None:
        gateway = _gateway()
        source, target = gateway.servers[0], gateway.servers[1]
        source.conversations.recall(session_record())
        (conversation,) = source.conversations
        conversation.budgeted.epoch, conversation.budgeted.n_resident = 7, 100
        conversation.in_use, conversation.pinned = 1, True
        is_moved = await migrate_conversation(conversation.id, source, target, False)
        assert not is_moved, "a conversation with a running request must not be moved"
        conversation.in_use = 0
        assert await migrate_conversation(conversation.id, source, target, source_answers=False)
        assert not list(source.conversations)
        (moved_copy,) = target.conversations
        assert (moved_copy.id, moved_copy.pinned) == (conversation.id, True)
        assert (moved_copy.budgeted.epoch, moved_copy.budgeted.n_resident) == (None, 0)
        assert moved_copy.budgeted.is_unconfirmed and not moved_copy.labels and conversation.labels
        is_moved = await migrate_conversation(conversation.id, source, target, False)
        assert not is_moved, "the conversation is no longer at the source"

    asyncio.run(moved())


def test_migration_saves_at_the_source_and_drops_its_copies(monkeypatch: Any) -> None:
    done: list[object] = []

    async def keep() -> None:
        done.append("saved")

    async def run(api: BlockApi, slot: int, action: str, body: dict[str, Any]) -> dict[str, Any]:
        done.append((action, body["names"], body["tenant"]))
        return {}

    async def moved() -> None:
        gateway = _gateway()
        source, target = gateway.servers[0], gateway.servers[1]
        monkeypatch.setattr(source, "save_all", keep)
        monkeypatch.setattr(BlockApi, "run", run)
        source.monitor.server = ServerInfo("", "", can_adopt=True)
        source.conversations.recall(session_record())
        (conversation,) = source.conversations
        source.server.slots.pool.record_move(conversation.id, 0)
        labels = sorted(conversation.labels)
        assert await migrate_conversation(conversation.id, source, target, source_answers=True)
        assert done == ["saved", ("block-drop", labels, conversation.tenant)] and labels
        assert source.server.slots.pool.slot_of(conversation.id) is None

    asyncio.run(moved())


def test_migration_waits_for_background_work_on_the_conversation(monkeypatch: Any) -> None:
    """Write-back between the migration and the next request would leave copies that nobody uses."""
    done: list[str] = []

    async def run(api: BlockApi, slot: int, action: str, body: dict[str, Any]) -> dict[str, Any]:
        done.append(action)
        return {}

    async def moved() -> None:
        gateway = _gateway()
        source, target = gateway.servers[0], gateway.servers[1]
        monkeypatch.setattr(BlockApi, "run", run)
        source.monitor.server = ServerInfo("", "", can_adopt=True)
        conversation = source.conversations.recall(session_record())
        lease = source.server.slots.background(0, conversation.id)
        assert lease is not None
        moving = migrate_conversation(conversation.id, source, target, source_answers=True)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(moving)
            async with lease:
                while not lease.preempted:
                    await asyncio.sleep(0)
                assert not done and list(source.conversations) == [conversation]
        assert task.result() and done == ["block-drop"] and not list(source.conversations)

    asyncio.run(moved())


def test_a_draining_server_saves_its_slots_after_its_last_answer(
    monkeypatch: Any,
) -> None:
    saved: list[int] = []

    async def keep() -> None:
        saved.append(1)

    async def drained(again: bool) -> list[int]:
        gateway = _gateway()
        saved.clear()
        monkeypatch.setattr(gateway.servers[1], "save_all", keep)
        async with gateway.servers._tasks as tasks:
            with gateway.servers.request_at(1):
                assert gateway.servers.drain("b", True)["draining"]
                await asyncio.sleep(0.02)
                assert not saved, "the server still answers a request"
                if again:
                    gateway.servers.drain("b", False)
            await tasks.ended(())
            return list(saved)

    assert asyncio.run(drained(again=False)) == [1]
    assert asyncio.run(drained(again=True)) == [], "the server no longer drains"


def test_a_record_written_during_migration_is_kept(tmp_path: Path) -> None:
    """A record of a session deleted while it is written is not kept."""

    async def written_of(moves: bool) -> int:
        gateway = _gateway(replace(CONFIG, snapshots=SnapshotsConfig(directory=str(tmp_path))))
        source, target = gateway.servers[0], gateway.servers[1]
        async with gateway.shared:
            source.conversations.recall(session_record())
            (conversation,) = source.conversations
            gateway.shared.repository.put_record(
                Record(conversation.id, conversation.tenant, time.time(), b"record")
            )
            view = SlotView(0, 7, 12, 0, (Span(0, 12),), 0)
            lease = source.server.slots.background(0, conversation.id)
            assert lease is not None
            job = SlotJob(
                conversation=conversation, calls=source.server.resources.calls, lease=lease
            )
            keeping = source.server.strategies.budgeted._records.save(job, view, {})
            task = asyncio.get_running_loop().create_task(keeping)
            await asyncio.sleep(0)
            if moves:
                assert await migrate_conversation(
                    conversation.id, source, target, source_answers=False
                )
            source.conversations.forget(conversation)
            await task
            return len(gateway.shared.repository.records(conversation.id))

    assert asyncio.run(written_of(moves=True)) == 1
    assert asyncio.run(written_of(moves=False)) == 0


def test_a_request_fails_over_until_no_server_is_left() -> None:
    async def passed() -> None:
        gateway = _gateway()
        _set_healthy(gateway, 0, 1)
        refused = UpstreamUnavailable("no", "http://one:1", reached=False)
        tried: dict[int, int] = {}
        assert gateway.choice.fail_over(0, tried, refused) == 1
        with pytest.raises(NoServer) as none:
            gateway.choice.fail_over(
                1, tried, UpstreamUnavailable("no", "http://two:2", reached=False)
            )
        assert none.value.retry_after >= 1 and none.value.status == 503
        assert "2 failed just now" in str(none.value)
        sample = gateway.metrics.registry.get_sample_value
        assert sample("evoke_server_failovers_total", {"server": "a"}) == 1
        assert sample("evoke_server_failovers_total", {"server": "b"}) == 0
        breaker = gateway.servers.pool.members[0].breaker
        assert (breaker.failures, breaker.unconfirmed) == (0, 1), "a check must confirm the failure"

    asyncio.run(passed())


def test_health_checks_continue_after_any_failure_of_a_check(monkeypatch: Any) -> None:
    async def checked() -> None:
        gateway = _gateway()
        assert gateway.servers.pool.due_checks(0.0) == [0, 1]

        async def odd(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(gateway.servers[0].upstream, "call", odd)
        with pytest.raises(ZeroDivisionError):
            await gateway.servers._check(0)
        assert gateway.servers.pool.due_checks(asyncio.get_running_loop().time() + 60) == [0]

    asyncio.run(checked())


def test_a_request_that_broke_two_connections_is_not_sent_to_a_third_server(
    monkeypatch: Any,
) -> None:
    urls = ("a=http://one:1", "b=http://two:2", "c=http://three:3")
    request = _parsed("chat", BODY, {})

    async def sent(reached: bool) -> int:
        gateway, origin = _gateway(Config(pool=PoolConfig(urls))), list[int]()
        pool = gateway.servers.pool
        assert pool.due_checks(0.0)
        for at in range(3):
            pool.check_passed(at, 0.0, 1, "m")

            @asynccontextmanager
            async def broken(*_: object, at: int = at) -> AsyncIterator[Exchange]:
                origin.append(at)
                raise UpstreamUnavailable("it broke off", f"http://{at}", reached=reached)
                yield

            monkeypatch.setattr(gateway.servers[at], "exchange", broken)
        with pytest.raises(UpstreamUnavailable if reached else NoServer):
            async with gateway.exchange(request, RequestTrace(0.0)):
                pytest.fail("it was answered")
        assert len(set(origin)) == len(origin)
        return len(origin)

    assert asyncio.run(sent(reached=True)) == 2
    assert asyncio.run(sent(reached=False)) == 3


def test_a_session_that_was_migrated_meanwhile_keeps_its_new_server() -> None:
    """While a request waited for its slot, the next one was sent to another server."""

    request = _parsed("chat", BODY, {})

    async def sent() -> None:
        gateway = _gateway()
        _set_healthy(gateway, 0, 1)
        gateway.servers.pool.members[0].breaker.failures = 1
        route = Route(1, "there")

        @asynccontextmanager
        async def exchange(*_: object) -> AsyncIterator[Exchange]:
            reply: Any = SimpleNamespace(status=200)
            yield Exchange(reply=reply, observe=lambda _: None, session="here")

        gateway.servers[0].exchange = exchange  # type: ignore[method-assign, assignment]
        trace = RequestTrace(-3.0)
        async with gateway._attempt(0, _Routed(request, Origin(""), route), trace) as exchanged:
            assert trace.server == exchanged.headers[SERVER_HEADER] == "a"
            assert route.session == "there"

    asyncio.run(sent())


def test_a_request_stops_waiting_for_a_server_whose_breaker_opens() -> None:
    """The request is not passed on, even if its answer has just arrived or leaving takes long."""

    async def called_off() -> None:
        gateway = _gateway()
        answered, left, passed_on = asyncio.Event(), asyncio.Event(), False

        async def request() -> None:
            nonlocal passed_on

            async def opening() -> None:
                try:
                    await answered.wait()
                finally:
                    await left.wait()

            await gateway.servers.open(1, opening())
            passed_on = True

        async def ends(ended: type[BaseException]) -> None:
            task = asyncio.get_running_loop().create_task(request())
            await asyncio.sleep(0)
            answered.set()
            gateway.servers._on_breaker_opened(1, "")
            if ended is asyncio.CancelledError:
                task.cancel()
            await asyncio.sleep(0)
            gateway.servers._on_breaker_opened(1, "")
            left.set()
            with pytest.raises(BaseException) as error:
                await task
            assert error.type is ended and not passed_on and not gateway.servers._openings[1]
            answered.clear()
            left.clear()

        await ends(UpstreamUnavailable)
        await ends(asyncio.CancelledError)
        answered.set()
        left.set()
        await request()
        assert passed_on

    asyncio.run(called_off())


def test_an_unreadable_request_goes_to_any_server() -> None:
    assert _origin("chat", b"not JSON", {}) == _origin("chat", b'{"evoke_budget":-1}', {})
    assert _origin("chat", BODY, NAMED).name == "mine"
    keys = [{"Authorization": f"Bearer {odd}"} for odd in ("\udcff", "\udcfe")]
    assert len({_origin("chat", BODY, key).tenant for key in keys} - {""}) == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(("messages", "input", "system", "prompt", "user")), JSON)


@given(st.sampled_from(("chat", "responses", "messages", "completions")), BODIES)
def test_any_body_has_a_stable_origin(dialect: str, body: dict[str, object]) -> None:
    origin = _origin(dialect, json.dumps(body).encode(), {})
    assert origin == _origin(dialect, json.dumps(body).encode(), {}), "the origin must not change"
    assert origin.tenant == _origin("chat", BODY, {}).tenant


@pytest.mark.parametrize(
    ("upstreams", "expected"),
    [
        (["http://h:1", "x=http://h:2/"], {"h:1": "http://h:1", "x": "http://h:2"}),
        (["https://gpu-box"], {"gpu-box": "https://gpu-box"}),
        (["http://h:1/a=b"], {"h:1": "http://h:1/a=b"}),
        (["v6=http://[::1]:9"], {"v6": "http://[::1]:9"}),
        (["http://[::1]:9"], None),
        (["a=ftp://h:1"], None),
        (["a b=http://h:1"], None),
        (["a=http://h:1", "a=http://h:2"], None),
        (["a=http://h:1", "b=http://h:1/"], None),
        (["h:1"], None),
        (["http://h:none"], None),
    ],
)
def test_the_names_of_servers_come_from_the_configuration_or_their_address(
    upstreams: list[str], expected: dict[str, str] | None
) -> None:
    config = PoolConfig(tuple(upstreams))
    if expected is None:
        with pytest.raises(ConfigError, match="pool.upstreams"):
            config.servers  # noqa: B018
    else:
        assert config.servers == expected


def test_several_servers_can_be_given_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    several = ["--upstream", "a=http://one:1", "--upstream", "http://two:2"]
    assert main(["check-config", *several]) == 0
    assert "upstream  a at http://one:1, two:2 at http://two:2\n" in capsys.readouterr().out
    assert main(["check-config", "--upstream", "only=http://one:1"]) == 0
    assert "upstream  only at http://one:1\n" in capsys.readouterr().out
    assert main(["check-config", "--upstream", "http://one:1"]) == 0
    assert "upstream  http://one:1\n" in capsys.readouterr().out
    assert main(["check-config", *several, "--upstream", "a=http://three:3"]) == 2
    assert main(["doctor", "--upstream", "http://127.0.0.1:9"]) == 2


def test_one_server_on_the_command_line_overrides_the_pool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVOKE_POOL_UPSTREAMS", "a=http://one:1, b=http://two:2")
    assert main(["check-config"]) == 0
    assert "a at http://one:1, b at http://two:2" in capsys.readouterr().out
    assert main(["check-config", "--upstream", "http://three:3"]) == 0
    assert "upstream  http://three:3\n" in capsys.readouterr().out
    assert main(["doctor"]) == 2
    assert "pool.upstreams names several" in capsys.readouterr().err
