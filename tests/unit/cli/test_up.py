"""`evoke-proxy up` without processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evoke_proxy.cli.main import main
from evoke_proxy.cli.up import claim, make_private
from evoke_proxy.errors import ConfigError


def test_a_private_directory_and_its_new_parents_are_only_for_their_owner(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        tmp_path.chmod(0o755)
        make_private(tmp_path / "state" / "slots")
        make_private(tmp_path / "state")
    finally:
        os.umask(previous)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / "slots").stat().st_mode & 0o777 == 0o700
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_second_up_does_not_use_the_directory_of_the_first(tmp_path: Path) -> None:
    claim(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"another `evoke-proxy up` uses .*--state DIR"):
        claim(tmp_path / "state")
    claim(tmp_path / "other")


def test_a_directory_that_cannot_be_made_is_refused_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "state", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=r"cannot be used: .*--state DIR"):
            claim(folder)


def test_a_missing_model_is_named_before_the_server_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evoke_proxy.cli.up.finished_server_path", lambda options: None)
    assert main(["up", "--build", "-m", str(tmp_path / "none.gguf")]) == 2
    error = capsys.readouterr().err
    assert "none.gguf: cannot be read" in error and "built" not in error


def test_a_port_of_the_server_at_which_the_proxy_listens_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "-m", str(tmp_path / "none.gguf"), "--", "--port", "8090"]) == 2
    assert "-- --port 8090: the proxy listens at 127.0.0.1:8090" in capsys.readouterr().err
