"""The steady clock: setting the system clock expires nothing and changes no order."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository_fixtures import TOKENS, add_snapshot, open_repository

from evoke_proxy.adapters.clock import SteadyClock, uptime_s
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.snapshot_files import INDEX
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.config import NormaliseConfig
from evoke_proxy.engine.parsing.parser import Normalizer

DAY = 86_400.0
JUMPS = [30 * DAY, 3600.0, -3600.0, -30 * DAY]


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the system clock ahead of the real time by a number of seconds."""
    real_time = time.time

    def set_clock(ahead_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real_time() + ahead_s)

    return set_clock


def test_the_steady_clock_does_not_jump(jump: Any) -> None:
    clock = SteadyClock()
    assert clock.now() == pytest.approx(time.time(), abs=1.0)
    times = [clock.now()]
    for ahead_s in JUMPS:
        jump(ahead_s)
        times.append(clock.now())
    assert times == sorted(times) and times[-1] - times[0] < 60
    assert uptime_s() <= uptime_s()


@pytest.mark.parametrize("ahead_s", JUMPS)
def test_a_jump_expires_no_snapshot_and_no_session(
    tmp_path: Path, jump: Any, ahead_s: float
) -> None:
    metrics = Metrics()
    with open_repository(tmp_path / "slots", metrics, max_age_h=1.0) as repository:
        first = add_snapshot(repository, TOKENS, "first")
        repository.put_record(Record("a", "t", repository.clock.now(), b"record"))
        jump(ahead_s)
        second = add_snapshot(repository, TOKENS[::-1].copy(), "second")
        repository.end_restore(first, useful=True)
        repository.put_record(Record("b", "t", repository.clock.now(), b"record"))
        repository.trim()
        assert [record.id for record in repository.records()] == ["b", "a"]
        used = {item.id: item.used for item in repository.snapshots}
        assert used[first.id] >= used[second.id] >= second.created >= first.created
        assert {item.branch for item in repository.snapshots} == {"first", "second"}


@pytest.mark.parametrize("ahead_s", [-60 * 365 * DAY, -30 * DAY, -3600.0])
def test_a_clock_set_back_before_the_start_continues_from_the_stored_time(
    tmp_path: Path, jump: Any, ahead_s: float
) -> None:
    """This happens on a machine whose clock has no battery and is set from the network."""
    with open_repository(tmp_path / "slots", max_age_h=1.0) as repository:
        old = add_snapshot(repository, TOKENS, "old")
    jump(ahead_s)
    with open_repository(tmp_path / "slots", max_age_h=1.0) as repository:
        new = add_snapshot(repository, TOKENS[::-1].copy(), "new")
        assert new.created >= old.created
    jump(0.0)
    with open_repository(tmp_path / "slots", max_age_h=1.0) as repository:
        assert {item.branch for item in repository.snapshots} == {"old", "new"}


@pytest.mark.parametrize(
    "wrong",
    [time.time() + 400 * DAY, 2.0**40, 1e300, float("inf")],
    ids=["in 400 days", "2**40", "1e300", "inf"],
)
def test_a_damaged_time_in_the_index_expires_no_snapshot(tmp_path: Path, wrong: float) -> None:
    with open_repository(tmp_path / "slots", max_age_h=1.0) as repository:
        for number in range(3):
            add_snapshot(repository, np.roll(TOKENS, number), f"branch {number}")
    with sqlite3.connect(tmp_path / "slots" / INDEX) as db:
        db.execute("UPDATE snapshots SET used = ? WHERE branch = 'branch 1'", (wrong,))
    db.close()
    with open_repository(tmp_path / "slots", max_age_h=1.0) as repository:
        assert len(repository.snapshots) == 3
        assert all(item.used <= repository.clock.now() for item in repository.snapshots)
        assert repository.clock.now() == pytest.approx(time.time(), abs=60)
        add_snapshot(repository, TOKENS[::-1].copy(), "later")
        assert len(repository.snapshots) == 4


def test_a_normalised_date_does_not_change_with_the_system_clock(jump: Any) -> None:
    normaliser = Normalizer(NormaliseConfig(dates_h=1.0), Metrics())

    def normalised(day: int) -> bytes:
        body = b'{"messages":[{"role":"system","content":"Today is 2026-11-%02d."}]}' % day
        return normaliser.apply(body, "chat", "t")

    first = normalised(10)
    for ahead_s in JUMPS:
        jump(ahead_s)
        assert normalised(11) == first
