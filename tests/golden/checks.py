"""Compares a golden file with what the code does now."""

from __future__ import annotations

import pytest
from golden import files

BYTES = ("errors", "forwarded")
HOW = """
This is visible to users. If the change is meant: run
    python -m tests.golden --write {name}
look at the diff of tests/golden/data/{name}.txt, commit it with the change, and say it in docs/.
If it is not meant, the code is wrong, not the golden file."""


def check(name: str) -> None:
    """Fail with the difference and with what to do."""
    if difference := files.difference(name, files.found(name)):
        pytest.fail(difference + "\n" + HOW.format(name=name), pytrace=False)
