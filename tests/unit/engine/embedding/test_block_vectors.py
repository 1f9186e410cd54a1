"""The embedder and the sessions: what is asked of it, when, and what comes of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import virtual_time

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.embedding.block_vectors import BlockVectors, stacked
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.server.conversations import Conversation, Conversations

EAST = np.array([1.0, 0.0], np.float32)
POLICY = PolicyConfig(budget=512)


class FakeEmbedding:
    """Knows what `done` has; takes `seconds` for a question."""

    def __init__(self, on: bool = True, seconds: float = 0.0) -> None:
        self.on, self.seconds = on, seconds
        self.submitted: list[str] = []
        self.done: dict[bytes, np.ndarray] = {}
        self.asked: list[str] = []

    def key(self, text: str, tenant: str = "") -> bytes:
        return f"{tenant}/{text}".encode()

    def vector(self, key: bytes) -> np.ndarray | None:
        return self.done.get(key)

    def submit(self, texts: Any) -> None:
        self.submitted += [text for _, text in texts]

    async def embed_queries(self, texts: Any, tenant: str = "") -> list[np.ndarray | None]:
        self.asked += texts
        await asyncio.sleep(self.seconds)
        return [EAST for _ in texts]


def vectors_of(fake: FakeEmbedding, policy: PolicyConfig = POLICY) -> BlockVectors:
    return BlockVectors(fake, policy, Conversations(policy, 9))  # type: ignore[arg-type]


def conversation(*said: str) -> Conversation:
    """One whose index holds a block for each text."""
    session = Session("s", "me", POLICY)
    blocks = [
        Block(f"user:{i}#0", f"s/{i}", Span(i * 9, i * 9 + 9), Role.USER, 1, i, text)
        for i, text in enumerate(said)
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


async def beside(
    fake: FakeEmbedding, policy: PolicyConfig, seconds: float = 0.0
) -> tuple[Any, RequestTrace]:
    """The vectors that were made, and what was waited for."""
    trace, vectors = RequestTrace(0.0), vectors_of(fake, policy)
    rendered, made = await vectors.embed_beside(rendering(seconds), request(), trace)
    assert rendered == "rendered"
    return made, trace


def test_vectors_of_a_block_arrive_when_all_its_texts_are_embedded() -> None:
    fake, known = FakeEmbedding(), conversation("The first one is here.", "One. " * 12)
    vectors = vectors_of(fake)
    vectors.submit(known)
    assert fake.submitted[-1].startswith("One.") and fake.submitted[0] == "The first one is here."
    fake.done[b"me/The first one is here."] = EAST
    fake.done[known.budgeted.pending_vectors["s/1"][0]] = EAST
    known.session.add_vectors(stacked(vectors.arrived(known)))
    assert [block.label for block in known.session.index.without_vectors(9)] == ["s/1"]
    fake.submitted.clear()
    vectors.submit(known)
    assert (
        set(known.budgeted.pending_vectors) == {"s/1"}
        and "The first one is here." not in fake.submitted
    )


def test_embedded_keys_that_are_not_stored_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, known = FakeEmbedding(), conversation("One.", "Two.", "Three.")
    vectors_of(fake).submit(known)
    fake.done = {key: EAST for keys in known.budgeted.pending_vectors.values() for key in keys}
    monkeypatch.setattr("evoke_proxy.engine.embedding.block_vectors._AT_ONCE", 2)
    known.session.add_vectors(stacked(vectors_of(fake).arrived(known)))
    assert len(known.budgeted.embedded) == 2 and not known.session.index.without_vectors(9)


def test_nothing_is_submitted_without_an_embedder() -> None:
    fake, known = FakeEmbedding(on=False), conversation("text")
    vectors_of(fake).submit(known)
    made, trace = asyncio.run(beside(fake, POLICY))
    assert not (
        fake.submitted or fake.asked or known.budgeted.pending_vectors or made or trace.waits
    )


@pytest.mark.parametrize(
    "policy", [replace(POLICY, budget=None), replace(POLICY, name="streaming")]
)
def test_questions_are_not_embedded_without_retrieval(policy: PolicyConfig) -> None:
    fake = FakeEmbedding()
    assert not asyncio.run(beside(fake, policy))[0] and not fake.asked


def test_questions_are_embedded_while_a_session_has_a_budget_of_its_own() -> None:
    fake, config = FakeEmbedding(), replace(POLICY, budget=None)
    conversations = Conversations(config, 9)
    known = conversations.start(Rendered(np.arange(9, dtype=np.int32), 9, ()), None, "me")
    known.own_budget, known.session.config = True, POLICY
    vectors = BlockVectors(fake, config, conversations)  # type: ignore[arg-type]
    asyncio.run(vectors.embed_beside(rendering(), request(), RequestTrace(0.0)))
    assert len(fake.asked) == 2
    conversations.forget(known)
    asyncio.run(vectors.embed_beside(rendering(), request(), RequestTrace(0.0)))
    assert len(fake.asked) == 2


def test_a_question_is_embedded_during_the_rendering() -> None:
    made, trace = virtual_time.run(beside(FakeEmbedding(seconds=0.2), POLICY, seconds=0.15))
    assert set(made) == {"Where is it?", "How is the old one called?"}
    assert trace.waits["embed"] == pytest.approx(0.05)
    _, quick = virtual_time.run(beside(FakeEmbedding(), POLICY, seconds=0.1))
    assert quick.waits["embed"] == 0.0


def test_a_failed_rendering_raises_its_error() -> None:
    async def failing() -> Any:
        raise ValueError("no")

    async def run() -> None:
        vectors = vectors_of(FakeEmbedding())
        await vectors.embed_beside(failing(), request(), RequestTrace(0.0))

    with pytest.raises(ValueError, match="no"):
        asyncio.run(run())
