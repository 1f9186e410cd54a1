"""Moves a conversation from one llama-server to another."""

from __future__ import annotations

import asyncio
import logging

from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.errors import EvokeError

_log = logging.getLogger(__name__)
# What follows a request that has just failed ends in this time.
_IDLE_TIMEOUT_S = 1.0
_IDLE_POLL_S = 0.02
# Saving the slots of the source ends in this time.
_SAVE_TIMEOUT_S = 15.0


async def migrate_conversation(
    id: str, source: ModelRouter, target: ModelRouter, source_answers: bool
) -> bool:
    """Move a conversation to `target`; whether it was moved.

    A source that answers saves its slots first, and deletes the conversation's copies after. The
    conversation keeps its identity and loses what is known of slots, rows and copies: a snapshot
    that both servers can use is found by the prompt, everything else is decoded again.

    A conversation whose request still runs is not moved: the new request starts another one.
    """
    slots, conversations = source.server.slots, source.server.conversations
    conversation = conversations.get(id)
    if conversation is None or conversation.ephemeral or not await _becomes_idle(conversation):
        return False
    if source_answers:
        await _save_slots(source)
    if conversation.in_use or conversations.get(id) is not conversation:
        return False
    target.conversations.take_in(conversation)
    conversations.forget(conversation)
    conversation.has_moved = True
    slots.pool.forget(id)
    if source_answers and source.info.patched and conversation.labels:
        await _drop_copies(source, conversation)
    _log.info("session %s was moved to %s", id, target.upstream.url)
    return True


async def _becomes_idle(conversation: Conversation) -> bool:
    """Whether no request of a conversation runs, or none does soon."""
    for _ in range(int(_IDLE_TIMEOUT_S / _IDLE_POLL_S)):
        if not conversation.in_use:
            return True
        await asyncio.sleep(_IDLE_POLL_S)
    return False


async def _save_slots(source: ModelRouter) -> None:
    url = source.upstream.url
    try:
        async with asyncio.timeout(_SAVE_TIMEOUT_S):
            await source.keep()
    except (EvokeError, TimeoutError) as error:
        _log.warning("%s does not save its slots: %s", url, error or "it takes too long")


async def _drop_copies(source: ModelRouter, conversation: Conversation) -> None:
    blocks, url = source.server.resources.blocks, source.upstream.url
    try:
        await blocks.drop_copies(conversation.labels, conversation.tenant, {})
    except EvokeError as error:
        _log.info("copies of session %s stay at %s: %s", conversation.id, url, error)
