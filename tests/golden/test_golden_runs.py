"""Names and formats of public interfaces are equal to the golden files."""

from __future__ import annotations

import pytest
from golden import files
from golden.checks import BYTES, check


@pytest.mark.parametrize("name", [name for name in files.names() if name not in BYTES])
def test_golden_file_is_what_the_code_does(name: str) -> None:
    check(name)


def test_a_difference_is_shown_line_by_line() -> None:
    committed = files.path("config").read_text("utf-8")
    changed = committed.replace("policy.budget: str", "policy.limit: str")
    difference = files.difference("config", changed)
    assert "-policy.budget:" in difference and "+policy.limit:" in difference
    assert len(difference.splitlines()) < 15
