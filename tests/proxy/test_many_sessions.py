"""More sessions than slots: they take turns in the slots, continue, and do not mix."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence

import pytest
from conversation import FILLER, ChatClient, TurnResult
from harness import RunningProxy, ask, llama_server, proxy, server_binary

from evoke_proxy.demo.session import SYSTEM, paragraph

SESSIONS, TURNS, BUDGET = 16, 3, 256
ATTRIBUTES = ("favorite number", "lucky number", "badge number", "seat number")


def _marker(number: int) -> str:
    return str(20_011 + 3571 * number)


def _turns(number: int) -> list[str]:
    """Return a fact, unrelated text that is longer than the budget, and the question."""
    attribute = ATTRIBUTES[number % len(ATTRIBUTES)]
    rng = random.Random(number)
    fact = f"My {attribute} is {_marker(number)}."
    others = [paragraph(rng, 11) for _ in range(TURNS - 1)]
    return [fact, *others, f"What is my {attribute}?"]


def _make_clients(port: int) -> list[ChatClient]:
    system = {"role": "system", "content": SYSTEM}
    return [ChatClient(port, f"session-{i}", {"max_tokens": 16}, [system]) for i in range(SESSIONS)]


def _interleave(clients: Sequence[ChatClient]) -> list[list[TurnResult]]:
    """Run every session's turns, each round in another order."""
    rng = random.Random(1)
    results: list[list[TurnResult]] = [[] for _ in clients]
    for turn in range(TURNS + 1):
        for number in rng.sample(range(len(clients)), len(clients)):
            results[number].append(clients[number].say(_turns(number)[turn]))
    return results


def _check(results: list[list[TurnResult]], budget: int | None) -> None:
    """Check the recall, the token accounting and the budget of every session."""
    for number, turns in enumerate(results):
        others = {_marker(other) for other in range(SESSIONS)} - {_marker(number)}
        assert not any(other in turn.text for turn in turns for other in others)
        assert _marker(number) in turns[-1].text
        for turn in turns:
            accounting = turn.accounting
            assert accounting["marker"] == "ok"
            kinds = ("resident_before", "recovered", "decoded", "omitted")
            assert sum(accounting[kind] for kind in kinds) == accounting["n_prompt"]
            assert accounting["n_resident_peak"] <= (budget or 8192)
            assert budget or accounting["omitted"] == 0
        assert budget is None or turns[-1].accounting["n_prompt"] > budget
        # The question and the end of the last answer, not the conversation.
        assert turns[-1].accounting["decoded"] < 64


@pytest.fixture(scope="module")
def expected_answers(stock_port: int) -> list[str]:
    """The last answer of each session, run on a stock server without the others."""
    answers = []
    for number, client in enumerate(_make_clients(stock_port)):
        answers.append([client.say(text).text for text in _turns(number)][-1])
    return answers


@pytest.fixture(scope="module", params=["-kvu", "-no-kvu"])
def two_slots(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a patched server with two slots, whose cells are shared or separate."""
    options = ("-np", "2", request.param, "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


@pytest.mark.parametrize("budget", [BUDGET, None])
def test_sixteen_interleaved_sessions_do_not_mix(
    two_slots: int, expected_answers: list[str], budget: int | None
) -> None:
    with proxy(two_slots, policy__budget=budget) as running:
        results = _interleave(_make_clients(running.port))
        _check(results, budget)
        assert [turns[-1].text for turns in results] == expected_answers
        for stage in ("render", "session", "slot", "decide", "plan", "splice"):
            assert running.metric("evoke_degraded_total", stage=stage) == 0
        assert running.metric("evoke_budget_breach_total") == 0


def test_sixteen_concurrent_sessions_wait_for_two_slots(two_slots: int) -> None:
    with proxy(two_slots, policy__budget=BUDGET) as running:
        clients = _make_clients(running.port)
        for turn in range(2):
            _run_concurrently(clients, turn)
        last = [client.messages[-1]["content"] for client in clients]
        assert len(last) == SESSIONS
        assert running.metric("evoke_degraded_total", stage="plan") == 0
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        assert sorted(session["turns"] for session in sessions) == [2] * SESSIONS


def _run_concurrently(clients: Sequence[ChatClient], turn: int) -> None:
    threads = [
        threading.Thread(target=client.say, args=(_turns(number)[turn],))
        for number, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(client.messages) == 3 + 2 * turn for client in clients)


def test_rows_evicted_by_an_earlier_proxy_are_recovered(patched_port: int) -> None:
    messages = _conversation_with_holes(patched_port)
    with proxy(patched_port) as running:
        result = ChatClient(running.port, "long", messages=messages).say("Go on.")
        assert result.accounting["marker"] == "ok"
        assert result.accounting["omitted"] == 0
        # The server reports the session of the slot, and has saved the evicted blocks.
        assert result.accounting["recovered"] > 0
        assert 0 < result.accounting["decoded"] < result.accounting["resident_before"]
        assert running.metric("evoke_degraded_total", stage="decide") == 0


def test_rows_evicted_by_another_session_are_decoded(patched_proxy: RunningProxy) -> None:
    system = [{"role": "system", "content": f"You are an agent. {FILLER * 9}"}]
    one = ChatClient(patched_proxy.port, "one", {"evoke_budget": BUDGET}, list(system))
    one.say("Hello.")
    assert one.say("Go on.").accounting["omitted"] > 0
    other = ChatClient(patched_proxy.port, "other", messages=list(system)).say("Who are you?")
    assert other.accounting["omitted"] == 0
    assert other.accounting["marker"] == "ok"


def _conversation_with_holes(port: int) -> list[dict[str, str]]:
    """Return the messages of a conversation whose rows in the only slot have holes."""
    with proxy(port, policy__budget=BUDGET) as running:
        client = ChatClient(running.port, "long")
        turns = [client.say(f"Turn {number}. {FILLER}") for number in range(5)]
        running.wait_until_idle()
    assert turns[-1].accounting["omitted"] > 0
    return client.messages
