"""Arrays that go on in place are what copies would be, and never change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.prompt.append_only import AppendOnlyArray, same_memory
from evoke_proxy.core.prompt.rendered import common_prefix

MORE = st.lists(st.integers(0, 2), max_size=6)


@given(MORE, st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), MORE), max_size=12))
def test_each_is_what_it_was_made_as(
    first: list[int], steps: list[tuple[int, int, list[int]]]
) -> None:
    made = [(AppendOnlyArray.of(np.array(first, np.int32)), first)]
    for which, where, more in steps:
        one, said = made[which % len(made)]
        n = where % (len(said) + 1)
        made.append((one.extended(n, np.array(more, np.int32)), said[:n] + more))
    for one, said in made:
        assert one.rows.tolist() == said
        for other, its in made:
            if same_memory(one.rows, other.rows):
                n = min(len(said), len(its))
                assert said[:n] == its[:n]
                assert common_prefix(one.rows, other.rows) == n


def test_what_only_goes_on_stays_where_it_is() -> None:
    one = AppendOnlyArray.of(np.arange(9)).extended(9, np.array([9]))
    two = one.extended(10, np.arange(5))
    assert same_memory(one.rows, two.rows)
    assert same_memory(two.rows, two.extended(10, np.arange(8)).rows)
    assert not same_memory(two.rows, two.extended(10, np.ones(1, np.int64)).rows)
    assert not same_memory(np.arange(3), np.arange(3))
    assert not two.rows.flags.writeable
