"""The recipe of an encoder, from its directory and the configuration; and pooling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.config import EmbedderConfig
from evoke_proxy.core.retrieval.encoding import BGE_QUERY, Recipe, pooled, recipe
from evoke_proxy.errors import ConfigError

POOLING, PROMPTS = "1_Pooling/config.json", "config_sentence_transformers.json"
MEAN = {POOLING: {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}}
CLS = {POOLING: {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}}


def _prompts(**prompts: str) -> dict[str, Any]:
    return {PROMPTS: {"prompts": prompts, "default_prompt_name": None}}


@pytest.mark.parametrize(
    ("files", "settings", "pooling", "query", "document"),
    [
        ({}, {}, "cls", BGE_QUERY, ""),
        (CLS, {}, "cls", BGE_QUERY, ""),
        (MEAN, {}, "mean", "", ""),
        ({POOLING: {"pooling_mode": "mean"}}, {}, "mean", "", ""),
        ({POOLING: {"pooling_mode": ["cls"]}}, {}, "cls", BGE_QUERY, ""),
        (CLS | _prompts(query="q: ", passage="p: "), {}, "cls", "q: ", "p: "),
        (MEAN | _prompts(query="q: ", document="d: "), {}, "mean", "q: ", "d: "),
        (CLS | _prompts(document="d: "), {}, "cls", "", "d: "),
        # sentence-transformers writes this for a model without prompts.
        (CLS | _prompts(query="", document=""), {}, "cls", BGE_QUERY, ""),
        (CLS | {PROMPTS: {"__version__": {}}}, {}, "cls", BGE_QUERY, ""),
        (CLS | _prompts(query="q: ", document="d: "), {"query_instruction": "a: "}, "cls", "a: ",
         "d: "),
        (CLS | _prompts(query="q: ", document="d: "), {"document_instruction": ""}, "cls", "q: ",
         ""),
        (CLS, {"query_instruction": ""}, "cls", "", ""),
    ],
)  # fmt: skip
def test_pooling_and_instructions_come_from_the_files_unless_configured(
    files: dict[str, Any], settings: dict[str, Any], pooling: str, query: str, document: str
) -> None:
    found = recipe(files, EmbedderConfig(**settings))
    assert found.pooling == pooling
    assert (found.query_instruction, found.document_instruction) == (query, document)


def test_bge_small_needs_only_its_config_file() -> None:
    config = {"config.json": {"model_type": "bert", "max_position_embeddings": 512}}
    assert recipe(config, EmbedderConfig()) == Recipe("cls", 512, BGE_QUERY, "")


@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        ({}, 512),
        ({"config.json": {"max_position_embeddings": 514}}, 514),
        ({"config.json": {"max_position_embeddings": 514},
          "tokenizer_config.json": {"model_max_length": 512}}, 512),
        ({"sentence_bert_config.json": {"max_seq_length": 256},
          "tokenizer_config.json": {"model_max_length": 512}}, 256),
        ({"tokenizer_config.json": {"model_max_length": 10**30}}, 512),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, 512),
        ({"sentence_bert_config.json": {"max_seq_length": None}}, 512),
        ({"config.json": "not a mapping"}, 512),
    ],
)  # fmt: skip
def test_the_maximum_length_is_the_smallest_stated(files: dict[str, Any], tokens: int) -> None:
    assert recipe(files, EmbedderConfig()).max_tokens == tokens


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({POOLING: {"pooling_mode_max_tokens": True}}, "needs pooling max_tokens; the proxy has"),
        ({POOLING: {"pooling_mode": "lasttoken"}}, "needs pooling lasttoken; the proxy has"),
        ({POOLING: {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},
         "needs pooling cls and mean; the proxy has cls or mean"),
        ({"modules.json": [{"type": "sentence_transformers.models.Transformer"},
                           {"type": "sentence_transformers.models.Dense"}]},
         "modules.json needs sentence_transformers.models.Dense after the encoder"),
        ({"modules.json": ["?"]}, "modules.json needs"),
    ],
)  # fmt: skip
def test_an_unsupported_pooling_or_module_is_refused(files: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe(files, EmbedderConfig())
    assert message in str(refused.value)


def test_the_usual_modules_are_accepted() -> None:
    names = ("models.Transformer", "models.Pooling", "models.Normalize")
    modules = [{"type": f"sentence_transformers.{name}"} for name in names]
    assert recipe({"modules.json": modules}, EmbedderConfig()).pooling == "cls"


def test_pooled_vectors_equal_those_computed_by_hand() -> None:
    rows = np.array([[[3.0, 4.0], [0.0, 5.0], [100.0, 100.0]]], np.float16)
    mask = np.array([[1, 1, 0]])
    assert np.allclose(pooled(rows, mask, "cls"), [[0.6, 0.8]])
    mean = np.array([1.5, 4.5]) / np.hypot(1.5, 4.5)
    assert np.allclose(pooled(rows, mask, "mean"), [mean])
    assert np.allclose(pooled(rows[:, 0], mask, "mean"), [[0.6, 0.8]])
    assert pooled(np.zeros((1, 2)), mask, "cls").tolist() == [[0.0, 0.0]]


@given(
    st.integers(1, 5), st.integers(1, 7), st.integers(1, 6), st.sampled_from(["cls", "mean"]),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_padding_does_not_change_a_pooled_vector_and_its_length_is_1(
    n: int, t: int, d: int, pooling: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(n, t, d)) + 0.1
    lengths = random.integers(1, t + 1, size=n)
    mask = (np.arange(t) < lengths[:, None]).astype(np.int64)
    found = pooled(rows, mask, pooling)
    assert found.dtype == np.float32 and found.shape == (n, d)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    for row, length in enumerate(lengths):
        alone = pooled(rows[row : row + 1, :length], mask[row : row + 1, :length], pooling)
        assert np.allclose(found[row], alone[0], atol=1e-5)
