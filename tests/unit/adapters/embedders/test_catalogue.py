"""The store of fetched encoders, and the catalogue of pinned ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evoke_proxy.adapters.embedders.catalogue import (
    DEFAULT,
    ENCODERS,
    EncoderStore,
    default_directory,
    encoder_named,
    encoder_names,
)


def put(store: EncoderStore, name: str) -> Path:
    """Stores an encoder whose files have the right sizes and only zeros."""
    encoder = encoder_named(name)
    for file in encoder.files:
        path = store.directory(encoder) / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            out.truncate(file.size)
    return store.directory(encoder)


def test_every_encoder_has_a_licence_a_revision_and_a_hash_per_file() -> None:
    assert encoder_names() == (DEFAULT, "all-MiniLM-L6-v2") and DEFAULT == "bge-small-en-v1.5"
    for encoder in ENCODERS:
        assert re.fullmatch("[0-9a-f]{40}", encoder.revision)
        assert {"onnx/model.onnx", "tokenizer.json"} <= {file.path for file in encoder.files}
        assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) for file in encoder.files)
        assert encoder.licence in ("MIT", "Apache-2.0")
    with pytest.raises(KeyError):
        encoder_named("other")


def test_only_complete_encoders_are_stored_and_the_default_comes_first(tmp_path: Path) -> None:
    store = EncoderStore(tmp_path / "none")
    assert store.stored() == []
    store = EncoderStore(tmp_path)
    put(store, "all-MiniLM-L6-v2")
    home = put(store, DEFAULT)
    assert [encoder.name for encoder in store.stored()] == list(encoder_names())
    (home / "tokenizer.json").write_bytes(b"short")
    assert [encoder.name for encoder in store.stored()] == ["all-MiniLM-L6-v2"]


def test_an_encoder_and_its_draft_are_removed(tmp_path: Path) -> None:
    store, encoder = EncoderStore(tmp_path), encoder_named(DEFAULT)
    put(store, DEFAULT)
    store.draft(encoder).mkdir()
    assert store.remove(encoder) and not store.remove(encoder)
    assert list(tmp_path.iterdir()) == []


def test_the_default_store_is_in_the_data_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert EncoderStore().root == default_directory() == tmp_path / "evoke-proxy/embedders"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_directory() == Path.home() / ".local/share/evoke-proxy/embedders"
