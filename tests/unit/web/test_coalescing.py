"""Coalescing equal requests of many open pages into one computation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.engine.admin.sessions import CopyLists
from evoke_proxy.web import coalescing
from evoke_proxy.web.coalescing import RequestCoalescer


def test_an_answer_is_computed_after_the_request_and_once_for_all_clients() -> None:
    start_times: list[int] = []
    state = {"now": 0}

    async def make() -> bytes:
        started_at = state["now"]
        start_times.append(started_at)
        await asyncio.sleep(0.005)
        return b"%d" % started_at

    async def run() -> None:
        shared = RequestCoalescer()

        async def ask() -> None:
            requested_at = state["now"]
            assert int(await shared.get("sessions", make)) >= requested_at

        async with asyncio.TaskGroup() as tasks:
            for _ in range(50):
                state["now"] += 1
                for _ in range(20):  # pages
                    tasks.create_task(ask())
                await asyncio.sleep(0.001)
        start, n_made = asyncio.get_running_loop().time(), len(start_times)
        assert 2 <= n_made <= 20
        for _ in range(3):  # one after the other: each answer takes 5 ms and its pause of 20
            await shared.get("sessions", make)
        assert asyncio.get_running_loop().time() - start >= 0.04
        assert len(start_times) == n_made + 3

    asyncio.run(run())


def test_an_error_reaches_the_waiting_clients_and_no_later_ones() -> None:
    fails = [True]

    async def make() -> bytes:
        await asyncio.sleep(0)
        if fails.pop() if fails else False:
            raise ValueError("no such session")
        return b"{}"

    async def run() -> None:
        shared = RequestCoalescer()
        found = await asyncio.gather(
            *(shared.get("a", make) for _ in range(3)), return_exceptions=True
        )
        assert [type(item) for item in found] == [ValueError] * 3
        assert await shared.get("a", make) == b"{}"

    asyncio.run(run())


def test_a_cancelled_client_does_not_cancel_others_and_keys_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coalescing, "_KEYS", 4)

    async def run() -> None:
        shared, go_on = RequestCoalescer(), asyncio.Event()

        async def make() -> bytes:
            await go_on.wait()
            return b"{}"

        tasks = [asyncio.get_running_loop().create_task(shared.get("a", make)) for _ in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        go_on.set()
        assert await tasks[1] == b"{}"
        for number in range(20):
            await shared.get(f"{number}", make)
        assert len(shared._entries) <= 5

    asyncio.run(run())


class Llama:
    """Answers calls for the changed copies of a tenant."""

    def __init__(self) -> None:
        self.version = 1
        self.copies: dict[str, dict[str, Any]] = {"s/0": {"name": "s/0", "v": 1}}
        self.told: list[int] = []

    async def call(self, _method: str, target: str, *_: object) -> dict[str, Any]:
        least = int(target.partition("since=")[2] or 0)
        least = 0 if least > self.version else least
        blocks = [copy for copy in self.copies.values() if copy["v"] > least]
        self.told.append(len(blocks))
        return {"version": self.version, "blocks": blocks, "id": 0}


def test_only_changed_copies_are_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, now = Llama(), [0.0]
    monkeypatch.setattr("evoke_proxy.engine.admin.sessions.time.monotonic", lambda: now[0])
    copies = CopyLists(BlockApi(llama))  # type: ignore[arg-type]

    async def names() -> set[str]:
        _, found = await copies.slot(0, "t")
        assert all(copy["name"] == label for label, copy in found.items())
        return set(found)

    async def run() -> None:
        assert await names() == {"s/0"}
        llama.version = 2
        llama.copies["s/1"] = {"name": "s/1", "v": 2}
        assert await names() == await names() == {"s/0", "s/1"}
        assert llama.told == [1, 1, 0]
        del llama.copies["s/0"]
        now[0] = 31.0
        assert await names() == {"s/1"}, "a deleted copy must disappear from the list"
        llama.version, llama.copies = 1, {"s/2": {"name": "s/2", "v": 1}}
        assert await names() == {"s/2"}, "a restarted server starts a new list"

    asyncio.run(run())
