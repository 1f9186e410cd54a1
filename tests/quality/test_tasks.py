"""The fast form of `bench.tasks`, in one process, measures what real servers do."""

from __future__ import annotations

from bench.engines import DEFAULT, InProcess, engine
from bench.presence import measure
from bench.tasks.__main__ import talk_of
from bench.tasks.cases import cases, kinds


def test_the_simulation_in_one_process_agrees_with_real_servers() -> None:
    """In one case of each kind the token counts and the resident messages are equal."""
    talks = [talk_of(case) for kind in kinds("tuning") for case in cases("tuning", kind, 4000, 1)]
    with engine(True, 4000) as real:
        found = [
            [row for talk in talks for row in measure(form, talk, (8,), [DEFAULT.arm])]
            for form in (InProcess(), real)
        ]
    in_process, on_servers = (
        [
            {key: row[key] for key in ("question", "tokens", "whole", "half", "messages")}
            for row in rows
        ]
        for rows in found
    )
    assert len(on_servers) == len(talks)
    assert in_process == on_servers
