"""Builds the query of a turn from its request, and splits it into clauses."""

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

# A long text usually has its question at one end; this many characters of each end are read.
_MAX_CHARS = 2048
_MAX_CLAUSES = 8
_CLAUSE_CHARS = 256
# A turn of at most this many words needs the previous turn to be understood: "and the other one?"
_FEW_WORDS = 4

# The gap between two sentences or lines.
SENTENCE_GAP = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？])|\n+")  # noqa: RUF001
# The gap between two clauses of a sentence whose words are separated by single spaces.
_CLAUSE_GAP = re.compile(r",? (?:and|or|as well as) (?:also )?| ?, | & ", re.IGNORECASE)
_INTERROGATIVE = re.compile(
    r"(?:what|where|who|whom|whose|when|which|why|how|is|are|was|were|do|does|did|can|could|"
    r"should|will|would|tell|give|show|list|name|find|explain)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Text, clauses and names that the blocks of one turn are ranked by.

    Attributes:
        text: The text of the turn; of a long one, both ends.
        clauses: The clauses of `text`, each of which may need another block, then clauses of the
            previous turn that are needed to understand it.
        vectors: One unit vector [d] or None for each clause; empty without an embedder.
        requested: Names of blocks that the client asks to recover, see `blocks_named`.
        gold: Names or message indexes of the blocks that contain the answer; set only by benches.
        has_context_clause: Whether the last clause comes from the previous turn, whose topic this
            turn may have left.
        files: Paths in the arguments of this turn's tool calls.
    """

    text: str = ""
    clauses: tuple[str, ...] = ()
    vectors: tuple[Vectors | None, ...] = ()
    requested: tuple[str, ...] = ()
    gold: tuple[str | int, ...] = ()
    has_context_clause: bool = False
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, context: str = "") -> Query:
        """Build the query of a text, without vectors.

        Only both ends of a long text are read. The last clause of `context` is added as a clause.
        """
        text = _both_ends(text, _MAX_CHARS)
        clauses = [*split_clauses(text), *split_clauses(_both_ends(context, _MAX_CHARS))[-1:]]
        return cls(text, tuple(dict.fromkeys(clauses)))

    def embedded(self, vectors: Sequence[Vectors | None]) -> Query:
        """Return this query with the vectors of its clauses."""
        return replace(self, vectors=tuple(vectors))

    def narrowed(self, chars: int) -> Query:
        """Return this query without the middle of a text that is longer than twice `chars`."""
        if len(self.text) <= 2 * chars:
            return self
        narrow = Query.of(_both_ends(self.text, chars))
        vectors = dict(zip(self.clauses, self.vectors, strict=False))
        return narrow.embedded(
            [vectors.get(clause) for clause in narrow.clauses] if vectors else ()
        )

    @property
    def topic(self) -> Vectors | None:
        """The normalized mean of the clauses' vectors; None while one of them is missing."""
        vectors = [vector for vector in self.vectors if vector is not None]
        if not vectors or len(vectors) < len(self.clauses):
            return None
        total = np.sum(vectors, axis=0)
        topic: Vectors = (total / max(float(np.linalg.norm(total)), 1e-12)).astype(np.float32)
        return topic


def query_of(request: ChatRequest) -> Query:
    """Build the query of a request.

    The query includes the last user message when only tool results follow it. It includes the
    previous turn when this turn has only a few words.
    """
    user_texts = _user_texts(request.messages)
    text = request.query
    latest = next(user_texts, "")
    if latest and latest in text:
        words = _WORD.finditer(_both_ends(text, _MAX_CHARS))
        is_short = sum(1 for _ in islice(words, _FEW_WORDS + 1)) <= _FEW_WORDS
        query = Query.of(text, next(user_texts, "") if is_short else "")
        has_context_clause = len(query.clauses) > len(Query.of(text).clauses)
    else:
        query = Query.of(text, latest)
        has_context_clause = False
    return replace(
        query,
        has_context_clause=has_context_clause,
        requested=request.options.recover,
        gold=request.options.oracle,
        files=request.files,
    )


def split_clauses(text: str) -> list[str]:
    """Split a text into at most 8 clauses that each make one request, in text order.

    A clause is a sentence, or a part of a question between commas and conjunctions. A short entry
    of a list gets the first words of the first entry. Of more than
    8 clauses, the last questions are taken first, then the last other clauses.
    """
    sentences = [part.strip() for part in SENTENCE_GAP.split(text) if _WORD.search(part)]
    clauses = [clause for sentence in sentences for clause in _clauses_of(sentence)]
    if len(clauses) > _MAX_CLAUSES:
        questions = [i for i, clause in enumerate(clauses) if clause.endswith("?")][-_MAX_CLAUSES:]
        others = [i for i in range(len(clauses)) if i not in questions]
        room = _MAX_CLAUSES - len(questions)
        clauses = [clauses[i] for i in sorted([*questions, *(others[-room:] if room else ())])]
    return [_both_ends(clause, _CLAUSE_CHARS) for clause in clauses]


def _clauses_of(sentence: str) -> Iterator[str]:
    """Yield the clauses of one sentence; a statement is a single clause."""
    parts = [part for part in _CLAUSE_GAP.split(" ".join(sentence.split())) if part.strip()]
    if len(parts) < 2 or not (sentence.endswith("?") or _INTERROGATIVE.match(sentence)):
        yield sentence
        return
    head = parts[0].split()
    for i, part in enumerate(parts):
        words = part.split()
        is_list_entry = i and len(words) <= 3 and len(head) > len(words)
        if is_list_entry and not _INTERROGATIVE.match(part):
            words = [*head[: -len(words)], *words]
        else:
            head = words
        yield " ".join(words).rstrip("?") + "?"


def _user_texts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the texts of the user's messages, the latest first."""
    for message in reversed(messages):
        if message.role is Role.USER:
            yield message.text


def _both_ends(text: str, chars: int) -> str:
    """Return a text, or its first and last `chars` characters when it is longer than both."""
    return text if len(text) <= 2 * chars else f"{text[:chars]}\n{text[-chars:]}"
