"""Which of several servers takes a request, and when none does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.config import PoolConfig
from evoke_proxy.core.servers.server_pool import CLOSED, HALF_OPEN, OPEN, ServerPool

RULES = PoolConfig(failures=3, backoff_s=1.0, backoff_max_s=6.0, health_interval_s=2.0)


def _well(n: int = 2, n_slots: int = 1) -> ServerPool:
    """All of them have answered at time 0."""
    pool = ServerPool([f"s{i}" for i in range(n)], RULES)
    for at in pool.due_checks(0.0):
        assert pool.check_passed(at, 0.0, n_slots, "model")
    return pool


def _missed(pool: ServerPool, at: int, now: float) -> bool:
    """A check that fails; whether it opens the breaker."""
    pool.members[at].breaker.is_checking = True
    return pool.check_failed(at, now)


def test_nobody_is_asked_anything_before_a_check_was_answered() -> None:
    pool = ServerPool(["a", "b"], RULES)
    assert pool.choose(None, [0, 0]) is None
    assert pool.due_checks(0.0) == [0, 1] and pool.due_checks(0.0) == []
    pool.check_passed(1, 0.0, 1, "")
    assert pool.choose(None, [0, 0]) == 1
    assert pool.choose(0, [0, 0]) == 1, "a home that is not there"


def test_home_first_then_least_to_do_for_each_slot_then_fewest_conversations() -> None:
    pool = _well(3)
    pool.members[2].n_slots = 4
    for at in (0, 1, 2, 2):
        pool.request_started(at)
    assert pool.choose(0, [0, 0, 0]) == 0
    assert pool.choose(None, [0, 0, 0]) == 2, "two in four slots are less than one in one"
    assert pool.choose(None, [0, 0, 0], {2: 0}) == 0
    pool.request_ended(1)
    assert pool.choose(None, [0, 0, 0]) == 1
    for at in (0, 2, 2):
        pool.request_ended(at)
    assert pool.choose(None, [2, 1, 1]) == 1


def test_failures_in_a_row_open_it_and_one_trial_after_a_back_off_closes_it() -> None:
    pool = _well()
    assert not _missed(pool, 0, 0.1) and not _missed(pool, 0, 0.2)
    pool.request_served(0)
    assert not _missed(pool, 0, 0.3) and not _missed(pool, 0, 0.4)
    assert _missed(pool, 0, 0.5) and pool.members[0].breaker.state == OPEN
    pool.request_failed(0, 0.6)
    assert pool.members[0].breaker.check_at == 1.5, "one that began before says nothing"
    assert pool.choose(0, [0, 0]) == 1
    assert pool.due_checks(1.4) == []
    assert pool.due_checks(1.5) == [0] and pool.members[0].breaker.state == HALF_OPEN
    assert pool.due_checks(1.6) == [], "one trial at a time"
    assert pool.choose(0, [0, 0]) == 1, "no client's request is the trial"
    assert pool.check_passed(0, 1.7, 1, "model") and pool.members[0].breaker.state == CLOSED
    assert pool.choose(0, [0, 0]) == 0
    assert pool.members[0].breaker.openings == 1


def test_the_back_off_doubles_up_to_a_bound_and_begins_anew() -> None:
    pool, now, waits = _well(1), 2.0, []
    while len(waits) < 6:
        if pool.due_checks(now) == [0]:
            opened = pool.check_failed(0, now)
            if opened:
                waits.append(pool.members[0].breaker.check_at - now)
        now = pool.members[0].breaker.check_at
    assert waits == [1.0, 2.0, 4.0, 6.0, 6.0, 6.0]
    assert pool.due_checks(now) == [0] and pool.check_passed(0, now, 1, "model")
    for _ in range(3):
        _missed(pool, 0, now)
    assert pool.members[0].breaker.check_at - now == 1.0


def test_requests_that_fail_open_no_breaker_of_a_server_that_answers_a_check() -> None:
    pool = _well()
    for now in range(1, 50):
        for _ in range(7):
            pool.request_failed(0, now)
        assert 0 in pool.due_checks(now), "it is checked at once"
        pool.request_failed(0, now)
        assert not pool.check_passed(0, now, 1, "model") and pool.accepts_requests(0)
        assert 0 in pool.due_checks(now), "one that failed after the check began asks for another"
        pool.check_passed(0, now, 1, "model")
        if pool.members[1].breaker.is_checking:
            pool.check_passed(1, now, 1, "model")
    assert pool.members[0].breaker.openings == 0


def test_requests_that_fail_count_when_the_check_fails_too() -> None:
    pool = _well()
    pool.request_failed(0, 0.5)
    assert pool.due_checks(0.5) == [0] and not pool.check_failed(0, 0.6)
    pool.request_failed(0, 0.7)
    assert pool.due_checks(0.7) == [0] and pool.check_failed(0, 0.8), "two requests and two checks"


def test_one_that_was_tried_may_be_again_once_it_is_back() -> None:
    pool = _well()
    tried = {0: 0, 1: 0}
    assert pool.choose(0, [0, 0], tried) is None
    for _ in range(3):
        _missed(pool, 0, 1.0)
    assert pool.choose(0, [0, 0], tried) is None
    assert 0 in pool.due_checks(2.0)
    pool.check_passed(0, 2.0, 1, "model")
    assert pool.choose(1, [0, 0], tried) == 0


def test_one_that_drains_gets_nothing_and_comes_back() -> None:
    pool = _well()
    pool.drain(0, True)
    assert pool.choose(0, [0, 0]) == 1
    pool.drain(1, True)
    assert pool.choose(0, [0, 0]) is None
    assert pool.due_checks(2.0) == [0, 1], "it is still looked after"
    pool.drain(0, False)
    assert pool.choose(None, [9, 0]) == 0


def test_what_all_serve_is_what_the_first_served_as_long_as_anybody_does() -> None:
    pool = ServerPool(["a", "b", "c"], RULES)
    assert pool.due_checks(0.0) == [0, 1, 2]
    pool.check_passed(2, 0.0, 1, "")
    pool.check_passed(0, 0.0, 1, "large")
    assert not pool.is_foreign(0), "not before all were asked"
    pool.check_passed(1, 0.0, 1, "small")
    assert [pool.is_foreign(at) for at in range(3)] == [False, True, False]
    # The first was away at the start: what it serves is not what all do.
    pool = ServerPool(["a", "b", "c"], RULES)
    assert pool.due_checks(0.0) == [0, 1, 2]
    pool.check_passed(2, 0.0, 1, "")
    pool.check_failed(0, 0.0)
    pool.check_passed(1, 0.0, 1, "small")
    assert pool.due_checks(1.0) == [0]
    pool.check_passed(0, 1.0, 1, "large")
    assert [pool.is_foreign(at) for at in range(3)] == [True, False, False]
    assert pool.choose(0, [0, 0, 0]) == 1
    for _ in range(3):
        _missed(pool, 1, 1.0)
    assert pool.choose(0, [0, 0, 0]) == 2, "one that is down keeps what all serve"
    pool.drain(2, True)
    assert pool.choose(0, [0, 0, 0]) is None, "rather nothing than another model"
    # The second comes back with what the first has had: an upgrade, one after the other.
    assert 1 in pool.due_checks(5.0)
    pool.check_passed(1, 5.0, 1, "large")
    assert not pool.is_foreign(0) and not pool.is_foreign(1)


def test_it_says_when_to_ask_again() -> None:
    pool = _well()
    for at, when in ((0, 10.0), (1, 13.0)):
        for _ in range(3):
            _missed(pool, at, when)
    assert pool.retry_after(10.2) == 1.0  # never sooner than a second
    pool.members[0].breaker.check_at = 15.5
    pool.members[1].breaker.check_at = 14.5
    assert pool.retry_after(11.0) == 3.5


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("fail", "served", "begin", "end", "check", "answer", "miss", "drain")),
        st.integers(0, 2),
        st.floats(0.0, 3.0),
    ),
    max_size=80,
)


@given(EVENTS)
def test_whatever_happens_only_those_that_are_well_are_chosen(
    events: list[tuple[str, int, float]],
) -> None:
    pool, now, checking = ServerPool(["a", "b", "c"], RULES), 0.0, set[int]()
    for kind, at, later in events:
        now += later
        member = pool.members[at]
        was = member.breaker.state
        match kind:
            case "fail":
                pool.request_failed(at, now)
            case "served":
                pool.request_served(at)
            case "begin":
                chosen = pool.choose(at, [0, 0, 0])
                if chosen is not None:
                    pool.request_started(chosen)
            case "end" if member.in_flight:
                pool.request_ended(at)
            case "check":
                due = pool.due_checks(now)
                assert not checking.intersection(due)
                checking.update(due)
            case "answer" if at in checking:
                checking.remove(at)
                assert pool.check_passed(at, now, 2, "m") == (was == HALF_OPEN)
            case "miss" if at in checking:
                checking.remove(at)
                pool.check_failed(at, now)
            case "drain":
                pool.drain(at, not member.draining)
        # An open one is left only by a trial, and a trial that fails waits longer.
        if was == OPEN:
            assert member.breaker.state == OPEN or kind == "check"
        if was == CLOSED and member.breaker.state == OPEN:
            assert kind == "miss" and member.breaker.check_at == now + RULES.backoff_s
        assert 0.0 <= member.breaker.backoff_s <= RULES.backoff_max_s
        assert all(m.in_flight >= 0 for m in pool.members)
        assert 1.0 <= pool.retry_after(now) <= max(RULES.backoff_max_s, 1.0)
        chosen = pool.choose(at, [0, 0, 0])
        able = [m for m in pool.members if m.breaker.state == CLOSED and not m.draining]
        assert (chosen is None) == (not able)
        if chosen is not None:
            assert pool.members[chosen] in able
            least = min(m.load for m in able)
            assert chosen == at or pool.members[chosen].load == least
