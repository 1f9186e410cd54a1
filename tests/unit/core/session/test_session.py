"""Whole conversations against a model of a slot: what is planned can be done, and holds."""

from __future__ import annotations

import random
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
from evoke_proxy.core.model.blocks import Role, Span, common
from evoke_proxy.core.model.plan import DecodeBudget, Plan
from evoke_proxy.core.policy.registry import saves_evicted
from evoke_proxy.core.policy.turn import Turn, effective_config
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered
from evoke_proxy.core.request.chat import ChatRequest, parse_chat
from evoke_proxy.core.session.accounting import TokenAccounting, forecast
from evoke_proxy.core.session.session import Session
from evoke_proxy.errors import BudgetTooSmall, PinBudgetExceeded

CONFIG = PolicyConfig(
    budget=512, block_tokens=64, sink_tokens=16, recent_tokens=32, reserve_tokens=64
)
BEGIN, END = 10_000, 20_000
ROLES = list(Role)


@dataclass
class Talk:
    """A conversation: each message is a begin token, a token a word, and an end token."""

    messages: list[tuple[Role, list[int]]] = field(default_factory=list)
    marks: dict[int, dict[str, Any]] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)

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
        return parse_chat("chat", {"messages": body, "max_tokens": 30} | self.tags)


@dataclass
class House:
    """What the engine does, without the network: a session, a slot, a turn after another."""

    config: PolicyConfig = CONFIG
    slot: SlotModel = field(default_factory=lambda: SlotModel(n_cells=4096))
    refusals: int = 0

    def __post_init__(self) -> None:
        self.session = Session("s", "", self.config, can_adopt=not self.slot.recurrent)

    def begin(self, talk: Talk) -> Turn:
        rendered = talk.rendered()
        view = self.slot.view(rendered.tokens.tolist())
        return self.session.begin(rendered, view, talk.request())

    def planned(self, talk: Talk) -> tuple[Turn, Plan]:
        """The first plan the slot accepts; one label less is known after each refusal."""
        for _ in range(200):
            turn = self.begin(talk)
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

    def turn(self, talk: Talk, answer: Sequence[int], heard: bool = True) -> TokenAccounting:
        strange = len(self.slot.rows)
        turn, plan = self.planned(talk)
        timings = self.slot.answer(turn.rendered.tokens.tolist(), answer)
        books = TokenAccounting.parse(timings)
        assert books is not None
        assert self.session.finish(books if heard else None)
        self.check(turn, plan, books, strange)
        talk.say(Role.ASSISTANT, answer)
        return books

    def check(self, turn: Turn, plan: Plan, books: TokenAccounting, rows_before: int) -> None:
        parts = books.decoded + books.recovered + books.resident_before + books.omitted
        assert parts == books.n_prompt == len(turn.rendered.tokens)
        promised = forecast(turn.view, plan)
        if self.slot.recurrent and books.decoded > promised.decoded:
            return  # it went back to a checkpoint, or to the beginning
        assert promised.decoded == books.decoded
        if turn.config.budget is not None:
            # the peak of a slot counts what somebody else has left there
            assert books.n_resident_peak <= max(turn.config.budget, rows_before)
            if not plan.infeasible:
                # nothing is recovered and then evicted before the answer begins
                assert books.recovered == promised.recovered
                assert books.resident_before == promised.resident_before
                assert books.omitted == promised.omitted

    def hand_over(self, to: Sequence[int] = (1,) * 300) -> None:
        """Another session gets the slot: what is resident is saved first."""
        plan = self.session.plan_save_all(self.slot.view([]))
        self.slot.run(plan, [])
        self.session.saved(plan)
        self.slot.taken_by(to, epoch=self.slot.epoch + 1)

    def copy_behind(self) -> None:
        """Nobody needs the server: what the blocks of the last prompt have in the slot is saved."""
        plan = Plan(saves=tuple(self.session.unsaved(self.slot.view([]))))
        self.slot.run(plan, [])
        self.session.saved(plan)


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1, 400), k=count)


def talk_of(*lengths: int) -> Talk:
    talk = Talk()
    talk.say(Role.SYSTEM, words(0, 60))
    for i, length in enumerate(lengths):
        talk.say(Role.ASSISTANT if i % 2 else Role.USER, words(i + 1, length))
    return talk


