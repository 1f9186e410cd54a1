"""Client keys: parsing key files, refusing invalid ones, and the `keys` command."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest
from damage import DAMAGES, damage, in_memory
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.adapters.secret_files import KeyFile, read_secret, read_token, write_secret
from evoke_proxy.cli.main import main
from evoke_proxy.core.tenants.api_keys import Caller, Keys, digest, key_of, line_of, presented
from evoke_proxy.errors import ConfigError

KEY = key_of(bytes(range(32)))


def test_only_the_exact_key_identifies_a_caller() -> None:
    keys = Keys.parse(f"# who\n\n{line_of(Caller('alice', 'lab'), KEY)}  # since May\n")
    assert keys.caller(KEY) == Caller("alice", "lab")
    for other in ("", KEY[:-1], KEY + " ", KEY.lower(), digest(KEY), key_of(bytes(32))):
        assert keys.caller(other) is None


@given(st.text())
def test_an_invalid_key_identifies_nobody(guess: str) -> None:
    keys = Keys.parse(line_of(Caller("a", "a"), KEY))
    assert (keys.caller(guess) is None) == (guess != KEY)


@pytest.mark.parametrize(
    "text",
    [
        "alice lab",
        f"alice lab {KEY}",
        f"../alice lab {digest(KEY)}",
        f"alice lab/../x {digest(KEY)}",
        f"alice lab&tenant=x {digest(KEY)}",
        f"alice lab {digest(KEY).upper()}",
        f"a t {digest('1')}\na t {digest('2')}",
        f"a t {digest('1')}\nb t {digest('1')}",
    ],
)
def test_an_invalid_key_file_is_refused_with_the_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"line \d|must be 1 to 64"):
        Keys.parse(text)


@given(
    st.text() | st.lists(st.sampled_from(["a", "lab", digest("1"), "#", " ", "\n"])).map("".join)
)
def test_any_key_file_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        keys = Keys.parse(text)
        assert keys.caller("") is None and keys.caller(text) is None


def test_a_key_contains_256_random_bits() -> None:
    with pytest.raises(ValueError):
        key_of(b"short")
    assert KEY.startswith("evk_") and len(KEY) > 40


def test_a_key_is_read_from_both_headers() -> None:
    assert list(presented({"Authorization": "bearer  x ", "X-Api-Key": "y"})) == ["x", "y"]
    assert list(presented({"Authorization": "Basic x"})) == []


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


def test_keys_add_prints_the_key_and_stores_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "keys")
    assert main(["keys", "add", "alice", "--tenant", "lab", "--file", path]) == 0
    key = capsys.readouterr().out.strip()
    assert key not in Path(path).read_text() and os.stat(path).st_mode & 0o777 == 0o600
    assert KeyFile(Path(path)).keys.caller(key) == Caller("alice", "lab")
    assert main(["keys", "add", "alice", "--file", path]) == 2, "a name must be unique"
    assert main(["keys", "add", "../x", "--file", path]) == 2
    assert main(["keys", "add", "bob", "--file", path]) == 0
    capsys.readouterr()
    assert main(["keys", "list", "--file", path]) == 0
    assert capsys.readouterr().out == "alice lab\nbob bob\n"
    assert main(["keys", "remove", "alice", "--file", path]) == 0
    assert main(["keys", "remove", "alice", "--file", path]) == 2
    assert KeyFile(Path(path)).keys.caller(key) is None


def test_a_token_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert main(["keys", "token", "--file", str(path)]) == 0
    token = read_token(path, "x")
    assert len(token) == 64
    assert main(["keys", "token", "--file", str(path)]) == 2
    assert read_token(path, "x") == token
