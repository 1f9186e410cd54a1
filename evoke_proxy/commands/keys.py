"""`evoke-proxy keys`: who may use the proxy, and as which tenant."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

from evoke_proxy.adapters.secret_files import read_secret, write_secret
from evoke_proxy.config import load
from evoke_proxy.core.tenants.keys import Caller, Keys, checked_name, key_of, line_of, without
from evoke_proxy.errors import ConfigError

EXAMPLES = """examples:
  evoke-proxy keys add alice --tenant research --file /etc/evoke-proxy/keys
      prints the key, once: only its hash is kept. Tenants never share what is cached for them
  evoke-proxy keys list --file /etc/evoke-proxy/keys
  evoke-proxy keys remove alice --file /etc/evoke-proxy/keys
      refused from then on, without a restart
  evoke-proxy keys token --file /etc/evoke-proxy/admin-token
      a file for security.admin_token_file, or for snapshots.key_file"""
_ACTIONS = ("add", "list", "remove", "token")
_SETTING = "security.keys_file"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    command.epilog = EXAMPLES
    command.add_argument("action", choices=_ACTIONS, help="what to do")
    command.add_argument("name", nargs="?", help="what the key is called, in logs too")
    command.add_argument("--tenant", help="whose it is; as its name when not given")
    command.add_argument("--file", type=Path, metavar="FILE", help=f"{_SETTING}, mode 0600")
    command.add_argument("--config", type=Path, metavar="FILE", help="settings, YAML")


def run(arguments: argparse.Namespace) -> int:
    """Do it; ConfigError when a name or the file is of no use."""
    path = arguments.file or Path(load(arguments.config, os.environ).security.keys_file)
    if not path.name:
        raise ConfigError(f"{_SETTING}: name the file with --file")
    try:
        return _act(arguments, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _act(arguments: argparse.Namespace, path: Path) -> int:
    if arguments.action == "token":
        if path.exists():
            raise ConfigError(f"{path} is there already")
        write_secret(path, secrets.token_hex(32) + "\n")
        return 0
    text = read_secret(path, _SETTING) if path.exists() else ""
    known = Keys.parse(text)
    if arguments.action == "list":
        for caller in known.callers.values():
            print(f"{caller.name} {caller.tenant}")
        return 0
    name = checked_name(arguments.name or "")
    if arguments.action == "remove":
        left = without(text, name)
        if left is None:
            raise ConfigError(f"no key is called {name}")
        write_secret(path, left)
        return 0
    _add(path, text, Caller(name, checked_name(arguments.tenant or name)))
    return 0


def _add(path: Path, text: str, caller: Caller) -> None:
    key = key_of(secrets.token_bytes(32))
    ended = text if not text or text.endswith("\n") else text + "\n"
    added = f"{ended}{line_of(caller, key)}\n"
    Keys.parse(added)
    write_secret(path, added)
    print(key)
    print(f"a key of tenant {caller.tenant}; it is shown this once", file=sys.stderr)
