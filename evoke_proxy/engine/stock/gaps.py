"""Moments in which a slot is idle for llama-server, but not for us.

Between preparing a slot and the request that it is prepared for, a request elsewhere would make
llama-server empty it: it clears idle slots whenever it starts another task.
"""

from __future__ import annotations

import asyncio

# How long llama-server may take from a request's last byte to its start, and how long a gap is
# respected at all.
_STARTS_S = 0.25
_PATIENCE_S = 5.0


class Gaps:
    """How many there are now; whoever is about to start something waits until there is none."""

    def __init__(self) -> None:
        self._open = 0
        self._none = asyncio.Event()
        self._none.set()

    def open(self) -> None:
        """A slot is prepared; `close` follows, or `close_soon` when its request is sent."""
        self._open += 1
        self._none.clear()

    def close(self) -> None:
        """The slot is busy again, or given up."""
        self._open -= 1
        if not self._open:
            self._none.set()

    def close_soon(self) -> None:
        """Its request goes out now."""
        asyncio.get_running_loop().call_later(_STARTS_S, self.close)

    async def wait(self) -> None:
        """Until nobody's slot is in danger, or for too long."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._none.wait()
        except TimeoutError:
            return
