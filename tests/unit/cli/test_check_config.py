"""`check-config`: what it prints of a configuration, and which faults end it."""

from __future__ import annotations

from pathlib import Path

import pytest

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.adapters.snapshot_files import PART, SnapshotFiles
from evoke_proxy.cli.main import main
from evoke_proxy.core.tenants.api_keys import Caller, key_of, line_of
from evoke_proxy.errors import ConfigError


def printed(path: Path, capsys: pytest.CaptureFixture[str], text: str) -> dict[str, str]:
    """The printed lines of a valid configuration by their first word."""
    path.write_text(text)
    assert main(["check-config", "--offline", "--config", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def test_the_main_settings_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, token = tmp_path / "keys", tmp_path / "token"
    callers = [Caller("alice", "lab"), Caller("bob", "lab"), Caller("carol", "shop")]
    lines = [line_of(caller, key_of(bytes([i]) * 32)) for i, caller in enumerate(callers)]
    write_secret(keys, "\n".join(lines) + "\n")
    write_secret(token, "0123456789abcdef-token\n")
    text = f"""
listen: ["127.0.0.1:9000"]
upstream: {{url: "http://gpu:8080"}}
policy: {{budget: 4096, name: discard}}
embedder: {{model: none}}
security: {{keys_file: {keys}, admin_token_file: {token}, admin_listen: ["127.0.0.1:9001"]}}
"""
    lines_by_name = printed(tmp_path / "evoke.yaml", capsys, text)
    assert lines_by_name["listen"] == "127.0.0.1:9000"
    assert lines_by_name["upstream"] == "http://gpu:8080"
    assert (lines_by_name["policy"], lines_by_name["budget"]) == ("discard", "4096 tokens")
    assert lines_by_name["embedder"] == "none: blocks are ranked by words alone"
    assert lines_by_name["keys"] == "3 of 2 tenants"
    assert lines_by_name["admin"] == "127.0.0.1:9001, with a token"
    assert "0123456789abcdef" not in str(lines_by_name)


def test_the_defaults_are_printed_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(tmp_path / "evoke.yaml", capsys, "policy: {budget: off}\n")
    assert lines["budget"] == "off (never evicts)"
    assert (lines["keys"], lines["snapshots"]) == ("none required", "none")
    assert lines["admin"].endswith("without a token")


def test_risks_are_warnings_and_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "evoke.yaml"
    path.write_text('listen: ["0.0.0.0:9000"]\nsecurity: {admin_listen: ["127.0.0.1:9001"]}\n')
    assert main(["check-config", "--offline", "--config", str(path)]) == 0
    *_, warning, end = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning ")
    assert end == "the configuration is valid, with 1 warning"


@pytest.mark.parametrize("name", ["keys_file", "admin_token_file"])
def test_a_file_that_cannot_be_read_ends_it_with_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "evoke.yaml"
    path.write_text(
        f'security: {{{name}: {tmp_path / "missing"}, admin_listen: ["127.0.0.1:1"]}}\n'
    )
    assert main(["check-config", "--offline", "--config", str(path)]) == 2
    assert name in capsys.readouterr().err


def test_a_directory_of_snapshots_that_serve_would_refuse_ends_it_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "evoke.yaml", tmp_path / "new" / "slots"
    file = tmp_path / "file"
    file.touch()
    for directory in (file, file / "slots", tmp_path / ("x" * 300)):
        path.write_text(f"snapshots: {{directory: {directory}}}\n")
        assert main(["check-config", "--offline", "--config", str(path)]) == 2
        printed_error = capsys.readouterr().err
        assert f"snapshots.directory: {directory} cannot be used" in printed_error
        with pytest.raises(ConfigError, match="cannot be used"):
            SnapshotFiles(directory).prepare()
    assert printed(path, capsys, f"snapshots: {{directory: {folder}}}\n")["snapshots"] == str(
        folder
    )
    assert not folder.parent.exists(), "only serve creates it"
    folder.mkdir(parents=True)
    printed(path, capsys, f"snapshots: {{directory: {folder}}}\n")
    assert not list(folder.iterdir())
    key = f"snapshots: {{directory: {folder}, key_file: {file}}}\n"
    path.write_text(key)
    assert main(["check-config", "--offline", "--config", str(path)]) == 2
    assert "snapshots.key_file" in capsys.readouterr().err


def test_a_directory_that_a_proxy_uses_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "slots"
    folder.mkdir(mode=0o750)
    test_file = folder / f"probe{PART}"
    test_file.touch()

    def chmod(*_: object) -> None:
        raise AssertionError("a check changes no mode")

    monkeypatch.setattr(Path, "chmod", chmod)
    SnapshotFiles(folder).check()
    assert list(folder.iterdir()) == [test_file]


def test_only_an_offline_check_accepts_a_directory_of_another_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "evoke.yaml", tmp_path / "slots"
    folder.mkdir()
    monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
    text = f"snapshots: {{directory: {folder}}}\n"
    assert printed(path, capsys, text)["snapshots"] == str(folder)
    assert main(["check-config", "--upstream", "http://127.0.0.1:9", "--config", str(path)]) == 2
    assert f"snapshots.directory: {folder} cannot be used" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_a_line_and_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check-config", "--upstream", "http://127.0.0.1:9"]) == 0
    (line,) = [li for li in capsys.readouterr().out.splitlines() if li.startswith("server ")]
    assert "cannot be reached" in line and "whether it can keep the budget is unknown" in line
