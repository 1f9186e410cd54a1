"""Embeds the questions of requests before their plan, and blocks of sessions after a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy.registry import uses_query
from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.query import query_of
from evoke_proxy.core.retrieval.vectors import chunks_of
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversations import Conversation, Conversations

# The most blocks of a session that are submitted after a turn, the latest ones.
_AT_ONCE = 1024
# Blocks that are cut into texts in one callback of the event loop: half a millisecond.
_IN_ONE_STEP = 16
# Labels of blocks, each with the vectors [d] of its texts or with all of them as one array [k, d].
Arrived = list[tuple[str, Sequence[Vectors] | Vectors]]


class BlockVectors:
    """The embedder as planning uses it; without an embedder all methods do nothing.

    `policy` tells which requests need vectors, and may be replaced. All requests need them while
    any of the `conversations` has a budget of its own.
    """

    def __init__(
        self, embedding: EmbeddingService, policy: PolicyConfig, conversations: Conversations
    ) -> None:
        self._embedding = embedding
        self.policy = policy
        self._conversations = conversations

    async def embed_beside(
        self, rendering: Awaitable[Rendered], request: ParsedChat, trace: RequestTrace
    ) -> tuple[Rendered, Mapping[str, Vectors | None]]:
        """The result of `rendering`, and the vectors of the question, which are made meanwhile.

        The vectors are by text, None where one could not be made. The time that embedding takes
        longer than rendering is counted as a wait.
        """
        if not self._wanted(request.chat):
            return await rendering, {}
        loop, rendered_at = asyncio.get_running_loop(), 0.0

        async def timed() -> Rendered:
            nonlocal rendered_at
            found = await rendering
            rendered_at = loop.time()
            return found

        rendered, vectors = await asyncio.gather(timed(), self._asked(request.chat, request.tenant))
        trace.add_wait("embed", loop.time() - rendered_at)
        return rendered, vectors

    def arrived(self, conversation: Conversation) -> Arrived:
        """The vectors of a session's blocks that have been made since its last turn, by label.

        `stacked` makes arrays of them; that may run in a thread.
        """
        found: Arrived = list(conversation.budgeted.stored_vectors.items())
        conversation.budgeted.stored_vectors = {}
        for label, keys in conversation.budgeted.pending_vectors.items():
            made = [vector for vector in map(self._embedding.vector, keys) if vector is not None]
            if len(made) == len(keys) > 0:
                found.append((label, made))
                if (
                    len(conversation.budgeted.embedded) < _AT_ONCE
                ):  # they may never be written to disk
                    conversation.budgeted.embedded[label] = keys
        return found

    def submit(self, conversation: Conversation) -> None:
        """Embed the blocks of a session that have no vectors yet, the latest first."""
        if not self._embedding.on or conversation.ephemeral:
            return
        before, conversation.budgeted.pending_vectors = conversation.budgeted.pending_vectors, {}
        awaited = conversation.budgeted.pending_vectors
        # The latest submitted is embedded first, so the oldest are submitted first.
        lacking = conversation.session.index.without_vectors(_AT_ONCE)[::-1]

        def submit_some(start: int) -> None:
            """Submit a few blocks, and the next ones in another callback of the event loop."""
            if (
                conversation.budgeted.pending_vectors is not awaited
            ):  # another turn has ended meanwhile
                return
            for block in lacking[start : start + _IN_ONE_STEP]:
                texts = chunks_of(block.text)
                keys = before.get(block.label) or self._keys(texts, conversation.tenant)
                awaited[block.label] = keys
                self._embedding.submit(zip(keys, texts, strict=True))
            if start + _IN_ONE_STEP < len(lacking):
                asyncio.get_running_loop().call_soon(submit_some, start + _IN_ONE_STEP)

        submit_some(0)

    def _keys(self, texts: tuple[str, ...], tenant: str) -> tuple[bytes, ...]:
        return tuple(self._embedding.key(text, tenant) for text in texts)

    def _wanted(self, request: ChatRequest) -> bool:
        if not self._embedding.on:
            return False
        own = (k.own_budget and k.session.config.budget for k in self._conversations)
        return uses_query(effective_config(self.policy, request)) or any(own)

    async def _asked(self, request: ChatRequest, tenant: str) -> Mapping[str, Vectors | None]:
        clauses = query_of(request).clauses
        found = await self._embedding.embed_queries(clauses, tenant) if clauses else []
        return dict(zip(clauses, found, strict=True))


def stacked(arrived: Arrived) -> list[tuple[str, Vectors]]:
    """The vectors of each block as one array [k, d]."""
    return [
        (label, found if isinstance(found, np.ndarray) else np.stack(found))
        for label, found in arrived
    ]
