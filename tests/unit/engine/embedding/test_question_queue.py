"""Questions wait in pieces: tenants take turns, and each has few that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from evoke_proxy.engine.embedding.question_queue import (
    MOST_WAITING,
    PIECE_CHARS,
    Question,
    QuestionQueue,
)


def _long(name: str, n_pieces: int = 3) -> Question:
    """A question of several pieces, whose keys begin with a name."""
    return Question({f"{name}{i}".encode(): "a" * PIECE_CHARS for i in range(n_pieces)})


def _taken(queue: QuestionQueue) -> list[str]:
    """The keys of all pieces, in their order."""
    keys = []
    while queue:
        keys.append(",".join(key.decode() for key in queue.take()[1]))
    return keys


def _in_loop(use: Callable[[QuestionQueue], None]) -> None:
    async def run() -> None:
        use(QuestionQueue())

    asyncio.run(run())


def test_short_texts_are_one_piece_and_long_ones_several() -> None:
    def use(queue: QuestionQueue) -> None:
        lengths = (1, 2, PIECE_CHARS - 3, 1, 2 * PIECE_CHARS, 1)
        queue.put("", Question({b"%d" % i: "a" * size for i, size in enumerate(lengths)}))
        assert _taken(queue) == ["0,1,2", "3", "4", "5"]

    _in_loop(use)


def test_a_tenant_waits_for_one_piece_of_another_and_not_for_its_questions() -> None:
    def use(queue: QuestionQueue) -> None:
        for number in range(4):
            queue.put("loud", _long(f"l{number}-"))
        queue.take()
        queue.put("quiet", Question({b"q": "why?"}))
        assert _taken(queue)[:3] == ["q", "l0-1", "l0-2"]

    _in_loop(use)


def test_within_a_tenant_the_earliest_question_comes_first() -> None:
    def use(queue: QuestionQueue) -> None:
        for name in "ab":
            queue.put("", _long(name, 2))
        assert _taken(queue) == ["a0", "a1", "b0", "b1"]

    _in_loop(use)


def test_few_questions_of_a_tenant_wait() -> None:
    def use(queue: QuestionQueue) -> None:
        assert all(queue.put("loud", _long("l")) for _ in range(MOST_WAITING))
        assert not queue.put("loud", _long("l"))
        assert queue.put("quiet", _long("q"))
        while queue.take()[0].has_more:
            pass
        assert queue.put("loud", _long("l"))

    _in_loop(use)


def test_a_dropped_question_leaves_nothing() -> None:
    def use(queue: QuestionQueue) -> None:
        gone, stays = _long("g"), _long("s", 1)
        queue.put("", gone)
        queue.put("", stays)
        queue.take()
        queue.drop("", gone)
        queue.drop("", gone)
        assert gone.done.done()
        assert _taken(queue) == ["s0"]
        queue.drop("", stays)
        with pytest.raises(KeyError):
            queue.take()

    _in_loop(use)


def test_who_waits_is_woken_when_the_queue_is_cleared() -> None:
    def use(queue: QuestionQueue) -> None:
        question = _long("q")
        queue.put("", question)
        queue.clear()
        assert question.done.done() and not queue

    _in_loop(use)
