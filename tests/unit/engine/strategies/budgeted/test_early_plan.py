"""Turns that are planned while their prompt is rendered, from a rendering of the last messages."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evoke_proxy.adapters.llama.block_api import RenderCall
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.registry import decide
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.prompt.rendered import Rendered, SlotView
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.request.messages import LazyMessages
from evoke_proxy.core.retrieval.analysis import PreparedTexts
from evoke_proxy.core.retrieval.query import query_of
from evoke_proxy.core.servers.slot_pool import SlotPool
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.embedding.block_vectors import BlockVectors, PreparedQuery
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.strategies.budgeted.early_plan import EarlyPlan, _last_messages

CONFIG = PolicyConfig(
    budget=192, block_tokens=64, sink_tokens=8, recent_tokens=32, reserve_tokens=32
)
EPOCH = 7
Messages = Sequence[dict[str, Any]]
TOPICS = "fox river bridge garden lamp winter violin harbour window market cellar pepper".split()
STORY: Messages = [
    {"role": role, "content": f"{topic} {role} says that the {topic} has number {i}. It is so."}
    for i, topic in enumerate(TOPICS)
    for role in ("user", "assistant")
]
QUESTION = {"role": "user", "content": "Which number has the river?"}
ANSWER = {"role": "assistant", "content": "Number 1 it is"}
NEXT = {"role": "user", "content": "Which number has the violin, and which the lamp?"}


def words_of(message: dict[str, Any]) -> list[int]:
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    words = [*str(message["content"]).split(), *calls]
    return [sum(map(ord, word)) * 31 + len(word) for word in words]


def answer_of(messages: Messages, slots: Sequence[SlotView] = ()) -> dict[str, Any]:
    """A compact reply to a call to render: a token for each word, one before and one behind.

    Successive results of tools have one beginning and one end, as in most templates.
    """
    tokens, ends = list[int](), list[int]()
    for i, message in enumerate(messages):
        is_result = message["role"] == "tool"
        if not (is_result and messages[i - 1]["role"] == "tool"):
            tokens.append(1 if message["role"] in ("user", "tool") else 2)
        tokens += words_of(message)
        if not (is_result and [one["role"] for one in messages[i + 1 : i + 2]] == ["tool"]):
            tokens.append(3)
        ends.append(len(tokens))
    raw = np.array([*tokens, 2], "<i4").tobytes()
    return {
        "tokens_b64": base64.b64encode(raw).decode(),
        "stops": [end - 4 for end in ends],
        "generation": len(tokens),
        "spans": {
            "index": list(range(len(messages))),
            "role": [message["role"] for message in messages],
            "end": ends,
        },
        "slots": [
            {
                "id": one.id,
                "epoch": one.epoch,
                "n_tokens": one.n_tokens,
                "resident": [[span.start, span.end] for span in one.resident],
                "n_free": one.n_free,
            }
            for one in slots
        ],
    }


def rendered(messages: Messages, slots: Sequence[SlotView] = ()) -> Rendered:
    return Rendered.parse(answer_of(messages, slots))


def request_of(messages: Messages, previous: Rendered | None = None, **fields: Any) -> ParsedChat:
    chat = parse_chat("chat", {"messages": list(messages), "max_tokens": 8, **fields})
    incoming = IncomingRequest(dialect="chat", body=b"", headers={})
    return ParsedChat(incoming=incoming, tenant="", body=b"", chat=chat, previous=previous)


@dataclass
class Server:
    """A server with one slot, which renders messages and counts the calls."""

    view: SlotView
    # Tokens at its end that the next prompt does not have.
    n_other: int = 0
    # Replaces the rendering of the last messages.
    change: Callable[[Rendered], Rendered] = lambda one: one
    delay_s: float = 0.0
    calls: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        pool = SlotPool(1, 4)
        pool.request("s", "", 0.0)
        pool.release(0, 0.0)
        self.slots = SimpleNamespace(pool=pool)
        self.monitor = SimpleNamespace(
            server=SimpleNamespace(n_ctx=4096, n_slot_cells=4096, can_render_behind=True)
        )
        self.blocks = self

    async def render(self, call: RenderCall) -> Rendered:
        body = json.loads(call.body)
        self.calls.append(body)
        await asyncio.sleep(self.delay_s)
        last = rendered(body["messages"])
        assert call.behind is not None
        n_tokens, n_before = call.behind
        n_tokens += len(last.tokens) - last.spans[n_before - 1].span.end
        n_common = min(self.view.n_tokens - self.n_other, n_tokens)
        return self.change(replace(last, slots=(replace(self.view, n_common=n_common),)))


class WordsOnly:
    """An embedding service without an encoder."""

    on = is_immediate = is_english = False


def finished_turn(
    config: PolicyConfig = CONFIG, messages: Messages = (*STORY, QUESTION)
) -> tuple[Conversation, Rendered, SlotView]:
    """A conversation after its first turn, the rendering of that, and the slot after the answer."""
    session, prompt = Session("s", "", config), rendered(messages)
    empty = SlotView(0, EPOCH, 0, 0, (), 4096)
    chat = request_of(messages).chat
    turn = session.begin(prompt, empty, chat, query_of(chat), None)
    session.applied(turn, session.plan(turn))
    n_answer, n_prompt = len(words_of(ANSWER)), len(prompt.tokens)
    end = n_prompt + n_answer
    blocks = session.layout.blocks
    cold = [block for block in blocks if block.span.start >= 16 and block.span.end < end - 120]
    evicted = tuple((block.span, block.label) for block in cold)
    session.finish(TokenAccounting(n_prompt, 0, 0, 0, n_prompt, auto_evicted=evicted))
    resident = (Span(0, cold[0].span.start), Span(cold[-1].span.end, end))
    slot = SlotView(0, EPOCH, end, 0, resident, 4096 - sum(map(len, resident)))
    conversation = Conversation(session, np.zeros(0, np.int32))
    conversation.budgeted.plan_ran(EPOCH)
    return conversation, prompt, slot


async def planned(
    server: Server, conversation: Conversation, request: ParsedChat, late: bool = False
) -> PreparedQuery:
    """Do the work beside the rendering of a request, which ends before that work if `late`."""
    vectors = BlockVectors(WordsOnly(), Conversations(CONFIG, 9))  # type: ignore[arg-type]
    early = EarlyPlan(server, vectors, server, request)  # type: ignore[arg-type]
    early.start(conversation)
    query = query_of(request.chat)
    prepared = PreparedQuery(query=query, texts=PreparedTexts.of((), {}, query))
    if late:
        asyncio.get_running_loop().call_later(server.delay_s / 2, early.stop)
    await early.finish(prepared, RequestTrace(0.0))
    early.stop()
    return prepared


def begun(
    conversation: Conversation,
    messages: Messages,
    slot: SlotView,
    prepared: PreparedQuery,
    n_other: int = 0,
) -> Turn:
    """The turn of a request, for the slot that its complete rendering has.

    The prompt lacks the last `n_other` tokens of the slot.
    """
    prompt = rendered(messages)
    view = replace(slot, n_common=min(slot.n_tokens - n_other, len(prompt.tokens)))
    chat = request_of(messages).chat
    return conversation.session.begin(prompt, view, chat, prepared.query, 4096)


def was_planned_early(conversation: Conversation, turn: Turn) -> bool:
    """Whether the session has the plan of a turn: then it does not make another one."""
    return conversation.session.plan(turn) is conversation.session.plan(turn)


def fresh_plan(turn: Turn) -> Plan:
    return decide(turn.view, turn.query, turn.config)


LONGER = [*STORY, QUESTION, ANSWER, NEXT]


def test_a_turn_that_comes_as_expected_has_its_plan_when_it_is_rendered() -> None:
    conversation, previous, slot = finished_turn()
    server = Server(slot)
    prepared = asyncio.run(planned(server, conversation, request_of(LONGER, previous)))
    assert server.calls == [{"messages": [QUESTION, ANSWER, NEXT]}]
    turn = begun(conversation, LONGER, slot, prepared)
    assert was_planned_early(conversation, turn)
    plan = conversation.session.plan(turn)
    assert plan == fresh_plan(turn)
    assert plan.loads  # the question needs blocks that had left the slot


def same_layout(one: Session, other: Session) -> bool:
    first, second = one.layout, other.layout
    return (
        first.blocks.equals(second.blocks)
        and first.tokens.tolist() == second.tokens.tolist()
        and (first.n_past, first.resident, first.ranges, first.stale, first.branches)
        == (second.n_past, second.resident, second.ranges, second.stale, second.branches)
        and (first.generation, first.divergence, first.numbers, first.unverified)
        == (second.generation, second.divergence, second.numbers, second.unverified)
    )


def expecting() -> tuple[Conversation, Conversation, Any]:
    """A conversation that expects a turn, an equal one that does not, and the turn's arguments."""
    conversation, previous, slot = finished_turn()
    request = request_of(LONGER, previous)
    prepared = asyncio.run(planned(Server(slot), conversation, request))
    plain, _, _ = finished_turn()
    view = replace(slot, n_common=slot.n_tokens)
    arguments = rendered(LONGER), view, request.chat, prepared.query, 4096
    return conversation, plain, arguments


