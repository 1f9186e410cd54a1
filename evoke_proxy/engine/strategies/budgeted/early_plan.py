"""Plans a turn while llama-server renders its prompt.

llama-server renders the last messages alone in a small part of the time. The whole prompt is
expected to be the previous one, followed by what these messages add to it. If that is so, the turn
has its plan when the prompt has been rendered; if not, it is planned then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from evoke_proxy.adapters.llama.block_api import RenderCall
from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.adapters.llama.client import AWAITED
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.past_quotes import quotes_past
from evoke_proxy.core.policy.registry import may_probe, uses_query
from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.converters import is_larger
from evoke_proxy.core.request.messages import LazyMessages
from evoke_proxy.engine.embedding.block_vectors import BlockVectors, MoreWork, PreparedQuery
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.session_worker import has_many_terms
from evoke_proxy.engine.server.strategy import ServerResources

_log = logging.getLogger(__name__)
# The most messages, characters of their texts, and bytes of all that they have, that are rendered
# alone.
_MAX_MESSAGES, _MAX_CHARS, _MAX_BYTES = 16, 16_384, 65_536
# Stands for the messages of the user that come before a call of a tool.
_STAND_IN = {"role": "user", "content": "Go on."}


@dataclass(frozen=True, slots=True)
class LastMessages:
    """The last messages of a request, as they are rendered alone.

    Attributes:
        messages: chat messages in JSON.
        n_before: how many of the first stand for the end of the previous prompt.
    """

    messages: Sequence[Any]
    n_before: int


class EarlyPlan(MoreWork):
    """Makes the plan of one request early, where that is possible."""

    def __init__(
        self,
        server: ServerResources,
        vectors: BlockVectors,
        calls: ServerCalls,
        request: ParsedChat,
    ) -> None:
        """`calls` are made with the key of the request's client."""
        self._server = server
        self._vectors = vectors
        self._calls = calls
        self._request = request
        self._conversation: Conversation | None = None
        self._last: LastMessages | None = None
        self._rendering: asyncio.Task[Rendered | None] | None = None

    def start(self, conversation: Conversation) -> None:
        """See MoreWork: render the last messages alone."""
        previous = self._request.previous
        if previous is None or not self._may_plan(conversation, previous):
            return
        self._last = _last_messages(self._request.chat, previous.spans[-1].index)
        if self._last is None:
            return
        self._conversation = conversation
        work = self._rendered(self._last, previous.generation)
        self._rendering = asyncio.get_running_loop().create_task(work)

    def stop(self) -> None:
        """See MoreWork."""
        if self._rendering is not None:
            self._rendering.cancel()
            self._rendering = None

    async def finish(self, prepared: PreparedQuery, trace: RequestTrace) -> None:
        """See MoreWork: plan the turn that is expected."""
        task = self._rendering
        if task is None or self._conversation is None:
            return
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            self.stop()
            raise
        if self._rendering is None or task.cancelled():
            return
        rendered = task.result()
        if rendered is None:
            self._conversation.session.not_expected()
            return
        try:
            with trace.beside():
                self._plan(self._conversation, rendered, prepared)
        except Exception as error:
            # The turn is planned as any other, and a failure then has consequences.
            _log.debug("nothing is planned early: %r", error)
            self._conversation.session.not_expected()

    async def _rendered(self, last: LastMessages, n_before: int) -> Rendered | None:
        """The rendering of the last messages, the new ones of which begin at token `n_before`.

        None when they have too many bytes, and when llama-server does not render them.
        """
        AWAITED.set(None)  # the request does not wait for this call
        n_ctx, behind = self._server.monitor.server.n_ctx, (n_before, last.n_before)
        try:
            body = orjson.dumps({"messages": last.messages, **self._request.chat.template_fields})
            if len(body) > _MAX_BYTES:
                return None
            call = RenderCall("chat", body, n_ctx=n_ctx, behind=behind)
            return await self._calls.blocks.render(call)
        except Exception as error:  # many templates refuse a part of a conversation
            _log.debug("the last messages are not rendered alone: %r", error)
            return None

    def _may_plan(self, conversation: Conversation, previous: Rendered) -> bool:
        """Whether to plan early.

        Not where it would save little time, or delay other requests, and where the whole prompt
        certainly differs from what would be expected.
        """
        chat, session = self._request.chat, conversation.session
        if not previous.spans or chat.transcript or chat.has_media:
            return False
        if not self._server.monitor.server.can_render_behind:
            return False
        config = effective_config(session.config, chat)
        if not uses_query(config) or may_probe(config) or quotes_past(config):
            return False
        needs_plan = config.budget is not None and len(previous.tokens) > config.budget
        return needs_plan and session.is_predictable and self._is_free(conversation)

    def _is_free(self, conversation: Conversation) -> bool:
        """Whether no other request is served, and the conversation has its slot and vectors."""
        pool = self._server.slots.pool
        has_slot = pool.slot_of(conversation.id) is not None and pool.idle()
        return (
            has_slot
            and not conversation.worker_lock.locked()
            and self._vectors.lacks_few(conversation.session)
        )

    def _plan(self, conversation: Conversation, last: Rendered, prepared: PreparedQuery) -> None:
        """Plan the turn for the slot as it was when the last messages were rendered."""
        request, session = self._request, conversation.session
        slot = self._server.slots.pool.slot_of(conversation.id)
        if request.previous is None or self._last is None or slot is None:
            return
        # What takes long runs in a thread once the whole prompt is rendered.
        if conversation.worker_lock.locked() or has_many_terms(prepared.texts.n_query_terms):
            return
        n_messages = len(self._last.messages)
        expected = request.previous.followed_by(last, n_messages, self._last.n_before)
        view = expected.slot(slot)
        if view is None or view.busy or view.epoch != conversation.budgeted.epoch:
            return
        n_slot_cells = self._server.monitor.server.n_slot_cells
        session.index.prepare(prepared.texts)
        turn = session.expect(expected, view, request.chat, prepared.query, n_slot_cells)
        if prepared.query.clauses:
            self._vectors.embed_missing(session, turn.view.blocks)
        session.plan_expected()


def _last_messages(chat: ChatRequest, last: int) -> LastMessages | None:
    """The messages of a request that follow message `last`, behind those that they need.

    None when there are none, or too many to render them in little time. A result of a tool needs
    the call that it answers, and before that the user has a message in every template.
    """
    if not isinstance(chat.messages, LazyMessages) or not last + 1 < len(chat.messages):
        return None
    messages, first = chat.messages, last
    while first and len(messages) - first <= _MAX_MESSAGES and messages[first].role is Role.TOOL:
        first -= 1
    if len(messages) - first > _MAX_MESSAGES:
        return None
    items = messages.as_chat(first)
    if is_larger([items, chat.template_fields], _MAX_BYTES):
        return None
    if sum(len(messages[i].printed) for i in range(first, len(messages))) > _MAX_CHARS:
        return None
    before = [] if messages[first].role is Role.USER else [_STAND_IN]
    return LastMessages([*before, *items], len(before) + last + 1 - first)
