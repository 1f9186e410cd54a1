"""Messages of a request, in the list llama-server makes of them, whatever the dialect.

The spans of a rendering count messages in that list, so the server's converters are followed here
message by message: which items become one message, and which message becomes several.
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


_BARE = frozenset(("role", "content"))
_PATH_ARGUMENTS = ("path", "file", "filePath", "file_path", "filename")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call an assistant asked for; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def path(self) -> str:
        """The file it is about; empty when no argument says so."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return ""
        if not isinstance(arguments, dict):
            return ""
        given = (arguments.get(key) for key in _PATH_ARGUMENTS)
        found = (value.strip() for value in given if isinstance(value, str))
        return next(filter(None, found), "")


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `keep` is "pin", "prefer" or "", `block_name` what the client calls it."""

    role: Role
    text: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    keep: str = ""
    block_name: str = ""

    @property
    def printed(self) -> str:
        """Roughly all that a chat template prints of the message."""
        calls = (f"{call.name} {call.arguments}" for call in self.tool_calls)
        return "\n".join(part for part in (self.text, *calls) if part)


class LazyMessages(Sequence[Message]):
    """Messages that are items of a body one for one, each read when somebody wants to know it.

    Of a long conversation that is only the end.
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
    """Messages of a chat completions body, one for one."""
    given = body.get("messages")
    return LazyMessages(given if isinstance(given, list) else ())


def from_completion(body: Mapping[str, Any]) -> list[Message]:
    """A raw prompt is one message."""
    prompt = body.get("prompt")
    return [Message(Role.USER, prompt if isinstance(prompt, str) else "")]


def from_responses(body: Mapping[str, Any]) -> list[Message]:
    """Messages of a responses body: what an assistant says and calls in a row is one message."""
    found: list[Message] = []
    if "instructions" in body:
        found.append(Message(Role.SYSTEM, _text(body["instructions"])))
    given = body.get("input")
    if isinstance(given, str):
        return [*found, Message(Role.USER, given)]
    said: list[Message] = []  # by the assistant, in a row
    for item in _items(given):
        message = _response_item(item)
        if message.role is Role.ASSISTANT:
            said.append(message)
            continue
        found += _joined(said)
        said = []
        found.append(message)
    return [*found, *_joined(said)]


def from_anthropic(body: Mapping[str, Any]) -> list[Message]:
    """Messages of a messages body: each tool result is a message of its own."""
    found: list[Message] = []
    if body.get("system") is not None:
        found.append(Message(Role.SYSTEM, _text(body["system"], "")))
    for item in _items(body.get("messages")):
        content = item.get("content")
        if isinstance(content, list):
            found += _anthropic_parts(item, list(_objects(content)))
        elif "content" in item or item.get("role") != "assistant":
            found.append(_plain(item))
    return found


def lists_of(body: Mapping[str, Any], known: Mapping[str, int]) -> Iterator[list[Any]]:
    """A body's lists of messages, of any dialect, each from behind its first `known` on."""
    for key in MESSAGE_LISTS:
        if isinstance(given := body.get(key), list):
            yield given[known.get(key, 0) :]


def has_media(body: Mapping[str, Any], known: Mapping[str, int]) -> bool:
    """Whether any message carries an image, a sound or a file, behind the first `known` of its
    list."""
    listed = [
        item
        for given in lists_of(body, known)
        for item in given
        if isinstance(item, dict) and (type(item.get("content")) is list or "output" in item)
    ]
    parts = (part for item in listed for part in _parts(item))
    return any(_string(part.get("type")) in _MEDIA_PARTS for part in parts)


def _plain(item: Mapping[str, Any]) -> Message:
    role, text = parse_role(_string(item.get("role"))), _text(item.get("content"))
    if item.keys() <= _BARE:  # almost every message has nothing else
        return Message(role, text)
    calls = (_tool_call(call) for call in _objects(item.get("tool_calls")))
    message = Message(
        role=role,
        text=text,
        name=_string(item.get("name")),
        tool_calls=tuple(calls),
        tool_call_id=_string(item.get("tool_call_id")),
    )
    return _marked(message, item)


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else _written(arguments)
    return ToolCall(_string(call.get("id")), _string(function.get("name")), text)


def _response_item(item: Mapping[str, Any]) -> Message:
    kind, call_id = item.get("type"), _string(item.get("call_id"))
    if kind == "function_call":
        call = ToolCall(call_id, _string(item.get("name")), _string(item.get("arguments")))
        return _marked(Message(Role.ASSISTANT, tool_calls=(call,)), item)
    if kind == "function_call_output":
        output = _text(item.get("output"))
        return _marked(Message(Role.TOOL, output, tool_call_id=call_id), item)
    if kind == "reasoning":
        return _marked(Message(Role.ASSISTANT), item)
    return _plain(item)


def _joined(said: Sequence[Message]) -> Sequence[Message]:
    """Messages in a row as the one that they are; none of none."""
    if len(said) < 2:
        return said
    whole = replace(
        said[0],
        text="".join(message.text for message in said),
        tool_calls=tuple(call for message in said for call in message.tool_calls),
        keep=next((message.keep for message in said if message.keep), ""),
        block_name=next((message.block_name for message in said if message.block_name), ""),
    )
    return [whole]


def _anthropic_parts(item: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> list[Message]:
    results = [_tool_result(part) for part in parts if part.get("type") == "tool_result"]
    kept = [part for part in parts if part.get("type") in ("text", "image", "tool_use")]
    if kept or any(_string(part.get("thinking")) for part in parts):
        calls = tuple(_tool_use(part) for part in kept if part.get("type") == "tool_use")
        role = parse_role(_string(item.get("role")))
        results.insert(0, Message(role, _text(kept), tool_calls=calls))
    return [_marked(message, item) for message in results]


def _tool_result(part: Mapping[str, Any]) -> Message:
    text = _text(part.get("content"), "")
    return Message(Role.TOOL, text, tool_call_id=_string(part.get("tool_use_id")))


def _tool_use(part: Mapping[str, Any]) -> ToolCall:
    arguments = _written(part.get("input"))
    return ToolCall(_string(part.get("id")), _string(part.get("name")), arguments)


def _written(value: object) -> str:
    """As JSON; empty when it is too deep for that, and llama-server's to refuse."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return ""


def _marked(message: Message, item: Mapping[str, Any]) -> Message:
    keep, name = _string(item.get("evoke_keep")), _string(item.get("evoke_name"))
    return replace(message, keep=keep, block_name=name) if keep or name else message


def _text(content: object, between: str = "\n") -> str:
    if isinstance(content, str):
        return content
    parts = (part for part in _objects(content) if _string(part.get("type")) in _TEXT_PARTS)
    return between.join(_string(part.get("text")) for part in parts)


def _parts(item: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    for key in ("content", "output"):
        given = item.get(key)
        if isinstance(given, list):
            for part in _objects(given):
                yield part
                yield from _objects(part.get("content"))


def _items(value: object) -> list[Mapping[str, Any]]:
    """A list's elements; one that is no object counts, because the server counts it."""
    given = value if isinstance(value, list) else []
    return [item if isinstance(item, dict) else {} for item in given]


def _objects(value: object) -> list[Mapping[str, Any]]:
    given = value if isinstance(value, list) else []
    return [item for item in given if isinstance(item, dict)]


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""
