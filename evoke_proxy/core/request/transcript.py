"""Finds the turns of a conversation that a client sends as the text of one message.

Some clients put the whole conversation into one message that grows with every turn:

    User: My badge number is 48213.
    Assistant: Noted.
    User: What is my badge number?
    Assistant:

A label is one to three words before a colon at the start of a line, or one of the usual words as a
heading (`### User`). The text is a transcript when
it ends with the label of the assistant, or with a turn of the user after one of the assistant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request.messages import Message

# Labels are compared in lower case.
_USER_LABELS = frozenset("user human q question customer client instruction you me".split())
_ASSISTANT_LABELS = frozenset("assistant ai bot a answer chatbot model response".split())
# A label with the marks of lists, headings and bold type around it. All parts are bounded, so that
# a search takes time in proportion to the text.
_LABEL = re.compile(
    r"^[#>*\[]{0,6} ?([^\W\d_]\w{0,23}(?: \w{1,24}){0,2})[\]*]{0,3} ?:\*{0,3}(?=\s|\Z)"
    r"|^#{2,6} (\w{1,16})[ \t]{0,8}$",
    re.MULTILINE,
)
# A text with more turns is not divided.
MAX_TURNS = 4096
# Characters that are searched in one step, because a search holds the interpreter's lock until it
# has found something. A label is much shorter.
_PIECE_CHARS = 16 * 1024


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """One turn of a transcript, as ranges of characters of its message.

    Attributes:
        role: SYSTEM for the text before the first label, else that of the speaker.
        start: Start of the label; the turns tile the message.
        text_start: Start of what is said.
        text_end: End of what is said; in the last turn, before the label of the assistant.
        end: Start of the next turn.
    """

    role: Role
    start: int
    text_start: int
    text_end: int
    end: int

    def message(self, text: str) -> Message:
        """Return the turn as a message; `text` is that of the complete transcript."""
        said = text[self.text_start : self.text_end].strip()
        return Message(self.role, said, source=text[self.start : self.end])


@dataclass(frozen=True, slots=True)
class _Labelled:
    """A label in the text: where it begins and ends, and its words in lower case."""

    start: int
    end: int
    name: str


def transcript_turns(text: str) -> tuple[TranscriptTurn, ...]:
    """Return the turns of a transcript in text order; empty when the text is none."""
    labels = list(islice(_labels(text), MAX_TURNS + 2))
    if not labels or len(labels) > MAX_TURNS + 1:
        return ()
    cue = labels[-1] if not text[labels[-1].end :].strip() else None
    speakers = _speakers(labels, cue)
    labels = [label for label in labels if label.name in speakers]
    if not _is_transcript(labels, speakers, cue):
        return ()
    if cue is not None:
        labels.pop()
    ends = [*(label.start for label in labels[1:]), len(text)]
    turns = [
        TranscriptTurn(speakers[label.name], label.start, label.end, end, end)
        for label, end in zip(labels, ends, strict=True)
    ]
    if cue is not None:
        last = turns[-1]
        turns[-1] = TranscriptTurn(last.role, last.start, last.text_start, cue.start, len(text))
    start = turns[0].start
    if text[:start].strip():
        turns.insert(0, TranscriptTurn(Role.SYSTEM, 0, 0, start, start))
    else:
        first = turns[0]
        turns[0] = TranscriptTurn(first.role, 0, first.text_start, first.text_end, first.end)
    return tuple(turns)


def _labels(text: str) -> Iterator[_Labelled]:
    """Yield the labels in a text, in its order; other threads can run between pieces."""
    at = 0
    while at < len(text):
        stop = text.rfind("\n", at, at + _PIECE_CHARS) + 1 or at + _PIECE_CHARS
        for found in _LABEL.finditer(text, at, stop):
            yield _Labelled(found.start(), found.end(), (found[1] or found[2]).casefold())
        at = stop
        if text[at - 1 : at] != "\n":  # the rest of a long line has no label
            at = text.find("\n", at) + 1 or len(text)


def _speakers(labels: Sequence[_Labelled], cue: _Labelled | None) -> dict[str, Role]:
    """Return the roles of the speakers, by label.

    A label at the end of the text names the assistant, and those of the turns directly before the
    assistant's name users.
    """
    names = {label.name for label in labels}
    speakers = {name: Role.USER for name in names & _USER_LABELS}
    speakers |= {name: Role.ASSISTANT for name in names & _ASSISTANT_LABELS}
    if cue is not None and cue.name not in speakers:
        before_assistant = {one.name for one, next_ in pairwise(labels) if next_.name == cue.name}
        if sum(label.name == cue.name for label in labels) > 1:
            speakers |= {name: Role.USER for name in before_assistant if name != cue.name}
            speakers[cue.name] = Role.ASSISTANT
    return speakers


def _is_transcript(
    labels: Sequence[_Labelled], speakers: dict[str, Role], cue: _Labelled | None
) -> bool:
    """Return whether the text with these labels ends with a turn that the assistant answers."""
    roles = [speakers[label.name] for label in labels]
    if cue is not None:
        return roles[-2:] == [Role.USER, Role.ASSISTANT] and labels[-1] == cue
    return len(roles) > 2 and roles[-1] is Role.USER and Role.ASSISTANT in roles
