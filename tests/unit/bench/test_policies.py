"""What each policy beside `evoke` keeps, on layouts small enough to be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_fixtures import lasting
from policy_fixtures import CONFIG, FILLER, line, moved

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
ASKS = "what is the oslo vault code?"


def config(name: str, **settings: object) -> PolicyConfig:
    return replace(CONFIG, name=name, **settings)  # type: ignore[arg-type]


def decided(view: PolicyView, config: PolicyConfig, query: str = "", **given: object) -> Plan:
    return registry.decide(view, replace(Query.of(query), **given), config)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "left"), [("recency", "3 4 5 6 7"), ("streaming", "0 4 5 6 7")])
def test_of_the_rest_the_newest_stay(name: str, left: str) -> None:
    view = line([FACT, *FILLER[1:8]], "rrrrrrrr", tail=128)
    plan = decided(view, config(name), ASKS)
    assert lasting(view, plan) == left
    assert not plan.saves and not plan.loads
    assert plan.stream is not None
    assert [victim.label for victim in plan.stream.order] == [
        f"s/{n}" for n in left.split() if int(n)
    ]


@pytest.mark.parametrize("name", ["recency", "streaming", "discard"])
def test_what_is_gone_stays_gone(name: str) -> None:
    view = line([FILLER[0], FACT, *FILLER[2:8]], "rsrrrrrr")
    plan = decided(view, config(name), ASKS, requested=("user:01",))
    assert not plan.loads and not plan.saves
    assert "s/1" in {drop.label for drop in plan.drops}


def test_a_window_has_no_holes_for_the_sake_of_a_small_block() -> None:
    view = line(FILLER[:8], "rrrrrrrr")
    first, *others = view.blocks
    small = replace(first, span=Span(0, 20))
    widened = replace(others[0], span=Span(20, 128))
    blocks = type(view.blocks)([small, widened, *others[1:]])
    plan = decided(replace(view, blocks=blocks), config("recency"))
    # 12 tokens are left, and after a smaller reserve 32: never are they given to block 0
    assert lasting(view, plan) == "2 3 4 5 6 7"
    more = decided(replace(view, blocks=blocks, max_tokens=44), config("recency"))
    assert lasting(view, more) == "2 3 4 5 6 7"


def test_recency_lets_a_pin_be_where_it_is() -> None:
    view = line(FILLER[:8], "rrrrrrrr", pins="1", tail=128)
    assert lasting(view, decided(view, config("recency"))) == "1 4 5 6 7"


def test_infllm_finds_k_blocks_and_spends_the_rest_on_its_window() -> None:
    texts = [FILLER[0], f"{FACT} one", f"{FACT} two", f"{FACT} three", *FILLER[4:10]]
    view = line(texts, "rsssrrrrrr", tail=64)
    for k, left in ((1, 1), (2, 2), (8, 3)):
        plan = decided(view, config(f"infllm_k{k}"), ASKS)
        kept = lasting(view, plan).split()
        assert len(set(kept) & {"1", "2", "3"}) == len(plan.loads) == left
        assert len(kept) == 6
        newest = [n for n in kept if n not in ("0", "1", "2", "3")]
        assert newest == [str(n) for n in range(10 - len(newest), 10)]


def test_infllm_finds_nothing_where_nothing_matches() -> None:
    view = line([FILLER[0], FACT, *FILLER[2:9]], "rsrrrrrrr", tail=64)
    assert lasting(view, decided(view, config("infllm"), "zzz")) == "0 4 5 6 7 8"


def test_infllm_always_has_a_window() -> None:
    view = line([FACT + f" {n}" for n in range(12)], "r" * 12, tail=64)
    kept = lasting(view, decided(view, config("infllm_k50"), ASKS))
    assert "10" in kept.split() and "11" in kept.split()


@pytest.mark.parametrize("gold", [(1,), ("user:01",), ("user:01#0",)])
def test_the_oracle_brings_back_what_it_is_told(gold: tuple[str | int, ...]) -> None:
    texts = [FILLER[0], FILLER[1], FACT, f"{FACT} again", *FILLER[4:9]]
    view = line(texts, "rsssrrrrr", tail=64)
    plan = decided(view, config("oracle"), ASKS, gold=gold)
    ours = decided(view, config("evoke"), ASKS)
    assert {load.label for load in ours.loads} == {"s/2", "s/3"}
    assert {load.label for load in plan.loads} == {"s/1", "s/2", "s/3"}


@pytest.mark.parametrize("states", ["rsssrrrrr", "rsbrsrrsr", "bbbssssrr"])
@pytest.mark.parametrize("gold", range(9))
def test_the_oracle_has_what_evoke_has_where_that_has_the_answer(states: str, gold: int) -> None:
    view = line([FILLER[0], FACT, f"{FACT} again", *FILLER[3:9]], states, tail=64)
    ours = lasting(view, decided(view, config("evoke"), ASKS))
    best = lasting(view, decided(view, config("oracle"), ASKS, gold=(gold,)))
    assert str(gold) in best.split()
    assert best == ours or str(gold) not in ours.split()


@pytest.mark.parametrize("name", ["evoke", "infllm"])
def test_what_the_client_names_comes_back_before_what_it_asks_about(name: str) -> None:
    # The named block is no neighbour of the fact.
    view = line([FILLER[0], FACT, *FILLER[2:9]], "rsrrsrrrr", tail=64)
    plan = decided(view, config(name), ASKS, requested=("user:04",))
    assert "+s/4" in moved(plan)
    assert "+s/4" not in moved(decided(view, config(name), ASKS))


def test_names_are_keys_their_beginnings_and_identities() -> None:
    view = line(["a", "b"], "rr")
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
        decided(line(["x"], "r"), config("lru"))
