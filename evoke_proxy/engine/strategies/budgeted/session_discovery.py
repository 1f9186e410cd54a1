"""Finds the sessions of an earlier proxy process in what llama-server still has of them.

A patched server names the session of each slot and of each saved block. A prompt that continues one
of these sessions gets its id back, and with it the rows of its slot and its copies, which
llama-server compares with the tokens of the prompt. Nothing needs to be stored by the proxy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from evoke_proxy.adapters.llama.block_api import BlockApi, copies_in
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.rendered import Rendered, SlotView, Tokens
from evoke_proxy.core.session.identity import MIN_SHARE, MIN_SHARED
from evoke_proxy.core.session.saved_sessions import SavedSession, most_similar, saved_sessions
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.strategies.budgeted.turn import RenderedTurn
from evoke_proxy.errors import PlanRefused

_log = logging.getLogger(__name__)
# Sessions whose copies are compared with one prompt, the most similar first.
_MAX_COMPARED = 4


class SessionDiscovery:
    """Identifies sessions that only llama-server knows, and lists their copies."""

    def __init__(self, conversations: Conversations, slots: SlotQueue) -> None:
        self._conversations = conversations
        self._slots = slots
        # The sessions of each tenant that had copies when the tenant's first request came.
        self._saved: dict[str, Mapping[str, SavedSession]] = {}
        self._is_supported = False

    def server_started(self, is_supported: bool) -> None:
        """Forget what another llama-server instance had; its successor may find copies by text."""
        self._is_supported = is_supported
        self._saved = {}

    async def identify(
        self, request: ParsedChat, rendered: Rendered, blocks: BlockApi
    ) -> Conversation | None:
        """The conversation of an earlier proxy process that a prompt continues, registered here.

        None when it continues none. Raises UpstreamError.
        """
        if not self._is_supported:
            return None
        self._note_slots(rendered.slots)
        tenant = request.tenant
        in_slot = self._in_slot(rendered, tenant)
        if in_slot is not None:
            return self._register(in_slot.session, request, rendered, in_slot.epoch)
        session = await self._with_copies(rendered, tenant, blocks)
        if session is None:
            return None
        # Another request may have registered it in the meantime.
        registered = self._conversations.get(session)
        return registered or self._register(session, request, rendered, None)

    async def find_copies(self, turn: RenderedTurn) -> None:
        """Give a session that was identified the copies that llama-server has for its prompt.

        Raises UpstreamError.
        """
        conversation, tokens = turn.conversation, turn.rendered.tokens
        try:
            copies = await _find(turn.calls.blocks, turn.slot, tokens, conversation.owner)
        except PlanRefused as refused:  # the prompt is too long for a slot
            conversation.budgeted.copies_found()
            _log.warning("session %s continues without its copies: %s", conversation.id, refused)
            return
        conversation.budgeted.copies_found()
        conversation.session.resume(tokens, copies)
        _log.info(
            "session %s continues after a restart: %d tokens in slot %d, %d saved blocks",
            conversation.id,
            turn.view.n_common,
            turn.slot,
            len(copies),
        )

    def _note_slots(self, slots: Sequence[SlotView]) -> None:
        """Have other sessions prefer slots that no unknown session has rows in."""
        for view in slots:
            is_unknown = view.session and self._conversations.may_resume(view.session)
            if is_unknown and view.id < len(self._slots.pool):
                if self._slots.pool.holder(view.id) is None:
                    self._slots.pool.record_move(view.session, view.id)

    def _in_slot(self, rendered: Rendered, tenant: str) -> SlotView | None:
        """The slot of an unknown session that a prompt continues; None when there is none."""
        views = [
            view
            for view in rendered.slots
            if view.session
            and view.tenant == tenant
            and self._conversations.may_resume(view.session)
            and view.n_common >= _required_tokens(rendered, view.n_tokens)
        ]
        return max(views, key=lambda view: view.n_common, default=None)

    async def _with_copies(self, rendered: Rendered, tenant: str, blocks: BlockApi) -> str | None:
        """The unknown session whose copies cover most of a prompt; None when none has enough."""
        by_tenant = self._saved  # another one as soon as llama-server starts again
        if tenant not in by_tenant:
            answer = await blocks.slot(0, tenant)
            by_tenant[tenant] = await asyncio.to_thread(_sessions_in, answer)
        unknown = [
            saved for id, saved in by_tenant[tenant].items() if self._conversations.may_resume(id)
        ]
        best, best_end = None, 0
        for saved in most_similar(unknown, rendered.tokens)[:_MAX_COMPARED]:
            owner = {"tenant": tenant, "session": saved.id}
            try:
                copies = await _find(blocks, 0, rendered.tokens, owner)
            except PlanRefused:  # the prompt is too long for a slot
                return None
            end = max((span.end for span in copies.values()), default=0)
            if end > best_end and end >= _required_tokens(rendered, saved.end):
                best, best_end = saved.id, end
        return best

    def _register(
        self, session: str, request: ParsedChat, rendered: Rendered, epoch: int | None
    ) -> Conversation:
        conversation = self._conversations.resume(session, rendered, request.hint, request.tenant)
        conversation.budgeted.identified(epoch)
        return conversation


def _required_tokens(rendered: Rendered, n_tokens: int) -> float:
    """How many tokens a prompt must share with a session of `n_tokens` to continue it.

    As in `identity.find`: its first user message, because all conversations of a client may begin
    with the same long system prompt, and a part of the session.
    """
    users = rendered.user_ends
    first_message = int(users[0]) if len(users) else 0
    return max(MIN_SHARED, first_message, MIN_SHARE * n_tokens)


def _sessions_in(answer: Mapping[str, Any]) -> Mapping[str, SavedSession]:
    """The sessions of the saved blocks that an answer about a slot lists."""
    return saved_sessions(copies_in(answer))


async def _find(
    blocks: BlockApi, slot: int, tokens: Tokens, owner: Mapping[str, Any]
) -> dict[str, Span]:
    """The copies of a session that fit a prompt, by label."""
    answer = await blocks.run(slot, "block-find", {"tokens": tokens, **owner})
    return {label: Span(it["p0"], it["p1"]) for label, it in copies_in(answer).items()}
