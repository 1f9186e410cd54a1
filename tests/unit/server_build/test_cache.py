"""The cache of built servers: its directory, and what counts as finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from evoke_proxy.server_build.cache import cache_dir, finished_server


def test_cache_directory_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVOKE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / "home/.cache/evoke-proxy"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg/evoke-proxy"
    monkeypatch.setenv("EVOKE_CACHE", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"


def test_an_unfinished_cache_entry_is_not_a_server(tmp_path: Path) -> None:
    entry = tmp_path / "bin" / "key"
    entry.mkdir(parents=True)
    (entry / "llama-server").write_text("half a copy")
    (entry / "llama-server").chmod(0o755)
    assert finished_server(tmp_path, "key") is None
    (entry / "stamp.json").write_text("{}")
    assert finished_server(tmp_path, "key") == entry / "llama-server"
