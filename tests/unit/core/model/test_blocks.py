"""Spans and sets of spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.model.blocks import Span, clipped, common, merged, without

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: Span(pair[0], sum(pair))),
    max_size=8,
)


def positions(spans: list[Span] | tuple[Span, ...]) -> set[int]:
    return {position for span in spans for position in range(span.start, span.end)}


@pytest.mark.parametrize("ends", [(-1, 3), (4, 3)])
def test_a_span_with_invalid_ends_is_refused(ends: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not a range"):
        Span(*ends)


@given(SPANS, SPANS)
def test_a_span_behaves_like_a_set_of_positions(some: list[Span], others: list[Span]) -> None:
    for span, other in zip(some, others, strict=False):
        assert len(span) == len(positions([span]))
        assert (span.start in span) == bool(len(span))
        assert span.end not in span
        if len(other):
            assert span.encloses(other) == (positions([other]) <= positions([span]))
        assert positions([span.clipped(7)]) == {p for p in positions([span]) if p < 7}


@given(SPANS, SPANS)
def test_operations_on_spans_match_those_on_sets_of_positions(
    some: list[Span], others: list[Span]
) -> None:
    assert positions(merged(some)) == positions(some)
    assert positions(without(some, others)) == positions(some) - positions(others)
    assert positions(common(some, others)) == positions(some) & positions(others)


@given(SPANS, SPANS)
def test_operations_on_spans_give_ascending_spans_with_gaps_between(
    some: list[Span], others: list[Span]
) -> None:
    for spans in (merged(some), without(some, others), common(some, others)):
        assert all(len(span) for span in spans)
        assert all(a.end < b.start for a, b in zip(spans, spans[1:], strict=False))


def test_clipping_to_an_empty_span_gives_nothing() -> None:
    assert clipped([Span(0, 10), Span(12, 20)], Span(5, 5)) == ()
    assert clipped([Span(0, 10)], Span(10, 10)) == ()
