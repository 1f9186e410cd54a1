"""Every parser of data from outside raises the documented errors only (tests/fuzz_parsers.py)."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzz_parsers
import pytest
from fuzz_parsers import TARGETS
from hypothesis import given, settings
from hypothesis import strategies as st

from evoke_proxy.adapters.model_file import read_shape
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.errors import ConfigError

ROOT = Path(fuzz_parsers.__file__).parents[1]
CODE = ROOT / "evoke_proxy"
# Functions with such a name that read nothing from outside, or are covered as stated.
EXEMPT = {
    "config.schema:parse_listen": "part of the settings; tests/unit/config/test_loader.py",
    "engine.parsing.body_cache:CachedBody.parse_continued": "test_body_cache.py compares it",
    "engine.parsing.body_cache:BodyCache.read": "the same",
    "engine.strategies.budgeted.session_records:VectorRecords.read": "uses decode_vectors",
    "engine.server.reply:ReplyReader.feed": "hands the bytes to readers that are covered",
    "engine.strategies.snapshots.lookahead:decode_steps": "reads nothing",
    "adapters.llama.transport:_ResponseHandler.feed_data": "aiohttp's parser",
    "core.session.block_map:RowLocations.parse": "of an answer that SlotView.parse has accepted",
    "engine.storage.session_archive:_Hashed.read": "hashes what it returns",
    "adapters.secret_files:read_secret": "returns the text",
    "adapters.secret_files:read_token": "returns the text",
}
_PARSER = re.compile(r"(parse|parsed|read|decode)(_\w+)?|feed(_\w+)?")
# tests/unit/adapters/test_cipher.py changes every byte of what the ciphers read.
_CIPHERS = ("adapters.cipher:", "core.snapshots.disk_format:")
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON document."""
    yield path
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from _leaves(inner, (*path, key))


def _with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = document.copy()
    changed[path[0]] = _with_value(document[path[0]], path[1:], value)
    return changed


@st.composite
def _inputs(draw: st.DrawFn, name: str) -> bytes:
    """Any bytes, a seed with other bytes in it, or with another value in its JSON."""
    kind = draw(st.integers(0, 3))
    seed = draw(st.sampled_from(TARGETS[name].seeds))
    if kind == 0:
        return draw(st.binary(max_size=200))
    start = seed.find(b"{")
    try:
        document = json.loads(seed[start:]) if start in (0, 1) else None
    except ValueError:
        document = None
    if kind == 1 or document is None:
        data = bytearray(seed)
        for _ in range(draw(st.integers(1, 4))):
            at, end = sorted(draw(st.integers(0, len(data))) for _ in range(2))
            data[at : min(end, at + 8)] = draw(st.binary(max_size=8))
        return bytes(data)
    path = draw(st.sampled_from(list(_leaves(document))))
    changed = _with_value(document, path, draw(_JSON))
    return seed[:start] + json.dumps(changed).encode()


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_raises_only_what_it_documents(name: str) -> None:
    # The same inputs in each run: atheris makes new ones.
    @settings(max_examples=200, derandomize=True, database=None)
    @given(data=_inputs(name))
    def check(data: bytes) -> None:
        TARGETS[name].run(data)

    for seed in TARGETS[name].seeds:
        TARGETS[name].run(seed)
    check()


def test_every_parser_is_fuzzed() -> None:
    covered = {it for target in TARGETS.values() for it in target.covers}
    found = {it for folder in ("core", "config", "adapters", "engine", "divergence", "web")
             for it in _parsers(CODE / folder)}  # fmt: skip
    found = {it for it in found if not it.startswith(_CIPHERS)}
    assert found - covered - EXEMPT.keys() == set()
    assert EXEMPT.keys() <= found and covered <= found, (EXEMPT.keys() | covered) - found


def _parsers(folder: Path) -> Iterator[str]:
    """Yield the public functions whose name says that they parse, as MODULE:FUNCTION."""
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(path.relative_to(CODE).with_suffix("").parts)
        tree = ast.parse(path.read_text("utf-8"))
        scopes = [("", tree.body)]
        scopes += [(f"{it.name}.", it.body) for it in tree.body if isinstance(it, ast.ClassDef)]
        for prefix, body in scopes:
            for item in body:
                is_function = isinstance(item, ast.FunctionDef) and not item.decorator_list
                is_parse = isinstance(item, ast.FunctionDef) and item.name == "parse"
                if (is_function or is_parse) and _PARSER.fullmatch(item.name):
                    yield f"{module}:{prefix}{item.name}"


def test_the_fuzzer_finds_a_parser_that_raises_another_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(data: bytes) -> None:
        if data.count(b"]") == 3:
            raise KeyError("unexpected")

    monkeypatch.setitem(TARGETS, "slot", fuzz_parsers.Target(broken, (), TARGETS["slot"].seeds))
    with pytest.raises(KeyError):
        test_a_parser_raises_only_what_it_documents("slot")


def test_properties_of_a_server_in_another_form_get_defaults() -> None:
    """Found by the fuzzer: each raised a TypeError, which no caller expects."""
    limits = {"attention": {"layers": [0, {}]}}
    props = {"total_slots": [2], "evoke": {"features": [{}, "adopt"], "limits": limits}}
    info = ServerInfo.parse(props)
    assert info.n_slots == 1 and info.can_adopt and info.capturable == (0,)
    assert ServerInfo.parse({"total_slots": 10**12}).n_slots == 1


@pytest.mark.parametrize("n_layers", [4097, 2**31])
def test_a_model_file_with_impossible_layers_is_refused(n_layers: int, tmp_path: Path) -> None:
    """Found by the fuzzer: a changed byte took gigabytes."""
    (seed,) = TARGETS["gguf"].seeds
    changed = (2).to_bytes(4, "little"), n_layers.to_bytes(4, "little")
    at = seed.index(b"block_count") + len(b"block_count") + 4
    assert seed[at : at + 4] == changed[0]
    (tmp_path / "model.gguf").write_bytes(seed[:at] + changed[1] + seed[at + 4 :])
    with pytest.raises(ConfigError, match=f"states {n_layers} layers"):
        read_shape(tmp_path / "model.gguf")


def test_the_command_fuzzes_with_atheris() -> None:
    pytest.importorskip("atheris", reason="not installed: it has wheels for Linux only")
    command = [sys.executable, fuzz_parsers.__file__, "--seconds", "1", "slot"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"slot +\d\d\d+ inputs  ok\n0 of 1 targets failed", done.stdout)
