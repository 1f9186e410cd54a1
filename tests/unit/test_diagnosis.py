"""From what a server was found to do, to what should be changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoke_proxy.core.request.look_ahead import Stability
from evoke_proxy.core.servers.diagnosis import (
    DENSE,
    NEVER,
    RECURRENT,
    UNKNOWN,
    WINDOWED,
    Findings,
    Reuse,
    Speeds,
    advice,
)

GOOD = Stability(boundary=True, ahead=True)
FINE = Findings(
    build="b",
    model="m",
    n_slots=4,
    n_ctx=4096,
    media=False,
    native_disk=False,
    no_saves="",
    no_files="",
    ram_cache=True,
    clears_idle=False,
    plain=GOOD,
    tools=GOOD,
    reuse=Reuse(1000, 800, 1000, 800, 1000, 800),
    speeds=Speeds(1000, 1.0, 0.1, 0.1, 0.1, 10),
)


@pytest.mark.parametrize(
    ("restored", "memory"),
    [
        ((1000, 800), DENSE),
        ((1000, 0), RECURRENT),
        ((1000, 0, True), WINDOWED),
        ((0, 0), NEVER),
        ((None, None), UNKNOWN),
    ],
)
def test_a_memory_is_told_by_what_a_restore_saves(
    restored: tuple[int | bool | None, ...], memory: str
) -> None:
    assert Reuse(1000, 800, 1000, 800, *restored).memory == memory


def test_nothing_is_to_be_changed_where_all_is_well() -> None:
    assert advice(FINE) == []


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (replace(FINE, no_saves="no"), "--slot-save-path"),
        (replace(FINE, no_files="elsewhere"), "elsewhere"),
        (replace(FINE, reuse=Reuse(1000, 800, 1000, 800, 0, 0)), "start it with --swa-full"),
        (
            replace(FINE, reuse=Reuse(1000, 800, 1000, 800, 1000, 0, True, True)),
            "start it without --swa-full",
        ),
        (replace(FINE, clears_idle=True), "--no-cache-idle-slots"),
        (replace(FINE, native_disk=True), "disk cache of its own"),
        (replace(FINE, media=True), "projector"),
        (replace(FINE, tools=Stability(False, False)), "with tools"),
        (replace(FINE, plain=Stability(False, True)), "rewrites earlier messages of the user"),
        (
            replace(
                FINE,
                plain=Stability(True, False),
                reuse=Reuse(1000, 800, 1000, 800, 1000, 0),
            ),
            "decoded ahead",
        ),
        (replace(FINE, speeds=Speeds(1000, 0.1, 0.1, 0.1, 0.1, 10)), "no faster"),
    ],
)
def test_each_finding_has_its_advice(found: Findings, says: str) -> None:
    (only, *_) = advice(found)
    assert says in only


def test_one_slot_needs_no_flag_against_clearing() -> None:
    assert advice(replace(FINE, n_slots=1, clears_idle=True)) == []
