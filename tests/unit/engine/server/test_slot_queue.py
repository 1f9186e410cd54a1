"""The slot queue under races: cancellations, failures and other work at fixed moments."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import virtual_time
from engine_fixtures import ending_request, is_free, prompt, with_engine
from hypothesis import given
from hypothesis import strategies as st
from session_fixtures import session_record

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.config import LimitsConfig, PolicyConfig
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.core.session.identity import hint_of
from evoke_proxy.engine.admin.admin import Admin
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server.conversations import Arrival, Conversations
from evoke_proxy.engine.server.slot_queue import Preempted, SlotQueue, finished, until_over
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers
from evoke_proxy.errors import (
    PlanRefused,
    RequestError,
    SlotsBusy,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnavailable,
)

LIMITS = LimitsConfig(queue=4, queue_timeout_s=60.0)


def test_a_busy_slot_is_not_leased_however_long_it_is_busy() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + 3600

        async def busy() -> bool:
            return loop.time() < ends_at

        await until_over(busy, lambda: False)
        assert 0 <= loop.time() - ends_at < 2

    virtual_time.run(work())


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (UpstreamTimeout("it is occupied"), True),
        (UpstreamRejected(503, b"{}"), True),
        (UpstreamRejected(501, b"{}"), False),
        (UpstreamUnavailable("it is gone", reached=False), False),
    ],
)
def test_a_server_that_does_not_answer_whether_it_is_idle_is_asked_again(
    error: Exception, goes_on: bool
) -> None:
    async def work() -> None:
        answers: list[bool | Exception] = [True, error, False]

        async def busy() -> bool:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        if goes_on:
            await until_over(busy, lambda: False)
            assert not answers
        else:
            with pytest.raises(type(error)):
                await until_over(busy, lambda: False)

    virtual_time.run(work())


@pytest.mark.parametrize("times", [1, 2, 5])
def test_uninterruptible_work_is_awaited_however_often_its_caller_is_cancelled(
    times: int,
) -> None:
    async def work() -> None:
        ended = asyncio.Event()
        states = transfers_with(_spawn)

        async def save() -> bool:
            await ended.wait()
            return True

        caller = asyncio.get_running_loop().create_task(states._run_to_end(save(), "saving"))
        await asyncio.sleep(0.1)
        for _ in range(times):
            caller.cancel()
            await asyncio.sleep(0.1)
            assert not caller.done(), "the slot was released while it was being saved"
        ended.set()
        with pytest.raises(asyncio.CancelledError):
            await caller

    virtual_time.run(work())


def transfers_with(run: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]) -> Any:
    """Transfers with nothing but a function that starts background tasks."""
    none: Any = None
    tasks: Any = SimpleNamespace(run=run)
    return SnapshotTransfers(
        repository=none, probe=none, unverified=none, metrics=none, tasks=tasks
    )


def _spawn(work: Coroutine[Any, Any, None], _: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work)


def test_work_cancelled_before_it_starts_does_not_block_its_caller() -> None:
    async def work() -> None:
        def spawn(job: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
            task = _spawn(job, name)
            task.cancel()
            return task

        states = transfers_with(spawn)

        async def save() -> bool:
            raise AssertionError("it never begins")

        job = save()
        with pytest.raises(asyncio.CancelledError):
            await states._run_to_end(job, "saving")
        job.close()

    virtual_time.run(work())


def test_a_caller_that_is_not_cancelled_gets_the_result() -> None:
    async def work() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(5, future.set_result, 7)
        assert await finished(future) == 7

    virtual_time.run(work())


def test_a_second_release_does_not_free_the_slot_of_the_next_lease() -> None:
    async def work() -> None:
        queue = SlotQueue(LIMITS)
        first = await queue.acquire("a", "")
        first.release()
        second = await queue.acquire("b", "")
        first.release()
        first.vacated()
        assert repr(queue.pool) == "<SlotPool [b*] queued=0>"
        second.release()

    virtual_time.run(work())


def test_a_lease_releases_the_slot_that_it_was_exchanged_for() -> None:
    """llama-server may decode in another slot; a slot that is busy is not taken."""

    async def work() -> None:
        queue = SlotQueue(LIMITS)
        queue.restart(2)
        moving, other = await queue.acquire("a", ""), await queue.acquire("b", "")
        assert not queue.exchange(moving, other.slot) and (moving.slot, other.slot) == (0, 1)
        waiting = asyncio.get_running_loop().create_task(queue.acquire("c", ""))
        await asyncio.sleep(0)
        other.release()
        await waiting
        (third := waiting.result()).release()
        assert third.slot == 1 and queue.exchange(moving, 1) and moving.slot == 1
        assert repr(queue.pool) == "<SlotPool [- a*] queued=0>"
        moving.release()
        assert queue.pool.idle() and not any(map(queue.pool.is_locked, "abc"))

    virtual_time.run(work())


async def _settled(idle: asyncio.Event) -> None:
    await idle.wait()


def test_a_request_awaits_only_the_call_that_cannot_be_preempted() -> None:
    async def work() -> None:
        queue, calls = SlotQueue(LIMITS), list[int]()

        async def copy() -> None:
            lease = queue.background(0, "a")
            assert lease is not None
            async with lease:
                for number in range(9):
                    lease.check()
                    calls.append(number)
                    await asyncio.sleep(3)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy())
            await asyncio.sleep(4)
            with await queue.acquire("b", "") as lease:
                assert lease.waited and asyncio.get_running_loop().time() == 6
        assert calls == [0, 1]

    virtual_time.run(work())


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("slot", [0, 1])
def test_a_rendering_is_stale_when_its_slot_was_decoded_in_and_not_when_it_was_copied(
    slot: int, decodes: bool
) -> None:
    async def work() -> None:
        queue, loop = SlotQueue(LIMITS), asyncio.get_running_loop()
        queue.restart(2)
        await asyncio.sleep(1)
        rendered_at = loop.time()
        lease = queue.background(slot, "a")
        assert lease is not None
        async with lease:
            await (lease.run(asyncio.sleep(1)) if decodes else asyncio.sleep(1))
        with await queue.acquire("a", "", slot=0) as mine:
            assert mine.has_changed(rendered_at) == (decodes and slot == 0)
        with await queue.acquire("a", "", slot=0) as mine:
            assert mine.has_changed(rendered_at), "a request decoded in that slot"

    virtual_time.run(work())


@pytest.mark.parametrize("decodes", [True, False])
def test_a_request_that_waited_only_for_copies_does_not_render_again(decodes: bool) -> None:
    async def work() -> None:
        queue, loop = SlotQueue(LIMITS), asyncio.get_running_loop()
        await asyncio.sleep(1)
        rendered_at = loop.time()

        async def background() -> None:
            lease = queue.background(0, "a")
            assert lease is not None
            async with lease:
                await (lease.run(asyncio.sleep(0.5)) if decodes else asyncio.sleep(0.5))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(background())
            await asyncio.sleep(0.1)
            with await queue.acquire("a", "") as mine:
                assert mine.waited and mine.has_changed(rendered_at) == decodes

    virtual_time.run(work())


def test_a_session_of_background_work_waits_though_another_slot_is_idle() -> None:
    async def work() -> None:
        queue = SlotQueue(LIMITS)
        queue.restart(2)
        lease = queue.background(1, "a")
        assert lease is not None and queue.background(0, "a") is None
        request = asyncio.get_running_loop().create_task(queue.acquire("a", ""))
        await asyncio.sleep(1)
        assert lease.preempted and not request.done()
        lease.end()
        (await request).release()
        assert queue.pool.idle()

    virtual_time.run(work())


def test_preempting_a_call_that_ends_in_the_same_step_is_no_error() -> None:
    """The result is returned, nothing counts as preempted, and the slot is free at once."""

    async def work() -> None:
        queue = SlotQueue(LIMITS)
        lease = queue.background(0, "a", lambda: _settled(asyncio.Event()), _spawn)
        assert lease is not None

        async def call() -> int:
            await asyncio.sleep(1)
            lease.preempt(0.0)  # too late: it returns in the same step
            return 5

        async with lease:
            with pytest.raises(Preempted):
                assert await lease.run(call()) == 5
                await lease.run(call())
        assert lease.preempted

    virtual_time.run(work())


def test_a_call_that_is_cancelled_before_it_begins_is_closed() -> None:
    """A coroutine that is never awaited is reported as an error by the interpreter."""

    async def work() -> None:
        queue = SlotQueue(LIMITS)
        lease = queue.background(0, "a", lambda: _settled(asyncio.Event()), _spawn)
        assert lease is not None

        async def call() -> None:
            raise AssertionError("it must not begin")

        pending = call()
        task = asyncio.get_running_loop().create_task(lease.run(pending))
        await asyncio.sleep(0)  # the lease has made the task of the call, which has not begun
        lease.preempt(0.0)
        with pytest.raises(Preempted):
            await task
        assert inspect.getcoroutinestate(pending) == inspect.CORO_CLOSED
        lease.release()

    virtual_time.run(work())


@dataclass
class ActiveRequests:
    """Random requests and background work, with the slots and sessions in use at each moment."""

    rng: random.Random
    queue: SlotQueue
    slots: dict[int, object] = field(default_factory=dict)
    sessions: dict[str, object] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def having(self, slots: Iterable[int], session: str | None) -> Iterator[None]:
        """Fails when one of these slots, or the session, is in use already."""
        user = object()
        slots = list(slots)
        assert not [slot for slot in slots if slot in self.slots], "a slot was given twice"
        assert session is None or session not in self.sessions, "a session has two writers"
        self.slots.update(dict.fromkeys(slots, user))
        if session is not None:
            self.sessions[session] = user
        try:
            yield
        finally:
            for slot in slots:
                assert self.slots.pop(slot) is user
            if session is not None:
                assert self.sessions.pop(session) is user

    async def request(self) -> None:
        session, tenant = f"s{self.rng.randrange(6)}", self.rng.choice("xyz")
        ephemeral = self.rng.random() < 0.2
        n_slots = len(self.queue.pool)
        slot = self.rng.randrange(n_slots) if self.rng.random() < 0.3 else None
        name = f"guest{self.rng.random()}" if ephemeral else session
        await asyncio.sleep(self.rng.random() * 20)
        try:
            lease = await self.queue.acquire(name, tenant, ephemeral, slot=slot)
        except SlotsBusy:
            self.counts["refused"] += 1
            return
        with lease:
            with ExitStack() as mine:
                mine.enter_context(self.having([lease.slot], None if ephemeral else session))
                with ExitStack() as session_in_use:
                    if lease.victim is not None:
                        session_in_use.enter_context(self.having((), lease.victim))
                    if lease.previous is not None:
                        session_in_use.enter_context(self.having([lease.previous], None))
                    await asyncio.sleep(self.rng.random())
                lease.vacated()
                await asyncio.sleep(self.rng.random() * 2)
        self.counts["served"] += 1

    async def work(self) -> None:
        await asyncio.sleep(self.rng.random() * 20)
        session = f"s{self.rng.randrange(6)}"
        slot = self.rng.choice([None, *range(len(self.queue.pool))])
        settling = ExitStack()

        async def settle() -> None:
            with settling:
                await asyncio.sleep(self.rng.random())

        lease = self.queue.background(slot, session, settle, _spawn, self.rng.random() < 0.5)
        if lease is None:
            return
        settling.enter_context(self.having(lease.slots, session))
        self.counts["work"] += 1
        try:
            async with lease:
                for _ in range(4):
                    await lease.run(asyncio.sleep(self.rng.random() * 3))
        finally:
            self.counts["preempted"] += lease.preempted
            if lease.is_released:
                settling.close()

    async def operation(self) -> None:
        await asyncio.sleep(self.rng.random() * 20)
        session = f"s{self.rng.randrange(6)}"
        async with self.queue.locked(session):
            with self.having((), session):
                await asyncio.sleep(self.rng.random())
        self.counts["operations"] += 1


def test_each_slot_and_session_has_one_user_under_random_traffic() -> None:
    """Requests, background work and operations at random, many of them cancelled, once or twice."""
    total: Counter[str] = Counter()

    async def traffic(seed: int) -> None:
        rng = random.Random(seed)
        queue = SlotQueue(LimitsConfig(queue=rng.choice((0, 3, 9)), queue_timeout_s=8.0))
        queue.restart(rng.choice((1, 2, 4)))
        active, loop = ActiveRequests(rng, queue), asyncio.get_running_loop()
        kinds = (active.request, active.request, active.work, active.operation)
        tasks = [loop.create_task(rng.choice(kinds)()) for _ in range(40)]
        for task in rng.sample(tasks, 15):
            for _ in range(rng.choice((1, 2))):
                loop.call_later(rng.random() * 25, task.cancel)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in done if isinstance(result, Exception)]
        assert not errors, errors
        await asyncio.sleep(5)
        pool = queue.pool
        assert pool.idle() and not pool.queued and not queue._background and not queue._waiting
        assert not any(pool.is_locked(f"s{number}") for number in range(6))
        assert len(pool) == sum(pool.begin_background((slot,)) for slot in range(len(pool)))
        total.update(active.counts)

    for seed in range(250):
        virtual_time.run(traffic(seed))
    assert all(total[kind] > 300 for kind in ("served", "work", "preempted", "operations"))
    assert total["refused"] > 300


def test_a_displaced_waiter_gets_the_reason_and_the_others_keep_their_places() -> None:
    async def work() -> None:
        queue, loop = SlotQueue(LIMITS), asyncio.get_running_loop()
        first = await queue.acquire("x", "loud")
        loud = [loop.create_task(queue.acquire(f"x{i}", "loud")) for i in range(4)]
        await asyncio.sleep(0)
        quiet = loop.create_task(queue.acquire("y", "quiet"))
        await asyncio.sleep(1)
        assert [task.done() for task in loud] == [False, False, False, True]
        error = loud[3].exception()
        assert isinstance(error, SlotsBusy) and error.retry_after > 0
        first.release()
        (await loud[0]).release()
        (await quiet).release()
        for task in loud[1:3]:
            (await task).release()
        assert queue.pool.idle()

    virtual_time.run(work())


@pytest.mark.parametrize("saves", [True, False])
def test_a_turn_of_a_victim_waits_until_its_rows_are_saved(saves: bool, monkeypatch: Any) -> None:
    """Its session has one writer at a time, whatever slot its next turn gets."""

    async def work(engine: ModelRouter) -> None:
        engine.server.slots.restart(2)
        engine.conversations.recall(session_record())
        (victim,) = engine.conversations
        (await engine.server.slots.acquire(victim.id, "")).release()
        victim.budgeted.epoch = 5
        saving, saved = asyncio.Event(), asyncio.Event()

        async def run(*_: object) -> dict[str, Any]:
            saving.set()
            await saved.wait()
            if not saves:
                raise PlanRefused("stale_epoch")
            return {"epoch": 5}

        monkeypatch.setattr(BlockApi, "run", run)
        view = SlotView.parse(
            {"id": 0, "epoch": 5, "n_tokens": 12, "resident": [[0, 12]], "n_free": 9}
        )

        async def other() -> None:
            with await engine.server.slots.acquire("other", "", slot=0) as lease:
                assert lease.victim == victim.id
                with lease.vacating():
                    await engine.server.strategies.budgeted._slots.save_rows(
                        victim, view, engine.server.resources.calls.blocks
                    )
                await asyncio.sleep(100)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(other())
            await saving.wait()
            turn = tasks.create_task(engine.server.slots.acquire(victim.id, ""))
            await asyncio.sleep(10)
            assert not turn.done() and engine.server.slots.pool.slot_of(victim.id) is None
            saved.set()
            with await turn as lease:
                assert lease.slot == 1

    with_engine(work)


def _slow_block_calls(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Make block calls on a slot with 12 rows wait.

    Returns an event that is set when a call has begun, and one that lets all calls end.
    """
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slot(*_: object, **__: object) -> dict[str, Any]:
        return {"id": 0, "epoch": 5, "n_tokens": 12, "resident": [[0, 12]], "n_free": 9}

    async def run(*_: object) -> dict[str, Any]:
        begun.set()
        await may_end.wait()
        return {"epoch": 5}

    monkeypatch.setattr(BlockApi, "slot", slot)
    monkeypatch.setattr(BlockApi, "run", run)
    return begun, may_end


