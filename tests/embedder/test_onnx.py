"""The ONNX embedder, with tiny encoders whose vectors are computed by hand."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from tiny_bert import (
    BLUE,
    CLS,
    FIND,
    GREEN,
    KEEP,
    POOLED_MEAN,
    RED,
    SEP,
    TABLE,
    UNK,
    unit,
    write,
)  # fmt: skip

from evoke_proxy.adapters.embedders.onnx_encoder import OnnxEncoder
from evoke_proxy.cli.main import main
from evoke_proxy.config import EmbedderConfig
from evoke_proxy.errors import ConfigError


def load(directory: Path, **settings: Any) -> OnnxEncoder:
    return OnnxEncoder(EmbedderConfig(directory=str(directory), **settings))


def _longest(n_tokens: int) -> dict[str, Any]:
    """A file for `write`: longer texts are cut."""
    return {"sentence_bert_config": {"max_seq_length": n_tokens}}


def close(found: Any, expected: Any) -> bool:
    return bool(np.abs(np.asarray(found) - np.asarray(expected)).max() < 1e-6)


@pytest.mark.parametrize("inputs", [("input_ids",), ("input_ids", "attention_mask"), None])
@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.INT32])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_vectors_match_the_formula_of_their_pooling(
    tmp_path: Path, inputs: tuple[str, ...] | None, kind: int, pooling: str
) -> None:
    declared: dict[str, Any] = {} if inputs is None else {"inputs": inputs}
    files = POOLED_MEAN if pooling == "mean" else {}
    embedder = load(write(tmp_path, kind=kind, **declared, **files))
    found = embedder.documents(["red green blue", "", "red", "purple"])
    expected = [(CLS, RED, GREEN, BLUE, SEP), (CLS, SEP), (CLS, RED, SEP), (CLS, UNK, SEP)]
    assert close(found, [unit(*rows[: 1 if pooling == "cls" else None]) for rows in expected])
    assert found.dtype == np.float32 and found.shape == (4, embedder.dimensions)
    assert close(np.linalg.norm(found, axis=1), 1)


def test_vectors_are_in_the_order_of_their_texts(tmp_path: Path) -> None:
    embedder = load(write(tmp_path, **POOLED_MEAN, **_longest(400)))
    texts = ["red " * (7 * i % 400) for i in range(300)]
    single = np.vstack([embedder.documents([text]) for text in texts])
    assert close(embedder.documents(texts), single)
    assert len(np.unique(single.round(5), axis=0)) > 200, "too few different vectors"
    assert embedder.documents([]).shape[0] == 0


def test_the_tokens_of_one_inference_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = load(write(tmp_path, **_longest(400)))
    sizes = []

    class Session:
        def run(self, outputs: list[str], feed: Mapping[str, Any]) -> Any:
            sizes.append(feed["input_ids"].size)
            return [TABLE[feed["input_ids"]]]

    monkeypatch.setattr(embedder, "_session", Session())
    embedder.documents(["red " * (i % 380) for i in range(200)])
    assert 1 < len(sizes) < 200 and max(sizes) <= 1024


def test_texts_are_cut_at_the_maximum_length_of_the_encoder(tmp_path: Path) -> None:
    files = {
        "sentence_bert_config": {"max_seq_length": 6},
        "config": {"max_position_embeddings": 9},
    }
    embedder = load(write(tmp_path, **files, **POOLED_MEAN))
    assert embedder.recipe.max_tokens == 6
    assert close(embedder.documents(["red " * 30]), unit(CLS, RED, RED, RED, RED, SEP))


def test_huge_texts_and_invalid_unicode_are_embedded(tmp_path: Path) -> None:
    embedder = load(write(tmp_path, **POOLED_MEAN, **_longest(4)))
    found = embedder.documents(["red " * 1_000_000, "half \ud800 of a pair", "\0"])
    assert close(found, [unit(CLS, RED, RED, SEP), unit(CLS, UNK, UNK, SEP), unit(CLS, UNK, SEP)])


def test_only_queries_get_the_query_instruction(tmp_path: Path) -> None:
    embedder = load(write(tmp_path))
    assert embedder.recipe.query_instruction.startswith("Represent this sentence")
    write(tmp_path, **POOLED_MEAN)
    instructed = load(tmp_path, query_instruction="find: ", document_instruction="")
    assert close(instructed.queries(["red"]), unit(CLS, FIND, RED, SEP))
    assert close(instructed.documents(["red"]), unit(CLS, RED, SEP))


def test_instructions_and_pooling_are_read_from_the_directory(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "find: ", "passage": "keep: "}}
    write(tmp_path, config_sentence_transformers=prompts, **POOLED_MEAN)
    embedder = load(tmp_path)
    assert close(embedder.queries(["red"]), unit(CLS, FIND, RED, SEP))
    assert close(embedder.documents(["red"]), unit(CLS, KEEP, RED, SEP))


def test_a_model_in_the_onnx_folder_is_found(tmp_path: Path) -> None:
    embedder = load(write(tmp_path, file="onnx/model.onnx", **POOLED_MEAN))
    assert close(embedder.documents(["blue"]), unit(CLS, BLUE, SEP))


def test_an_output_with_a_row_for_each_token_is_preferred_to_the_first(tmp_path: Path) -> None:
    write(tmp_path, outputs=("other", "sentence", "token_embeddings"), **POOLED_MEAN)
    assert close(load(tmp_path).documents(["red"]), unit(CLS, RED, SEP))
    # The graph pools `sentence` itself, so the pooling of the directory has no effect.
    write(tmp_path / "second", outputs=("sentence", "scalar"), **POOLED_MEAN)
    assert close(load(tmp_path / "second").documents(["red", ""]), [unit(CLS)] * 2)


def test_the_fingerprint_changes_with_everything_that_changes_the_vectors(tmp_path: Path) -> None:
    first = load(write(tmp_path / "a"))
    assert load(write(tmp_path / "b"), threads=2, timeout_ms=9).fingerprint == first.fingerprint
    (tmp_path / "b/model.onnx_data").write_bytes(b"weights beside the graph")
    others = [
        load(write(tmp_path / "c", table=TABLE * 2)),
        load(write(tmp_path / "d", **POOLED_MEAN)),
        load(write(tmp_path / "e", **_longest(7))),
        load(tmp_path / "b"),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_an_embedder_can_be_used_by_several_threads(tmp_path: Path) -> None:
    embedder = load(write(tmp_path, **POOLED_MEAN))
    texts = ["red " * (i % 50) + "blue" for i in range(200)]
    expected = embedder.documents(texts)
    with ThreadPoolExecutor(4) as pool:
        assert all(close(found, expected) for found in pool.map(embedder.documents, [texts] * 8))


def test_the_description_names_the_directory_and_the_recipe(tmp_path: Path) -> None:
    text = load(write(tmp_path)).describe()
    assert text == f"{tmp_path}: 3 dimensions, pooling cls, 512 tokens, CPU"


def _broken_model(directory: Path) -> None:
    (write(directory) / "model.onnx").write_bytes(b"not a model")


def _broken_tokenizer(directory: Path) -> None:
    (write(directory) / "tokenizer.json").write_text("{}")


def _no_tokenizer(directory: Path) -> None:
    (write(directory) / "tokenizer.json").unlink()


def _broken_file(directory: Path) -> None:
    (write(directory) / "config.json").write_text("{")


def _dense_module(directory: Path) -> None:
    write(directory, modules=[{"type": "sentence_transformers.models.Dense"}])


def _nan(directory: Path) -> None:
    write(directory, table=TABLE * np.float32(np.nan))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (None, {}, "is not a directory; evoke-proxy embedder fetch fetches"),
        (Path.mkdir, {}, "has neither model.onnx nor onnx/model.onnx; put an encoder"),
        (_no_tokenizer, {}, "tokenizer.json is missing; copy it from the repository"),
        (_broken_model, {}, "model.onnx cannot be loaded: [ONNXRuntimeError]"),
        (_broken_tokenizer, {}, "tokenizer.json cannot be loaded: "),
        (_broken_file, {}, "config.json cannot be loaded: "),
        (_dense_module, {}, "needs sentence_transformers.models.Dense after the encoder"),
        (_nan, {}, "vectors that are not numbers"),
        (write, {"device": "cuda"}, "embedder.device: onnxruntime offers only "),
        (lambda d: write(d, outputs=("scalar",)), {}, "output scalar has shape []"),
        (lambda d: write(d, inputs=("pixels",)), {}, "has the inputs pixels; the proxy provides"),
        (lambda d: write(d, kind=TensorProto.FLOAT), {}, "as whole numbers: export a text encoder"),
        (lambda d: write(d, batch=1), {}, "the embedder failed: "),
    ],
)  # fmt: skip
def test_an_unusable_encoder_is_refused_with_a_reason(
    tmp_path: Path, make: Any, settings: dict[str, Any], message: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    directory = tmp_path / "encoder"
    if make is not None:
        make(directory)
    with pytest.raises(ConfigError) as refused:
        load(directory, **settings)
    assert message in str(refused.value) and str(refused.value).startswith("embedder.")
    assert "\n" not in str(refused.value)
    for key, value in (settings | {"directory": str(directory)}).items():
        monkeypatch.setenv(f"EVOKE_EMBEDDER_{key.upper()}", value)
    assert main(["check-config"]) == 2
    assert message in capsys.readouterr().err


def test_check_config_describes_the_embedder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check-config"]) == 0
    assert "embedder  built-in word vectors: 256 dimensions, CPU\n" in capsys.readouterr().out
    monkeypatch.setenv("EVOKE_EMBEDDER_DIRECTORY", str(write(tmp_path)))
    assert main(["check-config"]) == 0
    assert f"embedder  {tmp_path}: 3 dimensions, pooling cls" in capsys.readouterr().out


@pytest.mark.parametrize("package", ["onnxruntime", "tokenizers"])
def test_a_missing_package_is_reported_with_the_extra_to_install(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package} is not installed; pip install .*\[cpu\]"):
        load(tmp_path)


def test_a_directory_whose_name_is_too_long_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"embedder\.directory cannot be read: File name too"):
        load(tmp_path / ("a" * 300))
