"""A llama-server that sleeps when idle: monitoring does not wake it, and sessions continue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from fake_upstream import Exchange, fake_upstream, response
from harness import RunningProxy, ask, llama_server, proxy, server_binary, until

BUDGET = 320
# Longer than any pause between two turns of a test.
SLEEP_OPTIONS = ("--sleep-idle-seconds", "2")
MONITORING_PATHS = (
    "/metrics",
    "/evoke/ready",
    "/evoke/health",
    "/evoke/sessions",
    "/props",
    "/health",
)


@pytest.fixture(scope="module", params=[False, True], ids=["stock", "patched"])
def sleeping_server(request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    """The port of a server that sleeps when idle, and whether it is patched."""
    patched: bool = request.param
    options = ["-np", "1", "--metrics", *SLEEP_OPTIONS]
    options += ["--evoke-ram", "64"] if patched else []
    with llama_server(server_binary(patched=patched), *options) as port:
        yield port, patched


def _sleeps(port: int) -> bool:
    return json.loads(ask(port, "GET", "/props").body)["is_sleeping"] is True


def _wake_and_scrape(running: RunningProxy) -> bytes:
    after_sleep = ask(running.port, "POST", "/completion", b'{"prompt":"a","n_predict":1}')
    assert after_sleep.status == 200
    return ask(running.port, "GET", "/metrics").body


def _await_sleep(port: int) -> None:
    until(lambda: _sleeps(port), "the server sleeps")


def test_monitoring_requests_do_not_wake_the_server(sleeping_server: tuple[int, bool]) -> None:
    port, _ = sleeping_server
    with proxy(port) as running:
        until(lambda: b"llamacpp:prompt_tokens_total" in _wake_and_scrape(running))
        _await_sleep(port)
        for _ in range(3):
            for path in MONITORING_PATHS:
                assert ask(running.port, "GET", path).status == 200
            assert _sleeps(port)
        asleep = ask(running.port, "GET", "/metrics")
        assert b"evoke_build_info" in asleep.body and b"llamacpp:prompt_tokens_total" in asleep.body
        direct = ask(port, "GET", "/metrics")
        assert (
            asleep.headers["process-start-time-unix"] == direct.headers["process-start-time-unix"]
        )
        assert _sleeps(port)


def test_a_server_that_wakes_when_scraped_is_scraped_only_once_while_it_sleeps() -> None:
    """A scrape wakes earlier versions of llama-server."""
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


def test_a_starting_proxy_does_not_wake_the_server(sleeping_server: tuple[int, bool]) -> None:
    port, patched = sleeping_server
    _await_sleep(port)
    with proxy(port) as running:
        assert running.gateway.info.patched == patched
        assert ask(running.port, "GET", "/evoke/ready").status == 200
        assert _sleeps(port)


def test_blocks_without_copies_are_decoded_after_sleep(sleeping_server: tuple[int, bool]) -> None:
    port, patched = sleeping_server
    with proxy(port, policy__writeback=False) as running:
        before, after_sleep, next_turn = _turns_around_sleep(running, port)
        # No row is left after sleep; the turn after that uses the cache again.
        assert before["prompt_n"] < 40 and next_turn["prompt_n"] < 40
        assert next_turn["cache_n"] > BUDGET / 2
        assert ("evoke" in next_turn) == patched
        if patched:
            # Blocks that were evicted before have copies, and are adopted.
            accounting = after_sleep["evoke"]
            # No row outlives sleep: those that are resident for the plan were decoded again.
            n_loaded = accounting["recovered"] + accounting["resident_before"]
            assert after_sleep["cache_n"] == n_loaded
            assert accounting["recovered"] > 0
            n_again = running.metric("evoke_tokens_decoded_again_total")
            assert accounting["resident_before"] <= n_again
            assert accounting["decoded"] > BUDGET / 2
            _check_accounting(running, accounting, next_turn["evoke"])
        else:
            assert after_sleep["cache_n"] == 0
            assert after_sleep["prompt_n"] > 1.2 * BUDGET
            assert next_turn["cache_n"] + next_turn["prompt_n"] > after_sleep["prompt_n"]
            assert running.metric("evoke_bypass_total", reason="unpatched") == 7


def test_blocks_with_copies_are_recovered_after_sleep() -> None:
    options = ["-np", "1", *SLEEP_OPTIONS, "--evoke-ram", "64"]
    with llama_server(server_binary(patched=True), *options) as port, proxy(port) as running:
        before, after_sleep, next_turn = _turns_around_sleep(running, port)
        accounting = after_sleep["evoke"]
        assert accounting["resident_before"] == 0
        # All rows that were resident before sleep, except those that the question displaced.
        assert accounting["recovered"] == after_sleep["cache_n"] > 0.9 * before["cache_n"]
        assert after_sleep["prompt_n"] < 40 and next_turn["prompt_n"] < 40
        _check_accounting(running, accounting, next_turn["evoke"])


def _turns_around_sleep(running: RunningProxy, port: int) -> tuple[dict[str, Any], ...]:
    """Return the timings of a conversation's last turn before sleep and of the two after."""
    client = ChatClient(running.port, "dream", {"evoke_budget": BUDGET})
    for number in range(4):
        client.say(f"Turn {number}. {FILLER}")
    before = _timings(client, "Still here?")
    _await_sleep(port)
    return before, _timings(client, "Are you awake?"), _timings(client, "Go on.")


def _timings(client: ChatClient, text: str) -> dict[str, Any]:
    """Send a turn; returns its timings."""
    client.messages.append({"role": "user", "content": text})
    answer = client.post()
    assert answer.status == 200, answer.body
    reply = json.loads(answer.body)
    client.messages.append(reply["choices"][0]["message"])
    timings: dict[str, Any] = reply["timings"]
    return timings


def _check_accounting(running: RunningProxy, *turns: dict[str, Any]) -> None:
    for accounting in turns:
        assert accounting["marker"] == "ok"
        assert accounting["n_resident_peak"] <= BUDGET
    assert running.metric("evoke_degraded_total", stage="plan") == 0
    assert running.metric("evoke_budget_breach_total") == 0
