"""Exports a checkpoint as an f16 GGUF file (norms stay f32): `llama`, or `lfm2` for a hybrid."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes import command
from recipes.model.checkpoint import architecture, halves, load
from recipes.model.network import Model, Shape
from recipes.model.rows import TOKENIZER

Array = npt.NDArray[np.floating[Any]]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Opens a thought where `enable_thinking` is true, and leaves out those of earlier answers.
THINKING_TEMPLATE = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
_EXAMPLES = """examples:
  python -m recipes.model.export out/model/run/final.pt out/model/tiny-recall-f16.gguf
"""


def main() -> None:
    """Export one checkpoint."""
    parser = command("model.export", __doc__, _EXAMPLES)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--context", type=int, default=8192, help="declared context (8192)")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--thinking", action="store_true", help="with the template for thoughts")
    args = parser.parse_args()
    template = THINKING_TEMPLATE if args.thinking else CHAT_TEMPLATE
    tokenizer = {**json.loads(args.tokenizer.read_text()), "chat_template": template}
    export(load(args.checkpoint), args.out, tokenizer, args.context)
    print(args.out, args.out.stat().st_size, "bytes")


def export(model: Model, out: Path, tokenizer: Mapping[str, Any], context: int) -> None:
    """Write the model with its tokenizer, whose `chat_template` is a key of its own."""
    import gguf

    writer = gguf.GGUFWriter(str(out), architecture(model.shape))
    writer.add_name("tiny-recall")
    writer.add_description(
        "tiny synthetic fact-recall model trained from scratch; synthetic data only"
    )
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _write_shape(writer, model.shape, context)
    _write_tokenizer(writer, tokenizer, model.shape.vocab)
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
    if shape.convolved:  # a layer without heads for keys is a short convolution
        heads = [0 if i in shape.convolved else shape.kv_heads for i in range(shape.layers)]
        writer.add_head_count_kv(heads)
        writer.add_shortconv_l_cache(shape.taps)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab)


def _write_tokenizer(writer: Any, spec: Mapping[str, Any], size: int) -> None:
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
    writer.add_chat_template(spec["chat_template"])


def _write_tensors(writer: Any, model: Model) -> None:
    shape = model.shape
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    tables = {"token_embd": state["emb.weight"].astype(np.float16)}
    # lfm2's name for the norm at the end is what it is in other architectures' files for another.
    tables["token_embd_norm" if shape.convolved else "output_norm"] = state["nf.weight"]
    _add(writer, "", tables)
    for index in range(shape.layers):
        _add(writer, f"blk.{index}.", _layer(state, f"blocks.{index}.", shape))


def _add(writer: Any, where: str, tensors: Mapping[str, Array]) -> None:
    for name, array in tensors.items():
        writer.add_tensor(f"{where}{name}.weight", np.ascontiguousarray(array))


def _layer(state: Mapping[str, Array], here: str, shape: Shape) -> dict[str, Array]:
    """A layer's tensors by their names in the file."""

    def half(name: str) -> Array:
        return state[f"{here}{name}.weight"].astype(np.float16)

    gate, up = np.split(half("gu"), 2)
    found = {"attn_norm": state[f"{here}n1.weight"], "ffn_norm": state[f"{here}n2.weight"]}
    feed = {"ffn_gate": gate, "ffn_up": up, "ffn_down": half("dn")}
    if f"{here}kernel" in state:
        found |= {"shortconv.in_proj": half("into"), "shortconv.out_proj": half("o")}
        return found | {"shortconv.conv": state[f"{here}kernel"].T} | feed
    queries = shape.heads * shape.head_dim
    keys = queries + shape.kv_heads * shape.head_dim
    q, k, v = np.split(half("qkv"), [queries, keys])
    if shape.convolved:
        q, k = halves(q, shape.head_dim), halves(k, shape.head_dim)
        for name in ("q", "k"):
            weight = state[f"{here}{name}n.weight"]
            found[f"attn_{name}_norm"] = halves(weight, shape.head_dim)
    attention = {"attn_q": q, "attn_k": k, "attn_v": v, "attn_output": half("o")}
    return found | attention | feed


if __name__ == "__main__":
    main()
