"""Faults of snapshots on a real server cause no crash and no wrong answer."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from damage import damage
from fault_injector import fault_injector
from harness import TIMEOUT_S, RunningProxy, ask, process_on, until
from proxy_process import ProxyProcess
from stock_deployment import SAVE_ALWAYS, Chat, Deployment, decoded, long_chat

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.adapters.snapshot_files import Sealed
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.engine.storage import snapshot_repository
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository

# About half are truncated, the others have a flipped bit; unit tests of the repository damage more.
N_DAMAGES = 60
NUMBER = "68285"
FACT, QUESTION = f"My favorite number is {NUMBER}.", "What is my favorite number?"
SAVE_SMALL_CHATS = {"min_tokens": 64, "look_ahead": False, "max_count": 8}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return Deployment(tmp_path_factory.mktemp("slots"), "", ("--cache-ram", "0"))


@pytest.fixture(scope="module")
def running(deployment: Deployment) -> Iterator[tuple[int, RunningProxy]]:
    """The port of a stock server, and a proxy in front of it that also saves small chats.

    The proxy has learnt that the rows of an erased slot are not in llama-server's RAM cache.
    """
    with deployment.server() as port, deployment.proxy(port, **SAVE_SMALL_CHATS) as proxied:
        chat = _chat(9)
        for _ in range(2):
            chat.ask(proxied.port)
            proxied.wait_for_background()
            _erase(port)
        repository = SnapshotRepository(SnapshotsConfig(directory=str(deployment.folder)))
        repository.open(claim=False)
        for snapshot in list(repository.snapshots):
            repository.delete(snapshot, "test")
        repository.close()
        yield port, proxied


def _chat(number: int) -> Chat:
    """Return a chat of about a hundred tokens that differs from all others in its first word.

    It has a session id, so that it is not a side request.
    """
    text = f"{number} " + "one two three four " * 16
    return Chat([{"role": "user", "content": text}], {"evoke_session": f"s{number}"})


def _erase(port: int) -> None:
    """Erase the slot, as a restart, a sleep or another conversation does."""
    assert ask(port, "POST", "/slots/0?action=erase").status == 200


def _n_rejected(running: RunningProxy) -> float:
    """Return how many snapshots were rejected so far, for any reason."""
    samples = running.gateway.metrics.snapshots_bad.collect()[0].samples
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def test_damaged_files_are_not_restored_and_answers_are_correct(
    deployment: Deployment, running: tuple[int, RunningProxy]
) -> None:
    port, proxied = running
    chat, rng = _chat(0), random.Random(7)
    chat.ask(proxied.port)
    proxied.wait_for_background()
    expected, before = chat.reply, _n_rejected(proxied)
    for _ in range(N_DAMAGES):
        (path,) = deployment.files()
        damage(path, rng)
        _erase(port)
        cached, new = chat.ask(proxied.port)
        assert chat.reply == expected and cached + new > 64
        proxied.wait_for_background()
    assert _n_rejected(proxied) - before == N_DAMAGES
    assert proxied.metric("evoke_snapshot_restores_total", result="quarantined") == N_DAMAGES
    assert proxied.metric("evoke_snapshot_restores_total", result="useful") == 0
    # The last snapshot is undamaged, and is restored.
    _erase(port)
    decoded_before = decoded(port)
    chat.ask(proxied.port)
    assert chat.reply == expected and decoded(port) - decoded_before <= 8
    proxied.wait_for_background()
    assert proxied.metric("evoke_snapshot_restores_total", result="useful") == 1


def test_files_that_are_verified_while_they_are_restored_leave_no_damaged_rows(
    deployment: Deployment, running: tuple[int, RunningProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server reads them, and its slot is emptied; it never aborts."""
    port, proxied = running
    monkeypatch.setattr(snapshot_repository, "_LARGE_BYTES", 1)
    erase, emptied = StockApi.erase, list[int]()

    async def recorded_erase(api: StockApi, slot: int) -> None:
        emptied.append(slot)
        await erase(api, slot)

    monkeypatch.setattr(StockApi, "erase", recorded_erase)
    chat, rng = _chat(11), random.Random(11)
    chat.ask(proxied.port)
    proxied.wait_for_background()
    expected, before = chat.reply, _n_rejected(proxied)
    quarantined = proxied.metric("evoke_snapshot_restores_total", result="quarantined")
    for _ in range(N_DAMAGES):
        damage(max(deployment.files(), key=lambda path: path.stat().st_mtime), rng)
        _erase(port)
        cached, new = chat.ask(proxied.port)
        assert chat.reply == expected and cached + new > 64
        proxied.wait_for_background()
    assert _n_rejected(proxied) - before == N_DAMAGES
    after = proxied.metric("evoke_snapshot_restores_total", result="quarantined")
    assert after - quarantined == N_DAMAGES and len(emptied) > N_DAMAGES // 4
    _erase(port)
    decoded_before = decoded(port)
    chat.ask(proxied.port)
    assert chat.reply == expected and decoded(port) - decoded_before <= 8
    proxied.wait_for_background()