def test_a_turn_waits_while_its_rows_are_saved_for_a_request_without_a_conversation(
    monkeypatch: Any,
) -> None:
    async def work(engine: ModelRouter) -> None:
        engine.server.slots.restart(2)
        engine.conversations.recall(session_record())
        (victim,) = engine.conversations
        (await engine.server.slots.acquire(victim.id, "")).release()
        victim.budgeted.epoch = 5
        saving, saved = _slow_block_calls(monkeypatch)
        scope, chat = (
            ending_request(engine).scope,
            parse_chat("chat", {"prompt": "Hi", "id_slot": 0}),
        )
        incoming = IncomingRequest(dialect="completions", body=b"{}", headers={})
        request = ParsedChat(incoming=incoming, tenant="", body=b"{}", chat=chat, id_slot=0)
        slots = engine.server.strategies.budgeted._slots
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(slots.acquire_emptied(request, scope))
            await saving.wait()
            turn = tasks.create_task(engine.server.slots.acquire(victim.id, ""))
            await asyncio.sleep(10)
            assert not turn.done(), "two tasks change the session at once"
            saved.set()
            (await turn).release()
        scope.close()
        assert is_free(engine, victim)

    with_engine(work)


@pytest.mark.parametrize("has_slot", [True, False])
def test_a_turn_waits_while_an_operator_drops_a_block(has_slot: bool, monkeypatch: Any) -> None:
    async def work(engine: ModelRouter) -> None:
        engine.conversations.recall(session_record())
        (conversation,) = engine.conversations
        conversation.budgeted.epoch = 5
        if has_slot:
            (await engine.server.slots.acquire(conversation.id, "")).release()
        dropping, dropped = _slow_block_calls(monkeypatch)
        span = Span(0, len(conversation.tokens))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Admin(engine).drop_block(conversation.id, span))
            await dropping.wait()
            turn = tasks.create_task(engine.server.slots.acquire(conversation.id, ""))
            await asyncio.sleep(10)
            assert not turn.done() and conversation.labels
            with pytest.raises(RequestError):
                await Admin(engine).drop_block(conversation.id, span)
            dropped.set()
            (await turn).release()
        assert not conversation.session.layout.saved
        assert is_free(engine, conversation)

    with_engine(work)


