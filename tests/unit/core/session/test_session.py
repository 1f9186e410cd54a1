"""Sessions: whole conversations with a model of a slot, whose plans must be accepted."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_model import Refused, SlotModel, total, view_columns

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.config import PolicyConfig
from evoke_proxy.config.policy_names import policy_names
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span, common
from evoke_proxy.core.model.plan import DecodeBudget, Plan
from evoke_proxy.core.policy.registry import saves_evicted
from evoke_proxy.core.policy.turn import Turn, effective_config
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.prompt.layout import SavedRange
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered
from evoke_proxy.core.request.chat import ChatRequest, parse_chat
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.session.accounting import TokenAccounting, forecast
from evoke_proxy.core.session.past import Past
from evoke_proxy.core.session.session import Session
from evoke_proxy.errors import BudgetTooSmall, PinBudgetExceeded

CONFIG = PolicyConfig(
    budget=512, block_tokens=64, sink_tokens=16, recent_tokens=32, reserve_tokens=64
)
BEGIN, END = 10_000, 20_000
ROLES = list(Role)


@dataclass
class Conversation:
    """A conversation; a message is rendered as a begin token, a token per word, an end token."""

    messages: list[tuple[Role, list[int]]] = field(default_factory=list)
    marks: dict[int, dict[str, Any]] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    def say(self, role: Role, words: Sequence[int]) -> None:
        self.messages.append((role, list(words)))

    def rendered(self) -> Rendered:
        tokens: list[int] = []
        spans = []
        for i, (role, words) in enumerate(self.messages):
            start = len(tokens)
            tokens += [BEGIN + ROLES.index(role), *words, END]
            spans.append(MessageSpan(i, role, Span(start, len(tokens))))
        generation = len(tokens)
        tokens.append(BEGIN + ROLES.index(Role.ASSISTANT))
        return Rendered(np.array(tokens, np.int32), generation, tuple(spans))

    def request(self) -> ChatRequest:
        body = [
            {"role": str(role), "content": " ".join(f"w{word}" for word in words)}
            | self.marks.get(i, {})
            for i, (role, words) in enumerate(self.messages)
        ]
        return parse_chat("chat", {"messages": body, "max_tokens": 30} | self.fields)


@dataclass
class Engine:
    """A session and a slot model, and what the engine does with them in a turn."""

    config: PolicyConfig = CONFIG
    slot: SlotModel = field(default_factory=lambda: SlotModel(n_cells=4096))
    refusals: int = 0

    def __post_init__(self) -> None:
        self.session = Session("s", "", self.config, can_adopt=not self.slot.recurrent)

    def begin(self, conversation: Conversation) -> Turn:
        rendered = conversation.rendered()
        view = self.slot.view(rendered.tokens.tolist())
        return self.session.begin(rendered, view, conversation.request(), None, None)

    def planned(self, conversation: Conversation) -> tuple[Turn, Plan]:
        """Plans until the slot accepts; after each refusal the refused copy is forgotten."""
        is_refilled = False
        for _ in range(200):
            turn = self.begin(conversation)
            if not is_refilled and self.refill(turn):
                is_refilled, turn = True, self.begin(conversation)
            plan = self.session.plan(turn)
            try:
                self.slot.run(plan, turn.rendered.tokens.tolist())
            except Refused as refused:
                assert refused.type in ("unknown_block", "stale_block"), refused
                assert refused.name is not None
                self.refusals += 1
                self.session.failed({refused.name})
                continue
            self.session.applied(turn, plan)
            return turn, plan
        raise AssertionError("no plan was ever accepted")

    def refill(self, turn: Turn) -> bool:
        """Decodes the lost blocks that a turn needs, within the budget; False when there are none.

        A refused step ends it: a copy was lost without the session's knowledge.
        """
        tokens = turn.rendered.tokens.tolist()
        steps = self.session.lost_block_steps(turn)
        config = turn.config
        stream = DecodeBudget(0)
        if config.budget is not None:
            sizes = (config.sink_tokens, config.recent_tokens, config.block_tokens)
            stream = DecodeBudget(config.budget, *sizes)
        for step in steps:
            try:
                self.slot.run(step.begin(stream), tokens)
            except Refused as refused:
                assert refused.type in ("unknown_block", "stale_block"), refused
                assert refused.name is not None
                self.session.failed({refused.name})
                return True
            timings = self.slot.answer(tokens[: step.end], [])
            accounting = TokenAccounting.parse(timings)
            assert accounting is not None and not accounting.auto_evicted
            assert accounting.decoded <= step.n_tokens + 1
            if config.budget is not None:
                assert accounting.n_resident_peak <= config.budget
            self.slot.run(step.saves, [])
            self.session.saved(step.saves)
        return bool(steps)

    def turn(
        self, conversation: Conversation, answer: Sequence[int], reported: bool = True
    ) -> TokenAccounting:
        rows_before = len(self.slot.rows)
        turn, plan = self.planned(conversation)
        timings = self.slot.answer(turn.rendered.tokens.tolist(), answer)
        accounting = TokenAccounting.parse(timings)
        assert accounting is not None
        assert self.session.finish(accounting if reported else None)
        self.check(turn, plan, accounting, rows_before)
        conversation.say(Role.ASSISTANT, answer)
        return accounting

    def check(self, turn: Turn, plan: Plan, accounting: TokenAccounting, rows_before: int) -> None:
        parts = (
            accounting.decoded
            + accounting.recovered
            + accounting.resident_before
            + accounting.omitted
        )
        assert parts == accounting.n_prompt == len(turn.rendered.tokens)
        expected = forecast(turn.view, plan)
        if self.slot.recurrent and accounting.decoded > expected.decoded:
            return  # decoding continued from a checkpoint or from the start
        assert expected.decoded == accounting.decoded
        if turn.config.budget is not None:
            # the peak includes rows of the session that had the slot before
            assert accounting.n_resident_peak <= max(turn.config.budget, rows_before)
            if not plan.infeasible:
                # no row is recovered and then evicted before the answer begins
                assert accounting.recovered == expected.recovered
                assert accounting.resident_before == expected.resident_before
                assert accounting.omitted == expected.omitted

    def hand_over(self, to: Sequence[int] = (1,) * 300) -> None:
        """Saves the resident rows and gives the slot to another session."""
        plan = self.session.plan_save_all(self.slot.view([]))
        self.slot.run(plan, [])
        self.session.saved(plan)
        self.slot.taken_by(to, epoch=self.slot.epoch + 1)

    def write_back(self) -> None:
        """Saves the resident blocks of the last prompt, as the engine does while it is idle."""
        plan = Plan(saves=tuple(self.session.unsaved(self.slot.view([]))))
        self.slot.run(plan, [])
        self.session.saved(plan)


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1, 400), k=count)


def conversation_of(*lengths: int) -> Conversation:
    conversation = Conversation()
    conversation.say(Role.SYSTEM, words(0, 60))
    for i, length in enumerate(lengths):
        conversation.say(Role.ASSISTANT if i % 2 else Role.USER, words(i + 1, length))
    return conversation


def test_the_repr_of_a_session_has_its_id_and_counts() -> None:
    engine = Engine()
    assert repr(engine.session) == "<Session s turns=0 tokens=0 blocks=0 saved=0>"
    conversation = conversation_of(100)
    engine.turn(conversation, words(9, 40))
    assert repr(engine.session) == "<Session s turns=1 tokens=165 blocks=4 saved=0>"
    assert engine.session.tokens.tolist() == conversation.rendered().tokens.tolist()[:164] + [
        BEGIN + 2
    ]


def test_the_block_a_question_is_about_is_recovered() -> None:
    engine = Engine()
    conversation = conversation_of(60)
    conversation.say(Role.ASSISTANT, words(50, 5))
    # No later message shares a word with this one, so that it gets evicted.
    conversation.say(Role.USER, [777, 778, 779, *(word + 1000 for word in words(51, 40))])
    for i in range(12):
        engine.turn(conversation, words(100 + i, 20))
        conversation.say(Role.USER, words(200 + i, 50))
    out = [b for b in engine.session.layout.blocks if "w777" in b.text]
    engine.turn(conversation, words(300, 20))
    assert not common(engine.slot.view([]).resident, [out[0].span]), (
        "the block must have been evicted by now"
    )
    conversation.say(Role.USER, [777, 778, 779])
    accounting = engine.turn(conversation, words(301, 20))
    assert accounting.recovered >= len(out[0].span)
    assert any(rows.encloses(out[0].span) for rows in engine.slot.view([]).resident)


def test_a_prompt_many_times_the_budget_is_decoded_within_it() -> None:
    engine = Engine()
    conversation = conversation_of(5000)
    accounting = engine.turn(conversation, words(9, 200))
    assert accounting.n_resident_peak <= 512
    assert accounting.decoded_hidden > 4000
    conversation.say(Role.USER, words(5, 20))
    accounting = engine.turn(conversation, words(10, 20))
    assert accounting.decoded < 40
    assert accounting.recovered > 100


def test_without_a_budget_nothing_is_omitted() -> None:
    engine = Engine(replace(CONFIG, budget=None))
    conversation = conversation_of(300, 300, 300)
    for i in range(4):
        accounting = engine.turn(conversation, words(i, 50))
        assert accounting.omitted == accounting.recovered == 0
        conversation.say(Role.USER, words(i + 50, 50))


@pytest.mark.parametrize("policy", ["discard", "evoke"])
def test_with_discard_nothing_is_saved_or_recovered(policy: str) -> None:
    recovery = "kv_restore" if policy == "discard" else "discard"
    engine = Engine(replace(CONFIG, name=policy, recovery=recovery))
    conversation = conversation_of(400, 50, 300)
    for i in range(6):
        accounting = engine.turn(conversation, words(i, 50))
        assert accounting.recovered == 0
        conversation.say(Role.USER, words(i + 50, 100))
    engine.turn(conversation, words(60, 50))
    assert accounting.omitted > 0
    # copies that the server made during this turn are dropped with the next one
    assert set(engine.slot.store) <= engine.session.layout.saved | {
        item.label for item in engine.session.layout.ranges
    }


def test_a_session_is_recovered_into_a_slot_that_another_session_had() -> None:
    engine = Engine()
    conversation = conversation_of(300, 300, 300)
    engine.turn(conversation, words(9, 100))
    engine.hand_over()
    conversation.say(Role.USER, words(10, 30))
    accounting = engine.turn(conversation, words(11, 20))
    assert accounting.decoded < 40
    assert accounting.recovered > 300
    assert accounting.resident_before == 0
    conversation.say(Role.USER, words(12, 30))
    assert engine.turn(conversation, words(13, 20)).decoded < 40


def test_a_short_common_prefix_with_another_session_does_not_split_copies() -> None:
    engine = Engine()
    conversation = conversation_of(300, 300, 300)
    engine.turn(conversation, words(9, 100))
    engine.hand_over([*conversation.rendered().tokens.tolist()[:40], *([1] * 300)])
    conversation.say(Role.USER, words(10, 30))
    accounting = engine.turn(conversation, words(11, 20))
    assert accounting.decoded < 40
    assert accounting.recovered > 300


def test_generated_tokens_are_recovered() -> None:
    engine = Engine(replace(CONFIG, budget=None))
    conversation = conversation_of(100)
    engine.turn(conversation, words(9, 200))
    engine.hand_over()
    conversation.say(Role.USER, words(10, 10))
    accounting = engine.turn(conversation, words(11, 5))
    assert (
        accounting.decoded == 1 + 12 + 1
    )  # the answer's end token, the question, the next opening
    assert accounting.omitted == 0


def test_an_answer_that_the_client_changed_is_decoded_again() -> None:
    engine = Engine(replace(CONFIG, budget=None))
    conversation = conversation_of(100)
    engine.turn(conversation, words(9, 200))
    engine.hand_over()
    conversation.messages[-1] = (Role.ASSISTANT, [*words(9, 100), 5, *words(9, 200)[101:]])
    conversation.say(Role.USER, words(10, 10))
    accounting = engine.turn(conversation, words(11, 5))
    assert engine.refusals == 1, "after one refused copy the later ones must not be tried"
    assert 100 < accounting.decoded < 200
    assert accounting.omitted == 0
    assert engine.session.layout.saved <= set(engine.slot.store)
    assert not [name for name in engine.slot.store if name not in engine.session.layout.saved]


def test_a_recurrent_slot_is_not_adopted_but_decoded_again() -> None:
    engine = Engine(slot=SlotModel(n_cells=4096, recurrent=True))
    conversation = conversation_of(300, 300, 300)
    engine.turn(conversation, words(9, 100))
    conversation.say(Role.USER, words(10, 30))
    engine.turn(conversation, words(10, 100))
    assert engine.session.redecoded == 0
    before = len(engine.session.tokens)
    saved = set(engine.slot.store)
    engine.hand_over()
    assert set(engine.slot.store) == saved, "copies that cannot be adopted must not be made"
    conversation.say(Role.USER, words(11, 30))
    accounting = engine.turn(conversation, words(11, 20))
    assert accounting.decoded == accounting.n_prompt
    assert engine.session.redecoded == before
    assert accounting.n_resident_peak <= 512


def test_only_the_row_of_a_checkpoint_is_not_evictable_and_not_its_block() -> None:
    engine = Engine(slot=SlotModel(n_cells=4096, recurrent=True))
    conversation = conversation_of(400)
    engine.turn(conversation, words(9, 10))
    held = engine.slot.held
    conversation.say(Role.USER, words(10, 300))
    turn, plan = engine.planned(conversation)
    alone = {b.span.start for b in turn.view.blocks if len(b.span) == 1}
    assert alone >= {row for row in held if row < turn.rendered.generation}
    assert not any(row in evict.span for evict in plan.evicts for row in held)
    beside = [e.span for e in plan.evicts if any(row + 1 == e.span.start for row in held)]
    assert beside, "rows next to a checkpoint's row must be evictable"


def test_foreign_rows_exclude_the_row_of_a_checkpoint() -> None:
    view = PolicyView(
        *view_columns([], []),
        n_tokens=9,
        n_past=4,
        resident=(Span(0, 20),),
        non_evictable=(Span(9, 10),),
    )
    assert view.foreign_rows == (Span(4, 9), Span(10, 19))


def test_after_losing_a_slot_without_saving_only_what_is_needed_is_decoded_again() -> None:
    engine = Engine()
    conversation = conversation_of(300, 300, 300)
    engine.turn(conversation, words(9, 100))
    engine.slot.taken_by([1] * 300, epoch=9)
    conversation.say(Role.USER, words(10, 30))
    lost = ~engine.session.layout.in_pool
    assert lost.any() and engine.session.layout.in_pool.any()
    accounting = engine.turn(conversation, words(11, 20))
    # The lost blocks that the plan needs have copies again, and the rest is omitted.
    assert accounting.decoded < accounting.n_prompt / 4
    assert engine.session.layout.in_pool[0], "the beginning of the prompt always stays"
    assert accounting.recovered + accounting.resident_before > CONFIG.budget / 2


def test_after_a_restart_everything_is_decoded_again() -> None:
    engine = Engine()
    conversation = conversation_of(300, 300, 300)
    engine.turn(conversation, words(9, 100))
    engine.slot = SlotModel(n_cells=4096, epoch=50)
    engine.session.on_server_restart(can_adopt=True)
    conversation.say(Role.USER, words(10, 30))
    accounting = engine.turn(conversation, words(11, 20))
    assert accounting.decoded == accounting.n_prompt
    assert engine.refusals == 0


def test_a_broken_off_reply_loses_no_copies() -> None:
    engine = Engine()
    conversation = conversation_of(1500)
    engine.turn(conversation, words(9, 20), reported=False)
    conversation.say(Role.USER, words(1, 1500)[600:630])
    accounting = engine.turn(conversation, words(11, 20))
    assert engine.refusals == 0
    assert accounting.decoded < 60
    assert accounting.recovered >= 30


def test_a_broken_off_reply_loses_no_pieces_of_blocks() -> None:
    """In pieces, llama-server has saved blocks that were not complete when it needed their room."""
    engine = Engine(replace(CONFIG, budget=160))
    conversation = conversation_of(150)
    engine.turn(conversation, words(9, 5))
    conversation.messages[-1] = (Role.ASSISTANT, words(10, 150))
    conversation.say(Role.USER, words(11, 20))
    engine.turn(conversation, words(12, 20), reported=False)
    assert any(name.count("/") == 2 for name in engine.slot.store)
    for _ in range(2):
        conversation.say(Role.USER, words(13, 10))
        engine.turn(conversation, words(14, 5))
        engine.write_back()
    # A block that left in pieces counts as saved until llama-server refuses to load it.
    unknown = engine.session.layout.saved - engine.slot.store.keys()
    assert unknown
    n_written_back = engine.session.layout.generation
    engine.session.failed(unknown)
    engine.begin(conversation)
    layout = engine.session.layout
    assert layout.saved_end(n_written_back) == n_written_back
    assert layout.saved <= engine.slot.store.keys()


def test_blocks_that_were_never_decoded_have_no_copy() -> None:
    engine = Engine()
    conversation = conversation_of(1500)
    turn, _ = engine.planned(conversation)
    engine.slot.answer(
        turn.rendered.tokens.tolist()[:700], []
    )  # the client disconnected during the prefill
    engine.session.finish(None)
    engine.begin(conversation)
    assert engine.session.layout.saved
    assert engine.session.layout.saved <= set(engine.slot.store)
    accounting = engine.turn(conversation, words(9, 20))
    assert engine.refusals == 0
    assert accounting.decoded < 900


def test_a_missing_copy_is_noticed_and_not_loaded() -> None:
    engine = Engine()
    conversation = conversation_of(1500)
    engine.turn(conversation, words(9, 20))
    conversation.say(Role.USER, words(1, 1500)[600:630])
    labels = {load.label for load in engine.session.plan(engine.begin(conversation)).loads}
    assert labels
    for label in labels:
        del engine.slot.store[label]
    engine.turn(conversation, words(11, 20))
    assert engine.refusals > 0
    assert not labels & engine.session.layout.saved


def test_accounting_that_contradicts_the_plan_is_noticed() -> None:
    engine = Engine()
    turn, plan = engine.planned(conversation_of(300))
    expected = forecast(turn.view, plan)
    assert not engine.session.finish(replace(expected, decoded=0, omitted=expected.decoded))
    turn, plan = engine.planned(conversation_of(300))
    assert engine.session.finish(expected)
    assert engine.session.finish(expected), "without a plan there is no contradiction"


def test_evictions_by_the_server_are_not_a_contradiction() -> None:
    engine = Engine()
    conversation = conversation_of(300)
    engine.turn(conversation, words(1, 10))
    conversation.say(Role.USER, words(2, 10))
    turn, plan = engine.planned(conversation)
    expected = forecast(turn.view, plan)
    less = replace(
        expected, resident_before=expected.resident_before - 64, omitted=expected.omitted + 64
    )
    assert engine.session.finish(replace(less, auto_evicted=((Span(64, 128), "x"),)))
    turn, plan = engine.planned(conversation)
    assert not engine.session.finish(less)


def test_the_past_is_forgotten_when_the_setting_is_off() -> None:
    engine = Engine()
    removed = Block("user:1#0", "p/0", Span(0, 4), Role.USER, 0, 0, "Hello.")
    engine.session.past = Past(BlockTable([removed]))
    engine.begin(conversation_of(300))
    assert not len(engine.session.past)


def test_beginning_twice_is_one_turn() -> None:
    engine = Engine()
    conversation = conversation_of(300)
    first, second = engine.begin(conversation), engine.begin(conversation)
    assert (first.number, second.number) == (1, 1)
    assert engine.session.plan(first) == engine.session.plan(second)
    assert [b.label for b in first.view.blocks] == [b.label for b in second.view.blocks]
    engine.turn(conversation, [])
    assert engine.begin(conversation).number == 2


def test_a_query_that_was_compared_before_gives_the_same_task() -> None:
    vectors = np.eye(3, dtype=np.float32)
    engines = compared, other = Engine(), Engine()
    conversation = conversation_of(300)
    for engine in engines:
        engine.turn(conversation, [])
    for vector in (vectors[0], vectors[0] * 0.6 + vectors[1] * 0.8, vectors[2]):
        query, rendered = Query.of("w1 w2").embedded([vector]), conversation.rendered()
        compared.session.compare(query)
        turns = []
        for engine in engines:
            view = engine.slot.view(rendered.tokens.tolist())
            turns.append(engine.session.begin(rendered, view, conversation.request(), query, None))
            engine.session.applied(turns[-1], engine.session.plan(turns[-1]))
        focuses = [turn.task.focus for turn in turns]
        assert focuses[0] is not None and np.array_equal(*focuses)  # type: ignore[arg-type]
        assert compared.session._compared is not None
        assert turns[0].task is compared.session._compared[2]
        # The same query again, after its turn: the topic counts once more.
        draft = compared.session.draft()
        view = compared.slot.view(rendered.tokens.tolist())
        repeated = draft.begin(rendered, view, conversation.request(), query, None)
        assert repeated.task is not turns[0].task


def test_the_divergence_is_the_position_where_the_history_changed() -> None:
    engine = Engine()
    conversation = conversation_of(300, 40, 40)
    engine.turn(conversation, words(1, 10))
    conversation.say(Role.USER, words(2, 10))
    assert engine.begin(conversation).divergence is None
    conversation.messages[1] = (Role.USER, [*words(1, 100), 9_999])
    assert engine.begin(conversation).divergence == 62 + 1 + 100


def test_copies_after_a_divergence_are_dropped() -> None:
    engine = Engine()
    conversation = conversation_of(1500)
    engine.turn(conversation, words(9, 20))
    before = set(engine.slot.store)
    conversation.messages[1] = (Role.USER, words(77, 30))
    engine.turn(conversation, words(9, 20))
    assert len(set(engine.slot.store) & before) <= 1
    assert engine.session.layout.stale == frozenset()


def test_a_client_may_lower_the_budget_and_choose_the_policy() -> None:
    def effective(**tags: Any) -> PolicyConfig:
        return effective_config(CONFIG, replace(conversation_of(1), fields=tags).request())

    assert effective() == CONFIG
    assert effective(evoke_budget=300).budget == 300
    assert effective(evoke_budget=3000).budget == 512
    assert effective(evoke_policy="discard").name == "discard"
    assert effective(evoke_recovery="discard").recovery == "discard"
    unlimited = replace(CONFIG, budget=None)
    conversation = replace(conversation_of(1), fields={"evoke_budget": 300})
    assert effective_config(unlimited, conversation.request()).budget == 300


def test_a_budget_that_holds_no_block_is_refused() -> None:
    conversation = replace(conversation_of(100), fields={"evoke_budget": 111})
    with pytest.raises(BudgetTooSmall) as caught:
        Engine().begin(conversation)
    assert caught.value.needed == 112
    Engine().begin(replace(conversation, fields={"evoke_budget": 112}))


def pinned_conversation(length: int, system: int = 60) -> Conversation:
    conversation = Conversation(marks={1: {"evoke_keep": "pin"}})
    conversation.say(Role.SYSTEM, words(0, system - 2))
    conversation.say(Role.USER, words(1, length - 2))
    return conversation


def test_pins_are_limited_to_a_share_of_the_budget_without_system_and_sinks() -> None:
    cap = int(0.6 * (512 - 16 - 60))
    Engine().begin(pinned_conversation(cap))
    with pytest.raises(PinBudgetExceeded) as caught:
        Engine().begin(pinned_conversation(cap + 1))
    assert (caught.value.pinned_tokens, caught.value.pin_cap) == (cap + 1, cap)
    Engine(replace(CONFIG, budget=None)).begin(pinned_conversation(cap + 1))
    # a long system prompt still leaves room for pins, and a small budget for one block
    Engine().begin(pinned_conversation(int(0.6 * 128), system=2000))
    small = Engine(replace(CONFIG, budget=130))
    small.begin(pinned_conversation(130 - 112, system=2))
    with pytest.raises(PinBudgetExceeded):
        small.begin(pinned_conversation(130 - 111, system=2))


def test_a_refused_request_leaves_the_session_as_it_was() -> None:
    engine = Engine()
    conversation = conversation_of(1500)
    engine.turn(conversation, words(9, 20), reported=False)
    before = repr(engine.session)
    with pytest.raises(BudgetTooSmall):
        engine.begin(replace(conversation, fields={"evoke_budget": 1}))
    assert repr(engine.session) == before
    conversation.say(Role.USER, words(10, 30))
    assert engine.turn(conversation, words(11, 20)).decoded < 60


def test_a_pinned_message_stays_resident() -> None:
    engine = Engine()
    conversation = pinned_conversation(200)
    for i in range(8):
        engine.turn(conversation, words(100 + i, 40))
        resident = engine.slot.view([]).resident
        assert any(rows.encloses(Span(60, 260)) for rows in resident)
        conversation.say(Role.USER, words(200 + i, 60))


def test_a_whole_turn_can_be_pinned_or_given_a_priority() -> None:
    engine = Engine()
    conversation = conversation_of(50)
    conversation.fields = {"evoke_pinned": True, "evoke_priority": 0.5}
    engine.turn(conversation, words(1, 10))
    conversation.fields = {}
    conversation.say(Role.USER, words(2, 20))
    blocks = engine.begin(conversation).view.blocks
    assert [(b.pinned, b.priority) for b in blocks if b.turn == 1] == [(True, 0.5)] * 3
    assert {(b.pinned, b.priority) for b in blocks if b.turn == 2} == {(False, 1.0)}


def test_a_task_starts_at_the_first_user_message_of_its_request() -> None:
    engine = Engine()
    conversation = conversation_of(50, 30, 70)
    before = engine.begin(conversation).view.blocks
    engine.turn(conversation, words(1, 10))
    conversation.fields = {"evoke_task_boundary": True}
    conversation.say(Role.TOOL, words(2, 40))
    conversation.say(Role.USER, words(3, 90))
    turn = engine.begin(conversation)
    first = next(b.span.start for b in turn.view.blocks if b.turn == 2 and b.role is Role.USER)
    assert turn.task.start == first > before[-1].span.end
    engine.turn(conversation, words(4, 10))
    conversation.fields = {}
    conversation.say(Role.USER, words(5, 20))
    assert engine.begin(conversation).task.start == first


def test_a_changed_file_after_a_result_begins_no_task() -> None:
    engine = Engine()
    conversation = conversation_of(50)
    engine.turn(conversation, words(1, 10))
    conversation.fields = {"evoke_task_boundary": True}
    conversation.say(Role.TOOL, words(2, 40))
    conversation.say(Role.USER, words(3, 90))
    changed = "<system-reminder>\nNote: a.py was modified.\nPORT = 1\n</system-reminder>"
    conversation.marks[len(conversation.messages) - 1] = {"content": changed}
    turn = engine.begin(conversation)
    assert turn.task.start == turn.rendered.generation


def test_a_task_without_a_user_message_starts_at_the_answer() -> None:
    engine = Engine()
    conversation = conversation_of(50)
    engine.turn(conversation, words(1, 10))
    conversation.fields = {"evoke_task_boundary": True}
    conversation.say(Role.TOOL, words(2, 40))
    turn = engine.begin(conversation)
    assert turn.task.start == turn.rendered.generation


def test_save_all_copies_each_resident_row_once() -> None:
    engine = Engine()
    conversation = conversation_of(700)
    engine.turn(conversation, words(9, 150))
    plan = engine.session.plan_save_all(engine.slot.view([]))
    engine.slot.run(plan, [])
    engine.session.saved(plan)
    rows = {p for s in engine.slot.view([]).resident for p in range(s.start, s.end)}
    copies = [p for span, _ in engine.slot.store.values() for p in range(span.start, span.end)]
    assert len(copies) == len(set(copies))
    assert rows <= set(copies)
    assert any(save.label.endswith("/gen") for save in plan.saves)
    assert engine.session.plan_save_all(engine.slot.view([])).saves == ()


def test_a_budget_adopts_the_copies_after_lost_ones() -> None:
    engine = Engine()
    conversation = conversation_of(300, 300, 300)
    engine.turn(conversation, words(9, 20))
    engine.hand_over()
    lost = [block.label for block in engine.session.layout.blocks[3:6]]
    for label in lost:
        engine.slot.store.pop(label, None)
    engine.session.failed(lost)
    conversation.say(Role.USER, words(50, 20))
    accounting = engine.turn(conversation, words(51, 5))
    assert accounting.decoded < 60 and accounting.omitted >= 3 * 64


def test_rows_without_copies_are_not_given_up_for_copies_after_them() -> None:
    engine = Engine(config=replace(CONFIG, budget=200))
    conversation = conversation_of(300, 300)
    engine.turn(conversation, words(9, 20))
    engine.hand_over()
    end = engine.session.layout.blocks[3].span.end
    engine.session.failed([block.label for block in engine.session.layout.blocks[:4]])
    # The slot has the rows of the prompt's beginning, and nothing else does.
    rendered = conversation.rendered()
    engine.slot.taken_by(rendered.tokens[:end].tolist(), epoch=engine.slot.epoch + 1)
    turn = engine.begin(conversation)
    assert turn.view.n_past == end
    assert turn.view.adopt_to == 0 and turn.copies_end == 0


@pytest.mark.parametrize("written_back", [True, False])
def test_blocks_written_back_are_evicted_without_a_save(written_back: bool) -> None:
    engine = Engine()
    conversation = conversation_of(300)
    engine.turn(conversation, words(9, 20))
    block_spans = {block.span for block in engine.session.layout.blocks}
    if written_back:
        engine.write_back()
        assert not any("/gen" in label for label in engine.slot.store)
        assert engine.session.unsaved(engine.slot.view([])) == []
    conversation.say(Role.USER, words(30, 200))
    _, plan = engine.planned(conversation)
    labels = {evict.span for evict in plan.evicts} & block_spans
    assert labels
    assert labels.isdisjoint(save.span for save in plan.saves) == written_back


def test_labels_of_a_session_with_a_long_id_have_at_most_200_bytes() -> None:
    engine = Engine()
    engine.session = Session("ü" * 256, "", CONFIG)
    engine.turn(conversation_of(300), words(9, 150))
    engine.hand_over()
    assert max(len(label.encode()) for label in engine.slot.store) <= 200
    assert any(label.endswith("/gen") for label in engine.slot.store)


def test_an_empty_session_has_nothing_to_save() -> None:
    assert Session("s", "", CONFIG).plan_save_all(SlotModel(10).view([])).saves == ()


def test_a_slot_does_not_keep_the_budget_of_the_previous_session() -> None:
    engine = Engine()
    engine.turn(conversation_of(100), words(1, 5))
    assert engine.slot.stream.budget == 512
    engine.session = Session("t", "", replace(CONFIG, budget=None))
    engine.turn(conversation_of(90), words(1, 5))
    assert engine.slot.stream == DecodeBudget(0)


EVICTING = [name for name in policy_names() if "_" not in name]  # no variants, not no_eviction
EVENTS = st.sampled_from(
    ["go on", "go on", "go on", "tool loop", "edit", "retry", "reword", "hand over", "steal"]
    + ["copy behind", "restart", "forget a copy", "break off", "long"]
)


@given(
    events=st.lists(st.tuples(EVENTS, st.integers(1, 1000)), min_size=1, max_size=12),
    budget=st.sampled_from([None, 140, 256, 512, 1024]),
    name=st.sampled_from(["evoke", "evoke", *EVICTING]),
    recovery=st.sampled_from(["kv_restore", "kv_restore", "discard"]),
    n_cells=st.sampled_from([1100, 100_000]),
    recurrent=st.booleans(),
)
@settings(max_examples=60)
def test_random_conversations_stay_within_the_budget_with_consistent_accounting(
    events: list[tuple[str, int]],
    budget: int | None,
    name: str,
    recovery: str,
    n_cells: int,
    recurrent: bool,
) -> None:
    cells = 100_000 if budget is None else n_cells
    config = replace(CONFIG, budget=budget, name=name, recovery=recovery)
    engine = Engine(config, SlotModel(n_cells=cells, recurrent=recurrent))
    conversation = conversation_of(150)
    for event, seed in events:
        apply_event(engine, conversation, event, seed)
        accounting = engine.turn(
            conversation, words(seed, seed % 90), reported=event != "break off"
        )
        assert total(engine.slot.view([]).resident) <= (budget or cells)
        assert accounting.omitted == 0 or budget is not None or not saves_evicted(config)
        conversation.say(Role.USER, words(seed + 1, 1 + seed % 70))


def apply_event(engine: Engine, conversation: Conversation, event: str, seed: int) -> None:
    if event == "tool loop":
        conversation.say(Role.ASSISTANT, words(seed, 20))
        conversation.say(Role.TOOL, words(seed + 1, seed % 200))
    elif event == "edit":
        conversation.messages = conversation.messages[: 1 + seed % len(conversation.messages)]
        conversation.say(Role.USER, words(seed, 30))
    elif event == "retry" and len(conversation.messages) > 3:
        conversation.messages = conversation.messages[:-2]
    elif event == "reword" and len(conversation.messages) > 2:
        role, old_words = conversation.messages[-2]
        conversation.messages[-2] = (
            role,
            [*old_words[: len(old_words) // 2], 5, *old_words[len(old_words) // 2 + 1 :]],
        )
    elif event == "hand over":
        engine.hand_over()
    elif event == "copy behind":
        engine.write_back()
    elif event == "steal":
        engine.slot.taken_by([1, *conversation.rendered().tokens.tolist()[1:]], epoch=seed)
    elif event == "restart":
        cells, recurrent = engine.slot.n_cells, engine.slot.recurrent
        engine.slot = SlotModel(n_cells=cells, epoch=seed, recurrent=recurrent)
        engine.session.on_server_restart(can_adopt=not recurrent)
    elif event == "forget a copy" and engine.slot.store:
        names = sorted(engine.slot.store)
        del engine.slot.store[names[seed % len(names)]]
    elif event == "long":
        conversation.say(Role.USER, words(seed, 800))


def test_blocks_that_are_decoded_again_are_saved_again() -> None:
    """The slot is recurrent and cannot be adopted, so that the whole prompt is decoded again."""
    engine = Engine(slot=SlotModel(n_cells=4096, recurrent=True))
    conversation = conversation_of(300)
    engine.turn(conversation, words(9, 20))
    engine.write_back()
    view = engine.slot.view([])
    assert engine.session.unsaved(view) == []
    older = {
        block.label for block in engine.session.layout.blocks.pick(engine.session.layout.in_pool)
    }
    engine.hand_over()
    conversation.say(Role.USER, words(10, 30))
    accounting = engine.turn(conversation, words(11, 20))
    assert accounting.decoded == accounting.n_prompt
    unsaved = engine.session.unsaved(engine.slot.view([]))
    assert older and older <= {save.label for save in unsaved}
    engine.write_back()
    assert engine.session.unsaved(engine.slot.view([])) == []


@given(
    turns=st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=8),
    budget=st.sampled_from([160, 256, 400, 512]),
)
@settings(max_examples=60)
def test_every_row_has_a_copy_when_the_client_writes_the_answers(
    turns: list[tuple[int, bool]], budget: int
) -> None:
    """The answers are decoded with the next question, and leave the slot in pieces meanwhile."""
    engine = Engine(replace(CONFIG, budget=budget))
    conversation = conversation_of(150)
    for seed, goes_back in turns:
        engine.turn(conversation, words(seed, 5))
        engine.write_back()
        layout = engine.session.layout
        assert layout.saved_end(layout.generation) == layout.generation
        assert layout.saved <= engine.slot.store.keys()
        if goes_back:
            conversation.messages = conversation.messages[: 3 + seed % len(conversation.messages)]
        conversation.messages[-1] = (Role.ASSISTANT, words(seed, 20 + seed % 150))
        conversation.say(Role.USER, words(seed + 1, 1 + seed % 40))


def test_a_resumed_session_uses_copies_that_do_not_overlap_and_drops_the_others() -> None:
    tokens = np.arange(200, dtype=np.int32)
    session = Session("s", "", PolicyConfig())
    copies = {
        "s/100-164-t2/gen": Span(100, 164),
        "s/0-64-a": Span(0, 64),
        "s/64-128-b": Span(64, 128),
        "s/128-150-c": Span(128, 150),
        "s/128-190-old": Span(128, 190),
        "s/190-194-t3/gen": Span(190, 194),
    }
    session.resume(tokens, copies)
    layout = session.layout
    used = {item.label: item.span for item in layout.ranges}
    assert used == {label: copies[label] for label in used}
    assert set(used) == {"s/0-64-a", "s/64-128-b", "s/128-150-c", "s/190-194-t3/gen"}
    assert layout.stale == copies.keys() - used.keys()
    assert layout.copies_end == len(session.tokens) == 194


def test_the_copies_of_a_resumed_session_are_chosen_as_if_all_pairs_were_compared() -> None:
    drawn = random.Random(4)
    for _ in range(200):
        starts = [drawn.randrange(300) for _ in range(40)]
        spans = [Span(at, at + drawn.randrange(1, 60)) for at in starts]
        copies = {f"s/{i}{'/gen' * (i % 3 == 0)}": span for i, span in enumerate(spans)}
        session = Session("s", "", PolicyConfig())
        session.resume(np.arange(400, dtype=np.int32), copies)
        used = list[SavedRange]()
        ordered = sorted(
            copies.items(), key=lambda it: (it[0].endswith("/gen"), it[1].start, it[1].end)
        )
        for label, span in ordered:
            if not any(span.start < it.span.end and it.span.start < span.end for it in used):
                used.append(SavedRange(label, span))
        assert list(session.layout.ranges) == used


def test_a_session_with_very_many_copies_is_resumed_in_little_time() -> None:
    copies = {f"s/{at}": Span(at, at + 8) for at in range(0, 240_000, 8)}
    session = Session("s", "", PolicyConfig())
    began = time.process_time()
    session.resume(np.arange(240_000, dtype=np.int32), copies)
    assert time.process_time() - began < 2 and len(session.layout.ranges) == 30_000


def test_a_session_resumed_without_copies_is_empty() -> None:
    session = Session("s", "", PolicyConfig())
    session.resume(np.arange(9, dtype=np.int32), {})
    assert (len(session.tokens), session.layout.copies_end) == (0, 0)


def test_an_agent_with_more_than_its_budget_is_served_whole_and_evicted_afterwards() -> None:
    config = replace(CONFIG, within_turn="full")
    engine = Engine(config=config)
    conversation = conversation_of(CONFIG.budget or 0)
    accounting = engine.turn(conversation, words(9, 20))
    assert accounting.omitted == 0 and accounting.n_resident > (CONFIG.budget or 0)
    view = engine.slot.view([])
    assert engine.session.surplus(view).evicts == ()  # nothing has a copy yet
    engine.write_back()
    surplus = engine.session.surplus(view)
    n_left = accounting.n_resident - sum(len(evict.span) for evict in surplus.evicts)
    assert n_left <= (CONFIG.budget or 0)
    assert all(evict.span.start >= CONFIG.sink_tokens for evict in surplus.evicts)
    engine.slot.run(surplus, [])
    conversation.say(Role.USER, words(10, CONFIG.budget or 0))
    again = engine.turn(conversation, words(11, 20))
    assert again.omitted == 0 and again.decoded < (CONFIG.budget or 0) + 100
    assert again.recovered == sum(len(evict.span) for evict in surplus.evicts)


def test_few_blocks_are_indexed_after_the_answer_if_the_plan_does_not_rank_them() -> None:
    config = replace(CONFIG, name="streaming", budget=2048)
    engine, conversation = Engine(config), conversation_of(*[70] * 60, 20)
    engine.begin(conversation)
    index = engine.session.index
    assert len(index) == len(engine.session.layout.blocks) > 32, "a long history is not deferred"
    engine.turn(conversation, words(1, 20))
    conversation.say(Role.USER, words(2, 20))
    n_before = len(index)
    turn, _ = engine.planned(conversation)
    assert len(index) == n_before < len(turn.view.blocks)
    timings = engine.slot.answer(turn.rendered.tokens.tolist(), words(3, 9))
    engine.session.finish(TokenAccounting.parse(timings))
    assert len(index) == len(turn.view.blocks)
