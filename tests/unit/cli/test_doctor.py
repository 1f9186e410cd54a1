"""`evoke-proxy doctor`: its advice about snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoke_proxy.cli.doctor import (
    DENSE,
    NEVER_RESTORED,
    RECURRENT,
    UNKNOWN,
    WINDOWED,
    Findings,
    Reuse,
    Speeds,
    advice,
)
from evoke_proxy.core.request.look_ahead import Stability

GOOD = Stability(boundary=True, ahead=True)
FINE = Findings(
    build="b",
    model="m",
    n_slots=4,
    n_ctx=4096,
    media=False,
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
        ((0, 0), NEVER_RESTORED),
        ((None, None), UNKNOWN),
    ],
)
def test_the_kind_of_memory_follows_from_reuse_after_a_restore(
    restored: tuple[int | bool | None, ...], memory: str
) -> None:
    assert Reuse(1000, 800, 1000, 800, *restored).memory == memory


def test_a_good_configuration_gets_no_advice() -> None:
    assert advice(FINE) == []


@pytest.mark.parametrize(
    ("findings", "text"),
    [
        (replace(FINE, no_saves="no"), "--slot-save-path"),
        (replace(FINE, no_files="elsewhere"), "elsewhere"),
        (replace(FINE, reuse=Reuse(1000, 800, 1000, 800, 0, 0)), "start it with --swa-full"),
        (
            replace(FINE, reuse=Reuse(1000, 800, 1000, 800, 1000, 0, True, True)),
            "start it without --swa-full",
        ),
        (replace(FINE, clears_idle=True), "--no-cache-idle-slots"),
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
        (replace(FINE, speeds=Speeds(1000, 0.1, 0.1, 0.1, 0.1, 10)), "as long as decoding"),
    ],
)
def test_a_finding_gets_the_advice_for_it(findings: Findings, text: str) -> None:
    assert text in advice(findings)[0]


def test_a_server_that_is_to_get_blocks_needs_no_directory_of_slots() -> None:
    unsaved = replace(FINE, no_saves="no")
    assert "--slot-save-path" in advice(unsaved)[0]
    assert advice(unsaved, gets_blocks=True) == []


def test_a_single_slot_gets_no_advice_about_idle_slots() -> None:
    assert advice(replace(FINE, n_slots=1, clears_idle=True)) == []
