"""Writes tiny ONNX encoders whose token vectors are the rows of a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper, save
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "green", "blue", "find:", "keep:")
PAD, UNK, CLS, SEP, RED, GREEN, BLUE, FIND, KEEP = range(len(WORDS))
TABLE = np.array(
    [[9, 9, 9], [1, 1, 1], [3, 4, 0], [0, 0, 2], [1, 0, 0], [0, 1, 0], [0, 0, 1], [5, 5, 0],
     [0, 5, 5]],
    dtype=np.float32,
)  # fmt: skip
ALL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def unit(*rows: int) -> npt.NDArray[np.float32]:
    """The unit vector in the direction of the mean of these rows of the table."""
    mean = TABLE[list(rows)].mean(0)
    return np.asarray(mean / np.linalg.norm(mean), dtype=np.float32)


# A file for `write`: vectors are means over the tokens.
POOLED_MEAN = {
    "1_Pooling__config": {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
}


def write(
    directory: Path,
    *,
    inputs: Sequence[str] = ALL_INPUTS,
    kind: int = TensorProto.INT64,
    outputs: Sequence[str] = ("last_hidden_state",),
    table: npt.NDArray[np.float32] = TABLE,
    batch: int | str = "n",
    file: str = "model.onnx",
    **files: Any,
) -> Path:
    """Writes an encoder with these inputs and outputs into `directory`, and returns it.

    The output `last_hidden_state` is the token's row; where the token type is not 0 or the mask not
    1, it is far from it. `sentence` is twice the first token's row, `scalar` one number; other
    outputs are zeros. `files` are written as JSON, with `/` for each `__` in a name.
    """
    (directory / file).parent.mkdir(parents=True, exist_ok=True)
    save(_model(inputs, kind, outputs, table, batch), str(directory / file))
    _tokenizer().save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        path = directory / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    return directory


def _model(
    inputs: Sequence[str],
    kind: int,
    outputs: Sequence[str],
    table: npt.NDArray[np.float32],
    batch: int | str,
) -> Any:
    constants = {"table": table, "hundred": np.float32(100), "nothing": np.float32(0)}
    constants |= {"first": np.array(0), "one": np.float32(1), "last_axis": np.array([-1])}
    nodes = [
        helper.make_node("Cast", [inputs[0]], ["ids"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
    ]
    last = "rows"
    for name in inputs[1:]:
        usual = "one" if name == "attention_mask" else "nothing"
        nodes += [
            helper.make_node("Cast", [name], [f"{name}_f"], to=TensorProto.FLOAT),
            helper.make_node("Sub", [f"{name}_f", usual], [f"{name}_off"]),
            helper.make_node("Mul", [f"{name}_off", "hundred"], [f"{name}_far"]),
            helper.make_node("Unsqueeze", [f"{name}_far", "last_axis"], [f"{name}_rows"]),
            helper.make_node("Add", [last, f"{name}_rows"], [f"{last}+{name}"]),
        ]
        last = f"{last}+{name}"
    for name in outputs:
        nodes += _output(name, last)
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, kind, [batch, "t"]) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _output(name: str, last: str) -> list[Any]:
    if name == "sentence":
        return [
            helper.make_node("Gather", [last, "first"], ["head"], axis=1),
            helper.make_node("Add", ["head", "head"], [name]),
        ]
    if name == "scalar":
        return [helper.make_node("ReduceMax", [last], [name], keepdims=0)]
    if name in ("last_hidden_state", "token_embeddings"):
        return [helper.make_node("Identity", [last], [name])]
    return [helper.make_node("Mul", [last, "nothing"], [name])]


def _tokenizer() -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    # Real files contain the lengths of the training, not the largest possible ones.
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8, pad_id=PAD)
    return tokenizer
