"""Reads conversations from JSON lines in the common formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoke_proxy.errors import ConfigError

Message = Mapping[str, Any]
# The names that ShareGPT files use for roles.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a log.

    Attributes:
        name: The file and the number of the conversation in it, from 1.
        messages: Its messages in the format of chat requests.
    """

    name: str
    messages: Sequence[Message]

    def answers(self) -> list[int]:
        """Return the indexes of the assistant's messages that are text and answer something."""
        return [
            index
            for index, message in enumerate(self.messages)
            if index and message["role"] == "assistant" and _is_text(message)
        ]

    @property
    def characters(self) -> int:
        """The length of its text as JSON, an upper bound of what a template makes of it."""
        return sum(len(json.dumps(message, ensure_ascii=False)) for message in self.messages)


def read_log(path: Path) -> list[Conversation]:
    """Read all conversations of a file that have an answer; ConfigError when it has none.

    Each line is one JSON object: `{"messages": [...]}` as in requests and in OpenAI's format for
    fine-tuning, `{"conversations": [{"from": "human", "value": ...}]}` as in ShareGPT, or one
    message, `{"role": ..., "content": ...}`. Messages of consecutive lines are one conversation; a
    system message begins the next.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    found = [
        Conversation(f"{path.name} {number}", messages)
        for number, messages in enumerate(_conversations(path, lines), 1)
    ]
    usable = [each for each in found if each.answers()]
    if not usable:
        raise ConfigError(f"{path} has no conversation with an answer of the assistant")
    return usable


def _conversations(path: Path, lines: Iterable[str]) -> Iterator[list[Message]]:
    loose: list[Message] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            if "role" in item:
                if item["role"] == "system" and loose:
                    yield loose
                    loose = []
                loose.append(_message(item))
                continue
            messages = [_message(each) for each in item.get("messages", item.get("conversations"))]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: not a conversation or message") from error
        yield messages
    if loose:
        yield loose


def _message(item: Mapping[str, Any]) -> Message:
    if "from" in item:
        role = str(item["from"])
        return {"role": _ROLES.get(role, role), "content": item["value"]}
    if not isinstance(item["role"], str):
        raise TypeError("a role is a text")
    return item


def _is_text(message: Message) -> bool:
    return isinstance(message.get("content"), str) and bool(message["content"].strip())
