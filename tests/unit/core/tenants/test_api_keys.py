"""Client keys: parsing key files, refusing invalid ones, and the `keys` command."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.adapters.secret_files import KeyFile
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
    assert capsys.readouterr().out == "name   tenant\nalice  lab\nbob    bob\n"
    assert main(["keys", "remove", "alice", "--file", path]) == 0
    assert main(["keys", "remove", "alice", "--file", path]) == 2
    assert KeyFile(Path(path)).keys.caller(key) is None
