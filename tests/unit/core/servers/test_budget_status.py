"""The status of the budget: whether it is in force, and why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoke_proxy.config import PolicySettings
from evoke_proxy.core.servers.budget_status import budget_status, effective_policy
from evoke_proxy.core.servers.server_info import UNKNOWN_SERVER, ServerInfo

PATCHED = ServerInfo("", "", n_ctx=32_768, n_cells=8192, n_slot_cells=8192)
STOCK = ServerInfo.parse({})


def policy(budget: int | None) -> PolicySettings:
    return PolicySettings(budget=budget)


def test_a_budget_below_the_cells_is_in_force() -> None:
    status = budget_status(policy(6000), PATCHED)
    assert (status.tokens, status.reason, status.warning) == (6000, "", "")
    assert not status.is_degraded


@pytest.mark.parametrize(
    ("budget", "server", "reason", "fix"),
    [
        (200, replace(PATCHED, n_cells=140), "exceeds_cells", "-c, at least 200"),
        (8192, replace(PATCHED, n_ctx=8192), "exceeds_context", "--ctx-logical 32768"),
        (9000, replace(PATCHED, n_ctx=8192), "exceeds_context", "less than 8192"),
        (3000, STOCK, "no_block_calls", "--evoke-ram"),
        (3000, replace(STOCK, obstacle="unsupported"), "unsupported", "SUPPORT.md"),
        (3000, UNKNOWN_SERVER, "unreachable", "start llama-server"),
        (3000, ServerInfo.parse({"role": "router"}), "router", "a proxy for each model"),
    ],
)
def test_a_budget_that_is_not_in_force_has_a_code_and_a_fix(
    budget: int, server: ServerInfo, reason: str, fix: str
) -> None:
    status = budget_status(policy(budget), server)
    assert (status.tokens, status.reason, status.is_degraded) == (None, reason, True)
    assert str(budget) in status.problem
    assert fix in status.fix
    assert status.warning == f"{status.problem}: {status.fix}"


def test_a_budget_beyond_the_cells_is_that_of_the_cells_and_has_a_fix() -> None:
    status = budget_status(policy(8193), PATCHED)
    assert (status.tokens, status.reason, status.is_degraded) == (8192, "exceeds_cells", True)
    assert status.problem == (
        "the budget of 8193 tokens is more than the 8192 cells of a slot, so sessions keep 8192"
    )
    assert "8192 tokens" in status.text
    assert "--budget) to 7936 or start llama-server with more cells" in status.fix


@pytest.mark.parametrize(
    ("server", "budget"),
    [
        (PATCHED, 8192),
        (replace(PATCHED, n_cells=140, n_slot_cells=140), None),  # they hold no block
        (replace(PATCHED, n_ctx=8192), 9000),  # no prompt exceeds the cells: nothing is evicted
        (replace(PATCHED, n_cells=16_384), 9000),  # one slot may use the cells of the others
        (STOCK, 9000),
        (UNKNOWN_SERVER, 9000),
    ],
)
def test_the_budget_of_a_policy_is_within_the_cells(server: ServerInfo, budget: int | None) -> None:
    found = effective_policy(policy(9000), server)
    assert found.budget == budget
    own = replace(found, budget=10**6).within_cells().budget
    assert own == (10**6 if found.n_cells is None else budget if budget != 9000 else 16_384)


def test_a_budget_is_in_force_if_the_server_does_not_report_its_cells() -> None:
    server = replace(PATCHED, n_cells=None, n_ctx=None)
    assert budget_status(policy(10**6), server).tokens == 10**6


def test_a_missing_budget_is_a_problem_only_if_llama_server_evicts_by_itself() -> None:
    for server in (STOCK, UNKNOWN_SERVER, replace(PATCHED, n_ctx=8192)):
        status = budget_status(policy(None), server)
        assert (status.tokens, status.warning, status.is_degraded) == (None, "", False)
    status = budget_status(policy(None), PATCHED)
    assert "evicts the oldest blocks itself when its 8192 cells" in status.problem
    assert "policy.budget" in status.fix
    assert not status.is_degraded


FEATURES = ["blocks", "plan", "render", "reuse", "stream"]


def server_with(**limits: int) -> ServerInfo:
    return ServerInfo.parse({"evoke": {"features": FEATURES, "limits": limits}})


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"n_ctx_logical": 65536, "n_cells": 16384, "n_slot_cells": 16384}, 16384 - 256),
        # At most a quarter of the cells is reserved for the answer.
        ({"n_ctx_logical": 6144, "n_cells": 768, "n_slot_cells": 768}, 768 - 192),
        # Four slots share their cells; the budget is the share of one.
        ({"n_ctx_logical": 65536, "n_cells": 16384, "n_slot_cells": 4096}, 4096 - 256),
        # The server does not report the share of a slot.
        ({"n_ctx_logical": 65536, "n_cells": 16384}, 16384 - 256),
        # One slot may fill all cells, so that its context fits although its share does not.
        ({"n_ctx_logical": 16384, "n_cells": 16384, "n_slot_cells": 4096}, None),
        ({"n_ctx_logical": 8192, "n_cells": 8192, "n_slot_cells": 8192}, None),
        # Sinks, recent tokens and one block do not fit.
        ({"n_ctx_logical": 8192, "n_cells": 160, "n_slot_cells": 160}, None),
        ({}, None),
    ],
)
def test_an_automatic_budget_follows_from_the_cells_of_a_slot(
    limits: dict[str, int], tokens: int | None
) -> None:
    settings = PolicySettings()
    assert budget_status(settings, server_with(**limits)).tokens == tokens
    assert effective_policy(settings, server_with(**limits)).budget == tokens


def test_the_text_of_an_automatic_budget_names_the_options_that_change_it() -> None:
    cells = {"n_cells": 8192, "n_slot_cells": 8192}
    fits = budget_status(PolicySettings(), server_with(n_ctx_logical=8192, **cells))
    assert "--ctx-logical 32768" in fits.text and not fits.problem
    small = server_with(n_ctx_logical=8192, n_cells=160, n_slot_cells=160)
    assert "(-c)" in budget_status(PolicySettings(), small).warning
    on = budget_status(PolicySettings(), server_with(n_ctx_logical=65536, **cells))
    assert "7936 tokens of up to 65536" in on.text and not on.problem
    shared = server_with(n_ctx_logical=65536, n_cells=8192, n_slot_cells=2048)
    assert "its share of 8192" in budget_status(PolicySettings(), shared).text


def test_no_context_is_advised_that_the_model_was_not_trained_for() -> None:
    fits = replace(PATCHED, n_ctx=8192, n_ctx_train=20_000)
    text = budget_status(PolicySettings(), fits).text
    assert "--ctx-logical 20000" in text and "up: --context 20000" in text and "--cells" in text
    assert "--ctx-logical 20000" in budget_status(policy(8192), fits).fix
    whole = replace(fits, n_ctx_train=8192)
    text = budget_status(PolicySettings(), whole).text
    assert "all that the model was trained for" in text and "(evoke-proxy up: --cells)" in text
    assert "32768" not in text and "--context" not in text
    fix = budget_status(policy(8192), whole).fix
    assert fix == (
        "set policy.budget (--budget) to less than 8192: no context can be longer than the 8192 of"
        " its training"
    )
    # A budget beyond what the model was trained for: no longer context helps.
    assert "--ctx-logical" not in budget_status(policy(20_000), replace(fits, n_cells=30_000)).fix


def test_the_advice_for_a_model_with_scaled_rope_is_not_limited_by_its_training() -> None:
    scaled = replace(PATCHED, n_ctx=131_072, n_cells=131_072, n_slot_cells=131_072)
    scaled = replace(scaled, n_ctx_train=32_768)
    text = budget_status(PolicySettings(), scaled).text
    assert "trained for" not in text and "--ctx-logical 524288" in text
    fix = budget_status(policy(131_072), scaled).fix
    assert "training" not in fix and "--ctx-logical 524288" in fix


@pytest.mark.parametrize("budget", [None, 512])
def test_a_configured_budget_is_the_policys_at_every_server(budget: int | None) -> None:
    settings = PolicySettings(budget=budget)
    for server in (PATCHED, STOCK, UNKNOWN_SERVER):
        assert effective_policy(settings, server).budget == budget


def test_the_policy_is_made_with_all_options_of_the_settings() -> None:
    settings = PolicySettings(name="discard", block_tokens=32, writeback=False, budget=700)
    found = settings.with_budget(300)
    assert (found.name, found.block_tokens, found.writeback) == ("discard", 32, False)
    assert found.budget == 300 and found.least_budget == settings.least_budget
