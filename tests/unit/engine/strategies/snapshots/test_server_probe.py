"""Probing an unpatched server for the kind of its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from repository_fixtures import open_repository
from state_file_fixtures import cache, file

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.stock_api import PrefillResult, SlotCopy, StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.snapshot_files import SnapshotFiles
from evoke_proxy.config import LimitsConfig, SnapshotsConfig, UpstreamConfig
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.request.look_ahead import USER
from evoke_proxy.core.snapshots.slot_contents import ServerBehaviour, SlotStatus
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel, SnapshotRepository
from evoke_proxy.engine.strategies.snapshots import server_probe
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers
from evoke_proxy.engine.strategies.snapshots.unverified_slots import UnverifiedSlots
from evoke_proxy.errors import SnapshotUnusable, UpstreamRejected, UpstreamTimeout

LABEL = SnapshotLabel("t", "f", "b", USER, 1.0)
SHAPE = (False, (4,))


class Calls(StockApi):
    """A server whose slots always have the same contents."""

    busy = slow = False
    saves = 0
    refused = 0  # status of the answer to a save
    n_lost = 0  # bytes that the saved file lacks
    is_link = False  # whether the saved file is a symbolic link
    saving: asyncio.Event | None = None
    go_on: asyncio.Event | None = None

    has_ram_cache = False
    refused_prefill = 0  # status of the answer to a prefill
    n_tokens = 2  # in the slot

    def __init__(self, folder: Path, data: bytes) -> None:
        self._folder, self._data = folder, data
        self._decoded: list[Tokens] = []

    async def fingerprint(self) -> str:
        return "told"

    async def apply_template(self, body: bytes) -> str:
        return ""

    async def tokenize(self, text: str, special: bool) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    async def prefill(
        self, tokens: Tokens, slot: int | None, epoch: int | None = None
    ) -> PrefillResult:
        if self.refused_prefill:
            raise UpstreamRejected(self.refused_prefill, b"no")
        known = self._decoded if self.has_ram_cache else self._decoded[-1:]
        cached = max((common_prefix(tokens, each) for each in known), default=0)
        self._decoded.append(tokens)
        return PrefillResult(slot or 0, cached, len(tokens) - cached, 0.1, {})

    async def list_slots(self) -> Sequence[SlotStatus]:
        if self.slow:
            raise UpstreamTimeout("no answer in time", "")
        return [SlotStatus(0, 1, self.n_tokens, self.busy)]

    async def save(self, slot: int, name: str) -> SlotCopy:
        self.saves += 1
        if self.refused:
            raise UpstreamRejected(self.refused, b"no")
        if self.saving is not None and self.go_on is not None:
            self.saving.set()
            await self.go_on.wait()
        n_bytes = (self._folder / name).write_bytes(self._data)
        if self.is_link:
            target = (self._folder / name).rename(self._folder / "elsewhere")
            (self._folder / name).symlink_to(target)
        return SlotCopy(2, n_bytes + self.n_lost, 0.1)


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
    async def measure(repository: SnapshotRepository) -> ServerBehaviour:
        calls = Calls(tmp_path, file(*caches))
        probe = probe_of(calls, repository, SlotQueue(LimitsConfig()))
        probe.behaviour = ServerBehaviour(
            is_dense=False, has_windows=True
        )  # the defaults, before the probe
        async with BackgroundTasks() as tasks:
            states = SnapshotTransfers(
                repository=repository,
                probe=probe,
                unverified=UnverifiedSlots(repository, LlamaClient(UpstreamConfig())),
                metrics=Metrics(),
                tasks=tasks,
            )
            assert await states.save(0, np.zeros(2, np.int32), LABEL, calls)
        return probe.behaviour

    with open_repository(tmp_path) as repository:
        memory = asyncio.run(measure(repository))
    assert (memory.is_dense, memory.has_windows, memory.can_restore_partly) == (
        dense,
        windows,
        dense,
    )


@pytest.mark.parametrize(
    ("has_ram_cache", "n_tokens", "found"), [(True, 2, True), (False, 2, False), (True, 65, False)]
)
def test_a_ram_cache_is_found_by_a_test_in_a_slot_without_a_conversation(
    has_ram_cache: bool, n_tokens: int, found: bool, tmp_path: Path
) -> None:
    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))
    calls.has_ram_cache, calls.n_tokens = has_ram_cache, n_tokens
    with open_repository(tmp_path) as repository:
        probe = probe_of(calls, repository, SlotQueue(LimitsConfig()))
        asyncio.run(probe.learn(calls))
    assert probe.behaviour.ram.exists == found


def test_a_server_that_refuses_the_test_for_a_ram_cache_is_used_without_one(
    tmp_path: Path,
) -> None:
    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))
    calls.refused_prefill = 500
    with open_repository(tmp_path) as repository:
        probe = probe_of(calls, repository, SlotQueue(LimitsConfig()))
        asyncio.run(probe.learn(calls))
    assert probe.fingerprint and probe.problem is None and not probe.behaviour.ram.exists


def test_a_busy_server_is_probed_when_it_is_idle(tmp_path: Path) -> None:
    """The result is that of a server that is idle at once."""
    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))

    async def probed(probe: ServerProbe, *busy: bool) -> tuple[str, ServerBehaviour]:
        for calls.busy in busy:
            await probe.learn(calls)
        return probe.fingerprint, probe.behaviour

    async def failed_probe(probe: ServerProbe) -> tuple[str, ServerBehaviour]:
        await probed(probe, True)
        calls.slow = True
        with pytest.raises(UpstreamTimeout):
            await probe.learn(calls)
        calls.slow = False
        return await probed(probe, False)

    with open_repository(tmp_path) as repository:
        failing = probe_of(calls, repository, SlotQueue(LimitsConfig()))
        assert asyncio.run(failed_probe(failing))[1].is_dense
        now, busy, later = (
            asyncio.run(probed(probe_of(calls, repository, SlotQueue(LimitsConfig())), *states))
            for states in ((False,), (True, True), (True, False))
        )
    assert now == later and now[1].is_dense
    assert busy[0] == "told" != now[0] and not busy[1].is_dense


@pytest.mark.parametrize(
    ("state", "code", "fix"),
    [
        ({"refused": 501}, "no_save_path", "start it with --slot-save-path"),
        ({"refused": 400}, "not_saved", "its log has the reason"),
        ({"n_lost": 8}, "not_readable", "free space on the disk"),
        ({"is_link": True}, "not_readable", "only llama-server and the proxy write"),
    ],
)
def test_the_reason_why_snapshots_are_off_comes_with_its_fix(
    tmp_path: Path,
    state: dict[str, int],
    code: str,
    fix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))
    for name, value in state.items():
        setattr(calls, name, value)
    with open_repository(tmp_path) as repository:
        probe = probe_of(calls, repository, SlotQueue(LimitsConfig()))
        asyncio.run(probe.learn(calls))
        assert probe.problem is not None and probe.problem.code == code
        assert fix in probe.problem.fix and probe.problem.fix in probe.describe()
        assert probe.describe() in caplog.messages


def test_a_file_that_may_not_be_read_is_to_be_that_of_the_same_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(*_: object) -> None:
        raise SnapshotUnusable("disk", "Permission denied")

    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))
    monkeypatch.setattr(SnapshotFiles, "receive", receive)
    with open_repository(tmp_path) as repository:
        probe = probe_of(calls, repository, SlotQueue(LimitsConfig()))
        asyncio.run(probe.learn(calls))
    assert probe.problem is not None and "as the same user" in probe.problem.fix


def test_saving_is_tried_again_once_a_minute_until_the_problem_is_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(server_probe, "time", SimpleNamespace(monotonic=lambda: now))
    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))
    calls.n_lost = 8

    async def run(probe: ServerProbe) -> None:
        nonlocal now
        await probe.learn(calls)
        await probe.learn(calls)
        assert calls.saves == 1 and probe.problem is not None
        now += 61
        await probe.learn(calls)
        await probe.learn(calls)
        assert calls.saves == 2 and probe.problem is not None
        assert sum("snapshots are off" in text for text in caplog.messages) == 1
        calls.n_lost, calls.busy = 0, True
        now += 61
        await probe.learn(calls)
        await probe.learn(calls)
        assert probe.problem is not None, "no slot was idle"
        assert sum("snapshots are off" in text for text in caplog.messages) == 1
        calls.busy = False
        now += 61
        await probe.learn(calls)
        assert (calls.saves, probe.problem) == (3, None)
        assert probe.behaviour.is_dense and probe.fingerprint != "told"
        now += 61
        await probe.learn(calls)
        assert calls.saves == 3

    with open_repository(tmp_path) as repository:
        asyncio.run(run(probe_of(calls, repository, SlotQueue(LimitsConfig()))))


def test_slots_are_probed_only_while_no_other_request_has_one(tmp_path: Path) -> None:
    """The probing request has a slot; while others have one, the probe is postponed."""
    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))

    async def probed(repository: SnapshotRepository) -> None:
        slots = SlotQueue(LimitsConfig())
        slots.restart(2)
        probe = probe_of(calls, repository, slots)
        saves = calls.saves
        with await slots.acquire("mine", "") as own:
            with await slots.acquire("other", ""):
                await probe.learn(calls, own)
                assert calls.saves == saves, "no slot may be probed while another request has one"
                assert probe.clears_idle_slots, "it is unknown"
            await probe.learn(calls, own)
            assert calls.saves == saves + 1 and not probe.clears_idle_slots
        assert slots.pool.idle() and not any(slots.pool.is_locked(name) for name in ("mine", ""))

    with open_repository(tmp_path) as repository:
        asyncio.run(probed(repository))


def test_a_request_waits_while_a_slot_is_probed(tmp_path: Path) -> None:
    """A readiness check also probes a slot, independently of requests."""
    calls = Calls(tmp_path, file(cache(range(40), *SHAPE)))

    async def race(repository: SnapshotRepository) -> None:
        slots = SlotQueue(LimitsConfig())
        probe = probe_of(calls, repository, slots)
        calls.saving, calls.go_on = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(probe.learn(calls))
            await calls.saving.wait()
            request = tasks.create_task(slots.acquire("a", ""))
            await asyncio.sleep(0)
            assert not request.done()
            calls.go_on.set()
        assert request.result().waited

    with open_repository(tmp_path) as repository:
        asyncio.run(race(repository))
