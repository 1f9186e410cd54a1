"""Characters whose repetition may make a pattern or a split take more than linear time."""

from __future__ import annotations

CHARACTERS = (" ", "\n", "\t", "a", "A", "0", "_", "-", ".", ",", '"', "\\", "/", "é", "語")
