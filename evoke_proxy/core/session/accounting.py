"""How each prompt token of a turn was there: as planned, and as llama-server counted it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.model.blocks import Span, count
from evoke_proxy.core.model.counts import is_count, token_count
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.policy_view import PolicyView


@dataclass(frozen=True, slots=True)
class TokenAccounting:
    """Tokens of one turn. The first four are disjoint and sum to the prompt.

    `decoded_hidden` were decoded and evicted again before the first output token, and count as
    decoded. `auto_evicted` are ranges the engine evicted itself; one without a label is gone.
    """

    decoded: int
    recovered: int
    resident_before: int
    omitted: int
    n_prompt: int = 0
    decoded_hidden: int = 0
    n_resident: int = 0
    n_resident_peak: int = 0
    budget: int = 0
    epoch: int = 0
    marker: str = ""
    auto_evicted: tuple[tuple[Span, str | None], ...] = ()

    @classmethod
    def parse(cls, timings: Mapping[str, Any] | None) -> TokenAccounting | None:
        """From a reply's `timings`; None when they carry no books of the agreed shape."""
        given = (timings or {}).get("evoke")
        if not isinstance(given, Mapping):
            return None
        try:
            counts = {name: _count(given.get(name, 0)) for name in _COUNTS}
            evicted = tuple(
                (Span(int(start), int(end)), name if isinstance(name, str) else None)
                for start, end, name in given.get("auto_evicted", ())
            )
        except (TypeError, ValueError, OverflowError):
            return None
        epoch = given.get("epoch", 0)
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            return None
        return cls(**counts, epoch=epoch, marker=str(given.get("marker", "")), auto_evicted=evicted)


_COUNTS = (
    "decoded",
    "recovered",
    "resident_before",
    "omitted",
    "n_prompt",
    "decoded_hidden",
    "n_resident",
    "n_resident_peak",
    "budget",
)


def _count(value: object) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r:.40} is not a count")
    return token_count(value)


def forecast(view: PolicyView, plan: Plan) -> TokenAccounting:
    """What the books must say if the plan is run and the engine evicts nothing by itself."""
    cursor = plan.adopt.n_tokens if plan.adopt is not None else view.n_past
    if plan.adopt is not None:
        recovered, before = count(plan.adopt.spans), 0
    else:
        recovered = _below(cursor, (load.span for load in plan.loads))
        evicted = _below(cursor, (evict.span for evict in plan.evicts))
        before = count(view.kept_rows) - evicted
    return TokenAccounting(
        decoded=view.n_tokens - cursor,
        recovered=recovered,
        resident_before=before,
        omitted=cursor - recovered - before,
        n_prompt=view.n_tokens,
        n_resident=view.n_tokens - cursor + recovered + before,
        budget=plan.stream.budget if plan.stream is not None else 0,
    )


def agree(planned: TokenAccounting, books: TokenAccounting, exact: bool) -> bool:
    """Whether what was to stay or come back did; what the engine evicted is no contradiction.

    Windows and recurrent states may have to go further back than rows alone: then not `exact`.
    """
    hidden = sum(len(span) for span, _ in books.auto_evicted)
    promised = planned.recovered + planned.resident_before
    kept = books.recovered + books.resident_before
    if not exact and planned.decoded < books.decoded:
        return kept <= promised
    return planned.decoded == books.decoded and promised - hidden <= kept <= promised


def _below(cursor: int, spans: Iterable[Span]) -> int:
    """How many positions of these disjoint spans are before the cursor."""
    return sum([min(span.end, cursor) - min(span.start, cursor) for span in spans])
