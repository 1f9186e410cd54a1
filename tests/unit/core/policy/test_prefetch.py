"""Steps of a prefetch: small, within the limit, with the saves that evictions need."""

from __future__ import annotations

from evoke_proxy.core.model.blocks import Span, clipped, count
from evoke_proxy.core.model.plan import Evict, Load, Plan, Save
from evoke_proxy.core.policy.prefetch import loading_steps

RESIDENT = (Span(0, 16), Span(100, 400))
EVICTS = tuple(Evict(Span(p, p + 50), f"out-{p}") for p in range(100, 300, 50))
LOADS = tuple(Load(f"in-{p}", Span(p, p + 20)) for p in range(20, 100, 20))
PLAN = Plan(saves=(Save("out-150", Span(150, 200)),), evicts=EVICTS, loads=LOADS)


def test_no_step_exceeds_the_limit_or_the_size_and_only_needed_rows_are_evicted() -> None:
    n_rows, limit = count(RESIDENT), 330
    steps = list(loading_steps(PLAN, RESIDENT, limit, step_tokens=40))
    assert [len(step.loads) for step in steps] == [2, 2]
    for step in steps:
        n_rows -= sum(count(clipped(RESIDENT, evict.span)) for evict in step.evicts)
        n_rows += sum(len(load.span) for load in step.loads)
        assert n_rows <= limit
    # 316 rows and 80 more: two of the four blocks make room, and the copy of one is made first.
    assert [evict.label for step in steps for evict in step.evicts] == ["out-100", "out-150"]
    assert [save.label for step in steps for save in step.saves] == ["out-150"]


def test_blocks_without_room_are_left_out() -> None:
    plan = Plan(evicts=EVICTS[:1], loads=LOADS)
    steps = list(loading_steps(plan, RESIDENT, 316, step_tokens=20))
    assert [load.label for step in steps for load in step.loads] == ["in-20", "in-40"]
    assert not list(loading_steps(Plan(loads=LOADS), RESIDENT, 316))
    assert not list(loading_steps(Plan(evicts=EVICTS), RESIDENT, 316))


def test_a_block_larger_than_a_step_is_a_step_of_its_own() -> None:
    loads = (Load("small", Span(20, 30)), Load("large", Span(30, 90)), Load("last", Span(90, 95)))
    steps = loading_steps(Plan(loads=loads), (), 1000, step_tokens=32)
    assert [[load.label for load in step.loads] for step in steps] == [
        ["small"],
        ["large"],
        ["last"],
    ]