def test_a_session_is_told_apart_by_its_repr() -> None:
    house = House()
    assert repr(house.session) == "<Session s turns=0 tokens=0 blocks=0 saved=0>"
    talk = talk_of(100)
    house.turn(talk, words(9, 40))
    assert repr(house.session) == "<Session s turns=1 tokens=165 blocks=4 saved=0>"
    assert house.session.tokens.tolist() == talk.rendered().tokens.tolist()[:164] + [BEGIN + 2]


def test_what_a_question_is_about_comes_back() -> None:
    house = House()
    talk = talk_of(60)
    talk.say(Role.ASSISTANT, words(50, 5))
    # No later message has a word of this one, so that none of them needs it.
    talk.say(Role.USER, [777, 778, 779, *(word + 1000 for word in words(51, 40))])
    for i in range(12):
        house.turn(talk, words(100 + i, 20))
        talk.say(Role.USER, words(200 + i, 50))
    out = [b for b in house.session.layout.blocks if "w777" in b.text]
    house.turn(talk, words(300, 20))
    assert not common(house.slot.view([]).resident, [out[0].span]), (
        "the test wants the answer to be out by now"
    )
    talk.say(Role.USER, [777, 778, 779])
    books = house.turn(talk, words(301, 20))
    assert books.recovered >= len(out[0].span)
    assert any(rows.encloses(out[0].span) for rows in house.slot.view([]).resident)


def test_a_prompt_many_times_the_budget_is_read_within_it() -> None:
    house = House()
    talk = talk_of(5000)
    books = house.turn(talk, words(9, 200))
    assert books.n_resident_peak <= 512
    assert books.decoded_hidden > 4000
    talk.say(Role.USER, words(5, 20))
    books = house.turn(talk, words(10, 20))
    assert books.decoded < 40
    assert books.recovered > 100


def test_without_a_budget_nothing_is_ever_out() -> None:
    house = House(replace(CONFIG, budget=None))
    talk = talk_of(300, 300, 300)
    for i in range(4):
        books = house.turn(talk, words(i, 50))
        assert books.omitted == books.recovered == 0
        talk.say(Role.USER, words(i + 50, 50))


@pytest.mark.parametrize("policy", ["discard", "evoke"])
def test_the_control_arm_forgets_and_saves_nothing(policy: str) -> None:
    recovery = "kv_restore" if policy == "discard" else "discard"
    house = House(replace(CONFIG, name=policy, recovery=recovery))
    talk = talk_of(400, 50, 300)
    for i in range(6):
        books = house.turn(talk, words(i, 50))
        assert books.recovered == 0
        talk.say(Role.USER, words(i + 50, 100))
    house.turn(talk, words(60, 50))
    assert books.omitted > 0
    # what the engine saved during this very turn goes with the next one
    assert set(house.slot.store) <= house.session.layout.saved | {
        item.label for item in house.session.layout.ranges
    }


def test_a_session_comes_back_to_a_slot_that_was_given_away() -> None:
    house = House()
    talk = talk_of(300, 300, 300)
    house.turn(talk, words(9, 100))
    house.hand_over()
    talk.say(Role.USER, words(10, 30))
    books = house.turn(talk, words(11, 20))
    assert books.decoded < 40
    assert books.recovered > 300
    assert books.resident_before == 0
    talk.say(Role.USER, words(12, 30))
    assert house.turn(talk, words(13, 20)).decoded < 40


def test_a_few_tokens_in_common_with_somebody_else_do_not_cut_copies_up() -> None:
    house = House()
    talk = talk_of(300, 300, 300)
    house.turn(talk, words(9, 100))
    house.hand_over([*talk.rendered().tokens.tolist()[:40], *([1] * 300)])
    talk.say(Role.USER, words(10, 30))
    books = house.turn(talk, words(11, 20))
    assert books.decoded < 40
    assert books.recovered > 300


def test_generated_tokens_come_back_too() -> None:
    house = House(replace(CONFIG, budget=None))
    talk = talk_of(100)
    house.turn(talk, words(9, 200))
    house.hand_over()
    talk.say(Role.USER, words(10, 10))
    books = house.turn(talk, words(11, 5))
    assert books.decoded == 1 + 12 + 1  # the answer's end token, the question, the next opening
    assert books.omitted == 0


