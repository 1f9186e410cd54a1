"""Training rows: chats with random position gaps and removed spans, packed into batches.

Gaps spread a short row over the whole context, so that a model trained on 256 tokens recalls over
thousands. Removed spans imitate eviction: the facts that are asked for stay, much of the rest is
missing, and its positions are kept, as after eviction, or closed."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.model.chat import Chat, Encoder, Question, Span
from recipes.model.corpus import chat as draw_chat

PAD, START_ID = 3, 1
MAX_POSITION = 12_288  # beyond the declared context: with holes a session's positions run on
BLOCK = 64  # tokens of the largest block that an eviction drops
TOKENIZER = Path(__file__).with_name("tokenizer.json")

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
# Phase -> (row length, rows, share of the steps)
PHASES: Sequence[Sequence[tuple[int, int, float]]] = (
    ((256, 16, 0.15), (512, 8, 0.4), (1024, 4, 0.45)),
    ((512, 8, 0.25), (1024, 4, 0.4), (2048, 2, 0.35)),
    ((1024, 4, 0.3), (2048, 2, 0.3), (4096, 1, 0.3), (8192, 1, 0.1)),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows x length arrays, and the questions with their rows."""

    ids: Ints
    targets: Ints
    weights: npt.NDArray[np.float32]
    positions: Ints
    questions: Sequence[tuple[int, Question]]


