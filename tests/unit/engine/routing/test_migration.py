"""A conversation is migrated to another server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pool_fixtures import CHAT_BODY, POOL_CONFIG, parsed_request, pool_gateway, set_healthy
from session_fixtures import session_record

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.servers.affinity import Route
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.gateway import Exchange, RequestTrace
from evoke_proxy.engine.routing.least_loaded_proxy import SERVER_HEADER
from evoke_proxy.engine.routing.migration import migrate_conversation
from evoke_proxy.engine.routing.pool_gateway import Origin, _Routed
from evoke_proxy.engine.strategies.budgeted.turn import SlotJob


def test_a_migrated_session_keeps_its_identity_and_loses_its_rows() -> None:
    async def moved() -> None:
        gateway = pool_gateway()
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
        gateway = pool_gateway()
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
        gateway = pool_gateway()
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


def test_a_record_written_during_migration_is_kept(tmp_path: Path) -> None:
    """A record of a session deleted while it is written is not kept."""

    async def written_of(moves: bool) -> int:
        gateway = pool_gateway(
            replace(POOL_CONFIG, snapshots=SnapshotsConfig(directory=str(tmp_path)))
        )
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


def test_a_session_that_was_migrated_meanwhile_keeps_its_new_server() -> None:
    """While a request waited for its slot, the next one was sent to another server."""

    request = parsed_request("chat", CHAT_BODY, {})

    async def sent() -> None:
        gateway = pool_gateway()
        set_healthy(gateway, 0, 1)
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
