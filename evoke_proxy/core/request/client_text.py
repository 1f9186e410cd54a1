"""Tells what a user has written in a message from what their client has put around it.

Coding agents send more than the user has typed: reminders, the state of the editor, lists of files,
each between two tags. Their words would rank blocks that a question has nothing to do with.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from evoke_proxy.core.model.blocks import Role

# Names of tags around the words of the user, as clients write them: Cline and Roo Code, Cursor and
# Open WebUI, GitHub Copilot.
_USER_TAGS = frozenset(
    "task feedback user_message user_query user_request user-query userRequest question query"
    " prompt".split()
)
# Names of tags around what clients add to a message, which no later question is about: in Claude
# Code and opencode, Cline and Roo Code, Codex, Cursor, GitHub Copilot.
_REMINDER_TAGS = frozenset(
    "system-reminder system_reminder reminder reminderInstructions importantReminders"
    " environment_details environment_context environment_info env user_info workspace_info"
    " ide_opened_file open_and_recently_viewed_files editorContext timestamp git_status"
    " project_layout local-command-caveat recommended_plugins apps_instructions"
    " codex_internal_context".split()
)
# Names of tags around what they add as well, and what a later question may be about: files,
# documents, the output of commands. Open WebUI has such tags, too.
_CONTENT_TAGS = frozenset(
    "local-command-stdout local-command-stderr command-name command-message command-args"
    " ide_selection ide_diagnostics user_instructions user_rules rules additional_data"
    " attached_files current_file attachments attachment repoContext context task-notification"
    " goal_context INSTRUCTIONS".split()
)
_TAGS = {
    role: re.compile(rf"<({'|'.join(sorted(map(re.escape, names)))})(?: [^<>]{{0,200}})?>")
    for role, names in (
        (Role.USER, _USER_TAGS | _REMINDER_TAGS | _CONTENT_TAGS),
        (Role.TOOL, frozenset({"system-reminder"})),
    )
}
# The lines before the contents of files with rules for agents: of Claude Code, opencode and Codex.
# They are searched in so many characters of an addition, and of the text before it.
_RULES_FILE = re.compile(
    r"(?:\bcontents of|\binstructions from:?) [^\n]{0,300}?\b((?:claude|agents)\.md)\b"
    r"|# (agents\.md) instructions",
    re.IGNORECASE,
)
_RULES_CHARS, _CHARS_BEFORE = 2000, 200
# Of a longer question the beginning and the end are read, which have this many characters each.
_MAX_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class Element:
    """A part of a text between two tags.

    Attributes:
        name: Name of the tags.
        start: Index of the first character of the first tag.
        inner_start: Index of the first character between the tags.
        inner_end: Index after the last one.
        end: Index after the last character of the second tag.
    """

    name: str
    start: int
    inner_start: int
    inner_end: int
    end: int

    @property
    def is_reminder(self) -> bool:
        """Whether a client has added it, and no later question is about it."""
        return self.name in _REMINDER_TAGS

    def rules_files(self, text: str) -> tuple[str, ...]:
        """Return the names of files with rules for agents that it begins with; `text` has it."""
        if self.name in _USER_TAGS:
            return ()
        # Codex names the file in the line before.
        start = max(0, self.start - (_CHARS_BEFORE if self.name == "INSTRUCTIONS" else 0))
        end = min(self.inner_start + _RULES_CHARS, self.inner_end)
        found = (match[1] or match[2] for match in _RULES_FILE.finditer(text, start, end))
        return tuple(dict.fromkeys(found))


def asked_text(text: str) -> str:
    """Return the part of a message's text that the user has written.

    It is what stands between tags for the user's words, if the client writes such tags; else what
    stands outside of the tags for additions of clients. Returns the text itself if it has neither,
    or nothing would be left.
    """
    if "</" not in text:
        return text
    text = both_ends(text, _MAX_CHARS)
    own, outside, end = list[str](), list[str](), 0
    for element in elements_of(text, Role.USER):
        outside.append(text[end : element.start])
        end = element.end
        if element.name in _USER_TAGS:
            own.append(text[element.inner_start : element.inner_end].strip())
    outside.append(text[end:])
    found = "\n".join(filter(None, own)) or "\n".join(filter(None, map(str.strip, outside)))
    return found or text


def both_ends(text: str, chars: int) -> str:
    """Return a text, or its first and last `chars` characters when it is longer than both."""
    return text if len(text) <= 2 * chars else f"{text[:chars]}\n{text[-chars:]}"


def without_reminders(text: str, start: int, end: int, elements: Sequence[Element]) -> str:
    """Return a range of a message's text without the reminders in it.

    Returns all of it if nothing else would be left. `elements` are those of the whole text.
    """
    parts, at = list[str](), start
    first = bisect_right(elements, start, key=lambda element: element.end)
    for element in takewhile(lambda element: element.start < end, islice(elements, first, None)):
        if element.is_reminder:
            parts.append(text[at : max(at, element.start)])
            at = min(element.end, end)
    own = "".join([*parts, text[at:end]])
    return (own.strip() or text[start:end]) if elements else own


def searched_text(text: str, role: Role) -> str:
    """Return the text of a message by which it is found: without reminders, see above."""
    return without_reminders(text, 0, len(text), list(elements_of(text, role)))


def elements_of(text: str, role: Role) -> Iterator[Element]:
    """Yield the outermost elements of a message's text that clients write for its author.

    Their tags have known names. A tag that is never closed begins none.
    """
    tags = _TAGS.get(role)
    if tags is None or "</" not in text:
        return
    unclosed, at = set[str](), 0
    while (tag := tags.search(text, at)) is not None:
        name, at = tag[1], tag.end()
        if name in unclosed:
            continue
        closing = f"</{name}>"
        inner_end = text.find(closing, at)
        if inner_end < 0:
            unclosed.add(name)
            continue
        end = inner_end + len(closing)
        yield Element(name, tag.start(), at, inner_end, end)
        at = end
