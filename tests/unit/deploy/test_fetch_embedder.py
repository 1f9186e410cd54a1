"""The embedder comes whole and as pinned, or not at all. The hub here is a directory."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "docker/fetch_embedder.py"


def _fetcher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_embedder", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Path, str]:
    """The fetcher with pins of small files, the files' directory, and the hub's address."""
    fetcher = _fetcher()
    files = {path: path.encode() for path in fetcher.SHA256}
    pins = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    monkeypatch.setattr(fetcher, "SHA256", pins)
    home = tmp_path / "hub" / fetcher.REPOSITORY / "resolve" / fetcher.REVISION
    for path, data in files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_bytes(data)
    return fetcher, home, (tmp_path / "hub").as_uri()


def test_revision_and_content_are_pinned() -> None:
    fetcher = _fetcher()
    assert re.fullmatch("[0-9a-f]{40}", fetcher.REVISION)
    assert {"onnx/model.onnx", "tokenizer.json"} <= set(fetcher.SHA256)
    assert all(re.fullmatch("[0-9a-f]{64}", pin) for pin in fetcher.SHA256.values())


def test_each_file_is_downloaded_once(
    hub: tuple[ModuleType, Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetcher, home, url = hub
    into = tmp_path / "embedder"
    assert fetcher.main([str(into), "--hub", url]) == 0
    assert capsys.readouterr().out.count(": downloaded\n") == len(fetcher.SHA256)
    assert sorted(p.name for p in into.iterdir()) == sorted(Path(p).name for p in fetcher.SHA256)
    shutil.rmtree(home)
    assert fetcher.main([str(into), "--hub", url]) == 0
    assert capsys.readouterr().out.count(": exists\n") == len(fetcher.SHA256)


def test_an_embedder_with_another_hash_is_not_stored(
    hub: tuple[ModuleType, Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetcher, home, url = hub
    (home / "tokenizer.json").write_text("foreign")
    into = tmp_path / "embedder"
    into.mkdir()
    (into / "tokenizer.json").write_text("older")
    assert fetcher.main([str(into), "--hub", url]) == 1
    assert "tokenizer.json has sha256" in capsys.readouterr().err
    assert (into / "tokenizer.json").read_text() == "older"
    assert not list(into.glob(".new-*"))


def test_an_unreachable_hub_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _fetcher().main([str(tmp_path), "--hub", (tmp_path / "none").as_uri()]) == 1
    assert "model.onnx" in capsys.readouterr().err