def test_an_expected_turn_begins_without_dividing_the_prompt_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversation, plain, arguments = expecting()
    turn = plain.session.begin(*arguments)
    monkeypatch.setattr(Session, "_reconcile", lambda *_: pytest.fail("it was divided again"))
    expected = conversation.session.begin(*arguments)
    assert expected.rendered is arguments[0] and expected.slot is arguments[1]
    assert expected.view.equals(replace(turn.view, index=conversation.session.index))
    names = ("number", "config", "divergence", "needed_budget", "kept_budget", "copies_end")
    assert [getattr(expected, it) for it in names] == [getattr(turn, it) for it in names]
    assert same_layout(conversation.session, plain.session)
    assert conversation.session.pins == plain.session.pins
    assert conversation.session.plan(expected) == fresh_plan(turn)


def pin(session: Session) -> None:
    session.pins = (Span(0, 64),)


def save(session: Session) -> None:
    blocks = session.layout.blocks
    session.add_copies([(block.label, block.span) for block in blocks.pick(~blocks.copied)[:1]])


def attend(session: Session) -> None:
    session.attention._shares = {label: (0.9, 1) for label in session.layout.blocks.labels[:3]}


def lower_budget(session: Session) -> None:
    session.config = replace(CONFIG, budget=160)


def lose(session: Session) -> None:
    session.failed(session.layout.saved)


