"""Tells what a user has written in a message from what their client has put around it.

Coding agents send more than the user has typed: reminders, the state of the editor, lists of files,
each between two tags. Their words would rank blocks that a question has nothing to do with.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from evoke_proxy.core.model.blocks import Role

# Names of tags around the words of the user, as clients write them: Cline and Roo Code, Cursor and
# Open WebUI, GitHub Copilot. Others may write the second ones for what they ask about.
_USER_TAGS = frozenset(
    "feedback user_message user_query user_request user-query userRequest".split()
)
_MAYBE_USER_TAGS = frozenset("task question query prompt".split())
# Names of tags around what clients add to a message on their own: in Claude Code and opencode,
# Cline and Roo Code, Codex, GitHub Copilot.
_REMINDER_TAGS = frozenset(
    "system-reminder system_reminder reminderInstructions importantReminders environment_details"
    " environment_context environment_info workspace_info open_and_recently_viewed_files"
    " editorContext project_layout local-command-caveat recommended_plugins apps_instructions"
    " codex_internal_context".split()
)
# Names of tags around files, documents and the output of commands, which a later question may be
# about, and names that users write as well. Cursor and Open WebUI have such tags, too.
_CONTENT_TAGS = frozenset(
    "reminder env user_info ide_opened_file timestamp git_status"
    " local-command-stdout local-command-stderr command-name command-message command-args"
    " ide_selection ide_diagnostics user_instructions user_rules rules additional_data"
    " attached_files current_file attachments attachment repoContext context task-notification"
    " goal_context INSTRUCTIONS".split()
)
_TAGS = {
    role: re.compile(
        # At the start of a line, or directly behind another tag.
        rf"(?:(?<=[\n>])|^)[ \t]{{0,64}}<({'|'.join(sorted(map(re.escape, names)))})"
        r"(?: [^<>]{0,200})?>"
    )
    for role, names in (
        (Role.USER, _USER_TAGS | _MAYBE_USER_TAGS | _REMINDER_TAGS | _CONTENT_TAGS),
        (Role.TOOL, frozenset({"system-reminder"})),
    )
}
# A tag ends an element at the end of a line, or directly before another tag.
_LINE_END = re.compile(r"[ \t]{0,64}(?:[\r\n<]|\Z)")
# More elements of one message are read like all other text.
_MAX_ELEMENTS = 256
# After so many tags that are not closed at the end of a line, others of their name begin nothing.
_MAX_FAILED = 8
# How a reminder of Claude Code or opencode begins that is about a file: a later question may be
# about it, too. It is searched for in so many characters.
_ABOUT_FILE = re.compile(
    r"\b(?:contents of|instructions from|result of calling|called the \w+ tool|selected the lines"
    r"|selected lines|was (?:modified|changed|edited|read)|opened the file)\b",
    re.IGNORECASE,
)
_ABOUT_CHARS = 400
# What stands before and after a message that the user has sent while the agent worked, in a
# reminder of Claude Code or opencode. What stands after it is in so many characters.
_SENT_MEANWHILE = re.compile(
    r"\s{0,8}the user sent (?:a new|the following) message[^\n]{0,80}:[ \t]*\n", re.IGNORECASE
)
_ANSWER_IT = re.compile(
    r"\n\s{0,8}(?:important: after completing your current task|please address this message)"
    r"[^\n]*\s*\Z",
    re.IGNORECASE,
)
_ANSWER_CHARS = 400
# The lines before the contents of files with rules for agents: of Claude Code and opencode, and of
# Codex, which names the file and its directory. They are searched in so many characters of an
# addition, and of the text before it.
_RULES_HEAD = re.compile(
    r"(?:^|(?<=>))(?:contents of|instructions from:?) "
    r"|^# (agents\.md) instructions for ([^\n]{1,300})$",
    re.IGNORECASE | re.MULTILINE,
)
_RULES_NAME = re.compile(r"\b(?:claude|agents)\.md\b", re.IGNORECASE)
# Characters of a path before the name of the file.
_MAX_FOLDER_CHARS = 300
_RULES_CHARS, _CHARS_BEFORE = 1 << 16, 400
# Files with rules in one addition, more of which have no names.
_MAX_RULES_FILES = 8
# How a message of the user begins and ends that has the result of a tool, in Cline, Roo Code and
# Kilo Code, where a model calls tools in its text: "[read_file for 'a.py'] Result:", or the error
# for an answer without a call. What a tool was called with stands before _RESULT, in so many
# characters.
_RESULT_HEAD = re.compile(
    r"\[[A-Za-z][\w-]{1,80}(?:\] Result:| (?:for|in|to|completed)\b)"
    r"|\[ERROR\] You did not use a tool"
)
_RESULT, _CALL_CHARS = "] Result:", 1 << 16
_STATE, _STATE_CHARS = "</environment_details>", 128
# Tags around what the user says to such a result, and what stands before them: a line that ends
# with a colon. So many of the tags are looked at.
_SAID_TO_RESULT, _MAX_SAID = re.compile(r"\n<(?:answer|feedback|user_message)>"), 64
_BEFORE_SAID, _BEFORE_SAID_CHARS = re.compile(r":[ \t]{0,4}\n{0,2}\Z"), 7
# Of a longer question or result the beginning and the end are read, which have this many characters
# each.
MAX_CHARS = 1 << 16
# White space before and after what a client has added alone, and before its tag in the same line.
_SPACE_CHARS, _INDENT_CHARS = 128, 64
# Characters that are searched for a tag in one step, because a search holds the interpreter's lock
# until it has found something; and more than the longest tag has.
_PIECE_CHARS, _TAG_CHARS = 1 << 14, 512


@dataclass(frozen=True, slots=True)
class Element:
    """A part of a text between two tags.

    Attributes:
        name: Name of the tags.
        start: Index of the first character of the first tag.
        inner_start: Index of the first character between the tags.
        inner_end: Index after the last one.
        end: Index after the last character of the second tag.
        is_reminder: Whether no later question is about it, so that it is not searched.
        is_sent: Whether it is a message that the user has sent while the agent worked.
    """

    name: str
    start: int
    inner_start: int
    inner_end: int
    end: int
    is_reminder: bool = False
    is_sent: bool = False

    @classmethod
    def of(cls, text: str, tag: re.Match[str], inner_end: int, end: int) -> Element:
        """Return the element that begins with the tag `tag` of a text."""
        name, start, inner_start = tag[1], tag.start(1) - 1, tag.end()
        is_sent = is_reminder = False
        if name in _REMINDER_TAGS:
            about = min(inner_start + _ABOUT_CHARS, inner_end)
            is_sent = _SENT_MEANWHILE.match(text, inner_start, inner_end) is not None
            is_reminder = not is_sent and not _ABOUT_FILE.search(text, inner_start, about)
        return cls(name, start, inner_start, inner_end, end, is_reminder, is_sent)

    @property
    def is_added(self) -> bool:
        """Whether it is what clients add on their own: a reminder or a file."""
        return self.name in _REMINDER_TAGS and not self.is_sent

    def said(self, text: str) -> str:
        """Return what stands between its tags in a text, without what introduces `is_sent`."""
        inner = text[self.inner_start : self.inner_end]
        if self.is_sent and (heading := _SENT_MEANWHILE.match(inner)) is not None:
            end = _ANSWER_IT.search(inner, max(heading.end() - 1, len(inner) - _ANSWER_CHARS))
            inner = inner[heading.end() : max(heading.end(), end.start()) if end else None]
        return inner.strip()

    def rules_files(self, text: str) -> Sequence[str]:
        """Return the paths of the files with rules for agents whose contents it has in a text."""
        if self.is_reminder or self.is_sent or self.name in _USER_TAGS | _MAYBE_USER_TAGS:
            return ()
        # Codex names the file in the line before.
        is_of_codex = self.name == "INSTRUCTIONS"
        before = max(0, self.start - _CHARS_BEFORE) if is_of_codex else self.inner_start
        last = min(self.inner_start + _RULES_CHARS, self.inner_end)
        paths = dict.fromkeys(_rules_files(text, before, last))
        return tuple(islice(paths, _MAX_RULES_FILES))

    def without_joints(self, joints: Sequence[int]) -> Element:
        """Return it as it is in the text without the characters at these ascending indexes."""
        old = self.start, self.inner_start, self.inner_end, self.end
        start, inner_start, inner_end, end = (at - bisect_left(joints, at) for at in old)
        return replace(self, start=start, inner_start=inner_start, inner_end=inner_end, end=end)


def _rules_files(text: str, start: int, end: int) -> Iterator[str]:
    """Yield the paths of files with rules for agents that are named before their contents.

    The time is in proportion to the length, whatever the text: a client may send it to take time.
    """
    names = [match.span() for match in _RULES_NAME.finditer(text, start, end)]
    after = start
    for head in _RULES_HEAD.finditer(text, start, end):
        if head.start() < after:
            continue
        if head[1] is not None:
            yield f"{head[2].rstrip()}/{head[1]}"
            continue
        at = bisect_left(names, (head.end(), 0))
        if at == len(names) or names[at][0] - head.end() > _MAX_FOLDER_CHARS:
            continue
        if text.find("\n", head.end(), names[at][0]) < 0:
            after = names[at][1]
            yield text[head.end() : after]


def asked_text(text: str) -> str:
    """Return the part of a message's text that the user has written.

    It is what stands between tags for the user's words, if the client writes such tags; else what
    stands outside of the tags for additions of clients, with what stands between tags such as
    `<task>`. These are the user's words alone in a message with reminders. Returns the text itself
    if nothing would be left.
    """
    whole, text = text, both_ends(text, MAX_CHARS)
    if "</" not in text:
        return whole
    own, tasks, others, end, has_reminder = list[str](), list[str](), list[str](), 0, False
    for element in elements_of(text, Role.USER):
        others.append(text[end : element.start].strip())
        end = element.end
        inner = element.said(text)
        if element.name in _USER_TAGS:
            own.append(inner)
        elif element.is_sent:
            others.append(inner)
        elif element.name in _MAYBE_USER_TAGS:
            tasks.append(inner)
            others.append(inner)
        has_reminder |= element.is_added
    others.append(text[end:].strip())
    for parts in (own, tasks if has_reminder else [], others):
        if found := "\n".join(filter(None, parts)):
            return found
    return text


def has_only_additions(text: str) -> bool:
    """Return whether a message of the user has nothing but what a client has added to it.

    Coding agents send such messages after the results of tools: reminders, or the new contents of
    a file. A message that the user has sent while the agent worked is none. An empty text has no
    additions.
    """
    if not text[-_SPACE_CHARS:].rstrip().endswith(">"):
        return False
    at = 0
    for _ in range(_MAX_ELEMENTS + 1):
        space = text[at : at + _SPACE_CHARS]
        start = at + len(space) - len(space.lstrip())
        if start == len(text):
            return True
        element = _addition_at(text, at, start)
        if element is None:
            return False
        at = element.end
    return False


def _addition_at(text: str, at: int, start: int) -> Element | None:
    """Return what a client has added that begins at `start`; None if something else does.

    Before it is white space, from index `at` on.
    """
    first = max(at, start - _INDENT_CHARS)
    tag = _TAGS[Role.USER].search(text, first, start + _TAG_CHARS)
    if tag is None or tag.start(1) != start + 1 or tag[1] not in _REMINDER_TAGS:
        return None
    closing = f"</{tag[1]}>"
    inner_end = text.find(closing, tag.end())
    end = inner_end + len(closing)
    if inner_end < 0 or not _LINE_END.match(text, end):
        return None
    element = Element.of(text, tag, inner_end, end)
    return element if element.is_added else None


def is_result(text: str) -> bool:
    """Return whether a message of the user is the result of a tool called in the model's text.

    So is the error for an answer without a call. A result in which the user answers or comments is
    none, and neither is a text without the state of the editor at its end, which such clients send
    with each message. Of a long text only the beginning and the end are read.
    """
    head = _RESULT_HEAD.match(text)
    if head is None or not text[-_STATE_CHARS:].rstrip().endswith(_STATE):
        return False
    is_whole = head[0].endswith((_RESULT, "tool"))
    if not is_whole and text.find(_RESULT, head.end(), head.end() + _CALL_CHARS) < 0:
        return False
    text = both_ends(text, MAX_CHARS)
    said = (tag.start() for tag in islice(_SAID_TO_RESULT.finditer(text), _MAX_SAID))
    return not any(
        _BEFORE_SAID.search(text, max(0, at - _BEFORE_SAID_CHARS), at) is not None for at in said
    )


def both_ends(text: str, chars: int) -> str:
    """Return a text, or its first and last `chars` characters when it is longer than both."""
    return text if len(text) <= 2 * chars else f"{text[:chars]}\n{text[-chars:]}"


def without_reminders(text: str, start: int, end: int, elements: Sequence[Element]) -> str:
    """Return a range of a message's text without the reminders in it.

    Returns all of it if nothing else would be left. `elements` are those of the whole text.
    """
    parts, at = list[str](), start
    first = bisect_right(elements, start, key=lambda element: element.end)
    for i in range(first, bisect_left(elements, end, key=lambda element: element.start)):
        if elements[i].is_reminder:
            parts.append(text[at : max(at, elements[i].start)])
            at = min(elements[i].end, end)
    own = "".join([*parts, text[at:end]])
    return (own.strip() or text[start:end]) if elements else own


def searched_text(text: str, role: Role) -> str:
    """Return the text of a message by which it is found, see `without_reminders`."""
    return without_reminders(text, 0, len(text), list(elements_of(text, role)))


def elements_of(text: str, role: Role) -> Iterator[Element]:
    """Yield the outermost elements of a message's text that clients write for its author.

    Their tags have known names, and nothing beside them in their lines but other tags. At most the
    first _MAX_ELEMENTS are found.
    """
    tags = _TAGS.get(role)
    if tags is None or "</" not in text:
        return
    at, n_found, n_failed, closings = 0, 0, Counter[str](), dict[str, int]()
    while n_found < _MAX_ELEMENTS and (tag := _first_tag(tags, text, at)) is not None:
        name, at = tag[1], tag.end()
        if n_failed[name] >= _MAX_FAILED:
            continue
        closing = f"</{name}>"
        inner_end = closings.get(name, -1)
        if inner_end < at:  # else there is none before it
            inner_end = closings[name] = text.find(closing, at)
        end = inner_end + len(closing)
        if inner_end >= 0 and _LINE_END.match(text, end):
            yield Element.of(text, tag, inner_end, end)
            n_found += 1
            at = end
        else:
            n_failed[name] += 1 if inner_end >= 0 else _MAX_FAILED


def _first_tag(tags: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """Return the first tag from an index on; other threads can run between pieces."""
    for start in range(at, len(text), _PIECE_CHARS):
        tag = tags.search(text, start, start + _PIECE_CHARS + _TAG_CHARS)
        if tag is not None:
            return tag
    return None
