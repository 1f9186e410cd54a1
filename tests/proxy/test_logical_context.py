"""Sessions longer than the cells of their slot (`--ctx-logical`), through the proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from conversation import ChatClient
from harness import llama_server, proxy, server_binary

from bench.random_models import SHAPES, ensure
from evoke_proxy.core.model.blocks import Span

CELLS, LOGICAL, BUDGET, TURNS = 8192, 80_000, 6000, 14
WORDS = "river mountain machine garden letter engine window teacher forest market".split()


@pytest.fixture(scope="module")
def long_port() -> Iterator[int]:
    """The port of a patched server whose context is ten times its cells; random two-layer model."""
    model = str(ensure(SHAPES["long-2"]))
    options = ("-m", model, "-np", "1", "--evoke-ram", "128", "--ctx-logical", str(LOGICAL))
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


def passage(turn: int, words: int) -> str:
    return f"Part {turn}. " + " ".join(WORDS[(i * i + turn) % 10] for i in range(words))


def test_a_session_of_66k_tokens_runs_in_8k_cells_under_a_budget(long_port: int) -> None:
    with proxy(long_port, policy__budget=BUDGET) as running:
        client = ChatClient(running.port, "long")
        turns = [client.say(passage(turn, 4800)).accounting for turn in range(TURNS)]
        for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
            assert running.metric(untouched) == 0
    assert turns[-1]["n_prompt"] > 66_000
    for accounting in turns:
        assert accounting["marker"] == "ok"
        assert accounting["n_resident_peak"] <= BUDGET
        assert accounting["budget_breaches"] == 0
        kinds = ("resident_before", "recovered", "decoded", "omitted")
        assert sum(accounting[kind] for kind in kinds) == accounting["n_prompt"]
    assert sum(accounting["decoded"] for accounting in turns) < 1.02 * turns[-1]["n_prompt"]


def test_a_session_without_a_budget_records_what_llama_server_evicts(long_port: int) -> None:
    """llama-server evicts when its cells are full, and reports it; no session had this text."""
    with proxy(long_port, policy__budget="off") as running:
        client = ChatClient(running.port, "free")
        first = client.say(passage(TURNS, 9000)).accounting
        second = client.say("And then?").accounting
        (conversation,) = [each for each in running.gateway.conversations if each.name == "free"]
        layout = conversation.session.layout
    spans = [(p0, p1) for p0, p1, _ in first["auto_evicted"]]
    evicted = Span(spans[0][0], spans[-1][1])
    assert sum(p1 - p0 for p0, p1 in spans) == len(evicted) > 800
    inside = layout.blocks.within([evicted])
    assert inside.sum() > 8
    assert not (inside & layout.in_cache).any()
    assert layout.in_cache.sum() > 64
    assert second["decoded"] < 100
    assert second["omitted"] >= len(evicted)


def test_a_prompt_beyond_the_logical_context_gets_the_error_of_llama_server(long_port: int) -> None:
    with proxy(long_port, policy__budget=BUDGET) as running:
        client = ChatClient(running.port, "endless")
        before = client.say(passage(0, 300)).accounting
        client.messages.append({"role": "user", "content": passage(1, LOGICAL)})
        answer = client.post()
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["type"]) == (400, "exceed_context_size_error")
        assert f"exceeds the available context size ({LOGICAL} tokens)" in error["message"]
        assert running.metric("evoke_bypass_total", reason="too_long") == 1
        assert running.metric("evoke_degraded_total") == 0
        client.messages.pop()
        after = client.say("Shorter, then.").accounting
    assert after["marker"] == "ok"
    assert after["resident_before"] >= before["n_prompt"]
