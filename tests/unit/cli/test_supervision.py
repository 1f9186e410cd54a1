"""Supervising the processes of `evoke-proxy up`: restarts, back-off, stopping."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from evoke_proxy.cli import supervision
from evoke_proxy.cli.supervision import Child, backoff_s, describe


def child(log: Path, program: str) -> Child:
    return Child("it", [sys.executable, "-c", program], os.environ, log, 5.0)


def wait_until_ended(process: Child) -> None:
    deadline = time.monotonic() + 30
    while process.exit_code is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_restart_delay_doubles_up_to_a_limit() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 4, 5, 6, 20)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_crashed_process_is_restarted_and_its_last_lines_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = child(
        tmp_path / "log", "print(*range(40), sep='\\n', flush=True); import os; os._exit(3)"
    )
    process.start()
    wait_until_ended(process)
    assert not process.keep_running()
    printed = capsys.readouterr().err
    assert "it ended with exit status 3; it is started again in 1 s" in printed
    assert "| 39" in printed and "| 24" not in printed and "| 25" in printed
    deadline = time.monotonic() + 10
    while not process.keep_running():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    wait_until_ended(process)
    process.keep_running()
    assert "in 2 s" in capsys.readouterr().err


def test_a_process_that_ignores_sigterm_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"
    process = child(tmp_path / "log", program + "; time.sleep(60)")
    process.stop_s = 0.2
    process.start()
    deadline = time.monotonic() + 30
    while "up" not in process.tail():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.stop()
    assert process.exit_code == -signal.SIGKILL
    assert "is killed" in capsys.readouterr().err


def test_exit_codes_are_described_by_signal_or_status() -> None:
    assert describe(-9) == "SIGKILL"
    assert describe(1) == "exit status 1"


def test_a_log_file_that_was_deleted_ends_nothing(tmp_path: Path) -> None:
    one = child(tmp_path / "log", "import time; print('up', flush=True); time.sleep(60)")
    one.start()
    try:
        (tmp_path / "log").unlink()
        assert not one.keep_running() and one.exit_code is None and one.tail() == ""
    finally:
        one.kill()
    wait_until_ended(one)
    assert not one.keep_running() and one.n_crashes == 1


def test_an_exit_soon_after_the_start_differs_from_a_later_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = child(tmp_path / "log", "raise SystemExit(1)")
    one.start()
    wait_until_ended(one)
    assert one.exit_code == 1 and one.ended_early
    monkeypatch.setattr(supervision, "_STABLE_S", 0.0)
    assert not one.ended_early
