"""Records turns in the history of their conversation, and publishes them to operators."""

from __future__ import annotations

import time

from evoke_proxy.core.session.accounting import TurnRecord, moved_spans, path_of, stock_path
from evoke_proxy.core.session.block_map import spans
from evoke_proxy.core.snapshots.costs import cost_of
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.gateway import Outcome
from evoke_proxy.engine.server.turn import PreparedTurn


def publish_start(turn: PreparedTurn, feed: EventFeed) -> None:
    """Publish the blocks that the plan of a turn has moved, before the turn is forwarded."""
    conversation = turn.remembered
    if conversation is None:
        return
    evicted, recovered = moved_spans(turn.plan, None)
    feed.publish(
        "turn",
        session=conversation.id,
        name=conversation.name,
        turn=conversation.n_turns + 1,
        slot=turn.slots[0] if turn.slots else None,
        decision=turn.decision,
        evicted=spans(evicted),
        recovered=spans(recovered),
    )


def record_end(turn: PreparedTurn, outcome: Outcome, feed: EventFeed) -> TurnRecord | None:
    """Record a turn whose reply is over; None when it is no turn, or there was no reply.

    A side request has a record, too, but it is in no history, and it is not published.
    """
    conversation = turn.conversation
    if conversation is None or outcome.first_byte_s is None:
        return None
    record = _record(turn, outcome, conversation.n_turns + 1)
    if turn.remembered is not None:
        record = conversation.history.add(record)
        feed.publish("answer", session=conversation.id, name=conversation.name, **record.to_json())
    return record


def _record(turn: PreparedTurn, outcome: Outcome, number: int) -> TurnRecord:
    accounting = outcome.accounting
    if accounting is None:
        return _without_accounting(turn, outcome, number)
    evicted, recovered = moved_spans(turn.plan, accounting)
    accounting = accounting.with_prefilled(turn.n_prefilled)
    return TurnRecord(
        number=number,
        at=round(time.time(), 3),
        path=path_of(turn.plan, accounting),
        decision=turn.decision,
        ttft_s=_ttft(outcome),
        prompt=accounting.n_prompt,
        decoded=accounting.decoded,
        recovered=accounting.recovered,
        resident_before=accounting.resident_before,
        omitted=accounting.omitted,
        resident=accounting.n_resident,
        peak=accounting.n_resident_peak,
        budget=turn.budget,
        evicted=evicted,
        recovered_spans=recovered,
    )


def _without_accounting(turn: PreparedTurn, outcome: Outcome, number: int) -> TurnRecord:
    """The record of a turn from the timings and usage of an unpatched server."""
    cached, decoded, _ = cost_of(outcome.timings or {}, outcome.usage or {})
    prefilled = min(cached, turn.n_prefilled)
    cached, decoded = cached - prefilled, decoded + prefilled
    path = stock_path(turn.decision, cached)
    restored = cached if path == "restored" else 0
    return TurnRecord(
        number=number,
        at=round(time.time(), 3),
        path=path,
        decision=turn.decision,
        ttft_s=_ttft(outcome),
        prompt=cached + decoded,
        decoded=decoded,
        recovered=restored,
        resident_before=cached - restored,
        omitted=0,
        resident=cached + decoded,
    )


def _ttft(outcome: Outcome) -> float | None:
    return round(outcome.first_byte_s, 4) if outcome.first_byte_s is not None else None
