"""Slots: who gets which, who waits, in what order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.servers.slots import Grant, Refuse, SlotPool, Wait


def test_a_session_gets_its_own_slot_back() -> None:
    pool = SlotPool(2, 4)
    assert pool.request("a", "", 0) == Grant(0)
    assert pool.request("b", "", 1) == Grant(1)
    assert pool.release(0, 2) == [] and pool.release(1, 3) == []
    assert pool.request("b", "", 4) == Grant(1)
    assert repr(pool) == "<SlotPool [a b*] queued=0>"


def test_the_slot_idle_for_longest_is_taken_and_its_holder_named() -> None:
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


def test_a_full_queue_refuses_and_a_cancelled_place_is_free() -> None:
    pool = SlotPool(1, 1)
    pool.request("a", "", 0)
    assert pool.request("b", "", 0) == Wait(1)
    assert pool.request("c", "", 0) == Refuse(1)
    assert pool.cancel(1, 1) == []
    assert pool.request("c", "", 2) == Wait(2)


def test_forgotten_sessions_hold_nothing() -> None:
    pool = SlotPool(1, 1)
    pool.request("a", "", 0)
    pool.release(0, 1)
    pool.forget("a")
    assert pool.request("b", "", 2) == Grant(0, victim=None)


@given(st.lists(st.tuples(st.sampled_from("rgnfc"), st.integers(0, 5)), max_size=80))
def test_no_slot_is_given_twice_and_nobody_is_lost(steps: list[tuple[str, int]]) -> None:
    pool = SlotPool(2, 3)
    running: set[int] = set()
    waiting: set[int] = set()

    def granted(served: list[tuple[int, Grant]]) -> None:
        for ticket, grant in served:
            assert ticket in waiting and grant.slot not in running
            waiting.discard(ticket)
            running.add(grant.slot)

    for now, (kind, who) in enumerate(steps):
        if kind in "rgn":
            named = who % 2 if kind == "n" else None
            answer = pool.request(f"{kind}{who}", f"t{who // 3}", now, kind == "g", named)
            if isinstance(answer, Grant):
                assert answer.slot not in running
                assert named in (None, answer.slot)
                running.add(answer.slot)
            elif isinstance(answer, Wait):
                waiting.add(answer.ticket)
            else:
                assert len(waiting) == 3
        elif kind == "f" and running:
            slot = sorted(running)[who % len(running)]
            running.discard(slot)
            granted(pool.release(slot, now))
        elif kind == "c" and waiting:
            ticket = sorted(waiting)[who % len(waiting)]
            waiting.discard(ticket)
            granted(pool.cancel(ticket, now))
        assert pool.queued == len(waiting)
        holders = [pool.holder(slot) for slot in range(2) if pool.holder(slot) is not None]
        assert len(set(holders)) == len(holders)
        assert not any(str(holder).startswith("g") for holder in holders)
    while running:
        slot = running.pop()
        granted(pool.release(slot, 1000))
    assert not waiting


def test_a_guest_takes_the_spare_slot_and_leaves_no_trace() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    pool.release(0, 1)
    assert pool.request("title", "", 5, guest=True) == Grant(1)
    assert pool.release(1, 6) == []
    assert pool.slot_of("title") is None and pool.holder(1) is None
    assert pool.request("tags", "", 7, guest=True) == Grant(1)


def test_a_guest_without_a_spare_slot_names_whose_it_is_and_hands_it_back() -> None:
    pool = SlotPool(2, 4)
    for now, name in enumerate("ab"):
        pool.request(name, "", now)
    for now, slot in enumerate((0, 1), 2):
        pool.release(slot, now)
    assert pool.request("title", "", 9, guest=True) == Grant(0, victim="a")
    pool.release(0, 10)
    assert (pool.holder(0), pool.holder(1)) == ("a", "b")
    # "a" is still the one idle for longest.
    assert pool.request("c", "", 11) == Grant(0, victim="a")


def test_a_session_waits_for_a_guest_in_its_slot_only_when_every_slot_is_busy() -> None:
    pool = SlotPool(2, 4)
    for now, name in enumerate("ab"):
        pool.request(name, "", now)
    pool.release(0, 2)
    assert pool.request("title", "", 3, guest=True) == Grant(0, victim="a")
    assert pool.request("a", "", 4) == Wait(1)
    assert pool.release(1, 5) == [(1, Grant(1, victim="b"))]
    assert pool.slot_of("a") == 1
    assert pool.release(0, 6) == [] and pool.holder(0) is None


def test_a_guest_waits_its_turn() -> None:
    pool = SlotPool(1, 4)
    pool.request("a", "", 0)
    assert pool.request("title", "", 1, guest=True) == Wait(1)
    assert pool.request("b", "", 2) == Wait(2)
    assert pool.release(0, 3) == [(1, Grant(0, victim="a"))]
    assert pool.release(0, 4) == [(2, Grant(0, victim="a"))]


def test_a_named_slot_is_waited_for_while_others_are_idle() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    assert pool.request("b", "", 1, slot=0) == Wait(1)
    # It stands in nobody's way but of those who want the same.
    assert pool.request("c", "", 2) == Grant(1)
    assert pool.release(1, 3) == []
    assert pool.request("d", "", 4, slot=0) == Wait(2)
    assert pool.request("e", "", 5) == Grant(1, victim="c")
    assert pool.release(0, 6) == [(1, Grant(0, victim="a"))]
    assert pool.release(0, 7) == [(2, Grant(0, victim="b"))]


def test_who_takes_any_slot_is_not_overtaken_for_good() -> None:
    pool = SlotPool(1, 9)
    pool.request("a", "", 0)
    assert pool.request("b", "", 1, slot=0) == Wait(1)
    assert pool.request("c", "", 2) == Wait(2)
    assert pool.request("d", "", 3, slot=0) == Wait(3)
    order = [pool.release(0, now)[0][0] for now in range(4, 7)]
    assert order == [1, 2, 3]


def test_a_session_that_names_a_slot_moves_there() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    assert pool.request("a", "", 1, slot=1) == Wait(1)  # its own request runs
    assert pool.release(0, 2) == [(1, Grant(1))]
    assert (pool.slot_of("a"), pool.holder(0)) == (1, None)


def test_a_session_moved_to_a_busy_slot_does_not_free_the_session_that_runs_there() -> None:
    pool = SlotPool(2, 4)
    pool.request("a", "", 0)
    pool.request("b", "", 1)
    pool.moved("a", 1)  # llama-server has put it there
    assert pool.request("b", "", 2) == Wait(1), "its first request still runs"
    assert pool.release(0, 3) == []
    assert pool.release(1, 4) == [(1, Grant(0))]


@given(st.lists(st.tuples(st.sampled_from("rfsm"), st.integers(0, 5)), max_size=80))
def test_no_two_requests_of_a_session_run_at_once(steps: list[tuple[str, int]]) -> None:
    """Whatever restarts, with whatever number of slots, and wherever sessions are moved."""
    pool = SlotPool(2, 9)
    running: dict[int, str] = {}
    waiting: dict[int, str] = {}

    def granted(slot: int, session: str) -> None:
        assert slot not in running and session not in running.values() and slot < len(pool)
        running[slot] = session

    def served(tickets: list[tuple[int, Grant]]) -> None:
        for ticket, grant in tickets:
            granted(grant.slot, waiting.pop(ticket))

    for now, (kind, who) in enumerate(steps):
        session = f"s{who % 3}"
        if kind == "r":
            answer = pool.request(session, f"t{who // 3}", now)
            if isinstance(answer, Grant):
                granted(answer.slot, session)
            elif isinstance(answer, Wait):
                waiting[answer.ticket] = session
        elif kind == "f" and running:
            slot = sorted(running)[who % len(running)]
            del running[slot]
            served(pool.release(slot, now))
        elif kind == "s":
            served(pool.restart(who % 3 + 1, now))
        elif kind == "m":
            pool.moved(session, who % len(pool))
    for step in range(200):
        if not running:
            break
        slot, _ = running.popitem()
        served(pool.release(slot, 1000 + step))
    assert not waiting and not running
