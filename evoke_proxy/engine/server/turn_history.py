"""Turns as they end: into the history of their conversation, and told to whoever listens."""

from __future__ import annotations

import time

from evoke_proxy.core.session.accounting import TurnRecord, moved_spans, path_of, stock_path
from evoke_proxy.core.session.block_map import spans
from evoke_proxy.core.snapshots.costs import cost_of
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.turns.forwarding import Forwarding


def begun(way: Forwarding, feed: EventFeed) -> None:
    """A turn of a conversation is about to be forwarded: what its plan has moved."""
    known = way.conversation
    if known is None or known.passing:
        return
    gone, back = moved_spans(way.plan, None)
    feed.publish(
        "turn",
        session=known.id,
        name=known.name,
        turn=known.answered + 1,
        slot=way.lease.slot if way.lease is not None else None,
        decision=way.decision,
        evicted=spans(gone),
        recovered=spans(back),
    )


def ended(way: Forwarding, feed: EventFeed) -> TurnRecord | None:
    """Its answer is over, or broke off; what it came to, None when it is no turn or there is no
    answer."""
    known = way.conversation
    if known is None or known.passing or way.first_byte_s is None:
        return None
    known.answered += 1
    record = _record(way, known.answered)
    known.history.append(record)
    feed.publish("answer", session=known.id, name=known.name, **record.to_json())
    return record


def _record(way: Forwarding, number: int) -> TurnRecord:
    books, budget = way.books, way.budget
    if books is None:
        return _unbooked(way, number)
    gone, back = moved_spans(way.plan, books)
    return TurnRecord(
        *(number, round(time.time(), 3), path_of(way.plan, books), way.decision, _ttft(way)),
        *(books.n_prompt, books.decoded, books.recovered, books.resident_before, books.omitted),
        *(books.n_resident, books.n_resident_peak, budget, gone, back),
    )


def _unbooked(way: Forwarding, number: int) -> TurnRecord:
    """An unpatched server says what it found and what it decoded, of an answer that ended."""
    cached, decoded, _ = cost_of(way.observer.timings or {}, way.observer.usage or {})
    ours = min(cached, way.seat.n_prefilled) if way.seat is not None else 0
    cached, decoded = cached - ours, decoded + ours
    path = stock_path(way.decision, cached)
    restored = cached if path == "restored" else 0
    return TurnRecord(
        *(number, round(time.time(), 3), path, way.decision, _ttft(way)),
        *(cached + decoded, decoded, restored, cached - restored, 0, cached + decoded),
    )


def _ttft(way: Forwarding) -> float | None:
    return round(way.first_byte_s, 4) if way.first_byte_s is not None else None
