"""Trains the tokenizer: byte-level BPE, 2,048 tokens, single digits, on training chats."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from bench import record
from bench.model import vocab
from bench.model.tasks import TASKS, session

# llama.cpp's pre-tokenizer `qwen2`: every digit by itself.
QWEN2 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
ROLES = ["system", "user", "assistant", "tool"]
_SINGLE = (
    vocab.NAMES,
    vocab.COLORS,
    vocab.ANIMALS,
    vocab.ADJECTIVES,
    vocab.NOUNS,
    vocab.VERBS,
    vocab.ADVERBS,
    vocab.FILE_STEMS,
    vocab.SETTINGS,
)
_PHRASES = (
    *vocab.NUMBER_ATTRIBUTES,
    *vocab.PAIR_ATTRIBUTES,
    *vocab.CODE_ATTRIBUTES,
    *vocab.NUMBER_PARAPHRASES,
    *vocab.PAIR_PARAPHRASES,
)
_EXAMPLES = """examples:
  python -m bench.model.tokenizer out/model/tokenizer.json
"""


def texts(chats: int) -> Iterator[str]:
    """Yield the training texts: chats, then every word of the lists often enough to be a token."""
    for index in range(chats):
        for task in TASKS:
            for message in session(random.Random(f"{task}-{index}"), task, 1000).messages:
                yield message["content"]
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
    parser = record.command("model.tokenizer", __doc__, _EXAMPLES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--chats", type=int, default=150, help="chats a task (150)")
    args = parser.parse_args()
    print(args.out, train(args.out, args.size, args.chats), "tokens")


if __name__ == "__main__":
    main()
