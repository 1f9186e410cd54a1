"""Conversations: identity, and the state of each strategy."""

from __future__ import annotations

import numpy as np
from session_fixtures import session_record

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.session.drift import Drift
from evoke_proxy.core.snapshots.slot_contents import SentRequest
from evoke_proxy.engine.server.conversation_states import SentTurn
from evoke_proxy.engine.server.conversations import Arrival, Conversation, Conversations

POLICY = PolicyConfig()


def _conversation() -> tuple[Conversations, Conversation]:
    conversations = Conversations(POLICY, 8)
    return conversations, conversations.recall(session_record())


def test_dropping_the_bodies_of_a_conversation_leaves_everything_else() -> None:
    _, conversation = _conversation()
    tokens = conversation.tokens
    conversation.budgeted.plan_ran(7)
    conversation.budgeted.request_sent(SentTurn("chat", b"body", AnswerReader()))
    conversation.snapshots.request_sent(SentRequest(b"a longer body", tokens, b""))
    conversation.snapshots.branch_continued("branch")
    assert conversation.body_bytes == len(b"body") + len(b"a longer body")
    conversation.drop_bodies()
    assert conversation.body_bytes == 0
    assert (conversation.budgeted.epoch, conversation.snapshots.branch) == (7, "branch")


def test_a_recorded_conversation_continues_to_count_its_turns() -> None:
    _, conversation = _conversation()
    assert conversation.n_turns == session_record().session.turns == 2


def test_a_moved_conversation_keeps_its_identity_and_loses_its_rows() -> None:
    source, conversation = _conversation()
    target = Conversations(POLICY, 8)
    conversation.budgeted.plan_ran(7)
    conversation.budgeted.tokens_counted(100)
    clock = Drift("edit", n_tokens=40)
    conversation.budgeted_history.drifted(clock, 40)
    with conversation.using():
        source.move(conversation, target)
    assert conversation.has_moved and not list(source)
    (moved,) = target
    assert moved.identity is conversation.identity and not moved.has_moved
    assert (moved.budgeted.epoch, moved.budgeted.n_resident, moved.in_use) == (None, 0, 0)
    assert (conversation.budgeted.epoch, conversation.budgeted.n_resident) == (7, 100)
    assert moved.budgeted_history.drifted(clock, 2) == (2, 42)
    assert conversation.budgeted_history.drifts == {"edit": (1, 40)}


def test_a_forgotten_conversation_is_not_resumed_from_its_slot() -> None:
    conversations, conversation = _conversation()
    assert conversations.may_resume("of an earlier process")
    assert not conversations.may_resume(conversation.id)
    conversations.forget(conversation)
    assert not conversations.may_resume(conversation.id)


def test_recent_conversations_are_committed_ones_of_the_tenant() -> None:
    conversations = Conversations(PolicyConfig(), 100)
    rendered = Rendered(np.arange(9, dtype=np.int32), 9, ())
    started = [conversations.start(rendered, None, tenant) for tenant in ("a", "a", "b", "a")]
    for each in started[:3]:
        conversations.commit(each, Arrival(rendered))
    assert list(conversations.recent("a", started[3])) == [started[1], started[0]]
    assert list(conversations.recent("a", started[1])) == [started[0]]
