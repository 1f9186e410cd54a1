"""Error responses and forwarded bytes are equal to the golden files."""

from __future__ import annotations

import pytest
from golden.checks import BYTES, check


@pytest.mark.parametrize("name", BYTES)
def test_golden_bytes_are_what_the_code_sends(name: str) -> None:
    check(name)
