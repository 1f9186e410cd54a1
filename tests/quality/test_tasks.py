"""The fast form of `bench.tasks` measures what real servers do."""

from __future__ import annotations

from bench.tasks.__main__ import differing


def test_the_form_in_one_process_agrees_with_real_servers() -> None:
    """One case of each kind: as many tokens, and the same messages in the cache."""
    assert differing("tuning", 4000, (8,), 1) == []
