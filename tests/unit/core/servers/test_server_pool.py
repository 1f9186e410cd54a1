"""The server pool: which server gets a request, health checks and circuit breakers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.config import PoolConfig
from evoke_proxy.core.servers.server_pool import CLOSED, HALF_OPEN, OPEN, ServerPool

RULES = PoolConfig(failures=3, backoff_s=1.0, backoff_max_s=6.0, health_interval_s=2.0)


def _healthy_pool(n: int = 2, n_slots: int = 1) -> ServerPool:
    """A pool whose servers have all passed a check at time 0."""
    pool = ServerPool([f"s{i}" for i in range(n)], RULES)
    for at in pool.due_checks(0.0):
        pool.check_passed(at, 0.0, n_slots, "model")
        assert pool.accepts_requests(at)
    return pool


def _fail_check(pool: ServerPool, at: int, now: float) -> bool:
    """Fails a check of a server; returns whether that opens its breaker."""
    pool.members[at].breaker.is_checking = True
    return pool.check_failed(at, now)


def test_no_server_is_chosen_before_it_has_passed_a_check() -> None:
    pool = ServerPool(["a", "b"], RULES)
    assert pool.choose(None, [0, 0]) is None
    assert pool.due_checks(0.0) == [0, 1] and pool.due_checks(0.0) == []
    pool.check_passed(1, 0.0, 1, "")
    assert pool.choose(None, [0, 0]) == 1
    assert pool.choose(0, [0, 0]) == 1, "the home server is not healthy"


def test_the_home_is_chosen_first_then_the_lowest_load_per_slot_then_fewest_conversations() -> None:
    pool = _healthy_pool(3)
    pool.members[2].n_slots = 4
    for at in (0, 1, 2, 2):
        pool.request_started(at)
    assert pool.choose(0, [0, 0, 0]) == 0
    assert pool.choose(None, [0, 0, 0]) == 2, (
        "two requests for four slots are less load than one for one slot"
    )
    assert pool.choose(None, [0, 0, 0], {2: 0}) == 0
    pool.request_ended(1)
    assert pool.choose(None, [0, 0, 0]) == 1
    for at in (0, 2, 2):
        pool.request_ended(at)
    assert pool.choose(None, [2, 1, 1]) == 1


def test_consecutive_failures_open_the_breaker_and_a_trial_after_the_back_off_closes_it() -> None:
    pool = _healthy_pool()
    assert not _fail_check(pool, 0, 0.1) and not _fail_check(pool, 0, 0.2)
    pool.request_served(0)
    assert not _fail_check(pool, 0, 0.3) and not _fail_check(pool, 0, 0.4)
    assert _fail_check(pool, 0, 0.5) and pool.members[0].breaker.state == OPEN
    pool.request_failed(0, 0.6)
    assert pool.members[0].breaker.check_at == 1.5, (
        "a request that started earlier must not change the back-off"
    )
    assert pool.choose(0, [0, 0]) == 1
    assert pool.due_checks(1.4) == []
    assert pool.due_checks(1.5) == [0] and pool.members[0].breaker.state == HALF_OPEN
    assert pool.due_checks(1.6) == [], "only one trial may run at a time"
    assert pool.choose(0, [0, 0]) == 1, "a client's request must not be the trial"
    pool.check_passed(0, 1.7, 1, "model")
    assert pool.members[0].breaker.state == CLOSED
    assert pool.choose(0, [0, 0]) == 0
    assert pool.members[0].breaker.openings == 1


def test_the_back_off_doubles_up_to_a_limit_and_starts_again_after_success() -> None:
    pool, now, waits = _healthy_pool(1), 2.0, []
    while len(waits) < 6:
        if pool.due_checks(now) == [0]:
            opened = pool.check_failed(0, now)
            if opened:
                waits.append(pool.members[0].breaker.check_at - now)
        now = pool.members[0].breaker.check_at
    assert waits == [1.0, 2.0, 4.0, 6.0, 6.0, 6.0]
    assert pool.due_checks(now) == [0] and pool.members[0].breaker.state == HALF_OPEN
    pool.check_passed(0, now, 1, "model")
    assert pool.members[0].breaker.state == CLOSED
    for _ in range(3):
        _fail_check(pool, 0, now)
    assert pool.members[0].breaker.check_at - now == 1.0


def test_failed_requests_do_not_open_the_breaker_while_checks_pass() -> None:
    pool = _healthy_pool()
    for now in range(1, 50):
        for _ in range(7):
            pool.request_failed(0, now)
        assert 0 in pool.due_checks(now), "a failed request must cause a check"
        pool.request_failed(0, now)
        assert pool.members[0].breaker.state == CLOSED
        pool.check_passed(0, now, 1, "model")
        assert pool.accepts_requests(0)
        assert 0 in pool.due_checks(now), "a failure during the check must cause another check"
        pool.check_passed(0, now, 1, "model")
        if pool.members[1].breaker.is_checking:
            pool.check_passed(1, now, 1, "model")
    assert pool.members[0].breaker.openings == 0


def test_failed_requests_count_if_the_check_fails_too() -> None:
    pool = _healthy_pool()
    pool.request_failed(0, 0.5)
    assert pool.due_checks(0.5) == [0] and not pool.check_failed(0, 0.6)
    pool.request_failed(0, 0.7)
    assert pool.due_checks(0.7) == [0] and pool.check_failed(0, 0.8), (
        "two requests and two checks have failed"
    )


def test_a_tried_server_may_be_chosen_again_after_it_recovered() -> None:
    pool = _healthy_pool()
    tried = {0: 0, 1: 0}
    assert pool.choose(0, [0, 0], tried) is None
    for _ in range(3):
        _fail_check(pool, 0, 1.0)
    assert pool.choose(0, [0, 0], tried) is None
    assert 0 in pool.due_checks(2.0)
    pool.check_passed(0, 2.0, 1, "model")
    assert pool.choose(1, [0, 0], tried) == 0


def test_a_draining_server_is_not_chosen_until_draining_ends() -> None:
    pool = _healthy_pool()
    pool.drain(0, True)
    assert pool.choose(0, [0, 0]) == 1
    pool.drain(1, True)
    assert pool.choose(0, [0, 0]) is None
    assert pool.due_checks(2.0) == [0, 1], "a draining server must still be checked"
    pool.drain(0, False)
    assert pool.choose(None, [9, 0]) == 0


def test_the_reference_model_is_the_first_servers_while_any_server_has_it() -> None:
    pool = ServerPool(["a", "b", "c"], RULES)
    assert pool.due_checks(0.0) == [0, 1, 2]
    pool.check_passed(2, 0.0, 1, "")
    pool.check_passed(0, 0.0, 1, "large")
    assert not pool.is_foreign(0), "the reference is not known before all were checked"
    pool.check_passed(1, 0.0, 1, "small")
    assert [pool.is_foreign(at) for at in range(3)] == [False, True, False]
    # The first server is down at the start: its model is not the reference.
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
        _fail_check(pool, 1, 1.0)
    assert pool.choose(0, [0, 0, 0]) == 2, "a server that is down keeps the reference"
    pool.drain(2, True)
    assert pool.choose(0, [0, 0, 0]) is None, "no server is better than another model"
    # The second server returns with the first one's model, as in a rolling upgrade.
    assert 1 in pool.due_checks(5.0)
    pool.check_passed(1, 5.0, 1, "large")
    assert not pool.is_foreign(0) and not pool.is_foreign(1)


def test_retry_after_is_the_time_to_the_next_trial() -> None:
    pool = _healthy_pool()
    for at, when in ((0, 10.0), (1, 13.0)):
        for _ in range(3):
            _fail_check(pool, at, when)
    assert pool.retry_after(10.2) == 1.0  # at least one second
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
def test_only_healthy_servers_that_do_not_drain_are_chosen(
    events: list[tuple[str, int, float]],
) -> None:
    pool, now, checking = ServerPool(["a", "b", "c"], RULES), 0.0, set[int]()
    for kind, at, later in events:
        now += later
        member = pool.members[at]
        previous = member.breaker.state
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
                pool.check_passed(at, now, 2, "m")
                assert previous in (HALF_OPEN, CLOSED) and member.breaker.state == CLOSED
            case "miss" if at in checking:
                checking.remove(at)
                pool.check_failed(at, now)
            case "drain":
                pool.drain(at, not member.draining)
        # An open breaker changes only by a trial.
        if previous == OPEN:
            assert member.breaker.state == OPEN or kind == "check"
        if previous == CLOSED and member.breaker.state == OPEN:
            assert kind == "miss" and member.breaker.check_at == now + RULES.backoff_s
        assert 0.0 <= member.breaker.backoff_s <= RULES.backoff_max_s
        assert all(m.in_flight >= 0 for m in pool.members)
        assert 1.0 <= pool.retry_after(now) <= max(RULES.backoff_max_s, 1.0)
        chosen = pool.choose(at, [0, 0, 0])
        available = [m for m in pool.members if m.breaker.state == CLOSED and not m.draining]
        assert (chosen is None) == (not available)
        if chosen is not None:
            assert pool.members[chosen] in available
            lowest = min(m.load for m in available)
            assert chosen == at or pool.members[chosen].load == lowest
