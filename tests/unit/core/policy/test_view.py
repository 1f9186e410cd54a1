"""Policy views: reused and foreign rows, and which views are equal."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slot_model import view_columns

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span, merged
from evoke_proxy.core.policy.view import PolicyView, Task
from evoke_proxy.core.retrieval.index import Index


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


def a_view() -> PolicyView:
    blocks = BlockTable(
        Block(f"user:{i}#0", f"s/{i}", Span(i * 9, i * 9 + 9), Role.USER, 1, i, f"text {i}")
        for i in range(3)
    )
    mask, values = np.array([True, False, True]), np.array([0.1, 0.5, 0.9])
    return PolicyView(
        blocks=blocks,
        in_cache=mask,
        in_pool=mask,
        n_tokens=30,
        n_past=27,
        resident=(Span(0, 9), Span(18, 27)),
        index=INDEX,
        task=Task(np.array([1.0, 0.0], np.float32), 9),
        recovered=mask,
        attention=values,
        last_attended=values,
        model_relevance=values,
    )


INDEX = Index()
# For each field another value than that of `a_view`.
OTHER_VALUES: dict[str, Any] = {
    "in_cache": np.array([True, True, True]),
    "in_pool": np.array([True, False, False]),
    "n_tokens": 31,
    "n_past": 26,
    "resident": (Span(0, 9),),
    "non_evictable": (Span(0, 9),),
    "n_free": 7,
    "max_tokens": 5,
    "adopt_to": 9,
    "pre_restart_resident": (Span(0, 9),),
    "stale": ("s/9",),
    "index": Index(),
    "task": Task(np.array([0.0, 1.0], np.float32), 9),
    "recovered": None,
    "attention": np.array([0.1, 0.5, 0.8]),
    "last_attended": np.array([0.1, 0.5]),
    "model_relevance": None,
}


def test_views_are_equal_when_each_field_has_an_equal_value() -> None:
    assert a_view().equals(a_view())
    assert not a_view().equals(replace(a_view(), task=Task(a_view().task.focus, 10)))


@pytest.mark.parametrize("name", [field.name for field in fields(PolicyView)])
def test_views_differ_when_one_field_differs(name: str) -> None:
    view = a_view()
    if name != "blocks":
        others = [replace(view, **{name: OTHER_VALUES[name]})]
    else:
        changed = replace(view.blocks[1], text="another text")
        tables = BlockTable([view.blocks[0], changed, view.blocks[2]]), view.blocks[:2]
        copies = view.blocks.with_copies(np.array([True, False, False]))
        others = [replace(view, blocks=table) for table in (*tables, copies)]
    assert not any(view.equals(other) or other.equals(view) for other in others)
