"""The web UI: built once by npm, embedded in servers, absent when npm fails."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from evoke_proxy.server_build import BuildOptions, ensure_server

Build = Callable[..., Path]
# A stand-in for npm, which writes each call to a file.
NPM = """#!/bin/sh
echo "$1" >> "$NPM_CALLS"
[ -z "$NPM_FAILS" ] || { echo "network is unreachable"; exit 7; }
[ "$1" != run ] || { mkdir "$LLAMA_UI_OUT_DIR" && echo page > "$LLAMA_UI_OUT_DIR/index.html"; }
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the calls of npm, of which a stand-in is first in PATH."""
    npm = tmp_path / "programs" / "npm"
    npm.parent.mkdir()
    npm.write_text(NPM)
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.environ['PATH']}")
    file = tmp_path / "calls"
    file.touch()
    monkeypatch.setenv("NPM_CALLS", str(file))
    return file


@pytest.fixture
def build(llama: Path, patches: Path, tmp_path: Path) -> Build:
    sources = llama / "tools/ui"
    sources.mkdir()
    (sources / "package-lock.json").write_text("{}")

    def run(patched: bool = True, **options: bool) -> Path:
        paths = {"source": llama, "patches": patches, "cache": tmp_path / "cache"}
        return ensure_server(patched=patched, options=BuildOptions(**paths, **options), jobs=1)

    return run


def has_ui(server: Path) -> bool:
    return bool(json.loads(server.with_name("stamp.json").read_text())["ui"])


def test_the_ui_is_built_once_for_stock_and_patched(
    build: Build, calls: Path, tmp_path: Path
) -> None:
    assert has_ui(build()) and has_ui(build(patched=False))
    assert calls.read_text().split() == ["ci", "run"]
    (page,) = tmp_path.glob("cache/trees/*/src/tools/ui/dist/index.html")
    assert page.read_text() == "page\n"


def test_without_the_ui_the_tree_has_none(build: Build, calls: Path, tmp_path: Path) -> None:
    build()
    server = build(patched=False, ui=False)
    assert not has_ui(server) and not list(tmp_path.glob("cache/trees/*/src/tools/ui/dist/*"))


def test_a_server_with_the_ui_serves_a_caller_that_needs_none(build: Build, calls: Path) -> None:
    assert build() == build(ui=False)


def test_a_failure_of_npm_is_reported_and_retried_on_request(
    build: Build,
    calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NPM_FAILS", "1")
    server = build()
    assert not has_ui(server)
    report = capsys.readouterr().err
    assert "npm ci" in report and "network is unreachable" in report and "--no-ui" in report
    assert build() == server, "npm was tried again within the hour"
    assert calls.read_text().split() == ["ci"]
    monkeypatch.delenv("NPM_FAILS")
    assert has_ui(build(retry_ui=True))


def test_without_npm_the_server_is_built_without_the_ui(
    build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "npm" else real(name))
    assert not has_ui(build(retry_ui=True))
    assert "npm was not found" in capsys.readouterr().err
