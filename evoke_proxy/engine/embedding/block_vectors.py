"""Embeds the questions of requests before planning, and the blocks of sessions after a reply.

What a turn's ranking needs of the texts is prepared while llama-server renders the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np

from evoke_proxy.adapters.llama.transport import PIECE_BYTES
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.policy.past_quotes import quotes_past
from evoke_proxy.core.policy.registry import uses_query
from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.request.client_text import searched_text
from evoke_proxy.core.request.messages import Message
from evoke_proxy.core.retrieval.analysis import NOTHING_PREPARED, PreparedTexts
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.languages import language_of
from evoke_proxy.core.retrieval.query import Query, query_of
from evoke_proxy.core.retrieval.vectors import chunks_of
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.body_parsing import is_large, run_off_loop
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversations import Conversation, Conversations

# The most blocks of a session that are submitted after a turn; the latest ones are.
_MAX_SUBMITTED = 1024
# The most blocks of a session that an immediate encoder embeds for one question, in a second.
_MAX_IMMEDIATE = 16_384
# Blocks that one callback of the event loop submits, which takes half a millisecond.
_STEP_BLOCKS = 16
# Callbacks of the event loop that send the request to render a small body.
_STEPS_TO_SEND = 2
# Of a longer prompt nothing is compared beside the rendering; of the new messages the latest ones
# are analysed, and only those that may be one block.
_MOST_TOKENS, _MAX_PREPARED, _MAX_PREPARED_CHARS = 65_536, 8, 512
# Vectors that are made while a turn waits for nothing else.
_FEW_VECTORS = 16
# New messages of a turn whose previous body is not cached: an answer and a question.
_NEW_MESSAGES = 2
# Labels of blocks, each with the vectors [d] of its texts or with all of them as one array [k, d].
LabeledVectors = list[tuple[str, Sequence[Vectors] | Vectors]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedQuery:
    """What is prepared of a turn while its prompt is rendered."""

    # The query, with the vectors that could be made.
    query: Query
    # New texts of the conversation.
    texts: PreparedTexts = NOTHING_PREPARED


class MoreWork(Protocol):
    """Further work for a turn that is done while its prompt is rendered."""

    def start(self, conversation: Conversation) -> None:
        """Begin, for the conversation that the request probably continues."""
        ...

    async def finish(self, prepared: PreparedQuery, trace: RequestTrace) -> None:
        """Do the rest; the result is not awaited longer than the rendering takes."""
        ...

    def stop(self) -> None:
        """End, because the rendering has ended; `finish` then returns soon."""
        ...


class BlockVectors:
    """Gives planning the vectors that it uses; without an embedder there are none.

    The policy of the `conversations` decides which requests need vectors. While an operator has set
    a budget for any of them, all requests need them.
    """

    def __init__(self, embedding: EmbeddingService, conversations: Conversations) -> None:
        self._embedding = embedding
        self._conversations = conversations

    async def prepare_beside(
        self,
        render: Callable[[], Awaitable[Rendered]],
        request: ParsedChat,
        trace: RequestTrace,
        more: MoreWork | None = None,
    ) -> tuple[Rendered, PreparedQuery]:
        """Call and await `render`, and prepare the ranking of the request at the same time.

        The query gets the vectors that could be made. The time that embedding takes longer than
        rendering is counted as a wait, and the time of the other work as `trace.beside_s`. `more`
        is done for a request that is ranked and continues a conversation.
        """
        loop, rendered_at = asyncio.get_running_loop(), 0.0

        async def timed() -> Rendered:
            nonlocal rendered_at
            try:
                result = await render()
            finally:
                if more is not None:
                    more.stop()
            rendered_at = loop.time()
            return result

        config = effective_config(self._conversations.policy, request.chat)
        own = (k.own_budget and k.session.config.budget for k in self._conversations)
        is_ranked = uses_query(config) or quotes_past(config) or any(own)
        preparing = self._prepared(request, trace, is_ranked, more)
        rendered, prepared = await asyncio.gather(timed(), preparing)
        if is_ranked and self._embedding.on:
            trace.add_wait("embed", loop.time() - rendered_at)
        return rendered, prepared

    async def _prepared(
        self, request: ParsedChat, trace: RequestTrace, is_ranked: bool, more: MoreWork | None
    ) -> PreparedQuery:
        """The query of a request, and what its ranking needs, once the body is sent to render."""
        for _ in range(_STEPS_TO_SEND + len(request.body) // PIECE_BYTES):
            await asyncio.sleep(0)
        if not is_ranked:
            return PreparedQuery(query=await _query_of(request, trace))
        with trace.beside():
            conversation = self._continued(request)
            if conversation is not None and more is not None:
                more.start(conversation)
        query = await _query_of(request, trace)
        if self._embedding.on:
            query = await self._embedded_query(query, request.tenant, trace)
        with trace.beside():
            # While it is locked, a thread may change its index.
            if conversation is not None and not conversation.worker_lock.locked():
                conversation.session.compare(query)
            prepared = PreparedQuery(query=query, texts=self._prepared_texts(request, query))
        if more is not None:
            await more.finish(prepared, trace)
        return prepared

    def _continued(self, request: ParsedChat) -> Conversation | None:
        """The conversation that a request probably continues, by the body that it extends.

        None also for a prompt that is planned in a thread.
        """
        previous = request.previous
        if previous is None or len(previous.tokens) > _MOST_TOKENS:
            return None
        return self._conversations.find(previous, request.hint, request.tenant)

    def _prepared_texts(self, request: ParsedChat, query: Query) -> PreparedTexts:
        """Analyse the query, and the texts of short messages that were not rendered before.

        The message before them was the latest one of the previous turn: it has no vectors yet.
        """
        chat, previous = request.chat, request.previous
        if chat.transcript or not chat.messages:
            return PreparedTexts.of((), {}, query)
        n_messages = len(chat.messages)
        n_rendered = n_messages - _NEW_MESSAGES
        if previous is not None and len(previous.spans):
            n_rendered = previous.spans[-1].index + 1
        first = max(0, min(n_rendered, n_messages - 1), n_messages - _MAX_PREPARED)
        messages = [chat.messages[i] for i in range(first, n_messages)]
        found = list(map(_short_text, messages))
        earlier = found[:-1]
        if first:
            earlier.append(_short_text(chat.messages[first - 1]))
        vectors = dict[str, Vectors]()
        if self._embedding.is_immediate:
            texts = [text for text in dict.fromkeys(earlier) if text is not None]
            vectors = dict(zip(texts, self._embedded(texts), strict=True))
        pairs = zip(found, messages, strict=True)
        short = [(text, one.role) for text, one in pairs if text is not None]
        return PreparedTexts.of(short, vectors, query)

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

    def lacks_few(self, session: Session) -> bool:
        """Whether a turn of the session needs few new vectors, and none that come later."""
        is_later = self._embedding.on and not self._embedding.is_immediate
        return not is_later and self.n_missing(session) <= _FEW_VECTORS

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
        lacking = [
            block
            for block in index.without_vectors(_MAX_IMMEDIATE)
            if block.message != last_message
        ]
        vectors = {block.label: index.prepared.vectors.get(block.text) for block in lacking}
        missing = [block for block in lacking if vectors[block.label] is None]
        embedded = self._embedded([block.text for block in missing])
        vectors |= zip([block.label for block in missing], embedded, strict=True)
        index.add_vectors((label, found) for label, found in vectors.items() if found is not None)

    def _embedded(self, texts: Sequence[str]) -> list[Vectors]:
        """The vectors [k, d] of the chunks of each text, by an immediate encoder."""
        chunks = [chunks_of(text) for text in texts]
        every = [chunk for of_text in chunks for chunk in of_text]
        if not every:
            return [np.zeros((0, 0), np.float32)] * len(texts)
        rows = self._embedding.embed_blocks(every)
        ends = accumulate(map(len, chunks))
        return [rows[end - len(each) : end] for each, end in zip(chunks, ends, strict=True)]

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

    async def _embedded_query(self, query: Query, tenant: str, trace: RequestTrace) -> Query:
        """A query with the vectors that could be made; an immediate encoder makes all at once.

        In a language that the encoder does not know it has none: they would rank by chance.
        """
        texts = query.texts
        if not texts or (self._embedding.is_english and language_of(query.text) is not None):
            return query
        query = replace(query, similar_words=self._embedding.similar_words)
        if not self._embedding.is_immediate:
            return query.embedded(await self._embedding.embed_queries(texts, tenant))
        with trace.beside():
            return query.embedded(await self._embedding.embed_queries(texts, tenant))


async def _query_of(request: ParsedChat, trace: RequestTrace) -> Query:
    """The query of a request, without vectors; of a large one it is built in a thread."""
    if is_large(request.body):
        return await run_off_loop(request.body, query_of, request.chat)
    with trace.beside():
        return query_of(request.chat)


def _short_text(message: Message) -> str | None:
    """The text by which a short message is found; None for a longer one, which is not prepared."""
    n_calls = sum(len(call.arguments) for call in message.tool_calls)
    if len(message.text) + n_calls > _MAX_PREPARED_CHARS:
        return None
    text = message.printed
    return None if len(text) > _MAX_PREPARED_CHARS else searched_text(text, message.role)


def stacked(vectors: LabeledVectors) -> list[tuple[str, Vectors]]:
    """The vectors of each block as one array [k, d]."""
    return [
        (label, block if isinstance(block, np.ndarray) else np.stack(block))
        for label, block in vectors
    ]
