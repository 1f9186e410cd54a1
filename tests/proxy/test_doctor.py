"""`evoke-proxy doctor` recognises stock servers by their behaviour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import llama_server, server_binary
from stock_deployment import Deployment, template

from evoke_proxy.cli.main import main


def _run_doctor(
    capsys: pytest.CaptureFixture[str], port: int, *more: str
) -> tuple[int, dict[str, Any]]:
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
def test_doctor_finds_the_kind_of_memory_and_the_wrong_options(
    shape: str,
    options: tuple[str, ...],
    memory: str,
    advised: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deployment = Deployment(tmp_path, shape, options)
    with deployment.server() as port:
        code, found = _run_doctor(capsys, port, "--directory", str(tmp_path))
    assert found["memory"] == memory
    assert found["ram_cache"] is (memory != "never-restored") and found["no_files"] == ""
    assert found["speeds"]["n_bytes"] > 0
    assert found["kv_types"] == ["q8_0" if "q8_0" in options else "f16", "f16"]
    assert found["flash_attention"] is ("off" not in options)
    for text, flag in zip(found["advice"], advised, strict=True):
        assert flag in text
    assert code == bool(advised)
    assert list(tmp_path.iterdir()) == []


def test_doctor_advises_a_slot_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with llama_server(server_binary(patched=False), "-np", "1", "--cache-ram", "0") as port:
        code, found = _run_doctor(capsys, port)
    assert code == 1 and "--slot-save-path" in found["advice"][0]
    assert found["memory"] == "unknown" and found["ram_cache"] is False


def test_an_unreachable_server_is_a_configuration_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--upstream", "http://127.0.0.1:9"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