def restart(session: Session) -> None:
    session.on_server_restart(can_adopt=True)


@pytest.mark.parametrize("change", [pin, save, attend, lower_budget, lose, restart])
def test_a_session_that_has_changed_since_divides_the_prompt_as_it_is(
    change: Callable[[Session], None],
) -> None:
    conversation, plain, arguments = expecting()
    for session in (conversation.session, plain.session):
        change(session)
    turns = [one.session.begin(*arguments) for one in (conversation, plain)]
    assert same_layout(conversation.session, plain.session)
    assert turns[0].view.equals(replace(turns[1].view, index=conversation.session.index))
    assert conversation.session.pins == plain.session.pins
    assert conversation.session.plan(turns[0]) == fresh_plan(turns[1])


def test_evictions_that_were_not_reported_are_not_forgotten() -> None:
    """A request interrupts decoding ahead, when its turn is already expected."""
    (conversation, previous, slot), (plain, *_) = finished_turn(), finished_turn()
    for session in (conversation.session, plain.session):
        blocks = session.layout.blocks
        lost = {block.label: block.span for block in blocks.pick(session.layout.in_pool)[:2]}
        session.failed(lost)
        session._eviction_order = lost
    request = request_of(LONGER, previous)
    prepared = asyncio.run(planned(Server(slot), conversation, request))
    view = replace(slot, n_common=slot.n_tokens)
    arguments = rendered(LONGER), view, request.chat, prepared.query, 4096
    for session in (conversation.session, plain.session):
        session.decoding_broke_off()
        session.begin(*arguments)
    assert lost.keys() <= plain.session.layout.saved
    assert same_layout(conversation.session, plain.session)


