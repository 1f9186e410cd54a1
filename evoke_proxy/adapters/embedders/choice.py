"""Chooses and loads the encoder that the configuration asks for, and checks its packages."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from evoke_proxy.adapters.embedders.catalogue import EncoderStore, encoder_named, encoder_names
from evoke_proxy.adapters.embedders.onnx_encoder import OnnxEncoder
from evoke_proxy.adapters.embedders.word_vectors import WordVectorEncoder
from evoke_proxy.config import EmbedderConfig
from evoke_proxy.core.retrieval.encoding import Encoder
from evoke_proxy.errors import ConfigError, pip_install

_log = logging.getLogger(__name__)
# The packages that provide onnxruntime; exactly one of them must be installed.
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def load_encoder(config: EmbedderConfig) -> Encoder | None:
    """Load the encoder that the configuration selects; None if `embedder.model` is `none`.

    `embedder.model: auto` selects the encoder in `embedder.directory`, else one that was fetched,
    else the built-in word vectors. If a fetched encoder cannot be loaded under `auto`, that is
    logged with the fix, and the word vectors are used. Raises ConfigError with the cause and the
    fix when an encoder that the configuration names cannot be loaded.
    """
    if config.directory and config.model != "auto":
        raise ConfigError(
            f"embedder.model is {config.model}, but embedder.directory names an encoder; remove one"
        )
    if config.model == "none":
        return None
    if config.model == "built-in":
        return WordVectorEncoder()
    if config.directory:
        return _onnx(config)
    store = EncoderStore(config.store)
    return _fetched(config, store) if config.model == "auto" else _named(config, store)


def _named(config: EmbedderConfig, store: EncoderStore) -> Encoder:
    if config.model not in encoder_names():
        raise ConfigError(
            f"embedder.model: {config.model!r} is not one of auto, built-in, none,"
            f" {', '.join(encoder_names())}; for another encoder set embedder.directory instead"
        )
    encoder = encoder_named(config.model)
    if not store.has(encoder):
        raise ConfigError(
            f"embedder.model: {encoder.name} is not in {store.root}; run evoke-proxy embedder fetch"
            f" {encoder.name}"
        )
    return _onnx(replace(config, directory=str(store.directory(encoder))))


def _fetched(config: EmbedderConfig, store: EncoderStore) -> Encoder:
    for encoder in store.stored():
        if missing := missing_packages():
            _log.warning(
                "%s was fetched but not loaded: %s not installed; %s or [gpu]. The proxy uses the"
                " built-in word vectors",
                encoder.name,
                " and ".join(missing),
                pip_install("cpu"),
            )
            break
        try:
            return _onnx(replace(config, directory=str(store.directory(encoder))))
        except ConfigError as error:
            _log.warning(
                "%s was fetched but not loaded: %s. Fetch it again: evoke-proxy embedder fetch %s",
                encoder.name,
                error,
                encoder.name,
            )
    return WordVectorEncoder()


def _onnx(config: EmbedderConfig) -> Encoder:
    if conflict := conflicting_runtimes():
        _log.warning("%s", conflict)
    return OnnxEncoder(config)


def conflicting_runtimes() -> str:
    """Return the problem and its fix if both onnxruntime packages are installed, else ""."""
    installed = [name for name in _RUNTIMES if _is_installed(name)]
    if len(installed) < len(_RUNTIMES):
        return ""
    return (
        "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: run"
        f" pip uninstall -y onnxruntime onnxruntime-gpu, then {pip_install('gpu')} or [cpu]"
    )


def missing_packages() -> list[str]:
    """Return the packages that ONNX encoders need and that cannot be found."""
    return [name for name in ("onnxruntime", "tokenizers") if find_spec(name) is None]


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
