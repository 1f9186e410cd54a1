"""`bench.evidence` finds as much evidence as recorded, on real servers and in one process."""

from __future__ import annotations

from bench.engines import InProcess, servers
from bench.evidence.__main__ import quick, worse_than_recorded


def test_the_default_finds_as_much_evidence_as_recorded() -> None:
    """The record is not a target: record again after an improvement, see `bench/README.md`.

    Real servers and one process have the same evidence for all but 2 questions.
    """
    with servers(16_000) as engine:
        on_servers = quick(engine)
    assert worse_than_recorded(on_servers) == []
    in_process = quick(InProcess())
    differing = [
        (real["conversation"], real["question"])
        for real, fast in zip(on_servers, in_process, strict=True)
        if real["whole"] != fast["whole"]
    ]
    assert len(differing) <= 2, differing