def test_an_answer_that_reads_differently_is_decoded_again() -> None:
    house = House(replace(CONFIG, budget=None))
    talk = talk_of(100)
    house.turn(talk, words(9, 200))
    house.hand_over()
    talk.messages[-1] = (Role.ASSISTANT, [*words(9, 100), 5, *words(9, 200)[101:]])
    talk.say(Role.USER, words(10, 10))
    books = house.turn(talk, words(11, 5))
    assert house.refusals == 1, "one wrong copy tells that those after it are wrong too"
    assert 100 < books.decoded < 200
    assert books.omitted == 0
    assert house.session.layout.saved <= set(house.slot.store)
    assert not [name for name in house.slot.store if name not in house.session.layout.saved]


def test_where_copies_do_not_bring_a_session_back_it_is_decoded_again() -> None:
    house = House(slot=SlotModel(n_cells=4096, recurrent=True))
    talk = talk_of(300, 300, 300)
    house.turn(talk, words(9, 100))
    talk.say(Role.USER, words(10, 30))
    house.turn(talk, words(10, 100))
    assert house.session.redecoded == 0
    before = len(house.session.tokens)
    saved = set(house.slot.store)
    house.hand_over()
    assert set(house.slot.store) == saved, "no copy of which nothing would come"
    talk.say(Role.USER, words(11, 30))
    books = house.turn(talk, words(11, 20))
    assert books.decoded == books.n_prompt
    assert house.session.redecoded == before
    assert books.n_resident_peak <= 512


def test_a_row_under_a_checkpoint_keeps_itself_and_not_its_block() -> None:
    house = House(slot=SlotModel(n_cells=4096, recurrent=True))
    talk = talk_of(400)
    house.turn(talk, words(9, 10))
    held = house.slot.held
    talk.say(Role.USER, words(10, 300))
    turn, plan = house.planned(talk)
    alone = {b.span.start for b in turn.view.blocks if len(b.span) == 1}
    assert alone >= {row for row in held if row < turn.rendered.generation}
    assert not any(row in evict.span for evict in plan.evicts for row in held)
    beside = [e.span for e in plan.evicts if any(row + 1 == e.span.start for row in held)]
    assert beside, "what stands beside a held row can go"


def test_strange_rows_under_a_checkpoint_are_left_alone() -> None:
    view = PolicyView(
        *view_columns([], []),
        n_tokens=9,
        n_past=4,
        resident=(Span(0, 20),),
        non_evictable=(Span(9, 10),),
    )
    assert view.foreign_rows == (Span(4, 9), Span(10, 19))


def test_a_slot_lost_without_saving_means_decoding_what_has_no_copy() -> None:
    house = House()
    talk = talk_of(300, 300, 300)
    house.turn(talk, words(9, 100))
    house.slot.taken_by([1] * 300, epoch=9)
    talk.say(Role.USER, words(10, 30))
    books = house.turn(talk, words(11, 20))
    assert books.decoded == books.n_prompt


def test_after_a_restart_everything_is_decoded_again() -> None:
    house = House()
    talk = talk_of(300, 300, 300)
    house.turn(talk, words(9, 100))
    house.slot = SlotModel(n_cells=4096, epoch=50)
    house.session.on_server_restart(can_adopt=True)
    talk.say(Role.USER, words(10, 30))
    books = house.turn(talk, words(11, 20))
    assert books.decoded == books.n_prompt
    assert house.refusals == 0


def test_a_reply_that_broke_off_loses_no_copies() -> None:
    house = House()
    talk = talk_of(1500)
    house.turn(talk, words(9, 20), heard=False)
    talk.say(Role.USER, words(1, 1500)[600:630])
    books = house.turn(talk, words(11, 20))
    assert house.refusals == 0
    assert books.decoded < 60
    assert books.recovered >= 30


def test_what_was_never_decoded_is_not_believed_to_have_a_copy() -> None:
    house = House()
    talk = talk_of(1500)
    turn, _ = house.planned(talk)
    house.slot.answer(turn.rendered.tokens.tolist()[:700], [])  # the client left in mid-prefill
    house.session.finish(None)
    house.begin(talk)
    assert house.session.layout.saved
    assert house.session.layout.saved <= set(house.slot.store)
    books = house.turn(talk, words(9, 20))
    assert house.refusals == 0
    assert books.decoded < 900


def test_a_copy_that_is_gone_is_noticed_and_left_out() -> None:
    house = House()
    talk = talk_of(1500)
    house.turn(talk, words(9, 20))
    talk.say(Role.USER, words(1, 1500)[600:630])
    gone = {load.label for load in house.session.plan(house.begin(talk)).loads}
    assert gone
    for label in gone:
        del house.slot.store[label]
    house.turn(talk, words(11, 20))
    assert house.refusals > 0
    assert not gone & house.session.layout.saved


