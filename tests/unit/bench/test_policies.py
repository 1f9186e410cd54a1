"""The baseline policies, on layouts of a few blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_fixtures import resident_after
from policy_fixtures import CONFIG, FILLER, block_view, moves_of

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import blocks_named, unknown_names
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy import registry
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.errors import ConfigError

FACT = "the oslo vault code is 48213"
QUESTION = "what is the oslo vault code?"


def config(name: str, **settings: object) -> PolicyConfig:
    return replace(CONFIG, name=name, **settings)  # type: ignore[arg-type]


def decide(view: PolicyView, config: PolicyConfig, query: str = "", **fields: object) -> Plan:
    return registry.decide(view, replace(Query.of(query), **fields), config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "resident"), [("recency", "3 4 5 6 7"), ("streaming", "0 4 5 6 7")]
)
def test_recency_and_streaming_keep_the_newest_blocks(name: str, resident: str) -> None:
    view = block_view([FACT, *FILLER[1:8]], "rrrrrrrr", tail=128)
    plan = decide(view, config(name), QUESTION)
    assert resident_after(view, plan) == resident
    assert not plan.saves and not plan.loads
    assert plan.stream is not None
    assert [victim.label for victim in plan.stream.order] == [
        f"s/{n}" for n in resident.split() if int(n)
    ]


@pytest.mark.parametrize("name", ["recency", "streaming", "discard", "breadcrumb"])
def test_policies_without_recovery_never_load_a_block(name: str) -> None:
    view = block_view([FILLER[0], FACT, *FILLER[2:8]], "rsrrrrrr")
    plan = decide(view, config(name), QUESTION, requested=("user:01",))
    assert not plan.loads and not plan.saves
    assert "s/1" in {drop.label for drop in plan.drops}


def test_the_recency_window_has_no_holes_even_if_a_small_block_would_fit() -> None:
    view = block_view(FILLER[:8], "rrrrrrrr")
    first, *others = view.blocks
    small = replace(first, span=Span(0, 20))
    widened = replace(others[0], span=Span(20, 128))
    blocks = type(view.blocks)([small, widened, *others[1:]])
    plan = decide(replace(view, blocks=blocks), config("recency"))
    # 12 tokens of the budget remain, 32 with a smaller reserve: block 0 does not get them
    assert resident_after(view, plan) == "2 3 4 5 6 7"
    more = decide(replace(view, blocks=blocks, max_tokens=44), config("recency"))
    assert resident_after(view, more) == "2 3 4 5 6 7"


def test_recency_keeps_a_pinned_block() -> None:
    view = block_view(FILLER[:8], "rrrrrrrr", pins="1", tail=128)
    assert resident_after(view, decide(view, config("recency"))) == "1 4 5 6 7"


def test_infllm_loads_k_blocks_and_spends_the_rest_on_its_window() -> None:
    texts = [FILLER[0], f"{FACT} one", f"{FACT} two", f"{FACT} three", *FILLER[4:10]]
    view = block_view(texts, "rsssrrrrrr", tail=64)
    for k, resident in ((1, 1), (2, 2), (8, 3)):
        plan = decide(view, config(f"infllm_k{k}"), QUESTION)
        kept = resident_after(view, plan).split()
        assert len(set(kept) & {"1", "2", "3"}) == len(plan.loads) == resident
        assert len(kept) == 6
        newest = [n for n in kept if n not in ("0", "1", "2", "3")]
        assert newest == [str(n) for n in range(10 - len(newest), 10)]


def test_infllm_loads_nothing_without_a_match() -> None:
    view = block_view([FILLER[0], FACT, *FILLER[2:9]], "rsrrrrrrr", tail=64)
    assert resident_after(view, decide(view, config("infllm"), "zzz")) == "0 4 5 6 7 8"


def test_infllm_always_keeps_a_window() -> None:
    view = block_view([FACT + f" {n}" for n in range(12)], "r" * 12, tail=64)
    kept = resident_after(view, decide(view, config("infllm_k50"), QUESTION))
    assert "10" in kept.split() and "11" in kept.split()


def test_bm25_fills_the_budget_with_the_blocks_that_share_most_words() -> None:
    texts = [FILLER[0], f"{FACT} one", FILLER[2], f"{FACT} three", *FILLER[4:10]]
    view = block_view(texts, "rsssrrrrrr", tail=64)
    plan = decide(view, config("bm25"), QUESTION)
    assert {load.label for load in plan.loads} == {"s/1", "s/3"}
    assert len(resident_after(view, plan).split()) == 6
    assert not decide(view, config("bm25"), "zzz").loads


def test_random_fills_the_budget_with_other_blocks_each_turn() -> None:
    view = block_view([FACT, *FILLER[1:10]], "r" * 10, tail=64)
    kept = {
        resident_after(
            replace(view, n_tokens=view.n_tokens + n),
            decide(replace(view, n_tokens=view.n_tokens + n), config("random"), QUESTION),
        )
        for n in range(8)
    }
    assert len(kept) > 1
    again = resident_after(view, decide(view, config("random"), QUESTION))
    assert again == resident_after(view, decide(view, config("random"), QUESTION))


@pytest.mark.parametrize("gold", [(1,), ("user:01",), ("user:01#0",)])
def test_the_oracle_loads_the_gold_blocks(gold: tuple[str | int, ...]) -> None:
    texts = [FILLER[0], FILLER[1], FACT, f"{FACT} repeated", *FILLER[4:9]]
    view = block_view(texts, "rsssrrrrr", tail=64)
    plan = decide(view, config("oracle"), QUESTION, gold=gold)
    evoke = decide(view, config("evoke"), QUESTION)
    assert {load.label for load in evoke.loads} == {"s/2", "s/3"}
    assert {load.label for load in plan.loads} == {"s/1", "s/2", "s/3"}


@pytest.mark.parametrize("states", ["rsssrrrrr", "rsbrsrrsr", "bbbssssrr"])
@pytest.mark.parametrize("gold", range(9))
def test_the_oracle_decides_like_evoke_if_evoke_has_the_answer(states: str, gold: int) -> None:
    view = block_view([FILLER[0], FACT, f"{FACT} again", *FILLER[3:9]], states, tail=64)
    evoke = resident_after(view, decide(view, config("evoke"), QUESTION))
    best = resident_after(view, decide(view, config("oracle"), QUESTION, gold=(gold,)))
    assert str(gold) in best.split()
    assert best == evoke or str(gold) not in evoke.split()


@pytest.mark.parametrize("name", ["evoke", "infllm"])
def test_a_block_that_the_client_requests_by_name_is_loaded(name: str) -> None:
    # The requested block is not a neighbour of the fact.
    view = block_view([FILLER[0], FACT, *FILLER[2:9]], "rsrrsrrrr", tail=64)
    plan = decide(view, config(name), QUESTION, requested=("user:04",))
    assert "+s/4" in moves_of(plan)
    assert "+s/4" not in moves_of(decide(view, config(name), QUESTION))


def test_a_block_is_found_by_its_display_name_its_file_or_an_alias() -> None:
    view = block_view(["a", "b"], "rr")
    first, second = view.blocks
    blocks = type(view.blocks)(
        [
            replace(
                first, display_name="file:a.py#0", aliases=("src/a.py", "a.py", "read", "call_1")
            ),
            second,
        ]
    )
    for name in ("file:a.py", "file:a.py#0", "src/a.py", "a.py", "call_1", 0):
        assert blocks_named(blocks, (name,)).tolist() == [True, False]
    for name in ("file:a", "a.py#0", "A.py", "", 2):
        assert not blocks_named(blocks, (name,)).any()
    split = type(blocks)([replace(first, display_name="file:a.py#1.1")])
    assert [blocks_named(split, (name,)).all() for name in ("file:a.py#1", "file:a.py#1.0")] == [
        True,
        False,
    ]
    assert unknown_names(blocks, ("b.py", "a.py", "user:01", "user:1")) == ["b.py", "user:1"]


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'lru' must be one of evoke"):
        decide(block_view(["x"], "r"), config("lru"))
