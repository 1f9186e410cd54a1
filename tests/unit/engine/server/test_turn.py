"""A prepared turn and its scope: the forwarded body, and what is released at its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from engine_fixtures import ending_request, is_free, prompt, with_engine

from evoke_proxy.config import Config
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.gateway import ForwardedBody
from evoke_proxy.engine.parsing.body_parsing import is_large
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server.conversations import Arrival

LARGE = b'{"id_slot":1,"text":"' + b"a" * (1 << 20) + b'"}'


def content_of(forwarded: ForwardedBody) -> object:
    content = forwarded.content
    return json.loads(content if isinstance(content, bytes) else b"".join(content))


@pytest.mark.parametrize("body", [b'{"id_slot":1,"text":"a"}', LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", ["id_slot", "evoke_marker"])
def test_a_member_is_added_or_replaced_in_a_body_of_any_size(body: bytes, name: str) -> None:
    turn = ending_request(build_router(Config())).scope.turn
    members = {name: b"7"}
    changed = asyncio.run(turn.with_members(members, frozenset(("id_slot", "text")), body))
    assert content_of(changed) == json.loads(body) | {name: 7}
    assert is_large(LARGE), "the large body is edited like a small one"


def test_without_a_body_that_of_the_request_is_forwarded() -> None:
    turn = ending_request(build_router(Config())).scope.turn
    changed = asyncio.run(turn.with_members({"id_slot": b"7"}, frozenset()))
    assert content_of(changed) == {"id_slot": 7}


def test_closing_a_scope_releases_everything_once() -> None:
    left: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        yield
        left.append("left")

    async def work(engine: ModelRouter) -> None:
        scope = ending_request(engine).scope
        conversation = engine.conversations.start(prompt(), None, "")
        scope.join(conversation, Arrival(prompt()))
        scope.keep_open(context())
        lease = await scope.acquire(conversation.id)
        assert scope.turn.slots == (lease.slot,) and scope.turn.conversation is conversation
        assert conversation.in_use and scope.trace.waits == {"queue": 0.0}
        scope.close()
        scope.close()
        assert is_free(engine, conversation) and left == ["left"]

    with_engine(work)


def test_an_ephemeral_conversation_is_not_remembered() -> None:
    engine = build_router(Config())
    scope = ending_request(engine).scope
    assert scope.turn.remembered is None
    conversation = engine.conversations.start(prompt(), None, "")
    scope.join(conversation, Arrival(prompt()))
    assert scope.turn.remembered is conversation
    conversation.ephemeral = True
    assert scope.turn.remembered is None
