"""`evoke-proxy doctor` tells stock servers apart by what they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from keeping import House, template
from running import llama_server, server_binary

from evoke_proxy.__main__ import main


def _asked(capsys: pytest.CaptureFixture[str], port: int, *more: str) -> tuple[int, dict[str, Any]]:
    options = ["--upstream", f"http://127.0.0.1:{port}", "--tokens", "800", "--json", *more]
    code = main(["doctor", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("shape", "options", "memory", "advised"),
    [
        ("tiny-dense", ("-np", "2", "-kvu"), "dense", ["--no-cache-idle-slots"]),
        ("tiny-qwen35", tuple(template("Qwen3.5-4B")), "extend-only", []),
        ("tiny-gemma", (), "windowed", ["--swa-full"]),
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
    assert found["ram_cache"] is True and found["no_files"] == ""
    assert found["speeds"]["n_bytes"] > 0
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
