"""The copies of a patched llama-server in host memory and on disk, without their bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

# What identifies a copy: range, hash of all tokens up to its end, and visibility (0: whole).
Key = tuple[int, int, int, int]


@dataclass(slots=True)
class Copy:
    """The rows of one range.

    Attributes:
        key: What identifies it.
        names: Its labels, each with the session that has it.
        version: Number of the latest change that `GET /slots/{id}/blocks` reports.
        on_disk: Whether only a file has the rows.
    """

    key: Key
    names: dict[str, str] = field(default_factory=dict)
    version: int = 0
    on_disk: bool = False

    @property
    def size(self) -> int:
        """Tokens."""
        return self.key[1] - self.key[0]


class PoolFull(Exception):
    """The copies of one call do not fit the host memory."""


class BlockPool:
    """Copies of one tenant, the least recently used lost first.

    Attributes:
        ram: Tokens that fit host memory.
        disk: Tokens that fit the disk; 0 without one.
        ram_used, disk_used: Tokens there now.
        version: Number of the latest change.
        n_lost: Tokens of copies that were lost because there was no room.
    """

    def __init__(self, ram: int, disk: int = 0) -> None:
        self.ram, self.disk = ram, disk
        self.ram_used = self.disk_used = 0
        self.version = 0
        self.n_lost = 0
        self.copies: OrderedDict[Key, Copy] = OrderedDict()
        self.names: dict[str, Copy] = {}
        # Of the copies, those in host memory: the order in which they leave it.
        self._in_ram: OrderedDict[Key, Copy] = OrderedDict()

    def add(self, key: Key, name: str, session: str) -> bool:
        """Give a range this name; return whether its rows had to be copied.

        Raises PoolFull, and then changes nothing, when it is larger than the host memory.
        """
        copy = self.copies.get(key)
        is_new = copy is None
        if copy is None:
            copy = Copy(key)
            self._take_room(copy)
            self.copies[key] = copy
            self._in_ram[key] = copy
            self.ram_used += copy.size
        self.rename(copy, name, session)
        self.use(copy)
        return is_new

    def rename(self, copy: Copy, name: str, session: str) -> None:
        """Give a copy one more name, which its previous copy loses."""
        before = self.names.get(name)
        if before is not copy and before is not None:
            self._remove_name(before, name)
        self.names[name] = copy
        copy.names[name] = session
        self.version += 1
        copy.version = self.version

    def use(self, copy: Copy) -> None:
        """Make a copy the latest used."""
        self.copies.move_to_end(copy.key)
        if copy.key in self._in_ram:
            self._in_ram.move_to_end(copy.key)

    def read(self, copies: Iterable[Copy]) -> int:
        """Bring copies into host memory; return the tokens that were read from disk."""
        n_read = 0
        for copy in copies:
            if copy.on_disk and copy.size > self.ram:
                raise PoolFull
            if copy.on_disk:
                copy.on_disk = False  # so that it is not lost to make room
                self.disk_used -= copy.size
                self._take_room(copy)
                self._in_ram[copy.key] = copy
                self.ram_used += copy.size
                n_read += copy.size
            self.use(copy)
        return n_read

    def drop(self, name: str) -> bool:
        """Delete a name, and the copy with its last name; return whether it existed."""
        copy = self.names.get(name)
        if copy is None:
            return False
        self._remove_name(copy, name)
        return True

    def _remove_name(self, copy: Copy, name: str) -> None:
        del self.names[name]
        del copy.names[name]
        if not copy.names:
            self._delete(copy)

    def _delete(self, copy: Copy) -> None:
        del self.copies[copy.key]
        if self._in_ram.pop(copy.key, None) is not None:
            self.ram_used -= copy.size
        else:
            self.disk_used -= copy.size
        for name in copy.names:
            del self.names[name]

    def _take_room(self, copy: Copy) -> None:
        """Move or lose copies until there is room in host memory for one more."""
        if copy.size > self.ram:
            raise PoolFull
        while self.ram_used + copy.size > self.ram:
            key, oldest = self._in_ram.popitem(last=False)
            if not self._move_to_disk(oldest):
                self._in_ram[key] = oldest
                self._delete(oldest)
                self.n_lost += oldest.size

    def _move_to_disk(self, copy: Copy) -> bool:
        """Move a copy that has left `_in_ram`; False where the disk cannot take it."""
        if copy.size > self.disk:
            return False
        while self.disk_used + copy.size > self.disk:
            oldest = next(each for each in self.copies.values() if each.on_disk)
            self._delete(oldest)
            self.n_lost += oldest.size
        self.ram_used -= copy.size
        self.disk_used += copy.size
        copy.on_disk = True
        return True
