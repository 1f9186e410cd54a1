"""Groups the blocks of a prompt into the units that are ranked and recovered together.

A unit is a message, or one block of a message that is too long to be taken as a whole. Messages are
ranked as a whole because a part of a short message rarely contains a complete fact. What a client
has added to a message is ranked apart from it. Rows are still saved, evicted and loaded by block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable, FloatArray, Mask, Positions


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The u units of n blocks; the blocks of a unit are contiguous.

    Attributes:
        of_block: [n] index of the unit of each block, ascending.
        first_blocks: [u] index of the first block of each unit.
        lengths: [u] tokens of each unit.
        messages: [u] number of the message of each unit, ascending.
        reminders: [u] which units a client has added to a message.
    """

    of_block: Positions
    first_blocks: Positions
    lengths: Positions
    messages: Positions
    reminders: Mask

    @classmethod
    def of(cls, blocks: BlockTable, max_tokens: int) -> Units:
        """Group blocks by message; each block of a message above `max_tokens` is its own unit."""
        if not len(blocks):
            none = np.zeros(0, np.int64)
            return cls(none, none, none, none, np.zeros(0, np.bool_))
        begins_part = blocks.begins_part
        part = np.cumsum(begins_part) - 1
        is_long = np.bincount(part, blocks.lengths) > max_tokens
        first_blocks = np.flatnonzero(begins_part | is_long[part])
        is_first = np.zeros(len(blocks), np.int64)
        is_first[first_blocks] = 1
        lengths = np.add.reduceat(blocks.lengths, first_blocks)
        messages, reminders = blocks.messages[first_blocks], blocks.reminders[first_blocks]
        return cls(is_first.cumsum() - 1, first_blocks, lengths, messages, reminders)

    def __len__(self) -> int:
        return len(self.first_blocks)

    def blocks_of(self, unit: int) -> range:
        """Return the indexes of the blocks of a unit."""
        is_last = unit + 1 == len(self)
        end = len(self.of_block) if is_last else int(self.first_blocks[unit + 1])
        return range(int(self.first_blocks[unit]), end)

    def sums(self, values: FloatArray | Positions) -> Positions:
        """Return the sum [u] over each unit of integer values [n] of the blocks."""
        if not len(self):
            return np.zeros(0, np.int64)
        return np.add.reduceat(np.asarray(values, np.int64), self.first_blocks)

    def maxima(self, values: FloatArray) -> FloatArray:
        """Return the maximum [..., u] over each unit of values [..., n] of the blocks.

        The result may be `values` itself.
        """
        if not len(self):
            return np.zeros((*values.shape[:-1], 0))
        if len(self) == len(self.of_block):  # each unit is one block
            return values
        found: FloatArray = np.maximum.reduceat(values, self.first_blocks, axis=-1)
        return found
