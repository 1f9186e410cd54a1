"""Groups saved blocks by session, and finds the sessions that a prompt may continue."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.layout import LabelHash
from evoke_proxy.core.prompt.rendered import Tokens


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session of which llama-server has saved blocks.

    Attributes:
        id: The id of the session.
        spans: The ranges of its copies, by label, ascending by their ends.
    """

    id: str
    spans: Mapping[str, Span]

    @property
    def end(self) -> int:
        """End position of its last copy."""
        return max(span.end for span in self.spans.values())


def saved_sessions(copies: Mapping[str, Mapping[str, Any]]) -> dict[str, SavedSession]:
    """Group the copies that llama-server lists by session id; copies without one are left out.

    `copies` are the elements of `blocks` in an answer about a slot, by label.
    """
    spans: defaultdict[str, dict[str, Span]] = defaultdict(dict)
    for label, copy in copies.items():
        session = copy.get("session")
        if isinstance(session, str) and session:
            spans[session][label] = Span(int(copy["p0"]), int(copy["p1"]))
    return {id: SavedSession(id, _by_end(of_session)) for id, of_session in spans.items()}


def _by_end(spans: Mapping[str, Span]) -> dict[str, Span]:
    return dict(sorted(spans.items(), key=lambda item: (item[1].end, item[1].start)))


def most_similar(sessions: Iterable[SavedSession], tokens: Tokens) -> list[SavedSession]:
    """Return the sessions whose first request begins like a prompt, the longest match first.

    The label of a block contains a hash of the tokens from the start of the prompt that the block
    was cut from. Hashes of later requests continue those of earlier blocks, so only the blocks of
    the first request can be compared without a call to llama-server. The tokens are hashed once for
    all sessions, and no further than the longest match.
    """
    candidates = list(sessions)
    rest = [iter(session.spans.items()) for session in candidates]
    ends = [0] * len(candidates)
    hashed = LabelHash(tokens)
    queue: list[tuple[int, int, str]] = []  # the next copy of each session: end, session, label

    def add_next(i: int) -> None:
        label, span = next(rest[i], ("", None))
        if span is not None and span.end <= len(tokens):
            heapq.heappush(queue, (span.end, i, label))

    for i in range(len(candidates)):
        add_next(i)
    while queue:
        end, i, label = heapq.heappop(queue)
        if label.endswith(f"-{hashed.up_to(end)}"):
            ends[i] = end
            add_next(i)
    order = sorted(range(len(candidates)), key=lambda i: -ends[i])
    return [candidates[i] for i in order if ends[i]]
