"""Reads the messages of a request of any dialect, as llama-server counts them.

llama-server converts every dialect to one list of messages, to which the spans of a rendering
refer. Its converters join some items into one message and split others into several.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from evoke_proxy.core.model.blocks import Role, parse_role
from evoke_proxy.core.request.json_edit import MESSAGE_LISTS

_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
_MEDIA_PARTS = frozenset(
    ("image_url", "input_image", "image", "input_audio", "audio_url", "input_video", "video_url")
    + ("input_file", "file", "document")
)


_PLAIN_KEYS = frozenset(("role", "content"))
_PATH_ARGUMENTS = ("path", "file", "filePath", "file_path", "filename")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the assistant.

    Attributes:
        id: id that the result refers to.
        name: name of the tool.
        arguments: JSON text.
    """

    id: str
    name: str
    arguments: str

    @property
    def path(self) -> str:
        """The file path in the arguments; empty when there is none."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return ""
        if not isinstance(arguments, dict):
            return ""
        values = (arguments.get(key) for key in _PATH_ARGUMENTS)
        paths = (value.strip() for value in values if isinstance(value, str))
        return next(filter(None, paths), "")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: author.
        text: text of all its parts.
        name: name of the author or tool.
        tool_calls: calls of the assistant.
        tool_call_id: id of the call that a tool result answers.
        keep: the client's mark, "pin", "prefer" or "".
        block_name: name that the client gave to its blocks.
    """

    role: Role
    text: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    keep: str = ""
    block_name: str = ""

    @property
    def printed(self) -> str:
        """Approximately the text that a chat template prints for the message."""
        calls = (f"{call.name} {call.arguments}" for call in self.tool_calls)
        return "\n".join(part for part in (self.text, *calls) if part)


class LazyMessages(Sequence[Message]):
    """Messages that correspond one to one to items of a body, each parsed on first access.

    A turn of a long conversation parses only the last messages.
    """

    __slots__ = ("_items", "_read")

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items
        self._read: dict[int, Message] = {}

    def __len__(self) -> int:
        return len(self._items)

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


def from_responses(body: Mapping[str, Any]) -> list[Message]:
    """Read the messages of a responses body; successive assistant items form one message."""
    messages: list[Message] = []
    if "instructions" in body:
        messages.append(Message(Role.SYSTEM, _text(body["instructions"])))
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, Message(Role.USER, items)]
    assistant_run: list[Message] = []
    for item in _items(items):
        message = _response_item(item)
        if message.role is Role.ASSISTANT:
            assistant_run.append(message)
            continue
        messages += _joined(assistant_run)
        assistant_run = []
        messages.append(message)
    return [*messages, *_joined(assistant_run)]


def from_anthropic(body: Mapping[str, Any]) -> list[Message]:
    """Read the messages of an Anthropic body; each tool result is a separate message."""
    messages: list[Message] = []
    if body.get("system") is not None:
        messages.append(Message(Role.SYSTEM, _text(body["system"], "")))
    for item in _items(body.get("messages")):
        content = item.get("content")
        if isinstance(content, list):
            messages += _anthropic_parts(item, list(_objects(content)))
        elif "content" in item or item.get("role") != "assistant":
            messages.append(_plain(item))
    return messages


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
    return any(_string(part.get("type")) in _MEDIA_PARTS for part in parts)


def _plain(item: Mapping[str, Any]) -> Message:
    role, text = parse_role(_string(item.get("role"))), _text(item.get("content"))
    if item.keys() <= _PLAIN_KEYS:  # the usual case
        return Message(role, text)
    calls = (_tool_call(call) for call in _objects(item.get("tool_calls")))
    message = Message(
        role=role,
        text=text,
        name=_string(item.get("name")),
        tool_calls=tuple(calls),
        tool_call_id=_string(item.get("tool_call_id")),
    )
    return _with_marks(message, item)


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else _encoded(arguments)
    return ToolCall(_string(call.get("id")), _string(function.get("name")), text)


def _response_item(item: Mapping[str, Any]) -> Message:
    kind, call_id = item.get("type"), _string(item.get("call_id"))
    if kind == "function_call":
        call = ToolCall(call_id, _string(item.get("name")), _string(item.get("arguments")))
        return _with_marks(Message(Role.ASSISTANT, tool_calls=(call,)), item)
    if kind == "function_call_output":
        output = _text(item.get("output"))
        return _with_marks(Message(Role.TOOL, output, tool_call_id=call_id), item)
    if kind == "reasoning":
        return _with_marks(Message(Role.ASSISTANT), item)
    return _plain(item)


def _joined(assistant_run: Sequence[Message]) -> Sequence[Message]:
    """Join successive messages into one; an empty list stays empty."""
    if len(assistant_run) < 2:
        return assistant_run
    joined = replace(
        assistant_run[0],
        text="".join(message.text for message in assistant_run),
        tool_calls=tuple(call for message in assistant_run for call in message.tool_calls),
        keep=next((message.keep for message in assistant_run if message.keep), ""),
        block_name=next(
            (message.block_name for message in assistant_run if message.block_name), ""
        ),
    )
    return [joined]


def _anthropic_parts(item: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> list[Message]:
    results = [_tool_result(part) for part in parts if part.get("type") == "tool_result"]
    content_parts = [part for part in parts if part.get("type") in ("text", "image", "tool_use")]
    if content_parts or any(_string(part.get("thinking")) for part in parts):
        calls = tuple(_tool_use(part) for part in content_parts if part.get("type") == "tool_use")
        role = parse_role(_string(item.get("role")))
        results.insert(0, Message(role, _text(content_parts), tool_calls=calls))
    return [_with_marks(message, item) for message in results]


def _tool_result(part: Mapping[str, Any]) -> Message:
    text = _text(part.get("content"), "")
    return Message(Role.TOOL, text, tool_call_id=_string(part.get("tool_use_id")))


def _tool_use(part: Mapping[str, Any]) -> ToolCall:
    arguments = _encoded(part.get("input"))
    return ToolCall(_string(part.get("id")), _string(part.get("name")), arguments)


def _encoded(value: object) -> str:
    """Encode as JSON; empty for a value nested too deep, which llama-server refuses."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return ""


def _with_marks(message: Message, item: Mapping[str, Any]) -> Message:
    keep, name = _string(item.get("evoke_keep")), _string(item.get("evoke_name"))
    return replace(message, keep=keep, block_name=name) if keep or name else message


def _text(content: object, between: str = "\n") -> str:
    if isinstance(content, str):
        return content
    parts = (part for part in _objects(content) if _string(part.get("type")) in _TEXT_PARTS)
    return between.join(_string(part.get("text")) for part in parts)


def _parts(item: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    for key in ("content", "output"):
        parts = item.get(key)
        if isinstance(parts, list):
            for part in _objects(parts):
                yield part
                yield from _objects(part.get("content"))


def _items(value: object) -> list[Mapping[str, Any]]:
    """The elements of a list; llama-server treats an element that is not an object as empty."""
    items = value if isinstance(value, list) else []
    return [item if isinstance(item, dict) else {} for item in items]


def _objects(value: object) -> list[Mapping[str, Any]]:
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""
