"""How the files that the package ships are made: the bundled model, the word vectors,
the weights by which standing instructions are recognized.

Nothing here measures. `python -m recipes.NAME` runs from a checkout; --help explains it.
"""

from __future__ import annotations

import argparse

from bench import record


def command(name: str, about: str | None, examples: str) -> argparse.ArgumentParser:
    """Return the argument parser of `python -m recipes.NAME`; `examples` end its help."""
    made = record.command(name, about, examples)
    made.prog = f"python -m recipes.{name}"
    return made
