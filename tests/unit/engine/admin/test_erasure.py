"""Deleting sessions and tenants: also while files are being written, and by the session limit."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
from repository_fixtures import TOKENS, whole_files, write_state_file

from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.config import (
    Config,
    LimitsConfig,
    SnapshotsConfig,
    UpstreamConfig,
)
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.request.look_ahead import STEP
from evoke_proxy.engine.admin.admin import Admin
from evoke_proxy.engine.admin.erasure import SessionEraser, _in_steps
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedRequest
from evoke_proxy.engine.server.reply import ReplyReader
from evoke_proxy.engine.server.server import Server
from evoke_proxy.engine.server.turn import TurnScope
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel
from evoke_proxy.errors import SnapshotUnusable


def _end_a_request(server: Server) -> None:
    incoming = IncomingRequest(dialect="chat", body=b"", headers={})
    request, trace = ParsedRequest(incoming=incoming, tenant="", body=b""), RequestTrace(0.0)
    scope = TurnScope(
        request, trace, server.slots, server.resources.metrics, server.resources.calls
    )
    server._finalizer.finish(server.strategy, scope, ReplyReader(trace))


EMPTY = Rendered(np.array([], np.int32), 0, ())


def test_wiping_includes_files_being_written_and_reports_what_remains(
    tmp_path: Path, monkeypatch: Any
) -> None:
    config = Config(snapshots=SnapshotsConfig(directory=str(tmp_path), min_free_mib=0))
    engine = build_router(config)
    snapshots = engine.server.strategies.snapshots
    repository, eraser = snapshots.repository, SessionEraser(engine.served_models[0])

    async def write_snapshot(tenant: str) -> None:
        part = repository.new_part()
        n_bytes = write_state_file(tmp_path, part)
        await asyncio.sleep(0.02)
        await repository.add(
            part, n_bytes, TOKENS, SnapshotLabel(tenant, "f", f"of {tenant}", STEP, 1.0)
        )

    async def save_later(tenant: str) -> None:
        engine.server.strategies.snapshots._tasks.run(write_snapshot(tenant), "sealing")

    async def scenario() -> None:
        async with engine.shared, engine.server.strategies.snapshots:
            for tenant in ("mine", "other"):
                repository.put_record(Record(f"of {tenant}", tenant, time.time(), b"x"))
                engine.server.strategies.snapshots._tasks.run(save_later(tenant), "saving")
            result = await eraser.wipe("mine")
            assert (result["snapshots"], result["sessions"]) == (1, 0)
            assert "records on disk" not in result["left"]
            assert [item.tenant for item in repository.snapshots] == ["other"]
            assert [item.tenant for item in repository.records()] == ["other"]
            assert len(whole_files(tmp_path)) == 1

            def fail(_: str) -> None:
                raise SnapshotUnusable("disk", "it is full")

            monkeypatch.setattr(repository._index, "remove_record", fail)
            assert "records on disk" in (await eraser.wipe("other"))["left"]
            assert not repository.snapshots

    asyncio.run(scenario())


def test_deleting_a_session_does_not_stop_look_ahead_of_others(tmp_path: Path) -> None:
    config = Config(
        upstream=UpstreamConfig(url="http://127.0.0.1:1", connect_timeout_s=0.1),
        snapshots=SnapshotsConfig(directory=str(tmp_path), min_free_mib=0),
    )

    async def scenario() -> None:
        async with build_router(config) as engine:
            first, other = (engine.conversations.start(EMPTY, None, "") for _ in range(2))
            ahead, ended = engine.server.strategies.snapshots._lookahead, asyncio.Event()

            async def decode() -> None:
                await ended.wait()

            of_first = ahead.run(decode(), first.id)
            of_other = ahead.run(decode(), other.id)
            result = await asyncio.wait_for(Admin(engine).delete(first.id), 60)
            assert result["sessions"] == 1
            assert of_first.cancelled() and not of_other.done()
            wiping = asyncio.get_running_loop().create_task(Admin(engine).wipe("nobody"))
            await asyncio.wait_for(wiping, 60)
            assert of_other.cancelled() and not ended.is_set()

    asyncio.run(scenario())


def test_rows_at_a_server_that_does_not_answer_are_reported_as_left() -> None:
    upstream = UpstreamConfig(url="http://127.0.0.1:1", connect_timeout_s=0.1)

    async def scenario() -> None:
        async with build_router(Config(upstream=upstream)) as engine:
            conversation = engine.conversations.start(EMPTY, None, "")
            conversation.budgeted.plan_ran(7)
            engine.server.slots.pool.record_move(conversation.id, 0)
            result = await asyncio.wait_for(Admin(engine).delete(conversation.id), 60)
            assert [line.partition(":")[0] for line in result["left"]] == ["rows in its slot"]

    asyncio.run(scenario())


def test_without_a_directory_a_session_is_pinned_exported_and_deleted_all_the_same() -> None:
    upstream = UpstreamConfig(url="http://127.0.0.1:1", connect_timeout_s=0.1)

    async def scenario() -> None:
        async with build_router(Config(upstream=upstream)) as engine:
            (served,) = engine.served_models
            assert engine.shared.repository is None is served.repository
            assert engine.server.strategies.snapshots is None is served.records.slot_snapshots
            conversation, admin = engine.conversations.start(EMPTY, None, "t"), Admin(engine)
            admin.pin(conversation.id, True)
            assert b"manifest.json" in b"".join(await admin.export(conversation.id))
            deleted = {"sessions": 1, "snapshots": 0, "left": []}
            assert await asyncio.wait_for(admin.wipe("t"), 60) == deleted

    asyncio.run(scenario())


def test_a_session_evicted_from_the_registry_loses_its_record(tmp_path: Path) -> None:
    config = Config(
        upstream=UpstreamConfig(url="http://127.0.0.1:1", connect_timeout_s=0.1),
        snapshots=SnapshotsConfig(directory=str(tmp_path), min_free_mib=0),
        limits=LimitsConfig(sessions=1),
    )

    async def scenario() -> None:
        async with build_router(config) as engine:
            old, new = (engine.conversations.start(EMPTY, None, "") for _ in range(2))
            for conversation in (old, new):
                record = Record(conversation.id, conversation.tenant, time.time(), b"x")
                engine.server.strategies.snapshots.repository.put_record(record)
            _end_a_request(engine.server)
            assert [conversation.id for conversation in engine.conversations] == [new.id]
            assert [
                record.id for record in engine.server.strategies.snapshots.repository.records()
            ] == [new.id]

    asyncio.run(scenario())


def test_other_tasks_run_between_the_steps_of_a_deletion() -> None:
    async def scenario() -> None:
        n_turns = 0

        async def other() -> None:
            nonlocal n_turns
            while True:
                n_turns += 1
                await asyncio.sleep(0)

        task = asyncio.get_running_loop().create_task(other())
        items = [str(number) for number in range(1000)]
        assert [item async for item in _in_steps(items)] == items
        assert n_turns > 20
        task.cancel()

    asyncio.run(scenario())
