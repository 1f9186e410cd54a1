"""Entry point of `evoke-proxy`: lists the commands, parses arguments, runs a command.

Exit codes: 0 success, 1 failure, 2 wrong arguments or an invalid configuration.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from evoke_proxy import __version__
from evoke_proxy.errors import ConfigError

_DESCRIPTION = """\
A proxy for llama-server that evicts and recovers KV-cache blocks under a token budget.
Exit codes: 0 success, 1 failure, 2 wrong arguments or an invalid configuration."""

_EXAMPLES = """examples:
  evoke-proxy up -m model.gguf
      start a llama-server and the proxy in front of it
  evoke-proxy serve --upstream http://127.0.0.1:8080
      run the proxy in front of a llama-server
  evoke-proxy demo
      build the patched llama-server and see a fact evicted and recovered
  evoke-proxy check-config --config evoke.yaml
      validate a configuration file
Help for one command: evoke-proxy COMMAND --help"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `evoke-proxy`.

    Attributes:
        name: Its name on the command line.
        summary: Its description in `evoke-proxy --help`.
        module: The module that implements it (a `CommandModule`), imported only when needed.
        takes_server_options: Whether words after `--` are options for llama-server.
    """

    name: str
    summary: str
    module: str
    takes_server_options: bool = False


COMMANDS = (
    Command("up", "start a llama-server and the proxy in front of it", "evoke_proxy.cli.up", True),
    Command(
        "plan",
        "show how many KV cells and how much memory a model gets",
        "evoke_proxy.cli.plan",
        True,
    ),
    Command(
        "serve", "run the proxy in front of one or more llama-servers", "evoke_proxy.cli.serve"
    ),
    Command(
        "check-config", "validate the configuration and print it", "evoke_proxy.cli.check_config"
    ),
    Command("embedder", "fetch, list or remove text encoders", "evoke_proxy.cli.embedder"),
    Command("demo", "run a test session on the bundled model", "evoke_proxy.demo.cli"),
    Command(
        "divergence",
        "compare answers under a budget with those of the full cache",
        "evoke_proxy.divergence.cli",
        True,
    ),
    Command("build-server", "build the patched llama-server", "evoke_proxy.server_build.cli"),
    Command(
        "doctor", "test a running llama-server and recommend options", "evoke_proxy.cli.doctor"
    ),
    Command("sessions", "list, pin, move or delete saved sessions", "evoke_proxy.cli.sessions"),
    Command("keys", "manage client keys and the admin token", "evoke_proxy.cli.keys"),
)


class CommandModule(Protocol):
    """The interface of the module of a command; both texts are for its `--help`."""

    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return its exit code; `main` turns a ConfigError into exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (by default sys.argv) names; returns its exit code."""
    try:
        # Parsing imports the command's modules, which takes a while.
        arguments = _parsed(list(sys.argv[1:] if argv is None else argv))
        code = _load(arguments.command).run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ConfigError as error:
        print(f"evoke-proxy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; `server_options` are the words after `--`, wherever other options stand."""
    chosen = next((word for word in words if not word.startswith("-")), None)
    if not any(command.name == chosen and command.takes_server_options for command in COMMANDS):
        whole = build_parser(words)
        if chosen is None or words[0] != chosen or chosen not in whole.commands:
            return whole.parse_args(words)
        # For `parse_args` an option before an optional argument, as in `keys add --file FILE NAME`,
        # means that the argument is missing.
        result = argparse.Namespace(command=chosen)
        return whole.commands[chosen].parse_intermixed_args(words[1:], result)
    end = words.index("--") if "--" in words else len(words)
    parser = build_parser(words)
    arguments, unknown = parser.parse_known_args(words[:end])
    if unknown or arguments.server_options:
        text = " ".join([*unknown, *arguments.server_options])
        parser.error(f"unrecognized arguments: {text}; options for llama-server follow --")
    arguments.server_options = list(words[end + 1 :])
    return arguments


def build_parser(words: Sequence[str]) -> _Parser:
    """Build the parser; only the command in `words` gets its arguments, and its module imported."""
    parser = _Parser(prog="evoke-proxy", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"evoke-proxy {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary)
        if command.name == chosen:
            module = _load(command.name)
            subparser.description, subparser.epilog = module.DESCRIPTION, module.EXAMPLES
            module.add_arguments(subparser)
    parser.commands = subparsers.choices
    return parser


def _load(name: str) -> CommandModule:
    module = next(command.module for command in COMMANDS if command.name == name)
    return cast(CommandModule, importlib.import_module(module))


class _Parser(argparse.ArgumentParser):
    """An argument parser that keeps the line breaks of descriptions and examples.

    Attributes:
        commands: The parsers of the commands, by name.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)
        self.commands: Mapping[str, argparse.ArgumentParser] = {}
