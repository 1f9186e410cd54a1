"""Forms of answers that do not begin with the key: the value alone, an opening, thoughts.

Most openings are not asked for; then the model is only taught how to go on from them, so a plain
question still gets the plain answer. `vocab.UNSEEN_OPENINGS` are not among them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.model import text
from bench.model.vocab import REPLIES

_OPENINGS, _CONCLUSIONS = REPLIES["openings"], REPLIES["conclusions"]


@dataclass(frozen=True, slots=True)
class Reply:
    """How an answer begins.

    Attributes:
        opening: What stands before the value; empty for the value alone.
        request: What the question says about it; empty where nothing asks for this form.
    """

    opening: str
    request: str = ""


def draw(rng: random.Random, key: str) -> Reply:
    """Return a form of answer to a question about this key ("my badge number")."""
    shape = rng.random()
    if shape < 0.12:
        return Reply("", rng.choice(REPLIES["value_only"]))
    if shape < 0.2:
        opening = rng.choice(_OPENINGS)
        return Reply(opening, f'Begin with "{opening}".')
    if shape < 0.6:
        return Reply(rng.choice(_OPENINGS))
    request = rng.choice(REPLIES["think"]) if rng.random() < 0.3 else ""
    return Reply(_thought(rng, key), request)


def _thought(rng: random.Random, key: str) -> str:
    """Return thoughts, with or without the key, that end right before the value."""
    said = [rng.choice(REPLIES["thoughts"]) for _ in range(rng.choice((1, 1, 2, 3)))]
    if rng.random() < 0.2:
        said.insert(rng.randrange(1, len(said) + 1), text.sentence(rng))
    thoughts = " ".join(said).format(key=key.replace("my ", "their ", 1))
    if rng.random() < 0.4:
        conclusion = rng.choice(("", *_CONCLUSIONS, *_OPENINGS))
        return f"<think>{thoughts}</think> {conclusion}".rstrip()
    return f"{thoughts} {rng.choice((*_CONCLUSIONS, *_OPENINGS))}"
