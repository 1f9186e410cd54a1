"""Forms of answers that do not begin with the key: the value alone, an opening, thoughts.

Most openings are not asked for; then the model is only taught how to go on from them, so a plain
question still gets the plain answer. `FORMATS` of `unseen.py` has two that are not among them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.model import text

_OPENINGS = (
    "It's;That is;That's;This is;That would be;The answer is;The answer:;Answer:;I remember:;"
    "You said;You told me;I think it is;As you said, it is;I know that it is;The value is;"
    "Here it is:;Sure:;Of course. It's;Yes, this is;I have noted;I find;The note says;Result:;"
    "Found:;Value =;->;In short:;According to you it is;That must be;It should be;You mean;"
    "This was;It was;It has to be;My notes say;The last I heard is;As far as I know it is;"
    "No problem, it is;I can see that it is;From what was told, the answer is"
).split(";")
_THOUGHTS = (
    "The user asks for a value.;The user wants to know {key}.;This was told before.;"
    "I have to find {key}.;I look for it in the chat.;The user asked about {key}.;Let me see.;"
    "Let me look it up.;There was a message about this.;I go through the messages.;"
    "First I search for what was told.;We talked about this.;I should repeat what I was told.;"
    "The question is about {key}.;Okay.;Hmm.;I must not make anything up.;One moment.;"
    "I check my notes.;Which message was it?;It was said by the user.;I need one value."
).split(";")
_CONCLUSIONS = (
    "So it is;So that's;Therefore it is;The note says;The message says;Then the answer is;"
    "The answer is;This gives;I found;The value that I found is;So I say;The user said;Thus:;"
    "So the answer must be"
).split(";")
_VALUE_ONLY = (
    "Answer with the value only.;Only the value, please.;Just the value.;Nothing but the value.;"
    "No other words, please.;Answer in short.;Give the bare value."
).split(";")
_THINK = "Think first.;Think before you answer.;Think aloud.;Take your time.".split(";")


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
        return Reply("", rng.choice(_VALUE_ONLY))
    if shape < 0.2:
        opening = rng.choice(_OPENINGS)
        return Reply(opening, f'Begin with "{opening}".')
    if shape < 0.6:
        return Reply(rng.choice(_OPENINGS))
    request = rng.choice(_THINK) if rng.random() < 0.3 else ""
    return Reply(_thought(rng, key), request)


def _thought(rng: random.Random, key: str) -> str:
    """Return thoughts, with or without the key, that end right before the value."""
    said = [rng.choice(_THOUGHTS) for _ in range(rng.choice((1, 1, 2, 3)))]
    if rng.random() < 0.2:
        said.insert(rng.randrange(1, len(said) + 1), text.sentence(rng))
    thoughts = " ".join(said).format(key=key.replace("my ", "their ", 1))
    if rng.random() < 0.4:
        conclusion = rng.choice(("", *_CONCLUSIONS, *_OPENINGS))
        return f"<think>{thoughts}</think> {conclusion}".rstrip()
    return f"{thoughts} {rng.choice((*_CONCLUSIONS, *_OPENINGS))}"
