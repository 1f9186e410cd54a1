"""What a turn is about: its text, the clauses it asks in, and their vectors."""

from __future__ import annotations

from dataclasses import dataclass

from evoke_proxy.core.encoding import Vectors


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What the blocks of one turn are ranked by.

    `parts` are the clauses of `text`, each of which may need a block of its own; `vectors` are one
    unit vector [d] or None a part, or nothing at all without an embedder.
    """

    text: str = ""
    parts: tuple[str, ...] = ()
    vectors: tuple[Vectors | None, ...] = ()

    @classmethod
    def of(cls, text: str) -> Question:
        """The question a text asks, its clauses not embedded yet."""
        return cls(text, (text,) if text.strip() else ())

    def narrowed(self, chars: int) -> Question:
        """The question without the middle of a text longer than twice `chars`."""
        text = self.text
        return self if len(text) <= 2 * chars else self.of(f"{text[:chars]}\n{text[-chars:]}")
