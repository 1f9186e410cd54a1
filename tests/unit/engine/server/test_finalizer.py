"""The end of a turn: what is counted, and when the slot is released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine_fixtures import Ending, ending_request, is_free, prompt, with_engine

from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server import finalizer
from evoke_proxy.engine.server.conversations import Arrival, Conversation
from evoke_proxy.engine.strategies.slot_assignment import SlotAssignment
from evoke_proxy.errors import (
    UpstreamTimeout,
)

ODD: list[Any] = [
    {"input_tokens_details": [1]},
    {"input_tokens_details": "many", "input_tokens": "9"},
    {"input_tokens": -5, "output_tokens": -1},
    {"input_tokens": 10**30, "output_tokens": 1e300},
    {"input_tokens": {"deep": [[[]]]}, "cache_read_input_tokens": [None]},
]


async def _ending(engine: ModelRouter, usage: Any = None) -> tuple[Ending, Conversation]:
    """A request of a conversation, in the only slot, whose reply has ended."""
    ending = ending_request(engine)
    conversation = engine.conversations.start(prompt(), None, "")
    ending.scope.join(conversation, Arrival(prompt()))
    await ending.scope.acquire(conversation.id)
    engine.conversations.commit(conversation, Arrival(prompt()))
    ending.reply.first_byte_s = 0.1
    ending.reply.observer.usage, ending.reply.observer.done = usage, True
    return ending, conversation


@pytest.mark.parametrize("usage", ODD)
def test_a_malformed_usage_is_counted_and_its_slot_released(usage: Any, monkeypatch: Any) -> None:
    async def work(engine: ModelRouter) -> None:
        ending, conversation = await _ending(engine, usage)

        async def is_idle(*_: object) -> None:
            return None

        monkeypatch.setattr(SlotAssignment, "until_idle", is_idle)
        ending.finish()
        await asyncio.sleep(1)
        assert is_free(engine, conversation)
        assert conversation.n_turns == 1, "the turn is recorded"
        value = engine.metrics.registry.get_sample_value
        assert value("evoke_upstream_errors_total", {"kind": "upstream_protocol"}) == 1
        assert value("evoke_degraded_total", {"stage": "report"}) is None

    with_engine(work)


_STEPS = ("close", "record_end", "forget_surplus", "start_background")


@pytest.mark.parametrize("failing", [*_STEPS, "complete"])
def test_the_slot_is_released_before_reporting_that_raises(failing: str, monkeypatch: Any) -> None:
    async def work(engine: ModelRouter) -> None:
        ending, conversation = await _ending(engine)
        accounting = {"decoded": 3, "n_prompt": 3, "marker": "ok"}
        timings = {"evoke": accounting, "cache_n": 0, "prompt_n": 3, "predicted_n": 1}
        ending.reply.observer.timings = timings
        seen: list[str] = []

        def step(name: str) -> Callable[..., Any]:
            def run(*_: object) -> Any:
                if name != "close":
                    assert engine.server.slots.pool.idle(), f"{name} before the slot is released"
                seen.append(name)
                if name == failing:
                    raise ZeroDivisionError(name)
                return None if name == "record_end" else ()

            return run

        monkeypatch.setattr(ending.reply.observer, "close", step("close"))
        monkeypatch.setattr(finalizer, "record_end", step("record_end"))
        monkeypatch.setattr(engine.conversations, "forget_surplus", step("forget_surplus"))
        budgeted = engine.server.strategies.budgeted
        monkeypatch.setattr(budgeted, "start_background", step("start_background"))
        if failing == "complete":
            monkeypatch.setattr(conversation.session, "finish", step("complete"))
        ending.finish()
        assert is_free(engine, conversation)
        # A failed assertion of a step counts as its failure, and leaves the step out.
        assert [name for name in seen if name != "complete"] == list(_STEPS)
        assert ("complete" in seen) == (failing == "complete")
        value = engine.metrics.registry.get_sample_value
        assert value("evoke_degraded_total", {"stage": "report"}) == 1

    with_engine(work)


def test_a_reply_that_broke_off_keeps_its_slot_until_llama_server_is_idle(
    monkeypatch: Any,
) -> None:
    async def work(engine: ModelRouter) -> None:
        ending, conversation = await _ending(engine)
        ending.reply.observer.done = False
        idle = asyncio.Event()

        async def until_idle(*_: object) -> None:
            await idle.wait()
            raise UpstreamTimeout("no answer")  # llama-server cannot be asked whether it is idle

        monkeypatch.setattr(SlotAssignment, "until_idle", until_idle)
        ending.finish()
        request = asyncio.get_running_loop().create_task(engine.server.slots.acquire("next", ""))
        await asyncio.sleep(50)
        assert not request.done() and conversation.in_use
        idle.set()
        (await request).release()
        assert is_free(engine, conversation)

    with_engine(work)
