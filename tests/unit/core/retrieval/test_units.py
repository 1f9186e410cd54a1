"""Units: the blocks of a message, or single blocks of a message that is too long."""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.retrieval.units import Units


def table(messages: list[int], reminders: tuple[int, ...] = ()) -> BlockTable:
    names = [(f"user:{m}#{i}", f"s/{i}") for i, m in enumerate(messages)]
    return BlockTable(
        Block(*names[i], Span(i * 10, i * 10 + 10), Role.USER, 1, m, "", is_reminder=i in reminders)
        for i, m in enumerate(messages)
    )


def test_a_short_message_is_one_unit_and_each_block_of_a_long_one_is_a_unit() -> None:
    units = Units.of(table([0, 0, 1, 2, 2, 2, 3]), max_tokens=20)
    assert units.of_block.tolist() == [0, 0, 1, 2, 3, 4, 5]
    assert units.lengths.tolist() == [20, 10, 10, 10, 10, 10]
    assert [list(units.blocks_of(i)) for i in (0, 4, 5)] == [[0, 1], [5], [6]]


def test_what_a_client_has_added_to_a_message_is_a_unit_of_its_own() -> None:
    units = Units.of(table([0, 1, 1, 1, 2], reminders=(2, 3)), max_tokens=20)
    assert units.of_block.tolist() == [0, 1, 2, 2, 3]
    assert units.messages.tolist() == [0, 1, 1, 2]
    assert units.reminders.tolist() == [False, False, True, False]
    long = Units.of(table([0, 0, 0, 0], reminders=(1, 2, 3)), max_tokens=20)
    assert long.of_block.tolist() == [0, 1, 2, 3], "only the reminder is too long"


def test_values_of_blocks_are_summed_or_maximized_over_units() -> None:
    units = Units.of(table([0, 0, 1]), max_tokens=64)
    values = np.array([1.0, 2.0, 5.0])
    assert units.sums(values).tolist() == [3, 5]
    assert units.maxima(values).tolist() == [2.0, 5.0]


def test_without_blocks_there_are_no_units() -> None:
    units = Units.of(table([]), max_tokens=64)
    assert len(units) == 0 == len(units.sums(np.zeros(0)))
    assert len(units.maxima(np.zeros(0))) == 0
