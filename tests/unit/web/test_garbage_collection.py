"""Full garbage collections wait until no request runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from evoke_proxy.web import garbage_collection
from evoke_proxy.web.active_requests import ActiveRequests
from evoke_proxy.web.garbage_collection import DeferredCollection


class Node:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def full() -> Iterator[list[int]]:
    """Collects one entry per full garbage collection."""
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            collections.append(1)

    gc.callbacks.append(note)
    yield collections
    gc.callbacks.remove(note)


def test_a_full_collection_waits_until_no_request_runs(
    full: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage_collection, "_INTERVAL_S", 0.5)
    monkeypatch.setattr(garbage_collection, "_WORTH_IT", 1)
    monkeypatch.setattr(garbage_collection, "NEW_OBJECTS", 50)
    requests, before = ActiveRequests(lambda: False), gc.get_threshold()

    async def run() -> None:
        collecting = DeferredCollection(lambda: requests.idle_s)
        collecting.start()
        old = Node()
        gc.collect(1)  # moves the node to the oldest generation
        node = weakref.ref(old)
        del old
        full.clear()
        lists = [[i] for i in range(200_000)]
        for _ in range(70):  # short ones: at most moments none runs
            with requests.track():
                pass
            await asyncio.sleep(0.01)
        assert not full, f"{len(lists)} lists were allocated while requests came"
        for _ in range(500):
            if node() is None:
                break
            await asyncio.sleep(0.01)
        assert full and node() is None
        collecting.stop()

    asyncio.run(run())
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("limit", "is_busy"), [("_WORTH_IT_S", False), ("_OVERDUE_S", True)], ids=["idle", "busy"]
)
def test_at_a_low_load_a_full_collection_runs_after_some_time(
    full: list[int], monkeypatch: pytest.MonkeyPatch, limit: str, is_busy: bool
) -> None:
    """A few collections of the second generation are enough: they may be those of hours."""
    monkeypatch.setattr(garbage_collection, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(garbage_collection, limit, 0.3)

    async def run() -> None:
        requests = ActiveRequests(lambda: False)
        collecting = DeferredCollection(lambda: requests.idle_s)
        collecting.start()
        old = Node()
        gc.collect(1)
        node = weakref.ref(old)
        del old
        full.clear()
        with requests.track() if is_busy else contextlib.nullcontext():
            await asyncio.sleep(0.1)
            assert not full
            async with asyncio.timeout(30):
                while node() is not None:
                    await asyncio.sleep(0.01)
        collecting.stop()

    asyncio.run(run())


def test_nothing_is_collected_while_nothing_was_made(
    full: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage_collection, "_INTERVAL_S", 0.01)
    for limit in ("_WORTH_IT_S", "_OVERDUE_S"):
        monkeypatch.setattr(garbage_collection, limit, 0.001)

    async def run() -> None:
        collecting = DeferredCollection(lambda: 1.0)
        collecting.start()
        full.clear()
        await asyncio.sleep(0.2)
        assert not full
        collecting.stop()

    asyncio.run(run())


def test_free_pages_go_back_only_while_no_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once after requests, also where no object had to be collected."""
    trims: list[int] = []
    monkeypatch.setattr(garbage_collection, "return_free_pages", lambda: trims.append(1))
    monkeypatch.setattr(garbage_collection, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(garbage_collection, "_TRIM_INTERVAL_S", 0.1)
    for limit in ("_WORTH_IT_S", "_OVERDUE_S"):  # a collection is overdue all the time
        monkeypatch.setattr(garbage_collection, limit, 0.001)

    async def run() -> None:
        requests = ActiveRequests(lambda: False)
        collecting = DeferredCollection(lambda: requests.idle_s)
        collecting.start()
        await asyncio.sleep(0.3)
        assert not trims, "no request has run"
        for n_before in (0, 1):
            with requests.track():
                lists = [[i] for i in range(20_000)]
                await asyncio.sleep(0.3)
                assert len(trims) == n_before, f"{len(lists)} lists"
            async with asyncio.timeout(30):
                while len(trims) == n_before:
                    await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert len(trims) == 2
        collecting.stop()

    asyncio.run(run())
