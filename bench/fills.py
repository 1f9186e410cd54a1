"""Fills a budget with messages without the proxy: the baselines that every policy is compared with.

A fill takes whole messages in the order of its ranking while they fit. Rankings:

* `newest`; `grep`, by how many of the question's words a message contains, of equals the newest
* `bm25`; `bm25 near`, where words of the messages before and after count half
* `vectors`, `encoder`: by the cosine of the question with the best passage of a message, with the
  built-in word vectors and with an encoder
* `fused words`, `fused`, `fused all`: reciprocal ranks of `bm25` and `bm25 near`, of `bm25` and
  `vectors`, of all three; `fused encoder`: of both of words and `encoder`
* `oracle`: the needed messages, then the newest

`random` takes blocks of 64 tokens instead."""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.retrieval.encoding import Encoder
from evoke_proxy.core.retrieval.languages import FUNCTION_WORDS

SINGLE = ("newest", "random", "grep", "bm25", "bm25 near", "vectors")
FUSED = ("fused words", "fused", "fused all")
WITH_ENCODER = ("encoder", "fused encoder")
ORACLE = "oracle"
FILLS = (*SINGLE, *FUSED, *WITH_ENCODER, ORACLE)
# Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
# Learning Methods" (2009).
_RRF_K = 60
_NEAR_WEIGHT = 0.5
_PASSAGE_CHARS = 400
_BLOCK = 64
Floats = npt.NDArray[np.float64]


def fill(order: Sequence[int], sizes: Mapping[int, int], room: int) -> set[int]:
    """Return the messages, in this order, that still fit into the room."""
    taken = set()
    for message in order:
        if sizes[message] <= room:
            room -= sizes[message]
            taken.add(message)
    return taken


def random_blocks(end: int, room: int, seed: str) -> list[tuple[int, int]]:
    """Return blocks of 64 positions before `end`, drawn at random, that fit into the room."""
    blocks = [(start, min(end, start + _BLOCK)) for start in range(0, end, _BLOCK)]
    count = max(0, min(len(blocks), room // _BLOCK))
    return random.Random(seed).sample(blocks, count)


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def passages(text: str) -> list[str]:
    """Cut a text between sentences or lines into passages of about 400 characters."""
    found = [""]
    for part in re.split(r"(?<=[.!?])\s+|\n+", text):
        if found[-1] and len(found[-1]) + len(part) > _PASSAGE_CHARS:
            found.append("")
        found[-1] = f"{found[-1]} {part}".strip()
    return found


def best_first(scores: Floats) -> list[int]:
    """Indexes by score, of equals the newest first."""
    newest = np.arange(len(scores))[::-1]
    order: list[int] = newest[np.argsort(-scores[newest], kind="stable")].tolist()
    return order


def fused(orders: Sequence[Sequence[int]]) -> list[int]:
    """Fuse rankings of the same messages by their reciprocal ranks."""
    scores = np.zeros(len(orders[0]))
    for order in orders:
        scores[list(order)] += 1.0 / (_RRF_K + 1 + np.arange(len(order)))
    return best_first(scores)


class Rankings:
    """The rankings of the messages of one conversation for questions."""

    def __init__(
        self, texts: Sequence[str], vectors: Encoder | None = None, encoder: Encoder | None = None
    ) -> None:
        """Index the texts of all messages; rankings without their encoder are left out."""
        self._counts = [Counter(words(text)) for text in texts]
        self._bm25 = {"bm25": _Bm25(self._counts), "bm25 near": _Bm25(_with_near(self._counts))}
        self._passages = {
            name: _Passages(texts, each)
            for name, each in (("vectors", vectors), ("encoder", encoder))
            if each is not None
        }

    def orders(self, question: str) -> dict[str, list[int]]:
        """Return for each ranking the indexes of all messages, best first."""
        asked = list(dict.fromkeys(words(question)))
        content = [word for word in asked if word not in FUNCTION_WORDS]
        contained = [sum(word in count for word in content) for count in self._counts]
        found = {
            "newest": list(reversed(range(len(self._counts)))),
            "grep": best_first(np.array(contained, np.float64)),
            **{name: best_first(each.scores(asked)) for name, each in self._bm25.items()},
            **{name: best_first(each.scores(question)) for name, each in self._passages.items()},
        }
        found["fused words"] = fused([found["bm25"], found["bm25 near"]])
        if "vectors" in found:
            found["fused"] = fused([found["bm25"], found["vectors"]])
            found["fused all"] = fused([found["bm25"], found["bm25 near"], found["vectors"]])
        if "encoder" in found:
            found["fused encoder"] = fused([found["bm25"], found["bm25 near"], found["encoder"]])
        return found


def _with_near(counts: Sequence[Mapping[str, int]]) -> list[Mapping[str, float]]:
    """Return the word counts of each text plus half of those of the texts beside it."""
    found = list[Mapping[str, float]]()
    for at, own in enumerate(counts):
        count = defaultdict[str, float](float, own)
        for other in (*counts[max(0, at - 1) : at], *counts[at + 1 : at + 2]):
            for word, n in other.items():
                count[word] += _NEAR_WEIGHT * n
        found.append(count)
    return found


class _Bm25:
    """Plain BM25 (Robertson and others) over counted words."""

    def __init__(self, counts: Sequence[Mapping[str, float]]) -> None:
        self._counts = counts
        self._lengths = np.array([sum(count.values()) for count in counts], np.float64)
        self._in_texts = Counter(word for count in counts for word in count)

    def scores(self, asked: Sequence[str], k1: float = 1.2, b: float = 0.75) -> Floats:
        """Return the score of each text for the words of a question."""
        total = np.zeros(len(self._counts))
        mean = self._lengths.mean() if self._lengths.any() else 1.0  # no text, or none with words
        norms = k1 * (1 - b + b * self._lengths / mean)
        for word in asked:
            among = self._in_texts[word]
            rarity = math.log(1 + (len(self._counts) - among + 0.5) / (among + 0.5))
            n = np.array([count.get(word, 0) for count in self._counts], np.float64)
            total += rarity * n * (k1 + 1) / (n + norms)
        return total


class _Passages:
    """Cosines of questions with the best passage of each text."""

    def __init__(self, texts: Sequence[str], encoder: Encoder) -> None:
        cut = [passages(text) for text in texts]
        self._starts = np.cumsum([0, *map(len, cut)])[:-1]
        self._rows = encoder.documents([each for parts in cut for each in parts])
        self._encoder = encoder

    def scores(self, question: str) -> Floats:
        """Return the cosine [n] of each text."""
        cosines = self._rows @ self._encoder.queries([question])[0]
        best: Floats = np.maximum.reduceat(cosines, self._starts).astype(np.float64)
        return best


def bm25(texts: Sequence[str], asked: str) -> list[int]:
    """Indexes of the texts by plain BM25, of equals the newest first."""
    return best_first(_Bm25([Counter(words(text)) for text in texts]).scores(words(asked)))
