"""Capturing attention: for which policies, at which servers, and after a refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_fixtures import prompt

from evoke_proxy.config import Config, PolicyConfig
from evoke_proxy.core.policy.attention import Capture
from evoke_proxy.core.policy.registry import capture_of
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.strategies.budgeted.attention import CAPTURE, AttentionReader
from evoke_proxy.errors import PlanRefused

# With `recall: model`, the model is asked which blocks it attends to.
CONFIG = PolicyConfig(budget=1000, recall="model")
WITHOUT = PolicyConfig(budget=1000, recall="none")
FIRST, SECOND = (ServerInfo("", "", instance=id, capturable=(0, 3, 7)) for id in ("a", "b"))


class Reader:
    """A reader of attention at a server that can be replaced, and a conversation there."""

    def __init__(self, server: ServerInfo = FIRST) -> None:
        engine = build_router(Config())
        self.monitor: ServerMonitor = engine.server.monitor
        self.monitor.server = server
        self.reader = AttentionReader(self.monitor)
        self.conversation: Conversation = engine.conversations.start(prompt(), None, "")


def refused(operation: str = CAPTURE) -> PlanRefused:
    error = PlanRefused("unsupported")
    error.operation = operation
    return error


def test_only_a_policy_that_uses_attention_captures_it() -> None:
    made = Reader()
    assert made.reader.capture(CONFIG, made.conversation) == capture_of(CONFIG) is not None
    (op,) = made.reader.ops(CONFIG, made.conversation)
    assert op["op"] == CAPTURE and set(op["layers"]) <= set(FIRST.capturable) and op["layers"]
    assert made.reader.ops(WITHOUT, made.conversation) == []


def test_a_capture_that_the_policy_does_not_use_is_ended() -> None:
    made = Reader()
    made.conversation.budgeted.capture_started(Capture("sum"))
    (op,) = made.reader.ops(WITHOUT, made.conversation)
    assert op["op"] == CAPTURE and not op.get("layers")


def test_a_server_that_cannot_capture_is_not_asked_to() -> None:
    made = Reader(replace(FIRST, capturable=()))
    assert made.reader.capture(CONFIG, made.conversation) is None
    assert made.reader.ops(CONFIG, made.conversation) == []


def test_a_refusal_holds_for_the_instance_of_the_server_and_is_noted_once() -> None:
    made = Reader()
    assert not made.reader.note_refusal(made.conversation, refused("save"))
    assert made.reader.note_refusal(made.conversation, refused())
    assert not made.reader.note_refusal(made.conversation, refused())
    assert not made.reader.can_capture(made.conversation)
    made.monitor.server = SECOND
    assert made.reader.can_capture(made.conversation)


@pytest.mark.parametrize("budget", [None, 1000])
def test_without_a_budget_nothing_is_captured(budget: int | None) -> None:
    made = Reader()
    capture = made.reader.capture(replace(CONFIG, budget=budget), made.conversation)
    assert (capture is not None) == (budget is not None)
