"""What is decoded ahead on a patched server, and a turn that comes meanwhile."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import virtual_time
from test_recorded import seated

from evoke_proxy.adapters.clock import SteadyClock
from evoke_proxy.config import Config, SnapshotsConfig
from evoke_proxy.core.conversation.recorded import Orders, read
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.engine.conversations import Conversation
from evoke_proxy.engine.kept import whole_slots
from evoke_proxy.engine.orchestrator import Engine
from evoke_proxy.engine.stock.stock_calls import Prefilled
from evoke_proxy.engine.turns.forwarding import Forwarding

TOKENS = np.arange(9, dtype=np.int32)
TIMINGS = {"evoke": {"marker": "stale"}}


def with_engine(
    monkeypatch: Any, use: Callable[[Engine, Conversation, list[str]], Coroutine[Any, Any, None]]
) -> list[str]:
    """What happened, with a llama-server that decodes for a while and finds the epoch old."""
    happened: list[str] = []

    async def run() -> None:
        engine = Engine(Config())
        engine.conversations.recall(seated())
        (known,) = engine.conversations
        known.epoch = 5

        async def prefill(*_: object) -> Prefilled:
            happened.append("begun")
            await asyncio.sleep(0.05)
            happened.append("decoded")
            return Prefilled(0, 0, 9, 0.05, TIMINGS)

        async def until_idle(*_: object) -> None:
            happened.append("idle")

        monkeypatch.setattr(engine.keeper._calls, "prefill", prefill)
        monkeypatch.setattr(engine._seating, "until_idle", until_idle)
        async with engine.keeper:
            await use(engine, known, happened)

    virtual_time.run(run())
    return happened


async def begin(engine: Engine, known: Conversation, tasks: asyncio.TaskGroup) -> None:
    tasks.create_task(engine.keeper.whole.go_on(0, known, TOKENS, {}))
    await asyncio.sleep(0.01)


def test_a_turn_in_its_slot_waits_for_what_is_about_to_end(monkeypatch: Any) -> None:
    async def use(engine: Engine, known: Conversation, happened: list[str]) -> None:
        async with asyncio.TaskGroup() as tasks:
            await begin(engine, known, tasks)
            assert await engine.keeper.whole.undisturbed(0, "t", {})
            assert known.epoch is None, "its books are in before the turn looks at it"
            assert not await engine.keeper.whole.undisturbed(0, "t", {})

    assert with_engine(monkeypatch, use) == ["begun", "decoded"]


def test_what_takes_long_is_stopped_and_the_slot_waited_for(monkeypatch: Any) -> None:
    async def use(engine: Engine, known: Conversation, happened: list[str]) -> None:
        monkeypatch.setattr(whole_slots, "_GRACE_S", 0.01)
        async with asyncio.TaskGroup() as tasks:
            await begin(engine, known, tasks)
            assert await engine.keeper.whole.undisturbed(0, "t", {})
        assert known.epoch == 5

    assert with_engine(monkeypatch, use) == ["begun", "idle"]


def test_a_turn_elsewhere_stops_it_and_waits_for_nothing(monkeypatch: Any) -> None:
    async def use(engine: Engine, known: Conversation, happened: list[str]) -> None:
        async with asyncio.TaskGroup() as tasks:
            await begin(engine, known, tasks)
            assert not await engine.keeper.whole.undisturbed(1, "t", {})
        assert known.epoch == 5

    assert with_engine(monkeypatch, use) == ["begun"]


def test_nothing_is_begun_while_a_request_runs_and_nothing_told_of_who_lost_its_slot(
    monkeypatch: Any,
) -> None:
    async def use(engine: Engine, known: Conversation, happened: list[str]) -> None:
        lease = await engine._slots.acquire("other", "t")
        await engine.keeper.whole.go_on(0, known, TOKENS, {})
        assert not happened
        engine._slots.release(lease)
        async with asyncio.TaskGroup() as tasks:
            await begin(engine, known, tasks)
            known.epoch = 7
        assert known.epoch == 7

    assert with_engine(monkeypatch, use) == ["begun", "decoded"]


def test_a_session_that_was_deleted_meanwhile_is_not_written_down(monkeypatch: Any) -> None:
    async def use(engine: Engine, known: Conversation, happened: list[str]) -> None:
        class Disk:
            clock = SteadyClock()

            async def write_record(self, record: Any) -> None:
                happened.append(record.id)

        monkeypatch.setattr(engine._records, "_vault", Disk())
        view = SlotView.parse({"id": 0, "epoch": 5, "n_tokens": 0, "resident": [], "n_free": 9})
        await engine._records.keep(known, view, (), {})
        engine.conversations.forget(known)
        await engine._records.keep(known, view, (), {})

    assert len(with_engine(monkeypatch, use)) == 1


@pytest.mark.parametrize("wanted", [False, True])
def test_it_goes_on_in_steps_until_somebody_wants_the_server(
    wanted: bool, monkeypatch: Any
) -> None:
    async def use(engine: Engine, known: Conversation, happened: list[str]) -> None:
        monkeypatch.setitem(TIMINGS["evoke"], "marker", "ok")
        whole, tokens = engine.keeper.whole, np.arange(1100, dtype=np.int32)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(whole.go_on(0, known, tokens, {}))
            await asyncio.sleep(0.01)
            if wanted:
                lease = await engine._slots.acquire("other", "t", slot=0)
        assert known.epoch == 5
        if wanted:
            engine._slots.release(lease)

    steps = ["begun", "decoded"]
    assert with_engine(monkeypatch, use) == (steps if wanted else 3 * steps)


def test_what_is_ordered_of_a_session_while_it_is_written_down_is_written_too(
    tmp_path: Path,
) -> None:
    async def written() -> Orders:
        engine = Engine(Config(snapshots=SnapshotsConfig(directory=str(tmp_path))))
        async with engine.shared, engine.keeper:
            engine.conversations.recall(seated())
            (known,) = engine.conversations
            known.pinned = False
            view = SlotView.parse({"id": 0, "epoch": 5, "n_tokens": 0, "resident": [], "n_free": 9})
            keeping = engine._records.keep(known, view, {}, {})
            task = asyncio.get_running_loop().create_task(keeping)
            await asyncio.sleep(0)
            engine.operator.pin(known.id, True)
            await task
            (record,) = engine.keeper.vault.records(known.id)
            return read(zlib.decompress(record.packed)).orders

    assert asyncio.run(written()).pinned


def test_what_begins_while_a_guest_waits_for_its_slot_is_stopped(monkeypatch: Any) -> None:
    async def use(engine: Engine, known: Conversation, happened: list[str]) -> None:
        begun: list[asyncio.Task[None]] = []

        async def queue(*_: object) -> None:
            begun.append(engine.keeper._ahead.run(asyncio.sleep(60), 0, known.id))

        monkeypatch.setattr(engine._seating, "queue", queue)
        way: Any = Forwarding(b"", 0.0)
        await engine.keeper._guest(way, None, "t", "media")  # type: ignore[arg-type]
        await asyncio.wait(begun, timeout=5)
        assert begun[0].cancelled() and way.decision == "guest:media"

    with_engine(monkeypatch, use)
