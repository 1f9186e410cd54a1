"""`evoke-proxy keys`: manages the file of client keys and creates files with a random token."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from evoke_proxy.adapters.secret_files import read_secret, write_secret
from evoke_proxy.config import load
from evoke_proxy.core.tenants.api_keys import Caller, Keys, checked_name, key_of, line_of, without
from evoke_proxy.errors import ConfigError

DESCRIPTION = """\
Manage the client keys in security.keys_file, or create a file with a random token. Each key belongs
to a tenant, and tenants share nothing. A running proxy reads a changed file of keys again."""

EXAMPLES = """examples:
  evoke-proxy keys add alice --tenant research --file /etc/evoke-proxy/keys
      create a key and print it; the file stores only its hash
  evoke-proxy keys list --file /etc/evoke-proxy/keys
      print the name and the tenant of each key
  evoke-proxy keys remove alice --file /etc/evoke-proxy/keys
      revoke a key; this takes effect without a restart
  evoke-proxy keys token --file /etc/evoke-proxy/admin-token
      create a file for security.admin_token_file or snapshots.key_file"""
_ACTIONS = ("add", "list", "remove", "token")
_SETTING = "security.keys_file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action",
        choices=_ACTIONS,
        help="add, list or remove client keys, or create a file with a token",
    )
    parser.add_argument(
        "name", nargs="?", help="name of the key to add or remove; the log contains this name"
    )
    parser.add_argument("--tenant", help="add: tenant of the key (default: the name of the key)")
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help=f"file of client keys (default: {_SETTING}); token: the file to create",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file (YAML)")
    parser.add_argument(
        "--keep", action="store_true", help="token: do not change a file that exists already"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the action; raises ConfigError for an invalid name or an unusable file."""
    path = _file(arguments)
    try:
        if arguments.action == "token":
            return _make_token(path, arguments.keep)
        return _act(arguments, path)
    except OSError as error:
        hint = "" if path.parent.is_dir() else f"; create the directory {path.parent} first"
        raise ConfigError(f"{path} cannot be used: {error.strerror}{hint}") from error


def _file(arguments: argparse.Namespace) -> Path:
    """Return the file to read or write; ConfigError if neither `--file` nor a setting names it."""
    if arguments.file is not None:
        return Path(arguments.file)
    if arguments.action == "token":
        raise ConfigError("keys token: name the new file with --file")
    path = Path(load(arguments.config, os.environ).security.keys_file)
    if not path.name:
        raise ConfigError(f"keys {arguments.action}: name the file with --file, or set {_SETTING}")
    return path


def _make_token(path: Path, keep: bool) -> int:
    if path.exists():
        if keep:
            return 0
        raise ConfigError(f"{path} exists already; delete it first to replace the token")
    write_secret(path, secrets.token_hex(32) + "\n")
    print(
        f"written: {path}; name it in security.admin_token_file or snapshots.key_file",
        file=sys.stderr,
    )
    return 0


def _act(arguments: argparse.Namespace, path: Path) -> int:
    if not path.exists() and arguments.action != "add":
        raise ConfigError(f"{path} does not exist; `evoke-proxy keys add` creates it")
    text = read_secret(path, _SETTING) if path.exists() else ""
    keys = Keys.parse(text)
    if arguments.action == "list":
        _print_callers(list(keys.callers.values()))
        return 0
    if not arguments.name:
        raise ConfigError(f"keys {arguments.action}: give the name of the key")
    name = checked_name(arguments.name)
    if arguments.action == "remove":
        remaining = without(text, name)
        if remaining is None:
            raise ConfigError(f"no key in {path} has the name {name}")
        write_secret(path, remaining)
        return 0
    if name in (caller.name for caller in keys.callers.values()):
        raise ConfigError(
            f"{path} has a key with the name {name} already; remove it first, or choose another"
            " name"
        )
    _add(path, text, Caller(name, checked_name(arguments.tenant or name)))
    return 0


def _print_callers(callers: Sequence[Caller]) -> None:
    rows = [("name", "tenant"), *((caller.name, caller.tenant) for caller in callers)]
    width = max(len(name) for name, _ in rows)
    for name, tenant in rows:
        print(f"{name:{width}}  {tenant}")


def _add(path: Path, text: str, caller: Caller) -> None:
    key = key_of(secrets.token_bytes(32))
    lines = text if not text or text.endswith("\n") else text + "\n"
    lines += f"{line_of(caller, key)}\n"
    write_secret(path, lines)
    print(key)
    print(
        f"this key belongs to the tenant {caller.tenant}; it cannot be displayed again. The proxy"
        f" asks for keys if {_SETTING} (EVOKE_SECURITY_KEYS_FILE) is {path}",
        file=sys.stderr,
    )
