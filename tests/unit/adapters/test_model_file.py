"""Reading the shape of a model from its GGUF file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from evoke_proxy.adapters.model_file import read_shape
from evoke_proxy.errors import ConfigError
from evoke_proxy.models import bundled_model


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def model(tmp_path: Path, values: dict[str, object], tensors: list[str]) -> Path:
    """Writes a GGUF file with these values and tensors, without tensor data."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values))]
    for key, value in values.items():
        parts.append(text(key))
        if isinstance(value, str):
            parts.append(struct.pack("<I", 8) + text(value))
        elif isinstance(value, list):
            kind = 7 if isinstance(value[0], bool) else 5
            items = b"".join(struct.pack("<?" if kind == 7 else "<i", item) for item in value)
            parts.append(struct.pack("<IIQ", 9, kind, len(value)) + items)
        else:
            parts.append(struct.pack("<II", 4, value))
    for tensor in tensors:
        parts.append(text(tensor) + struct.pack("<IQIQ", 1, 32, 0, 0))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"".join(parts))
    return path


def values(name: str, **more: object) -> dict[str, object]:
    common = {
        "block_count": 4,
        "context_length": 8192,
        "embedding_length": 128,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    changed = {key.replace("__", "."): value for key, value in more.items()}
    return {"general.architecture": name} | {
        f"{name}.{key}": value for key, value in (common | changed).items()
    }


ATTENTION = [f"blk.{i}.attn_k.weight" for i in range(4)]


def test_the_shape_of_the_bundled_model() -> None:
    shape = read_shape(bundled_model())
    assert (shape.kind, shape.n_trained) == ("dense", 8192)
    assert shape.weight_bytes == bundled_model().stat().st_size


def test_the_head_size_is_the_width_per_head_unless_it_is_given(tmp_path: Path) -> None:
    shape = read_shape(model(tmp_path, values("llama"), ATTENTION))
    assert [(layer.n_k, layer.n_v) for layer in shape.layers] == [(64, 64)] * 4
    lengths = {"attention__key_length": 192, "attention__value_length": 128}
    shape = read_shape(model(tmp_path, values("llama", **lengths), ATTENTION))
    assert [(layer.n_k, layer.n_v) for layer in shape.layers] == [(192, 128)] * 4


@pytest.mark.parametrize(
    ("name", "pattern", "windowed"),
    [
        ("gpt-oss", None, [True, False, True, False]),
        ("smallthinker", None, [False, True, True, True]),
        ("lfm2", None, [True] * 4),
        ("phi3", None, [False] * 4),
        ("gemma4", [True, True, False, True], [True, True, False, True]),
        ("gemma3", 2, [True, False, True, False]),
    ],
)
def test_the_layers_with_a_sliding_window_are_those_of_the_architecture(
    name: str, pattern: object, windowed: list[bool], tmp_path: Path
) -> None:
    more: dict[str, object] = {"attention__sliding_window": 64}
    if pattern is not None:
        more["attention__sliding_window_pattern"] = pattern
    shape = read_shape(model(tmp_path, values(name, **more), ATTENTION))
    assert [layer.is_windowed for layer in shape.layers] == windowed
    assert shape.window == (64 if any(windowed) else 0)


def test_layers_with_state_space_tensors_are_recurrent(tmp_path: Path) -> None:
    states = {"ssm__conv_kernel": 4, "ssm__inner_size": 64, "ssm__state_size": 16}
    tensors = ["blk.0.ssm_a", "blk.1.ssm_a", "blk.2.ssm_a", "blk.0.attn_qkv.weight", ATTENTION[3]]
    shape = read_shape(model(tmp_path, values("qwen35", **states), tensors))
    assert (shape.kind, len(shape.layers), shape.n_recurrent) == ("hybrid", 1, 3)
    assert shape.state_bytes == 3 * 4 * (3 * 64 + 16 * 64)


def test_the_number_of_kv_heads_may_differ_by_layer(tmp_path: Path) -> None:
    more = {"attention__head_count_kv": [1, 0, 2, 1]}
    shape = read_shape(model(tmp_path, values("llama", **more), ATTENTION))
    assert [layer.n_k for layer in shape.layers] == [64, 128, 64]


@pytest.mark.parametrize("content", [b"", b"GGML" + bytes(20), b"GGUF" + bytes(30), b"GG"])
def test_a_file_that_is_not_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a GGUF file"):
        read_shape(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shape(tmp_path / "none.gguf")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path, values("llama"), ATTENTION)
    path.write_bytes(path.read_bytes()[:150])
    with pytest.raises(ConfigError, match="not a GGUF file"):
        read_shape(path)


def test_all_parts_of_a_split_model_count(tmp_path: Path) -> None:
    first = model(tmp_path, values("llama"), ATTENTION)
    first = first.rename(tmp_path / "big-00001-of-00002.gguf")
    (tmp_path / "big-00002-of-00002.gguf").write_bytes(bytes(1000))
    assert read_shape(first).weight_bytes == first.stat().st_size + 1000


@pytest.mark.parametrize("n_bytes", [100_000, 5_000_000])
def test_a_download_that_was_cut_off_is_refused(n_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bundled_model().read_bytes()[:n_bytes])
    with pytest.raises(ConfigError, match="is incomplete, it lacks weights: download it again"):
        read_shape(path)


def test_an_empty_file_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(ConfigError, match="it is empty"):
        read_shape(path)
