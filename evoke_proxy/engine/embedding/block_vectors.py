"""Embeds the questions of requests before planning, and the blocks of sessions after a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.policy.past_quotes import quotes_past
from evoke_proxy.core.policy.registry import uses_query
from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.query import Query, query_of
from evoke_proxy.core.retrieval.vectors import chunks_of
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversations import Conversation, Conversations

# The most blocks of a session that are submitted after a turn; the latest ones are.
_MAX_SUBMITTED = 1024
# The most blocks of a session that an immediate encoder embeds for one question, in a second.
_MAX_IMMEDIATE = 16_384
# Blocks that one callback of the event loop submits, which takes half a millisecond.
_STEP_BLOCKS = 16
# Labels of blocks, each with the vectors [d] of its texts or with all of them as one array [k, d].
LabeledVectors = list[tuple[str, Sequence[Vectors] | Vectors]]


class BlockVectors:
    """Gives planning the vectors that it uses; without an embedder there are none.

    The policy of the `conversations` decides which requests need vectors. While an operator has set
    a budget for any of them, all requests need them.
    """

    def __init__(self, embedding: EmbeddingService, conversations: Conversations) -> None:
        self._embedding = embedding
        self._conversations = conversations

    async def embed_beside(
        self, render: Callable[[], Awaitable[Rendered]], request: ParsedChat, trace: RequestTrace
    ) -> tuple[Rendered, Query]:
        """Call and await `render`, and embed the question at the same time.

        Returns the rendering, and the query of the request with the vectors that could be made. The
        time that embedding takes longer than rendering is counted as a wait.
        """
        if not self._needs_vectors(request.chat):
            return await render(), query_of(request.chat)
        loop, rendered_at = asyncio.get_running_loop(), 0.0

        async def timed() -> Rendered:
            nonlocal rendered_at
            result = await render()
            rendered_at = loop.time()
            return result

        rendered, query = await asyncio.gather(
            timed(), self._embedded_query(request.chat, request.tenant)
        )
        trace.add_wait("embed", loop.time() - rendered_at)
        return rendered, query

    def take_new(self, conversation: Conversation) -> LabeledVectors:
        """Take the vectors of blocks that were made since the session's previous turn, by label.

        `stacked` turns them into arrays, which may run in a thread.
        """
        result: LabeledVectors = list(conversation.vectors.take_stored().items())
        for label, keys in conversation.vectors.pending.items():
            vectors = [vector for vector in map(self._embedding.vector, keys) if vector is not None]
            if len(vectors) == len(keys) > 0:
                result.append((label, vectors))
                conversation.vectors.was_embedded(label, keys)
        return result

    def n_missing(self, session: Session) -> int:
        """About how many blocks `embed_missing` would embed."""
        if not self._embedding.is_immediate:
            return 0
        return max(0, len(session.layout.blocks) - session.index.n_with_vectors)

    def embed_missing(self, session: Session, blocks: BlockTable) -> None:
        """Embed the blocks of a session that have no vectors, if the encoder is immediate.

        Without this, the first question about a long history would find its blocks by words alone.
        The blocks of the last message are left out until the next turn: they often are the question
        itself, which would be its own best match. May run in a thread.
        """
        if not len(blocks):
            return
        self.embed_index(session.index, blocks, last_message=blocks[-1].message)

    def embed_index(
        self, index: Index, blocks: BlockTable, last_message: int | None = None
    ) -> None:
        """Embed the blocks of an index that have no vectors, if the encoder is immediate.

        The blocks of `last_message` are left out. May run in a thread.
        """
        if not self._embedding.is_immediate:
            return
        index.update(blocks)
        missing = [
            block
            for block in index.without_vectors(_MAX_IMMEDIATE)
            if block.message != last_message
        ]
        chunks = [chunks_of(block.text) for block in missing]
        rows = self._embedding.embed_blocks([text for texts in chunks for text in texts])
        ends = list(accumulate(map(len, chunks)))
        index.add_vectors(
            (block.label, rows[end - len(texts) : end])
            for block, texts, end in zip(missing, chunks, ends, strict=True)
            if texts
        )

    def submit(self, conversation: Conversation) -> None:
        """Embed the blocks of a session that have no vectors yet, the latest first.

        An immediate encoder embeds them when a question needs them, see `embed_missing`.
        """
        if not self._embedding.on or self._embedding.is_immediate or conversation.ephemeral:
            return
        before = conversation.vectors.begin_embedding()
        pending = conversation.vectors.pending
        # The latest submitted is embedded first, so the oldest are submitted first.
        lacking = conversation.session.index.without_vectors(_MAX_SUBMITTED)[::-1]

        def submit_some(start: int) -> None:
            """Submit a few blocks, and the next ones in another callback of the event loop."""
            if conversation.vectors.pending is not pending:  # another turn has ended
                return
            for block in lacking[start : start + _STEP_BLOCKS]:
                texts = chunks_of(block.text)
                keys = before.get(block.label) or self._keys(texts, conversation.tenant)
                pending[block.label] = keys
                self._embedding.submit(zip(keys, texts, strict=True))
            if start + _STEP_BLOCKS < len(lacking):
                asyncio.get_running_loop().call_soon(submit_some, start + _STEP_BLOCKS)

        submit_some(0)

    def _keys(self, texts: tuple[str, ...], tenant: str) -> tuple[bytes, ...]:
        return tuple(self._embedding.key(text, tenant) for text in texts)

    def _needs_vectors(self, request: ChatRequest) -> bool:
        if not self._embedding.on:
            return False
        own = (k.own_budget and k.session.config.budget for k in self._conversations)
        config = effective_config(self._conversations.policy, request)
        return uses_query(config) or quotes_past(config) or any(own)

    async def _embedded_query(self, request: ChatRequest, tenant: str) -> Query:
        query = query_of(request)
        texts = query.texts
        return query.embedded(await self._embedding.embed_queries(texts, tenant) if texts else [])


def stacked(vectors: LabeledVectors) -> list[tuple[str, Vectors]]:
    """The vectors of each block as one array [k, d]."""
    return [
        (label, block if isinstance(block, np.ndarray) else np.stack(block))
        for label, block in vectors
    ]
