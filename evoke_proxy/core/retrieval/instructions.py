"""Recognizes standing instructions, restrictions, and questions that restrictions answer.

A standing instruction is what a user asks of every later answer. A restriction says what is not
possible; it decides whether a plan is good, and shares no word with the question about the plan.
English phrases only.
"""

from __future__ import annotations

import re

# A longer text is a document, and not an instruction.
_MAX_CHARS = 1200
# The start of a text, a sentence or a clause.
_SENTENCE = r"(?:^|[.!?:;,\n] ?)(?:and |but |also |so |then |please )?"
_STANDING = re.compile(
    r"\b(?:from now on|from here on|going forward|for the rest of (?:this|our|the) (?:chat|con))"
    r"|\bin (?:all|every|each) (?:of your )?(?:future )?(?:answer|reply|replies|response|message)"
    r"|\b(?:every time|each time|whenever|when) (?:you (?:answer|reply|respond|write|mention)"
    r"|i (?:ask|say|send|type|mention) )"
    r"|(?:" + _SENTENCE + r"|\b(?:you (?:must|should|shall|are to)|(?:want|need|like) you to"
    r"|make sure (?:to|you)|remember to|please) )(?:always|never) [a-z]"
    r"|" + _SENTENCE + r"(?:answer|reply|respond|write|speak)(?: to)?(?: me)?(?: only| always)? in "
    r"|" + _SENTENCE + r"(?:do not|don't) (?:ever|use any|mention)\b"
    r"|" + _SENTENCE + r"(?:call|address) me [a-z]"
    r"|\bwhatever i (?:ask|say|write|want)\b"
    r"|\b(?:all|anything|everything|whatever) (?:that )?you (?:tell|give|send|show|write|say)\b"
    r"|\byour (?:answers|replies|responses|explanations)\b"
    r"|\b(?:in|with|after|before|for|of) (?:all|every|each|any) (?:code |of your )?"
    r"(?:examples?|answers?|repl(?:y|ies)|responses?|snippets?|explanations?|summary|summaries)\b",
    re.IGNORECASE,
)


def is_standing_instruction(text: str) -> bool:
    """Return whether a user's text asks something of every later answer.

    English phrases only; other languages need `evoke_keep: pin`.
    """
    return len(text) <= _MAX_CHARS and _STANDING.search(text) is not None


# A longer text is a report, in which a negation restricts nothing.
_MAX_RESTRICTION_CHARS = 240
_RESTRICTION = re.compile(
    r"\b(?:can't|cannot|can not|couldn't|mustn't|must not|may not|not allowed|isn't allowed|won't"
    r"|never|no longer|there's no|there is no|out of order|only|at most|until|without|unable"
    r"|forbid|forbids|forbidden|prohibit\w{0,3}|banned|allerg\w{1,4}|intolerant|vegan|vegetarian"
    r"|deaf|blind|afraid|terrified|scared|fear of|hate|hates|expired|suspended|broken|closed"
    r"|budget|limit|diet|pregnant|newborn|asleep|sleeps|doctor)\b",
    re.IGNORECASE,
)
_MODAL = re.compile(r"(?:can|could|may|might|should|shall|would|am|is it)\b", re.IGNORECASE)
_MODAL_INSIDE = re.compile(r"\b(?:can|could|should|shall) (?:i|we)\b", re.IGNORECASE)


def is_restriction(text: str) -> bool:
    """Return whether a short text says what is not possible, allowed or liked."""
    return len(text) <= _MAX_RESTRICTION_CHARS and _RESTRICTION.search(text) is not None


def asks_for_advice(text: str) -> bool:
    """Return whether a question asks if something is possible or good."""
    return bool(_MODAL.match(text.lstrip()) or _MODAL_INSIDE.search(text))
