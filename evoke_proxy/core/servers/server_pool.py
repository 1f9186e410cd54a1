"""Chooses among several llama-servers: health, circuit breakers, drains.

The pool does no I/O: callers report events and get decisions. Times are in seconds; the caller
passes them. A breaker is *closed* while its server is healthy, *open* after several failures in a
row, and *half open* while one trial check runs. Only our own checks open a breaker: a request may
fail because of its own content, so a failed request only brings the next check forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evoke_proxy.config import PoolConfig

CLOSED, HALF_OPEN, OPEN = "closed", "half_open", "open"
# From best to worst; the index is the value of the gauge.
BREAKER = (CLOSED, HALF_OPEN, OPEN)
_NONE_TRIED: Mapping[int, int] = {}


class Breaker:
    """The checks of one server, and the circuit breaker that they open and close.

    Attributes:
        state: CLOSED, HALF_OPEN or OPEN.
        failures: failed checks and requests in a row.
        unconfirmed: requests that failed since the latest check began; they count as failures if
            the next check fails too.
        openings: how often the breaker has opened.
        backoff_s: time from the latest opening to its trial check.
        check_at: when the next check is due.
        is_checking: whether a check is running.
    """

    def __init__(self, rules: PoolConfig) -> None:
        self.state = HALF_OPEN
        self.failures = self.openings = 0
        self.check_at = 0.0
        self.is_checking = False
        self._rules = rules
        self.unconfirmed = 0
        self.backoff_s = 0.0
        # The value of `unconfirmed` when the latest check began.
        self._confirming = 0

    @property
    def is_closed(self) -> bool:
        """Whether the server is healthy."""
        return self.state == CLOSED

    @property
    def was_checked(self) -> bool:
        """Whether the first check has ended."""
        return self.state != HALF_OPEN or self.openings > 0

    def request_served(self) -> None:
        """Record that a request was answered: earlier failures no longer count."""
        if self.is_closed:
            self.failures = 0

    def request_failed(self, now: float) -> None:
        """Record that a request failed, and make a check due now.

        Ignored unless the breaker is closed, because then the request began before it opened.
        """
        if self.is_closed:
            self.unconfirmed += 1
            self.check_at = min(self.check_at, now)

    def begin_check(self) -> None:
        """Record that a check begins.

        An open breaker becomes half open, and the check is its trial.
        """
        self.is_checking, self._confirming = True, self.unconfirmed
        self.state = HALF_OPEN if self.state == OPEN else self.state

    def check_passed(self, now: float) -> None:
        """Record that the check was answered; closes the breaker."""
        self.is_checking, self.check_at = False, now + self._rules.health_interval_s
        self.failures, self.backoff_s, self.state = 0, 0.0, CLOSED
        self.unconfirmed -= self._confirming
        if self.unconfirmed:  # requests that failed after the check began
            self.check_at = now

    def check_failed(self, now: float) -> bool:
        """Record that the check failed; returns whether it opened the breaker."""
        rules = self._rules
        self.is_checking = False
        if self.state == HALF_OPEN:
            doubled = min(2 * self.backoff_s, rules.backoff_max_s)
            self._open(max(doubled, rules.backoff_s), now)
            return True
        self.check_at = now + rules.health_interval_s
        self.failures += 1 + self.unconfirmed
        self.unconfirmed = 0
        if self.failures < rules.failures:
            return False
        self._open(rules.backoff_s, now)
        return True

    def _open(self, backoff_s: float, now: float) -> None:
        self.state, self.backoff_s = OPEN, backoff_s
        self.failures, self.check_at = 0, now + backoff_s
        self.unconfirmed = 0
        self.openings += 1


@dataclass(slots=True)
class Member:
    """One server of a pool; `ServerPool` changes it, and `Breaker` itself.

    Attributes:
        name: name in the configuration.
        breaker: the checks of the server.
        draining: whether it finishes its requests and takes no new ones.
        n_slots: slots of the server.
        in_flight: requests that run there or wait for a slot there.
        model: model that it serves; empty while unknown.
        fingerprint: model and layout of its cache; empty while unknown.
    """

    name: str
    breaker: Breaker
    draining: bool = False
    n_slots: int = 1
    in_flight: int = 0
    model: str = ""
    fingerprint: str = ""

    @property
    def load(self) -> float:
        """Requests per slot."""
        return self.in_flight / max(1, self.n_slots)


class ServerPool:
    """The servers of a pool, by index; every breaker starts half open."""

    def __init__(self, names: Sequence[str], rules: PoolConfig) -> None:
        self.members = tuple(Member(name, Breaker(rules)) for name in names)
        self._rules = rules
        self._model = ""

    def __repr__(self) -> str:
        states = (
            f"{m.name}={m.breaker.state}{'!' * m.draining}/{m.in_flight}" for m in self.members
        )
        return f"<ServerPool {' '.join(states)}>"

    def choose(
        self, home: int | None, bound: Sequence[int], tried: Mapping[int, int] = _NONE_TRIED
    ) -> int | None:
        """Choose the server of a request; None when no server can take it.

        `home`, the server of its conversation, is chosen if it accepts requests. Otherwise the one
        with the least load, then the one with the fewest conversations (`bound`). `tried` has, per
        server where the request failed, the `openings` of that moment: such a server is chosen
        again only if its breaker has opened since.
        """
        untried = [i for i, m in enumerate(self.members) if tried.get(i) != m.breaker.openings]
        candidates = [i for i in untried if self.accepts_requests(i)]
        if home in candidates:
            return home
        return min(candidates, key=lambda i: (self.members[i].load, bound[i], i), default=None)

    def is_healthy(self, at: int) -> bool:
        """Whether its breaker is closed."""
        return self.members[at].breaker.is_closed

    def is_checked(self, at: int) -> bool:
        """Whether its first check has ended."""
        return self.members[at].breaker.was_checked

    def accepts_requests(self, at: int) -> bool:
        """Whether the server takes requests of clients."""
        member = self.members[at]
        return member.breaker.is_closed and not member.draining and not self.is_foreign(at)

    def is_foreign(self, at: int) -> bool:
        """Whether the server has another model than the pool's.

        The pool's model is that of the first healthy server after the initial checks, for as long
        as any server, healthy or not, reports it.
        """
        model = self.members[at].model
        return bool(model and self._model and model != self._model)

    def request_started(self, at: int) -> None:
        """Record that a request is sent to a server; `request_ended` follows."""
        self.members[at].in_flight += 1

    def request_ended(self, at: int) -> None:
        """Record that a request has ended, successfully or not."""
        self.members[at].in_flight -= 1

    def request_served(self, at: int) -> None:
        """Record that a request was answered: earlier failures no longer count."""
        self.members[at].breaker.request_served()

    def request_failed(self, at: int, now: float) -> None:
        """Record that a request failed; see `Breaker.request_failed`."""
        self.members[at].breaker.request_failed(now)

    def drain(self, at: int, draining: bool) -> bool:
        """Take no new requests there, or take them again; returns whether that is a change."""
        changes = self.members[at].draining != draining
        self.members[at].draining = draining
        return changes

    def due_checks(self, now: float) -> list[int]:
        """Servers to check now; `check_passed` or `check_failed` follows for each.

        An open breaker becomes half open: the check is its trial.
        """
        breakers = [member.breaker for member in self.members]
        due = [i for i, it in enumerate(breakers) if not it.is_checking and it.check_at <= now]
        for i in due:
            breakers[i].begin_check()
        return due

    def next_check(self) -> float | None:
        """When the next check is due; None while all are running."""
        breakers = [member.breaker for member in self.members]
        waiting = [it.check_at for it in breakers if not it.is_checking]
        return min(waiting, default=None)

    def check_passed(self, at: int, now: float, n_slots: int, model: str) -> None:
        """Record a check that was answered; closes the breaker.

        An empty `model` means that the check did not learn the model.
        """
        member = self.members[at]
        member.breaker.check_passed(now)
        member.n_slots, member.model = n_slots, model or member.model
        self._choose_model()

    def check_failed(self, at: int, now: float) -> bool:
        """Record a check that failed; returns whether it opened the breaker."""
        has_opened = self.members[at].breaker.check_failed(now)
        if has_opened:
            self._choose_model()
        return has_opened

    def fingerprint_read(self, at: int, fingerprint: str) -> None:
        """Record the fingerprint of a server."""
        self.members[at].fingerprint = fingerprint

    def retry_after(self, now: float) -> float:
        """Seconds after which a client may retry when no server accepts requests."""
        breakers = [member.breaker for member in self.members]
        tries = [it.check_at - now for it in breakers if not it.is_closed]
        return max(1.0, min(tries, default=self._rules.backoff_max_s))

    def _choose_model(self) -> None:
        """Choose the pool's model, once every server has been checked."""
        unknown = not all(self.is_checked(at) for at in range(len(self.members)))
        if unknown or any(m.model == self._model for m in self.members if m.model):
            return
        models = (m.model for m in self.members if m.breaker.is_closed and m.model)
        self._model = next(models, "")
