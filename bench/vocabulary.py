"""Counts and places tokens as a model's vocabulary does, without a server.

The vocabulary is one of the vocabulary-only models of the pinned llama.cpp; the prompt is rendered
with the chatml template, as llama-server renders it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from bench.random_models import vocabulary_file
from bench.slot_rows import TokenizedChat
from evoke_proxy.core.model.block_table import Positions
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.prompt.segment import sentence_starts_in
from evoke_proxy.server_build.cache import cache_dir

# The words of Qwen2's vocabulary, as its tokenizer.json cuts them.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL = 3
_GENERATION = "<|im_start|>assistant\n"


@lru_cache
def qwen2() -> Tokenizer:
    """Return the tokenizer of ggml-vocab-qwen2.gguf; it is converted once, into the cache."""
    path = cache_dir() / "models" / "qwen2-tokenizer.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _converted(gguf.GGUFReader(vocabulary_file("qwen2"))).save(str(path))
    return Tokenizer.from_file(str(path))


def _converted(reader: Any) -> Tokenizer:
    names = ("tokens", "merges", "token_type")
    tokens, pairs, kinds = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in names)
    merges = [tuple(pair.split(" ", 1)) for pair in pairs]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, by_bytes])
    special = (token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL)
    added = [AddedToken(token, special=True, normalized=False) for token in special]
    made.add_special_tokens(added)
    return made


class Renderer:
    """Renders chats with the chatml template; remembers the tokens of each message."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer or qwen2()
        # Tokens of a message by author and text, and the positions in it where sentences start.
        self._rendered: dict[tuple[str, str], tuple[Tokens, Positions]] = {}
        self._ending = np.array(self._tokenizer.encode(_GENERATION).ids, np.int32)

    def __call__(self, messages: Sequence[Mapping[str, str]]) -> TokenizedChat:
        """Return the prompt of a chat that waits for an answer."""
        roles = [message["role"] for message in messages]
        texts = [message["content"] for message in messages]
        parts = [self._tokens(*message) for message in zip(roles, texts, strict=True)]
        ends = list(accumulate(len(tokens) for tokens, _ in parts))
        starts = [own + end - len(tokens) for (tokens, own), end in zip(parts, ends, strict=True)]
        tokens = np.concatenate([*(tokens for tokens, _ in parts), self._ending])
        return TokenizedChat(tokens, ends, roles, np.concatenate(starts))

    def _tokens(self, role: str, text: str) -> tuple[Tokens, Positions]:
        """Return the tokens of a message, and the positions where its sentences start."""
        if (role, text) not in self._rendered:
            head = f"<|im_start|>{role}\n"
            encoded = self._tokenizer.encode(f"{head}{text}<|im_end|>\n")
            gaps = [at + len(head) for at in sentence_starts_in(text)]
            ends = [end for _, end in encoded.offsets]
            starts = np.searchsorted(ends, gaps, "right").astype(np.int64)
            self._rendered[role, text] = np.array(encoded.ids, np.int32), starts
        return self._rendered[role, text]
