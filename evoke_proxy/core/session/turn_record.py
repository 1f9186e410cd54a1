"""What a turn came to, for whoever watches: numbers and ranges, no text."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.session.accounting import TokenAccounting

# How the tokens that a turn went on from were there: in its slot, some of them copied back into it,
# all copied into another one, from a file, out of llama-server's own RAM. Or they were not.
PATHS = ("resident", "recovered", "adopted", "restored", "ram", "decoded")
_STOCK = {"live": "resident", "ram": "ram", "restored": "restored"}


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of a conversation; `at` is seconds since the epoch, `ttft_s` None without an answer.

    The four books are tokens and sum to `prompt`; `peak` and `resident` are rows in the slot.
    `evicted` and `recovered_spans` are ranges that left and came back for this turn.
    """

    number: int
    at: float
    path: str
    decision: str
    ttft_s: float | None
    prompt: int
    decoded: int
    recovered: int
    resident_before: int
    omitted: int
    resident: int = 0
    peak: int = 0
    budget: int | None = None
    evicted: tuple[Span, ...] = ()
    recovered_spans: tuple[Span, ...] = ()

    def shown(self) -> dict[str, Any]:
        """As JSON has it."""
        spans = {
            name: [[span.start, span.end] for span in getattr(self, name)]
            for name in ("evicted", "recovered_spans")
        }
        return {field.name: getattr(self, field.name) for field in fields(self)} | spans


def moved(plan: Plan, books: TokenAccounting | None) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Ranges that left and came back: by the plan, and by the engine itself as far as it said."""
    gone = [evict.span for evict in plan.evicts]
    gone += [span for span, _ in books.auto_evicted] if books is not None else []
    back = [load.span for load in plan.loads] + list(plan.adopt.spans if plan.adopt else ())
    return tuple(gone), tuple(back)


def path_of(plan: Plan, books: TokenAccounting) -> str:
    """How a budgeted turn got to its first token."""
    if plan.adopt is not None:
        return "adopted"
    if books.recovered:
        return "recovered"
    return "resident" if books.resident_before else "decoded"


def stock_path(decision: str, cached: int) -> str:
    """How a turn on an unpatched server did."""
    return _STOCK.get(decision, "resident") if cached else "decoded"
