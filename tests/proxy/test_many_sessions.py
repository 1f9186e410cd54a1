"""More sessions than slots: they take turns, continue, and do not mix."""

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
    """A fact, what has nothing to do with it and is larger than the budget, the question."""
    attribute = ATTRIBUTES[number % len(ATTRIBUTES)]
    rng = random.Random(number)
    fact = f"My {attribute} is {_marker(number)}."
    others = [paragraph(rng, 11) for _ in range(TURNS - 1)]
    return [fact, *others, f"What is my {attribute}?"]


def _talks(port: int) -> list[ChatClient]:
    system = {"role": "system", "content": SYSTEM}
    return [ChatClient(port, f"session-{i}", {"max_tokens": 16}, [system]) for i in range(SESSIONS)]


def _interleave(talks: Sequence[ChatClient]) -> list[list[TurnResult]]:
    """Every session's turns, round by round in another order each time."""
    rng = random.Random(1)
    said: list[list[TurnResult]] = [[] for _ in talks]
    for turn in range(TURNS + 1):
        for number in rng.sample(range(len(talks)), len(talks)):
            said[number].append(talks[number].say(_turns(number)[turn]))
    return said


def _check(said: list[list[TurnResult]], budget: int | None) -> None:
    for number, turns in enumerate(said):
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
        # The question and the generated end of what it goes on from, not the conversation.
        assert turns[-1].accounting["decoded"] < 64


@pytest.fixture(scope="module")
def alone(stock_port: int) -> list[str]:
    """The last answers of sessions that have a stock server for themselves."""
    answers = []
    for number, talk in enumerate(_talks(stock_port)):
        answers.append([talk.say(text).text for text in _turns(number)][-1])
    return answers


@pytest.fixture(scope="module", params=["-kvu", "-no-kvu"])
def two_slots(request: pytest.FixtureRequest) -> Iterator[int]:
    """A patched server with two slots in one stream of cells, or in one each."""
    options = ("-np", "2", request.param, "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


@pytest.mark.parametrize("budget", [BUDGET, None])
def test_sixteen_interleaved_sessions_do_not_mix(
    two_slots: int, alone: list[str], budget: int | None
) -> None:
    with proxy(two_slots, policy__budget=budget) as running:
        said = _interleave(_talks(running.port))
        _check(said, budget)
        assert [turns[-1].text for turns in said] == alone
        for stage in ("render", "session", "slot", "decide", "plan", "splice"):
            assert running.metric("evoke_degraded_total", stage=stage) == 0
        assert running.metric("evoke_budget_breach_total") == 0


def test_sixteen_at_once_wait_for_two_slots(two_slots: int) -> None:
    with proxy(two_slots, policy__budget=BUDGET) as running:
        talks = _talks(running.port)
        for turn in range(2):
            _all_at_once(talks, turn)
        last = [talk.messages[-1]["content"] for talk in talks]
        assert len(last) == SESSIONS
        assert running.metric("evoke_degraded_total", stage="plan") == 0
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        assert sorted(known["turns"] for known in sessions) == [2] * SESSIONS


def _all_at_once(talks: Sequence[ChatClient], turn: int) -> None:
    threads = [
        threading.Thread(target=talk.say, args=(_turns(number)[turn],))
        for number, talk in enumerate(talks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(talk.messages) == 3 + 2 * turn for talk in talks)


def test_rows_that_another_proxy_evicted_are_recovered(patched_port: int) -> None:
    messages = _conversation_with_holes(patched_port)
    with proxy(patched_port) as running:
        said = ChatClient(running.port, "long", messages=messages).say("Go on.")
        assert said.accounting["marker"] == "ok"
        assert said.accounting["omitted"] == 0
        # The server names the session of the slot and has copies of what is missing.
        assert said.accounting["recovered"] > 0
        assert 0 < said.accounting["decoded"] < said.accounting["resident_before"]
        assert running.metric("evoke_degraded_total", stage="decide") == 0


def test_rows_that_another_session_evicted_are_decoded(patched_proxy: RunningProxy) -> None:
    system = [{"role": "system", "content": f"You are an agent. {FILLER * 9}"}]
    one = ChatClient(patched_proxy.port, "one", {"evoke_budget": BUDGET}, list(system))
    one.say("Hello.")
    assert one.say("Go on.").accounting["omitted"] > 0
    other = ChatClient(patched_proxy.port, "other", messages=list(system)).say("Who are you?")
    assert other.accounting["omitted"] == 0
    assert other.accounting["marker"] == "ok"


def _conversation_with_holes(port: int) -> list[dict[str, str]]:
    """A conversation that has lost rows in the only slot."""
    with proxy(port, policy__budget=BUDGET) as running:
        talk = ChatClient(running.port, "long")
        turns = [talk.say(f"Turn {number}. {FILLER}") for number in range(5)]
        running.wait_until_idle()
    assert turns[-1].accounting["omitted"] > 0
    return talk.messages
