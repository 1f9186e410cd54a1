"""`evoke-proxy keys` and the entry point: messages of mistakes name what to type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evoke_proxy.cli.main import main


def _error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["keys", *words]) == 2
    return capsys.readouterr().err


def test_a_token_without_a_file_does_not_blame_the_file_of_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = _error(capsys, "token")
    assert "keys token: name the new file with --file" in message
    assert "keys_file" not in message


def test_add_and_token_say_which_setting_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    assert main(["keys", "add", "alice", "--file", str(path)]) == 0
    output = capsys.readouterr()
    assert len(output.out.split()) == 1
    assert f"security.keys_file (EVOKE_SECURITY_KEYS_FILE) is {path}" in output.err
    path.unlink()
    assert main(["keys", "token", "--file", str(path)]) == 0
    output = capsys.readouterr()
    assert output.out == "" and f"written: {path}" in output.err
    assert "security.admin_token_file" in output.err
    assert main(["keys", "token", "--file", str(path), "--keep"]) == 0
    assert capsys.readouterr().err == ""


def test_keys_without_a_file_or_a_name_say_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--file, or set security.keys_file" in _error(capsys, "list")
    assert "give the name" in _error(capsys, "add", "--file", str(tmp_path / "keys"))


@pytest.mark.parametrize("words", [["list"], ["remove", "alice"]])
def test_a_missing_file_of_keys_is_an_error(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    message = _error(capsys, *words, "--file", str(path))
    assert f"{path} does not exist" in message and "keys add" in message
    assert not path.exists()


@pytest.mark.parametrize("words", [["add", "alice"], ["token"]])
def test_a_missing_directory_is_to_be_created(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = _error(capsys, *words, "--file", str(tmp_path / "etc/keys"))
    assert f"create the directory {tmp_path / 'etc'} first" in message


def test_keys_are_listed_under_headings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "keys")
    assert main(["keys", "add", "alice", "--tenant", "research", "--file", path]) == 0
    assert main(["keys", "add", "bo", "--file", path]) == 0
    capsys.readouterr()
    assert main(["keys", "list", "--file", path]) == 0
    assert capsys.readouterr().out == "name   tenant\nalice  research\nbo     bo\n"


def test_a_name_that_has_a_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "keys")
    assert main(["keys", "add", "alice", "--file", path]) == 0
    text = Path(path).read_text()
    capsys.readouterr()
    assert f"{path} has a key with the name alice already" in _error(
        capsys, "add", "alice", "--file", path
    )
    assert f"no key in {path} has the name bob" in _error(capsys, "remove", "bob", "--file", path)
    assert Path(path).read_text() == text


def test_a_budget_that_is_no_number_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--budget", "many"])
    assert ended.value.code == 2
    assert "'many' is not a number of tokens, auto or off" in capsys.readouterr().err


def test_a_closed_pipe_causes_no_traceback() -> None:
    command = [sys.executable, "-m", "evoke_proxy", "check-config", "--offline"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
