"""Tables that share what they begin with are what tables of their own would be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evoke_proxy.core.model.block_table import BlockTable, shared_labels
from evoke_proxy.core.model.blocks import Block, Role, Span

COLUMNS = ("starts", "ends", "messages", "turns", "roles", "pinned", "preferred", "priority")
STEP = st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 3), st.integers(0, 2))


def block(at: int, flavour: int) -> Block:
    pinned, priority = flavour == 1, 1.0 + flavour
    place = (f"user:{at}#0", f"s/{at}-{flavour}", Span(8 * at, 8 * at + 4 + flavour))
    role = Role.USER if flavour else Role.TOOL
    return Block(*place, role, at % 3, at, "x", (), pinned, not pinned, priority)


def check(table: BlockTable, blocks: list[Block], copied: list[bool]) -> None:
    whole = BlockTable(blocks)
    assert list(table) == blocks and len(table) == len(blocks) and table == whole
    assert list(table.labels) == [block.label for block in blocks]
    assert table.copied.tolist() == copied
    for name in COLUMNS:
        assert getattr(table, name).tolist() == getattr(whole, name).tolist()
    labels = frozenset(block.label for block in blocks[::2]) | {"nobody's"}
    assert table.labelled(labels).tolist() == whole.labelled(labels).tolist()
    assert not table.has("nobody's") and all(table.has(block.label) for block in blocks)


@settings(max_examples=60)
@given(st.lists(STEP, max_size=12))
def test_every_table_is_what_it_was_made_as(steps: list[tuple[int, int, int, int]]) -> None:
    made: list[tuple[BlockTable, list[Block], list[bool]]] = [(BlockTable(), [], [])]
    for which, where, count, flavour in steps:
        table, blocks, copied = made[which % len(made)]
        n = where % (len(blocks) + 1)
        more = [block(n + i, flavour) for i in range(count)]
        marks = [bool(i % 2) for i in range(count)]
        added = BlockTable(more).with_copies(np.array(marks, np.bool_))
        if flavour == 2 and more:
            added, more = (
                added.relabelled({0: f"n/{n}"}),
                [replace(more[0], label=f"n/{n}"), *more[1:]],
            )
        made.append((table[:n] + added, blocks[:n] + more, copied[:n] + marks))
    for table, blocks, copied in made:
        check(table, blocks, copied)
        check(table[1:], blocks[1:], copied[1:])
        for other, its, _ in made:
            pairs = zip(blocks, its, strict=False)
            alike = next((i for i, (a, b) in enumerate(pairs) if a.label != b.label), None)
            least = min(len(blocks), len(its))
            assert shared_labels(table, other) == (least if alike is None else alike)
            if table.same_blocks(other):
                assert blocks == its
