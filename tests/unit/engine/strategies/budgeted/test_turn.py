"""The stages of a budgeted turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from engine_fixtures import ending_request

from evoke_proxy.config import Config
from evoke_proxy.core.model.blocks import Role, Span
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.parsing.body_parsing import LARGE_BYTES
from evoke_proxy.engine.strategies.budgeted.turn import BudgetedTurn, RenderedTurn


def test_the_next_stage_keeps_all_fields_of_the_one_before() -> None:
    prepared = replace(
        ending_request(build_router(Config())).scope.turn, decision="evoke", slots=(1,), budget=96
    )
    turn = BudgetedTurn.of(prepared, is_planned=True)
    assert (turn.decision, turn.slots, turn.budget) == ("evoke", (1,), 96)
    assert turn.request is prepared.request and turn.calls is prepared.calls
    assert turn.is_planned and not turn.has_marker
    later = BudgetedTurn.of(turn, has_marker=True)
    assert later.is_planned and later.has_marker and later.slots == (1,)
    assert not turn.has_marker, "a stage does not change"


def test_a_turn_takes_long_by_its_new_messages_and_its_body_too() -> None:
    turn = ending_request(build_router(Config())).scope.turn

    def takes_long(n_messages: int, n_shared: int, n_bytes: int) -> bool:
        spans = [MessageSpan(i, Role.USER, Span(4 * i, 4 * i + 4)) for i in range(n_messages)]
        rendered = Rendered(np.zeros(4 * n_messages, np.int32), 4 * n_messages, spans)
        fields: dict[str, Any] = {
            "request": None,
            "calls": turn.calls,
            "chat": None,
            "conversation": None,
        }
        one = RenderedTurn(**fields, body=b" " * n_bytes, rendered=rendered, slot=0)
        return one.takes_long(n_shared)

    assert not takes_long(9, 0, 1000) and not takes_long(400, 1560, 1000)
    assert takes_long(400, 0, 1000), "many messages"
    assert takes_long(9, 36, LARGE_BYTES + 1), "a large body"