def test_books_that_contradict_the_plan_are_noticed() -> None:
    house = House()
    turn, plan = house.planned(talk_of(300))
    promised = forecast(turn.view, plan)
    assert not house.session.finish(replace(promised, decoded=0, omitted=promised.decoded))
    turn, plan = house.planned(talk_of(300))
    assert house.session.finish(promised)
    assert house.session.finish(promised), "without a plan nothing can be contradicted"


def test_what_the_engine_evicts_is_no_contradiction() -> None:
    house = House()
    talk = talk_of(300)
    house.turn(talk, words(1, 10))
    talk.say(Role.USER, words(2, 10))
    turn, plan = house.planned(talk)
    promised = forecast(turn.view, plan)
    less = replace(
        promised, resident_before=promised.resident_before - 64, omitted=promised.omitted + 64
    )
    assert house.session.finish(replace(less, auto_evicted=((Span(64, 128), "x"),)))
    turn, plan = house.planned(talk)
    assert not house.session.finish(less)


def test_beginning_again_is_no_new_turn() -> None:
    house = House()
    talk = talk_of(300)
    first, second = house.begin(talk), house.begin(talk)
    assert (first.number, second.number) == (1, 1)
    assert house.session.plan(first) == house.session.plan(second)
    assert [b.label for b in first.view.blocks] == [b.label for b in second.view.blocks]
    house.turn(talk, [])
    assert house.begin(talk).number == 2


def test_a_divergence_is_where_history_changed() -> None:
    house = House()
    talk = talk_of(300, 40, 40)
    house.turn(talk, words(1, 10))
    talk.say(Role.USER, words(2, 10))
    assert house.begin(talk).divergence is None
    talk.messages[1] = (Role.USER, [*words(1, 100), 9_999])
    assert house.begin(talk).divergence == 62 + 1 + 100


def test_useless_copies_are_dropped() -> None:
    house = House()
    talk = talk_of(1500)
    house.turn(talk, words(9, 20))
    before = set(house.slot.store)
    talk.messages[1] = (Role.USER, words(77, 30))
    house.turn(talk, words(9, 20))
    assert len(set(house.slot.store) & before) <= 1
    assert house.session.layout.stale == frozenset()


def test_a_client_may_lower_the_budget_and_choose_the_policy() -> None:
    def given_(**tags: Any) -> PolicyConfig:
        return effective_config(CONFIG, replace(talk_of(1), tags=tags).request())

    assert given_() == CONFIG
    assert given_(evoke_budget=300).budget == 300
    assert given_(evoke_budget=3000).budget == 512
    assert given_(evoke_policy="discard").name == "discard"
    assert given_(evoke_recovery="discard").recovery == "discard"
    unlimited = replace(CONFIG, budget=None)
    talk = replace(talk_of(1), tags={"evoke_budget": 300})
    assert effective_config(unlimited, talk.request()).budget == 300


def test_a_budget_that_holds_no_block_is_refused() -> None:
    talk = replace(talk_of(100), tags={"evoke_budget": 111})
    with pytest.raises(BudgetTooSmall) as caught:
        House().begin(talk)
    assert caught.value.needed == 112
    House().begin(replace(talk, tags={"evoke_budget": 112}))


def pinned_talk(length: int, system: int = 60) -> Talk:
    talk = Talk(marks={1: {"evoke_keep": "pin"}})
    talk.say(Role.SYSTEM, words(0, system - 2))
    talk.say(Role.USER, words(1, length - 2))
    return talk


def test_pins_have_a_share_of_what_system_and_sinks_leave() -> None:
    cap = int(0.6 * (512 - 16 - 60))
    House().begin(pinned_talk(cap))
    with pytest.raises(PinBudgetExceeded) as caught:
        House().begin(pinned_talk(cap + 1))
    assert (caught.value.pinned_tokens, caught.value.pin_cap) == (cap + 1, cap)
    House(replace(CONFIG, budget=None)).begin(pinned_talk(cap + 1))
    # a long system prompt does not forbid every pin, and a small budget keeps a block movable
    House().begin(pinned_talk(int(0.6 * 128), system=2000))
    small = House(replace(CONFIG, budget=130))
    small.begin(pinned_talk(130 - 112, system=2))
    with pytest.raises(PinBudgetExceeded):
        small.begin(pinned_talk(130 - 111, system=2))


