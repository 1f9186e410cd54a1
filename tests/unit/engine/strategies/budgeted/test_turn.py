"""The stages of a budgeted turn."""

from __future__ import annotations

from dataclasses import replace

from engine_fixtures import ending_request

from evoke_proxy.config import Config
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.strategies.budgeted.turn import BudgetedTurn


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
