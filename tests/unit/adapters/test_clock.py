"""Setting the system's clock expires nothing, changes no order and stops nothing."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository_fixtures import TOKENS, kept, vault

from evoke_proxy.adapters.clock import SteadyClock, uptime_s
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.snapshot_files import INDEX
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.config import NormaliseConfig
from evoke_proxy.engine.parsing.normalizer import Normalizer

DAY = 86_400.0
JUMPS = [30 * DAY, 3600.0, -3600.0, -30 * DAY]


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the system's clock ahead of the true time by so many seconds."""
    true = time.time

    def set_clock(ahead_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: true() + ahead_s)

    return set_clock


def test_the_steady_clock_does_not_jump(jump: Any) -> None:
    clock = SteadyClock()
    assert clock.now() == pytest.approx(time.time(), abs=1.0)
    seen = [clock.now()]
    for ahead_s in JUMPS:
        jump(ahead_s)
        seen.append(clock.now())
    assert seen == sorted(seen) and seen[-1] - seen[0] < 60
    assert uptime_s() <= uptime_s()


@pytest.mark.parametrize("ahead_s", JUMPS)
def test_a_jump_expires_no_snapshot_and_no_session(
    tmp_path: Path, jump: Any, ahead_s: float
) -> None:
    metrics = Metrics()
    with vault(tmp_path / "slots", metrics, max_age_h=1.0) as opened:
        first = kept(opened, TOKENS, "first")
        opened.put_record(Record("a", "t", opened.clock.now(), b"record"))
        jump(ahead_s)
        second = kept(opened, TOKENS[::-1].copy(), "second")
        opened.end_restore(first, useful=True)
        opened.put_record(Record("b", "t", opened.clock.now(), b"record"))
        opened.trim()
        assert [record.id for record in opened.records()] == ["b", "a"]
        used = {item.id: item.used for item in opened.snapshots}
        assert used[first.id] >= used[second.id] >= second.created >= first.created
        assert {item.branch for item in opened.snapshots} == {"first", "second"}


@pytest.mark.parametrize("ahead_s", [-60 * 365 * DAY, -30 * DAY, -3600.0])
def test_a_clock_set_back_before_the_start_continues_from_the_stored_time(
    tmp_path: Path, jump: Any, ahead_s: float
) -> None:
    """As on a machine without a battery, whose clock is set once the network is there."""
    with vault(tmp_path / "slots", max_age_h=1.0) as opened:
        old = kept(opened, TOKENS, "old")
    jump(ahead_s)
    with vault(tmp_path / "slots", max_age_h=1.0) as opened:
        new = kept(opened, TOKENS[::-1].copy(), "new")
        assert new.created >= old.created
    jump(0.0)
    with vault(tmp_path / "slots", max_age_h=1.0) as opened:
        assert {item.branch for item in opened.snapshots} == {"old", "new"}


@pytest.mark.parametrize(
    "wrong",
    [time.time() + 400 * DAY, 2.0**40, 1e300, float("inf")],
    ids=["in 400 days", "2**40", "1e300", "inf"],
)
def test_one_damaged_time_expires_nothing_else(tmp_path: Path, wrong: float) -> None:
    with vault(tmp_path / "slots", max_age_h=1.0) as opened:
        for number in range(3):
            kept(opened, np.roll(TOKENS, number), f"branch {number}")
    with sqlite3.connect(tmp_path / "slots" / INDEX) as db:
        db.execute("UPDATE snapshots SET used = ? WHERE branch = 'branch 1'", (wrong,))
    db.close()
    with vault(tmp_path / "slots", max_age_h=1.0) as opened:
        assert len(opened.snapshots) == 3
        assert all(item.used <= opened.clock.now() for item in opened.snapshots)
        assert opened.clock.now() == pytest.approx(time.time(), abs=60)
        kept(opened, TOKENS[::-1].copy(), "later")
        assert len(opened.snapshots) == 4


def test_normalized_dates_do_not_depend_on_changes_of_the_clock(jump: Any) -> None:
    normaliser = Normalizer(NormaliseConfig(dates_h=1.0), Metrics())

    def told(day: int) -> bytes:
        body = b'{"messages":[{"role":"system","content":"Today is 2026-11-%02d."}]}' % day
        return normaliser.apply(body, "chat", "t")

    first = told(10)
    for ahead_s in JUMPS:
        jump(ahead_s)
        assert told(11) == first
