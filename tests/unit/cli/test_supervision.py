"""Supervising the processes of `evoke-proxy up`: restarts, back-off, stopping."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evoke_proxy.cli import supervision
from evoke_proxy.cli.supervision import Child, Stop, backoff_s, describe, say


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


def test_a_process_whose_log_cannot_be_written_is_started_and_prints_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("a file where its directory was")
    process = child(tmp_path / "state/log", "print('a line of the log', flush=True)")
    process.start()
    wait_until_ended(process)
    printed = capfd.readouterr()
    assert process.exit_code == 0 and "a line of the log" in printed.out
    assert "state/log cannot be written (" in printed.err and "start again" in printed.err


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


_PARENT = """
import os, signal, sys, time
from pathlib import Path
from evoke_proxy.cli.supervision import Child
program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
child = Child("it", [sys.executable, "-c", program + "; time.sleep(60)"], os.environ,
              Path(sys.argv[1]), 5.0, orphan_signal=signal.SIGKILL)
child.start()
while "1" not in child.tail():
    time.sleep(0.01)
print(child.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has this signal")
def test_a_child_that_ignores_sigterm_ends_with_its_killed_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}/stat").exists()
        parent.kill()
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_closed_terminal_stops_but_nohup_does_not() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        stop = Stop()
        stop.install()
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.wait() and stop.requested == 1
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        ignoring = Stop()
        ignoring.install()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not ignoring.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_message_for_a_closed_terminal_is_lost_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        with pytest.raises(BrokenPipeError):
            print("a message", file=broken, flush=True)
        monkeypatch.setattr(sys, "stderr", broken)
        say("stopping")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            broken.close()
