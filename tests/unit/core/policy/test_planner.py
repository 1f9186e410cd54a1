"""Policies: properties of every plan on random layouts, and decisions on small ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_fixtures import CONFIG, FILLER, block_view, moves_of
from slot_model import BlockState, SlotModel, min_budget, states_of, total, view_columns

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.config import PolicyConfig
from evoke_proxy.config.policy_names import policy_names
from evoke_proxy.core.model.block_table import BlockTable, FloatArray
from evoke_proxy.core.model.blocks import Block, Role, Span, common, merged
from evoke_proxy.core.model.plan import DecodeBudget, Plan
from evoke_proxy.core.policy import planner, registry
from evoke_proxy.core.policy.registry import saves_evicted
from evoke_proxy.core.policy.standing import file_blocks
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.session.accounting import forecast
from evoke_proxy.errors import ConfigError

WORDS = ["vault", "code", "oslo", "river", "bridge", "config", "port", "8080"]


def decide(view: PolicyView, query: str, config: PolicyConfig) -> Plan:
    """Decides with two gold blocks for the oracle, and for some words with requested blocks."""
    requested = ("user:0", "tool:3#0") if "port" in query else ()
    files = ("src/a.py", "src/b.py") if "config" in query else ()
    question = replace(Query.of(query), requested=requested, gold=(1, 2), files=files)
    return registry.decide(view, question, config)


_TRAITS = {
    "role": tuple(Role),
    "aliases": ((), (), ("src/a.py",), ("src/a.py", "src/b.py")),
    "pin_rank": range(1, 11),
    "preferred": (False,) * 9 + (True,),
    "cached_state": tuple(BlockState),
    "tail_state": (BlockState.DROPPED, BlockState.DROPPED, BlockState.SAVED),
    "end_state": (BlockState.RESIDENT, BlockState.RESIDENT_SAVED),
}
# One number for all traits of a block, and one for its words: a draw takes much longer than a plan.
_TRAIT_SETS = math.prod(map(len, _TRAITS.values()))
_BLOCKS = st.lists(
    st.tuples(
        st.integers(1, 64),
        st.integers(0, _TRAIT_SETS - 1),
        st.integers(0, (len(WORDS) + 1) ** 4 - 1),
    ),
    min_size=1,
    max_size=24,
)
_STALE = st.sets(st.sampled_from(["old/1", "old/2"]))
_PINS_IN_10 = st.sampled_from([0, 1, 7])
_N_FREE = st.integers(0, 400) | st.just(1 << 20)
_MAX_TOKENS = st.none() | st.integers(0, 2000)


def _traits(number: int) -> dict[str, Any]:
    chosen = {}
    for name, choices in _TRAITS.items():
        number, index = divmod(number, len(choices))
        chosen[name] = choices[index]
    return chosen


def _words(number: int) -> str:
    """Up to four words, one for each digit of the number that is not 0."""
    words = []
    for _ in range(4):
        number, digit = divmod(number, len(WORDS) + 1)
        words += [WORDS[digit - 1]] if digit else []
    return " ".join(words)


@st.composite
def views(draw: st.DrawFn, adopts: bool = False) -> PolicyView:
    """Views with blocks that tile a prompt, in any possible states, and any slot."""
    drawn = draw(_BLOCKS)
    n_cached = len(drawn) - draw(st.integers(0, len(drawn)))
    pins_in_10 = draw(_PINS_IN_10)
    blocks: list[Block] = []
    states: list[BlockState] = []
    at = 0
    for i, (length, traits, words) in enumerate(drawn):
        of_block = _traits(traits)
        blocks.append(_block(i, Span(at, at + length), of_block, _words(words), pins_in_10))
        if i >= n_cached:
            states.append(of_block["tail_state"])
        elif adopts:
            states.append(BlockState.SAVED)
        elif i == n_cached - 1:
            states.append(of_block["end_state"])
        else:
            states.append(of_block["cached_state"])
        at += length
    cached_end = sum(length for length, _, _ in drawn[:n_cached])
    unaligned = draw(st.integers(0, 150)) if n_cached == len(drawn) and not adopts else 0
    rows = [b.span for b, s in zip(blocks, states, strict=True) if s.resident]
    rows += [Span(cached_end, cached_end + unaligned)]
    foreign_at = cached_end + unaligned + draw(st.integers(0, 3))
    foreign = draw(st.integers(0, 200))
    rows += [Span(foreign_at, foreign_at + foreign)]
    shares = np.linspace(0.9, 0.1, len(blocks)) if draw(st.booleans()) else None
    return PolicyView(
        *view_columns(blocks, states),
        attention=shares,
        last_attended=None if shares is None else (10 * shares).round(),
        n_tokens=at + unaligned + draw(st.integers(1, 4)),
        n_past=0 if adopts else cached_end + unaligned,
        resident=merged(rows),
        n_free=draw(_N_FREE),
        max_tokens=draw(_MAX_TOKENS),
        adopt_to=cached_end if adopts else 0,
        stale=tuple(draw(_STALE)),
        index=Index(),
    )


def _block(number: int, span: Span, traits: dict[str, Any], text: str, pins_in_10: int) -> Block:
    role = traits["role"]
    return Block(
        display_name=f"{role}:{number}#0",
        label=f"s/{span.start}-{span.end}",
        span=span,
        role=role,
        turn=1,
        message=number // 2,
        text=text,
        aliases=traits["aliases"],
        pinned=traits["pin_rank"] <= pins_in_10,
        preferred=traits["preferred"],
    )


# Every policy that evicts has the same properties; variants and no_eviction are left out.
NAMES = [name for name in policy_names() if "_" not in name]
each_policy = pytest.mark.parametrize("name", NAMES)
CONFIGS = st.builds(
    PolicyConfig,
    budget=st.integers(150, 1200) | st.sampled_from([None, 512]),
    recovery=st.sampled_from(["kv_restore", "kv_restore", "discard"]),
    block_tokens=st.just(64),
    sink_tokens=st.integers(0, 20),
    recent_tokens=st.integers(0, 60),
    reserve_tokens=st.integers(1, 300),
)
QUERIES = st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join)


def model_of(view: PolicyView) -> SlotModel:
    """A slot in the state of a view: its tokens are those of the prompt only before n_past."""
    rows = {row for span in view.resident for row in range(span.start, span.end)}
    n = max([view.n_past, *(row + 1 for row in rows)])
    tokens = [p if p < view.n_past else -p - 1 for p in range(n)]
    model = SlotModel(n_cells=view.n_free + len(rows), tokens=tokens, rows=rows, peak=len(rows))
    for block, state in zip(view.blocks, states_of(view), strict=True):
        if state.saved:
            model.store[block.label] = (block.span, tuple(range(block.span.end)))
    return model


def after(view: PolicyView, plan: Plan) -> tuple[PolicyView, SlotModel]:
    """The view and the slot after the plan was run; Refused if it cannot be run."""
    model = model_of(view)
    prompt = list(range(view.n_tokens))
    model.run(plan, prompt)
    slot = model.view(prompt)
    cursor = plan.adopt.n_tokens if plan.adopt else view.n_past
    resident = common(slot.resident, [Span(0, cursor)])
    states = tuple(
        BlockState.of(total(common(resident, [b.span])) == len(b.span), b.label in model.store)
        for b in view.blocks
    )
    _, in_cache, in_pool = view_columns(view.blocks, states)
    later = replace(
        view, in_cache=in_cache, in_pool=in_pool, n_past=cursor, resident=slot.resident,
        n_free=slot.n_free, adopt_to=0, stale=(),
    )  # fmt: skip
    return later, model


def resident_tokens(view: PolicyView) -> int:
    return total(view.reused_rows)


def reserve(view: PolicyView, config: PolicyConfig) -> int:
    requested_reserve = config.reserve_tokens if view.max_tokens is None else view.max_tokens
    assert config.budget is not None
    return min(requested_reserve, config.budget // 4)


def must_stay(view: PolicyView, config: PolicyConfig) -> list[Block]:
    """The resident blocks with sinks or pins, and the one that decoding continues from."""
    return [
        block
        for block, state in zip(view.blocks, states_of(view), strict=True)
        if state.resident
        and (block.pinned or block.span.start < sinks(config) or view.n_past - 1 in block.span)
    ]


def sinks(config: PolicyConfig) -> int:
    return 0 if config.name == "recency" else config.sink_tokens


@each_policy
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_a_plan_can_be_run_and_stays_within_the_budget(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    plan = decide(view, query, config)
    later, model = after(view, plan)
    assert (
        later.n_past == view.n_past == model.view(list(range(view.n_tokens))).n_past(view.n_tokens)
    )
    if config.budget is None:
        assert not plan.evicts and not plan.infeasible
        assert plan.stream == DecodeBudget(0)
        return
    needed = resident_tokens(later) + view.n_to_decode + reserve(view, config)
    if plan.over_capacity:
        least = (config.budget - config.least_budget) // 2
        stays = total(block.span for block in must_stay(later, config))
        unaligned = resident_tokens(later) - total(
            block.span
            for block, state in zip(later.blocks, states_of(later), strict=True)
            if state.resident
        )
        # beside text that is decoded before the question
        asked = int(view.blocks.starts[view.blocks.question_start])
        beside = config.budget - (view.n_tokens - asked) if asked >= view.decode_from else 0
        assert resident_tokens(later) <= max(least, stays + unaligned, beside)
        assert plan.stream is not None and min_budget(plan.stream) <= config.budget
    elif not plan.infeasible:
        assert needed <= config.budget
        assert resident_tokens(view) > config.budget or model.peak <= max(
            config.budget, total(view.resident)
        )
    else:
        stays = must_stay(later, config)
        unaligned = resident_tokens(later) - sum(len(b.span) for b in stays)
        uncovered = max(0, view.n_past - (view.blocks[-1].span.end))
        assert unaligned == min(uncovered, unaligned), (
            "an infeasible plan kept rows that could be evicted"
        )


@each_policy
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_a_plan_is_infeasible_exactly_if_the_blocks_that_must_stay_do_not_fit(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    plan = decide(view, query, config)
    if config.budget is None:
        return
    staying = [
        block
        for block, state in zip(view.blocks, states_of(view), strict=True)
        if (
            state.resident
            or (saves_evicted(config) and state.saved and block.span.end <= view.n_past)
        )
        and (block.pinned or block.span.start < sinks(config) or view.n_past - 1 in block.span)
    ]
    unaligned = resident_tokens(view) - sum(
        len(b.span) for b, s in zip(view.blocks, states_of(view), strict=True) if s.resident
    )
    needed = sum(len(block.span) for block in staying) + unaligned
    assert plan.infeasible == (needed + view.n_to_decode + reserve(view, config) > config.budget)


@each_policy
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_sinks_pins_and_the_topmost_block_are_never_evicted(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    plan = decide(view, query, config)
    evicted = {evict.label for evict in plan.evicts}
    assert not evicted & {block.label for block in must_stay(view, config)}
    loaded = [load.span for load in plan.loads]
    assert not common(loaded, [evict.span for evict in plan.evicts])
    assert all(span.end <= view.n_past for span in loaded)
    if plan.stream is not None and plan.stream.budget:
        protected = [*plan.stream.protect, Span(0, sinks(config))]
        assert not common((victim.span for victim in plan.stream.order), protected)
        assert min_budget(plan.stream) <= max(
            plan.stream.budget, config.sink_tokens + config.recent_tokens + config.block_tokens
        )


@each_policy
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_a_second_decision_after_the_plan_moves_nothing(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    later, _ = after(view, decide(view, query, config))
    repeated = decide(later, query, config)
    assert repeated.moves_nothing
    assert repeated.drops == ()


@each_policy
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_evicted_blocks_are_saved_once_if_the_policy_saves_them(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    plan = decide(view, query, config)
    saved = {save.label for save in plan.saves}
    already_saved = {b.label for b, s in zip(view.blocks, states_of(view), strict=True) if s.saved}
    evicted = {evict.label for evict in plan.evicts if evict.label is not None}
    if saves_evicted(config):
        assert saved == evicted - already_saved
    else:
        assert not saved and not plan.loads
        assert already_saved <= {drop.label for drop in plan.drops}
    assert set(view.stale) <= {drop.label for drop in plan.drops}
    if saves_evicted(config):
        assert {drop.label for drop in plan.drops} == set(view.stale)


@each_policy
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_a_plan_does_not_depend_on_earlier_contents_of_the_index(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    used = Index()
    used.relevance(Query.of("vault"), view.blocks[: len(view.blocks) // 2])
    other = replace(view, index=used)
    assert decide(view, query, config) == decide(other, query, config)
    assert decide(view, query, config) == decide(view, query, config)


@each_policy
@given(views() | views(adopts=True), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_every_prompt_token_is_counted_exactly_once_in_the_forecast(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    if view.adopt_to and not saves_evicted(config):
        return  # no session adopts blocks with a policy that does not save
    plan = decide(view, query, config)
    accounting = forecast(view, plan)
    later, _ = after(view, plan)
    cursor = later.n_past
    in_cache = {p for span in later.reused_rows for p in range(span.start, span.end)}
    moves_of = plan.adopt.spans if plan.adopt else tuple(load.span for load in plan.loads)
    recovered = {p for span in moves_of for p in range(span.start, span.end)}
    assert recovered <= in_cache
    assert accounting.recovered == len(recovered)
    assert accounting.resident_before == len(in_cache - recovered)
    assert accounting.omitted == cursor - len(in_cache)
    assert accounting.decoded == view.n_tokens - cursor
    assert (
        min(
            accounting.recovered, accounting.resident_before, accounting.omitted, accounting.decoded
        )
        >= 0
    )
    parts = (
        accounting.recovered + accounting.resident_before + accounting.omitted + accounting.decoded
    )
    assert parts == accounting.n_prompt == view.n_tokens


@pytest.mark.parametrize("name", ["evoke", "infllm", "oracle"])
@given(views(adopts=True), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_an_adopted_session_stays_within_its_budget(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name, recovery="kv_restore")
    plan = decide(view, query, config)
    later, _ = after(view, plan)
    assert not (plan.saves or plan.evicts or plan.loads)
    if plan.adopt is None:
        return
    assert plan.adopt.n_tokens == view.adopt_to
    assert plan.adopt.spans[-1].end == view.adopt_to
    assert list(plan.adopt.spans) == sorted(plan.adopt.spans)
    assert decide(later, query, config).moves_nothing
    if config.budget is not None and plan.over_capacity:
        assert total(plan.adopt.spans) <= config.budget
    elif config.budget is not None and not plan.infeasible:
        tail = view.n_tokens - view.adopt_to
        assert total(plan.adopt.spans) + tail + reserve(view, config) <= config.budget


def test_the_block_with_the_answer_replaces_the_oldest_filler() -> None:
    texts = [FILLER[0], "the oslo vault code is 48213", *FILLER[2:8]]
    view = block_view(texts, "rsrrrrrr")
    plan = decide(view, "what is the oslo vault code?", CONFIG)
    assert moves_of(plan) == "-s/3 -s/4 +s/1"  # the neighbour of the answer is kept
    assert [save.label for save in plan.saves] == ["s/3", "s/4"]
    assert plan.stream is not None and Span(64, 128) in plan.stream.protect


def test_a_slot_protects_recovered_blocks_within_its_share_of_the_cells() -> None:
    # The slot is empty, and adopts 12 saved blocks of 64 tokens.
    view = replace(block_view(FILLER[:12], "s" * 12), resident=(), n_past=0, adopt_to=12 * 64)
    config = replace(CONFIG, budget=1024)
    protected = {}
    for n_slot_cells in (None, 1024, 512):
        plan = decide(view, "number5", replace(config, n_slot_cells=n_slot_cells))
        assert plan.adopt is not None and plan.stream is not None
        protected[n_slot_cells] = total(plan.stream.protect)
        assert total(plan.adopt.spans) > 512 and plan.stream.budget == 1024
    assert protected[None] == protected[1024] > 512
    assert 0 < protected[512] <= 512 - config.least_budget


def test_nothing_moves_within_the_budget() -> None:
    plan = decide(block_view(FILLER[:6], "rrrrrr"), "anything", CONFIG)
    assert plan.moves_nothing and not plan.infeasible


def test_all_saved_blocks_are_loaded_if_the_budget_allows() -> None:
    plan = decide(block_view(FILLER[:5], "rssbr"), "anything", CONFIG)
    assert moves_of(plan) == "+s/1 +s/2"


def test_without_a_budget_saved_blocks_are_loaded_into_the_free_cells() -> None:
    view = block_view(FILLER[:5], "rssbr")
    unlimited = replace(CONFIG, budget=None)
    assert moves_of(decide(view, "number2", unlimited)) == "+s/1 +s/2"
    tight = replace(view, n_free=40 + 64)
    assert moves_of(decide(tight, "number2", unlimited)) == "+s/2"


def file_session() -> PolicyView:
    """A file read in several blocks and edited, another file, and later turns about neither."""
    view = block_view([*FILLER[:2], *["a line of it"] * 6, *FILLER[:6]], "rrsssssbrrrrrr")
    tool, assistant = Role.TOOL, Role.ASSISTANT
    # message, role and alias by block number
    shapes = {2: (2, tool, "src/a.py"), 3: (2, tool, "src/a.py"), 4: (4, tool, "src/a.py")}
    shapes |= {5: (4, tool, "src/a.py"), 6: (5, assistant, "src/a.py"), 7: (6, tool, "src/b.py")}
    blocks = list(view.blocks)
    for i, (message, role, path) in shapes.items():
        blocks[i] = replace(blocks[i], message=message, role=role, aliases=(path,))
    return replace(view, blocks=BlockTable(blocks))


@pytest.mark.parametrize(
    ("budget", "loaded"),
    [
        pytest.param(704, "s/4 s/5 s/6", id="the latest reading and the edit after it"),
        pytest.param(384, "s/4 s/5", id="the reading, if half of the room cannot hold both"),
        pytest.param(300, "s/6", id="the edit, if half of the room cannot hold the reading"),
    ],
)
def test_the_blocks_of_a_file_that_a_tool_is_called_with_are_loaded(
    budget: int, loaded: str
) -> None:
    view, config = file_session(), replace(CONFIG, budget=budget)
    question = replace(Query.of("48213: return nothing"), files=("src/a.py", "src/c.py"))
    plan = registry.decide(view, question, config)
    assert " ".join(load.label for load in plan.loads) == loaded
    without = registry.decide(view, replace(question, files=()), config)
    assert not {"s/4", "s/5"} & {load.label for load in without.loads}


def test_a_difference_below_the_margin_moves_nothing() -> None:
    view = block_view(FILLER[:8], "rsrrrrrr")
    first, second, *others = view.blocks
    view = replace(view, blocks=BlockTable([first, replace(second, preferred=True), *others]))
    assert moves_of(decide(view, "", replace(CONFIG, name="evoke_margin_0"))) == "-s/2 -s/3 +s/1"
    assert moves_of(decide(view, "", replace(CONFIG, name="evoke_margin_0.5"))) == "-s/2"


def test_the_margin_is_doubled_for_recovered_blocks_unless_the_question_ranks_another() -> None:
    """The other block is worth more by more than the margin and less than twice the margin."""
    view = block_view(FILLER[:8], "rsrrrrrr")
    blocks = [replace(block, priority=0.3) for block in view.blocks]
    blocks[1] = replace(blocks[1], priority=0.8)
    view = replace(view, blocks=BlockTable(blocks))
    config = replace(CONFIG, name="evoke_margin_0.2")
    recovered = replace(view, recovered=np.array([i > 1 for i in range(8)]))
    assert "+s/1" in moves_of(decide(view, "", config))
    assert "+s/1" not in moves_of(decide(recovered, "", config))
    assert "+s/1" in moves_of(decide(recovered, "number1", config))


def test_blocks_of_equal_worth_are_ordered_by_display_name() -> None:
    view = block_view(["x"] * 10, "r" * 10)
    names = [f"key{(i * 7) % 10}" for i in range(10)]
    blocks = [
        replace(b, display_name=k, preferred=True) for b, k in zip(view.blocks, names, strict=True)
    ]
    plan = decide(replace(view, blocks=BlockTable(blocks)), "", CONFIG)
    kept = {b.display_name for b in blocks} - {
        blocks[int((e.label or "")[2:])].display_name for e in plan.evicts
    }
    assert kept - {names[0], names[9]} == {"key1", "key2", "key4", "key5"}
    assert plan.stream is not None
    assert [blocks[int(v.label[2:])].display_name for v in plan.stream.order] == sorted(
        kept - {names[0]}
    )


class NoisyIndex(Index):
    """Adds in another order for odd blocks: 0.3 and 0.1 + 0.2 differ in floating point."""

    def relevance(self, question: Query, blocks: BlockTable, *_: object) -> FloatArray:
        return np.array([0.3 if i % 2 else 0.1 + 0.2 for i in range(len(blocks))])


def test_rounding_of_a_sum_does_not_change_the_decision() -> None:
    view = block_view(["x"] * 10, "r" * 10)
    blocks = BlockTable(replace(block, preferred=True) for block in view.blocks)
    plan = decide(replace(view, blocks=blocks, index=NoisyIndex()), "", CONFIG)
    assert moves_of(plan) == "-s/5 -s/6 -s/7 -s/8"


def test_rows_after_the_last_block_count_against_the_budget() -> None:
    view = block_view(FILLER[:6], "rrrrrr", tail=40)
    with_rows = replace(view, n_past=384 + 60, resident=(Span(0, 384 + 60),), n_tokens=384 + 100)
    assert decide(view, "", CONFIG).moves_nothing
    assert moves_of(decide(with_rows, "", CONFIG)) == "-s/1"


def test_an_evicted_pinned_block_is_loaded() -> None:
    view = block_view(FILLER[:8], "rsrrrrrr", pins="1")
    assert "+s/1" in moves_of(decide(view, "number5 number6", CONFIG))


def test_a_tail_over_the_budget_evicts_all_blocks_that_may_be_evicted() -> None:
    view = block_view(FILLER[:8], "rrrrrrrr", tail=5000, pins="3")
    plan = decide(view, "number5", CONFIG)
    assert plan.infeasible and "5000" in plan.reason
    # the blocks that must stay take the half of the budget reserved for earlier blocks
    assert moves_of(plan) == "-s/1 -s/2 -s/4 -s/5 -s/6"
    assert plan.stream is not None
    # without the first tokens, which llama-server protects anyway
    assert plan.stream.protect == (Span(16, 64), Span(192, 256), Span(448, 512))


def test_with_a_tail_over_the_budget_the_best_earlier_blocks_are_kept() -> None:
    view = block_view(FILLER[:12], "rrrrrrrrssss", tail=5000)
    plan = decide(view, "number9", replace(CONFIG, budget=1024))
    assert plan.over_capacity and "+s/9" in moves_of(plan)
    assert plan.stream is not None
    assert any(Span(9 * 64, 10 * 64).start in span for span in plan.stream.protect)
    assert min_budget(plan.stream) <= 1024
    recency = decide(view, "number9", replace(CONFIG, budget=1024, name="recency"))
    assert recency.infeasible and not recency.over_capacity


def test_an_answer_that_is_decoded_with_the_question_takes_no_room_from_the_best_blocks() -> None:
    view = block_view([*FILLER[:8], *["an answer"] * 4, "number3 number5 number6"], "rsssssssddddd")
    answer = {i: Role.ASSISTANT for i in range(8, 12)}
    blocks = (
        replace(block, role=answer.get(i, Role.USER), message=min(i, 8) if i < 12 else 9)
        for i, block in enumerate(view.blocks)
    )
    view = replace(
        view, blocks=BlockTable(blocks), n_past=512, resident=(Span(0, 64),), n_tokens=13 * 64
    )
    plan = decide(view, "number3 number5 number6", CONFIG)
    assert plan.over_capacity and plan.stream is not None
    assert {"s/3", "s/5", "s/6"} <= {load.label for load in plan.loads}
    protected = {at for span in plan.stream.protect for at in range(span.start, span.end)}
    assert protected >= set(range(3 * 64, 4 * 64)) | set(range(5 * 64, 7 * 64))
    assert min_budget(plan.stream) <= 512 and plan.stream.recent == 32
    # the answer leaves before the question
    whole = [block.label for block in plan.stream.order if block.label.count("/") == 1]
    assert whole == ["s/8", "s/9", "s/10", "s/11", "s/12"]


@pytest.mark.parametrize("state", ["r", "s"])
def test_the_question_of_a_repeated_request_stays_in_the_cache(state: str) -> None:
    """All of it was decoded before, with a part of the generation prompt that follows it."""
    view = block_view([*FILLER[:9], "what is number3"], f"rsssrrrrr{state}", tail=8)
    view = replace(view, n_past=10 * 64 + 4)
    answered = replace(CONFIG, budget=448)
    plan = decide(view, "what is number3", answered)
    assert "-s/9" not in moves_of(plan) and ("+s/9" in moves_of(plan)) == (state == "s")
    assert "+s/3" in moves_of(plan)


def test_a_repeated_question_that_is_too_long_keeps_its_end_within_half_of_the_budget() -> None:
    view = block_view(FILLER[:12], "rsss" + "r" * 8, tail=8)
    blocks = (replace(block, message=min(i, 6)) for i, block in enumerate(view.blocks))
    view = replace(view, blocks=BlockTable(blocks), n_past=12 * 64 + 4)
    plan = decide(view, "what is number3", CONFIG)
    assert not {"-s/8", "-s/9", "-s/10", "-s/11"} & set(moves_of(plan).split())
    assert "+s/3" in moves_of(plan) and "-s/6" in moves_of(plan)


def test_a_block_that_is_not_complete_leaves_in_pieces() -> None:
    """llama-server would cut it at multiples of 64 tokens, across the ends of blocks."""
    view = block_view(FILLER[:2], "rr", tail=0)
    new = [
        replace(view.blocks[1], label=label, span=span, message=number)
        for number, (label, span) in enumerate(
            [("s/a", Span(128, 168)), ("s/b", Span(168, 184)), ("s/c", Span(184, 248))], 2
        )
    ]
    columns = [np.append(mask, [False] * 3) for mask in (view.in_cache, view.in_pool)]
    view = replace(view, blocks=BlockTable([*view.blocks, *new]), in_cache=columns[0],
                   in_pool=columns[1], n_tokens=900)  # fmt: skip
    plan = decide(view, "", CONFIG)
    assert plan.stream is not None and plan.stream.block + 15 + plan.stream.recent <= 512
    order = {block.label: block.span for block in plan.stream.order}
    pieces = {label: span for label, span in order.items() if label.count("/") > 1}
    assert {"s/a", "s/b", "s/c"} <= order.keys()
    assert pieces == {
        f"{label}/{span.start}-{span.end}": span
        for label, ends in (("s/a", (128, 144, 160, 168)), ("s/c", (184, 200, 216, 232, 248)))
        for span in map(Span, ends, ends[1:])
    }
    names = list(order)
    assert all(names.index(label) >= len(order) - len(pieces) for label in pieces)
    short = decide(replace(view, n_tokens=250), "", CONFIG)
    assert short.stream is not None
    assert not [block for block in short.stream.order if block.label.count("/") > 1]


def test_the_server_evicts_irrelevant_blocks_first_and_old_before_new_ones() -> None:
    view = block_view([*FILLER[:4], "new text", "other text"], "rrrrdd")
    view = replace(view, n_past=256, resident=(Span(0, 256),), n_tokens=6 * 64 + 10)
    plan = decide(view, "number1", CONFIG)
    assert plan.stream is not None
    # s/2 is older than s/3, but next to the block that the question is about.
    assert [victim.label for victim in plan.stream.order] == ["s/3", "s/2", "s/1", "s/4", "s/5"]


def test_in_a_long_turn_the_block_its_question_is_about_stays() -> None:
    texts = [*FILLER[:2], "the oslo vault code is 48213", *FILLER[3:8]]
    document = replace(block_view(texts, "dddddddd"), n_past=0, resident=())
    query = " ".join(texts) + " filler" * 200 + " so what is the oslo vault code?"
    plan = decide(document, query, CONFIG)
    assert plan.stream is not None
    assert any(span.encloses(Span(128, 192)) for span in plan.stream.protect)
    assert "s/2" not in {victim.label for victim in plan.stream.order}


def test_both_ends_of_a_very_long_turn_are_used_as_the_query() -> None:
    view = block_view(FILLER[:8], "rssrrrrr")
    padding = "x " * 5000
    assert "+s/1" in moves_of(decide(view, f"number1 {padding}", CONFIG))
    assert "+s/2" in moves_of(decide(view, f"{padding} number2", CONFIG))
    assert "+" not in moves_of(decide(view, f"{padding} number1 {padding}", CONFIG))


def test_rows_of_another_text_are_evicted_for_blocks_to_load() -> None:
    view = block_view(FILLER[:3], "rsr", tail=40)
    view = replace(view, resident=(*view.resident, Span(300, 700)), n_free=0)
    plan = decide(view, "number1", CONFIG)
    assert [(evict.span, evict.label) for evict in plan.evicts] == [(Span(300, 699), None)]
    assert moves_of(plan).endswith("+s/1")


def test_the_reserve_is_the_answers_limit_but_at_most_a_quarter_of_the_budget() -> None:
    def kept(max_tokens: int | None) -> int:
        view = replace(block_view(FILLER[:8], "rrrrrrrr", tail=40), max_tokens=max_tokens)
        return 8 - len(decide(view, "", CONFIG).evicts)

    assert [kept(limit) for limit in (0, None, 64, 100, 128, 100_000)] == [7, 6, 6, 5, 5, 5]


def test_no_eviction_switches_the_budget_of_the_server_off() -> None:
    view = replace(block_view(FILLER[:9], "rssrrrrrr"), stale=("old",))
    plan = decide(view, "number1", replace(CONFIG, name="no_eviction"))
    assert plan.moves_nothing
    assert plan.stream == DecodeBudget(0)
    assert [drop.label for drop in plan.drops] == ["old"]


def test_the_truncate_policy_keeps_the_remaining_prompt_within_the_budget() -> None:
    config = replace(CONFIG, name="truncate")
    plan = decide(block_view(FILLER[:9], "rrrrrrrrr", tail=40), "number1", config)
    assert plan.evicts and not plan.saves and not plan.loads
    assert plan.stream is not None and plan.stream.budget == CONFIG.budget


def test_an_unknown_policy_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="lru"):
        decide(block_view(FILLER[:1], "r"), "", replace(CONFIG, name="lru"))


def test_without_free_cells_a_session_is_not_adopted() -> None:
    view = replace(block_view(FILLER[:3], "sss"), n_past=0, adopt_to=192, resident=(), n_free=10)
    plan = decide(view, "", CONFIG)
    assert plan.adopt is None and plan.moves_nothing
    assert plan.stream is not None and plan.stream.budget == 512
    assert [victim.label for victim in plan.stream.order] == []


@example(0)
@given(st.integers(0, 11))
def test_a_session_is_adopted_with_the_block_the_question_is_about(number: int) -> None:
    view = replace(block_view(FILLER, "s" * 12), n_past=0, adopt_to=768, resident=())
    plan = decide(view, f"number{number}", CONFIG)
    assert plan.adopt is not None
    assert {"s/0", "s/11", f"s/{number}"} <= set(plan.adopt.labels)


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    room=st.integers(0, 1500),
    values=st.data(),
)
def test_sorting_in_parts_chooses_the_same_blocks(
    lengths: list[int], room: int, values: st.DataObject
) -> None:
    starts = np.cumsum([0, *lengths]).tolist()
    table = BlockTable(
        Block(f"b{i}", f"b{i}", Span(a, b), Role.USER, 1, i, "")
        for i, (a, b) in enumerate(zip(starts, starts[1:], strict=False))
    )
    worth = np.array([values.draw(st.integers(0, 5)) for _ in lengths], np.float64)
    requested_reserve = np.array([values.draw(st.booleans()) for _ in lengths])
    whole = planner.first_fit(
        planner.by_score(requested_reserve, worth, table), table.lengths, room
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_SORTED_AT_ONCE", 4)
        found = planner.best_fit(requested_reserve, worth, table, room)
    assert found.tolist() == whole.tolist()


def test_a_file_that_a_tool_is_called_with_is_preferred_to_other_tool_results() -> None:
    system, user, answer, tool = Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL
    roles = [system, system, system, user, tool, tool, tool, answer, tool, answer, tool]
    messages = [0, 0, 0, 1, 2, 2, 2, 3, 4, 5, 6]
    view = block_view(FILLER[:11], "rrrrsssrrrd")
    blocks = BlockTable(
        replace(block, role=role, message=message, aliases=("src/a.py",) if message == 2 else ())
        for block, role, message in zip(view.blocks, roles, messages, strict=True)
    )
    view = replace(view, blocks=blocks, n_past=640)
    query = replace(Query.of("changed"), files=("src/a.py",))
    plan = registry.decide(view, query, replace(CONFIG, budget=704))
    assert "+s/4 +s/5 +s/6" in moves_of(plan)
    assert not any(f"-s/{rule}" in moves_of(plan).split() for rule in (0, 1))


def test_a_file_is_found_as_reread_after_a_restart() -> None:
    """After a restart the session is adopted, so that only the end of the prompt is decoded."""
    roles = [Role.SYSTEM, *[Role.USER] * 6, Role.TOOL, Role.USER]
    blocks = [
        Block(f"b{i}", f"s/{i}", Span(100 * i, 100 * i + 100), role, 1, i, "x", ("src/a.py",))
        if role is Role.TOOL
        else Block(f"b{i}", f"s/{i}", Span(100 * i, 100 * i + 100), role, 1, i, "x")
        for i, role in enumerate(roles)
    ]
    states = [BlockState.SAVED] * 8 + [BlockState.DROPPED]
    view = PolicyView(*view_columns(blocks, states), n_tokens=901, n_past=0, adopt_to=800)
    query = replace(Query.of("Go on."), files=("src/a.py",))
    assert file_blocks(view, query.files, 640, 640).tolist() == [i == 7 for i in range(9)]


@given(st.lists(st.integers(1, 200), max_size=150), st.integers(0, 3000))
def test_what_fits_is_taken_greedily_in_the_given_order(sizes: list[int], room: int) -> None:
    order = np.arange(len(sizes))[::-1]
    left, expected = room, set[int]()
    for i in order.tolist():
        if sizes[i] <= left:
            expected.add(i)
            left -= sizes[i]
    found = planner.first_fit(order, np.array(sizes, np.int64), room)
    assert set(np.flatnonzero(found).tolist()) == expected
