"""The choice of the embedder from the configuration."""

from __future__ import annotations

import pytest

from evoke_proxy.adapters.embedders.choice import load_encoder
from evoke_proxy.adapters.embedders.word_vectors import WordVectorEncoder
from evoke_proxy.config import EmbedderConfig
from evoke_proxy.errors import ConfigError


@pytest.mark.parametrize("config", [EmbedderConfig(), EmbedderConfig(model="built-in")])
def test_the_word_vectors_are_the_default(config: EmbedderConfig) -> None:
    assert isinstance(load_encoder(config), WordVectorEncoder)


def test_the_model_none_loads_no_embedder() -> None:
    assert load_encoder(EmbedderConfig(model="none")) is None


def test_a_configured_directory_without_a_model_is_an_error(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="neither model.onnx"):
        load_encoder(EmbedderConfig(directory=str(tmp_path)))


@pytest.mark.parametrize("model", ["built-in", "none"])
def test_a_directory_together_with_another_model_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="remove one"):
        load_encoder(EmbedderConfig(model=model, directory="/somewhere"))
