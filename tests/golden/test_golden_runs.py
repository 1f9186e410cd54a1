"""Names and formats of public interfaces are equal to the golden files."""

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


@pytest.mark.parametrize("name", [name for name in files.names() if name not in BYTES])
def test_golden_file_is_what_the_code_does(name: str) -> None:
    check(name)


def test_a_difference_is_shown_line_by_line() -> None:
    committed = files.path("config").read_text("utf-8")
    changed = committed.replace("policy.budget: str", "policy.limit: str")
    difference = files.difference("config", changed)
    assert "-policy.budget:" in difference and "+policy.limit:" in difference
    assert len(difference.splitlines()) < 15
