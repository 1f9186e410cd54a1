"""What happens, told to whoever listens; bounded, so that nobody slow costs the others."""

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

# So many of the latest are told again to a listener that comes back.
_KEPT = 512
# And no more than so many bytes of them: an event may list thousands of ranges.
_KEPT_BYTES = 4 * 1024 * 1024
# A listener that is so many behind is dropped.
_BEHIND = 256


@dataclass(frozen=True)
class Event:
    """`number` counts all of one proxy; `facts` are numbers, ranges and words, never any text."""

    number: int
    kind: str
    facts: dict[str, Any]

    @cached_property
    def encoded(self) -> bytes:
        """The event in a stream of events, made once for all who listen."""
        data = orjson.dumps(self.facts)
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self.number, self.kind.encode(), data)


class Listener:
    """One reader. `over` once there is nothing more for it: it was too slow, or the feed ended."""

    def __init__(self, cut: Callable[[], None]) -> None:
        """`cut` is called when it is too slow: it may not be reading at all."""
        self.over = False
        self._cut = cut
        self._waiting: deque[Event] = deque()
        self._news = asyncio.Event()

    async def next(self, patience_s: float) -> Event | None:
        """The next event; None when none came in time, or it is over."""
        if not self._waiting and not self.over:
            self._news.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._news.wait()
            except TimeoutError:
                return None
        return self._waiting.popleft() if self._waiting else None

    def offer(self, event: Event) -> None:
        """Give it an event, or cut it off."""
        if len(self._waiting) < _BEHIND:
            self._waiting.append(event)
            self._news.set()
        elif not self.over:
            self.end()
            self._cut()

    def end(self) -> None:
        """What waits is still told, nothing more."""
        self.over = True
        self._news.set()


class Feed:
    """Everything here runs in the event loop; telling takes no time to speak of."""

    def __init__(self) -> None:
        self._latest: deque[Event] = deque()
        self._kept_bytes = 0
        self._listeners: set[Listener] = set()
        self._number = 0
        self._ended = False

    def __len__(self) -> int:
        """How many listen."""
        return len(self._listeners)

    @property
    def latest(self) -> int:
        """The number of the latest event; 0 before the first."""
        return self._number

    def tell(self, kind: str, **facts: Any) -> None:
        """Tell everybody; whoever is too far behind is dropped."""
        self._number += 1
        event = Event(self._number, kind, {"at": round(time.time(), 3)} | facts)
        self._keep(event)
        for listener in list(self._listeners):
            listener.offer(event)

    def _keep(self, event: Event) -> None:
        self._latest.append(event)
        self._kept_bytes += len(event.encoded)
        while len(self._latest) > _KEPT or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._latest.popleft().encoded)

    @contextmanager
    def listen(self, cut: Callable[[], None], after: int | None = None) -> Iterator[Listener]:
        """A listener, first told what is still known of what came after that event."""
        listener = Listener(cut)
        if after is not None and after > self._number:  # that was another proxy
            after = 0
        missed = [e for e in self._latest if after is not None and e.number > after]
        for event in missed[-_BEHIND:]:
            listener.offer(event)
        if self._ended:
            listener.end()
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    def end(self) -> None:
        """No more events: let every listener go."""
        self._ended = True
        for listener in self._listeners:
            listener.end()
