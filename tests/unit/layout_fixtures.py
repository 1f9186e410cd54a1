"""A small prompt with one block of each role."""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.prompt.layout import Layout

SECRET = "text of the conversation"
ROLES = (Role.SYSTEM, Role.USER, Role.TOOL, Role.ASSISTANT)


def small_layout(size: int = 10, pinned: tuple[int, ...] = ()) -> Layout:
    """Four blocks of `size` tokens, one of each role; `pinned` are numbers of blocks."""
    blocks = [
        Block(
            *(f"file:{SECRET}#{i}", f"s/{i}", Span(i * size, (i + 1) * size), role, i + 1, i),
            *(SECRET, (SECRET,)),
            pinned=i in pinned,
        )
        for i, role in enumerate(ROLES)
    ]
    return Layout("s", np.zeros(5 * size, np.int32), 4 * size, BlockTable(blocks))
