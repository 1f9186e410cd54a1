"""Faults of the environment: full, read-only or missing disks, clock jumps, a hanging server."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import TIMEOUT_S, RunningProxy, ask, process_on, proxy, server_binary, until
from stock_deployment import Chat, Deployment, decoded

SMALL = {"min_tokens": 64, "look_ahead": False}


def _chat(number: int) -> Chat:
    text = f"{number} " + "one two three four " * 16
    return Chat([{"role": "user", "content": text}], {"evoke_session": f"s{number}"})


def _erase(port: int) -> None:
    assert ask(port, "POST", "/slots/0?action=erase").status == 200


def _saves(running: RunningProxy) -> dict[str, float]:
    """Wait for background tasks; returns the number of saves by their result."""
    running.wait_for_background()
    samples = running.gateway.metrics.saves.collect()[0].samples
    return {s.labels["result"]: s.value for s in samples if s.name.endswith("_total")}


class MountedDisk:
    """A mounted file system of 3 MiB for slot files, which can be filled or made read-only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def available(self) -> Iterator[None]:
        """Mount it for the block."""
        subprocess.run(_mount(self._folder, "-t", "tmpfs", "-o", "size=3m", "tmpfs"), check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(self._folder)], check=True)

    @contextmanager
    def full(self, port: int, running: RunningProxy) -> Iterator[None]:
        """Fill it for the block."""
        filler = self._folder / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        yield
        filler.unlink()

    @contextmanager
    def read_only(self, running: RunningProxy) -> Iterator[None]:
        """Make it read-only for the block; open files stay open."""
        subprocess.run(_mount(self._folder, "--bind", str(self._folder)), check=True)
        try:
            subprocess.run(_mount(self._folder, "-o", "remount,bind,ro"), check=True)
            yield
        finally:
            subprocess.run(["umount", "-l", str(self._folder)], check=True)


class SimulatedDisk:
    """The same faults where mounting is not permitted.

    A full disk: a limit on the size of llama-server's files, and on the pages of the SQLite index.
    A read-only disk: a path that does not exist, and a read-only SQLite connection.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def available(self) -> Iterator[None]:
        # The size limit also sends SIGXFSZ, which would end llama-server.
        script = self._folder.with_name("llama-server")
        binary = server_binary(patched=False)
        script.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec {shlex.quote(binary)} \"$@\"\n")
        script.chmod(0o700)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EVOKE_STOCK_SERVER", str(script))
            yield

    @contextmanager
    def full(self, port: int, running: RunningProxy) -> Iterator[None]:
        server = process_on(port)
        before = resource.prlimit(server, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        (pages,) = _index(running, "PRAGMA page_count")
        _index(running, f"PRAGMA max_page_count = {pages}")
        yield
        _index(running, "PRAGMA max_page_count = 1000000")
        resource.prlimit(server, resource.RLIMIT_FSIZE, before)

    @contextmanager
    def read_only(self, running: RunningProxy) -> Iterator[None]:
        repository = running.gateway.server.strategies.snapshots.repository
        new_part = repository.new_part
        _index(running, "PRAGMA query_only = 1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(repository, "new_part", lambda: f"nowhere/{new_part()}")
            yield
        _index(running, "PRAGMA query_only = 0")


def _mount(folder: Path, *options: str) -> list[str]:
    return ["mount", *options, str(folder)]


def _index(running: RunningProxy, statement: str) -> Any:
    """Run a statement on the proxy's connection to its SQLite index; returns the first row."""

    async def run() -> Any:
        repository = running.gateway.server.strategies.snapshots.repository
        return repository._index._db.execute(statement).fetchone()

    return asyncio.run_coroutine_threadsafe(run(), running.loop).result(TIMEOUT_S)


def _may_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        mount = _mount(Path(folder), "-t", "tmpfs", "tmpfs")
        if subprocess.run(mount, capture_output=True).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
        return True


@pytest.mark.parametrize("disk_class", [SimulatedDisk, *([MountedDisk] if _may_mount() else [])])
def test_requests_are_answered_while_the_disk_is_full_read_only_or_emptied(
    disk_class: type[SimulatedDisk | MountedDisk], tmp_path: Path
) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    disk = disk_class(folder)
    with disk.available():
        deployment = Deployment(folder, "", ("--cache-ram", "0"))
        with deployment.server() as port, deployment.proxy(port, **SMALL) as running:
            first, number = _chat(0), 1
            first.ask(running.port)
            expected = first.reply
            assert _saves(running)["saved"] == 1

            with disk.full(port, running):
                number = _check_degraded_save(running, number, "failed", "skipped_room")
            with disk.read_only(running):
                number = _check_degraded_save(running, number, "failed")

            for path in deployment.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            _erase(port)
            first.ask(running.port)
            assert first.reply == expected
            number = _check_degraded_save(running, number, "saved", "failed")
            assert ask(running.port, "GET", "/evoke/health").status == 200
        with deployment.server() as port, deployment.proxy(port, **SMALL) as running:
            first.ask(running.port)
            assert first.reply == expected
            assert _saves(running)["saved"] == 1
            for _ in range(2):
                _erase(port)
                first.ask(running.port)
                assert first.reply == expected
                running.wait_for_background()
            assert running.metric("evoke_snapshot_restores_total", result="useful") >= 1
        assert not list(deployment.folder.glob("*.evoke-part"))