@pytest.mark.parametrize("shape", ["hybrid-8", "tiny-dsa", "tiny-gemma"])
def test_damaged_files_of_other_memories_are_verified_while_they_are_restored(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent layers, latent attention with an index, and sliding windows with checkpoints."""
    monkeypatch.setattr(snapshot_repository, "_LARGE_BYTES", 1)
    verify, n_followed = SnapshotRepository.verify, list[bool]()

    async def recorded_verify(repository: Any, snapshot: Any, follow: bool = False) -> None:
        n_followed.append(follow)
        await verify(repository, snapshot, follow)

    monkeypatch.setattr(SnapshotRepository, "verify", recorded_verify)
    deployment, rng = (
        Deployment(tmp_path, shape, ("--cache-ram", "0", "-c", "4096")),
        random.Random(5),
    )
    chat = long_chat(200)
    chat.messages.pop()
    with deployment.server() as port, deployment.proxy(port, look_ahead=False) as proxied:
        for _ in range(2):
            chat.ask(proxied.port)
            proxied.wait_for_background()
            _erase(port)
        expected, before = chat.reply, _n_rejected(proxied)
        for _ in range(N_DAMAGES // 4):
            damage(max(deployment.files(), key=lambda path: path.stat().st_mtime), rng)
            _erase(port)
            chat.ask(proxied.port)
            assert chat.reply == expected
            proxied.wait_for_background()
        assert _n_rejected(proxied) - before == N_DAMAGES // 4
        assert sum(n_followed) > N_DAMAGES // 16
        _erase(port)
        decoded_before = decoded(port)
        chat.ask(proxied.port)
        assert chat.reply == expected and decoded(port) - decoded_before <= 64
        proxied.wait_for_background()


def test_llama_server_is_not_asked_to_restore_a_missing_file(
    deployment: Deployment, running: tuple[int, RunningProxy]
) -> None:
    port, proxied = running
    chat = long_chat(300, 5)  # long enough to restore
    chat.messages.pop()
    chat.ask(proxied.port)
    proxied.wait_for_background()
    for path in deployment.files():
        path.unlink()
    _erase(port)
    """Restoring a missing file would erase the slot."""
    port, proxied = running
    recorded_names = _record_calls(proxied, "restore")
    chat.ask(proxied.port)
    proxied.wait_for_background()
    assert recorded_names == []
    assert proxied.metric("evoke_snapshot_corrupt_total", reason="missing") == 1


def test_no_snapshot_is_kept_of_a_slot_that_was_erased_before_its_save(
    deployment: Deployment, running: tuple[int, RunningProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, proxied = running
    save, before = StockApi.save, deployment.files()

    async def erase_and_save(calls: StockApi, slot: int, name: str) -> Any:
        await calls.erase(slot)
        return await save(calls, slot, name)

    with monkeypatch.context() as patch:
        patch.setattr(StockApi, "save", erase_and_save)
        _chat(2).ask(proxied.port)
    proxied.wait_for_background()
    assert proxied.metric("evoke_snapshot_saves_total", result="emptied") > 0
    assert deployment.files() == before and not list(deployment.folder.glob("*.evoke-part"))


def test_a_request_is_answered_when_its_snapshot_fails_on_a_full_disk(
    deployment: Deployment, running: tuple[int, RunningProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, proxied = running
    parts, before = list[Path](), deployment.files()

    def new_part() -> str:
        parts.append(deployment.folder / f"full{len(parts)}.evoke-part")
        parts[-1].symlink_to("/dev/full")
        return parts[-1].name

    chat = _chat(3)
    with monkeypatch.context() as patch:
        patch.setattr(proxied.gateway.server.strategies.snapshots.repository, "new_part", new_part)
        chat.ask(proxied.port)
        proxied.wait_for_background()
    # That of the conversation that the request displaces fails, too.
    assert proxied.metric("evoke_snapshot_saves_total", result="failed") == len(parts) > 0
    assert deployment.files() == before and not any(part.is_symlink() for part in parts)


def test_no_save_starts_without_free_disk_space(tmp_path: Path) -> None:
    with Deployment(tmp_path).server_and_proxy(
        **SAVE_SMALL_CHATS | {"min_free_mib": 1 << 30}
    ) as proxied:
        _chat(4).ask(proxied.port)
        proxied.wait_for_background()
        assert proxied.metric("evoke_snapshot_saves_total", result="skipped_room") == 1
        status = json.loads(ask(proxied.port, "GET", "/evoke/ready").body)
        assert (status["status"], status["reasons"]) == ("degraded", ["snapshots:no_room"])
        (problem,) = json.loads(ask(proxied.port, "GET", "/evoke/overview").body)["problems"]
        assert "snapshots.min_free_mib keeps 1073741824 MiB free" in problem["problem"]
        assert "make room on that disk" in problem["fix"]

        config = proxied.gateway.config
        less = replace(config, snapshots=replace(config.snapshots, min_free_mib=0))
        proxied.loop.call_soon_threadsafe(proxied.gateway.adjust, less)
        _chat(5).ask(proxied.port)
        proxied.wait_for_background()
        assert proxied.metric("evoke_snapshot_saves_total", result="saved") >= 1
        assert json.loads(ask(proxied.port, "GET", "/evoke/ready").body)["status"] == "ready"


@pytest.mark.parametrize("other", [("-ctk", "q8_0", "-ctv", "q8_0"), ("-fa", "off")], ids=" ".join)
def test_a_snapshot_is_restored_only_with_the_same_cache_layout(
    other: tuple[str, ...], tmp_path: Path
) -> None:
    """No endpoint of a stock server reports its cache layout; a saved file contains it."""
    chat = long_chat(300)
    original = Deployment(tmp_path, "", ("-fa", "on"))
    with original.server_and_proxy(look_ahead=False) as proxied:
        chat.ask(proxied.port, "Begin.")
        proxied.wait_for_background()
    for deployment, useful in ((Deployment(tmp_path, "", other), 0), (original, 1)):
        chat = long_chat(300)
        with deployment.server_and_proxy(look_ahead=False) as proxied:
            cached, new = chat.ask(proxied.port, "Begin.")
            proxied.wait_for_background()
            assert cached + new > 900 and chat.reply
            assert proxied.metric("evoke_snapshot_restores_total", result="useful") == useful
            for result in ("refused", "failed", "wasted"):
                assert proxied.metric("evoke_snapshot_restores_total", result=result) == 0


@pytest.mark.parametrize("during", ["save", "restore"])
def test_a_snapshot_is_not_used_after_the_server_died_in_its_save_or_restore(
    during: str, tmp_path: Path
) -> None:
    deployment, chat = Deployment(tmp_path, "", ("--cache-ram", "0")), long_chat(300)
    with deployment.server() as port, deployment.proxy(port, look_ahead=False) as proxied:
        if during == "restore":
            chat.ask(proxied.port, "Begin.")
            proxied.wait_for_background()
            _erase(port)
            chat.ask(proxied.port)
            proxied.wait_for_background()
            _erase(port)
        proxied.wait_for_background()  # a starting proxy saves a slot to probe llama-server
        recorded_names = _record_calls(proxied, during, kill=port)
        messages = chat.messages if during == "restore" else long_chat(300).messages[:3]
        body = json.dumps({"messages": messages, "max_tokens": 24, "temperature": 0}).encode()
        answer = ask(proxied.port, "POST", "/v1/chat/completions", body)
        assert answer.status == 503 and len(recorded_names) == 1
        proxied.wait_for_background()
        assert deployment.files() == [] and not list(tmp_path.glob("*.evoke-part"))
        died = proxied.metric("evoke_snapshot_corrupt_total", reason="upstream_died")
        assert died == (during == "restore")
        failed = proxied.metric("evoke_snapshot_saves_total", result="failed")
        assert failed == (during == "save")
        assert proxied.metric("evoke_upstream_errors_total", kind="upstream_unavailable") >= 1
        with deployment.server(port):
            retried = ask(proxied.port, "POST", "/v1/chat/completions", body)
            assert retried.status == 200
            proxied.wait_for_background()
            restored = proxied.metric("evoke_snapshot_restores_total", result="useful")
            assert restored == 0 and len(deployment.files()) == 1
            _erase(port)
            direct = ask(port, "POST", "/v1/chat/completions", body)
            replies = [json.loads(each.body)["choices"][0]["message"] for each in (retried, direct)]
            assert replies[0] == replies[1]


def _record_calls(running: RunningProxy, action: str, kill: int = 0) -> list[str]:
    """Record the file name of the next "save" or "restore"; returns the list of names.

    With `kill`, the llama-server on this port is killed before the call.
    """
    calls, names = running.gateway.server.strategies.snapshots._api, []
    original = getattr(calls, action)

    async def recording_call(slot: int, name: str) -> Any:
        names.append(name)
        setattr(calls, action, original)
        if kill:
            os.kill(process_on(kill), signal.SIGKILL)
        return await original(slot, name)

    setattr(calls, action, recording_call)
    return names


def test_a_snapshot_stays_valid_when_clients_disconnect_during_its_restore(
    tmp_path: Path,
) -> None:
    deployment, chat = Deployment(tmp_path), long_chat(400)
    with deployment.server_and_proxy(look_ahead=False) as proxied:
        chat.ask(proxied.port, "Begin.")
        proxied.wait_for_background()
        chat.add_reply()
    with deployment.server_and_proxy(look_ahead=False) as proxied:
        messages = chat.messages + [{"role": "user", "content": "And then?"}]
        body = json.dumps({"messages": messages, "stream": True, "max_tokens": 200}).encode()
        for wait_s in (0.005, 0.02, 0.05, 0.1, 0.3):
            connection = http.client.HTTPConnection("127.0.0.1", proxied.port)
            connection.request("POST", "/v1/chat/completions", body)
            time.sleep(wait_s)
            connection.close()
        proxied.wait_for_background()
        repository = SnapshotRepository(SnapshotsConfig(directory=str(tmp_path)))
        repository.open(claim=False)
        assert deployment.files() and not any(item.suspect for item in repository.snapshots)
        repository.close()
        assert proxied.metric("evoke_snapshot_restores_total", result="wasted") == 0
        assert not list(tmp_path.glob("*.evoke-part"))
        chat.ask(proxied.port, "And then?")


@pytest.mark.parametrize("during", ["save", "restore"])
def test_a_killed_proxy_leaves_only_valid_files(during: str, tmp_path: Path) -> None:
    """The proxy is killed after it sent a save or restore, which llama-server completes.

    The model is certain of the compared answer: rounding in batches of other shapes changes no
    token of it.
    """
    folder = tmp_path / "slots"
    folder.mkdir()
    deployment = Deployment(folder, "", ("--cache-ram", "0"))
    chat = replace(long_chat(300), fields={"ignore_eos": False})
    settings = tmp_path / "evoke.yaml"
    snapshots = {"directory": str(folder), "look_ahead": False, **SAVE_ALWAYS}
    settings.write_text(json.dumps({"snapshots": snapshots}))
    with deployment.server() as port, fault_injector(port) as injector:
        with ProxyProcess(injector.port, settings) as proxy_process:
            chat.ask(proxy_process.port, FACT)
            until(deployment.files)
            # At first the proxy expects the rows in llama-server's own RAM cache.
            for _ in range(2):
                proxy_process.wait_until_idle()
                _erase(port)
                chat.ask(proxy_process.port)
            proxy_process.wait_until_idle()
            chat.add_reply()
            before = {path.name for path in deployment.files()}
            if during == "restore":
                _erase(port)
            injector.run_at(f"action={during}".encode(), proxy_process.kill)
            with pytest.raises((OSError, http.client.HTTPException)):
                chat.ask(proxy_process.port, QUESTION)
            assert injector.fired.wait(TIMEOUT_S)
        _erase(port)  # answered once llama-server has completed the call
        with deployment.proxy(port, look_ahead=False) as proxied:
            # The proxy cannot know whether the restore crashed llama-server.
            suspect = proxied.metric("evoke_snapshot_corrupt_total", reason="suspect")
            assert suspect == (during == "restore") == _n_rejected(proxied)
            assert {path.name for path in deployment.files()} == (
                before if during == "save" else set()
            )
            chat.ask(proxied.port)
            reply = chat.reply
            proxied.wait_for_background()
            restored = proxied.metric("evoke_snapshot_restores_total", result="useful")
            assert restored == (during == "save")
            assert proxied.metric("evoke_snapshot_saves_total", result="saved") >= 1
            _check_index_matches_files(deployment)
            assert ask(proxied.port, "GET", "/evoke/ready").status == 200
        _erase(port)
        chat.ask(port)
        assert chat.reply == reply and NUMBER in reply["content"]


def test_a_slot_that_a_killed_proxy_left_unverified_is_not_used(tmp_path: Path) -> None:
    """llama-server fills it from a damaged file while the proxy, which verifies it, is killed."""
    folder = tmp_path / "slots"
    folder.mkdir()
    deployment = Deployment(folder, "wide-8", ("--cache-ram", "0", "-c", "2048"))
    chat = long_chat(200)
    chat.messages.pop()
    settings = tmp_path / "evoke.yaml"
    snapshots = {"directory": str(folder), "look_ahead": False, **SAVE_ALWAYS}
    settings.write_text(json.dumps({"snapshots": snapshots}))
    with deployment.server() as port, fault_injector(port) as injector:
        with ProxyProcess(injector.port, settings) as proxy_process:
            n_tokens = sum(chat.ask(proxy_process.port))
            until(deployment.files)
            for _ in range(2):
                proxy_process.wait_until_idle()
                _erase(port)
                chat.ask(proxy_process.port)
            proxy_process.wait_until_idle()
            expected = chat.reply
            _erase(port)
            path = max(deployment.files(), key=lambda path: path.stat().st_mtime)
            assert path.stat().st_size > 16 << 20  # smaller ones are verified before
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 3)  # in the rows of a layer
                file.write(bytes(1 << 16))
            injector.run_at(b"action=restore", proxy_process.kill)
            with pytest.raises((OSError, http.client.HTTPException)):
                chat.ask(proxy_process.port)
            assert injector.fired.wait(TIMEOUT_S)
        slot = json.loads(ask(port, "GET", "/slots").body)[0]
        before = decoded(port)
        with deployment.proxy(port, look_ahead=False) as proxied:
            chat.ask(proxied.port)
            proxied.wait_for_background()
        assert decoded(port) - before >= n_tokens, f"rows were used; the slot was {slot}"
        assert chat.reply == expected and not list(folder.glob("*.evoke-unverified"))


def _check_index_matches_files(deployment: Deployment) -> None:
    """Check that the index lists exactly the snapshot files, with their sizes and checksums."""
    repository = SnapshotRepository(SnapshotsConfig(directory=str(deployment.folder)))
    repository.open(claim=False)
    snapshots = {f"{item.id}.evoke-kv": item for item in repository.snapshots}
    assert snapshots.keys() == {path.name for path in deployment.files()} != set()
    for name, item in snapshots.items():
        repository.files.verify(name, Sealed(item.n_bytes, item.checksum))
    repository.close()
    assert not list(deployment.folder.glob("*.evoke-part"))
