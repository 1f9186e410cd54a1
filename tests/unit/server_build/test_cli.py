"""The command line of `build-server`: its output streams, exit status and interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from server_build_project import output_of, write_llama

from evoke_proxy.server_build.cache import cache_dir
from evoke_proxy.server_build.fetch import pin_directories, read_pin
from evoke_proxy.server_build.series import patches_dir, read_series

COMMAND = [sys.executable, "-m", "evoke_proxy.server_build"]
UNIQUE_SLEEP = f"sleep 300.{os.getpid()}"  # a command line that no other process has
SLOW = f"add_custom_target(slow COMMAND {UNIQUE_SLEEP})\nadd_dependencies(llama-server slow)\n"


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVOKE_CACHE", str(tmp_path / "cache"))
    return write_llama(tmp_path / "llama")


def command(llama: Path, *options: str) -> list[str]:
    return [*COMMAND, "--stock", "--source", str(llama), *options]


def run(llama: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(llama, *options), capture_output=True, text=True, timeout=120)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)


def running(command_line: str) -> bool:
    """Whether any process of this machine has exactly this command line."""
    expected = command_line.replace(" ", "\0").encode() + b"\0"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == expected:
                return True
        except OSError:
            continue  # the process has ended
    return False


def test_print_path_prints_only_the_path(llama: Path) -> None:
    first = run(llama, "--print-path", "--jobs", "1")
    assert first.returncode == 0, first.stderr
    path = Path(first.stdout.removesuffix("\n"))
    assert output_of(path) == "stock"
    assert "building llama-server (stock, -j1): 100 %" in first.stderr
    second = run(llama, "--print-path")
    assert (second.stdout, second.stderr) == (first.stdout, "")


def test_without_print_path_the_output_is_a_sentence(llama: Path) -> None:
    done = run(llama)
    assert done.stdout.startswith("llama-server (stock): /")


def test_a_failure_goes_to_stderr_with_status_one(llama: Path) -> None:
    (llama / "src/calm.cpp").write_text("not C++\n")
    done = run(llama, "--print-path")
    assert (done.returncode, done.stdout) == (1, "")
    assert "build-server: compiling llama-server failed" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_tools_name_their_packages(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    environment = os.environ | {"PATH": str(tmp_path / "empty")}
    done = subprocess.run(
        command(llama), capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 1
    assert "sudo apt-get install -y cmake git make gcc g++" in done.stderr


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_jobs_must_be_a_positive_number(llama: Path, jobs: str) -> None:
    assert run(llama, "--jobs", jobs).returncode == 2


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_no_process_and_resumes(
    llama: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    lists = llama / "CMakeLists.txt"
    quick = lists.read_text()
    lists.write_text(quick + SLOW)
    process = subprocess.Popen(
        command(llama),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # a test run in the background of a shell ignores SIGINT, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: running(UNIQUE_SLEEP))
    process.send_signal(stop)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "run it again to resume" in stderr
    assert not running(UNIQUE_SLEEP)
    lists.write_text(quick)
    done = run(llama, "--print-path")
    assert done.returncode == 0, done.stderr


def test_after_a_kill_the_next_builder_waits_only_for_the_compilers(llama: Path) -> None:
    lists = llama / "CMakeLists.txt"
    quick = lists.read_text()
    nap = UNIQUE_SLEEP.replace("300", "4", 1)
    lists.write_text(quick + SLOW.replace(UNIQUE_SLEEP, nap))
    process = subprocess.Popen(command(llama), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: running(nap))
    process.kill()
    process.wait()
    lists.write_text(quick)
    done = run(llama, "--print-path")
    assert done.returncode == 0, done.stderr
    assert f"started by process {process.pid}): waiting" in done.stderr
    assert output_of(Path(done.stdout.strip())) == "stock"


def test_source_reports_what_applies_and_builds_nothing_where_no_series_does(llama: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--source", str(llama)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (1, "")
    for name in pin_directories(patches_dir()):
        assert f"  series for {name}: 0001 no, 0002, " in done.stderr
    assert "build-server: no series applies exactly" in done.stderr
    assert not (cache_dir() / "trees").exists()


def test_the_server_of_an_installed_package_is_used_and_nothing_is_built(tmp_path: Path) -> None:
    folder = tmp_path / "evoke_proxy_server/bin"
    folder.mkdir(parents=True)
    folder.with_name("__init__.py").touch()
    (folder / "llama-server").touch(0o755)
    built_from = {
        "pin": read_pin(patches_dir()).sha256,
        "series": read_series(patches_dir()).digest,
    }
    (folder / "stamp.json").write_text(json.dumps(built_from))
    # Nothing can be built: there is no compiler.
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": "", "EVOKE_CACHE": str(tmp_path)}
    done = subprocess.run(
        [*COMMAND, "--print-path"], capture_output=True, text=True, timeout=120, env=env
    )
    assert (done.returncode, done.stdout) == (0, f"{folder / 'llama-server'}\n"), done.stderr


def test_an_unknown_pin_is_refused_with_those_there_are(llama: Path) -> None:
    done = subprocess.run([*COMMAND, "--pin", "b1"], capture_output=True, text=True, timeout=120)
    names = ", ".join(pin_directories(patches_dir()))
    assert done.returncode == 1
    assert f"build-server: 'b1' is not a pin: there are {names}" in done.stderr
