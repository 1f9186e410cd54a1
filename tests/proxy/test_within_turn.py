"""Agents whose system prompt and tools exceed the budget: `policy.within_turn: full`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask, llama_server, proxy, server_binary, until

BUDGET = 512
# Longer than the budget.
SYSTEM = "You are a coding agent. " + "".join(f"Tool {i}: {FILLER}" for i in range(8))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a patched llama-server."""
    options = ("-np", "1", "-c", "8192", "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


def agent(running: RunningProxy, session: str) -> ChatClient:
    client = ChatClient(running.port, session)
    client.messages[0]["content"] = SYSTEM
    return client


def resident(port: int) -> int:
    answer: Mapping[str, Any] = json.loads(ask(port, "GET", "/slots/0/blocks").body)
    return sum(end - start for start, end in answer["resident"])


def test_the_whole_prompt_is_visible_and_the_budget_holds_between_turns(port: int) -> None:
    with proxy(port, policy__budget=BUDGET, policy__within_turn="full") as running:
        client = agent(running, "full")
        for number in range(4):
            turn = client.say(f"Step {number}. {FILLER}")
            assert turn.accounting["omitted"] == 0
            assert turn.accounting["n_resident_peak"] > BUDGET
            assert number == 0 or turn.accounting["decoded"] < 200
            running.wait_for_background()
            until(lambda: resident(port) <= BUDGET, "the surplus is evicted")
        assert running.metric("evoke_full_turns_total") == 4
        assert running.metric("evoke_full_turn_peak_tokens") > BUDGET
        assert running.metric("evoke_evictions_total", reason="after_turn") > 0
        assert running.metric("evoke_budget_breach_total") == 0
        assert running.metric("evoke_plan_failures_total", reason="books_differ") == 0


def test_without_the_setting_the_budget_holds_in_the_turn(port: int) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        client = agent(running, "hidden")
        answer = client.say(f"Step 1. {FILLER}", evoke_recover=[])
        assert answer.accounting["n_resident_peak"] <= BUDGET
        assert answer.accounting["omitted"] + answer.accounting["decoded_hidden"] > 0
        assert running.metric("evoke_full_turns_total") == 0


def test_the_reply_states_the_budget_that_is_needed(port: int) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        client = agent(running, "needed")
        client.messages.append({"role": "user", "content": "Step 1."})
        usage = json.loads(client.post(evoke_recover=[]).body)["usage"]["evoke"]
        needed = usage["needed_budget"]
        assert needed > BUDGET
    with proxy(port, policy__budget=needed, policy__within_turn="full") as running:
        client = agent(running, "enough")
        client.messages.append({"role": "user", "content": "Step 1."})
        assert (
            "needed_budget" not in json.loads(client.post(evoke_recover=[]).body)["usage"]["evoke"]
        )


def test_what_fits_the_budget_stays_in_the_cache(port: int) -> None:
    """The system prompt takes most of the budget, and all of it stays visible by default."""
    with proxy(port, policy__budget=1300) as running:
        client = agent(running, "fits")
        for number in range(12):
            client.say(f"Step {number}. {FILLER}")
        (conversation,) = [each for server in running.servers for each in server.conversations]
        view = conversation.session.decided.view  # type: ignore[union-attr]
        system = [block.span for block in view.blocks if block.message == 0]
        ranges = json.loads(ask(port, "GET", "/slots/0/blocks").body)["resident"]
        assert len(view.blocks) and view.n_tokens > 1300
        assert all(any(a <= s.start and s.end <= b for a, b in ranges) for s in system)
        assert running.metric("evoke_full_turns_total") == 0


def test_whole_prompts_that_together_exceed_shared_cells_do_not_fail() -> None:
    options = ("-np", "2", "-c", "2560", "-kvu", "--evoke-ram", "64")
    with (
        llama_server(server_binary(patched=True), *options) as port,
        proxy(port, policy__budget=BUDGET, policy__within_turn="full") as running,
    ):

        def post(number: int) -> int:
            body = {
                "messages": [
                    {"role": "system", "content": f"{number} {SYSTEM} {SYSTEM}"},
                    {"role": "user", "content": "Go."},
                ],
                "max_tokens": 64,
            }
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {number}"}
            data = json.dumps(body).encode()
            return ask(running.port, "POST", "/v1/chat/completions", data, headers).status

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(post, range(4))) == [200] * 4


def test_the_start_says_which_budget_recorded_conversations_need(
    port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = {"snapshots__directory": str(tmp_path)}
    with proxy(port, policy__budget=BUDGET, **directory) as running:
        client = agent(running, "recorded")
        client.say(f"Step 1. {FILLER}")
        prompt = client.say(f"Step 2. {FILLER}").accounting["n_prompt"]
        running.wait_for_background()
    said = "1 recorded conversations exceed their budget"
    for budget in (BUDGET, 4096):
        caplog.clear()
        with proxy(port, policy__budget=budget, **directory):
            messages = [record.getMessage() for record in caplog.records]
            (needed,) = [text for text in messages if said in text] or [""]
        assert bool(needed) == (budget == BUDGET)
        if needed:
            (tokens,) = re.findall(r"policy.budget to (\d+) tokens", needed)
            assert BUDGET < int(tokens) < prompt + 512
    assert said not in caplog.text
