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
from evoke_proxy.errors import UpstreamError, UpstreamProtocolError

_log = logging.getLogger(__name__)
# The outcome of a reply that could not be read.
_UNKNOWN = Outcome(is_finished=False)


class TurnFinalizer:
    """Ends requests, whether they succeeded, failed or were cancelled."""

    def __init__(self, server: ServerResources, strategies: Strategies) -> None:
        self._server = server
        self._strategies = strategies

    def finish(self, strategy: CacheStrategy, scope: TurnScope, reply: ReplyReader) -> Outcome:
        """Release the leases of a request, then report it; never raises.

        If llama-server may still use a slot, a task keeps the lease until the slot is idle.
        """
        outcome, must_drain, turn = _UNKNOWN, True, scope.turn
        with self._guarded("failed to read the end of a reply"):
            reply.close()
        with self._guarded("failed to derive the outcome of a reply"):
            outcome = reply.outcome()
            must_drain = strategy.must_drain(turn, outcome)
        if scope.leases and must_drain:
            # Read now: the request may be sent to another server, which begins another attempt.
            work = self._drain(strategy, scope, outcome, scope.trace.has_failed)
            try:
                self._server.background.run(work, "waiting for a slot to become idle")
                return outcome
            except RuntimeError:  # the proxy is stopping
                work.close()
        self._end(strategy, scope, outcome)
        return outcome

    async def _drain(
        self, strategy: CacheStrategy, scope: TurnScope, outcome: Outcome, has_failed: bool
    ) -> None:
        """Wait until the slots are idle, then release and report.

        A failure of llama-server is not counted again when the request `has_failed` already.
        """
        try:
            await strategy.drain(scope.turn, outcome)
        except UpstreamError as error:
            error.counted |= has_failed
            raise
        finally:
            self._end(strategy, scope, outcome)

    def _end(self, strategy: CacheStrategy, scope: TurnScope, outcome: Outcome) -> None:
        """Release the leases, then run each step of the report, even if an earlier one fails."""
        scope.close()
        turn = scope.turn
        with self._guarded("failed to complete a turn"):
            strategy.complete(turn, outcome)
        with self._guarded("failed to record a turn"):
            self._count(turn, outcome, record_end(turn, outcome, self._server.feed))
        with self._guarded("failed to check a reply to an unrendered request"):
            self._count_unmanaged(turn, outcome)
        with self._guarded("failed to check the token counts of a reply"):
            self._count_unparsable(outcome)
        with self._guarded("failed to forget sessions"):
            self._forget(turn)
        with self._guarded("failed to drop cached bodies"):
            self._server.conversations.limit_bodies(turn.conversation)
        with self._guarded("failed to start background work"):
            strategy.start_background(turn, outcome)

    def _forget(self, turn: PreparedTurn) -> None:
        """Forget the new conversation of a refused request, and conversations over the limit."""
        conversations, pool = self._server.conversations, self._server.slots.pool
        own = turn.conversation
        if own is not None and not (own.is_committed or own.in_use):
            conversations.withdraw(own)
            pool.forget(own.id)
        for forgotten in conversations.forget_surplus():
            pool.forget(forgotten.id)
            for strategy in self._strategies.each():
                strategy.forget(forgotten, turn.calls)
            if not forgotten.ephemeral:
                self._server.feed.publish("forgotten", session=forgotten.id)

    def _count(self, turn: PreparedTurn, outcome: Outcome, record: TurnRecord | None) -> None:
        """Count the time to the first byte, and the tokens if the reply has no accounting."""
        metrics = self._server.metrics
        if outcome.first_byte_s is not None:
            path = record.path if record is not None else "relay"
            if turn.conversation is not None and turn.remembered is None:
                path = "side"
            metrics.ttft_seconds.labels(path=path).observe(outcome.first_byte_s)
        if record is not None and outcome.accounting is None:
            metrics.count_tokens({kind: getattr(record, kind) for kind in TOKEN_KINDS})

    def _count_unmanaged(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Count a reply to a request that llama-server refused to render: a fault of the proxy."""
        is_answered = outcome.first_byte_s is not None and outcome.error is None
        if turn.decision == "bypass:invalid" and is_answered:
            self._server.metrics.degraded.labels(stage="render").inc()
            self._server.metrics.breaches.inc()
            _log.warning("llama-server has answered a request that it refused to render")

    def _count_unparsable(self, outcome: Outcome) -> None:
        """Count a reply whose token counts cannot be parsed."""
        timings, usage = outcome.timings or {}, outcome.usage or {}
        if is_odd(timings, usage) or ("evoke" in timings and outcome.accounting is None):
            metrics = self._server.metrics
            metrics.upstream_errors.labels(kind=UpstreamProtocolError.code).inc()
            _log.warning("the token counts of a reply cannot be parsed")

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Suppress, log and count a failure in this context; `what` is the log message."""
        try:
            yield
        except Exception:
            self._server.metrics.degraded.labels(stage="report").inc()
            _log.exception("%s", what)
