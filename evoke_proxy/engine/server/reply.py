"""Reads a reply while it is relayed, and derives the outcome of the request from it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.reply.observer import ReplyObserver
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.engine.gateway import Outcome, RequestTrace
from evoke_proxy.engine.server.turn import PreparedTurn

_ACCOUNTED = ("decoded", "recovered", "resident_before", "omitted")


class ReplyReader:
    """Reads a copy of the bytes of one reply.

    Attributes:
        observer: reads the end of the reply: token counts, errors.
        answer: reads the text of the reply; None when it is not needed.
        first_byte_s: seconds from the arrival of the request to the first byte; None before it.
    """

    def __init__(self, trace: RequestTrace) -> None:
        self.observer = ReplyObserver()
        self.answer: AnswerReader | None = None
        self.first_byte_s: float | None = None
        self._trace = trace

    def feed(self, data: bytes) -> None:
        """Read the next bytes."""
        if self.first_byte_s is None:
            now = asyncio.get_running_loop().time()
            self.first_byte_s = now - self._trace.arrived_at
            self._trace.add_step("prefill", self._trace.forwarded_at, now)
            self._trace.add_step("first byte", now, now)
        self.observer.feed(data)
        if self.answer is not None:
            self.answer.feed(data)

    def close(self) -> None:
        """Read what is buffered, after the last bytes."""
        self.observer.close()

    def outcome(self) -> Outcome:
        """The outcome as far as the reply was read."""
        observer = self.observer
        return Outcome(
            is_finished=observer.done,
            accounting=TokenAccounting.parse(observer.timings),
            timings=observer.timings,
            usage=observer.usage,
            error=observer.error,
            first_byte_s=self.first_byte_s,
        )


def facts_of(turn: PreparedTurn, outcome: Outcome, trace: RequestTrace) -> Mapping[str, Any]:
    """The decision and its outcome for the log, without any text; None for unknown values."""
    accounting, first = outcome.accounting, outcome.first_byte_s
    facts: dict[str, Any] = {"decision": turn.decision}
    if trace.server:
        facts["server"] = trace.server
    facts["session"] = turn.conversation.id if turn.conversation is not None else None
    facts["slot"] = turn.slots[0] if turn.slots else None
    if accounting is not None:
        facts["evicted"] = len(turn.plan.evicts)
        facts["auto_evicted"] = len(accounting.auto_evicted)
        facts["prompt"] = accounting.n_prompt
        facts |= {name: getattr(accounting, name) for name in _ACCOUNTED}
        facts["peak"] = accounting.n_resident_peak
    if trace.own_s is not None:
        facts |= {"own_ms": _ms(trace.own_s), "after_ms": _ms(trace.after_s)}
        if trace.beside_s:
            facts["beside_ms"] = _ms(trace.beside_s)
        facts |= {f"{name}_ms": _ms(seconds) for name, seconds in trace.waits.items()}
    facts["first_byte_ms"] = round(first * 1000) if first is not None else None
    return facts


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
