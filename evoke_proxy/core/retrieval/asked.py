"""Finds what a user asks in the text of a message, without what their client has put around it.

Coding agents send more than the user has typed: reminders, the state of the editor, lists of files,
each between two tags. Their words would rank blocks that the question has nothing to do with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Names of tags around the words of the user, as clients write them: Cline and Roo Code, Cursor and
# Open WebUI, GitHub Copilot.
_USER_TAGS = frozenset(
    "task feedback user_message user_query user_request user-query userRequest question query"
    " prompt".split()
)
# Names of tags around what the client adds: in Claude Code and opencode, Cline and Roo Code, Codex,
# Cursor, GitHub Copilot, Open WebUI.
_CLIENT_TAGS = frozenset(
    "system-reminder system_reminder reminder local-command-stdout local-command-stderr"
    " command-name command-message command-args ide_opened_file ide_selection ide_diagnostics"
    " environment_details environment_context environment_info env user_instructions"
    " user_info user_rules rules git_status project_layout additional_data attached_files"
    " open_and_recently_viewed_files current_file editorContext reminderInstructions attachments"
    " attachment workspace_info repoContext context local-command-caveat task-notification"
    " timestamp recommended_plugins importantReminders apps_instructions codex_internal_context"
    " goal_context".split()
)
_ALL_TAGS = _USER_TAGS | _CLIENT_TAGS
_TAG = re.compile(r"<([a-zA-Z][a-zA-Z_-]{2,40})(?: [^<>]{0,200})?>")
# Of a longer text the beginning and the end are read, which have this many characters each.
_MAX_CHARS = 1 << 16


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
    for name, start, inner_start, inner_end, after in _elements(text):
        outside.append(text[end:start])
        end = after
        if name in _USER_TAGS:
            own.append(text[inner_start:inner_end].strip())
    outside.append(text[end:])
    found = "\n".join(filter(None, own)) or "\n".join(filter(None, map(str.strip, outside)))
    return found or text


def both_ends(text: str, chars: int) -> str:
    """Return a text, or its first and last `chars` characters when it is longer than both."""
    return text if len(text) <= 2 * chars else f"{text[:chars]}\n{text[-chars:]}"


def _elements(text: str) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield the outermost elements of a text with a known name.

    Each as its name, and the positions where it starts, where its content starts and ends, and
    where it ends.
    """
    unclosed, at = set[str](), 0
    while (tag := _TAG.search(text, at)) is not None:
        name, at = tag[1], tag.end()
        if name in unclosed or name not in _ALL_TAGS:
            continue
        closing = f"</{name}>"
        inner_end = text.find(closing, at)
        if inner_end < 0:
            unclosed.add(name)
            continue
        yield name, tag.start(), at, inner_end, inner_end + len(closing)
        at = inner_end + len(closing)
