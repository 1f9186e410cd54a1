"""Vectors of blocks and questions: what is embedded for a session, when, and where it is stored."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import virtual_time

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.retrieval.analysis import NOTHING_PREPARED, PreparedTexts
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.embedding import block_vectors
from evoke_proxy.engine.embedding.block_vectors import BlockVectors, PreparedQuery, stacked
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.body_parsing import LARGE_BYTES
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.server.conversations import Arrival, Conversation, Conversations

EAST = np.array([1.0, 0.0], np.float32)
POLICY = PolicyConfig(budget=512)
# Two passages of one block: each is long enough to have a vector of its own.
PASSAGES = (f"The first one is {'right ' * 50}here.", f"The second one is {'far ' * 70}over there.")


class FakeEmbedding:
    """Has the vectors in `done`; takes `seconds` for a question."""

    def __init__(self, on: bool = True, seconds: float = 0.0, is_immediate: bool = False) -> None:
        self.on, self.seconds, self.is_immediate = on, seconds, is_immediate
        self.is_english = False
        self.submitted: list[str] = []
        self.done: dict[bytes, np.ndarray] = {}
        self.asked: list[str] = []
        self.similar_words = {"boss": [("supervisor", 0.6)]}

    def key(self, text: str, tenant: str = "") -> bytes:
        return f"{tenant}/{text}".encode()

    def vector(self, key: bytes) -> np.ndarray | None:
        return self.done.get(key)

    def embed_blocks(self, texts: Any) -> np.ndarray:
        self.asked += texts
        return np.stack([EAST * number for number in range(1, len(texts) + 1)])

    def submit(self, texts: Any) -> None:
        self.submitted += [text for _, text in texts]

    async def embed_queries(self, texts: Any, tenant: str = "") -> list[np.ndarray | None]:
        self.asked += texts
        await asyncio.sleep(self.seconds)
        return [EAST for _ in texts]


def vectors_of(fake: FakeEmbedding, policy: PolicyConfig = POLICY) -> BlockVectors:
    return BlockVectors(fake, Conversations(policy, 9))  # type: ignore[arg-type]


def conversation(*texts: str) -> Conversation:
    """A conversation whose index has a block for each text."""
    session = Session("s", "me", POLICY)
    blocks = [
        Block(f"user:{i}#0", f"s/{i}", Span(i * 9, i * 9 + 9), Role.USER, 1, i, text)
        for i, text in enumerate(texts)
    ]
    session.index.relevance(Query.of("x"), BlockTable(blocks))
    return Conversation(session, np.zeros(0, np.int32))


def request(**fields: Any) -> ParsedChat:
    message = {"role": "user", "content": "Where is it? How is the old one called?"}
    chat = parse_chat("chat", {"messages": [message], **fields})
    incoming = IncomingRequest(dialect="chat", body=b"", headers={})
    return ParsedChat(incoming=incoming, tenant="me", body=b"", chat=chat)


async def rendering(seconds: float = 0.0) -> Any:
    await asyncio.sleep(seconds)
    return "rendered"


async def embed_during_rendering(
    fake: FakeEmbedding, policy: PolicyConfig, seconds: float = 0.0
) -> tuple[Any, RequestTrace]:
    """Embeds during a rendering; returns the query and the trace with the waiting times."""
    trace, vectors = RequestTrace(0.0), vectors_of(fake, policy)
    rendered, prepared = await vectors.prepare_beside(lambda: rendering(seconds), request(), trace)
    assert rendered == "rendered"
    return prepared.query, trace


def test_the_query_of_a_large_body_is_built_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = list[str]()

    def build(chat: Any) -> Query:
        built_in.append(threading.current_thread().name.split("_")[0])
        return Query.of("x")

    monkeypatch.setattr(block_vectors, "query_of", build)
    for policy in (POLICY, PolicyConfig(budget=None, name="no_eviction")):
        for n_bytes in (100, LARGE_BYTES + 1):
            large = replace(request(), body=b" " * n_bytes)
            prepare = vectors_of(FakeEmbedding(), policy).prepare_beside
            asyncio.run(prepare(rendering, large, RequestTrace(0.0)))
    assert built_in == ["MainThread", "bodies"] * 2


def test_vectors_of_a_block_arrive_when_all_its_texts_are_embedded() -> None:
    fake, conversation_ = FakeEmbedding(), conversation("The first one is here.", "One. " * 120)
    vectors = vectors_of(fake)
    vectors.submit(conversation_)
    assert fake.submitted[-1].startswith("One.") and fake.submitted[0] == "The first one is here."
    fake.done[b"me/The first one is here."] = EAST
    fake.done[conversation_.vectors.pending["s/1"][0]] = EAST
    conversation_.session.add_vectors(stacked(vectors.take_new(conversation_)))
    assert [block.label for block in conversation_.session.index.without_vectors(9)] == ["s/1"]
    fake.submitted.clear()
    vectors.submit(conversation_)
    assert (
        set(conversation_.vectors.pending) == {"s/1"}
        and "The first one is here." not in fake.submitted
    )


def test_embedded_keys_that_are_not_stored_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, conversation_ = FakeEmbedding(), conversation("One.", "Two.", "Three.")
    vectors_of(fake).submit(conversation_)
    fake.done = {key: EAST for keys in conversation_.vectors.pending.values() for key in keys}
    monkeypatch.setattr("evoke_proxy.engine.server.conversation_states._MAX_UNWRITTEN", 2)
    conversation_.session.add_vectors(stacked(vectors_of(fake).take_new(conversation_)))
    assert len(
        conversation_.vectors.embedded
    ) == 2 and not conversation_.session.index.without_vectors(9)


def test_an_immediate_encoder_embeds_missing_blocks_at_once() -> None:
    texts = (" ".join(PASSAGES), "", "More of it.", "Why?")
    fake, conversation_ = FakeEmbedding(is_immediate=True), conversation(*texts)
    vectors, index = vectors_of(fake), conversation_.session.index
    vectors.submit(conversation_)
    assert not fake.submitted and not conversation_.vectors.pending, (
        "nothing must be left for the background"
    )
    vectors.embed_missing(conversation_.session, index._blocks)
    assert fake.asked == ["More of it.", *PASSAGES]
    assert [block.label for block in index.without_vectors(9)] == ["s/3", "s/1"]
    assert index._vectors.get(0).tolist() == [[2, 0], [3, 0]]
    assert index.n_with_vectors == 2
    fake.asked.clear()
    longer = BlockTable(
        [*index._blocks, Block("user:4#0", "s/4", Span(36, 45), Role.USER, 2, 4, "And now?")]
    )
    vectors.embed_missing(conversation_.session, longer)
    assert fake.asked == ["Why?"], "the previous question must be embedded, and the current one not"


def test_an_encoder_that_is_not_immediate_embeds_nothing_at_once() -> None:
    fake, conversation_ = FakeEmbedding(), conversation("The first one is here.", "Where is it?")
    vectors = vectors_of(fake)
    vectors.embed_missing(conversation_.session, conversation_.session.index._blocks)
    assert not fake.asked and vectors.n_missing(conversation_.session) == 0


def test_nothing_is_submitted_without_an_embedder() -> None:
    fake, conversation_ = FakeEmbedding(on=False), conversation("text")
    vectors_of(fake).submit(conversation_)
    query, trace = asyncio.run(embed_during_rendering(fake, POLICY))
    assert not (
        fake.submitted
        or fake.asked
        or conversation_.vectors.pending
        or query.vectors
        or trace.waits
    )


@pytest.mark.parametrize(
    "policy", [replace(POLICY, budget=None), replace(POLICY, name="streaming")]
)
def test_questions_are_not_embedded_without_retrieval(policy: PolicyConfig) -> None:
    fake = FakeEmbedding()
    query, _ = asyncio.run(embed_during_rendering(fake, policy))
    assert query.clauses and not query.vectors and not fake.asked


def test_questions_are_embedded_while_a_session_has_its_own_budget() -> None:
    fake, config = FakeEmbedding(), replace(POLICY, budget=None)
    conversations = Conversations(config, 9)
    conversation_ = conversations.start(Rendered(np.arange(9, dtype=np.int32), 9, ()), None, "me")
    conversation_.own_budget, conversation_.session.config = True, POLICY
    vectors = BlockVectors(fake, conversations)  # type: ignore[arg-type]
    asyncio.run(vectors.prepare_beside(rendering, request(), RequestTrace(0.0)))
    assert len(fake.asked) == 3
    conversations.forget(conversation_)
    asyncio.run(vectors.prepare_beside(rendering, request(), RequestTrace(0.0)))
    assert len(fake.asked) == 3


def test_a_question_is_embedded_during_the_rendering() -> None:
    query, trace = virtual_time.run(
        embed_during_rendering(FakeEmbedding(seconds=0.2), POLICY, seconds=0.15)
    )
    assert query.texts == (
        "Where is it?",
        "How is the old one called?",
        "Where is it? How is the old one called?",
    )
    assert len(query.vectors) == 2 and query.whole is not None
    assert query.similar_words["boss"] == [("supervisor", 0.6)]
    assert trace.waits["embed"] == pytest.approx(0.05)
    _, quick = virtual_time.run(embed_during_rendering(FakeEmbedding(), POLICY, seconds=0.1))
    assert quick.waits["embed"] == 0.0


def test_a_failed_rendering_raises_its_error() -> None:
    async def failing() -> Any:
        raise ValueError("no")

    async def run() -> None:
        vectors = vectors_of(FakeEmbedding())
        await vectors.prepare_beside(failing, request(), RequestTrace(0.0))

    with pytest.raises(ValueError, match="no"):
        asyncio.run(run())


class Continued:
    """A conversation of short messages with a fake encoder, and the request of its next turn."""

    def __init__(self) -> None:
        self.fake = FakeEmbedding(is_immediate=True)
        conversations = Conversations(POLICY, 9)
        self.vectors = BlockVectors(self.fake, conversations)  # type: ignore[arg-type]
        spans = tuple(
            MessageSpan(i, Role.USER, Span(100 * i, 100 * i + 100)) for i in range(len(self.TEXTS))
        )
        rendered = Rendered(np.arange(300, dtype=np.int32), 300, spans)
        self.conversation = conversations.start(rendered, None, "me")
        conversations.commit(self.conversation, Arrival(rendered))
        self.session = self.conversation.session
        self.session.index.update(self._blocks(self.TEXTS))
        roles = ("user", "assistant")
        texts = enumerate((*self.TEXTS, *self.NEW))
        messages = [{"role": roles[i % 2], "content": text} for i, text in texts]
        chat = parse_chat("chat", {"messages": messages})
        incoming = IncomingRequest(dialect="chat", body=b"", headers={})
        self.request = ParsedChat(
            incoming=incoming, tenant="me", body=b"", chat=chat, previous=rendered
        )

    TEXTS = ("The first one is here.", "It is noted down here.", "Where is the first one?")
    NEW = ("It is in the old box over there.", "And where is the second one?")

    def _blocks(self, texts: tuple[str, ...]) -> BlockTable:
        roles = (Role.USER, Role.ASSISTANT)
        return BlockTable(
            Block(f"x:{i}#0", f"s/{i}", Span(i * 9, i * 9 + 9), roles[i % 2], 1, i, text)
            for i, text in enumerate(texts)
        )

    def prepare(self) -> PreparedQuery:
        _, prepared = asyncio.run(
            self.vectors.prepare_beside(rendering, self.request, RequestTrace(0.0))
        )
        return prepared

    def embed_next(self, texts: PreparedTexts) -> list[list[list[float]]]:
        """Embed the blocks of the next turn; the vectors of all of its documents."""
        self.session.index.prepare(texts)
        blocks = self._blocks((*self.TEXTS, *self.NEW))
        self.vectors.embed_missing(self.session, blocks)
        stored = self.session.index._vectors
        return [stored.get(i).tolist() for i in range(len(blocks)) if i in stored]


def test_new_texts_are_analysed_and_embedded_while_the_prompt_is_rendered() -> None:
    talk = Continued()
    prepared = talk.prepare()
    assert {text for text, _ in prepared.texts.analyses} == set(talk.NEW)
    assert set(prepared.texts.vectors) == {talk.TEXTS[-1], talk.NEW[0]}, (
        "the previous question has no vectors yet, and the present one gets none"
    )
    talk.fake.asked.clear()
    talk.embed_next(prepared.texts)
    assert set(talk.fake.asked) == set(talk.TEXTS[:2]), "prepared texts must not be embedded again"
    assert [block.text for block in talk.session.index.without_vectors(9)] == [talk.NEW[-1]]


def test_other_texts_than_the_prepared_ones_are_embedded_with_the_turn() -> None:
    talk, other = Continued(), Continued()
    prepared = talk.prepare()
    talk.NEW = other.NEW = ("An answer that the client has edited.", talk.NEW[1])
    for one in (talk, other):
        one.fake.asked.clear()
    talk.embed_next(prepared.texts)
    other.embed_next(PreparedTexts())
    assert talk.NEW[0] in talk.fake.asked and talk.NEW[0] in other.fake.asked
    indexes = [one.session.index for one in (talk, other)]
    assert indexes[0]._inverted._postings == indexes[1]._inverted._postings


def test_the_rendering_is_requested_before_anything_is_prepared() -> None:
    talk, order = Continued(), list[str]()

    async def requested() -> Any:
        await asyncio.sleep(0)  # the body is sent in a callback of the event loop
        order.append(f"sent before {len(talk.fake.asked)} texts")
        await asyncio.sleep(0)
        return "rendered"

    asyncio.run(talk.vectors.prepare_beside(requested, talk.request, RequestTrace(0.0)))
    assert order == ["sent before 0 texts"] and talk.fake.asked


def test_a_session_that_a_thread_works_on_is_not_compared() -> None:
    talk, compared = Continued(), list[Query]()
    talk.session.compare = compared.append  # type: ignore[method-assign]
    talk.prepare()
    assert len(compared) == 1

    async def locked() -> None:
        async with talk.conversation.worker_lock:
            await talk.vectors.prepare_beside(rendering, talk.request, RequestTrace(0.0))

    asyncio.run(locked())
    assert len(compared) == 1


def test_a_failed_rendering_leaves_no_prepared_texts_in_the_session() -> None:
    talk = Continued()

    async def failing() -> Any:
        await asyncio.sleep(0.01)
        raise ValueError("no")

    trace = RequestTrace(0.0)
    with pytest.raises(ValueError, match="no"):
        asyncio.run(talk.vectors.prepare_beside(failing, talk.request, trace))
    assert talk.session.index.prepared is NOTHING_PREPARED and trace.beside_s > 0
    assert len(talk.session.index) == len(talk.TEXTS)


@pytest.mark.parametrize(
    ("text", "is_english", "n_asked"),
    [
        ("Wo wohnt die Schwester von Anna?", True, 0),
        ("Wo wohnt die Schwester von Anna?", False, 1),
        ("Where does Anna's sister live?", True, 1),
    ],
)
def test_an_english_encoder_is_not_asked_about_other_languages(
    text: str, is_english: bool, n_asked: int
) -> None:
    fake = FakeEmbedding()
    fake.is_english = is_english
    query = asyncio.run(vectors_of(fake)._embedded_query(Query.of(text), "", RequestTrace(0.0)))
    assert len(fake.asked) == n_asked == len(query.vectors)
