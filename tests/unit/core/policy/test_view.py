"""Policy views: reused and foreign rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from slot_model import view_columns

from evoke_proxy.core.model.blocks import Span, merged
from evoke_proxy.core.policy.view import PolicyView


def rows_of(spans: tuple[Span, ...]) -> set[int]:
    return {row for span in spans for row in range(span.start, span.end)}


@given(st.sets(st.integers(0, 40)), st.integers(0, 30))
def test_rows_before_n_past_are_reused_and_later_ones_foreign_except_the_last(
    rows: set[int], n_past: int
) -> None:
    resident = merged(Span(row, row + 1) for row in rows)
    view = PolicyView(*view_columns((), ()), n_tokens=31, n_past=n_past, resident=resident)
    assert rows_of(view.reused_rows) == {row for row in rows if row < n_past}
    foreign = {row for row in rows if row >= n_past}
    assert rows_of(view.foreign_rows) == foreign - {max(rows, default=-1)}
    assert view.n_to_decode == 31 - n_past