def test_pins_that_an_operator_sets_while_a_turn_begins_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn may begin in a thread."""
    conversation, previous, slot = finished_turn()
    request = request_of(LONGER, previous)
    prepared = asyncio.run(planned(Server(slot), conversation, request))
    compare = Rendered.has_same_prompt

    def compare_slowly(one: Rendered, other: Rendered) -> bool:
        pin(conversation.session)
        return compare(one, other)

    monkeypatch.setattr(Rendered, "has_same_prompt", compare_slowly)
    view = replace(slot, n_common=slot.n_tokens)
    conversation.session.begin(rendered(LONGER), view, request.chat, prepared.query, 4096)
    assert conversation.session.pins == (Span(0, 64),)


def test_requests_that_are_given_up_are_not_kept() -> None:
    conversation, previous, slot = finished_turn()

    async def given_up() -> None:
        for _ in range(4):
            await planned(Server(slot), conversation, request_of(LONGER, previous))

    asyncio.run(given_up())
    gc.collect()
    turns = [one for one in gc.get_objects() if isinstance(one, Turn)]
    own = conversation.session.index
    assert sum(turn.view.index is own and turn.number == 2 for turn in turns) == 1


def test_the_session_is_not_changed_before_the_turn_begins() -> None:
    conversation, previous, slot = finished_turn()
    session = conversation.session
    before = session.layout, session.turns, session.pins, session.past
    asyncio.run(planned(Server(slot), conversation, request_of(LONGER, previous)))
    assert (session.layout, session.turns, session.pins, session.past) == before


def with_other_token(one: Rendered) -> Rendered:
    tokens = one.tokens.copy()
    tokens[-3] += 1
    return replace(one, tokens=tokens)


def with_another_epoch(one: Rendered) -> Rendered:
    return replace(one, slots=tuple(replace(slot, epoch=EPOCH + 1) for slot in one.slots))


def with_fewer_rows(one: Rendered) -> Rendered:
    return replace(one, slots=tuple(replace(slot, resident=(Span(0, 8),)) for slot in one.slots))


def without_a_span(one: Rendered) -> Rendered:
    return replace(one, spans=one.spans[1:])


@pytest.mark.parametrize(
    "change", [with_other_token, with_another_epoch, with_fewer_rows, without_a_span]
)
def test_a_turn_that_comes_otherwise_is_planned_as_it_is(
    change: Callable[[Rendered], Rendered],
) -> None:
    conversation, previous, slot = finished_turn()
    server = Server(slot, change=change)
    prepared = asyncio.run(planned(server, conversation, request_of(LONGER, previous)))
    assert server.calls
    turn = begun(conversation, LONGER, slot, prepared)
    assert not was_planned_early(conversation, turn)
    other, *_ = finished_turn()
    expected = begun(other, LONGER, slot, prepared)
    assert conversation.session.plan(turn) == other.session.plan(expected)


def test_nothing_is_planned_when_the_whole_prompt_is_rendered_first() -> None:
    conversation, previous, slot = finished_turn()
    server = Server(slot, delay_s=0.05)
    prepared = asyncio.run(planned(server, conversation, request_of(LONGER, previous), late=True))
    assert server.calls
    assert not was_planned_early(conversation, begun(conversation, LONGER, slot, prepared))


def test_a_failure_to_render_the_last_messages_changes_nothing() -> None:
    def fail(_: Rendered) -> Rendered:
        raise ValueError("a template refuses it")

    conversation, previous, slot = finished_turn()
    server, request = Server(slot, change=fail), request_of(LONGER, previous)
    prepared = asyncio.run(planned(server, conversation, request))
    assert not was_planned_early(conversation, begun(conversation, LONGER, slot, prepared))
    for _ in range(3):  # it is not tried again and again
        asyncio.run(planned(server, conversation, request))
    assert len(server.calls) == 2


def test_a_cancelled_request_leaves_no_call_behind() -> None:
    async def cancelled() -> int:
        conversation, previous, slot = finished_turn()
        server = Server(slot, delay_s=60.0)
        coroutine = planned(server, conversation, request_of(LONGER, previous))
        work = asyncio.get_running_loop().create_task(coroutine)
        await asyncio.sleep(0.01)
        assert server.calls
        work.cancel()
        await asyncio.wait([work])
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(cancelled()) == 0


def called(*names: str) -> Messages:
    """An answer that calls these tools, and their results."""
    functions = [{"name": name, "arguments": "{}"} for name in names]
    calls = [{"id": one["name"], "type": "function", "function": one} for one in functions]
    results = [{"role": "tool", "content": f"{name} ok", "tool_call_id": name} for name in names]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


@pytest.mark.parametrize(
    ("before", "after", "n_before"),
    [
        ([QUESTION], called("look"), 1),
        ([QUESTION, *called("look", "open")], [*called("find"), NEXT], 4),
        ([QUESTION, *called("look")], [ANSWER | {"reasoning_content": "Hm."}, NEXT], 3),
    ],
)
def test_a_turn_with_tools_is_planned_early(
    before: Messages, after: Messages, n_before: int
) -> None:
    conversation, previous, slot = finished_turn(messages=[*STORY, *before])
    server, messages = Server(slot), [*STORY, *before, *after]
    prepared = asyncio.run(planned(server, conversation, request_of(messages, previous)))
    sent = server.calls[0]["messages"]
    assert sent[n_before:] == after  # with all that the client sends
    has_results = before[-1]["role"] == "tool"
    assert sent[has_results:n_before] == before[-n_before + has_results :]
    turn = begun(conversation, messages, slot, prepared)
    assert was_planned_early(conversation, turn)
    assert conversation.session.plan(turn) == fresh_plan(turn)


def test_fields_that_the_template_reads_are_those_of_the_request() -> None:
    conversation, previous, slot = finished_turn()
    server, more = Server(slot), {"chat_template_kwargs": {"enable_thinking": False}}
    request = request_of(LONGER, previous, **more, temperature=0.5)
    asyncio.run(planned(server, conversation, request))
    assert server.calls == [{"messages": [QUESTION, ANSWER, NEXT], **more}]


@pytest.mark.parametrize(
    "messages",
    [
        [*STORY, QUESTION],  # sent again
        [*STORY, QUESTION, *called(*"abcdefghijklmnop")],
        [*STORY, QUESTION, ANSWER, NEXT | {"content": "word " * 9000}],
        [*STORY, QUESTION, ANSWER | {"reasoning_content": "Hm. " * 20_000}, NEXT],
        [*STORY, QUESTION, ANSWER | {"name": "\ud800"}, NEXT],
        [*STORY, QUESTION, *[ANSWER, NEXT] * 20],
    ],
)
def test_other_requests_are_not_planned_early(messages: Messages) -> None:
    conversation, previous, slot = finished_turn()
    server = Server(slot)
    asyncio.run(planned(server, conversation, request_of(messages, previous)))
    assert server.calls == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reasoning_content", [1] * 2_000_000),
        ("reasoning_content", [{"a": "\x01" * 9}] * 1_000_000),
        ("reasoning_content", "\x01" * 2_000_000),
        ("content", [{"type": "text", "text": "\x01"}] * 200_000),
        ("tool_calls", [{"function": {"name": "f", "arguments": [[]] * 500_000}}]),
    ],
)
def test_large_messages_are_refused_without_reading_all_of_them(field: str, value: Any) -> None:
    conversation, previous, slot = finished_turn()
    messages = [*STORY, QUESTION, ANSWER | {field: value}, NEXT]
    server, request = Server(slot), request_of(messages, previous)

    async def seconds() -> float:
        vectors = BlockVectors(WordsOnly(), Conversations(CONFIG, 9))  # type: ignore[arg-type]
        early = EarlyPlan(server, vectors, server, request)  # type: ignore[arg-type]
        began = time.thread_time()
        early.start(conversation)
        await asyncio.sleep(0)
        early.stop()
        return time.thread_time() - began

    # A machine that provides memory slowly takes longer at times.
    assert min(asyncio.run(seconds()) for _ in range(3)) < 0.01
    assert server.calls == []


def test_of_many_results_of_tools_only_the_last_ones_are_read() -> None:
    result = {"role": "tool", "content": "", "tool_call_id": "a"}
    many = [*STORY, QUESTION, *[result] * 20_000, result | {"content": "ok"}]
    chat = request_of([*many, ANSWER, NEXT]).chat
    assert _last_messages(chat, len(many) - 1) is None
    assert isinstance(chat.messages, LazyMessages)
    assert len(chat.messages._read) < 20


@pytest.mark.parametrize("budget", [None, 4096])
def test_nothing_is_planned_early_where_nothing_is_ranked(budget: int | None) -> None:
    conversation, previous, slot = finished_turn()
    conversation.session.config = replace(CONFIG, budget=budget)
    server = Server(slot)
    asyncio.run(planned(server, conversation, request_of(LONGER, previous)))
    assert server.calls == []


def test_another_running_request_is_not_delayed() -> None:
    conversation, previous, slot = finished_turn()
    server = Server(slot)
    server.slots.pool.request("another", "", 0.0)
    asyncio.run(planned(server, conversation, request_of(LONGER, previous)))
    assert server.calls == []


@pytest.mark.parametrize(("n_words", "is_early"), [(40, True), (100, False)])
def test_a_question_of_many_words_does_not_block_the_event_loop(
    n_words: int, is_early: bool
) -> None:
    conversation, previous, slot = finished_turn()
    words = " ".join(f"word{i}" for i in range(n_words))
    messages = [*STORY, QUESTION, ANSWER, {"role": "user", "content": f"Where is {words}?"}]
    server = Server(slot)
    prepared = asyncio.run(planned(server, conversation, request_of(messages, previous)))
    assert (conversation.session._expected is not None) == is_early
    assert begun(conversation, messages, slot, prepared).query is prepared.query


def test_after_two_unexpected_turns_only_some_are_expected() -> None:
    conversation, previous, slot = finished_turn()
    session = conversation.session
    messages: list[dict[str, Any]] = [*STORY, QUESTION]
    asked = list[bool]()
    for _ in range(10):
        messages = [*messages, ANSWER, NEXT]
        server = Server(slot, change=with_other_token)
        prepared = asyncio.run(planned(server, conversation, request_of(messages, previous)))
        asked.append(bool(server.calls))
        turn = begun(conversation, messages, slot, prepared)
        session.applied(turn, session.plan(turn))
        n_prompt = len(turn.rendered.tokens)
        session.finish(TokenAccounting(n_prompt, 0, 0, 0, n_prompt))
        previous = turn.rendered
        end = n_prompt + len(words_of(ANSWER))
        slot = replace(slot, n_tokens=end, resident=(Span(0, end),), n_free=4096 - end)
    assert asked == [True, True, *[False] * 5, True, False, False]


def test_an_answer_of_other_tokens_than_generated_is_planned_early() -> None:
    conversation, previous, slot = finished_turn()
    server = Server(slot, n_other=3)
    prepared = asyncio.run(planned(server, conversation, request_of(LONGER, previous)))
    turn = begun(conversation, LONGER, slot, prepared, n_other=3)
    assert turn.slot.n_common == slot.n_tokens - 3
    assert was_planned_early(conversation, turn)
    assert conversation.session.plan(turn) == fresh_plan(turn)


def test_nothing_is_planned_early_on_a_server_that_cannot_render_behind_a_prompt() -> None:
    conversation, previous, slot = finished_turn()
    server = Server(slot)
    server.monitor.server.can_render_behind = False
    asyncio.run(planned(server, conversation, request_of(LONGER, previous)))
    assert server.calls == []
