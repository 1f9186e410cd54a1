"""Which blocks a text calls by name: by a path, a file name, a tool or an id."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.model.block_table import Positions
from evoke_proxy.core.retrieval.terms import spelled

# A name that so large a share of the blocks has is a tool that everybody uses.
_SHARE, _BLOCKS = 0.25, 8


class Names:
    """What numbered texts are called; texts only get more."""

    def __init__(self) -> None:
        self._having: dict[str, array[int]] = {}

    def add(self, names: Iterable[str], number: int) -> None:
        """Take in the names of a text; case does not count."""
        for name in {name.lower() for name in names}:
            self._having.setdefault(name, array("l")).append(number)

    def having(self, name: str) -> Positions:
        """The numbers of the texts that have a name."""
        return np.array(self._having.get(name.lower(), ()), np.int64)

    def called(
        self, text: str, numbers: Positions, messages: Positions, own: int
    ) -> npt.NDArray[np.float64]:
        """[n] of n blocks, given by number: 0 where the text has none of a block's names, else from
        1 up how late it was said among those of its name, for what the latest shows holds.

        `messages` say in which message each block is; from index `own` on they are the text's.
        """
        most = max(_BLOCKS, _SHARE * len(numbers))
        later = np.zeros(len(numbers))
        for name in spelled(text) & self._having.keys():
            having = np.array(self._having[name])
            if len(having) <= most:
                at = np.flatnonzero(np.isin(numbers, having))
                said = np.where(at < own, messages[at], -1)
                _, age = np.unique(-said, return_inverse=True)
                later[at] = np.maximum(later[at], 1.0 + len(at) - age)
        return later
