"""Characters that patterns and splits may handle in more than linear time when they repeat."""

from __future__ import annotations

CHARACTERS = (" ", "\n", "\t", "a", "A", "0", "_", "-", ".", ",", '"', "\\", "/", "é", "語")
