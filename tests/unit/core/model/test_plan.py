"""Plans and the ops that they become on the wire."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evoke_proxy.adapters.llama.block_api import batches_of_names
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.model.plan import Adopt, DecodeBudget, Drop, Evict, Load, Plan, Save

VICTIM = Block("user:1#0", "d", Span(128, 192), Role.USER, 1, 1, "text")
FULL = Plan(
    saves=(Save("a", Span(0, 64)),),
    evicts=(Evict(Span(0, 64), "a"), Evict(Span(70, 72))),
    loads=(Load("b", Span(64, 70)), Load("c", Span(80, 90))),
    drops=(Drop("old"), Drop("older")),
    stream=DecodeBudget(512, 4, 32, 64, (Span(64, 70),), (VICTIM,)),
)


def test_the_empty_plan_has_no_ops() -> None:
    assert Plan.EMPTY.ops() == []
    assert Plan.EMPTY.moves_nothing
    assert Plan() == Plan.EMPTY


def test_ops_are_ordered_saves_evicts_stream_loads_drops() -> None:
    assert [op["op"] for op in FULL.ops()] == ["save", "evict", "evict", "stream", "load", "drop"]


def test_ops_have_the_json_form_of_the_wire() -> None:
    save, evict, rows, stream, load, drop = json.loads(json.dumps(FULL.ops()))
    assert save == {"op": "save", "name": "a", "p0": 0, "p1": 64}
    assert evict == {"op": "evict", "p0": 0, "p1": 64}
    assert rows == {"op": "evict", "p0": 70, "p1": 72}
    assert load == {"op": "load", "names": ["b", "c"]}
    assert drop == {"op": "drop", "names": ["old", "older"]}
    assert stream == {
        "op": "stream",
        "budget": 512,
        "sink": 4,
        "recent": 32,
        "block": 64,
        "protect": [[64, 70]],
        "order": [{"name": "d", "p0": 128, "p1": 192}],
    }


def test_the_reuse_op_comes_first() -> None:
    assert Plan(reuse=0).ops() == [{"op": "reuse", "n_tokens": 0}]
    assert replace(FULL, reuse=64).ops()[0] == {"op": "reuse", "n_tokens": 64}


def test_a_stream_or_a_drop_alone_moves_nothing() -> None:
    assert Plan(stream=DecodeBudget(512), drops=(Drop("x"),)).moves_nothing
    assert not FULL.moves_nothing
    assert not Plan(adopt=Adopt(64, ("a",))).moves_nothing


@pytest.mark.parametrize(
    ("budget", "sent"), [(0, 0), (2**30, 2**30), (2**30 + 1, 2**30), (2**64, 2**30)]
)
def test_a_budget_is_capped_at_the_largest_that_llama_server_accepts(
    budget: int, sent: int
) -> None:
    (op,) = Plan(stream=DecodeBudget(budget)).ops()
    assert op["budget"] == sent


def test_lists_in_a_call_are_limited_to_what_llama_server_accepts() -> None:
    spans = tuple(Span(2 * i, 2 * i + 1) for i in range(20_000))
    blocks = tuple(replace(VICTIM, span=span) for span in spans)
    (op,) = Plan(stream=DecodeBudget(50_000, protect=spans, order=blocks)).ops()
    assert len(op["protect"]) == 4096 and len(op["order"]) == 16_384
    batches = [len(names) for names in batches_of_names([f"b{i}" for i in range(40_000)])]
    assert sum(batches) == 40_000 and max(batches) == 16_384
    assert list(batches_of_names([])) == []