def test_a_refused_request_leaves_the_session_as_it_was() -> None:
    house = House()
    talk = talk_of(1500)
    house.turn(talk, words(9, 20), heard=False)
    before = repr(house.session)
    with pytest.raises(BudgetTooSmall):
        house.begin(replace(talk, tags={"evoke_budget": 1}))
    assert repr(house.session) == before
    talk.say(Role.USER, words(10, 30))
    assert house.turn(talk, words(11, 20)).decoded < 60


def test_pins_stay_whatever_is_asked() -> None:
    house = House()
    talk = pinned_talk(200)
    for i in range(8):
        house.turn(talk, words(100 + i, 40))
        resident = house.slot.view([]).resident
        assert any(rows.encloses(Span(60, 260)) for rows in resident)
        talk.say(Role.USER, words(200 + i, 60))


def test_a_whole_turn_can_be_pinned_or_ranked() -> None:
    house = House()
    talk = talk_of(50)
    talk.tags = {"evoke_pinned": True, "evoke_priority": 0.5}
    house.turn(talk, words(1, 10))
    talk.tags = {}
    talk.say(Role.USER, words(2, 20))
    blocks = house.begin(talk).view.blocks
    assert [(b.pinned, b.priority) for b in blocks if b.turn == 1] == [(True, 0.5)] * 3
    assert {(b.pinned, b.priority) for b in blocks if b.turn == 2} == {(False, 1.0)}


def test_a_task_begins_with_the_first_message_of_the_user_in_its_request() -> None:
    house = House()
    talk = talk_of(50, 30, 70)
    before = house.begin(talk).view.blocks
    house.turn(talk, words(1, 10))
    talk.tags = {"evoke_task_boundary": True}
    talk.say(Role.TOOL, words(2, 40))
    talk.say(Role.USER, words(3, 90))
    turn = house.begin(talk)
    first = next(b.span.start for b in turn.view.blocks if b.turn == 2 and b.role is Role.USER)
    assert turn.task.start == first > before[-1].span.end
    house.turn(talk, words(4, 10))
    talk.tags = {}
    talk.say(Role.USER, words(5, 20))
    assert house.begin(talk).task.start == first


def test_a_task_without_a_message_of_the_user_begins_with_the_answer() -> None:
    house = House()
    talk = talk_of(50)
    house.turn(talk, words(1, 10))
    talk.tags = {"evoke_task_boundary": True}
    talk.say(Role.TOOL, words(2, 40))
    turn = house.begin(talk)
    assert turn.task.start == turn.rendered.generation


def test_save_all_copies_each_resident_row_once() -> None:
    house = House()
    talk = talk_of(700)
    house.turn(talk, words(9, 150))
    plan = house.session.plan_save_all(house.slot.view([]))
    house.slot.run(plan, [])
    house.session.saved(plan)
    rows = {p for s in house.slot.view([]).resident for p in range(s.start, s.end)}
    copies = [p for span, _ in house.slot.store.values() for p in range(span.start, span.end)]
    assert len(copies) == len(set(copies))
    assert rows <= set(copies)
    assert any(save.label.endswith("/gen") for save in plan.saves)
    assert house.session.plan_save_all(house.slot.view([])).saves == ()


@pytest.mark.parametrize("behind", [True, False])
def test_what_was_copied_behind_leaves_without_a_save(behind: bool) -> None:
    house = House()
    talk = talk_of(300)
    house.turn(talk, words(9, 20))
    known = {block.span for block in house.session.layout.blocks}
    if behind:
        house.copy_behind()
        assert not any("/gen" in label for label in house.slot.store)
        assert house.session.unsaved(house.slot.view([])) == []
    talk.say(Role.USER, words(30, 200))
    _, plan = house.planned(talk)
    gone = {evict.span for evict in plan.evicts} & known
    assert gone
    assert gone.isdisjoint(save.span for save in plan.saves) == behind


def test_labels_of_a_very_long_session_fit_the_wire() -> None:
    house = House()
    house.session = Session("ü" * 256, "", CONFIG)
    house.turn(talk_of(300), words(9, 150))
    house.hand_over()
    assert max(len(label.encode()) for label in house.slot.store) <= 200
    assert any(label.endswith("/gen") for label in house.slot.store)


def test_nothing_is_saved_of_a_session_that_has_nothing() -> None:
    assert Session("s", "", CONFIG).plan_save_all(SlotModel(10).view([])).saves == ()


