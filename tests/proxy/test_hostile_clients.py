"""Clients that disconnect, edit their history and send invalid requests.

The models have memory that cannot be rolled back: recurrent states and sliding windows.
"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from conversation import ChatClient, endless_stream
from harness import RunningProxy, ask, llama_server, proxy, server_binary

from bench.random_models import SHAPES, ensure

BUDGET = 320
KINDS = ("resident_before", "recovered", "decoded", "omitted")
STEPS = 14
INVALID_BODIES = (
    b'{"messages": 7}',
    b'{"messages": [{"role": "user", "content": "x"}], "evoke_budget": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "evoke_budget": "many"}',
    b'{"messages": [[]]}',
)


@pytest.fixture(scope="module", params=["tiny-jamba", "tiny-qwen35", "tiny-gemma"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A patched llama-server with two slots and a model of random weights."""
    options = ("-np", "2", "-no-kvu", "-c", "8192", "--evoke-ram", "32")
    model = ensure(SHAPES[request.param])
    with llama_server(server_binary(patched=True), *options, model=model) as served:
        yield served


def hostile_client(port: int, number: int) -> list[str]:
    """Run the random steps of one client, seeded by its number; returns descriptions of faults."""
    rng = random.Random(number)
    client = ChatClient(port, f"client {number}")
    faults = []
    for step in range(STEPS):
        kind = rng.choice(["say", "say", "say", "leave", "leave early", "edit", "nonsense"])
        text = f"Step {step} of {number}. " + "the quick brown fox jumps over it. " * rng.randint(
            1, 9
        )
        if kind == "nonsense":
            body = rng.choice(INVALID_BODIES)
            answer = ask(port, "POST", "/v1/chat/completions", body, client.headers)
            if not 400 <= answer.status < 500:
                faults.append(f"{body!r} was answered with {answer.status}: {answer.body!r}")
        elif kind == "leave":
            with endless_stream(
                port, client.session, messages=[*client.messages, user_message(text)]
            ):
                pass
        elif kind == "leave early":
            disconnect_before_the_answer(port, client, text)
        else:
            if kind == "edit" and len(client.messages) > 4:
                index = rng.randrange(1, len(client.messages) - 1, 2)
                client.messages[index] = user_message("Edited. " + text)
                del client.messages[index + 1 :]
                client.messages.append({"role": "assistant", "content": "Fine."})
            accounting = client.say(text).accounting
            if sum(accounting[each] for each in KINDS) != accounting["n_prompt"]:
                faults.append(f"accounting does not balance: {accounting}")
            if accounting["n_resident_peak"] > BUDGET:
                faults.append(f"more resident than the budget: {accounting}")
    return faults


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def disconnect_before_the_answer(port: int, client: ChatClient, text: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = client.body(messages=[*client.messages, user_message(text)], stream=True, max_tokens=200)
    connection.request("POST", "/v1/chat/completions", body, client.headers)
    connection.close()


def test_hostile_clients_leave_slots_accounting_and_each_other_intact(port: int) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        with ThreadPoolExecutor(3) as pool:
            for faults in pool.map(lambda number: hostile_client(running.port, number), range(3)):
                assert faults == []
        running.wait_for_background()
        assert_all_slots_are_free(running, port)
        clients = [ChatClient(running.port, f"after {number}") for number in range(2)]
        for client in clients:
            assert client.say("hello").accounting["marker"] == "ok"
        assert running.metric("evoke_budget_breach_total") == 0


def assert_all_slots_are_free(running: RunningProxy, port: int) -> None:
    """Check that the proxy is ready, no slot computes, and both can run a request at once."""
    slots = json.loads(ask(port, "GET", "/slots").body)
    assert not any(slot["is_processing"] for slot in slots)
    assert ask(running.port, "GET", "/evoke/ready").status == 200
    with endless_stream(running.port, "first"), endless_stream(running.port, "second"):
        slots = json.loads(ask(port, "GET", "/slots").body)
        assert all(slot["is_processing"] for slot in slots)
    running.wait_for_background()
