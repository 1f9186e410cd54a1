"""Faults of snapshots on the real server: no crash and no wrong answer."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from damage import damage
from fault_injector import fault_injector
from harness import TIMEOUT_S, RunningProxy, ask, process_on, until
from proxy_process import ProxyProcess
from stock_deployment import SAVE_ALWAYS, Chat, Deployment, decoded, long_chat

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository

DAMAGES = 200
SMALL = {"min_tokens": 64, "look_ahead": False, "max_count": 8}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return Deployment(tmp_path_factory.mktemp("slots"), "", ("--cache-ram", "0"))


@pytest.fixture(scope="module")
def running(deployment: Deployment) -> Iterator[tuple[int, RunningProxy]]:
    """A stock server's port, and a proxy in front of it that saves small chats too.

    It has learnt that a slot found empty was not emptied into memory, which it tries first.
    """
    with deployment.server() as port, deployment.proxy(port, **SMALL) as proxied:
        chat = _chat(9)
        for _ in range(2):
            chat.ask(proxied.port)
            proxied.wait_for_background()
            _erase(port)
        command = SnapshotRepository(SnapshotsConfig(directory=str(deployment.folder)))
        command.open(claim=False)
        for snapshot in list(command.snapshots):
            command.delete(snapshot, "test")
        command.close()
        yield port, proxied


def _chat(number: int) -> Chat:
    """A chat of about a hundred tokens, unlike every other from its first word, and no side request
    of theirs."""
    said = f"{number} " + "one two three four " * 16
    return Chat([{"role": "user", "content": said}], {"evoke_session": f"s{number}"})


def _erase(port: int) -> None:
    """What a restart, a sleep or another conversation does to a slot."""
    assert ask(port, "POST", "/slots/0?action=erase").status == 200


def _corrupt(running: RunningProxy) -> float:
    """How many snapshots were set aside so far."""
    found = running.gateway.metrics.snapshots_bad.collect()[0].samples
    return sum(sample.value for sample in found if sample.name.endswith("_total"))


def test_damaged_files_are_not_restored_and_answers_are_correct(
    deployment: Deployment, running: tuple[int, RunningProxy]
) -> None:
    port, proxied = running
    chat, how = _chat(0), random.Random(7)
    chat.ask(proxied.port)
    proxied.wait_for_background()
    wanted, before = chat.reply, _corrupt(proxied)
    for _ in range(DAMAGES):
        (path,) = deployment.files()
        damage(path, how)
        _erase(port)
        cached, new = chat.ask(proxied.port)
        assert chat.reply == wanted and cached + new > 64
        proxied.wait_for_background()
    assert _corrupt(proxied) - before == DAMAGES
    assert proxied.metric("evoke_snapshot_restores_total", result="quarantined") == DAMAGES
    assert proxied.metric("evoke_snapshot_restores_total", result="useful") == 0
    # the last one is whole, and is restored
    _erase(port)
    decoded_before = decoded(port)
    chat.ask(proxied.port)
    assert chat.reply == wanted and decoded(port) - decoded_before <= 8
    proxied.wait_for_background()
    assert proxied.metric("evoke_snapshot_restores_total", result="useful") == 1


def test_a_missing_file_is_not_restored_so_the_slot_keeps_its_rows(
    deployment: Deployment, running: tuple[int, RunningProxy]
) -> None:
    port, proxied = running
    chat = long_chat(300, 5)  # long enough to be worth a restore
    chat.messages.pop()
    chat.ask(proxied.port)
    proxied.wait_for_background()
    for path in deployment.files():
        path.unlink()
    _erase(port)
    asked = _noting(proxied, "restore")
    chat.ask(proxied.port)
    proxied.wait_for_background()
    assert asked == []
    assert proxied.metric("evoke_snapshot_corrupt_total", reason="missing") == 1


def test_a_slot_emptied_before_its_save_makes_no_snapshot(
    deployment: Deployment, running: tuple[int, RunningProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, proxied = running
    save, before = StockApi.save, deployment.files()

    async def emptied(calls: StockApi, slot: int, name: str) -> Any:
        await calls.erase(slot)
        return await save(calls, slot, name)

    with monkeypatch.context() as patch:
        patch.setattr(StockApi, "save", emptied)
        _chat(2).ask(proxied.port)
    proxied.wait_for_background()
    assert proxied.metric("evoke_snapshot_saves_total", result="emptied") == 1
    assert deployment.files() == before and not list(deployment.folder.glob("*.evoke-part"))


def test_a_full_disk_costs_the_snapshot_only(
    deployment: Deployment, running: tuple[int, RunningProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, proxied = running
    part, before = deployment.folder / "full.evoke-part", deployment.files()
    part.symlink_to("/dev/full")
    chat = _chat(3)
    with monkeypatch.context() as patch:
        patch.setattr(
            proxied.gateway.server.strategies.snapshots.repository, "new_part", lambda: part.name
        )
        chat.ask(proxied.port)
        proxied.wait_for_background()
    assert proxied.metric("evoke_snapshot_saves_total", result="failed") == 1
    assert deployment.files() == before and not part.is_symlink()


def test_no_save_starts_without_disk_space_for_it(tmp_path: Path) -> None:
    with Deployment(tmp_path).server_and_proxy(**SMALL | {"min_free_mib": 1 << 30}) as proxied:
        _chat(4).ask(proxied.port)
        proxied.wait_for_background()
        assert proxied.metric("evoke_snapshot_saves_total", result="skipped_room") == 1


@pytest.mark.parametrize("other", [("-ctk", "q8_0", "-ctv", "q8_0"), ("-fa", "off")], ids=" ".join)
def test_a_snapshot_is_restored_only_with_the_same_cache_layout(
    other: tuple[str, ...], tmp_path: Path
) -> None:
    """No answer of a stock server says how its is: a file of it does."""
    chat = long_chat(300)
    alike = Deployment(tmp_path, "", ("-fa", "on"))
    with alike.server_and_proxy(look_ahead=False) as proxied:
        chat.ask(proxied.port, "Begin.")
        proxied.wait_for_background()
    for deployment, useful in ((Deployment(tmp_path, "", other), 0), (alike, 1)):
        again = long_chat(300)
        with deployment.server_and_proxy(look_ahead=False) as proxied:
            cached, new = again.ask(proxied.port, "Begin.")
            proxied.wait_for_background()
            assert cached + new > 900 and again.reply
            assert proxied.metric("evoke_snapshot_restores_total", result="useful") == useful
            for bad in ("refused", "failed", "wasted"):
                assert proxied.metric("evoke_snapshot_restores_total", result=bad) == 0


@pytest.mark.parametrize("during", ["save", "restore"])
def test_a_file_that_killed_a_server_is_not_restored_again(during: str, tmp_path: Path) -> None:
    deployment, chat = Deployment(tmp_path, "", ("--cache-ram", "0")), long_chat(300)
    with deployment.server() as port, deployment.proxy(port, look_ahead=False) as proxied:
        if during == "restore":
            chat.ask(proxied.port, "Begin.")
            proxied.wait_for_background()
            _erase(port)
            chat.ask(proxied.port)
            proxied.wait_for_background()
            _erase(port)
        proxied.wait_for_background()  # it saves something to learn what llama-server is
        asked = _noting(proxied, during, kill=port)
        messages = chat.messages if during == "restore" else long_chat(300).messages[:3]
        asks = {"messages": messages, "max_tokens": 24, "temperature": 0}
        body = json.dumps(asks).encode()
        answer = ask(proxied.port, "POST", "/v1/chat/completions", body)
        assert answer.status == 503 and len(asked) == 1
        proxied.wait_for_background()
        assert deployment.files() == [] and not list(tmp_path.glob("*.evoke-part"))
        died = proxied.metric("evoke_snapshot_corrupt_total", reason="upstream_died")
        assert died == (during == "restore")
        failed = proxied.metric("evoke_snapshot_saves_total", result="failed")
        assert failed == (during == "save")
        assert proxied.metric("evoke_upstream_errors_total", kind="upstream_unavailable") >= 1
        with deployment.server(port):
            again = ask(proxied.port, "POST", "/v1/chat/completions", body)
            assert again.status == 200
            proxied.wait_for_background()
            restored = proxied.metric("evoke_snapshot_restores_total", result="useful")
            assert restored == 0 and len(deployment.files()) == 1
            _erase(port)
            direct = ask(port, "POST", "/v1/chat/completions", body)
            said = [json.loads(one.body)["choices"][0]["message"] for one in (again, direct)]
            assert said[0] == said[1]


def _noting(running: RunningProxy, action: str, kill: int = 0) -> list[str]:
    """The names of files that the server is asked to save or restore; it may be killed by that."""
    calls, names = running.gateway.server.strategies.snapshots._api, []
    asked = getattr(calls, action)

    async def noted(slot: int, name: str) -> Any:
        names.append(name)
        setattr(calls, action, asked)
        if kill:
            os.kill(process_on(kill), signal.SIGKILL)
        return await asked(slot, name)

    setattr(calls, action, noted)
    return names


def test_a_disconnecting_client_costs_no_snapshot(tmp_path: Path) -> None:
    deployment, chat = Deployment(tmp_path), long_chat(400)
    with deployment.server_and_proxy(look_ahead=False) as proxied:
        chat.ask(proxied.port, "Begin.")
        proxied.wait_for_background()
        chat.add_reply()
    with deployment.server_and_proxy(look_ahead=False) as proxied:
        given = chat.messages + [{"role": "user", "content": "And then?"}]
        body = json.dumps({"messages": given, "stream": True, "max_tokens": 200}).encode()
        for wait_s in (0.005, 0.02, 0.05, 0.1, 0.3):
            connection = http.client.HTTPConnection("127.0.0.1", proxied.port)
            connection.request("POST", "/v1/chat/completions", body)
            time.sleep(wait_s)
            connection.close()
        proxied.wait_for_background()
        look = SnapshotRepository(SnapshotsConfig(directory=str(tmp_path)))
        look.open(claim=False)
        assert deployment.files() and not any(item.suspect for item in look.snapshots)
        look.close()
        assert proxied.metric("evoke_snapshot_restores_total", result="wasted") == 0
        assert not list(tmp_path.glob("*.evoke-part"))
        chat.ask(proxied.port, "And then?")


@pytest.mark.parametrize("during", ["save", "restore"])
def test_a_killed_proxy_leaves_only_valid_files(during: str, tmp_path: Path) -> None:
    """In the moment that it has asked for a save or a restore, which llama-server goes on with."""
    folder = tmp_path / "slots"
    folder.mkdir()
    deployment, chat = Deployment(folder, "", ("--cache-ram", "0")), long_chat(300)
    settings = tmp_path / "evoke.yaml"
    kept = {"directory": str(folder), "look_ahead": False, **SAVE_ALWAYS}
    settings.write_text(json.dumps({"snapshots": kept}))
    with deployment.server() as port, fault_injector(port) as line:
        with ProxyProcess(line.port, settings) as front:
            chat.ask(front.port, "Begin.")
            until(deployment.files)
            for _ in range(2):  # the first time it looks whether llama-server has it in memory
                front.wait_until_idle()
                _erase(port)
                chat.ask(front.port)
            front.wait_until_idle()
            chat.add_reply()
            before = {path.name for path in deployment.files()}
            if during == "restore":
                _erase(port)
            line.run_at(f"action={during}".encode(), front.kill)
            with pytest.raises((OSError, http.client.HTTPException)):
                chat.ask(front.port, "And then?")
            assert line.fired.wait(TIMEOUT_S)
        _erase(port)  # answers when llama-server is through with what it was asked for
        with deployment.proxy(port, look_ahead=False) as proxied:
            # Whether llama-server has died of what was being restored, nobody can tell any more.
            suspect = proxied.metric("evoke_snapshot_corrupt_total", reason="suspect")
            assert suspect == (during == "restore") == _corrupt(proxied)
            assert {path.name for path in deployment.files()} == (
                before if during == "save" else set()
            )
            chat.ask(proxied.port)
            said = chat.reply
            proxied.wait_for_background()
            restored = proxied.metric("evoke_snapshot_restores_total", result="useful")
            assert restored == (during == "save")
            assert proxied.metric("evoke_snapshot_saves_total", result="saved") >= 1
            _check_index_matches_files(deployment)
            assert ask(proxied.port, "GET", "/evoke/ready").status == 200
        _erase(port)
        chat.ask(port)
        assert chat.reply == said


def _check_index_matches_files(deployment: Deployment) -> None:
    """The index knows all files that are there, and they are as it says."""
    look = SnapshotRepository(SnapshotsConfig(directory=str(deployment.folder)))
    look.open(claim=False)
    known = {f"{item.id}.evoke-kv": item for item in look.snapshots}
    assert known.keys() == {path.name for path in deployment.files()} != set()
    for name, item in known.items():
        look.files.verify(name, item.n_bytes, item.checksum)
    look.close()
    assert not list(deployment.folder.glob("*.evoke-part"))
