"""Reads the messages of a request of any dialect, as llama-server counts them.

llama-server converts every dialect to one list of chat messages, to which the spans of a rendering
refer. `converters` does the same; this module reads the chat messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any, overload

from evoke_proxy.core.model.blocks import Role, parse_role
from evoke_proxy.core.request.client_text import is_result
from evoke_proxy.core.request.converters import (
    anthropic_messages,
    json_arguments,
    objects,
    responses_messages,
    string,
)
from evoke_proxy.core.request.json_edit import MESSAGE_LISTS

_MEDIA_PARTS = frozenset(
    ("image_url", "input_image", "image", "input_audio", "audio_url", "input_video", "video_url")
    + ("input_file", "file", "document")
)


_PLAIN_KEYS = frozenset(("role", "content"))
# Characters and commas of arguments that are searched for a path, in a few milliseconds, and
# characters of a path.
_MAX_SEARCHED_CHARS, _MAX_SEARCHED_COMMAS, _MAX_PATH_CHARS = 1_000_000, 16_384, 1000
# Characters of the tool calls of one message that may be in a prompt. Templates without tools leave
# calls of any length out, and to join their texts takes long.
_MAX_PRINTED_CHARS = 1 << 22
_PATH_ARGUMENTS = ("path", "file", "filePath", "file_path", "filename")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the assistant.

    Attributes:
        id: id that the result refers to.
        name: name of the tool.
        arguments: JSON text. Empty where the client sends values instead of a text, and so many of
            them that encoding them takes more than a few milliseconds.
    """

    id: str
    name: str
    arguments: str

    @property
    def path(self) -> str:
        """The file path in the arguments; empty when there is none.

        Arguments of more than a million characters or 16,384 commas have none, and a path has at
        most 1,000 characters. Each call parses the arguments again.
        """
        if len(self.arguments) > _MAX_SEARCHED_CHARS:
            return ""
        if self.arguments.count(",") > _MAX_SEARCHED_COMMAS:
            return ""
        try:
            # The time to convert an integer grows with the square of its digits.
            arguments = json.loads(self.arguments, parse_int=float)
        except (ValueError, RecursionError):
            return ""
        if not isinstance(arguments, dict):
            return ""
        values = (arguments.get(key) for key in _PATH_ARGUMENTS)
        paths = (value.strip() for value in values if isinstance(value, str))
        return next((path for path in paths if 0 < len(path) <= _MAX_PATH_CHARS), "")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: the role that the client gives it.
        text: text of all its parts.
        name: name of the author or tool.
        tool_calls: calls of the assistant.
        tool_call_id: id of the call that a tool result answers.
        keep: the client's mark, "pin", "prefer" or "".
        block_name: name that the client gave to its blocks.
        source: text that the prompt has for the message, where it differs from `text`.
        joints: indexes of the line breaks between the parts of `text`, which templates that print
            part by part leave out.
    """

    role: Role
    text: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    keep: str = ""
    block_name: str = ""
    source: str = ""
    joints: tuple[int, ...] = ()

    @property
    def author(self) -> Role:
        """Who has written it: a tool also where a client sends its result as one of the user."""
        return Role.TOOL if self.role is Role.USER and is_result(self.text) else self.role

    @property
    def printed(self) -> str:
        """Approximately the text that a chat template prints for the message.

        Of tool calls with more than 4 million characters the first ones.
        """
        if self.source:
            return self.source
        ends = accumulate(len(call.name) + len(call.arguments) for call in self.tool_calls)
        n_calls = sum(1 for _ in takewhile(lambda end: end <= _MAX_PRINTED_CHARS, ends))
        calls = (f"{call.name} {call.arguments}" for call in self.tool_calls[:n_calls])
        return "\n".join(part for part in (self.text, *calls) if part)


class LazyMessages(Sequence[Message]):
    """Messages that correspond one to one to chat messages in JSON, each parsed on first access.

    A turn of a long conversation parses only the last messages.
    """

    __slots__ = ("_items", "_read")

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items
        self._read: dict[int, Message] = {}

    def __len__(self) -> int:
        return len(self._items)

    def as_chat(self, start: int) -> list[Any]:
        """The messages from `start` on, as chat messages in JSON."""
        return list(self._items[start:])

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | Sequence[Message]:
        if isinstance(at, slice):
            return LazyMessages(self._items[at])
        if at not in self._read:
            item = self._items[at]
            self._read[at] = _plain(item if isinstance(item, dict) else {})
        return self._read[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def from_chat(body: Mapping[str, Any]) -> Sequence[Message]:
    """Read the messages of a chat completions body: one per item."""
    items = body.get("messages")
    return LazyMessages(items if isinstance(items, list) else ())


def from_completion(body: Mapping[str, Any]) -> list[Message]:
    """Read the raw prompt of a completions body as one message of the user."""
    prompt = body.get("prompt")
    return [Message(Role.USER, prompt if isinstance(prompt, str) else "")]


def from_responses(body: Mapping[str, Any]) -> Sequence[Message]:
    """Read the messages of a responses body; successive assistant items form one message."""
    return LazyMessages(responses_messages(body))


def from_anthropic(body: Mapping[str, Any]) -> Sequence[Message]:
    """Read the messages of an Anthropic body; each tool result is a separate message."""
    return LazyMessages(anthropic_messages(body))


def message_lists(body: Mapping[str, Any], skipped: Mapping[str, int]) -> Iterator[list[Any]]:
    """Yield the lists of messages in a body of any dialect.

    `skipped` maps the key of a list to the number of its first messages to leave out.
    """
    for key in MESSAGE_LISTS:
        if isinstance(items := body.get(key), list):
            yield items[skipped.get(key, 0) :]


def has_media(body: Mapping[str, Any], skipped: Mapping[str, int]) -> bool:
    """Whether a message has media: an image, a sound or a file.

    `skipped` maps the key of a list to the number of its first messages that are not searched.
    """
    with_parts = [
        item
        for items in message_lists(body, skipped)
        for item in items
        if isinstance(item, dict) and (type(item.get("content")) is list or "output" in item)
    ]
    parts = (part for item in with_parts for part in _parts(item))
    return any(string(part.get("type")) in _MEDIA_PARTS for part in parts)


def _plain(item: Mapping[str, Any]) -> Message:
    """Parse one chat message; wrong types become empty values."""
    role, parts = parse_role(string(item.get("role"))), _text_parts(item.get("content"))
    text, joints = "\n".join(parts), tuple(accumulate((len(one) + 1 for one in parts), initial=-1))
    joints = joints[1:-1]
    if item.keys() <= _PLAIN_KEYS:  # the usual case
        return Message(role, text, joints=joints)
    calls = (_tool_call(call) for call in objects(item.get("tool_calls")))
    message = Message(
        role=role,
        text=text,
        name=string(item.get("name")),
        tool_calls=tuple(calls),
        tool_call_id=string(item.get("tool_call_id")),
        joints=joints,
    )
    return _with_marks(message, item)


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json_arguments(arguments)
    return ToolCall(string(call.get("id")), string(function.get("name")), text)


def _with_marks(message: Message, item: Mapping[str, Any]) -> Message:
    keep, name = string(item.get("evoke_keep")), string(item.get("evoke_name"))
    return replace(message, keep=keep, block_name=name) if keep or name else message


def _text_parts(content: object) -> Sequence[str]:
    """The texts of a message's content.

    llama-server joins them with line breaks, unless the template prints part by part.
    """
    if isinstance(content, str):
        return (content,)
    parts = (part for part in objects(content) if part.get("type") == "text")
    return [string(part.get("text")) for part in parts]


def _parts(item: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    for key in ("content", "output"):
        parts = item.get(key)
        if isinstance(parts, list):
            for part in objects(parts):
                yield part
                yield from objects(part.get("content"))
