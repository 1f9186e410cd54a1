"""The states of a conversation: what each change records."""

from __future__ import annotations

from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.engine.server.conversation_states import BudgetedState, SentTurn


def test_rows_evicted_by_an_operator_are_no_longer_resident() -> None:
    state = BudgetedState()
    state.tokens_counted(100)
    state.rows_evicted(30)
    assert state.n_resident == 70


def test_the_sent_request_can_be_taken_once() -> None:
    state = BudgetedState()
    sent = SentTurn("chat", b"body", AnswerReader())
    state.request_sent(sent)
    assert state.take_sent() is sent and state.take_sent() is None


def test_rows_are_private_from_an_unknown_snapshot_or_adapters_until_they_are_lost() -> None:
    state = BudgetedState()
    assert not state.is_private
    state.slot_restored(7, 90, is_whole=False)
    assert (state.epoch, state.n_restored, state.is_private) == (7, 90, True)
    state.rows_lost()
    assert (state.epoch, state.n_restored, state.is_private) == (None, 0, False)
    state.slot_restored(8, 90, is_whole=True)
    assert not state.is_private
    state.adapters_used()
    assert state.is_private
    state.server_restarted()
    assert not state.is_private and not state.n_restored
    state.identified(9)
    assert state.is_private
