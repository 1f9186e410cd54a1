"""Append-only arrays: an array extended in place equals a copy, and earlier ones never change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.prompt.append_only import AppendOnlyArray, same_memory
from evoke_proxy.core.prompt.rendered import common_prefix

MORE = st.lists(st.integers(0, 2), max_size=6)


@given(MORE, st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), MORE), max_size=12))
def test_every_array_keeps_the_values_it_was_made_of(
    first: list[int], steps: list[tuple[int, int, list[int]]]
) -> None:
    arrays = [(AppendOnlyArray.of(np.array(first, np.int32)), first)]
    for which, where, more in steps:
        array, expected = arrays[which % len(arrays)]
        n = where % (len(expected) + 1)
        arrays.append((array.extended(n, np.array(more, np.int32)), expected[:n] + more))
    for array, expected in arrays:
        assert array.rows.tolist() == expected
        for other, other_expected in arrays:
            if same_memory(array.rows, other.rows):
                n = min(len(expected), len(other_expected))
                assert expected[:n] == other_expected[:n]
                assert common_prefix(array.rows, other.rows) == n


def test_an_array_that_is_only_extended_shares_its_memory() -> None:
    array = AppendOnlyArray.of(np.arange(9)).extended(9, np.array([9]))
    two = array.extended(10, np.arange(5))
    assert same_memory(array.rows, two.rows)
    assert same_memory(two.rows, two.extended(10, np.arange(8)).rows)
    assert not same_memory(two.rows, two.extended(10, np.ones(1, np.int64)).rows)
    assert not same_memory(np.arange(3), np.arange(3))
    assert not two.rows.flags.writeable
