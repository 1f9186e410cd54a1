"""What a conversation is at: the topic of its latest turns, and where that began."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evoke_proxy.core.retrieval.encoding import Vectors

_OLD, _NEW = 0.7, 0.3
# A question with less in common with the task than this is another task.
_SAME_TASK = 0.3


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """`focus` is a unit vector [d], None without an embedder; `begins` is the position where the
    client said that a new task begins, 0 when it never did."""

    focus: Vectors | None = None
    begins: int = 0

    def after(self, topic: Vectors | None, begins: int | None) -> Task:
        """The task with another question: the moving average of what was asked, 0.7 old and 0.3
        new, or the new topic alone where it is another one (cosine below 0.3) or the client says
        so by a position for `begins`. Without a topic the focus stays, but not across a boundary.
        """
        there = self.begins if begins is None else begins
        old = None if begins is not None else self.focus
        if topic is None or old is None or old.shape != topic.shape:
            return Task(old if topic is None else topic, there)
        if float(old @ topic) < _SAME_TASK:
            return Task(topic, there)
        mixed = _OLD * old + _NEW * topic
        return Task((mixed / np.linalg.norm(mixed)).astype(np.float32), there)
