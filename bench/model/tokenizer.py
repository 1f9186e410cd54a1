"""Trains the tokenizer: byte-level BPE, 2,048 tokens, single digits, on first-generation chats."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from bench.model import vocab
from bench.model.chat import END, START
from bench.model.corpus_v1 import raw_text

# llama.cpp's pre-tokenizer `qwen2`: every digit by itself.
QWEN2 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
ROLES = ["system", "user", "assistant", "tool"]
_SINGLE = (
    vocab.NAMES,
    vocab.PLACES,
    vocab.THINGS,
    vocab.COLORS,
    vocab.ANIMALS,
    vocab.ADJECTIVES,
    vocab.NOUNS,
    vocab.VERBS,
    vocab.ADVERBS,
    vocab.FILE_STEMS,
    vocab.ENV_KEYS,
    vocab.ENV_PREFIXES,
)
_PHRASES = (
    *vocab.NUMBER_ATTRIBUTES,
    *vocab.WORD_ATTRIBUTES,
    *vocab.PLACE_ATTRIBUTES,
    *vocab.RECORD_FIELDS,
    *vocab.RECORDS,
    *vocab.EVENTS,
)
_EXAMPLES = """examples:
  python -m bench.model.tokenizer out/model/tokenizer.json
"""


def texts(chats: int) -> Iterator[str]:
    """Yield the training texts: chats, then every word of the lists often enough to be a token."""
    rng = random.Random(1)
    for _ in range(chats):
        said = raw_text(rng, 3000).replace(START, "\n").replace(END, "\n")
        yield from said.split("\n\n")
    words = [word for group in _SINGLE for word in group]
    words += [word for phrase in _PHRASES for word in phrase.split()]
    for word in words:
        yield from [" " + word] * 40
    for word in [*vocab.NAMES, "My", "Your", "The", "What"]:
        yield from [word] * 40
    for role in ROLES:
        yield from [role] * 3000


def train(out: Path, size: int, chats: int) -> int:
    """Train, write tokenizer.json and return how many tokens there are."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(chats), trainer)
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out))
    return int(tokenizer.get_vocab_size())


def main() -> None:
    """Train one tokenizer."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.model.tokenizer",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--chats", type=int, default=1500, help="how many chats to train on (1500)")
    args = parser.parse_args()
    print(args.out, train(args.out, args.size, args.chats), "tokens")


if __name__ == "__main__":
    main()
