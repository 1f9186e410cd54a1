"""The fast form of `bench.tasks`, in one process, measures what real servers do."""

from __future__ import annotations

from bench.engines import InProcess, engine
from bench.presence import compared, differing
from bench.tasks.__main__ import talk_of
from bench.tasks.cases import cases, kinds


def test_the_simulation_in_one_process_agrees_with_real_servers() -> None:
    """In one case of each kind the token counts and the resident messages are equal."""
    drawn = [case for kind in kinds("tuning") for case in cases("tuning", kind, 4000, 1)]
    with engine(True, 4000) as real:
        rows = list(compared(InProcess(), real, map(talk_of, drawn), (8,)))
    assert len(rows) == len(drawn)
    assert differing(rows) == []
