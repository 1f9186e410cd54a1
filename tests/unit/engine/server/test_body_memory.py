"""The limit on cached bodies: bodies of the largest tenant are dropped first."""

from __future__ import annotations

import gc
import json
import tracemalloc
from dataclasses import dataclass

import orjson
import pytest

from evoke_proxy.engine import feed
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.parsing.body_cache import CachedBody, ReadBody
from evoke_proxy.engine.server.body_memory import BodyMemory

MIB = 1 << 20


@dataclass
class HeldBody:
    tenant: str
    body_bytes: int
    in_use: int = 0

    def drop_bodies(self) -> None:
        self.body_bytes = 0


class Server:
    """A server with cached bodies, the least recently used first."""

    def __init__(self, *held: HeldBody) -> None:
        self.held = list(held)

    def all(self) -> list[HeldBody]:
        return self.held


def test_the_least_recently_used_body_of_the_largest_tenant_is_dropped_first() -> None:
    memory = BodyMemory(10)
    one = Server(HeldBody("a", 3 * MIB), HeldBody("b", 2 * MIB), HeldBody("a", 3 * MIB))
    two = Server(HeldBody("a", 1 * MIB, in_use=1), HeldBody("a", 4 * MIB))
    memory.add(one.all)
    memory.add(two.all)
    memory.trim()
    assert [held.body_bytes // MIB for held in one.held] == [0, 2, 3]
    assert [held.body_bytes // MIB for held in two.held] == [1, 4]
    memory.limit_mib = 4
    memory.trim()
    assert [held.body_bytes // MIB for held in one.held] == [0, 2, 0]
    assert [held.body_bytes // MIB for held in two.held] == [1, 0], "a body in use must be kept"
    memory.limit_mib = 1
    memory.trim()
    assert memory.n_bytes == MIB
    del two
    gc.collect()
    assert memory.n_bytes == 0, "a deleted server must not count"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a" * 100_000},
        {"role": "user", "content": "é" * 50_000},
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a b"} for _ in range(10)]},
    ],
)
def test_the_estimated_memory_of_a_body_is_near_the_real_one(message: object) -> None:
    size = len(json.dumps(message))
    body = orjson.dumps({"messages": [message] * max(1, 2_000_000 // size)})
    tracemalloc.start()
    kept = CachedBody.of(ReadBody(bytes(bytearray(body)), orjson.loads(body)))
    traced = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    # tracemalloc also traces the allocations of orjson.
    assert traced / 2.5 <= kept.n_bytes <= traced * 2.5, (traced, kept.n_bytes)


def test_replayed_events_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_MAX_RECENT_BYTES", 10_000)
    event_feed = EventFeed()
    for number in range(100):
        event_feed.publish("turn", evicted=[[number, number + 1]] * 100)
    assert 1 <= len(event_feed._recent) <= 12
    assert (
        sum(len(event.encoded) for event in event_feed._recent)
        == event_feed._recent_bytes
        <= 10_000
    )


def test_the_holders_are_read_only_when_the_limit_may_be_exceeded() -> None:
    memory = BodyMemory(10)
    n_read = 0

    class Counted(Server):
        def all(self) -> list[HeldBody]:
            nonlocal n_read
            n_read += 1
            return self.held

    server = Counted(HeldBody("a", 4 * MIB))
    memory.add(server.all)
    memory.trim()
    memory.trim()
    assert n_read == 1, "the holders must be read once, to count them"
    server.held.append(HeldBody("a", 5 * MIB))
    memory.record_growth(5 * MIB)
    memory.trim()
    assert n_read == 1, "9 MiB cannot exceed 10 MiB"
    for _ in range(2):  # the same body, recorded twice, is only an upper bound
        memory.record_growth(5 * MIB)
        memory.trim()
    assert n_read == 3 and memory.n_bytes == 9 * MIB
    server.held.append(HeldBody("a", 2 * MIB))
    memory.record_growth(2 * MIB)
    memory.trim()
    assert memory.n_bytes == 7 * MIB, "the least recently used body must be dropped"
