"""The corpus of the bundled model, from which the benches draw sessions, too; a trained hybrid."""

from __future__ import annotations

from pathlib import Path

# Attention and short convolutions, with and without thoughts: HYBRID_CARD.md.
HYBRID = Path(__file__).with_name("hybrid-f16.gguf")
