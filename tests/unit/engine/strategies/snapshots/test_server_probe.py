"""What kind of memory an unpatched server has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from repository_fixtures import open_repository
from state_file_fixtures import cache, file

from evoke_proxy.adapters.llama.stock_api import SlotCopy, StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import LimitsConfig, SnapshotsConfig
from evoke_proxy.core.request.look_ahead import USER
from evoke_proxy.core.snapshots.slot_contents import ServerBehaviour, SlotStatus
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel, SnapshotRepository
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers
from evoke_proxy.errors import UpstreamTimeout

LABEL = SnapshotLabel("t", "f", "b", USER, 1.0)
SHAPE = (False, (4,))


class Calls(StockApi):
    """A server whose slots always have the same in them."""

    busy = slow = False
    saves = 0
    saving: asyncio.Event | None = None
    go_on: asyncio.Event | None = None

    def __init__(self, folder: Path, data: bytes) -> None:
        self._folder, self._data = folder, data

    async def fingerprint(self) -> str:
        return "told"

    async def apply_template(self, body: bytes) -> str:
        return ""

    async def list_slots(self) -> Sequence[SlotStatus]:
        if self.slow:
            raise UpstreamTimeout("no answer in time", "")
        return [SlotStatus(0, 1, 2, self.busy)]

    async def save(self, slot: int, name: str) -> SlotCopy:
        self.saves += 1
        if self.saving is not None and self.go_on is not None:
            self.saving.set()
            await self.go_on.wait()
        n_bytes = (self._folder / name).write_bytes(self._data)
        return SlotCopy(2, n_bytes, 0.1)


def probe_of(calls: Calls, repository: SnapshotRepository, slots: SlotQueue) -> ServerProbe:
    """A probe with the default settings."""
    return ServerProbe(config=SnapshotsConfig(), repository=repository, slots=slots)


@pytest.mark.parametrize(
    ("caches", "dense", "windows"),
    [
        ([cache(range(40), *SHAPE)], True, False),
        ([cache(range(40), *SHAPE), cache(range(9, 40), *SHAPE)], False, True),
        ([b"recurrent"], False, False),
    ],
)
def test_the_kind_of_memory_is_detected_from_the_first_saved_file(
    tmp_path: Path, caches: list[bytes], dense: bool, windows: bool
) -> None:
    async def kept(it: SnapshotRepository) -> ServerBehaviour:
        calls = Calls(tmp_path, file(*caches))
        facts = probe_of(calls, it, SlotQueue(LimitsConfig()))
        facts.behaviour = ServerBehaviour(
            is_dense=False, has_windows=True
        )  # as before anything is known
        async with BackgroundTasks() as tasks:
            states = SnapshotTransfers(repository=it, probe=facts, metrics=Metrics(), tasks=tasks)
            assert await states.save(0, np.zeros(2, np.int32), LABEL, calls)
        return facts.behaviour

    with open_repository(tmp_path) as it:
        memory = asyncio.run(kept(it))
    assert (memory.is_dense, memory.has_windows, memory.can_restore_partly) == (
        dense,
        windows,
        dense,
    )


def test_a_busy_server_is_probed_when_it_is_idle(tmp_path: Path) -> None:
    """Its snapshots are those of a server that was idle at once."""
    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))

    async def learnt(facts: ServerProbe, *busy: bool) -> tuple[str, ServerBehaviour]:
        for calls.busy in busy:
            await facts.learn(calls)
        return facts.fingerprint, facts.behaviour

    async def asked_in_vain(facts: ServerProbe) -> tuple[str, ServerBehaviour]:
        await learnt(facts, True)
        calls.slow = True
        with pytest.raises(UpstreamTimeout):
            await facts.learn(calls)
        calls.slow = False
        return await learnt(facts, False)

    with open_repository(tmp_path) as it:
        assert asyncio.run(asked_in_vain(probe_of(calls, it, SlotQueue(LimitsConfig()))))[
            1
        ].is_dense
        now, busy, later = (
            asyncio.run(learnt(probe_of(calls, it, SlotQueue(LimitsConfig())), *states))
            for states in ((False,), (True, True), (True, False))
        )
    assert now == later and now[1].is_dense
    assert busy[0] == "told" != now[0] and not busy[1].is_dense


def test_slots_are_probed_only_while_no_other_request_has_one(tmp_path: Path) -> None:
    """The request that asks has its own; what cannot be tried out now is tried out later."""
    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))

    async def learnt(it: SnapshotRepository) -> None:
        slots = SlotQueue(LimitsConfig())
        slots.restart(2)
        facts = probe_of(calls, it, slots)
        saves = calls.saves
        with await slots.acquire("mine", "") as own:
            with await slots.acquire("other", ""):
                await facts.learn(calls, own)
                assert calls.saves == saves, "another request may be in any slot"
            await facts.learn(calls, own)
            assert calls.saves == saves + 1
        assert slots.pool.idle() and not any(slots.pool.is_locked(name) for name in ("mine", ""))

    with open_repository(tmp_path) as it:
        asyncio.run(learnt(it))


def test_a_request_waits_while_a_slot_is_probed(tmp_path: Path) -> None:
    """A readiness check that no request knows of tries a slot out, too."""
    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))

    async def raced(it: SnapshotRepository) -> None:
        slots = SlotQueue(LimitsConfig())
        facts = probe_of(calls, it, slots)
        calls.saving, calls.go_on = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(facts.learn(calls))
            await calls.saving.wait()
            request = tasks.create_task(slots.acquire("a", ""))
            await asyncio.sleep(0)
            assert not request.done()
            calls.go_on.set()
        assert request.result().waited

    with open_repository(tmp_path) as it:
        asyncio.run(raced(it))
