"""The block table: a table that shares a prefix with another equals one built from scratch."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evoke_proxy.core.model.block_table import BlockTable, shared_labels
from evoke_proxy.core.model.blocks import Block, Role, Span, merged

COLUMNS = ("starts", "ends", "messages", "turns", "roles", "pinned", "preferred", "priority")
STEP = st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 3), st.integers(0, 2))


def block(at: int, flavour: int) -> Block:
    pinned, priority = flavour == 1, 1.0 + flavour
    place = (f"user:{at}#0", f"s/{at}-{flavour}", Span(8 * at, 8 * at + 4 + flavour))
    role = Role.USER if flavour else Role.TOOL
    return Block(*place, role, at % 3, at, "x", (), pinned, not pinned, priority)


def check(table: BlockTable, blocks: list[Block], copied: list[bool]) -> None:
    rebuilt = BlockTable(blocks)
    assert list(table) == blocks and len(table) == len(blocks) and table == rebuilt
    assert list(table.labels) == [block.label for block in blocks]
    assert table.copied.tolist() == copied
    for name in COLUMNS:
        assert getattr(table, name).tolist() == getattr(rebuilt, name).tolist()
    labels = frozenset(block.label for block in blocks[::2]) | {"unknown"}
    assert table.labelled(labels).tolist() == rebuilt.labelled(labels).tolist()
    assert not table.has("unknown") and all(table.has(block.label) for block in blocks)
    assert [table.index_of(block.label) for block in blocks] == list(range(len(blocks)))


@settings(max_examples=60)
@given(st.lists(STEP, max_size=12))
def test_a_table_equals_the_blocks_it_was_built_from(
    steps: list[tuple[int, int, int, int]],
) -> None:
    tables: list[tuple[BlockTable, list[Block], list[bool]]] = [(BlockTable(), [], [])]
    for which, where, count, flavour in steps:
        table, blocks, copied = tables[which % len(tables)]
        n = where % (len(blocks) + 1)
        more = [block(n + i, flavour) for i in range(count)]
        marks = [bool(i % 2) for i in range(count)]
        added = BlockTable(more).with_copies(np.array(marks, np.bool_))
        if flavour == 2 and more:
            added, more = (
                added.relabelled({0: f"n/{n}"}),
                [replace(more[0], label=f"n/{n}"), *more[1:]],
            )
        assert not table.has("unknown")  # builds the index that longer tables share
        tables.append((table[:n] + added, blocks[:n] + more, copied[:n] + marks))
    for table, blocks, copied in tables:
        check(table, blocks, copied)
        check(table[1:], blocks[1:], copied[1:])
        for other, other_blocks, _ in tables:
            pairs = zip(blocks, other_blocks, strict=False)
            first_difference = next(
                (i for i, (a, b) in enumerate(pairs) if a.label != b.label), None
            )
            shorter = min(len(blocks), len(other_blocks))
            assert shared_labels(table, other) == (
                shorter if first_difference is None else first_difference
            )
            if table.same_blocks(other):
                assert blocks == other_blocks


@given(st.sets(st.integers(0, 19)), st.randoms(use_true_random=False))
def test_the_spans_of_some_blocks_are_merged_where_they_touch(
    chosen: set[int], random: Random
) -> None:
    blocks = [replace(block(at, 0), span=Span(6 * at, 6 * at + 5 + at % 2)) for at in range(20)]
    indexes = random.sample(sorted(chosen), len(chosen))
    spans = BlockTable(blocks).spans_at(indexes)
    assert spans == merged(blocks[at].span for at in indexes)
