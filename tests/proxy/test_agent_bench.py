"""A short run of the agent bench: recovered rows are bit-identical to the decoded ones."""

from __future__ import annotations

from harness import proxy

from bench import agent
from evoke_proxy.adapters.metrics import TOKEN_KINDS

# Room for the agent's prompt, tools and rules, and for the file that it works on.
BUDGET, STEPS = 2048, 12


def test_recovered_rows_of_an_agent_are_bit_identical_to_decoded_rows() -> None:
    with agent.served(None) as (upstream, folder), proxy(upstream) as running:
        session = agent.Session.begin(upstream, running.port, "evoke", BUDGET, folder)
        turns = session.run(agent.script(1, STEPS))
        for reason in ("stale_block", "books_differ", "held_row"):
            assert running.metric("evoke_plan_failures_total", reason=reason) == 0
    assert turns[-1]["n_prompt"] > 2 * BUDGET
    for turn in turns:
        assert turn["peak"] <= BUDGET
        assert sum(turn[kind] for kind in TOKEN_KINDS) == turn["n_prompt"]
    assert session.witness.n_returned > 200
    assert session.witness.differ == 0
    rereads = [turn for turn in turns if turn["file_rows"]]
    assert {turn["kind"] for turn in rereads} == {"edit", "read"}
    assert all(turn["file_there"] == turn["file_rows"] for turn in rereads)
    assert any(turn["file_back"] for turn in rereads)
