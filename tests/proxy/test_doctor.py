"""`evoke-proxy doctor` tells stock servers apart by what they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_upstream import Exchange, FakeUpstream, fake_upstream, whole
from keeping import House, quiet_metric, template
from running import ask, llama_server, proxy, server_binary

from evoke_proxy.cli.main import main


def _asked(capsys: pytest.CaptureFixture[str], port: int, *more: str) -> tuple[int, dict[str, Any]]:
    options = ["--upstream", f"http://127.0.0.1:{port}", "--tokens", "800", "--json", *more]
    code = main(["doctor", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("shape", "options", "memory", "advised"),
    [
        (
            "tiny-dense",
            ("-np", "2", "-kvu", "-ctk", "q8_0", "-fa", "off"),
            "dense",
            ["--no-cache-idle-slots"],
        ),
        ("tiny-qwen35", tuple(template("Qwen3.5-4B")), "extend-only", []),
        ("tiny-gemma", (), "windowed", []),
        ("tiny-gemma", ("--swa-full",), "windowed", ["start it without --swa-full"]),
        ("tiny-lfm2-window", (), "never-restored", ["start it with --swa-full"]),
    ],
)
def test_a_server_is_known_by_what_it_does(
    shape: str,
    options: tuple[str, ...],
    memory: str,
    advised: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    house = House(tmp_path, shape, options)
    with house.server() as port:
        code, found = _asked(capsys, port, "--directory", str(tmp_path))
    assert found["memory"] == memory
    assert found["ram_cache"] is (memory != "never-restored") and found["no_files"] == ""
    assert found["speeds"]["n_bytes"] > 0
    assert found["kv_types"] == ["q8_0" if "q8_0" in options else "f16", "f16"]
    assert found["flash_attention"] is ("off" not in options)
    for text, flag in zip(found["advice"], advised, strict=True):
        assert flag in text
    assert code == bool(advised)
    assert list(tmp_path.iterdir()) == []


def test_without_a_place_for_slots_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with llama_server(server_binary(patched=False), "-np", "1", "--cache-ram", "0") as port:
        code, found = _asked(capsys, port)
    assert code == 1 and "--slot-save-path" in found["advice"][0]
    assert found["memory"] == "unknown" and found["ram_cache"] is False


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--upstream", "http://127.0.0.1:9"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


TIMES = {"cache_n": 0, "prompt_n": 300, "prompt_ms": 9, "predicted_n": 1}
ANSWERS: dict[str, Any] = {
    "/v1/models": {"data": []},
    "/lora-adapters": [],
    "/slots": [{"id": 0, "id_task": 3, "n_prompt_tokens": 0, "is_processing": False}],
    "/apply-template": {"prompt": "one two"},
    "/tokenize": {"tokens": list(range(400))},
    "/completion": {"id_slot": 0, "timings": TIMES},
    "/v1/chat/completions": {
        "choices": [{"message": {"role": "assistant", "content": "Yes."}}],
        "timings": TIMES,
    },
}


async def _newer(exchange: Exchange) -> None:
    """A server as it may be one day: it would save a slot, too."""
    path = exchange.head.split(b" ")[1].decode()
    copied: dict[str, Any] = {
        name: 400 for name in ("n_saved", "n_written", "n_restored", "n_read")
    }
    copied |= {"timings": {"save_ms": 1, "restore_ms": 1}}
    await exchange.say(whole(json.dumps(ANSWERS.get(path, copied)).encode(), b"application/json"))


def _saved(fake: FakeUpstream) -> bool:
    return any(b"action=save" in exchange.head for exchange in fake.requests)


def test_a_server_with_a_disk_cache_of_its_own_is_left_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_upstream(_newer) as fake:
        for value, left in (("/var/cache", True), ("", False)):
            fake.props = json.dumps({"total_slots": 1, "kv_cache_disk_path": value}).encode()
            fake.requests.clear()
            with proxy(fake.port, snapshots__directory=str(tmp_path)) as running:
                said = json.loads(ask(running.port, "GET", "/evoke/ready").body)
                detail = said["checks"]["snapshots"]["detail"]
                assert ("has a disk cache of its own" in detail) == left
                body = json.dumps({"messages": [{"role": "user", "content": "Yes?"}]}).encode()
                assert ask(running.port, "POST", "/v1/chat/completions", body).status == 200
                quiet_metric(running, "evoke_snapshot_saves_total", result="saved")
            assert _saved(fake) != left
            assert _asked(capsys, fake.port)[1]["native_disk"] == left
