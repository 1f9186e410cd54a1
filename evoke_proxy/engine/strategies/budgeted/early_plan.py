"""Plans a turn while llama-server renders its prompt.

llama-server renders the last messages alone in a small part of the time. The whole prompt is
expected to be the previous one, followed by what these messages add to it. If that is so, the turn
has its plan when the prompt has been rendered; if not, it is planned then.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import orjson

from evoke_proxy.adapters.llama.block_api import RenderCall
from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.adapters.llama.client import AWAITED
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.past_quotes import quotes_past
from evoke_proxy.core.policy.registry import may_probe, uses_query
from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.request.messages import Message
from evoke_proxy.engine.embedding.block_vectors import BlockVectors, MoreWork, PreparedQuery
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.strategy import ServerResources

_log = logging.getLogger(__name__)
# The most messages, and characters of them, that are rendered alone.
_MAX_MESSAGES, _MAX_CHARS = 16, 16_384


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
        self._last: asyncio.Task[Rendered | None] | None = None
        self._n_messages = 0

    def start(self, conversation: Conversation) -> None:
        """See MoreWork: render the last messages alone."""
        messages = self._last_messages(conversation)
        if messages:
            self._conversation, self._n_messages = conversation, len(messages)
            body = {"messages": [{"role": one.role, "content": one.text} for one in messages]}
            work = self._rendered(orjson.dumps(body))
            self._last = asyncio.get_running_loop().create_task(work)

    def stop(self) -> None:
        """See MoreWork."""
        if self._last is not None:
            self._last.cancel()
            self._last = None

    async def finish(self, prepared: PreparedQuery, trace: RequestTrace) -> None:
        """See MoreWork: plan the turn that is expected."""
        last = self._last
        if last is None or self._conversation is None:
            return
        try:
            await asyncio.wait([last])
        except asyncio.CancelledError:
            self.stop()
            raise
        rendered = None if self._last is None or last.cancelled() else last.result()
        if rendered is None:
            return
        try:
            with trace.beside():
                self._plan(self._conversation, rendered, prepared)
        except Exception as error:
            # The turn is planned as any other, and a failure then has consequences.
            _log.debug("nothing is planned early: %r", error)

    async def _rendered(self, body: bytes) -> Rendered | None:
        """The rendering of a body; None when llama-server does not render it."""
        AWAITED.set(None)  # the request does not wait for this call
        n_ctx = self._server.monitor.server.n_ctx
        try:
            return await self._calls.blocks.render(RenderCall("chat", body, None, n_ctx))
        except Exception as error:  # many templates refuse a part of a conversation
            _log.debug("the last messages are not rendered alone: %r", error)
            return None

    def _last_messages(self, conversation: Conversation) -> list[Message]:
        """The last message of the previous prompt and those that follow; [] to plan nothing early.

        That is so where it would save little time, or delay other requests, and where the whole
        prompt certainly differs from what would be expected.
        """
        request, session = self._request, conversation.session
        previous, config = request.previous, effective_config(session.config, request.chat)
        if previous is None or not previous.spans or request.chat.transcript:
            return []
        if not uses_query(config) or may_probe(config) or quotes_past(config):
            return []
        needs_plan = config.budget is not None and len(previous.tokens) > config.budget
        if not (needs_plan and session.is_predictable and self._is_free(conversation)):
            return []
        first = previous.spans[-1].index
        messages = list(request.chat.messages[first : first + _MAX_MESSAGES + 1])
        is_short = len(messages) <= _MAX_MESSAGES and sum(map(_length, messages)) <= _MAX_CHARS
        if not is_short or len(messages) < 2 or messages[0].role is not Role.USER:
            return []
        return messages if all(map(_is_plain, messages)) else []

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
        if request.previous is None or slot is None or conversation.worker_lock.locked():
            return
        expected = request.previous.followed_by(last, self._n_messages)
        view = expected.slot(slot)
        if view is None or view.busy or view.epoch != conversation.budgeted.epoch:
            return
        if not session.can_continue(expected, view):
            return
        # The slot has the previous prompt and the answer, which the new prompt should have, too.
        view = replace(view, n_common=min(view.n_tokens, len(expected.tokens)))
        n_slot_cells = self._server.monitor.server.n_slot_cells
        session.index.prepare(prepared.texts)
        draft = session.draft()
        turn = draft.begin(expected, view, request.chat, prepared.query, n_slot_cells)
        if prepared.query.vectors:
            self._vectors.embed_missing(session, turn.view.blocks)
        session.expect(turn)


def _length(message: Message) -> int:
    return len(message.text)


def _is_plain(message: Message) -> bool:
    """Whether a message is text of the user or the assistant, and nothing else."""
    plain = Message(message.role, message.text)
    return message == plain and message.role in (Role.USER, Role.ASSISTANT)
