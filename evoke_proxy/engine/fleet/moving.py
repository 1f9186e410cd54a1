"""Conversations that go on at another llama-server than they were at."""

from __future__ import annotations

import asyncio
import logging

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.engine.model_router import ModelRouter
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.errors import EvokeError

_log = logging.getLogger(__name__)
# What follows a request that has just failed is over by then; so is saving what a slot holds.
_FREE_S = 1.0
_SAVED_S = 15.0


async def move(id: str, source: ModelRouter, target: ModelRouter, there: bool) -> bool:
    """Have a conversation go on at `target`; whether it does. `there`: its server answers, and is
    to save what it holds of it.

    What was known of slots, rows and copies is known no more: a snapshot that both can use is found
    by the prompt, all else is decoded again. One that is answered now stays: the request is of a
    new conversation then.
    """
    slots, conversations = source.server.slots, source.server.conversations
    known = conversations.get(id)
    if known is None or known.passing or not await _free(known):
        return False
    if there:
        await _saved(source)
    if known.in_use or conversations.get(id) is not known:
        return False
    target.conversations.take_in(known)
    conversations.forget(known)
    known.elsewhere = True
    slots.pool.forget(id)
    if there and source.info.patched and known.labels:
        await _dropped(source, known)
    _log.info("session %s goes on at %s", id, target.upstream.url)
    return True


async def _free(known: Conversation) -> bool:
    """Whether no request uses it, or none does soon."""
    for _ in range(int(_FREE_S / 0.02)):
        if not known.in_use:
            return True
        await asyncio.sleep(0.02)
    return False


async def _saved(source: ModelRouter) -> None:
    try:
        async with asyncio.timeout(_SAVED_S):
            await source.keep()
    except (EvokeError, TimeoutError) as error:
        _log.warning("%s does not save what it holds: %s", source.upstream.url, error or "no time")


async def _dropped(source: ModelRouter, known: Conversation) -> None:
    """Its copies are of no use there."""
    try:
        await BlockApi(source.upstream).drop_copies(known.labels, known.tenant, {})
    except EvokeError as error:
        _log.info("copies of session %s stay at %s: %s", known.id, source.upstream.url, error)
