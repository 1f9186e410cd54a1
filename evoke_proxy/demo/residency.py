"""What a turn left of its prompt in the cache, range by range, and how each range came there."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evoke_proxy.core.model.blocks import Span, common, merged, without

# In the order of the legend; `again` were decoded in the turn and are out again at its end.
KINDS = ("before", "recovered", "decoded", "again", "omitted")
_TIMEOUT_S = 10.0

Ranges = list[list[int]]


def resident_now(port: int) -> Ranges | None:
    """The ranges slot 0 holds, asked through the proxy; None when the server cannot say."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/slots/0/blocks")
        response = connection.getresponse()
        answer = json.loads(response.read()) if response.status == 200 else {}
        found = answer.get("resident") if isinstance(answer, dict) else None
        return [[int(a), int(b)] for a, b in found] if isinstance(found, list) else None
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return None
    finally:
        connection.close()


def pictured(turns: Sequence[Mapping[str, Any]]) -> Iterator[list[tuple[Span, str]]]:
    """For each turn of a report its prompt in ascending ranges, each with one of KINDS.

    As the slot stood when the answer had ended. A turn whose ranges nobody knows is empty.
    """
    earlier: tuple[Span, ...] = ()
    for turn in turns:
        if turn.get("resident") is None:
            earlier = ()
            yield []
            continue
        rows = merged(Span(a, b) for a, b in turn["resident"])
        yield sorted(_ranges(turn, rows, earlier), key=lambda item: item[0].start)
        earlier = rows


def _ranges(
    turn: Mapping[str, Any], rows: Sequence[Span], earlier: Sequence[Span]
) -> Iterator[tuple[Span, str]]:
    cursor = turn["prompt"] - turn["decoded"]
    history, tail = [Span(0, cursor)], [Span(cursor, turn["prompt"])]
    held = common(rows, history)
    by_kind = {
        "before": common(held, earlier),
        "recovered": without(held, earlier),
        "omitted": without(history, rows),
        "decoded": common(rows, tail),
        "again": without(tail, rows),
    }
    for kind, spans in by_kind.items():
        for span in spans:
            yield span, kind
