"""Publishes how much of a prompt is decoded, to the client and to operators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from evoke_proxy.adapters.llama.client import AWAITED
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.errors import EvokeError

_POLL_S = 1.0
# Measures how many tokens of a prompt its slot has, and how many the prompt has; None: unknown.
Measure = Callable[[], Awaitable[tuple[int, int] | None]]


class PrefillProgress:
    """The progress of one request's prompt."""

    def __init__(
        self, trace: RequestTrace, conversation: Conversation | None, feed: EventFeed
    ) -> None:
        """`conversation` is that of the request, None for one that operators do not see."""
        self._trace = trace
        self._conversation = conversation
        self._feed = feed

    @contextmanager
    def following(self, measure: Measure) -> Iterator[None]:
        """Measure in this context once a second, and publish it until all tokens are decoded."""
        follower = asyncio.get_running_loop().create_task(self._follow(measure))
        try:
            yield
        finally:
            follower.cancel()
            self._publish(None)

    async def _follow(self, measure: Measure) -> None:
        AWAITED.set(None)  # the request does not wait for these calls
        prefill: tuple[int, int] | None = None
        while prefill is None or prefill[0] < prefill[1]:
            await asyncio.sleep(_POLL_S)
            try:
                prefill = await measure()
            except EvokeError:  # the request itself reports the failure
                break
            if prefill is None:
                break
            self._publish(prefill)
        self._publish(None)

    def _publish(self, prefill: tuple[int, int] | None) -> None:
        self._trace.prefill = prefill
        conversation = self._conversation
        if conversation is not None and prefill != conversation.prefill:
            conversation.note_prefill(prefill)
            if prefill is not None:
                tokens, prompt = prefill
                self._feed.publish("prefill", session=conversation.id, tokens=tokens, prompt=prompt)
