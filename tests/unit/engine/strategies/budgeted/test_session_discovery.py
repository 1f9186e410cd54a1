"""Which sessions of an earlier proxy process a request continues, and when it is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from session_fixtures import session_record

from evoke_proxy.config import Config
from evoke_proxy.core.model.blocks import Role, Span
from evoke_proxy.core.prompt.layout import labels
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered, SlotView
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.strategies.budgeted.session_discovery import SessionDiscovery
from evoke_proxy.engine.strategies.budgeted.strategy import BudgetedStrategy
from evoke_proxy.errors import UpstreamUnavailable

SYSTEM, USER = 2000, 2100
TOKENS = np.arange(2400, dtype=np.int32)


class Blocks:
    """Answers block calls of a llama-server that has copies of one session."""

    def __init__(self, copies: Mapping[str, Span], fails: int = 0) -> None:
        self.copies = copies
        self.fails = fails

    async def slot(self, slot: int, tenant: str, **_: object) -> dict[str, Any]:
        return self._answer()

    async def run(self, slot: int, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert action == "block-find"
        if self.fails:
            self.fails -= 1
            raise UpstreamUnavailable("llama-server is gone")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        return {
            "blocks": [
                {"name": name, "p0": span.start, "p1": span.end, "session": "old"}
                for name, span in self.copies.items()
            ]
        }


def rendered(n_common: int, n_tokens: int) -> Rendered:
    """A prompt of a system prompt and a user message, and a slot of the session `old`."""
    spans = (
        MessageSpan(0, Role.SYSTEM, Span(0, SYSTEM)),
        MessageSpan(1, Role.USER, Span(SYSTEM, USER)),
    )
    view = SlotView(0, 7, n_tokens, n_common, (Span(0, n_tokens),), 0, session="old")
    return Rendered(TOKENS, len(TOKENS), spans, slots=(view,))


def identified(prompt: Rendered, copies: Mapping[str, Span]) -> tuple[Conversations, str | None]:
    config, request = Config(), SimpleNamespace(tenant="", hint=None)
    conversations = Conversations(config.policy, 8)
    discovery = SessionDiscovery(conversations, SlotQueue(config.limits))
    discovery.server_started(is_supported=True)
    blocks: Any = Blocks(copies)
    parsed: Any = request
    found = asyncio.run(discovery.identify(parsed, prompt, blocks))
    return conversations, None if found is None else found.id


def copies_to(end: int) -> dict[str, Span]:
    spans = [Span(at, at + 100) for at in range(0, end, 100)]
    return dict(zip(labels("old", TOKENS, spans), spans, strict=True))


@pytest.mark.parametrize(("n_common", "expected"), [(USER, "old"), (SYSTEM, None)])
def test_a_slot_is_continued_only_by_prompts_with_its_first_user_message(
    n_common: int, expected: str | None
) -> None:
    """All conversations of an agent begin with the same system prompt, most of a short session."""
    _, id = identified(rendered(n_common, n_tokens=2300), {})
    assert id == expected


@pytest.mark.parametrize(("end", "expected"), [(USER, "old"), (SYSTEM, None)])
def test_copies_are_continued_only_by_prompts_with_their_first_user_message(
    end: int, expected: str | None
) -> None:
    _, id = identified(rendered(0, n_tokens=0), copies_to(end))
    assert id == expected


def test_a_session_whose_first_request_was_not_forwarded_is_found_again() -> None:
    """A client that gives up while it waits, or gets a 503, sends its request again."""
    conversations, id = identified(rendered(USER, n_tokens=2300), {})
    conversation = conversations.get(id)
    assert id == "old" and conversation is not None
    conversations.withdraw(conversation)
    assert not list(conversations) and conversations.may_resume("old")


def _resumed() -> tuple[SessionDiscovery, Conversation]:
    config = Config()
    conversations = Conversations(config.policy, 8)
    conversation = conversations.resume("old", rendered(0, 0), None, "")
    conversation.budgeted.identified(None)
    return SessionDiscovery(conversations, SlotQueue(config.limits)), conversation


def _turn(conversation: Conversation, blocks: Blocks) -> Any:
    prompt = rendered(0, 0)
    calls = SimpleNamespace(blocks=blocks)
    view = prompt.slots[0]
    return SimpleNamespace(
        conversation=conversation, rendered=prompt, calls=calls, slot=0, view=view
    )


def test_copies_that_could_not_be_listed_are_requested_in_the_next_turn() -> None:
    discovery, conversation = _resumed()
    turn = _turn(conversation, Blocks(copies_to(USER), fails=1))
    with pytest.raises(UpstreamUnavailable):
        asyncio.run(discovery.find_copies(turn))
    assert conversation.budgeted.must_find_copies
    asyncio.run(discovery.find_copies(turn))
    assert not conversation.budgeted.must_find_copies
    assert conversation.labels == copies_to(USER).keys()


def test_a_client_that_leaves_while_copies_are_listed_does_not_lose_them() -> None:
    discovery, conversation = _resumed()

    class Hanging(Blocks):
        async def run(self, slot: int, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

    async def leave() -> None:
        turn = _turn(conversation, Hanging({}))
        task = asyncio.get_running_loop().create_task(discovery.find_copies(turn))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert conversation.budgeted.must_find_copies


def test_a_session_handles_a_restart_in_its_next_turn_and_keeps_the_remaining_copies() -> None:
    """While a turn runs, nothing else changes its session, which may be in use in a thread."""
    router = build_router(Config())
    recorded = router.conversations.recall(session_record())
    recorded.budgeted.server_restarted()  # the first start, which takes the slot of the record
    recorded.budgeted.copies_confirmed()
    strategy = router.server.strategies.budgeted
    assert isinstance(strategy, BudgetedStrategy)
    layout, session = recorded.session.layout, recorded.session
    asyncio.run(_start(router.server, ServerInfo("", "", n_slots=1)))
    assert session.layout is layout and recorded.budgeted.is_unconfirmed
    session.finish(None)  # the turn that ran ends
    (label,) = layout.saved
    copies = {label: Span(0, 4), "s/other": Span(4, 9)}
    asyncio.run(strategy._records.reconcile_copies(_turn(recorded, Blocks(copies))))
    assert session.layout.saved == {label} and not session.layout.ranges
    assert not recorded.budgeted.is_unconfirmed


def test_a_restart_while_copies_are_listed_is_not_overlooked() -> None:
    router = build_router(Config())
    recorded = router.conversations.recall(session_record())
    strategy, server = router.server.strategies.budgeted, router.server
    assert isinstance(strategy, BudgetedStrategy)

    class Restarting(Blocks):
        async def slot(self, slot: int, tenant: str, **_: object) -> dict[str, Any]:
            server._started(ServerInfo("", "", n_slots=1, instance="2"))
            return self._answer()

    blocks = Restarting({"s/0-4-a": Span(0, 4)})
    asyncio.run(strategy._records.reconcile_copies(_turn(recorded, blocks)))
    assert recorded.budgeted.is_unconfirmed and not recorded.session.layout.saved


async def _start(server: Any, info: ServerInfo) -> None:
    server._started(info)
