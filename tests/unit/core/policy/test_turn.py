"""The policy settings of one request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.request.chat import ChatRequest, parse_chat

CONFIG = PolicyConfig(budget=1000)


def request(**options: Any) -> ChatRequest:
    return parse_chat("chat", {"messages": [{"role": "user", "content": "Hi"}], **options})


def test_without_options_the_settings_are_those_of_the_configuration() -> None:
    assert effective_config(CONFIG, request()) is CONFIG


@pytest.mark.parametrize(
    ("configured", "asked", "expected"),
    [(1000, 400, 400), (1000, 4000, 1000), (None, 400, 400), (1000, None, 1000)],
)
def test_a_request_may_lower_the_budget_and_not_raise_it(
    configured: int | None, asked: int | None, expected: int
) -> None:
    options = {} if asked is None else {"evoke_budget": asked}
    config = effective_config(replace(CONFIG, budget=configured), request(evoke=True, **options))
    assert config.budget == expected


@pytest.mark.parametrize(
    ("configured", "asked", "expected"),
    [(5000, None, 800), (None, 5000, 800), (800, None, 800), (None, None, None), (700, 5000, 700)],
)
def test_no_budget_exceeds_the_cells_of_a_slot(
    configured: int | None, asked: int | None, expected: int | None
) -> None:
    config = replace(CONFIG, budget=configured, n_cells=800)
    options = {} if asked is None else {"evoke_budget": asked}
    assert effective_config(config, request(evoke=True, **options)).budget == expected
    if asked is None:
        assert effective_config(config, request()).budget == expected


def test_there_is_no_budget_where_the_cells_cannot_hold_what_always_stays() -> None:
    config = replace(CONFIG, budget=5000, n_cells=CONFIG.least_budget)
    assert effective_config(config, request()).budget == CONFIG.least_budget
    config = replace(config, n_cells=CONFIG.least_budget - 1)
    assert effective_config(config, request()).budget is None


def test_without_any_budget_there_is_none() -> None:
    config = effective_config(replace(CONFIG, budget=None), request(evoke_policy="truncate"))
    assert (config.budget, config.name) == (None, "truncate")


def test_a_request_chooses_policy_recovery_and_recall_and_changes_nothing_else() -> None:
    chosen = request(evoke_policy="truncate", evoke_recovery="discard", evoke_recall="none")
    expected = replace(CONFIG, name="truncate", recovery="discard", recall="none")
    assert effective_config(CONFIG, chosen) == expected
