"""Which of several llama-servers takes a request: health, circuit breakers, drains.

Pure bookkeeping: events come in, decisions go out; times are seconds and are handed in. A breaker
is *closed* while its server does its part, *open* after so many failures in a row, and *half open*
while one trial finds out whether it does again. Only checks of our own open one: a request that
fails may have failed of what its client sent, so it only brings the next check forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evoke_proxy.config import PoolConfig

CLOSED, HALF_OPEN, OPEN = "closed", "half_open", "open"
# Best first, as a gauge shows them.
BREAKER = (CLOSED, HALF_OPEN, OPEN)
_NONE: Mapping[int, int] = {}


@dataclass(slots=True)
class Member:
    """One server as it is known. `in_flight` are requests that run there or wait for a slot there,
    `failures` those in a row, `model` what it serves (empty: nobody knows); nobody is `checking`
    it before `check_at`. `unconfirmed` are requests that failed since the latest check began: they
    count as failures when the next check fails, too, of which `confirming` the one under way."""

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
        """Requests for each slot."""
        return self.in_flight / max(1, self.n_slots)


class ServerPool:
    """All of them, known by their place in the list; nothing is known of any at first."""

    def __init__(self, names: Sequence[str], rules: PoolConfig) -> None:
        self.members = tuple(Member(name) for name in names)
        self.rules = rules
        self._model = ""

    def __repr__(self) -> str:
        shown = (f"{m.name}={m.breaker}{'!' * m.draining}/{m.in_flight}" for m in self.members)
        return f"<ServerPool {' '.join(shown)}>"

    def choose(
        self, home: int | None, bound: Sequence[int], tried: Mapping[int, int] = _NONE
    ) -> int | None:
        """The server of a request: `home`, where its conversation is, if that takes requests; else
        the one with least to do for each slot, of equals the one that fewest conversations are
        `bound` to. Never one that it was `tried` at, unless that had to be opened more often since
        than it had been then; None when there is none."""
        new = [i for i, m in enumerate(self.members) if tried.get(i) != m.openings]
        able = [i for i in new if self.takes(i)]
        if home in able:
            return home
        return min(able, key=lambda i: (self.members[i].load, bound[i], i), default=None)

    def is_well(self, at: int) -> bool:
        """Whether its server answers."""
        return self.members[at].breaker == CLOSED

    def is_known(self, at: int) -> bool:
        """Whether its first check is over."""
        return self.members[at].breaker != HALF_OPEN or self.members[at].openings > 0

    def takes(self, at: int) -> bool:
        """Whether a server takes requests of clients."""
        member = self.members[at]
        return member.breaker == CLOSED and not member.draining and not self.is_foreign(at)

    def is_foreign(self, at: int) -> bool:
        """Whether it serves another model than the others.

        What all serve is what the first in the list did that answered at the start, for as long as
        any of them, up or down, is known to."""
        model = self.members[at].model
        return bool(model and self._model and model != self._model)

    def begun(self, at: int) -> None:
        """A request goes there; `ended` follows."""
        self.members[at].in_flight += 1

    def ended(self, at: int) -> None:
        """It is over, however it went."""
        self.members[at].in_flight -= 1

    def served(self, at: int) -> None:
        """A request was answered: what failed before was not in a row."""
        if self.members[at].breaker == CLOSED:
            self.members[at].failures = 0

    def doubted(self, at: int, now: float) -> None:
        """A request failed there: a check is to find out at once whether the server is well.

        Says nothing while it is not closed: such a request began before."""
        member = self.members[at]
        if member.breaker == CLOSED:
            member.unconfirmed += 1
            member.check_at = min(member.check_at, now)

    def due(self, now: float) -> list[int]:
        """Whom to check now, each to be followed by `found` or `missed`; for an open one that is
        its trial."""
        due = [i for i, m in enumerate(self.members) if not m.checking and m.check_at <= now]
        for member in (self.members[i] for i in due):
            member.checking, member.confirming = True, member.unconfirmed
            member.breaker = HALF_OPEN if member.breaker == OPEN else member.breaker
        return due

    def next_check(self) -> float | None:
        """When somebody is due; None while all are being checked."""
        waiting = [member.check_at for member in self.members if not member.checking]
        return min(waiting, default=None)

    def found(self, at: int, now: float, n_slots: int, model: str) -> bool:
        """A check was answered; whether the breaker is closed because of it. What the server
        serves is not known when `model` is empty."""
        member = self.members[at]
        closed = member.breaker == HALF_OPEN
        member.checking, member.check_at = False, now + self.rules.health_interval_s
        member.failures, member.backoff_s, member.breaker = 0, 0.0, CLOSED
        member.unconfirmed -= member.confirming
        if member.unconfirmed:  # these failed after it began
            member.check_at = now
        member.n_slots, member.model = n_slots, model or member.model
        self._compare()
        return closed

    def missed(self, at: int, now: float) -> bool:
        """A check failed; whether the breaker is open because of it."""
        member = self.members[at]
        member.checking = False
        if member.breaker == HALF_OPEN:
            grown = min(2 * member.backoff_s, self.rules.backoff_max_s)
            self._open(member, max(grown, self.rules.backoff_s), now)
            self._compare()
            return True
        member.check_at = now + self.rules.health_interval_s
        member.failures += 1 + member.unconfirmed
        member.unconfirmed = 0
        if member.failures < self.rules.failures:
            return False
        self._open(member, self.rules.backoff_s, now)
        return True

    def retry_after(self, now: float) -> float:
        """Seconds until it is worth asking again when none takes requests."""
        tries = [m.check_at - now for m in self.members if m.breaker != CLOSED]
        return max(1.0, min(tries, default=self.rules.backoff_max_s))

    def _compare(self) -> None:
        """What all are to serve; not before each has been checked for the first time."""
        unknown = not all(self.is_known(at) for at in range(len(self.members)))
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
