"""The slot pool: which request gets which slot, which waits, and in what order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.servers.slot_pool import Grant, Refuse, SlotPool, Wait


def test_a_session_gets_its_own_slot_back() -> None:
    pool = SlotPool(2, 4)
    assert pool.request("a", "", 0) == Grant(0)
    assert pool.request("b", "", 1) == Grant(1)
    assert pool.release(0, 2) == [] and pool.release(1, 3) == []
    assert pool.request("b", "", 4) == Grant(1)
    assert repr(pool) == "<SlotPool [a b*] queued=0>"


def test_the_slot_idle_for_longest_is_granted_with_its_holder_as_victim() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    pool.request("b", "", 1)
    pool.release(1, 2)
    pool.release(0, 3)
    assert pool.request("c", "", 4) == Grant(1, victim="b")
    assert pool.slot_of("b") is None and pool.slot_of("c") == 1


def test_a_second_request_of_a_session_waits_for_its_slot() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    assert pool.request("a", "", 1) == Wait(1)
    assert pool.release(0, 2) == [(1, Grant(0))]


def test_tenants_take_turns() -> None:
    pool = SlotPool(1, 9)
    pool.request("x", "busy", 0)
    for name in ("x1", "x2", "x3"):
        pool.request(name, "busy", 1)
    assert pool.request("y1", "other", 2) == Wait(4)
    order = []
    for now in range(4):
        ((ticket, grant),) = pool.release(0, now + 3)
        assert grant.slot == 0
        order.append(ticket)
    assert order == [1, 4, 2, 3]
    assert pool.release(0, 9) == []


def test_a_full_queue_refuses_until_a_waiter_cancels() -> None:
    pool = SlotPool(1, 1)
    pool.request("a", "", 0)
    assert pool.request("b", "", 0) == Wait(1)
    assert pool.request("c", "", 0) == Refuse(1)
    assert pool.cancel(1, 1) == []
    assert pool.request("c", "", 2) == Wait(2)


def test_a_forgotten_session_holds_no_slot() -> None:
    pool = SlotPool(1, 1)
    pool.request("a", "", 0)
    pool.release(0, 1)
    pool.forget("a")
    assert pool.request("b", "", 2) == Grant(0, victim=None)


_TENANTS = ("a", "b", "c")


@dataclass
class CheckedPool:
    """A pool whose invariants are checked after each answer."""

    pool: SlotPool
    running: dict[int, str] = field(default_factory=dict)
    waiting: dict[int, tuple[str, str]] = field(default_factory=dict)

    def ask(self, session: str, tenant: str, now: float, ephemeral: bool, slot: int | None) -> None:
        answer = self.pool.request(session, tenant, now, ephemeral, slot)
        counts = Counter(of for _, of in self.waiting.values())
        if isinstance(answer, Grant):
            assert slot in (None, answer.slot)
            self._run(answer, session)
        elif isinstance(answer, Wait):
            self.waiting[answer.ticket] = session, tenant
            if answer.displaced is not None:
                _, displaced_tenant = self.waiting.pop(answer.displaced)
                assert counts[displaced_tenant] == max(counts.values()) > counts[tenant] + 1
                later = [ticket for ticket in self.waiting if ticket > answer.displaced]
                assert all(self.waiting[ticket][1] != displaced_tenant for ticket in later), (
                    "the displaced waiter was not the newest"
                )
        else:
            assert len(self.waiting) >= self.pool.max_queue
            assert counts[tenant] + 1 >= max(counts.values()), (
                "the refused tenant had fewer waiters than another"
            )
        self.check()

    def served(self, granted: list[tuple[int, Grant]]) -> None:
        for ticket, grant in granted:
            session, _ = self.waiting.pop(ticket)
            self._run(grant, session)
        self.check()

    def _run(self, grant: Grant, session: str) -> None:
        assert grant.slot not in self.running
        sessions = [name for name in self.running.values() if not name.startswith("g")]
        assert session not in sessions, "two requests of a session run at once"
        self.running[grant.slot] = session

    def check(self) -> None:
        pool = self.pool
        assert pool.queued == len(self.waiting)
        holders = [pool.holder(slot) for slot in range(len(pool)) if pool.holder(slot) is not None]
        assert len(set(holders)) == len(holders)
        assert not any(str(holder).startswith("g") for holder in holders)


_STEPS = st.lists(st.tuples(st.sampled_from("rgnfcvbh"), st.integers(0, 8)), max_size=80)


@given(_STEPS)
def test_no_slot_or_session_is_granted_twice_and_every_waiter_is_served(
    steps: list[tuple[str, int]],
) -> None:
    pool = SlotPool(2, 3)
    checked = CheckedPool(pool)
    background: list[tuple[tuple[int, ...], str | None]] = []
    locked: list[str] = []
    for now, (kind, number) in enumerate(steps):
        if kind in "rgn":
            named = number % 2 if kind == "n" else None
            checked.ask(f"{kind}{number}", _TENANTS[number % 3], now, kind == "g", named)
        elif kind == "f" and checked.running:
            slot = sorted(checked.running)[number % len(checked.running)]
            del checked.running[slot]
            checked.served(pool.release(slot, now))
        elif kind == "v" and checked.running:
            checked.served(
                pool.vacated(sorted(checked.running)[number % len(checked.running)], now)
            )
        elif kind == "c" and checked.waiting:
            ticket = sorted(checked.waiting)[number % len(checked.waiting)]
            del checked.waiting[ticket]
            checked.served(pool.cancel(ticket, now))
        elif kind == "b" and pool.begin_background((number % 2,), f"r{number}", alone=number > 4):
            assert (
                number % 2 not in checked.running and f"r{number}" not in checked.running.values()
            )
            background.append(((number % 2,), f"r{number}"))
        elif kind == "b" and background:
            slots, session = background.pop()
            checked.served(pool.end_background(slots, session, now))
        elif kind == "h" and pool.lock(f"r{number}"):
            assert f"r{number}" not in checked.running.values()
            locked.append(f"r{number}")
        elif kind == "h" and locked:
            checked.served(pool.unlock(locked.pop(), now))
    for slots, session in background:
        checked.served(pool.end_background(slots, session, 999))
    for session in locked:
        checked.served(pool.unlock(session, 999))
    while checked.running:
        slot, _ = checked.running.popitem()
        checked.served(pool.release(slot, 1000))
    assert not checked.waiting and pool.idle()
    assert not any(pool.is_locked(f"{kind}{number}") for kind in "rgn" for number in range(9))


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
)
def test_a_tenant_below_its_share_of_the_queue_is_never_refused(
    flood: int, max_queue: int, arrivals: list[int]
) -> None:
    """Another tenant fills the queue and retries at any time."""
    pool = SlotPool(1, max_queue)
    assert isinstance(pool.request("first", "loud", 0), Grant)
    waiting: dict[int, str] = {}
    for number, quiet in enumerate(arrivals):
        for retry in range(flood):
            answer = pool.request(f"loud{number}.{retry}", "loud", number)
            _record_answer(waiting, answer, "loud")
        share = max_queue // 2
        if quiet == 0 and list(waiting.values()).count("quiet") < share:
            answer = pool.request(f"quiet{number}", "quiet", number)
            assert not isinstance(answer, Refuse)
            _record_answer(waiting, answer, "quiet")
        if quiet == 1:
            for ticket, _ in pool.release(0, number):
                del waiting[ticket]
    assert pool.queued == len(waiting)
    while pool.queued:
        for ticket, _ in pool.release(0, len(arrivals)):
            del waiting[ticket]
    assert not waiting


def _record_answer(waiting: dict[int, str], answer: Grant | Wait | Refuse, tenant: str) -> None:
    if isinstance(answer, Wait):
        waiting[answer.ticket] = tenant
        if answer.displaced is not None:
            assert waiting.pop(answer.displaced) == "loud", (
                "the tenant below its share was displaced"
            )


def test_a_full_queue_displaces_the_newest_waiter_of_the_largest_tenant() -> None:
    pool = SlotPool(1, 4)
    pool.request("x", "loud", 0)
    for ticket in range(1, 5):
        assert pool.request(f"x{ticket}", "loud", 0) == Wait(ticket)
    assert pool.request("x5", "loud", 0) == Refuse(4)
    assert pool.request("y1", "quiet", 0) == Wait(5, displaced=4)
    assert pool.request("y2", "quiet", 0) == Wait(6, displaced=3)
    assert pool.request("y3", "quiet", 0) == Refuse(4), "the tenant has its half of the queue"
    assert pool.request("x6", "loud", 0) == Refuse(4)


def test_the_waiters_of_a_tenant_are_limited_by_tenant_queue() -> None:
    pool = SlotPool(1, 9, tenant_queue=2)
    pool.request("x", "loud", 0)
    assert pool.request("x1", "loud", 0) == Wait(1)
    assert pool.request("x2", "loud", 0) == Wait(2)
    assert pool.request("x3", "loud", 0) == Refuse(2)
    assert pool.request("y1", "quiet", 0) == Wait(3)


def test_an_ephemeral_session_may_have_several_slots() -> None:
    pool = SlotPool(2, 4)
    assert pool.request("guest", "", 0, ephemeral=True, slot=0) == Grant(0)
    assert pool.request("guest", "", 0, ephemeral=True, slot=1) == Grant(1)


def test_a_session_waiting_for_its_own_slot_does_not_block_an_idle_slot() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    assert pool.request("a", "", 1) == Wait(1)
    assert pool.request("b", "", 2) == Grant(1)
    assert pool.release(0, 3) == [(1, Grant(0))]


def test_a_session_whose_rows_are_being_saved_waits_for_the_save() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    pool.request("c", "", 0)
    for slot in (0, 1):
        pool.release(slot, 1)
    assert pool.request("b", "", 2) == Grant(0, victim="a")
    assert pool.is_locked("a")
    assert pool.request("a", "", 3) == Wait(1)
    assert pool.vacated(0, 4) == [(1, Grant(1, victim="c"))]


def test_the_slot_a_session_moves_from_is_free_only_after_its_rows_are_saved() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    pool.release(0, 1)
    assert pool.request("a", "", 2, slot=1) == Grant(1, previous=0)
    assert pool.request("b", "", 3) == Wait(1)
    assert pool.vacated(1, 4) == [(1, Grant(0))]


def test_a_request_may_wait_for_background_work_even_without_a_queue() -> None:
    pool = SlotPool(1, 0)
    assert pool.begin_background((0,), "a")
    assert pool.request("b", "", 0) == Wait(1)
    assert pool.end_background((0,), "a", 1) == [(1, Grant(0))]
    assert pool.request("c", "", 2) == Refuse(0)


def test_an_ephemeral_request_gets_an_unheld_slot_and_does_not_become_its_holder() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    pool.release(0, 1)
    assert pool.request("title", "", 5, ephemeral=True) == Grant(1)
    assert pool.release(1, 6) == []
    assert pool.slot_of("title") is None and pool.holder(1) is None
    assert pool.request("tags", "", 7, ephemeral=True) == Grant(1)


def test_a_session_gets_its_slot_back_after_an_ephemeral_request() -> None:
    pool = SlotPool(2, 4)
    for now, name in enumerate("ab"):
        pool.request(name, "", now)
    for now, slot in enumerate((0, 1), 2):
        pool.release(slot, now)
    assert pool.request("title", "", 9, ephemeral=True) == Grant(0, victim="a")
    pool.release(0, 10)
    assert (pool.holder(0), pool.holder(1)) == ("a", "b")
    # "a" is still the session idle for longest.
    assert pool.request("c", "", 11) == Grant(0, victim="a")


def test_a_session_whose_slot_has_an_ephemeral_request_takes_the_next_free_slot() -> None:
    pool = SlotPool(2, 4)
    for now, name in enumerate("ab"):
        pool.request(name, "", now)
    pool.release(0, 2)
    assert pool.request("title", "", 3, ephemeral=True) == Grant(0, victim="a")
    assert pool.vacated(0, 3) == []  # the rows of "a" are saved
    assert pool.request("a", "", 4) == Wait(1)
    assert pool.release(1, 5) == [(1, Grant(1, victim="b"))]
    assert pool.slot_of("a") == 1
    assert pool.release(0, 6) == [] and pool.holder(0) is None


def test_an_ephemeral_request_waits_in_the_queue_like_others() -> None:
    pool = SlotPool(1, 4)
    pool.request("a", "", 0)
    assert pool.request("title", "", 1, ephemeral=True) == Wait(1)
    assert pool.request("b", "", 2) == Wait(2)
    assert pool.release(0, 3) == [(1, Grant(0, victim="a"))]
    assert pool.release(0, 4) == [(2, Grant(0, victim="a"))]


def test_a_request_for_a_certain_slot_waits_for_it_while_others_are_idle() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    assert pool.request("b", "", 1, slot=0) == Wait(1)
    # It delays only requests for the same slot.
    assert pool.request("c", "", 2) == Grant(1)
    assert pool.release(1, 3) == []
    assert pool.request("d", "", 4, slot=0) == Wait(2)
    assert pool.request("e", "", 5) == Grant(1, victim="c")
    assert pool.release(0, 6) == [(1, Grant(0, victim="a"))]
    assert pool.release(0, 7) == [(2, Grant(0, victim="b"))]


def test_a_request_for_any_slot_is_served_before_later_ones_for_a_certain_slot() -> None:
    pool = SlotPool(1, 9)
    pool.request("a", "", 0)
    assert pool.request("b", "", 1, slot=0) == Wait(1)
    assert pool.request("c", "", 2) == Wait(2)
    assert pool.request("d", "", 3, slot=0) == Wait(3)
    order = [pool.release(0, now)[0][0] for now in range(4, 7)]
    assert order == [1, 2, 3]


def test_a_session_that_requests_another_slot_moves_there() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    assert pool.request("a", "", 1, slot=1) == Wait(1)  # its own request runs
    assert pool.release(0, 2) == [(1, Grant(1, previous=0))]
    assert (pool.slot_of("a"), pool.holder(0)) == (1, None)


def test_a_session_still_runs_after_another_was_moved_to_its_slot() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    pool.request("b", "", 1)
    pool.record_move("a", 1)  # llama-server has chosen that slot
    assert pool.request("b", "", 2) == Wait(1), "its first request still runs"
    assert pool.release(0, 3) == []
    assert pool.release(1, 4) == [(1, Grant(0))]


@given(st.lists(st.tuples(st.sampled_from("rfsm"), st.integers(0, 5)), max_size=80))
def test_no_two_requests_of_a_session_run_at_once(steps: list[tuple[str, int]]) -> None:
    """Servers restart with another number of slots, and sessions are moved between slots."""
    pool = SlotPool(2, 9)
    running: dict[int, str] = {}
    waiting: dict[int, str] = {}

    def granted(slot: int, session: str) -> None:
        assert slot not in running and session not in running.values() and slot < len(pool)
        running[slot] = session

    def served(tickets: list[tuple[int, Grant]]) -> None:
        for ticket, grant in tickets:
            granted(grant.slot, waiting.pop(ticket))

    for now, (kind, number) in enumerate(steps):
        session = f"s{number % 3}"
        if kind == "r":
            answer = pool.request(session, f"t{number // 3}", now)
            if isinstance(answer, Grant):
                granted(answer.slot, session)
            elif isinstance(answer, Wait):
                waiting[answer.ticket] = session
        elif kind == "f" and running:
            slot = sorted(running)[number % len(running)]
            del running[slot]
            served(pool.release(slot, now))
        elif kind == "s":
            served(pool.restart(number % 3 + 1, now))
        elif kind == "m":
            pool.record_move(session, number % len(pool))
    for step in range(200):
        if not running:
            break
        slot, _ = running.popitem()
        served(pool.release(slot, 1000 + step))
    assert not waiting and not running


def test_a_running_request_exchanges_its_slot_for_an_idle_one() -> None:
    pool = SlotPool(3, 4)
    for now, name in enumerate("abc"):
        pool.request(name, "", now)
    pool.release(1, 3)
    assert pool.exchange(0, 2, 4) is None, "another request runs there"
    assert repr(pool) == "<SlotPool [a* b c*] queued=0>"
    assert pool.request("a", "", 5) == Wait(1), "its first request still runs"
    assert pool.exchange(0, 1, 6) == []
    assert repr(pool) == "<SlotPool [- a* c*] queued=1>"
    assert pool.request("d", "", 7) == Grant(0)
    assert pool.release(1, 8) == [(1, Grant(1))]


def test_the_slot_freed_by_an_exchange_is_granted_to_its_waiter() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    assert pool.request("b", "", 1, slot=0) == Wait(1)
    assert pool.exchange(0, 1, 2) == [(1, Grant(0))]
