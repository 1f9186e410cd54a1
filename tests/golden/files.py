"""Reads, compares and writes golden files."""

from __future__ import annotations

import difflib
from pathlib import Path

from . import collect

_FOLDER = Path(__file__).parent / "data"


def names() -> tuple[str, ...]:
    """Every golden file."""
    return tuple(collect.FILES)


def path(name: str) -> Path:
    """Where one is."""
    return _FOLDER / f"{name}.txt"


def found(name: str) -> str:
    """Its text as the present code makes it."""
    return "\n".join(collect.FILES[name]()) + "\n"


def difference(name: str, text: str) -> str:
    """A unified diff from the committed file to `text`; empty when they are equal."""
    file = path(name)
    committed = file.read_text("utf-8") if file.exists() else ""
    lines = difflib.unified_diff(
        committed.splitlines(),
        text.splitlines(),
        f"tests/golden/data/{name}.txt (committed)",
        f"{name} (this code)",
        lineterm="",
        n=2,
    )
    return "\n".join(lines)


def write(name: str, text: str) -> None:
    """Make it the committed one."""
    path(name).parent.mkdir(exist_ok=True)
    path(name).write_text(text, encoding="utf-8")