def test_a_slot_does_not_keep_the_budget_of_the_session_before() -> None:
    house = House()
    house.turn(talk_of(100), words(1, 5))
    assert house.slot.stream.budget == 512
    house.session = Session("t", "", replace(CONFIG, budget=None))
    house.turn(talk_of(90), words(1, 5))
    assert house.slot.stream == DecodeBudget(0)


EVICTING = [name for name in policy_names() if "_" not in name]  # no variants, not no_eviction
EVENTS = st.sampled_from(
    ["go on", "go on", "go on", "tool loop", "edit", "retry", "reword", "hand over", "steal"]
    + ["copy behind", "restart", "forget a copy", "break off", "long"]
)


@given(
    events=st.lists(st.tuples(EVENTS, st.integers(1, 1000)), min_size=1, max_size=12),
    budget=st.sampled_from([None, 140, 256, 512, 1024]),
    name=st.sampled_from(["evoke", "evoke", *EVICTING]),
    recovery=st.sampled_from(["kv_restore", "kv_restore", "breadcrumb", "discard"]),
    n_cells=st.sampled_from([1100, 100_000]),
    recurrent=st.booleans(),
)
@settings(max_examples=60)
def test_any_conversation_keeps_the_budget_and_the_books(
    events: list[tuple[str, int]],
    budget: int | None,
    name: str,
    recovery: str,
    n_cells: int,
    recurrent: bool,
) -> None:
    cells = 100_000 if budget is None else n_cells
    config = replace(CONFIG, budget=budget, name=name, recovery=recovery)
    house = House(config, SlotModel(n_cells=cells, recurrent=recurrent))
    talk = talk_of(150)
    for event, seed in events:
        happen(house, talk, event, seed)
        books = house.turn(talk, words(seed, seed % 90), heard=event != "break off")
        assert total(house.slot.view([]).resident) <= (budget or cells)
        assert books.omitted == 0 or budget is not None or not saves_evicted(config)
        talk.say(Role.USER, words(seed + 1, 1 + seed % 70))


def happen(house: House, talk: Talk, event: str, seed: int) -> None:
    if event == "tool loop":
        talk.say(Role.ASSISTANT, words(seed, 20))
        talk.say(Role.TOOL, words(seed + 1, seed % 200))
    elif event == "edit":
        talk.messages = talk.messages[: 1 + seed % len(talk.messages)]
        talk.say(Role.USER, words(seed, 30))
    elif event == "retry" and len(talk.messages) > 3:
        talk.messages = talk.messages[:-2]
    elif event == "reword" and len(talk.messages) > 2:
        role, said = talk.messages[-2]
        talk.messages[-2] = (role, [*said[: len(said) // 2], 5, *said[len(said) // 2 + 1 :]])
    elif event == "hand over":
        house.hand_over()
    elif event == "copy behind":
        house.copy_behind()
    elif event == "steal":
        house.slot.taken_by([1, *talk.rendered().tokens.tolist()[1:]], epoch=seed)
    elif event == "restart":
        cells, recurrent = house.slot.n_cells, house.slot.recurrent
        house.slot = SlotModel(n_cells=cells, epoch=seed, recurrent=recurrent)
        house.session.on_server_restart(can_adopt=not recurrent)
    elif event == "forget a copy" and house.slot.store:
        names = sorted(house.slot.store)
        del house.slot.store[names[seed % len(names)]]
    elif event == "long":
        talk.say(Role.USER, words(seed, 800))


def test_copies_of_text_that_is_decoded_again_are_made_anew() -> None:
    """Recurrent: copies alone do not bring the session back, so that all of it is decoded again."""
    house = House(slot=SlotModel(n_cells=4096, recurrent=True))
    talk = talk_of(300)
    house.turn(talk, words(9, 20))
    house.copy_behind()
    view = house.slot.view([])
    assert house.session.unsaved(view) == []
    older = {
        block.label for block in house.session.layout.blocks.pick(house.session.layout.in_pool)
    }
    house.hand_over()
    talk.say(Role.USER, words(10, 30))
    books = house.turn(talk, words(11, 20))
    assert books.decoded == books.n_prompt
    anew = house.session.unsaved(house.slot.view([]))
    assert older and older <= {save.label for save in anew}
    house.copy_behind()
    assert house.session.unsaved(house.slot.view([])) == []


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


def test_a_session_resumed_without_copies_is_empty() -> None:
    session = Session("s", "", PolicyConfig())
    session.resume(np.arange(9, dtype=np.int32), {})
    assert (len(session.tokens), session.layout.copies_end) == (0, 0)