def test_a_session_is_not_deleted_while_its_rows_are_being_saved(monkeypatch: Any) -> None:
    """Its copies would be made after they were dropped, and stay for ever."""

    async def work(engine: ModelRouter) -> None:
        engine.conversations.recall(session_record())
        (conversation,) = engine.conversations
        done: list[str] = []

        async def list_copies(*_: object, **__: object) -> dict[str, Any]:
            return {}

        async def drop(*_: object) -> None:
            done.append("dropped")

        monkeypatch.setattr(BlockApi, "slot", list_copies)
        monkeypatch.setattr(BlockApi, "drop_copies", drop)
        engine.monitor.server = ServerInfo("", "", can_adopt=True)
        (await engine.server.slots.acquire(conversation.id, "")).release()
        lease = await engine.server.slots.acquire("other", "")
        assert lease.victim == conversation.id
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Admin(engine).delete(conversation.id))
            await asyncio.sleep(1)
            assert engine.conversations.get(conversation.id) is None and not done
            done.append("saved")
            lease.vacated()
        lease.release()
        assert done == ["saved", "dropped"]

    with_engine(work)


def test_copies_of_a_forgotten_session_are_dropped_when_the_last_one_is_made(
    monkeypatch: Any,
) -> None:
    async def work(engine: ModelRouter) -> None:
        engine.conversations.recall(session_record())
        (conversation,) = engine.conversations
        done: list[str] = []

        async def run(api: BlockApi, slot: int, action: str, *_: object) -> dict[str, Any]:
            done.append(action)
            return {}

        monkeypatch.setattr(BlockApi, "run", run)
        (await engine.server.slots.acquire(conversation.id, "")).release()
        lease = await engine.server.slots.acquire("other", "")
        engine.conversations.forget(conversation)
        async with asyncio.TaskGroup() as tasks:
            blocks = engine.server.resources.calls.blocks
            tasks.create_task(
                engine.server.strategies.budgeted._slots.drop_copies(conversation, blocks)
            )
            await asyncio.sleep(1)
            assert not done
            done.append("saved")
            lease.vacated()
        assert done == ["saved", "block-drop"]
        lease.release()

    with_engine(work)


