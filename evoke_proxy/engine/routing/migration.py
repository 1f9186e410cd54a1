"""Moves a conversation from one llama-server to another."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.errors import EvokeError

_log = logging.getLogger(__name__)
# Seconds to wait for the end of a request of the conversation that has just failed.
_IDLE_TIMEOUT_S = 1.0
_IDLE_POLL_S = 0.02
# The most seconds for saving the slots of the source.
_SAVE_TIMEOUT_S = 15.0
# The most seconds to wait for background work on the conversation, which a request preempts.
_LOCK_TIMEOUT_S = 5.0


async def migrate_conversation(
    id: str, source: ModelRouter, target: ModelRouter, source_answers: bool
) -> bool:
    """Move a conversation to `target`; returns whether it was moved.

    A source that answers first saves its slots, and afterwards deletes the copies of the
    conversation. The conversation keeps its identity. At the target it has no slot, rows or copies:
    its prompt is restored from a snapshot that both servers can use, or decoded again.

    A conversation with a running request is not moved: the new request starts another one.
    """
    slots, conversations = source.server.slots, source.server.conversations
    conversation = conversations.get(id)
    if conversation is None or conversation.ephemeral or not await _becomes_idle(conversation):
        return False
    async with AsyncExitStack() as stack:
        if source_answers:
            await _save_slots(source)
            try:  # background work would go on to make copies
                async with asyncio.timeout(_LOCK_TIMEOUT_S):
                    await stack.enter_async_context(slots.locked(id))
            except TimeoutError:
                return False
        if conversation.in_use or conversations.get(id) is not conversation:
            return False
        conversations.move(conversation, target.conversations)
        slots.pool.forget(id)
        if source_answers and conversation.labels:
            await _drop_copies(source, conversation)
    _log.info("session %s was moved to %s", id, target.upstream.url)
    return True


async def _becomes_idle(conversation: Conversation) -> bool:
    """Wait until no request of a conversation runs; returns False after `_IDLE_TIMEOUT_S`."""
    for _ in range(int(_IDLE_TIMEOUT_S / _IDLE_POLL_S)):
        if not conversation.in_use:
            return True
        await asyncio.sleep(_IDLE_POLL_S)
    return False


async def _save_slots(source: ModelRouter) -> None:
    url = source.upstream.url
    try:
        async with asyncio.timeout(_SAVE_TIMEOUT_S):
            await source.save_all()
    except (EvokeError, TimeoutError) as error:
        _log.warning("cannot save the slots of %s: %s", url, error or "time-out")


async def _drop_copies(source: ModelRouter, conversation: Conversation) -> None:
    blocks, url = source.server.resources.calls.blocks, source.upstream.url
    try:
        await blocks.drop_copies(conversation.labels, conversation.tenant)
    except EvokeError as error:
        _log.info("cannot delete the copies of session %s at %s: %s", conversation.id, url, error)
