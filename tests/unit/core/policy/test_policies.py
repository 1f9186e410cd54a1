"""The contract of a plan, on random layouts, and its intent, on small ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_fixtures import CONFIG, FILLER, block_view, moves_of
from slot_model import BlockState, SlotModel, states_of, total, view_columns

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.config import PolicyConfig
from evoke_proxy.config.policy_names import policy_names
from evoke_proxy.core.model.block_table import BlockTable, FloatArray
from evoke_proxy.core.model.blocks import Block, Role, Span, common, merged
from evoke_proxy.core.model.plan import DecodeBudget, Plan
from evoke_proxy.core.policy import planner, registry
from evoke_proxy.core.policy.evoke import reread_file_blocks
from evoke_proxy.core.policy.registry import saves_evicted
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.session.accounting import forecast
from evoke_proxy.errors import ConfigError

WORDS = ["vault", "code", "oslo", "river", "bridge", "config", "port", "8080"]


def decide(view: PolicyView, query: str, config: PolicyConfig) -> Plan:
    """With two of the blocks for the oracle, and some that the client names now and then."""
    named = ("user:0", "tool:3#0") if "port" in query else ()
    files = ("src/a.py", "src/b.py") if "config" in query else ()
    question = replace(Query.of(query), requested=named, gold=(1, 2), files=files)
    return registry.decide(view, question, config)


@st.composite
def views(draw: st.DrawFn, adopts: bool = False) -> PolicyView:
    """Blocks that tile a prompt, in any states that their places allow, and a slot around them."""
    lengths = draw(st.lists(st.integers(1, 64), min_size=1, max_size=24))
    n_known = draw(st.integers(0, len(lengths)))
    pins_in_10 = draw(st.sampled_from([0, 1, 7]))
    blocks, states, at = [], [], 0
    for i, length in enumerate(lengths):
        known = i < n_known
        state = draw(st.sampled_from(BlockState)) if known else _tail_state(draw)
        blocks.append(_block(draw, i, Span(at, at + length), pins_in_10))
        states.append(BlockState.SAVED if adopts and known else state)
        at += length
    known_end = sum(lengths[:n_known])
    if n_known and not adopts:
        states[n_known - 1] = draw(
            st.sampled_from([BlockState.RESIDENT, BlockState.RESIDENT_SAVED])
        )
    loose = draw(st.integers(0, 150)) if n_known == len(lengths) and not adopts else 0
    rows = [b.span for b, s in zip(blocks, states, strict=True) if s.resident]
    rows += [Span(known_end, known_end + loose)]
    strange_at = known_end + loose + draw(st.integers(0, 3))
    strange = draw(st.integers(0, 200))
    rows += [Span(strange_at, strange_at + strange)]
    looked = draw(st.none() | st.just(np.linspace(0.9, 0.1, len(blocks))))
    return PolicyView(
        *view_columns(blocks, states),
        attention=looked,
        last_attended=None if looked is None else (10 * looked).round(),
        n_tokens=at + loose + draw(st.integers(1, 4)),
        n_past=0 if adopts else known_end + loose,
        resident=merged(rows),
        n_free=draw(st.integers(0, 400) | st.just(1 << 20)),
        max_tokens=draw(st.none() | st.integers(0, 2000)),
        adopt_to=known_end if adopts else 0,
        stale=tuple(draw(st.sets(st.sampled_from(["old/1", "old/2"])))),
        index=Index(),
    )


def _tail_state(draw: st.DrawFn) -> BlockState:
    return draw(st.sampled_from([BlockState.DROPPED, BlockState.DROPPED, BlockState.SAVED]))


def _block(draw: st.DrawFn, number: int, span: Span, pins_in_10: int) -> Block:
    role = draw(st.sampled_from(Role))
    return Block(
        display_name=f"{role}:{number}#0",
        label=f"s/{span.start}-{span.end}",
        span=span,
        role=role,
        turn=1,
        message=number // 2,
        text=" ".join(draw(st.lists(st.sampled_from(WORDS), max_size=4))),
        aliases=draw(st.sampled_from([(), (), ("src/a.py",), ("src/a.py", "src/b.py")])),
        pinned=draw(st.integers(1, 10)) <= pins_in_10,
        preferred=draw(st.integers(0, 9)) == 0,
    )


# Those that evict: each holds the same contract.
NAMES = [name for name in policy_names() if "_" not in name]  # no variants, not no_eviction
each = pytest.mark.parametrize("name", NAMES)
CONFIGS = st.builds(
    PolicyConfig,
    budget=st.integers(150, 1200) | st.sampled_from([None, 512]),
    recovery=st.sampled_from(["kv_restore", "kv_restore", "breadcrumb", "discard"]),
    block_tokens=st.just(64),
    sink_tokens=st.integers(0, 20),
    recent_tokens=st.integers(0, 60),
    reserve_tokens=st.integers(1, 300),
)
QUERIES = st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join)


def model_of(view: PolicyView) -> SlotModel:
    """A slot in the state a view shows. Its tokens are the prompt's below n_past, then others."""
    rows = {row for span in view.resident for row in range(span.start, span.end)}
    n = max([view.n_past, *(row + 1 for row in rows)])
    tokens = [p if p < view.n_past else -p - 1 for p in range(n)]
    model = SlotModel(n_cells=view.n_free + len(rows), tokens=tokens, rows=rows, peak=len(rows))
    for block, state in zip(view.blocks, states_of(view), strict=True):
        if state.saved:
            model.store[block.label] = (block.span, tuple(range(block.span.end)))
    return model