def test_a_refused_request_does_not_become_the_prompt_of_its_conversation() -> None:
    conversations = Conversations(PolicyConfig(), 8)
    hint, renamed = (hint_of({"X-Evoke-Session": name}, {}) for name in ("mine", "other"))
    conversation = conversations.start(prompt(*range(200)), hint, "")
    latest = conversations.start(prompt(*range(500, 700)), None, "")
    before, chat = conversation.prompt, parse_chat("chat", {"messages": []})
    longer = prompt(*range(200), 7, 8, 9)
    assert conversations.of_request(chat, longer, hint, "") is conversation
    assert (conversation.prompt, conversation.hint, list(conversations)) == (
        before,
        hint,
        [conversation, latest],
    )
    conversations.commit(conversation, Arrival(longer, renamed))
    assert conversation.tokens.tolist()[-3:] == [7, 8, 9] and conversation.is_committed
    assert (conversation.hint, list(conversations)) == (renamed, [latest, conversation])


@pytest.mark.parametrize("committed", [True, False])
def test_a_conversation_whose_first_request_is_refused_is_forgotten(committed: bool) -> None:
    async def work(engine: ModelRouter) -> None:
        ending = ending_request(engine)
        conversation = engine.conversations.start(prompt(), None, "")
        ending.scope.join(conversation, Arrival(prompt()))
        if committed:
            engine.conversations.commit(conversation, Arrival(prompt()))
        ending.finish()
        assert (engine.conversations.get(conversation.id) is conversation) == committed
        assert not conversation.in_use

    with_engine(work)


