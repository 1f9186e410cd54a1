"""Blocks by what a request calls them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable, Mask
from evoke_proxy.core.model.blocks import Block


def called(blocks: BlockTable, names: Collection[str | int]) -> Mask:
    """Which blocks one of these names means.

    A name is a block's key (`file:config.py#2`), all of a key before its number
    (`file:config.py`, `user:7`, what the client gave as `evoke_name`), or the path, file name, tool
    call or message name that the block goes by. A number is the index of a message.
    """
    if not names:
        return np.zeros(len(blocks), np.bool_)
    wanted = frozenset(names)
    found = (not wanted.isdisjoint(_names(block)) for block in blocks)
    return np.fromiter(found, np.bool_, len(blocks))


def unknown(blocks: BlockTable, names: Collection[str]) -> list[str]:
    """The names that mean no block, in their order."""
    known = {name for block in blocks for name in _names(block)} if names else set()
    return [name for name in names if name not in known]


def _names(block: Block) -> set[str | int]:
    base, _, number = block.key.rpartition("#")
    whole = f"{base}#{number.partition('.')[0]}"  # what it was before it was split
    return {block.message, block.key, whole, base, *block.identity}
