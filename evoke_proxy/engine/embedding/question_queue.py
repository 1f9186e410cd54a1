"""Questions that wait to be embedded, fair between tenants.

The texts of a question are embedded in pieces, so that a long one keeps others waiting for the
time of one piece. It is asked beside the rendering of a prompt, before the request takes its place
in the queue for slots; so nothing else limits how many there are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping

# Characters of a piece, which has one text at least: about 40 ms on one core.
PIECE_CHARS = 1024
# Most questions of a tenant that wait.
MOST_WAITING = 16


class Question:
    """The texts of a question, by key; `done` once each has been embedded, or could not be."""

    def __init__(self, texts: Mapping[bytes, str]) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._pieces = deque(_pieces(texts))

    @property
    def has_more(self) -> bool:
        """Whether pieces are left."""
        return bool(self._pieces)

    def take(self) -> dict[bytes, str]:
        """The next piece; IndexError when none is left."""
        return self._pieces.popleft()

    def end(self) -> None:
        """Drop the pieces that are left, and wake who waits."""
        self._pieces.clear()
        if not self.done.done():
            self.done.set_result(None)


class QuestionQueue:
    """Gives the pieces of one tenant's questions after those of another.

    Within a tenant the earliest question comes first.
    """

    def __init__(self) -> None:
        # By tenant, the one whose turn is next first, unless the latest piece was its.
        self._waiting: dict[str, deque[Question]] = {}
        self._latest = ""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, tenant: str, question: Question) -> bool:
        """Add a question; returns False, and adds nothing, when too many of the tenant wait."""
        if len(self._waiting.get(tenant, ())) >= MOST_WAITING:
            return False
        self._waiting.setdefault(tenant, deque()).append(question)
        return True

    def take(self) -> tuple[Question, dict[bytes, str]]:
        """The next piece, and its question; KeyError when the queue is empty."""
        if not self._waiting:
            raise KeyError("no question waits")
        others = (tenant for tenant in self._waiting if tenant != self._latest)
        tenant = self._latest = next(others, self._latest)
        questions = self._waiting.pop(tenant)
        question = questions[0]
        piece = question.take()
        if not question.has_more:
            questions.popleft()
        if questions:
            self._waiting[tenant] = questions
        return question, piece

    def drop(self, tenant: str, question: Question) -> None:
        """Remove a question whose client does not wait any more, unless it has left the queue."""
        question.end()
        questions = self._waiting.get(tenant, deque())
        if question in questions:
            questions.remove(question)
            if not questions:
                del self._waiting[tenant]

    def clear(self) -> None:
        """Remove all questions; who waits for them is woken."""
        for questions in self._waiting.values():
            for question in questions:
                question.end()
        self._waiting.clear()


def _pieces(texts: Mapping[bytes, str]) -> Iterator[dict[bytes, str]]:
    piece, size = dict[bytes, str](), 0
    for key, text in texts.items():
        if piece and size + len(text) > PIECE_CHARS:
            yield piece
            piece, size = {}, 0
        piece[key] = text
        size += len(text)
    if piece:
        yield piece
