"""Reads from a GGUF file the model properties that decide how much memory its KV cache takes.

The format is described in docs/gguf.md of ggml.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from evoke_proxy.core.servers.memory_plan import LayerKv, ModelShape
from evoke_proxy.errors import ConfigError

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# More layers than llama.cpp allows (LLAMA_MAX_LAYERS is 512).
_MAX_LAYERS = 4096
# Longer arrays belong to the vocabulary, which is not needed.
_MAX_ITEMS = 4096
_SPLIT = re.compile(r"-00001-of-(\d{5})\.gguf$")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
# For architectures whose files do not say which layers have a sliding window, the pattern that
# llama.cpp uses: (n, first). One of every n layers has full attention: the first of them if
# `first`, else the last. With n = 0 all layers have a window.
_WINDOW_PATTERNS: Mapping[str, tuple[int, bool]] = {
    "afmoe": (4, False), "cohere2": (4, False), "exaone4": (4, False), "gemma2": (2, False),
    "gemma3": (6, False), "gemma3n": (5, False), "gpt-oss": (2, False), "lfm2": (0, False),
    "lfm2moe": (0, False), "llama4": (4, False),
    "mellum": (4, False), "olmo2": (4, False), "plamo3": (8, False), "smallthinker": (4, True),
}  # fmt: skip


def read_shape(path: Path) -> ModelShape:
    """Return the shape of a model; ConfigError for an unreadable, incomplete or other file.

    A file that ends within its last tensor is not noticed: llama-server refuses it.
    """
    try:
        with path.open("rb") as file:
            values, tensors, last = _header(file)
            end = file.tell() + last
        if end > path.stat().st_size:
            raise ConfigError(f"{path}: is incomplete, it lacks weights: download it again")
        return _shape(values, tensors, _size(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except struct.error as error:
        text = f"{path}: not a GGUF file of a language model, or incomplete: it ends too early"
        raise ConfigError(text) from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path}: not a GGUF file of a language model ({error})") from error


def _header(file: BinaryIO) -> tuple[dict[str, Any], list[str], int]:
    """Read the metadata, the names of the tensors, and where the data of the last one begins.

    That is relative to the end of the header, or up to 63 bytes (the alignment) behind it.
    """
    if (magic := file.read(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF" if magic else "it is empty")
    version, n_tensors, n_values = struct.unpack("<IQQ", file.read(20))
    if version < 2:
        raise ValueError(f"its format has the version {version}, which is too old")
    values = {}
    for _ in range(n_values):
        key = _text(file)
        values[key] = _value(file, _number(file, "<I"))
    names, last = [], 0
    for _ in range(n_tensors):
        names.append(_text(file))
        n_dimensions = _number(file, "<I")
        file.seek(8 * n_dimensions + 4, 1)
        last = max(last, _number(file, "<Q"))
    return values, names, last


def _number(file: BinaryIO, kind: str) -> Any:
    return struct.unpack(kind, file.read(struct.calcsize(kind)))[0]


def _text(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    data = file.read(length) if length < (1 << 24) else b""
    if len(data) != length:
        raise ValueError("a text is cut off")
    return data.decode()


def _value(file: BinaryIO, kind: int) -> Any:
    """Read a value of this GGUF type; None for an array over _MAX_ITEMS, which is skipped."""
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _number(file, _SCALARS[kind])
    item, length = _number(file, "<I"), _number(file, "<Q")
    if item == _ARRAY:
        raise ValueError("it has an array of arrays")
    if length <= _MAX_ITEMS:
        return [_value(file, item) for _ in range(length)]
    if item == _STRING:
        for _ in range(length):
            file.seek(_number(file, "<Q"), 1)
    else:
        file.seek(struct.calcsize(_SCALARS[item]) * length, 1)
    return None


def _size(path: Path) -> int:
    """Return the bytes of a model file, or of all parts of a split one."""
    split = _SPLIT.search(path.name)
    if split is None:
        return path.stat().st_size
    parts = path.parent.glob(_SPLIT.sub(rf"-*-of-{split[1]}.gguf", path.name))
    return sum(part.stat().st_size for part in parts)


def _shape(values: Mapping[str, Any], tensors: list[str], n_bytes: int) -> ModelShape:
    name = str(values["general.architecture"])

    def get(key: str, default: Any = None) -> Any:
        return values.get(f"{name}.{key}", default)

    n_layers = int(get("block_count", 0))
    if n_layers > _MAX_LAYERS:
        raise ValueError(f"it states {n_layers} layers")
    parts: dict[int, set[str]] = {}
    for tensor in tensors:
        if layer := _LAYER.match(tensor):
            parts.setdefault(int(layer[1]), set()).add(layer[2])
    window = int(get("attention.sliding_window", 0) or 0)
    windowed = _windowed(name, n_layers, window, get("attention.sliding_window_pattern"))
    attention = [i for i in range(n_layers) if _has_attention(parts.get(i, set()))]
    recurrent = [i for i in range(n_layers) if _is_recurrent(parts.get(i, set()))]
    layers = tuple(_layer(get, i, windowed[i]) for i in attention)
    layers = tuple(layer for layer in layers if layer.n_k)
    return ModelShape(
        architecture=name,
        layers=layers,
        n_recurrent=len(recurrent),
        state_bytes=len(recurrent) * _state_bytes(get),
        window=window if any(layer.is_windowed for layer in layers) else 0,
        n_trained=int(get("context_length", 0)),
        weight_bytes=n_bytes,
    )


def _has_attention(parts: set[str]) -> bool:
    if parts & {"attn_k.weight", "attn_kv_a_mqa.weight"}:
        return True
    return "attn_qkv.weight" in parts and not _is_recurrent(parts)


def _is_recurrent(parts: set[str]) -> bool:
    return any(part.startswith(("ssm_", "shortconv.", "time_mix_")) for part in parts)


def _windowed(name: str, n_layers: int, window: int, pattern: object) -> list[bool]:
    """Return for each layer whether it has a sliding window.

    `pattern` is the value in the file: a list with an entry per layer, a period, or None for
    llama.cpp's default for the architecture `name`.
    """
    if not window:
        return [False] * n_layers
    if isinstance(pattern, list):
        return [bool(item) for item in pattern] + [False] * (n_layers - len(pattern))
    period, is_first = _WINDOW_PATTERNS.get(name, (1, False))
    period = pattern if isinstance(pattern, int) and pattern > 0 else period
    if period == 0:
        return [True] * n_layers
    full = 0 if is_first else period - 1
    return [i % period != full for i in range(n_layers)]


def _layer(get: Any, index: int, is_windowed: bool) -> LayerKv:
    n_heads, n_kv = (
        _at(get(f"attention.{key}", 0), index) for key in ("head_count", "head_count_kv")
    )
    width = int(get("embedding_length", 0))
    size = width // n_heads if n_heads else 0
    if get("attention.key_length_mla"):  # one latent row, which is K and V
        return LayerKv(int(get("attention.key_length", size)), 0)
    if is_windowed:
        k = get("attention.key_length_swa", get("attention.key_length", size))
        v = get("attention.value_length_swa", get("attention.value_length", size))
    else:
        k, v = get("attention.key_length", size), get("attention.value_length", size)
    n_kv = n_kv if get("attention.head_count_kv") is not None else n_heads
    return LayerKv(n_kv * int(k), n_kv * int(v), is_windowed)


def _at(value: object, index: int) -> int:
    """Return the value of one layer, from a list with one per layer or a number for all of them."""
    if isinstance(value, list):
        return int(value[index]) if index < len(value) else 0
    return int(value) if isinstance(value, int) else 0


def _state_bytes(get: Any) -> int:
    """Return the bytes of the recurrent state of one layer for one session.

    As in llama.cpp (n_embd_r and n_embd_s of llama_hparams): the inputs of the convolution and the
    state of the state-space model, as 32-bit floats.
    """
    if length := get("shortconv.l_cache"):
        return 4 * int(get("embedding_length")) * (int(length) - 1)
    inner, state = int(get("ssm.inner_size", 0)), int(get("ssm.state_size", 0))
    kernel, groups = int(get("ssm.conv_kernel", 1)), int(get("ssm.group_count", 0))
    return 4 * ((kernel - 1) * (inner + 2 * groups * state) + state * inner)
