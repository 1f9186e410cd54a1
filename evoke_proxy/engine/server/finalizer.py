"""Ends requests: the slot is released first, then the request is reported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from evoke_proxy.adapters.metrics import TOKEN_KINDS
from evoke_proxy.core.session.accounting import TurnRecord
from evoke_proxy.core.snapshots.costs import is_odd
from evoke_proxy.engine.gateway import Outcome
from evoke_proxy.engine.server.reply import ReplyReader
from evoke_proxy.engine.server.strategy import CacheStrategy, ServerResources, Strategies
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.engine.server.turn_history import record_end
from evoke_proxy.errors import UpstreamProtocolError

_log = logging.getLogger(__name__)
# A reply of which nothing could be read.
_UNKNOWN = Outcome(is_finished=False)


class TurnFinalizer:
    """Ends requests, however they went."""

    def __init__(self, server: ServerResources, strategies: Strategies) -> None:
        self._server = server
        self._strategies = strategies

    def finish(self, strategy: CacheStrategy, scope: TurnScope, reply: ReplyReader) -> Outcome:
        """Release what a request has, then report it; it never raises.

        A slot that llama-server may still be using goes to a task that waits until it is idle.
        """
        outcome, must_drain, turn = _UNKNOWN, True, scope.turn
        with self._guarded("the end of an answer is not read"):
            reply.close()
        with self._guarded("whether an answer is complete cannot be told"):
            outcome = reply.outcome()
            must_drain = strategy.must_drain(turn, outcome)
        if scope.leases and must_drain:
            work = self._drain(strategy, scope, outcome)
            try:
                self._server.background.run(work, "settling a slot")
                return outcome
            except RuntimeError:  # the proxy is stopping
                work.close()
        self._end(strategy, scope, outcome)
        return outcome

    async def _drain(self, strategy: CacheStrategy, scope: TurnScope, outcome: Outcome) -> None:
        """Wait until the slot is idle; only then it is given to the next request."""
        try:
            await strategy.drain(scope.turn, outcome)
        finally:
            self._end(strategy, scope, outcome)

    def _end(self, strategy: CacheStrategy, scope: TurnScope, outcome: Outcome) -> None:
        """Release what the request has, then report it step by step; no step stops the next."""
        scope.close()
        turn = scope.turn
        with self._guarded("a turn is not finished"):
            strategy.complete(turn, outcome)
        with self._guarded("a turn is not recorded"):
            self._count(turn, outcome, record_end(turn, outcome, self._server.feed))
        with self._guarded("an unmanaged answer is not counted"):
            self._count_unmanaged(turn, outcome)
        with self._guarded("an odd usage is not counted"):
            self._count_odd(outcome)
        with self._guarded("sessions are not forgotten"):
            self._forget(turn)
        with self._guarded("no bodies are dropped"):
            self._server.conversations.drop_bodies()
        with self._guarded("no background work is begun"):
            strategy.start_background(turn, outcome)

    def _forget(self, turn: PreparedTurn) -> None:
        """Forget what a refused request began, and what is over the limit of conversations."""
        conversations, pool = self._server.conversations, self._server.slots.pool
        own = turn.conversation
        if own is not None and not (own.is_committed or own.in_use):
            conversations.forget(own)
            pool.forget(own.id)
        for forgotten in conversations.forget_surplus():
            pool.forget(forgotten.id)
            for strategy in self._strategies.each():
                strategy.forget(forgotten, turn.headers)
            if not forgotten.ephemeral:
                self._server.feed.publish("forgotten", session=forgotten.id)

    def _count(self, turn: PreparedTurn, outcome: Outcome, record: TurnRecord | None) -> None:
        """Count when the answer began, and the tokens of one that llama-server did not count."""
        metrics = self._server.metrics
        path = "side" if turn.conversation is not None else "relay"
        if outcome.first_byte_s is not None:
            path = record.path if record is not None else path
            metrics.ttft_seconds.labels(path=path).observe(outcome.first_byte_s)
        if record is not None and outcome.accounting is None:
            metrics.count_tokens({kind: getattr(record, kind) for kind in TOKEN_KINDS})

    def _count_unmanaged(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Count an answer to a request that llama-server had refused to render: a fault of ours."""
        is_answered = outcome.first_byte_s is not None and outcome.error is None
        if turn.decision == "bypass:invalid" and is_answered:
            self._server.metrics.degraded.labels(stage="render").inc()
            self._server.metrics.breaches.inc()
            _log.warning("llama-server answers a request that it could not render")

    def _count_odd(self, outcome: Outcome) -> None:
        """Count an answer whose token counts are none that a llama-server gives."""
        timings, usage = outcome.timings or {}, outcome.usage or {}
        if is_odd(timings, usage) or ("evoke" in timings and outcome.accounting is None):
            metrics = self._server.metrics
            metrics.upstream_errors.labels(kind=UpstreamProtocolError.code).inc()
            _log.warning("llama-server states the tokens of an answer in an unknown form")

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """A step whose failure is logged and counted, and stops nothing else."""
        try:
            yield
        except Exception:
            self._server.metrics.degraded.labels(stage="report").inc()
            _log.exception("%s", what)
