"""Reading a reply while it is relayed: time to the first byte, outcome and facts for the log."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
import virtual_time
from engine_fixtures import ending_request

from evoke_proxy.config import Config
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.gateway import Outcome, RequestTrace
from evoke_proxy.engine.server.reply import ReplyReader, facts_of

EVOKE = {"n_prompt": 100, "decoded": 60, "recovered": 30, "resident_before": 10, "omitted": 0}
REPLY = json.dumps(
    {
        "choices": [{"finish_reason": "stop", "message": {"content": "the secret"}}],
        "usage": {"prompt_tokens": 100},
        "timings": {"prompt_n": 60, "evoke": EVOKE},
    }
).encode()


def test_the_first_byte_is_timed_from_the_arrival_and_only_once() -> None:
    async def read() -> tuple[float | None, list[tuple[str, float, float]] | None]:
        loop = asyncio.get_running_loop()
        trace = RequestTrace(loop.time(), records_steps=True)
        reader = ReplyReader(trace)
        assert reader.first_byte_s is None
        await asyncio.sleep(2)
        trace.forwarded_at = loop.time()
        for piece in (REPLY[:50], REPLY[50:]):
            await asyncio.sleep(3)
            reader.feed(piece)
        reader.close()
        return reader.outcome().first_byte_s, trace.steps

    first, steps = virtual_time.run(read())
    assert first == pytest.approx(5)
    assert steps == [("prefill", 2.0, 5.0), ("first byte", 5.0, 5.0)]


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_outcome_says_whether_the_reply_is_complete(is_complete: bool) -> None:
    async def read() -> Outcome:
        reader = ReplyReader(RequestTrace(0.0))
        reader.feed(REPLY if is_complete else REPLY[:40])
        reader.close()
        return reader.outcome()

    outcome = asyncio.run(read())
    assert outcome.is_finished is is_complete
    assert (outcome.accounting is not None) is is_complete
    if is_complete:
        assert outcome.accounting == TokenAccounting.parse({"evoke": EVOKE})
        assert outcome.usage == {"prompt_tokens": 100}


def test_the_facts_are_numbers_and_names_without_any_text() -> None:
    turn = replace(
        ending_request(build_router(Config())).scope.turn, decision="evoke", slots=(3, 4)
    )
    trace = RequestTrace(0.0)
    trace.own_s, trace.waits["queue"] = 0.00512, 1.5
    outcome = Outcome(
        is_finished=True, accounting=TokenAccounting.parse({"evoke": EVOKE}), first_byte_s=0.25
    )
    facts = facts_of(turn, outcome, trace)
    assert facts == {
        "decision": "evoke",
        "session": None,
        "slot": 3,
        "evicted": 0,
        "auto_evicted": 0,
        "prompt": 100,
        "decoded": 60,
        "recovered": 30,
        "resident_before": 10,
        "omitted": 0,
        "peak": 0,
        "own_ms": 5.12,
        "after_ms": 0.0,
        "queue_ms": 1500.0,
        "first_byte_ms": 250,
    }


def test_a_request_that_was_not_forwarded_has_no_times() -> None:
    turn = ending_request(build_router(Config())).scope.turn
    trace = RequestTrace(0.0)
    trace.server = "a"
    facts = facts_of(turn, Outcome(is_finished=False), trace)
    assert facts == {
        "decision": "relay",
        "server": "a",
        "session": None,
        "slot": None,
        "first_byte_ms": None,
    }
