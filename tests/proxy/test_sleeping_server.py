"""A llama-server that sleeps: reading its state does not wake it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from fake_upstream import Exchange, fake_upstream, response
from harness import RunningProxy, ask, llama_server, proxy, server_binary, until

BUDGET = 320
# Longer than any pause between the turns of a conversation that it is to be awake for.
DROWSY = ("--sleep-idle-seconds", "2")
LOOKED_AT = ("/metrics", "/evoke/ready", "/evoke/health", "/evoke/sessions", "/props", "/health")


@pytest.fixture(scope="module", params=[False, True], ids=["stock", "patched"])
def sleepy(request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    """The port of a server that falls asleep after a while, and whether it is patched."""
    patched: bool = request.param
    options = ["-np", "1", "--metrics", *DROWSY]
    options += ["--evoke-ram", "64"] if patched else []
    with llama_server(server_binary(patched=patched), *options) as port:
        yield port, patched


def _sleeps(port: int) -> bool:
    return json.loads(ask(port, "GET", "/props").body)["is_sleeping"] is True


def _metrics_of_one_woken(running: RunningProxy) -> bytes:
    woken = ask(running.port, "POST", "/completion", b'{"prompt":"a","n_predict":1}')
    assert woken.status == 200
    return ask(running.port, "GET", "/metrics").body


def _await_sleep(port: int) -> None:
    until(lambda: _sleeps(port), "it falls asleep")


def test_admin_requests_do_not_wake_the_server(sleepy: tuple[int, bool]) -> None:
    port, _ = sleepy
    with proxy(port) as running:
        until(lambda: b"llamacpp:prompt_tokens_total" in _metrics_of_one_woken(running))
        _await_sleep(port)
        for _ in range(3):
            for path in LOOKED_AT:
                assert ask(running.port, "GET", path).status == 200
            assert _sleeps(port)
        asleep = ask(running.port, "GET", "/metrics")
        assert b"evoke_build_info" in asleep.body and b"llamacpp:prompt_tokens_total" in asleep.body
        direct = ask(port, "GET", "/metrics")
        assert (
            asleep.headers["process-start-time-unix"] == direct.headers["process-start-time-unix"]
        )
        assert _sleeps(port)


def test_a_server_woken_by_a_scrape_is_not_scraped_again_while_it_sleeps() -> None:
    """Earlier versions of llama-server are woken by it."""
    asleep, awake = b'{"total_slots":1,"is_sleeping":true}', b'{"total_slots":1}'

    async def wake(exchange: Exchange) -> None:
        fake.props = awake
        await exchange.send(response(b"llamacpp:n 1\n"))

    with fake_upstream(wake) as fake, proxy(fake.port) as running:
        for number in range(3):
            fake.props = asleep
            body = ask(running.port, "GET", "/metrics").body
            assert body.startswith(b"# llama-server sleeps" if number else b"llamacpp:n 1")
        assert len(fake.requests) == 1


def test_a_starting_proxy_does_not_wake_the_server(sleepy: tuple[int, bool]) -> None:
    port, patched = sleepy
    _await_sleep(port)
    with proxy(port) as running:
        assert running.gateway.info.patched == patched
        assert ask(running.port, "GET", "/evoke/ready").status == 200
        assert _sleeps(port)


def test_blocks_lost_during_sleep_are_decoded_again(sleepy: tuple[int, bool]) -> None:
    port, patched = sleepy
    with proxy(port, policy__writeback=False) as running:
        before, woken, then = _over_a_sleep(running, port)
        # Nothing of the cache was left; the turn after that goes on from it again.
        assert before["prompt_n"] < 40 and then["prompt_n"] < 40
        assert woken["cache_n"] == 0
        assert woken["prompt_n"] > 1.2 * BUDGET
        assert then["cache_n"] > BUDGET / 2
        assert ("evoke" in then) == patched
        if patched:
            _check_accounting(running, woken["evoke"], then["evoke"])
        else:
            assert then["cache_n"] + then["prompt_n"] > woken["prompt_n"]
            assert running.metric("evoke_bypass_total", reason="unpatched") == 7


def test_blocks_copied_before_sleep_are_recovered_by_a_copy() -> None:
    options = ["-np", "1", *DROWSY, "--evoke-ram", "64"]
    with llama_server(server_binary(patched=True), *options) as port, proxy(port) as running:
        before, woken, then = _over_a_sleep(running, port)
        accounting = woken["evoke"]
        assert accounting["resident_before"] == 0
        # All that was there when it fell asleep, but for what the question displaced.
        assert accounting["recovered"] == woken["cache_n"] > 0.9 * before["cache_n"]
        assert woken["prompt_n"] < 40 and then["prompt_n"] < 40
        _check_accounting(running, accounting, then["evoke"])


def _over_a_sleep(running: RunningProxy, port: int) -> tuple[dict[str, Any], ...]:
    """What the server says of a conversation's last turn before it slept, and of the two after."""
    talk = ChatClient(running.port, "dream", {"evoke_budget": BUDGET})
    for number in range(4):
        talk.say(f"Turn {number}. {FILLER}")
    before = _timings(talk, "Still here?")
    _await_sleep(port)
    return before, _timings(talk, "Are you awake?"), _timings(talk, "Go on.")


def _timings(talk: ChatClient, text: str) -> dict[str, Any]:
    """One more turn, and what the server says about it."""
    talk.messages.append({"role": "user", "content": text})
    answer = talk.post()
    assert answer.status == 200, answer.body
    reply = json.loads(answer.body)
    talk.messages.append(reply["choices"][0]["message"])
    found: dict[str, Any] = reply["timings"]
    return found


def _check_accounting(running: RunningProxy, *turns: dict[str, Any]) -> None:
    for accounting in turns:
        assert accounting["marker"] == "ok"
        assert accounting["n_resident_peak"] <= BUDGET
    assert running.metric("evoke_degraded_total", stage="plan") == 0
    assert running.metric("evoke_budget_breach_total") == 0
