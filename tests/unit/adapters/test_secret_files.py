"""Files with keys and tokens: who may read them, and what a damaged or replaced file admits."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from damage import DAMAGES, damage, in_memory

from evoke_proxy.adapters.secret_files import KeyFile, read_secret, read_token, write_secret
from evoke_proxy.cli.main import main
from evoke_proxy.core.tenants.api_keys import Caller, Keys, key_of, line_of
from evoke_proxy.errors import ConfigError

KEY = key_of(bytes(range(32)))


def test_a_secret_file_readable_by_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_secret(path, "word\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(path, "x") == "word\n"
    with pytest.raises(ConfigError, match="one word of 16"):
        read_token(path, "x")
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_secret(path, "x")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_secret(tmp_path, "x")
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(tmp_path / "none", "security.keys_file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_may_edit_secret_files_and_keeps_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_secret(path, "one")
    os.chown(path, 10001, 10002)
    assert read_secret(path, "x") == "one"
    write_secret(path, "two")
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (10001, 10002, 0o600)
    assert read_secret(path, "x") == "two"


def test_a_key_is_valid_exactly_while_the_file_contains_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_secret(path, "")
    file = KeyFile(path)
    assert file.keys.caller(KEY) is None
    write_secret(path, line_of(Caller("a", "t"), KEY))
    assert file.keys.caller(KEY) == Caller("a", "t")
    write_secret(path, "nonsense")
    assert file.keys.caller(KEY) == Caller("a", "t"), "an invalid file must change nothing"
    write_secret(path, "")
    assert file.keys.caller(KEY) is None


def test_a_damaged_key_file_admits_no_unknown_key() -> None:
    """200 truncations and bit flips of the keys, and of the admin's token."""
    with in_memory() as memory:
        n_broken, n_lost = _damage_repeatedly(memory)
    assert n_broken > 20 < n_lost


def _damage_repeatedly(folder: Path) -> tuple[int, int]:
    """Returns how often the key file was invalid, and how often a key was no longer accepted."""
    rng, path, token = random.Random(4), folder / "keys", folder / "token"
    callers = {key_of(bytes([number]) * 32): Caller(f"k{number}", "t") for number in range(3)}
    text = "".join(line_of(caller, key) + "\n" for key, caller in callers.items())
    word, n_broken, n_lost = "f" * 43, 0, 0
    write_secret(path, text)
    file = KeyFile(path)
    for _ in range(DAMAGES):
        write_secret(path, text)
        assert all(file.keys.caller(key) for key in callers)
        damage(path, rng)
        n_broken += not _parses(path)
        accepted = {key for key in callers if file.keys.caller(key)}
        n_lost += len(accepted) < len(callers)
        assert _parses(path) or len(accepted) == len(callers), "an invalid file must change nothing"
        assert file.keys.caller(KEY) is None
        write_secret(token, word)
        damage(token, rng)
        try:
            assert len(read_token(token, "x")) >= 16
        except ConfigError:
            pass
    return n_broken, n_lost


def _parses(path: Path) -> bool:
    try:
        Keys.parse(read_secret(path, "x"))
    except ConfigError:
        return False
    return True


def test_a_token_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert main(["keys", "token", "--file", str(path)]) == 0
    token = read_token(path, "x")
    assert len(token) == 64
    assert main(["keys", "token", "--file", str(path)]) == 2
    assert read_token(path, "x") == token
