"""Chooses among several llama-servers: health, circuit breakers, drains.

The pool does no I/O: callers report events and get decisions. Times are in seconds; the caller
passes them. A breaker
is *closed* while its server is healthy, *open* after several failures in a row, and *half open*
while one trial check runs. Only our own checks open a breaker: a request may fail because of its
own content, so a failed request only brings the next check forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evoke_proxy.config import PoolConfig

CLOSED, HALF_OPEN, OPEN = "closed", "half_open", "open"
# From best to worst; the index is the value of the gauge.
BREAKER = (CLOSED, HALF_OPEN, OPEN)
_NONE_TRIED: Mapping[int, int] = {}


@dataclass(slots=True)
class Member:
    """State of one server.

    Attributes:
        name: name in the configuration.
        breaker: CLOSED, HALF_OPEN or OPEN.
        draining: whether it finishes its requests and takes no new ones.
        n_slots: slots of the server.
        in_flight: requests that run there or wait for a slot there.
        failures: failures in a row.
        unconfirmed: requests that failed since the latest check began; they count as failures if
            the next check fails too.
        openings: how often the breaker has opened.
        backoff_s: time from the latest opening to its trial check.
        check_at: when the next check is due.
        checking: whether a check is running.
        confirming: value of `unconfirmed` when that check began.
        model: model that it serves; empty while unknown.
    """

    name: str
    breaker: str = HALF_OPEN
    draining: bool = False
    n_slots: int = 1
    in_flight: int = 0
    failures: int = 0
    unconfirmed: int = 0
    openings: int = 0
    backoff_s: float = 0.0
    check_at: float = 0.0
    checking: bool = False
    confirming: int = 0
    model: str = ""

    @property
    def load(self) -> float:
        """Requests per slot."""
        return self.in_flight / max(1, self.n_slots)


class ServerPool:
    """The servers of a pool, by index; every breaker starts half open."""

    def __init__(self, names: Sequence[str], rules: PoolConfig) -> None:
        self.members = tuple(Member(name) for name in names)
        self.rules = rules
        self._model = ""

    def __repr__(self) -> str:
        states = (f"{m.name}={m.breaker}{'!' * m.draining}/{m.in_flight}" for m in self.members)
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
        untried = [i for i, m in enumerate(self.members) if tried.get(i) != m.openings]
        candidates = [i for i in untried if self.accepts_requests(i)]
        if home in candidates:
            return home
        return min(candidates, key=lambda i: (self.members[i].load, bound[i], i), default=None)

    def is_healthy(self, at: int) -> bool:
        """Whether its breaker is closed."""
        return self.members[at].breaker == CLOSED

    def is_checked(self, at: int) -> bool:
        """Whether its first check has ended."""
        return self.members[at].breaker != HALF_OPEN or self.members[at].openings > 0

    def accepts_requests(self, at: int) -> bool:
        """Whether the server takes requests of clients."""
        member = self.members[at]
        return member.breaker == CLOSED and not member.draining and not self.is_foreign(at)

    def is_foreign(self, at: int) -> bool:
        """Whether the server has another model than the pool's.

        The pool's model is that of the first healthy server after the initial checks, for as long
        as any server, healthy or not, reports it.
        """
        model = self.members[at].model
        return bool(model and self._model and model != self._model)

    def request_started(self, at: int) -> None:
        """A request is sent there; `request_ended` follows."""
        self.members[at].in_flight += 1

    def request_ended(self, at: int) -> None:
        """A request has ended, successfully or not."""
        self.members[at].in_flight -= 1

    def request_served(self, at: int) -> None:
        """A request was answered: earlier failures no longer count."""
        if self.members[at].breaker == CLOSED:
            self.members[at].failures = 0

    def request_failed(self, at: int, now: float) -> None:
        """A request failed there: make a check due now.

        Ignored unless the breaker is closed, because then the request began before it opened.
        """
        member = self.members[at]
        if member.breaker == CLOSED:
            member.unconfirmed += 1
            member.check_at = min(member.check_at, now)

    def due_checks(self, now: float) -> list[int]:
        """Servers to check now; `check_passed` or `check_failed` follows for each.

        An open breaker becomes half open: the check is its trial.
        """
        due = [i for i, m in enumerate(self.members) if not m.checking and m.check_at <= now]
        for member in (self.members[i] for i in due):
            member.checking, member.confirming = True, member.unconfirmed
            member.breaker = HALF_OPEN if member.breaker == OPEN else member.breaker
        return due

    def next_check(self) -> float | None:
        """When the next check is due; None while all are running."""
        waiting = [member.check_at for member in self.members if not member.checking]
        return min(waiting, default=None)

    def check_passed(self, at: int, now: float, n_slots: int, model: str) -> bool:
        """Record a check that was answered; returns whether it closed the breaker.

        An empty `model` means that the check did not learn the model.
        """
        member = self.members[at]
        closed = member.breaker == HALF_OPEN
        member.checking, member.check_at = False, now + self.rules.health_interval_s
        member.failures, member.backoff_s, member.breaker = 0, 0.0, CLOSED
        member.unconfirmed -= member.confirming
        if member.unconfirmed:  # requests that failed after the check began
            member.check_at = now
        member.n_slots, member.model = n_slots, model or member.model
        self._choose_model()
        return closed

    def check_failed(self, at: int, now: float) -> bool:
        """Record a check that failed; returns whether it opened the breaker."""
        member = self.members[at]
        member.checking = False
        if member.breaker == HALF_OPEN:
            doubled = min(2 * member.backoff_s, self.rules.backoff_max_s)
            self._open(member, max(doubled, self.rules.backoff_s), now)
            self._choose_model()
            return True
        member.check_at = now + self.rules.health_interval_s
        member.failures += 1 + member.unconfirmed
        member.unconfirmed = 0
        if member.failures < self.rules.failures:
            return False
        self._open(member, self.rules.backoff_s, now)
        return True

    def retry_after(self, now: float) -> float:
        """Seconds after which a client may retry when no server accepts requests."""
        tries = [m.check_at - now for m in self.members if m.breaker != CLOSED]
        return max(1.0, min(tries, default=self.rules.backoff_max_s))

    def _choose_model(self) -> None:
        """Choose the pool's model, once every server has been checked."""
        unknown = not all(self.is_checked(at) for at in range(len(self.members)))
        if unknown or any(m.model == self._model for m in self.members if m.model):
            return
        models = (m.model for m in self.members if m.breaker == CLOSED and m.model)
        self._model = next(models, "")

    @staticmethod
    def _open(member: Member, backoff_s: float, now: float) -> None:
        member.breaker, member.backoff_s = OPEN, backoff_s
        member.failures, member.check_at = 0, now + backoff_s
        member.unconfirmed = 0
        member.openings += 1
