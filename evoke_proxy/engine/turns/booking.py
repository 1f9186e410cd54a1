"""The books of a reply: into its session, and into the metrics."""

from __future__ import annotations

import logging

from evoke_proxy.adapters.metrics import TOKEN_KINDS, Metrics
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.turns.forwarding import Forwarding

_log = logging.getLogger(__name__)


def book(way: Forwarding, known: Conversation, books: TokenAccounting, metrics: Metrics) -> None:
    """Take in what llama-server says that a turn came to."""
    as_planned = known.session.finish(books)
    if books.marker != "ok" or not as_planned:
        metrics.plan_failures.labels(reason="books_differ").inc()
        _log.warning("session %s: %r differs from the plan", known.id, books)
    if books.marker != "ok":
        known.epoch = None
    if way.budget is not None and books.n_resident_peak > way.budget:
        metrics.breaches.inc()
    known.n_resident, known.timings = books.n_resident, way.observer.timings
    metrics.decoded_again.inc(max(0, known.session.redecoded))
    metrics.evicted.inc(len(books.auto_evicted))
    metrics.count_tokens({kind: getattr(books, kind) for kind in TOKEN_KINDS})
