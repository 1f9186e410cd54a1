"""The bundled recall model: see MODEL_CARD.md."""

from __future__ import annotations

from pathlib import Path


def bundled_model() -> Path:
    """Return the path of the GGUF file that travels with the package."""
    return Path(__file__).with_name("tiny-recall-f16.gguf")
