"""Full, read-only or missing disks, clocks that jump, a server that hangs."""

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
from harness import PATIENCE_S, RunningProxy, ask, process_on, proxy, server_binary, until
from stock_deployment import Chat, Deployment, decoded

SMALL = {"min_tokens": 64, "look_ahead": False}


def _chat(number: int) -> Chat:
    said = f"{number} " + "one two three four " * 16
    return Chat([{"role": "user", "content": said}], {"evoke_session": f"s{number}"})


def _erase(port: int) -> None:
    assert ask(port, "POST", "/slots/0?action=erase").status == 200


def _saves(running: RunningProxy) -> dict[str, float]:
    """Saves that were made or not, by how they ended."""
    running.settled()
    found = running.engine.metrics.saves.collect()[0].samples
    return {s.labels["result"]: s.value for s in found if s.name.endswith("_total")}


class Mounted:
    """A disk of its own for the slots, 3 MiB, which can be filled and made read-only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def there(self) -> Iterator[None]:
        subprocess.run(_mount(self._folder, "-t", "tmpfs", "-o", "size=3m", "tmpfs"), check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(self._folder)], check=True)

    @contextmanager
    def full(self, port: int, running: RunningProxy) -> Iterator[None]:
        filler = self._folder / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        yield
        filler.unlink()

    @contextmanager
    def read_only(self, running: RunningProxy) -> Iterator[None]:
        """Nothing more can be written there; what is open stays so."""
        subprocess.run(_mount(self._folder, "--bind", str(self._folder)), check=True)
        try:
            subprocess.run(_mount(self._folder, "-o", "remount,bind,ro"), check=True)
            yield
        finally:
            subprocess.run(["umount", "-l", str(self._folder)], check=True)


class Limited:
    """The same for whoever may not mount anything: the server may write no file further than a
    page, nor find the place where to, and SQLite gives the errors of such disks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def there(self) -> Iterator[None]:
        # The signal that comes with the limit would end a server that no disk's error ends.
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
        vault = running.engine.server.strategies.snapshots.repository
        part = vault.new_part
        _index(running, "PRAGMA query_only = 1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vault, "new_part", lambda: f"nowhere/{part()}")
            yield
        _index(running, "PRAGMA query_only = 0")


def _mount(folder: Path, *options: str) -> list[str]:
    return ["mount", *options, str(folder)]


def _index(running: RunningProxy, statement: str) -> Any:
    """What the proxy's own connection to its index answers."""

    async def run() -> Any:
        repository = running.engine.server.strategies.snapshots.repository
        return repository._index._db.execute(statement).fetchone()

    return asyncio.run_coroutine_threadsafe(run(), running.loop).result(PATIENCE_S)


def _may_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        mount = _mount(Path(folder), "-t", "tmpfs", "tmpfs")
        if subprocess.run(mount, capture_output=True).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
        return True


@pytest.mark.parametrize("disk", [Limited, *([Mounted] if _may_mount() else [])])
def test_a_full_read_only_or_emptied_disk_costs_only_snapshots(
    disk: type[Limited | Mounted], tmp_path: Path
) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    way = disk(folder)
    with way.there():
        deployment = Deployment(folder, "", ("--cache-ram", "0"))
        with deployment.server() as port, deployment.proxy(port, **SMALL) as running:
            first, number = _chat(0), 1
            first.ask(running.port)
            wanted = first.said
            assert _saves(running)["saved"] == 1

            with way.full(port, running):
                number = _check_degraded_save(running, number, "failed", "skipped_room")
            with way.read_only(running):
                number = _check_degraded_save(running, number, "failed")

            for path in deployment.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            _erase(port)
            first.ask(running.port)
            assert first.said == wanted
            number = _check_degraded_save(running, number, "saved", "failed")
            assert ask(running.port, "GET", "/evoke/health").status == 200
        with deployment.server() as port, deployment.proxy(port, **SMALL) as running:
            first.ask(running.port)
            assert first.said == wanted
            assert _saves(running)["saved"] == 1
            for _ in range(2):
                _erase(port)
                first.ask(running.port)
                assert first.said == wanted
                running.settled()
            assert running.metric("evoke_snapshot_restores_total", result="useful") >= 1
        assert not list(deployment.folder.glob("*.evoke-part"))


def _check_degraded_save(running: RunningProxy, number: int, *results: str) -> int:
    """Another conversation is answered all the same, and one of these says what became of it."""
    before = _saves(running)
    chat = _chat(number)
    chat.ask(running.port)
    after = _saves(running)
    moved = {name for name in after if after[name] > before.get(name, 0)}
    assert moved & set(results), (moved, results)
    return number + 1


def test_a_removed_directory_costs_only_snapshots(tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    deployment = Deployment(folder, "", ("--cache-ram", "0"))
    with deployment.server() as port, deployment.proxy(port, **SMALL) as running:
        chat = _chat(0)
        chat.ask(running.port)
        wanted = chat.said
        running.settled()
        shutil.rmtree(folder)
        for _ in range(2):
            _erase(port)
            chat.ask(running.port)
            assert chat.said == wanted
            running.settled()
        assert running.metric("evoke_snapshot_corrupt_total", reason="missing") == 1
        assert ask(running.port, "GET", "/evoke/health").status == 200
    folder.mkdir(exist_ok=True)
    with deployment.server() as port, deployment.proxy(port, **SMALL) as running:
        chat.ask(running.port)
        assert chat.said == wanted and _saves(running)["saved"] == 1


JUMPS = {"a month back": -30 * 86400.0, "an hour on": 3600.0, "a month on": 30 * 86400.0}


@pytest.mark.parametrize("name", JUMPS)
def test_a_clock_that_jumps_loses_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, real = Deployment(tmp_path, "", ("--cache-ram", "0")), time.time
    with deployment.server() as port:
        with deployment.proxy(port, **SMALL) as running:
            chat = _chat(0)
            chat.ask(running.port)
            wanted = chat.said
            running.settled()
            # The first time it looks whether llama-server has it in memory.
            _erase(port)
            chat.ask(running.port)
            running.settled()
            for jump_s in (JUMPS[name], 0.0, -JUMPS[name], JUMPS[name]):
                monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
                _erase(port)
                before = decoded(port)
                chat.ask(running.port)
                assert chat.said == wanted and decoded(port) - before <= 8
                running.settled()
            useful = running.metric("evoke_snapshot_restores_total", result="useful")
            assert useful >= 4
        if name == "a month on":  # for the next proxy a month has passed, which is too long
            monkeypatch.setattr(time, "time", real)
        with deployment.proxy(port, **SMALL) as running:
            assert ask(running.port, "GET", "/evoke/ready").status == 200
            for _ in range(2):
                _erase(port)
                chat.ask(running.port)
                assert chat.said == wanted
                running.settled()
            assert running.metric("evoke_snapshot_restores_total", result="useful") >= 1


def test_a_hanging_server_delays_only_its_own_requests(patched_port: int) -> None:
    """Stopped, its connections are taken and never answered: half-open for whoever asks."""
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"messages": messages, "max_tokens": 4, "temperature": 0}).encode()
    with proxy(patched_port, policy__budget=320, upstream__call_timeout_s=1.0) as running:
        whole = ask(running.port, "POST", "/v1/chat/completions", body).body
        running.quiet()
        answers: list[bytes] = []

        def wait() -> None:
            answers.append(ask(running.port, "POST", "/v1/chat/completions", body).body)

        server, waiting = process_on(patched_port), threading.Thread(target=wait)
        os.kill(server, signal.SIGSTOP)
        try:
            waiting.start()
            # Who waits for the server would wait for as long as it is stopped.
            assert ask(running.port, "GET", "/evoke/health").status == 200
            assert ask(running.port, "GET", "/evoke/ready").status == 503
            time.sleep(1.5)
            assert answers == [], "an answer may take as long as it takes"
        finally:
            os.kill(server, signal.SIGCONT)
        waiting.join()
        said = [json.loads(answer)["choices"][0]["message"] for answer in (whole, *answers)]
        assert said[0] == said[1]
        assert running.metric("evoke_upstream_errors_total", kind="upstream_timeout") >= 1
        until(lambda: ask(running.port, "GET", "/evoke/ready").status == 200)
        assert ask(running.port, "POST", "/v1/chat/completions", body).status == 200
