from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from evoke_proxy.cli.supervision import Child, backoff_s, describe


def child(log: Path, program: str) -> Child:
    return Child("it", [sys.executable, "-c", program], os.environ, log, 5.0)


def until_ended(one: Child) -> None:
    deadline = time.monotonic() + 30
    while one.exit_code is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_delay_grows_to_a_limit() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 4, 5, 6, 20)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_crash_prints_the_last_lines_and_is_followed_by_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = child(
        tmp_path / "log", "print(*range(40), sep='\\n', flush=True); import os; os._exit(3)"
    )
    one.start()
    until_ended(one)
    assert not one.keep_running()
    printed = capsys.readouterr().err
    assert "it ended with exit status 3; it is started again in 1 s" in printed
    assert "| 39" in printed and "| 24" not in printed and "| 25" in printed
    deadline = time.monotonic() + 10
    while not one.keep_running():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    until_ended(one)
    one.keep_running()
    assert "in 2 s" in capsys.readouterr().err


def test_a_process_that_does_not_stop_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"
    one = child(tmp_path / "log", program + "; time.sleep(60)")
    one.stop_s = 0.2
    one.start()
    deadline = time.monotonic() + 30
    while "up" not in one.tail():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    one.stop()
    assert one.exit_code == -signal.SIGKILL
    assert "is killed" in capsys.readouterr().err


def test_exit_codes_for_a_person() -> None:
    assert describe(-9) == "SIGKILL"
    assert describe(1) == "exit status 1"
