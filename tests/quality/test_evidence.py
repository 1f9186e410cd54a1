"""The form of `bench.evidence` on real servers finds what is recorded, as that in this process."""

from __future__ import annotations

from bench.engines import InProcess, servers
from bench.evidence.__main__ import quick, worse_than_recorded


def test_the_default_finds_as_much_evidence_as_recorded() -> None:
    """A guard, not a bar: record again when the code gets better, see `bench/README.md`.

    Both forms have the same evidence for all but 2 questions.
    """
    with servers(16_000) as made:
        on_servers = quick(made)
    assert worse_than_recorded(on_servers) == []
    in_process = quick(InProcess())
    differing = [
        (real["conversation"], real["question"])
        for real, fast in zip(on_servers, in_process, strict=True)
        if real["whole"] != fast["whole"]
    ]
    assert len(differing) <= 2, differing
