"""Says what is wrong with the disk tier of a llama-server (--evoke-disk), and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Code of a disk tier that cannot be used; it is shown to everybody.
UNUSABLE = "unusable"


@dataclass(frozen=True, slots=True)
class DiskProblem:
    """Why the disk tier that llama-server was started with is not in use.

    Attributes:
        problem: What is wrong, as a clause without a full stop.
        fix: What to change.
    """

    problem: str
    fix: str

    @property
    def warning(self) -> str:
        """Problem and fix as one line."""
        return f"{self.problem}: {self.fix}"


def unusable_reason(answer: Mapping[str, Any]) -> str:
    """Why the server cannot use its directory, from an answer about a slot (patches/API.md).

    Empty when it can, or when it was started without `--evoke-disk`.
    """
    disk = answer.get("disk")
    return str(disk.get("unusable") or "") if isinstance(disk, dict) else ""


def disk_problem(reason: str) -> DiskProblem | None:
    """Describe a disk tier that cannot be used for this reason; None without a reason."""
    if not reason:
        return None
    return DiskProblem(
        f"the disk tier does not work ({reason}), so a restart of llama-server loses every"
        " conversation",
        "name a directory that belongs to the server's user, with mode 0700, in --evoke-disk, and"
        " restart llama-server",
    )
