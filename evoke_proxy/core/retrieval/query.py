"""What a turn is about: its text, the clauses it asks in, and their vectors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.messages import Message
from evoke_proxy.core.retrieval.encoding import Vectors

# What a long turn is about stands at its beginning or at its end; so much of both is looked up.
_MAX_CHARS = 2048
_MAX_PARTS = 8
_PART_CHARS = 256
# A turn of no more words than that leans on the one before it: "and the other one?"
_FEW_WORDS = 4

# What is between a sentence or a line and the next.
GAP = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？])|\n+")  # noqa: RUF001
# What is between the clauses of one sentence, whose words have single spaces between them.
_JOINT = re.compile(r",? (?:and|or|as well as) (?:also )?| ?, | & ", re.IGNORECASE)
_ASKING = re.compile(
    r"(?:what|where|who|whom|whose|when|which|why|how|is|are|was|were|do|does|did|can|could|"
    r"should|will|would|tell|give|show|list|name|find|explain)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What the blocks of one turn are ranked by.

    `parts` are the clauses of `text`, each of which may need a block of its own, and what of the
    turns before helps to understand it; with `leans` the last of them is from the turn before,
    which this one may go on about, or not. `files` are the paths its tools were called with.
    `vectors` are one unit vector [d] or None a part, or
    nothing at all without an embedder. `named` are blocks the client wants back, `gold` those of
    which a bench says that they hold the answer, see `naming.called`.
    """

    text: str = ""
    parts: tuple[str, ...] = ()
    vectors: tuple[Vectors | None, ...] = ()
    named: tuple[str, ...] = ()
    gold: tuple[str | int, ...] = ()
    leans: bool = False
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, context: str = "") -> Question:
        """The question a text asks, its clauses not embedded yet.

        Of a long text only both ends count. `context` is looked up too, and after it.
        """
        text = _ends(text, _MAX_CHARS)
        parts = [*clauses(text), *clauses(_ends(context, _MAX_CHARS))[-1:]]
        return cls(text, tuple(dict.fromkeys(parts)))

    def embedded(self, vectors: Sequence[Vectors | None]) -> Question:
        """The same with the vectors of its parts."""
        return replace(self, vectors=tuple(vectors))

    def narrowed(self, chars: int) -> Question:
        """The question without the middle of a text longer than twice `chars`."""
        if len(self.text) <= 2 * chars:
            return self
        narrow = Question.of(_ends(self.text, chars))
        known = dict(zip(self.parts, self.vectors, strict=False))
        return narrow.embedded([known.get(part) for part in narrow.parts] if known else ())

    @property
    def topic(self) -> Vectors | None:
        """The unit vector between those of the parts; None while one is missing."""
        found = [vector for vector in self.vectors if vector is not None]
        if not found or len(found) < len(self.parts):
            return None
        total = np.sum(found, axis=0)
        topic: Vectors = (total / max(float(np.linalg.norm(total)), 1e-12)).astype(np.float32)
        return topic


def asked(request: ChatRequest) -> Question:
    """What a request asks. What the user said last belongs to it when only tools have spoken since,
    and the turn before when there are next to no words in this one."""
    said = _said(request.messages)
    text = request.query
    latest = next(said, "")
    leans = bool(latest) and latest in text
    if leans:
        words = sum(1 for _ in islice(_WORD.finditer(_ends(text, _MAX_CHARS)), _FEW_WORDS + 1))
        latest = next(said, "") if words <= _FEW_WORDS else ""
    question = Question.of(text, latest)
    leans = leans and len(question.parts) > len(Question.of(text).parts)
    tags = request.tags
    return replace(question, leans=leans, named=tags.recover, gold=tags.oracle, files=request.files)


def clauses(text: str) -> list[str]:
    """The parts of a text that each ask for something, in its order; at most 8.

    Sentences, and what stands between the commas and ands of one that asks; of a list of short
    entries each with the words that the first has before it. Of many those that ask are taken,
    and of these the last.
    """
    sentences = [part.strip() for part in GAP.split(text) if _WORD.search(part)]
    found = [clause for one in sentences for clause in _split(one)]
    if len(found) > _MAX_PARTS:
        asking = [i for i, clause in enumerate(found) if clause.endswith("?")][-_MAX_PARTS:]
        rest = [i for i in range(len(found)) if i not in asking]
        room = _MAX_PARTS - len(asking)
        taken = sorted([*asking, *(rest[-room:] if room else ())])
        found = [found[i] for i in taken]
    return [_ends(clause, _PART_CHARS) for clause in found]


def _split(sentence: str) -> Iterator[str]:
    """The clauses of one sentence; a statement has one."""
    pieces = [piece for piece in _JOINT.split(" ".join(sentence.split())) if piece.strip()]
    if len(pieces) < 2 or not (sentence.endswith("?") or _ASKING.match(sentence)):
        yield sentence
        return
    head = pieces[0].split()
    for at, piece in enumerate(pieces):
        words = piece.split()
        if at and len(words) <= 3 and len(head) > len(words) and not _ASKING.match(piece):
            words = [*head[: -len(words)], *words]
        else:
            head = words
        yield " ".join(words).rstrip("?") + "?"


def _said(messages: Sequence[Message]) -> Iterator[str]:
    """What the user has said, the latest first."""
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].role is Role.USER:
            yield messages[at].text


def _ends(text: str, chars: int) -> str:
    return text if len(text) <= 2 * chars else f"{text[:chars]}\n{text[-chars:]}"