def test_saves_that_fail_later_are_a_problem_until_one_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def state() -> tuple[str, list[str], list[dict[str, str]]]:
        found = json.loads(ask(running.port, "GET", "/evoke/ready").body)
        facts = json.loads(ask(running.port, "GET", "/evoke/overview").body)
        return found["status"], found["reasons"], facts["problems"]

    caplog.set_level("INFO")
    deployment = Deployment(tmp_path, "", ("--cache-ram", "0"))
    with deployment.server() as port, deployment.proxy(port, **SMALL) as running:
        number = _check_degraded_save(running, 0, "saved")
        assert state() == ("ready", [], [])
        with SimulatedDisk(tmp_path).read_only(running):
            for _ in range(2):
                number = _check_degraded_save(running, number, "failed")
            status, reasons, (problem,) = state()
            assert (status, reasons) == ("degraded", ["snapshots:not_saved"])
            assert problem["problem"].startswith("the latest snapshot was not saved: llama-server")
            assert "leave room on the disk" in problem["fix"]
            shown = json.loads(ask(running.port, "GET", "/evoke/status").body)
            assert shown["degraded"] and not shown["snapshots_off"], "earlier ones are restored"
        number = _check_degraded_save(running, number, "saved")
        running.wait_for_background()
        assert state() == ("ready", [], [])
    warnings = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
    assert sum(problem["fix"] in text for text in warnings) == 1
    assert any("slots are saved again" in text for text in caplog.messages)


def _check_degraded_save(running: RunningProxy, number: int, *results: str) -> int:
    """Answer another conversation; its save must have one of these results."""
    before = _saves(running)
    chat = _chat(number)
    chat.ask(running.port)
    after = _saves(running)
    increased = {name for name in after if after[name] > before.get(name, 0)}
    assert increased & set(results), (increased, results)
    return number + 1


def test_requests_are_answered_after_the_snapshot_directory_was_removed(tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    deployment = Deployment(folder, "", ("--cache-ram", "0"))
    with deployment.server() as port, deployment.proxy(port, **SMALL) as running:
        chat = _chat(0)
        chat.ask(running.port)
        expected = chat.reply
        running.wait_for_background()
        shutil.rmtree(folder)
        for _ in range(2):
            _erase(port)
            chat.ask(running.port)
            assert chat.reply == expected
            running.wait_for_background()
        assert running.metric("evoke_snapshot_corrupt_total", reason="missing") == 1
        assert ask(running.port, "GET", "/evoke/health").status == 200
    folder.mkdir(exist_ok=True)
    with deployment.server() as port, deployment.proxy(port, **SMALL) as running:
        chat.ask(running.port)
        assert chat.reply == expected and _saves(running)["saved"] == 1


JUMPS = {"a month back": -30 * 86400.0, "an hour on": 3600.0, "a month on": 30 * 86400.0}


@pytest.mark.parametrize("name", JUMPS)
def test_snapshots_are_restored_after_the_clock_jumps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, real = Deployment(tmp_path, "", ("--cache-ram", "0")), time.time
    with deployment.server() as port:
        with deployment.proxy(port, **SMALL) as running:
            chat = _chat(0)
            chat.ask(running.port)
            expected = chat.reply
            running.wait_for_background()
            # At first the proxy expects the rows in llama-server's own RAM cache.
            _erase(port)
            chat.ask(running.port)
            running.wait_for_background()
            for jump_s in (JUMPS[name], 0.0, -JUMPS[name], JUMPS[name]):
                monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
                _erase(port)
                before = decoded(port)
                chat.ask(running.port)
                assert chat.reply == expected and decoded(port) - before <= 8
                running.wait_for_background()
            useful = running.metric("evoke_snapshot_restores_total", result="useful")
            assert useful >= 4
        if name == "a month on":  # the next proxy would consider the snapshots too old
            monkeypatch.setattr(time, "time", real)
        with deployment.proxy(port, **SMALL) as running:
            assert ask(running.port, "GET", "/evoke/ready").status == 200
            for _ in range(2):
                _erase(port)
                chat.ask(running.port)
                assert chat.reply == expected
                running.wait_for_background()
            assert running.metric("evoke_snapshot_restores_total", result="useful") >= 1


def test_a_hanging_server_delays_only_its_own_requests(patched_port: int) -> None:
    """A stopped process accepts connections and does not answer them."""
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"messages": messages, "max_tokens": 4, "temperature": 0}).encode()
    with proxy(patched_port, policy__budget=320, upstream__call_timeout_s=1.0) as running:
        before = ask(running.port, "POST", "/v1/chat/completions", body).body
        running.wait_until_idle()
        answers: list[bytes] = []

        def wait() -> None:
            answers.append(ask(running.port, "POST", "/v1/chat/completions", body).body)

        server, waiting = process_on(patched_port), threading.Thread(target=wait)
        os.kill(server, signal.SIGSTOP)
        try:
            waiting.start()
            # These do not wait for llama-server.
            assert ask(running.port, "GET", "/evoke/health").status == 200
            assert ask(running.port, "GET", "/evoke/ready").status == 503
            time.sleep(1.5)
            assert answers == [], "a waiting chat request was answered"
        finally:
            os.kill(server, signal.SIGCONT)
        waiting.join()
        replies = [json.loads(answer)["choices"][0]["message"] for answer in (before, *answers)]
        assert replies[0] == replies[1]
        assert running.metric("evoke_upstream_errors_total", kind="upstream_timeout") >= 1
        until(lambda: ask(running.port, "GET", "/evoke/ready").status == 200)
        assert ask(running.port, "POST", "/v1/chat/completions", body).status == 200
