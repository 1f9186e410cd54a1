"""What saved blocks tell about the sessions that made them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.layout import labels
from evoke_proxy.core.prompt.rendered import Tokens


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session that llama-server has copies of.

    Attributes:
        id: The id of the session.
        spans: The ranges of its copies, by label.
    """

    id: str
    spans: Mapping[str, Span]

    @property
    def end(self) -> int:
        """End of its last copy, tokens."""
        return max(span.end for span in self.spans.values())


def saved_sessions(copies: Mapping[str, Mapping[str, Any]]) -> dict[str, SavedSession]:
    """The sessions of copies that llama-server lists, by id; copies without a session are left out.

    `copies` are the elements of `blocks` in an answer about a slot, by label.
    """
    spans: defaultdict[str, dict[str, Span]] = defaultdict(dict)
    for label, copy in copies.items():
        session = copy.get("session")
        if isinstance(session, str) and session:
            spans[session][label] = Span(int(copy["p0"]), int(copy["p1"]))
    return {id: SavedSession(id, found) for id, found in spans.items()}


def most_similar(sessions: Iterable[SavedSession], tokens: Tokens) -> list[SavedSession]:
    """The sessions whose first request may have begun like a prompt, the longest match first.

    Labels contain a hash of the tokens from the start of the request that the block was first part
    of, so only blocks of the first request can be compared without asking llama-server.
    """
    matches = [(_matching_end(session, tokens), session) for session in sessions]
    similar = [(end, session) for end, session in matches if end]
    return [session for _, session in sorted(similar, key=lambda pair: -pair[0])]


def _matching_end(session: SavedSession, tokens: Tokens) -> int:
    """Where the last block ends whose label is that of the first request's tokens; 0 for none."""
    ordered = sorted(session.spans.items(), key=lambda item: (item[1].end, item[1].start))
    spans = [span for _, span in ordered if span.end <= len(tokens)]
    expected = labels(session.id, tokens, spans) if spans else []
    pairs = zip(ordered, expected, strict=False)
    return max((span.end for (label, span), name in pairs if label == name), default=0)
