"""Reads the conversations with labelled evidence, their split, and the kind of each question."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.fills import words
from evoke_proxy.core.retrieval.languages import FUNCTION_WORDS

HERE = Path(__file__).parent
DATA = HERE.parent / "data"
SPLITS = ("tuning", "reporting")
# The share of a question's content words that the evidence contains, from which it has its words.
_SAME_WORDS = 0.6
# Beginnings of words are compared, so that "moved" and "moving" are one word.
_STEM_CHARS = 5
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a conversation."""

    id: str  # unique in its conversation
    text: str  # what the user asks
    evidence: Sequence[int]  # indexes of the user's messages that answer it
    before: Sequence[Sequence[str]] = ()  # speaker and text of the turns directly before it
    types: Sequence[str] = ()  # what the source says about it: `Factoid`, `How-To` and others

    @property
    def messages(self) -> list[Message]:
        """The messages that are sent after the conversation."""
        roles = {"user": "user", "agent": "assistant"}
        turns = [{"role": roles[speaker], "content": text} for speaker, text in self.before]
        return [*turns, {"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a user, each answered with one word, and the questions about them."""

    id: str
    texts: Sequence[str]
    questions: Sequence[Question]

    @property
    def messages(self) -> list[Message]:
        """The conversation as a chat; message `n` of the user is at `2 * n`."""
        noted = {"role": "assistant", "content": "Noted."}
        return [m for text in self.texts for m in ({"role": "user", "content": text}, noted)]


def conversations(folder: Path = DATA) -> list[Conversation]:
    """Return all conversations of the data files."""
    found = []
    for name in ("bfcl_memory.json", "mtrag_un.json"):
        for each in json.loads((folder / name).read_text("utf-8")):
            questions = [
                Question(q["id"], q["text"], q["evidence"], q.get("before", ()), q.get("type", ()))
                for q in each["questions"]
            ]
            found.append(Conversation(each["id"], each["messages"], questions))
    return found


@cache
def split_of() -> Mapping[str, str]:
    """Return the split of each conversation."""
    listed = tomllib.loads((HERE / "splits.toml").read_text("utf-8"))
    return {name: split for split in SPLITS for name in listed[split]}


def kinds_of(talk: Conversation, question: Question) -> tuple[str, ...]:
    """Return the kinds of a question.

    * `same words`, `some words`, `other words`: whether at least 60 % of its content words, fewer,
      or none are in the evidence
    * `one message`, `several messages`: how many answer it
    * `follow-up`: there were turns before it, to which it may refer
    * what the source says, such as `factoid`
    """
    asked = content_words(question.text)
    evidence = content_words(" ".join(talk.texts[at] for at in question.evidence))
    share = len(asked & evidence) / len(asked) if asked else 0.0
    kind = "same words" if share >= _SAME_WORDS else "some words" if share else "other words"
    count = "one message" if len(question.evidence) == 1 else "several messages"
    follow_up = ("follow-up",) if question.before else ()
    return (kind, count, *follow_up, *(each.lower() for each in question.types))


def content_words(text: str) -> set[str]:
    """Return the beginnings of the words of a text, without function words."""
    found = {word for word in words(text) if len(word) > 1} - FUNCTION_WORDS
    return {word[:_STEM_CHARS] for word in found}
