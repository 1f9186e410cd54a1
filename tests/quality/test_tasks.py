"""The fast form of `bench.tasks`, in one process, measures what real servers do."""

from __future__ import annotations

from bench.tasks.__main__ import differing


def test_the_simulation_in_one_process_agrees_with_real_servers() -> None:
    """In one case of each kind the token counts and the resident messages are equal."""
    assert differing("tuning", 4000, (8,), 1) == []
