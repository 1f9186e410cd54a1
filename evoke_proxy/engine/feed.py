"""Publishes events to subscribers; bounded, so that a slow subscriber costs the others nothing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

# The latest events that a subscriber which reconnects can still get: number and bytes. An event
# may list thousands of ranges.
_MAX_RECENT = 512
_MAX_RECENT_BYTES = 4 * 1024 * 1024
# A subscriber with more events waiting is cut off.
_MAX_WAITING = 256


@dataclass(frozen=True)
class Event:
    """One event of the proxy.

    Attributes:
        number: counts all events of one proxy, from 1.
        kind: the event's name.
        facts: numbers, ranges and identifiers; never any text of a prompt.
    """

    number: int
    kind: str
    facts: dict[str, Any]

    @cached_property
    def encoded(self) -> bytes:
        """The event in the format of server-sent events, encoded once for all subscribers."""
        data = orjson.dumps(self.facts)
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self.number, self.kind.encode(), data)


class Subscriber:
    """One reader of the feed.

    `has_ended` is true once no more events come: it was too slow, or the feed has ended.
    """

    def __init__(self, disconnect: Callable[[], None]) -> None:
        """`disconnect` is called when the subscriber is too slow: it may not be reading at all."""
        self.has_ended = False
        self._disconnect = disconnect
        self._waiting: deque[Event] = deque()
        self._changed = asyncio.Event()

    async def next(self, timeout_s: float) -> Event | None:
        """The next event; None after `timeout_s` seconds without one, or when it has ended."""
        if not self._waiting and not self.has_ended:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return None
        return self._waiting.popleft() if self._waiting else None

    def offer(self, event: Event) -> None:
        """Queue an event, or cut the subscriber off when too many wait."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(event)
            self._changed.set()
        elif not self.has_ended:
            self.end()
            self._disconnect()

    def end(self) -> None:
        """Deliver the events that wait, and no more."""
        self.has_ended = True
        self._changed.set()


class EventFeed:
    """The events of a proxy; every method runs in the event loop and returns at once."""

    def __init__(self) -> None:
        self._recent: deque[Event] = deque()
        self._recent_bytes = 0
        self._subscribers: set[Subscriber] = set()
        self._number = 0
        self._has_ended = False

    def __len__(self) -> int:
        """Number of subscribers."""
        return len(self._subscribers)

    @property
    def latest(self) -> int:
        """Number of the latest event; 0 before the first."""
        return self._number

    def publish(self, kind: str, **facts: Any) -> None:
        """Give an event to all subscribers; those with too many waiting are cut off."""
        self._number += 1
        event = Event(self._number, kind, {"at": round(time.time(), 3)} | facts)
        self._remember(event)
        for subscriber in list(self._subscribers):
            subscriber.offer(event)

    def _remember(self, event: Event) -> None:
        self._recent.append(event)
        self._recent_bytes += len(event.encoded)
        while len(self._recent) > _MAX_RECENT or self._recent_bytes > _MAX_RECENT_BYTES:
            self._recent_bytes -= len(self._recent.popleft().encoded)

    @contextmanager
    def subscribe(
        self, disconnect: Callable[[], None], after: int | None = None
    ) -> Iterator[Subscriber]:
        """A subscriber, which first gets the recent events with a number above `after`."""
        subscriber = Subscriber(disconnect)
        if after is not None and after > self._number:  # a number of an earlier proxy
            after = 0
        earlier = [e for e in self._recent if after is not None and e.number > after]
        for event in earlier[-_MAX_WAITING:]:
            subscriber.offer(event)
        if self._has_ended:
            subscriber.end()
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    def end(self) -> None:
        """Publish no more events and end every subscription."""
        self._has_ended = True
        for subscriber in self._subscribers:
            subscriber.end()