def after(view: PolicyView, plan: Plan) -> tuple[PolicyView, SlotModel]:
    """What a view looks like once its plan was run; Refused when the plan cannot be run."""
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
    _, here, copied = view_columns(view.blocks, states)
    later = replace(
        view, in_cache=here, in_pool=copied, n_past=cursor, resident=slot.resident,
        n_free=slot.n_free, adopt_to=0, stale=(),
    )  # fmt: skip
    return later, model


def resident_tokens(view: PolicyView) -> int:
    return total(view.reused_rows)


def reserve(view: PolicyView, config: PolicyConfig) -> int:
    wanted = config.reserve_tokens if view.max_tokens is None else view.max_tokens
    assert config.budget is not None
    return min(wanted, config.budget // 4)


def must_stay(view: PolicyView, config: PolicyConfig) -> list[Block]:
    """Of the resident blocks: sinks, pins, and the one that decoding goes on from."""
    return [
        block
        for block, state in zip(view.blocks, states_of(view), strict=True)
        if state.resident
        and (block.pinned or block.span.start < sinks(config) or view.n_past - 1 in block.span)
    ]


def sinks(config: PolicyConfig) -> int:
    return 0 if config.name == "recency" else config.sink_tokens


@each
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_a_plan_can_be_run_and_keeps_the_budget(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    plan = decide(view, query, config)
    then, model = after(view, plan)
    assert (
        then.n_past == view.n_past == model.view(list(range(view.n_tokens))).n_past(view.n_tokens)
    )
    if config.budget is None:
        assert not plan.evicts and not plan.infeasible
        assert plan.stream == DecodeBudget(0)
        return
    needed = resident_tokens(then) + view.n_to_decode + reserve(view, config)
    if plan.over_capacity:
        least = (config.budget - config.least_budget) // 2
        stays = total(block.span for block in must_stay(then, config))
        loose = resident_tokens(then) - total(
            block.span
            for block, state in zip(then.blocks, states_of(then), strict=True)
            if state.resident
        )
        assert resident_tokens(then) <= max(least, stays + loose)
        assert plan.stream is not None and plan.stream.min_budget <= config.budget
    elif not plan.infeasible:
        assert needed <= config.budget
        assert resident_tokens(view) > config.budget or model.peak <= max(
            config.budget, total(view.resident)
        )
    else:
        stays = must_stay(then, config)
        loose = resident_tokens(then) - sum(len(b.span) for b in stays)
        uncovered = max(0, view.n_past - (view.blocks[-1].span.end))
        assert loose == min(uncovered, loose), "an infeasible plan kept what it need not"


@each
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_infeasible_means_that_what_must_stay_does_not_fit(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    plan = decide(view, query, config)
    if config.budget is None:
        return
    held = [
        block
        for block, state in zip(view.blocks, states_of(view), strict=True)
        if (
            state.resident
            or (saves_evicted(config) and state.saved and block.span.end <= view.n_past)
        )
        and (block.pinned or block.span.start < sinks(config) or view.n_past - 1 in block.span)
    ]
    loose = resident_tokens(view) - sum(
        len(b.span) for b, s in zip(view.blocks, states_of(view), strict=True) if s.resident
    )
    needed = sum(len(block.span) for block in held) + loose
    assert plan.infeasible == (needed + view.n_to_decode + reserve(view, config) > config.budget)


@each
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
        spared = [*plan.stream.protect, Span(0, sinks(config))]
        assert not common((victim.span for victim in plan.stream.order), spared)
        assert plan.stream.min_budget <= max(
            plan.stream.budget, config.sink_tokens + config.recent_tokens + config.block_tokens
        )


@each
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_deciding_on_the_result_moves_nothing(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    then, _ = after(view, decide(view, query, config))
    again = decide(then, query, config)
    assert again.moves_nothing
    assert again.drops == ()


@each
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_evicting_saves_first_once_or_not_at_all(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    plan = decide(view, query, config)
    saved = {save.label for save in plan.saves}
    had = {b.label for b, s in zip(view.blocks, states_of(view), strict=True) if s.saved}
    evicted = {evict.label for evict in plan.evicts if evict.label is not None}
    if saves_evicted(config):
        assert saved == evicted - had
    else:
        assert not saved and not plan.loads
        assert had <= {drop.label for drop in plan.drops}
    assert set(view.stale) <= {drop.label for drop in plan.drops}
    if saves_evicted(config):
        assert {drop.label for drop in plan.drops} == set(view.stale)


@each
@given(views(), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_the_same_view_gives_the_same_plan_whatever_the_index_held(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    used = Index()
    used.relevance(Query.of("vault"), view.blocks[: len(view.blocks) // 2])
    other = replace(view, index=used)
    assert decide(view, query, config) == decide(other, query, config)
    assert decide(view, query, config) == decide(view, query, config)


@each
@given(views() | views(adopts=True), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_every_prompt_position_is_in_one_book(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name)
    if view.adopt_to and not saves_evicted(config):
        return  # a session never offers what its policy cannot do
    plan = decide(view, query, config)
    books = forecast(view, plan)
    then, _ = after(view, plan)
    cursor = then.n_past
    here = {p for span in then.reused_rows for p in range(span.start, span.end)}
    moves_of = plan.adopt.spans if plan.adopt else tuple(load.span for load in plan.loads)
    recovered = {p for span in moves_of for p in range(span.start, span.end)}
    assert recovered <= here
    assert books.recovered == len(recovered)
    assert books.resident_before == len(here - recovered)
    assert books.omitted == cursor - len(here)
    assert books.decoded == view.n_tokens - cursor
    assert min(books.recovered, books.resident_before, books.omitted, books.decoded) >= 0
    parts = books.recovered + books.resident_before + books.omitted + books.decoded
    assert parts == books.n_prompt == view.n_tokens


@pytest.mark.parametrize("name", ["evoke", "infllm", "oracle"])
@given(views(adopts=True), QUERIES, CONFIGS)
@settings(max_examples=50)
def test_a_session_comes_back_under_its_budget(
    name: str, view: PolicyView, query: str, config: PolicyConfig
) -> None:
    config = replace(config, name=name, recovery="kv_restore")
    plan = decide(view, query, config)
    then, _ = after(view, plan)
    assert not (plan.saves or plan.evicts or plan.loads)
    if plan.adopt is None:
        return
    assert plan.adopt.n_tokens == view.adopt_to
    assert plan.adopt.spans[-1].end == view.adopt_to
    assert list(plan.adopt.spans) == sorted(plan.adopt.spans)
    assert decide(then, query, config).moves_nothing
    if config.budget is not None and plan.over_capacity:
        assert total(plan.adopt.spans) <= config.budget
    elif config.budget is not None and not plan.infeasible:
        tail = view.n_tokens - view.adopt_to
        assert total(plan.adopt.spans) + tail + reserve(view, config) <= config.budget


def test_the_block_with_the_answer_comes_back_for_the_oldest_filler() -> None:
    texts = [FILLER[0], "the oslo vault code is 48213", *FILLER[2:8]]
    view = block_view(texts, "rsrrrrrr")
    plan = decide(view, "what is the oslo vault code?", CONFIG)
    assert moves_of(plan) == "-s/3 -s/4 +s/1"  # the neighbour of the answer stays
    assert [save.label for save in plan.saves] == ["s/3", "s/4"]
    assert plan.stream is not None and Span(64, 128) in plan.stream.protect


def test_nothing_moves_while_there_is_room() -> None:
    plan = decide(block_view(FILLER[:6], "rrrrrr"), "anything", CONFIG)
    assert plan.moves_nothing and not plan.infeasible


def test_everything_saved_comes_back_when_there_is_room() -> None:
    plan = decide(block_view(FILLER[:5], "rssbr"), "anything", CONFIG)
    assert moves_of(plan) == "+s/1 +s/2"


def test_without_a_budget_saved_blocks_come_back_as_cells_allow() -> None:
    view = block_view(FILLER[:5], "rssbr")
    unlimited = replace(CONFIG, budget=None)
    assert moves_of(decide(view, "number2", unlimited)) == "+s/1 +s/2"
    tight = replace(view, n_free=40 + 64)
    assert moves_of(decide(tight, "number2", unlimited)) == "+s/2"


def file_session() -> PolicyView:
    """A file read in three blocks, edited, then talked past; another file read in two."""
    view = block_view([*FILLER[:2], *["a line of it"] * 6, *FILLER[:6]], "rrsssssbrrrrrr")
    tool, said = Role.TOOL, Role.ASSISTANT
    # which block is of which message, whose it is and what it goes by
    shapes = {2: (2, tool, "src/a.py"), 3: (2, tool, "src/a.py"), 4: (4, tool, "src/a.py")}
    shapes |= {5: (4, tool, "src/a.py"), 6: (5, said, "src/a.py"), 7: (6, tool, "src/b.py")}
    blocks = list(view.blocks)
    for i, (message, role, path) in shapes.items():
        blocks[i] = replace(blocks[i], message=message, role=role, aliases=(path,))
    return replace(view, blocks=BlockTable(blocks))


@pytest.mark.parametrize(
    ("budget", "back"),
    [
        pytest.param(704, "s/4 s/5 s/6", id="latest reading and the edit since"),
        pytest.param(384, "s/4 s/5", id="the reading, where half of the room has not both"),
        pytest.param(300, "s/6", id="the edit, where half of the room has not the reading"),
    ],
)
def test_a_file_that_a_tool_is_called_with_comes_back_whole(budget: int, back: str) -> None:
    view, config = file_session(), replace(CONFIG, budget=budget)
    question = replace(Query.of("48213: return nothing"), files=("src/a.py", "src/c.py"))
    plan = registry.decide(view, question, config)
    assert " ".join(load.label for load in plan.loads) == back
    without = registry.decide(view, replace(question, files=()), config)
    assert not {"s/4", "s/5"} & {load.label for load in without.loads}


def test_a_small_difference_is_not_worth_a_move() -> None:
    view = block_view(FILLER[:8], "rsrrrrrr")
    first, second, *others = view.blocks
    view = replace(view, blocks=BlockTable([first, replace(second, preferred=True), *others]))
    assert moves_of(decide(view, "", replace(CONFIG, name="evoke_margin_0"))) == "-s/2 -s/3 +s/1"
    assert moves_of(decide(view, "", replace(CONFIG, name="evoke_margin_0.5"))) == "-s/2"


def test_what_has_just_come_back_stays_twice_as_long_but_not_for_a_question_about_another() -> None:
    """Two blocks worth half a point more than one that came back: more than the margin, less than
    twice that."""
    view = block_view(FILLER[:8], "rsrrrrrr")
    blocks = [replace(block, priority=0.3) for block in view.blocks]
    blocks[1] = replace(blocks[1], priority=0.8)
    view = replace(view, blocks=BlockTable(blocks))
    config = replace(CONFIG, name="evoke_margin_0.2")
    lately = replace(view, recovered=np.array([i > 1 for i in range(8)]))
    assert "+s/1" in moves_of(decide(view, "", config))
    assert "+s/1" not in moves_of(decide(lately, "", config))
    assert "+s/1" in moves_of(decide(lately, "number1", config))


def test_equal_blocks_are_told_apart_by_key() -> None:
    view = block_view(["x"] * 10, "r" * 10)
    keys = [f"key{(i * 7) % 10}" for i in range(10)]
    flat = [
        replace(b, display_name=k, preferred=True) for b, k in zip(view.blocks, keys, strict=True)
    ]
    plan = decide(replace(view, blocks=BlockTable(flat)), "", CONFIG)
    left = {b.display_name for b in flat} - {
        flat[int((e.label or "")[2:])].display_name for e in plan.evicts
    }
    assert left - {keys[0], keys[9]} == {"key1", "key2", "key4", "key5"}
    assert plan.stream is not None
    assert [flat[int(v.label[2:])].display_name for v in plan.stream.order] == sorted(
        left - {keys[0]}
    )


class NoisyIndex(Index):
    """Sums words up in the opposite order for odd blocks: 0.3 and 0.1 + 0.2 are not the same."""

    def relevance(self, question: Query, blocks: BlockTable, *_: object) -> FloatArray:
        return np.array([0.3 if i % 2 else 0.1 + 0.2 for i in range(len(blocks))])


def test_the_order_of_a_sum_decides_nothing() -> None:
    view = block_view(["x"] * 10, "r" * 10)
    flat = BlockTable(replace(block, preferred=True) for block in view.blocks)
    plan = decide(replace(view, blocks=flat, index=NoisyIndex()), "", CONFIG)
    assert moves_of(plan) == "-s/5 -s/6 -s/7 -s/8"


def test_rows_behind_the_last_block_count_too() -> None:
    view = block_view(FILLER[:6], "rrrrrr", tail=40)
    behind = replace(view, n_past=384 + 60, resident=(Span(0, 384 + 60),), n_tokens=384 + 100)
    assert decide(view, "", CONFIG).moves_nothing
    assert moves_of(decide(behind, "", CONFIG)) == "-s/1"


def test_a_pin_that_is_out_comes_back_first() -> None:
    view = block_view(FILLER[:8], "rsrrrrrr", pins="1")
    assert "+s/1" in moves_of(decide(view, "number5 number6", CONFIG))


def test_a_tail_over_the_budget_frees_all_but_what_must_stay() -> None:
    view = block_view(FILLER[:8], "rrrrrrrr", tail=5000, pins="3")
    plan = decide(view, "number5", CONFIG)
    assert plan.infeasible and "5000" in plan.reason
    # what must stay takes the half of the budget that is kept for earlier blocks
    assert moves_of(plan) == "-s/1 -s/2 -s/4 -s/5 -s/6"
    assert plan.stream is not None
    assert plan.stream.protect == (Span(0, 64), Span(192, 256), Span(448, 512))


def test_the_best_earlier_blocks_stay_beside_a_tail_over_the_budget() -> None:
    view = block_view(FILLER[:12], "rrrrrrrrssss", tail=5000)
    plan = decide(view, "number9", replace(CONFIG, budget=1024))
    assert plan.over_capacity and "+s/9" in moves_of(plan)
    assert plan.stream is not None
    assert any(Span(9 * 64, 10 * 64).start in span for span in plan.stream.protect)
    assert plan.stream.min_budget <= 1024
    recency = decide(view, "number9", replace(CONFIG, budget=1024, name="recency"))
    assert recency.infeasible and not recency.over_capacity


def test_the_engine_evicts_the_old_before_the_new_and_the_useless_first() -> None:
    view = block_view([*FILLER[:4], "new text", "other text"], "rrrrdd")
    view = replace(view, n_past=256, resident=(Span(0, 256),), n_tokens=6 * 64 + 10)
    plan = decide(view, "number1", CONFIG)
    assert plan.stream is not None
    # s/2 is older than s/3, but it is next to what the question is about.
    assert [victim.label for victim in plan.stream.order] == ["s/3", "s/2", "s/1", "s/4", "s/5"]


def test_of_a_long_turn_what_its_question_is_about_goes_last() -> None:
    texts = [*FILLER[:2], "the oslo vault code is 48213", *FILLER[3:8]]
    document = replace(block_view(texts, "dddddddd"), n_past=0, resident=())
    query = " ".join(texts) + " filler" * 200 + " so what is the oslo vault code?"
    plan = decide(document, query, CONFIG)
    assert plan.stream is not None
    order = [victim.label for victim in plan.stream.order]
    assert order[-1] == "s/2"


def test_of_a_very_long_turn_both_ends_are_looked_up() -> None:
    view = block_view(FILLER[:8], "rssrrrrr")
    padding = "x " * 5000
    assert "+s/1" in moves_of(decide(view, f"number1 {padding}", CONFIG))
    assert "+s/2" in moves_of(decide(view, f"{padding} number2", CONFIG))
    assert "+" not in moves_of(decide(view, f"{padding} number1 {padding}", CONFIG))


def test_strange_rows_make_room_for_what_comes_back() -> None:
    view = block_view(FILLER[:3], "rsr", tail=40)
    view = replace(view, resident=(*view.resident, Span(300, 700)), n_free=0)
    plan = decide(view, "number1", CONFIG)
    assert [(evict.span, evict.label) for evict in plan.evicts] == [(Span(300, 699), None)]
    assert moves_of(plan).endswith("+s/1")


def test_the_reserve_is_the_answers_limit_but_not_most_of_the_budget() -> None:
    def kept(max_tokens: int | None) -> int:
        view = replace(block_view(FILLER[:8], "rrrrrrrr", tail=40), max_tokens=max_tokens)
        return 8 - len(decide(view, "", CONFIG).evicts)

    assert [kept(limit) for limit in (0, None, 64, 100, 128, 100_000)] == [7, 6, 6, 5, 5, 5]


def test_the_policy_that_moves_nothing_turns_the_stream_off() -> None:
    view = replace(block_view(FILLER[:9], "rssrrrrrr"), stale=("old",))
    plan = decide(view, "number1", replace(CONFIG, name="no_eviction"))
    assert plan.moves_nothing
    assert plan.stream == DecodeBudget(0)
    assert [drop.label for drop in plan.drops] == ["old"]


def test_what_is_left_of_a_truncated_prompt_is_held_in_the_budget_too() -> None:
    config = replace(CONFIG, name="truncate")
    plan = decide(block_view(FILLER[:9], "rrrrrrrrr", tail=40), "number1", config)
    assert plan.evicts and not plan.saves and not plan.loads
    assert plan.stream is not None and plan.stream.budget == CONFIG.budget


def test_an_unknown_policy_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="lru"):
        decide(block_view(FILLER[:1], "r"), "", replace(CONFIG, name="lru"))


def test_coming_back_without_cells_means_decoding_again() -> None:
    view = replace(block_view(FILLER[:3], "sss"), n_past=0, adopt_to=192, resident=(), n_free=10)
    plan = decide(view, "", CONFIG)
    assert plan.adopt is None and plan.moves_nothing
    assert plan.stream is not None and plan.stream.budget == 512
    assert [victim.label for victim in plan.stream.order] == []


@example(0)
@given(st.integers(0, 11))
def test_a_session_comes_back_with_what_the_question_is_about(number: int) -> None:
    view = replace(block_view(FILLER, "s" * 12), n_past=0, adopt_to=768, resident=())
    plan = decide(view, f"number{number}", CONFIG)
    assert plan.adopt is not None
    assert {"s/0", "s/11", f"s/{number}"} <= set(plan.adopt.labels)


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    room=st.integers(0, 1500),
    values=st.data(),
)
def test_sorting_only_what_may_fit_takes_the_same(
    lengths: list[int], room: int, values: st.DataObject
) -> None:
    starts = np.cumsum([0, *lengths]).tolist()
    table = BlockTable(
        Block(f"b{i}", f"b{i}", Span(a, b), Role.USER, 1, i, "")
        for i, (a, b) in enumerate(zip(starts, starts[1:], strict=False))
    )
    worth = np.array([values.draw(st.integers(0, 5)) for _ in lengths], np.float64)
    wanted = np.array([values.draw(st.booleans()) for _ in lengths])
    whole = planner.first_fit(planner.by_score(wanted, worth, table), table.lengths, room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_SORTED_AT_ONCE", 4)
        found = planner.best_fit(wanted, worth, table, room)
    assert found.tolist() == whole.tolist()


def test_a_file_that_a_tool_is_called_with_comes_before_other_results_of_the_task() -> None:
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
    plan = registry.decide(view, query, replace(CONFIG, budget=640))
    assert "+s/4 +s/5 +s/6" in moves_of(plan)
    assert not any(f"-s/{rule}" in moves_of(plan).split() for rule in (0, 1))


def test_a_file_is_reread_after_a_restart_too() -> None:
    """A slot that adopts saved blocks decodes only what follows them, not the whole prompt."""
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
    assert reread_file_blocks(view, query, CONFIG).tolist() == [i == 7 for i in range(9)]
