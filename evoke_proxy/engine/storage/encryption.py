"""In which form what is kept on disk is written, by the settings."""

from __future__ import annotations

from pathlib import Path

from evoke_proxy.adapters.cipher import Cipher
from evoke_proxy.adapters.secret_files import read_token
from evoke_proxy.core.snapshots.at_rest import Plain
from evoke_proxy.errors import ConfigError

_SETTING = "snapshots.key_file"


def at_rest(key_file: str) -> Plain:
    """What the file of a key asks for, none when it is empty; ConfigError when it is of no use."""
    if not key_file:
        return Plain()
    try:
        key = bytes.fromhex(read_token(Path(key_file), _SETTING))
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"{_SETTING}: {key_file} must hold 64 hexadecimal digits")
    return Cipher(key)