def encoder(path: Path = TOKENIZER) -> tuple[Any, Encoder]:
    """Return the tokenizer and its encode function; needs the `tokenizers` package."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(path))
    return tokenizer, tokenizer.encode


def sparsify(rng: random.Random, chat: Chat, length: int) -> tuple[Chat, Ints]:
    """Drop what no question needs until `length` tokens are left; also return their positions."""
    count = len(chat.ids)
    keep, dropped = _needed(rng, chat), np.zeros(count, bool)
    excess = count - length
    if rng.random() < 0.8:
        excess = _drop_blocks(rng, chat, keep, dropped, excess)
    for _ in range(400):
        if excess <= 0:
            break
        start = rng.randrange(count)
        size = min(excess, rng.choice((4, 8, 16, 64, 256, 1024)))
        segment = np.zeros(count, bool)
        segment[start : start + size] = True
        chosen = np.nonzero(segment & ~keep & ~dropped)[0][:excess]
        dropped[chosen] = True
        excess -= len(chosen)
    kept = np.nonzero(~dropped)[0][:length]
    return _select(chat, kept), kept


def _needed(rng: random.Random, chat: Chat) -> Mask:
    keep = np.zeros(len(chat.ids), bool)
    keep[: rng.choice((1, 4, 16, 32))] = True
    for question in chat.questions:
        if question.fact:
            before = rng.choice((0, 0, 2, 5, 10))
            start, end = question.fact
            keep[max(0, start - before) : end + rng.choice((0, 1, 3))] = True
        keep[max(0, question.answer[0] - 25) : question.answer[1] + 2] = True
    return keep


def _drop_blocks(rng: random.Random, chat: Chat, keep: Mask, dropped: Mask, excess: int) -> int:
    """Drop blocks as an eviction would: pieces of at most BLOCK tokens of one message."""
    starts = [index for index, token in enumerate(chat.ids) if token == START_ID]
    ends = [*starts[1:], len(chat.ids)]
    blocks = [
        (at, min(at + BLOCK, end))
        for start, end in zip(starts, ends, strict=True)
        for at in range(start, end, BLOCK)
    ]
    rng.shuffle(blocks)
    for start, end in blocks:
        if excess <= 0:
            break
        if start and not keep[start:end].any():
            dropped[start:end] = True
            excess -= end - start
    return excess


def _select(chat: Chat, kept: Ints) -> Chat:
    place = -np.ones(len(chat.ids) + 1, int)
    place[kept] = np.arange(len(kept))
    moved = (_move(question, place) for question in chat.questions)
    ids, weights = [chat.ids[i] for i in kept], [chat.weights[i] for i in kept]
    return Chat(ids, weights, [question for question in moved if question])


def _move(question: Question, place: Ints) -> Question | None:
    answer, value = _moved(question.answer, place), _moved(question.value, place)
    if answer is None or value is None or answer[1] - answer[0] != _size(question.answer):
        return None
    if question.fact is None:
        return replace(question, answer=answer, value=value)
    fact = _moved(question.fact, place)
    return replace(question, answer=answer, value=value, fact=fact) if fact else None


def _size(span: Span) -> int:
    return span[1] - span[0]


def _moved(span: Span, place: Ints) -> Span | None:
    token_positions = place[span[0] : span[1]]
    return (
        (int(token_positions[0]), int(token_positions[-1]) + 1)
        if (token_positions >= 0).all()
        else None
    )


def row(
    rng: random.Random, length: int, encode: Encoder, thinking: float = 0.0
) -> tuple[Chat, Ints]:
    """Return a chat and its positions: 25 % with dropped blocks, 45 % with gaps, else as it is."""
    shape = rng.random()
    if shape < 0.25:
        longer = int(length * rng.choice((1.3, 1.6, 2.0, 3.0)))
        chat, positions = sparsify(rng, draw_chat(rng, longer, encode, thinking), length)
        if rng.random() < 0.25:
            positions = np.arange(len(chat.ids))
    else:
        chat = draw_chat(rng, length, encode, thinking)
        positions = np.arange(len(chat.ids))
        if shape < 0.7 and len(chat.ids) > 8:
            positions = positions + _gaps(rng, chat)
    return chat, np.minimum(positions, MAX_POSITION - 1)


def _gaps(rng: random.Random, chat: Chat) -> Ints:
    count = len(chat.ids)
    total = rng.random() ** 2 * (MAX_POSITION - count)
    borders = [i for i in range(1, count) if chat.ids[i] == START_ID] or [1]
    cuts = [rng.choice(borders) for _ in range(min(rng.choice((1, 2, 4, 8, 16, 64)), len(borders)))]
    shares = [rng.random() for _ in cuts]
    gaps = np.zeros(count, int)
    for cut, share in zip(cuts, shares, strict=True):
        gaps[cut] += int(share / sum(shares) * total)
    return np.cumsum(gaps)


def batch(
    rng: random.Random, length: int, rows: int, encode: Encoder, thinking: float = 0.0
) -> Batch:
    """Return that many rows; the token at place t + 1 is the target of place t."""
    ids = np.full((rows, length), PAD, np.int64)
    weights, positions = np.zeros((rows, length), np.float32), np.zeros((rows, length), np.int64)
    questions: list[tuple[int, Question]] = []
    for index in range(rows):
        chat, token_positions = row(rng, length, encode, thinking)
        count = len(chat.ids)
        ids[index, :count], weights[index, :count] = chat.ids, chat.weights
        positions[index, :count] = token_positions
        positions[index, count:] = token_positions[-1] if count else 0
        questions += [(index, question) for question in chat.questions]
    targets, shifted = np.full((rows, length), PAD, np.int64), np.zeros_like(weights)
    targets[:, :-1], shifted[:, :-1] = ids[:, 1:], weights[:, 1:]
    return Batch(ids, targets, shifted, positions, questions)


def worker(seed: int, queue: Any, phase: Any, scale: int = 1, thinking: float = 0.0) -> None:
    """Fill the queue with (phase, length, rows, batch) for ever; `phase[0]` says which phase.

    The sequence of lengths is the same for every worker and rank; `scale` multiplies the rows.
    """
    os.nice(3)
    _, encode = encoder()
    rng, current = random.Random(seed), -1
    while True:
        if phase[0] != current:
            current = phase[0]
            lengths = random.Random(77 + current)
        shapes = PHASES[current]
        length, rows, _ = lengths.choices(shapes, [share for _, _, share in shapes])[0]
        made = batch(rng, length, rows * scale, encode, thinking)
        queue.put((current, length, rows * scale, made))


def start_worker(
    seed: int, queue: Any, phase: Any, scale: int = 1, thinking: float = 0.0
) -> multiprocessing.Process:
    """Start a process that runs `worker`; it ends with this one."""
    process = multiprocessing.Process(
        target=worker, args=(seed, queue, phase, scale, thinking), daemon=True
    )
    process.start()
    return process
