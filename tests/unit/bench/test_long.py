"""The long bench: the questions of its session."""

from __future__ import annotations

from bench import long


def test_a_long_session_asks_for_every_stated_fact_once() -> None:
    planned = long.sections(long.SEED)
    keys = [section.probe.fact.key for section in planned if section.probe]
    assert len(keys) == len(set(keys)) == long.FACTS
    text = ""
    for section in planned:
        assert section.probe is None or section.probe.fact.statement in text
        text += "" if section.probe else section.said
