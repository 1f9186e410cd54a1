"""New conversations begin with the rows that others of their tenant have of the same text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask, llama_server, proxy, server_binary

JSON = {"Content-Type": "application/json"}
N_AGENTS = 10
SYSTEM = "You are a helpful assistant. " + "".join(f"Rule {i}: {FILLER}" for i in range(14))


@pytest.fixture(scope="module")
def four_slots_port() -> Iterator[int]:
    """The port of a patched llama-server with four slots of 4096 cells."""
    binary = server_binary(patched=True)
    options = ("-np", "4", "-no-kvu", "-c", "16384", "--evoke-ram", "128")
    with llama_server(binary, *options) as port:
        yield port


def ask_agent(running: RunningProxy, system: str, number: int) -> Mapping[str, Any]:
    """Send the first request of a sub-agent; returns the token accounting."""
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Task {number}: look at part {number}."},
    ]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    sent = JSON | {"X-Evoke-Session": f"agent {number}"}
    path = "/v1/chat/completions"
    answer = ask(running.port, "POST", path, json.dumps(body).encode(), sent)
    assert answer.status == 200, answer.body
    accounting: Mapping[str, Any] = json.loads(answer.body)["timings"]["evoke"]
    assert accounting["marker"] == "ok" and accounting["omitted"] == 0
    return accounting


@pytest.mark.parametrize("n_at_once", [1, N_AGENTS])
def test_sub_agents_decode_a_common_prefix_once(four_slots_port: int, n_at_once: int) -> None:
    """Ten on four slots, one after the other and all at once."""
    system = f"Run {n_at_once}. {SYSTEM}"
    with proxy(four_slots_port) as running, ThreadPoolExecutor(n_at_once) as pool:
        turns = list(pool.map(lambda i: ask_agent(running, system, i), range(N_AGENTS)))
        n_prompt = max(turn["n_prompt"] for turn in turns)
        assert n_prompt > 1500
        own = 40 * N_AGENTS  # the tokens after the system prompt, and less than a block before
        decoded = [turn["decoded"] for turn in turns]
        assert max(decoded) > 1500  # nobody had the prompt before
        assert sum(decoded) <= 1.05 * n_prompt + own, decoded
        assert running.metric("evoke_degraded_total", stage="share") == 0
        assert running.metric("evoke_budget_breach_total") == 0
        assert running.metric("evoke_shared_tokens_total") > 1500


def test_a_branch_begins_with_the_rows_of_its_session(four_slots_port: int) -> None:
    """The branch decodes its new text alone, and the session goes on as before."""
    with proxy(four_slots_port) as running:
        client = ChatClient(running.port, "main")
        client.messages[0]["content"] = SYSTEM
        client.say("Remember the number 7.")
        running.wait_until_idle()
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        (main,) = [each for each in sessions if each["name"] == "main"]
        path = f"/evoke/sessions/{main['id']}/fork"
        forked = ask(running.port, "POST", path, b'{"name": "branch"}', JSON)
        assert forked.status == 200 and json.loads(forked.body)["name"] == "branch"
        again = ask(running.port, "POST", path, b'{"name": "branch"}', JSON)
        assert again.status == 409 and json.loads(again.body)["error"]["code"] == "name_in_use"
        assert ask(running.port, "POST", path, b'{"name": "\\u00e9"}', JSON).status == 400
        branch = ChatClient(running.port, "branch", messages=list(client.messages))
        assert branch.say("Which number?").accounting["decoded"] < 100
        assert client.say("Say it again.").accounting["decoded"] < 100
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        turns = {each["name"]: each["turns"] for each in sessions}
        assert turns == {"main": 2, "branch": 1}
