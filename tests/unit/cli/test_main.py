"""The command line: every command has its help, and each failure has its exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from evoke_proxy import __version__
from evoke_proxy.cli import main as main_module
from evoke_proxy.cli.main import COMMANDS, Command, main
from evoke_proxy.errors import ConfigError


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"evoke-proxy {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_with_examples(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command.name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "examples:\n" in text and f"evoke-proxy {command.name}" in text


def test_the_list_of_commands_has_a_summary_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert all(f"{command.name} {command.summary}" in words for command in COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        *([], ["nothing"], ["plan", "-c", "512"], ["serve", "--nothing"], ["serve", "more"]),
        *(["doctor", "--tokens", "0"], ["keys", "list", "--file", "f", "a", "b"]),
    ],
)
def test_wrong_arguments_end_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and capsys.readouterr().err


def test_options_may_stand_between_two_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "keys")
    assert main(["keys", "add", "--file", file, "alice"]) == 0
    assert main(["keys", "--file", file, "list"]) == 0
    assert "alice" in capsys.readouterr().out
    assert main(["keys", "remove", "--file", file, "alice"]) == 0
    assert main(["keys", "list", "--file", file]) == 0
    assert "alice" not in capsys.readouterr().out


def test_options_for_the_server_need_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "model.gguf", "--flash-attn", "on"])
    assert "--flash-attn on; options for llama-server follow --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("wrong: a key"), 2), (KeyboardInterrupt(), 1), (None, 0)]
)
def test_the_exit_code_follows_from_the_outcome(
    error: BaseException | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        if error is not None:
            raise error
        return 0

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--word")

    command = SimpleNamespace(DESCRIPTION="", EXAMPLES="", add_arguments=add_arguments, run=run)
    monkeypatch.setitem(sys.modules, "a_command", command)
    monkeypatch.setattr(main_module, "COMMANDS", (Command("go", "goes", "a_command"),))
    assert main(["go", "--word", "x"]) == code
    assert capsys.readouterr().err == ("evoke-proxy: wrong: a key\n" if code == 2 else "")


def test_an_interrupt_while_a_command_is_imported_causes_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str) -> None:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr(main_module, "_load", load)
    assert main(["serve"]) == 1
