"""Clients that disconnect, edit and send invalid requests, on memories without rollback."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from conversation import ChatClient, endless
from harness import RunningProxy, ask, llama_server, proxy, server_binary

from bench.random_models import SHAPES, ensure

BUDGET = 320
KINDS = ("resident_before", "recovered", "decoded", "omitted")
STEPS = 14
WRONG = (
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
    """One client's steps, drawn from its number; returns what went wrong in words."""
    rng = random.Random(number)
    talk = ChatClient(port, f"client {number}")
    wrong = []
    for step in range(STEPS):
        kind = rng.choice(["say", "say", "say", "leave", "leave early", "edit", "nonsense"])
        text = f"Step {step} of {number}. " + "the quick brown fox jumps over it. " * rng.randint(
            1, 9
        )
        if kind == "nonsense":
            body = rng.choice(WRONG)
            answer = ask(port, "POST", "/v1/chat/completions", body, talk.headers)
            if not 400 <= answer.status < 500:
                wrong.append(f"{body!r} was answered with {answer.status}: {answer.body!r}")
        elif kind == "leave":
            with endless(port, talk.session, messages=[*talk.messages, said(text)]):
                pass
        elif kind == "leave early":
            leave_before_the_answer(port, talk, text)
        else:
            if kind == "edit" and len(talk.messages) > 4:
                place = rng.randrange(1, len(talk.messages) - 1, 2)
                talk.messages[place] = said("Edited. " + text)
                del talk.messages[place + 1 :]
                talk.messages.append({"role": "assistant", "content": "Fine."})
            accounting = talk.say(text).accounting
            if sum(accounting[each] for each in KINDS) != accounting["n_prompt"]:
                wrong.append(f"accounting does not balance: {accounting}")
            if accounting["n_resident_peak"] > BUDGET:
                wrong.append(f"more resident than the budget: {accounting}")
    return wrong


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def leave_before_the_answer(port: int, talk: ChatClient, text: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = talk.body(messages=[*talk.messages, said(text)], stream=True, max_tokens=200)
    connection.request("POST", "/v1/chat/completions", body, talk.headers)
    connection.close()


def test_hostile_clients_leave_slots_accounting_and_each_other_intact(port: int) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        with ThreadPoolExecutor(3) as pool:
            for wrong in pool.map(lambda number: hostile_client(running.port, number), range(3)):
                assert wrong == []
        running.settled()
        assert_everything_is_free(running, port)
        talks = [ChatClient(running.port, f"after {number}") for number in range(2)]
        for talk in talks:
            assert talk.say("hello").accounting["marker"] == "ok"
        assert running.metric("evoke_budget_breach_total") == 0


def assert_everything_is_free(running: RunningProxy, port: int) -> None:
    """No slot computes, the proxy is ready, and both slots serve a request at the same time."""
    slots = json.loads(ask(port, "GET", "/slots").body)
    assert not any(slot["is_processing"] for slot in slots)
    assert ask(running.port, "GET", "/evoke/ready").status == 200
    with endless(running.port, "first"), endless(running.port, "second"):
        slots = json.loads(ask(port, "GET", "/slots").body)
        assert all(slot["is_processing"] for slot in slots)
    running.settled()
