"""`policy.budget: auto`, the default: the budget follows from the cells of a slot."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
from conversation import ChatClient
from harness import llama_server, proxy, server_binary, until

from bench.quality.sessions import Script, right, scripts
from evoke_proxy.cli.main import main

CELLS, LOGICAL, RESERVE = 1024, 8192, 256
# Sessions about four times as long as the cells, each with twelve facts and their questions.
FACTS = scripts(11, "facts12", 4 * CELLS, 3)


def patched(*options: str) -> AbstractContextManager[int]:
    return llama_server(server_binary(patched=True), "--evoke-ram", "128", *options)


def n_recalled(port: int, script: Script) -> int:
    """Run a session; returns the number of questions answered correctly."""
    client, n_right = ChatClient(port, script.name), 0
    first = len(script.turns) - len(script.probes)
    for number, end in enumerate(script.turns):
        client.messages = list(script.messages[: end - 1])
        probe = script.probes[number - first] if number >= first else None
        turn = client.say(script.messages[end - 1]["content"], max_tokens=32 if probe else 1)
        n_right += probe is not None and right(turn.text, probe)
    return n_right


def test_a_logical_context_without_a_budget_recalls_all_facts() -> None:
    options = ("-c", str(CELLS), "-np", "1", "--ctx-logical", str(LOGICAL))
    with patched(*options) as port, proxy(port) as running:
        assert running.servers[0].monitor.policy.budget == CELLS - RESERVE
        recalled = [n_recalled(running.port, script) for script in FACTS]
        assert running.metric("evoke_blocks_evicted_total") > 100
        assert running.metric("evoke_blocks_recovered_total") > 0
        assert running.metric("evoke_budget_breach_total") == 0
    # Without a budget llama-server evicts itself, nothing is recovered, and 6 of 36 are right.
    assert sum(recalled) == sum(len(script.probes) for script in FACTS) == 36


def test_the_budget_of_slots_that_share_cells_is_that_of_their_share() -> None:
    options = ("-c", str(2 * CELLS), "-np", "2", "-kvu", "--ctx-logical", str(LOGICAL))
    with patched(*options) as port, proxy(port) as running:
        monitor = running.servers[0].monitor
        assert monitor.server.n_slot_cells == CELLS
        assert monitor.policy.budget == CELLS - RESERVE
        reply = ChatClient(running.port, "one").say("Good morning.")
        assert reply.accounting["budget"] == CELLS - RESERVE


def test_a_context_that_fits_the_cells_has_no_budget() -> None:
    with patched("-np", "1") as port, proxy(port) as running:
        monitor = running.servers[0].monitor
        assert monitor.policy.budget is None
        # The model was trained for no longer context, which llama-server would refuse.
        assert "all that the model was trained for, fits the cells" in monitor.describe()
        assert not ChatClient(running.port, "one").say("Good morning.").accounting["budget"]


def test_check_config_and_the_log_name_the_budget_in_force(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = ("-c", str(CELLS), "-np", "1", "--ctx-logical", str(LOGICAL))
    with patched(*options) as port:
        assert main(["check-config", "--upstream", f"http://127.0.0.1:{port}"]) == 0
        assert (
            f"sessions keep {CELLS - RESERVE} tokens of up to {LOGICAL}" in capsys.readouterr().out
        )
        with proxy(port, policy__budget="off") as running, caplog.at_level("INFO"):
            config = running.gateway.config
            for budget, tokens in (("auto", CELLS - RESERVE), (400, 400), (None, None)):
                policy = replace(config.policy, budget=budget)
                running.loop.call_soon_threadsafe(
                    running.gateway.adjust, replace(config, policy=policy)
                )
                until(lambda t=tokens: running.servers[0].conversations.policy.budget == t)
                assert budget is None or f"sessions keep {tokens} tokens" in caplog.messages[-1]
