"""Decodes the beginning of the next turn while the client reads the answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.look_ahead import STEP, next_turns
from evoke_proxy.core.snapshots.slot_contents import SlotContents
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.slot_queue import BackgroundLease, SlotQueue
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.slot_placement import (
    SlotPlacement,
    SnapshotTurn,
    with_status,
)
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers
from evoke_proxy.errors import EvokeError, UpstreamRejected

_log = logging.getLogger(__name__)
# Tokens of one call: a new request waits for at most one call.
_STEP_TOKENS = 512


def decode_steps(begin: int, end: int) -> list[int]:
    """Return the position up to which each call decodes, from after `begin` to `end`.

    The first `begin` tokens are in the slot already.
    """
    return [*range(begin + _STEP_TOKENS, end, _STEP_TOKENS), end]


class Lookahead:
    """Decodes ahead of one conversation at a time, under a background lease.

    Its tasks run in `tasks`; `cancel` and `wait_until_idle` find them by their session.
    """

    def __init__(
        self,
        *,
        probe: ServerProbe,
        transfers: SnapshotTransfers,
        placement: SlotPlacement,
        slots: SlotQueue,
        metrics: Metrics,
        tasks: BackgroundTasks,
    ) -> None:
        self._probe = probe
        self._transfers = transfers
        self._placement = placement
        self._slots = slots
        self._metrics = metrics
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._sessions: dict[asyncio.Task[None], str] = {}

    def start(self, turn: SnapshotTurn, conversation: Conversation) -> None:
        """Decode ahead of a conversation in the background."""
        self.run(self._run_counted(turn, conversation), conversation.id)

    def run(self, work: Coroutine[Any, Any, None], session: str) -> asyncio.Task[None]:
        """Run work for a session in the background; `cancel` and `wait_until_idle` end it."""
        task = self._tasks.run(work, "decoding ahead")
        self._sessions[task] = session
        task.add_done_callback(self._sessions.pop)
        return task

    def cancel(self, keep: Collection[asyncio.Task[None]] = ()) -> None:
        """Cancel all tasks except those to keep."""
        for task in self._sessions.keys() - keep:
            task.cancel()

    async def wait_until_idle(self, sessions: Collection[str] | None = None) -> None:
        """Cancel the tasks of these sessions (None: of all), and wait for them.

        Also waits until nothing is being saved or sealed for any session.
        """
        others: set[asyncio.Task[None]] = set()
        if sessions is not None:
            others |= {task for task, session in self._sessions.items() if session not in sessions}
        self.cancel(others)
        await self._tasks.ended(others)

    async def _run_counted(self, turn: SnapshotTurn, conversation: Conversation) -> None:
        result = "failed"
        try:
            async with self._lock:
                result, tokens = await self._run(turn, conversation)
            # Without the lock: a save may have to wait for as long as many saves take.
            if tokens is not None:
                await self._save(turn, conversation, tokens)
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        except UpstreamRejected as error:  # its message may quote the prompt
            _log.warning("the next prompt is not decoded ahead: status %d", error.status)
        except EvokeError as error:
            _log.warning("the next prompt is not decoded ahead: %s", error)
        finally:
            if result:
                self._metrics.look_aheads.labels(result=result).inc()

    async def _run(
        self, turn: SnapshotTurn, conversation: Conversation
    ) -> tuple[str, Tokens | None]:
        """Return the result and the tokens that the slot has now, None when nothing was decoded.

        The result is a label of `evoke_look_aheads_total`, or "" without anything to do.
        """
        if not self._probe.stability(turn.chat.has_tools).ahead:
            return "", None
        if not self._probe.behaviour.lookahead.of(turn.request.tenant).may_try():
            return "given_up", None
        contents = conversation.snapshots.contents
        if contents is None or not self._slots.pool.idle():
            return "skipped", None
        api = turn.calls.stock
        tokens = await next_turn_prefix(turn.body, turn.answer, api.render)
        if tokens is None:
            return "", None
        lease = self._lease(turn, conversation, contents)
        if lease is None:
            return "skipped", None
        has_decoded = False
        async with lease:
            slots = await api.list_slots()
            unchanged = (
                conversation.snapshots.contents is contents
                and contents.can_continue(tokens)
                and contents.is_unchanged(slots)
            )
            if not unchanged:
                return "skipped", None
            await self._decode(turn, conversation, tokens, lease)
            has_decoded = True
        # The lease ends silently when a request preempts it.
        return ("done", tokens) if has_decoded else ("cancelled", None)

    def _lease(
        self, turn: SnapshotTurn, conversation: Conversation, contents: SlotContents
    ) -> BackgroundLease | None:
        """Lease the slot of the contents, or all slots; None when a request runs or arrives."""

        async def settle() -> None:
            await self._placement.until_idle(turn, lambda: self._slots.is_closed)

        slot = self._probe.background_slot(contents.slot)
        return self._slots.background(slot, conversation.id, settle, self._tasks.run)

    async def _decode(
        self,
        turn: SnapshotTurn,
        conversation: Conversation,
        tokens: Tokens,
        lease: BackgroundLease,
    ) -> None:
        """Decode as far as `tokens`, in steps; raises Preempted when a request arrives."""
        contents, api = conversation.snapshots.contents, turn.calls.stock
        if contents is None:
            return
        shared = common_prefix(contents.tokens, tokens)
        partial = replace(
            contents, tokens=tokens[:shared], exact=False, at=time.monotonic(), was_cut_off=True
        )
        for end in decode_steps(shared, len(tokens)):
            conversation.snapshots.contents_changed(partial)
            done = await lease.run(api.prefill(tokens[:end], contents.slot))
            self._probe.costs.prefilled(done.decoded, done.seconds)
            partial = replace(partial, tokens=tokens[:end])
        slots = await api.list_slots()
        complete = SlotContents(
            contents.slot,
            tokens,
            exact=True,
            at=time.monotonic(),
            ahead_from=shared,
            min_prefix=contents.min_prefix,
        )
        conversation.snapshots.contents_changed(with_status(complete, slots))

    async def _save(self, turn: SnapshotTurn, conversation: Conversation, tokens: Tokens) -> None:
        """Save the tokens decoded ahead if they are worth a snapshot and the slot is unchanged."""
        if self._transfers.reason_not_to_save(turn.request.tenant, tokens):
            return
        contents, api = conversation.snapshots.contents, turn.calls.stock
        if contents is None:
            return
        while (wait_s := self._transfers.seconds_until_save()) > 0:
            await asyncio.sleep(wait_s)
        lease = self._lease(turn, conversation, contents)
        if lease is None:
            return
        async with lease:
            if conversation.snapshots.contents is not contents:
                return
            if not contents.is_unchanged(await api.list_slots()):
                return
            if await self._probe.is_same_server(api):
                lease.check()
                label = self._placement.label(turn.request.tenant, turn.branch, STEP, len(tokens))
                await self._transfers.save(contents.slot, tokens, label, api)


async def next_turn_prefix(
    body: bytes, answer: AnswerReader, render: Callable[[bytes], Awaitable[Tokens]]
) -> Tokens | None:
    """The tokens with which the next turn of a conversation begins, independent of its question.

    `body` is the latest request, `answer` the reply to it, and `render` returns the tokens of a
    body. Returns None when the history that follows cannot be derived from the answer. Raises what
    `render` raises.
    """

    def follow_up() -> Sequence[bytes]:
        message = answer.message(b'"reasoning_content"' in body)
        return () if message is None else tuple(next_turns(body, message))

    turns = await asyncio.to_thread(follow_up)
    if not turns:
        return None
    one, other = await asyncio.gather(*map(render, turns))
    return one[: common_prefix(one, other)]
