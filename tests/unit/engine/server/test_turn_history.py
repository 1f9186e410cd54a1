"""Records of turns: from the accounting of a patched server, or from timings and usage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from engine_fixtures import ending_request, prompt

from evoke_proxy.config import Config
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Evict, Plan
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.gateway import Outcome
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.turn import PreparedTurn
from evoke_proxy.engine.server.turn_history import publish_start, record_end

EVOKE = {
    "n_prompt": 100,
    "decoded": 60,
    "recovered": 30,
    "resident_before": 10,
    "n_resident": 90,
    "n_resident_peak": 95,
}


def turn_of(**changes: Any) -> tuple[PreparedTurn, Conversation]:
    engine = build_router(Config())
    conversation = engine.conversations.start(prompt(), None, "")
    turn = ending_request(engine).scope.turn
    return replace(turn, conversation=conversation, **changes), conversation


def test_a_turn_of_a_patched_server_has_its_accounting() -> None:
    turn, conversation = turn_of(decision="evoke", budget=96)
    outcome = Outcome(
        is_finished=True, accounting=TokenAccounting.parse({"evoke": EVOKE}), first_byte_s=0.25
    )
    feed = EventFeed()
    record = record_end(turn, outcome, feed)
    assert record is not None and list(conversation.history) == [record]
    assert (record.number, record.path, record.ttft_s, record.budget) == (1, "recovered", 0.25, 96)
    assert (record.prompt, record.decoded, record.recovered, record.resident_before) == (
        100,
        60,
        30,
        10,
    )
    assert (record.resident, record.peak) == (90, 95)
    assert feed.latest == 1


@pytest.mark.parametrize(
    ("decision", "cached", "n_prefilled", "path", "recovered", "resident_before", "decoded"),
    [
        ("live", 70, 0, "resident", 0, 70, 30),
        ("restored", 70, 0, "restored", 70, 0, 30),
        ("relay", 0, 0, "decoded", 0, 0, 100),
        ("relay", 70, 50, "resident", 0, 20, 80),
    ],
)
def test_a_turn_of_a_stock_server_counts_what_was_cached_or_restored(
    decision: str,
    cached: int,
    n_prefilled: int,
    path: str,
    recovered: int,
    resident_before: int,
    decoded: int,
) -> None:
    turn, _ = turn_of(decision=decision, n_prefilled=n_prefilled)
    timings = {"cache_n": cached, "prompt_n": 100 - cached, "predicted_n": 5}
    outcome = Outcome(is_finished=True, timings=timings, first_byte_s=0.1)
    record = record_end(turn, outcome, EventFeed())
    assert record is not None
    assert (record.path, record.recovered, record.resident_before, record.decoded) == (
        path,
        recovered,
        resident_before,
        decoded,
    )
    assert record.prompt == record.decoded + record.recovered + record.resident_before == 100
    assert record.omitted == 0


def test_no_turn_is_recorded_without_a_reply_or_a_conversation() -> None:
    turn, conversation = turn_of()
    feed = EventFeed()
    assert record_end(turn, Outcome(is_finished=False), feed) is None
    replied = Outcome(is_finished=True, first_byte_s=0.1)
    assert record_end(replace(turn, conversation=None), replied, feed) is None
    assert not list(conversation.history) and feed.latest == 0


def test_a_side_request_has_a_record_that_is_in_no_history_and_not_published() -> None:
    turn, conversation = turn_of(decision="guest:side")
    conversation.ephemeral = True
    feed = EventFeed()
    timings = {"cache_n": 30, "prompt_n": 70, "predicted_n": 5}
    record = record_end(turn, Outcome(is_finished=True, timings=timings, first_byte_s=0.1), feed)
    assert record is not None
    assert (record.prompt, record.decoded, record.resident_before) == (100, 70, 30)
    publish_start(turn, feed)
    assert not list(conversation.history) and feed.latest == 0


def test_the_start_of_a_turn_is_published_with_its_number() -> None:
    turn, conversation = turn_of(decision="evoke", slots=(2,))
    feed = EventFeed()
    with feed.subscribe(lambda: None, after=0) as subscriber:
        publish_start(turn, feed)
        (event,) = subscriber._waiting
    assert event.kind == "turn"
    assert event.facts["session"] == conversation.id
    assert (event.facts["turn"], event.facts["slot"], event.facts["evicted"]) == (1, 2, [])


def test_the_ranges_of_a_history_are_limited() -> None:
    """With a budget of 32768 tokens, 256 turns would keep 94 MB of ranges, and list them all."""
    turn, conversation = turn_of(decision="evoke", budget=32768)
    evicts = tuple(Evict(Span(20 * i, 20 * i + 10), f"s/{i}") for i in range(3000))
    turn, feed = replace(turn, plan=Plan(evicts=evicts)), EventFeed()
    outcome = Outcome(
        is_finished=True, accounting=TokenAccounting.parse({"evoke": EVOKE}), first_byte_s=0.25
    )
    for _ in range(300):
        record = record_end(turn, outcome, feed)
        assert record is not None and len(record.evicted) == 256
        assert record.ranges_left_out == 3000 - 256
    history = list(conversation.history)
    assert len(history) == 256 and history[-1].number == conversation.n_turns == 300
    kept = [len(one.evicted) for one in history]
    assert kept == [0] * 224 + [256] * 32
    assert {len(one.evicted) + one.ranges_left_out for one in history} == {3000}
    assert len(orjson.dumps([one.to_json() for one in history])) < 400_000
