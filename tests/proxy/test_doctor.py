"""`evoke-proxy doctor` on real servers: what it detects, and what it advises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import llama_server, proxy, server_binary
from stock_deployment import Deployment, template
from tenant_keys import KEYS, proxy_with_keys

from bench.random_models import SHAPES, ensure
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
def test_doctor_detects_the_memory_type_and_unsuitable_options(
    shape: str,
    options: tuple[str, ...],
    memory: str,
    advised: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deployment = Deployment(tmp_path, shape, options)
    with deployment.server() as port:
        code, report = _run_doctor(capsys, port, "--directory", str(tmp_path))
    assert report["memory"] == memory
    assert report["ram_cache"] is (memory != "never-restored") and report["no_files"] == ""
    assert report["speeds"]["n_bytes"] > 0
    assert report["kv_types"] == ["q8_0" if "q8_0" in options else "f16", "f16"]
    assert report["flash_attention"] is ("off" not in options)
    for text, flag in zip(report["advice"], advised, strict=True):
        assert flag in text
    assert code == bool(advised)
    assert list(tmp_path.iterdir()) == []


def test_doctor_advises_a_slot_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with llama_server(server_binary(patched=False), "-np", "1", "--cache-ram", "0") as port:
        code, report = _run_doctor(capsys, port, "--directory", str(tmp_path))
    # A directory was given, so a missing one is not the reason.
    assert report["no_files"] == "slots cannot be saved"
    assert code == 1 and "--slot-save-path" in report["advice"][0]
    assert report["memory"] == "unknown" and report["ram_cache"] is False


@pytest.mark.parametrize("exists", [True, False])
def test_doctor_says_why_no_file_is_in_the_directory(
    exists: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slots, named = tmp_path / "slots", tmp_path / "named"
    for folder in (slots, named)[: 1 + exists]:
        folder.mkdir()
    with Deployment(slots).server() as port:
        code, report = _run_doctor(capsys, port, "--directory", str(named))
    reason = f"did not write doctor.evoke-part to {named}" if exists else f"{named} does not exist"
    assert code == 1 and reason in report["no_files"]
    assert any(f"set snapshots.directory to {slots}: " in text for text in report["advice"])
    assert list(slots.iterdir()) == [], "the directory of a server on this machine is found"
    assert not any("delete doctor.evoke-part" in text for text in report["hints"])


def test_doctor_names_a_disk_without_space_for_snapshots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVOKE_SNAPSHOTS_MIN_FREE_MIB", str(1 << 30))
    with Deployment(tmp_path).server() as port:
        code, report = _run_doctor(capsys, port, "--directory", str(tmp_path))
    (text,) = [text for text in report["advice"] if "so no snapshot is kept" in text]
    assert code == 1 and "make room on that disk" in text and str(tmp_path) in text


def test_doctor_leaves_no_contents_in_a_directory_that_it_cannot_find(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Deployment(tmp_path).server() as upstream, proxy(upstream) as running:
        _, report = _run_doctor(capsys, running.port)
    assert report["slot_directory"] == "" and report["speeds"]["n_bytes"] > 100_000
    (file,) = tmp_path.iterdir()
    assert file.name == "doctor.evoke-part" and file.stat().st_size < 1000
    assert any("delete doctor.evoke-part" in text for text in report["hints"])


@pytest.mark.parametrize(("saves", "reason"), [(True, "did not write"), (False, "be saved")])
def test_doctor_checks_the_directory_for_a_patched_server_that_needs_saved_slots(
    saves: bool, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slots, named = tmp_path / "slots", tmp_path / "named"
    for folder in (slots, named):
        folder.mkdir()
    options = ["-np", "1", "--evoke-ram", "16", *(("--slot-save-path", str(slots)) * saves)]
    model = ensure(SHAPES["tiny-qwen35"])
    with llama_server(server_binary(patched=True), *options, model=model) as port:
        code, report = _run_doctor(capsys, port, "--directory", str(named))
        main(["doctor", "--upstream", f"http://127.0.0.1:{port}", "--tokens", "100"])
        output = capsys.readouterr()
    assert code == 1 and report["eviction"]["is_patched"] and reason in report["no_files"]
    fix = "set snapshots.directory" if saves else "start it with --slot-save-path"
    assert any(fix in text for text in report["advice"])
    rows = [line[:10].strip() for line in output.out.splitlines()]
    facts = [row for row in rows if row not in ("change", "consider")]
    assert len(facts) == len(set(facts)) and "takes minutes" in output.err


PATCHED = ("-np", "1", "-c", "1024", "--evoke-ram", "16")
EVICTS = (*PATCHED, "--ctx-logical", "4096")


@pytest.mark.parametrize(
    ("options", "settings", "advised", "hinted"),
    [
        ((), {}, ["start it with --evoke-ram"], "-np 2"),
        (PATCHED, {}, ["--ctx-logical 4096", "--evoke-disk DIR"], "-np 2"),
        (PATCHED, {"BUDGET": "700"}, ["--evoke-disk DIR"], "-np 2"),
        (
            EVICTS,
            {"BUDGET": "2000"},
            ["--budget) to 768", "--evoke-disk DIR"],
            "evoke-proxy embedder fetch",
        ),
        ((*EVICTS, "--evoke-disk"), {}, [], "evoke-proxy embedder fetch"),
        (
            ("-np", "2", "-kvu", "-c", "1024", "--evoke-ram", "16", "--evoke-disk"),
            {},
            ["--ctx-logical"],
            "-no-kvu",
        ),
    ],
)
def test_doctor_checks_what_eviction_needs_on_a_patched_server(
    options: tuple[str, ...],
    settings: dict[str, str],
    advised: list[str],
    hinted: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"EVOKE_POLICY_{name}", value)
    server_options = [*(options or ("-np", "1"))]
    if server_options[-1] == "--evoke-disk":
        server_options.append(f"{tmp_path / 'blocks'}:64")
    with llama_server(server_binary(patched=True), *server_options) as port:
        code, report = _run_doctor(capsys, port)
    assert report["eviction"]["is_patched"]
    assert code == bool(advised)
    for text, flag in zip(report["advice"], advised, strict=True):
        assert flag in text
    assert [text for text in report["hints"] if hinted in text]
    assert report["eviction"]["thoughts"] == "kept"


def test_doctor_reports_a_template_that_removes_thoughts_and_a_disabled_embedder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVOKE_EMBEDDER_MODEL", "none")
    options = (*EVICTS, "--evoke-disk", f"{tmp_path / 'blocks'}:64", *template("Qwen3.5-4B"))
    with llama_server(server_binary(patched=True), *options) as port:
        code, report = _run_doctor(capsys, port)
    assert report["eviction"]["thoughts"] == "removed"
    assert [text for text in report["hints"] if "--reasoning-budget 0" in text]
    (text,) = report["advice"]
    assert code == 1 and "embedder.model: none" in text


def test_doctor_reports_a_disk_tier_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    options = (*EVICTS, "--evoke-disk", str(tmp_path / "file/blocks"))
    with llama_server(server_binary(patched=True), *options) as port:
        code, report = _run_doctor(capsys, port)
    (text,) = report["advice"]
    assert code == 1 and "the disk tier does not work" in text


def test_doctor_recommends_the_patched_server_on_a_stock_server(
    stock_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = _run_doctor(capsys, stock_port)
    assert not report["eviction"]["is_patched"]
    assert [text for text in report["hints"] if "evoke-proxy build-server" in text]
    assert not [text for text in report["advice"] if "snapshots.directory is not set" in text]
    main(["doctor", "--upstream", f"http://127.0.0.1:{stock_port}", "--tokens", "100"])
    assert "proxy      would only forward requests to this server" in capsys.readouterr().out


def test_doctor_exits_with_2_if_the_server_cannot_be_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--upstream", "http://127.0.0.1:9"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_doctor_asks_for_the_address_of_llama_server_if_a_proxy_refuses_its_calls(
    stock_port: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with proxy_with_keys(stock_port, tmp_path) as running:
        url = f"http://127.0.0.1:{running.port}"
        for key, code in (("", "401 invalid_api_key"), (KEYS["alice"], "403 evoke_forbidden")):
            monkeypatch.setenv("EVOKE_UPSTREAM_API_KEY", key)
            assert main(["doctor", "--upstream", url]) == 2
            printed = capsys.readouterr().err
            assert f"{url} is a proxy that asks clients for a key ({code})" in printed
            assert "llama-server's own address" in printed and "set upstream.api_key" not in printed
