"""A short run of the agent bench: recovered rows are bit-identical to the decoded ones."""

from __future__ import annotations

from harness import proxy

from bench import agent
from bench.llama import running
from bench.random_models import SHAPES, ensure
from bench.watched import Watch
from evoke_proxy.adapters.metrics import TOKEN_KINDS
from evoke_proxy.server_build import ensure_server

# Room for the agent's prompt, tools and rules, and for the file that it works on.
BUDGET, STEPS = 2048, 12


def test_recovered_rows_of_an_agent_are_bit_identical_to_decoded_rows() -> None:
    model = ensure(SHAPES["long-2"])
    with running(ensure_server(), model, *agent.server_options(65536)) as llama:
        with proxy(llama.port, policy__budget=BUDGET) as front:
            watch = Watch.of("evoke", llama)
            agent.run(agent.script(1, STEPS), llama, front.port, watch)
            for reason in ("stale_block", "books_differ", "held_row"):
                assert front.metric("evoke_plan_failures_total", reason=reason) == 0
    turns, witness = watch.turns, watch.witness
    assert turns[-1]["prompt"] > 2 * BUDGET
    for turn in turns:
        assert turn["peak"] <= BUDGET
        assert sum(turn[kind] for kind in TOKEN_KINDS) == turn["prompt"]
    assert witness.n_returned > 200
    assert witness.differ == 0
    rereads = [turn for turn in turns if turn["file_rows"]]
    assert {turn["kind"] for turn in rereads} == {"edit", "read"}
    assert all(turn["file_there"] == turn["file_rows"] for turn in rereads)
    assert any(turn["file_back"] for turn in rereads)
