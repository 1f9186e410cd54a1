"""Which moved blocks one call inserts together."""

from __future__ import annotations

from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.prompt.moved_text import MovedBlock
from evoke_proxy.engine.strategies.budgeted.reanchoring import insertions


def moved(start: int, shift: int = 10, resident: bool = True) -> MovedBlock:
    """A block of 64 tokens."""
    span = Span(start, start + 64)
    block = Block(f"user:1#{start}", f"b{start}", span, Role.USER, turn=1, message=1, text="")
    return MovedBlock(block, start + shift, resident, is_saved=True)


def labels(*blocks: MovedBlock, most: int = 1024) -> list[str]:
    return [item.label for item in insertions(blocks, most, "s/")]


def test_resident_neighbours_are_inserted_together() -> None:
    blocks = [moved(start) for start in range(0, 64 * 5, 64)]
    (item,) = insertions(blocks, 1024, "s/")
    assert item.is_joined and item.blocks == tuple(blocks)
    assert (item.label, item.old, item.start) == ("s/0-320-j", Span(0, 320), 10)
    assert labels(*blocks, most=128) == ["s/0-128-j", "s/128-256-j", "b256"]


def test_other_blocks_are_inserted_alone() -> None:
    assert labels(moved(0), moved(64, resident=False), moved(128)) == ["b0", "b64", "b128"]
    assert labels(moved(0, resident=False), moved(64, resident=False)) == ["b0", "b64"]
    # A gap before the edit, or behind it.
    assert labels(moved(0), moved(128, shift=-54)) == ["b0", "b128"]
    assert labels(moved(0), moved(64, shift=20)) == ["b0", "b64"]
    assert labels() == []
