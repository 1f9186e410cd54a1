"""Exports a checkpoint as an f16 GGUF file of the architecture `llama` (norms stay f32)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.model.checkpoint import load
from bench.model.network import Model, Shape
from bench.model.rows import TOKENIZER

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_EXAMPLES = """examples:
  python -m bench.model.export out/model/run/final.pt out/model/tiny-recall-f16.gguf
"""


def main() -> None:
    """Export one checkpoint."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.model.export",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--context", type=int, default=8192, help="declared context (8192)")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    args = parser.parse_args()
    export(load(args.checkpoint), args.out, args.tokenizer, args.context)
    print(args.out, args.out.stat().st_size, "bytes")


def export(model: Model, out: Path, tokenizer: Path, context: int) -> None:
    """Write the model with its tokenizer and chat template."""
    import gguf

    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_name("tiny-recall")
    writer.add_description(
        "tiny synthetic fact-recall model trained from scratch; synthetic data only"
    )
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _write_shape(writer, model.shape, context)
    _write_tokenizer(writer, json.loads(tokenizer.read_text()), model.shape.vocab)
    _write_tensors(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, shape: Shape, context: int) -> None:
    writer.add_context_length(context)
    writer.add_embedding_length(shape.d)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab)


def _write_tokenizer(writer: Any, spec: dict[str, Any], size: int) -> None:
    import gguf

    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    special = {token["content"] for token in spec["added_tokens"]}
    tokens = [f"<|unused{index}|>" for index in range(size)]
    for token, index in vocab.items():
        tokens[index] = token
    special.update(token for token in tokens if token not in vocab)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_bos_token_id(vocab["<|endoftext|>"])
    writer.add_pad_token_id(vocab["<|pad|>"])
    writer.add_add_bos_token(False)
    writer.add_eot_token_id(vocab["<|im_end|>"])
    writer.add_chat_template(CHAT_TEMPLATE)


def _write_tensors(writer: Any, model: Model) -> None:
    shape = model.shape
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    half = {name: np.ascontiguousarray(array.astype(np.float16)) for name, array in state.items()}
    writer.add_tensor("token_embd.weight", half["emb.weight"])
    writer.add_tensor("output_norm.weight", state["nf.weight"])
    queries = shape.heads * shape.head_dim
    keys = queries + shape.kv_heads * shape.head_dim
    for index in range(shape.layers):
        here, there = f"blocks.{index}.", f"blk.{index}."
        writer.add_tensor(f"{there}attn_norm.weight", state[f"{here}n1.weight"])
        writer.add_tensor(f"{there}ffn_norm.weight", state[f"{here}n2.weight"])
        q, k, v = np.split(half[f"{here}qkv.weight"], [queries, keys])
        gate, up = np.split(half[f"{here}gu.weight"], 2)
        attention = {"attn_q": q, "attn_k": k, "attn_v": v, "attn_output": half[f"{here}o.weight"]}
        feed = {"ffn_gate": gate, "ffn_up": up, "ffn_down": half[f"{here}dn.weight"]}
        for name, array in (attention | feed).items():
            writer.add_tensor(f"{there}{name}.weight", np.ascontiguousarray(array))


if __name__ == "__main__":
    main()