def test_a_conversation_that_another_request_uses_is_not_forgotten_with_a_refused_one() -> None:
    async def work(engine: ModelRouter) -> None:
        conversation = engine.conversations.start(prompt(), None, "")
        refused, other = ending_request(engine), ending_request(engine)
        for ending in (refused, other):
            ending.scope.join(conversation, Arrival(prompt()))
        refused.finish()
        assert engine.conversations.get(conversation.id) is conversation
        other.finish()
        assert engine.conversations.get(conversation.id) is None

    with_engine(work)


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.booleans(), st.booleans()), max_size=60),
    st.integers(1, 8),
)
def test_the_tenant_with_most_sessions_loses_one_at_the_limit(
    started: list[tuple[str, bool, bool]], limit: int
) -> None:
    conversations = Conversations(PolicyConfig(), limit)
    for tenant, pinned, in_use in started:
        conversation = conversations.start(prompt(), None, tenant)
        conversation.pinned, conversation.in_use = pinned, int(in_use)
        before = [item.tenant for item in conversations]
        loose = {item.tenant for item in conversations if not (item.pinned or item.in_use)}
        gone = list(conversations.forget_surplus())
        assert not any(item.pinned or item.in_use for item in gone)
        assert len(conversations) <= limit or not any(
            not (item.pinned or item.in_use) for item in conversations
        )
        for item in gone:
            assert before.count(item.tenant) == max(before.count(other) for other in loose)
            before.remove(item.tenant)
            loose = {
                other.tenant
                for other in [*conversations, *gone[gone.index(item) + 1 :]]
                if not (other.pinned or other.in_use)
            }


def test_many_sessions_of_one_tenant_do_not_displace_those_of_another() -> None:
    conversations = Conversations(PolicyConfig(), 8)
    mine = [conversations.start(prompt(), None, "quiet") for _ in range(4)]
    for _ in range(200):
        conversations.start(prompt(), None, "loud")
        conversations.forget_surplus()
    assert [item for item in conversations if item.tenant == "quiet"] == mine
    assert len(conversations) == 8


def test_several_sessions_over_the_limit_are_taken_from_the_tenant_that_then_has_most() -> None:
    conversations = Conversations(PolicyConfig(), 6)
    for tenant in ["loud"] * 10 + ["quiet"] * 4:
        conversations.start(prompt(), None, tenant)
    assert len(conversations.forget_surplus()) == 8
    left = [item.tenant for item in conversations]
    assert (left.count("loud"), left.count("quiet")) == (3, 3)


def test_a_stop_waits_for_a_running_copy() -> None:
    queue = SlotQueue(LimitsConfig())
    lease = queue.background(0)
    assert lease is not None
    queue.close()
    assert queue.is_closed and not lease.preempted
