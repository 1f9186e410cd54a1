"""The truncate policy: make a conversation fit by leaving its oldest messages out of the request.

This changes what is asked, unlike every other policy: the text is not in the prompt any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.model.blocks import Role, parse_role
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.request.json_edit import remove_elements
from evoke_proxy.core.request.json_parsing import parse_in_pieces, parsed_json
from evoke_proxy.core.request.large_json import cut_long_strings
from evoke_proxy.core.request.messages import Message, from_anthropic, from_chat, from_responses

# Of each dialect the list that holds a conversation, and who reads it.
_LISTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Sequence[Message]]]] = {
    "chat": ("messages", from_chat),
    "responses": ("input", from_responses),
    "messages": ("messages", from_anthropic),
}
# More of the budget than this share is not kept free for an answer: a client that asks for as much
# as there can be would be left without any history. The stream holds the rest.
_MAX_RESERVE_SHARE = 4


@dataclass(frozen=True, slots=True)
class _Item:
    """One element of that list: `messages` are the indexes of what llama-server makes of it,
    `calls` the tool calls it asks for, `results` those whose results it brings."""

    role: Role
    messages: range
    calls: frozenset[str] = frozenset()
    results: frozenset[str] = frozenset()


def prompt_limit(budget: int, reserve: int) -> int:
    """How many tokens a prompt may have when `reserve` are wanted for the answer."""
    return budget - min(reserve, budget // _MAX_RESERVE_SHARE)


def truncate_messages(
    body: bytes, dialect: str, messages: Sequence[Message], rendered: Rendered, limit: int
) -> tuple[bytes, tuple[Message, ...]]:
    """`body` without what makes its prompt longer than `limit` tokens, and the messages left.

    `messages` and `rendered` are those of `body`; it is returned itself when it fits. Oldest first,
    whole exchanges go (a question with its answers, so that templates which insist on turns stay
    content), then, of the last exchange, whole steps (tool calls with their results). What the
    client pinned, system messages, the last user message and the last step after it always stay,
    fitting or not. RequestError when the body is no JSON object, KeyError on another dialect.
    """
    excess = len(rendered.tokens) - limit
    if excess <= 0:
        return body, tuple(messages)
    items = _items(body, dialect)
    costs = {item.index: len(item.span) for item in rendered.spans}
    dropped: set[int] = set()
    gone: set[int] = set()
    for unit in _units(items):
        of_unit = {index for i in unit for index in items[i].messages}
        if excess <= 0:
            break
        if not _pinned(messages, of_unit):
            dropped |= set(unit)
            gone |= of_unit
            excess -= sum(costs.get(index, 0) for index in of_unit)
    left = tuple(message for index, message in enumerate(messages) if index not in gone)
    return remove_elements(body, _LISTS[dialect][0], dropped), left


def _pinned(messages: Sequence[Message], indexes: Collection[int]) -> bool:
    return any(messages[i].keep == "pin" for i in indexes if i < len(messages))


def _items(body: bytes, dialect: str) -> list[_Item]:
    key, read = _LISTS[dialect]
    # Only the structure counts here, so long strings are left out.
    parsed = parse_in_pieces(cut_long_strings(body).rest, parsed_json)
    given = parsed.get(key) if isinstance(parsed, dict) else None
    if not isinstance(given, list):
        return []
    items: list[_Item] = []
    at = len(read({**parsed, key: []}))  # the system prompt, where it is no message of the list
    for element in given:
        found = read({key: [element]})
        role = _role(element, found)
        # llama-server makes one message of what an assistant says and calls in a row.
        runs_on = dialect == "responses" and items and items[-1].role is role is Role.ASSISTANT
        start = at - 1 if runs_on else at
        at = start + len(found)
        calls = frozenset(call.id for message in found for call in message.tool_calls)
        results = frozenset(message.tool_call_id for message in found) - {""}
        items.append(_Item(role, range(start, at), calls, results))
    return items


def _role(element: object, found: Sequence[Message]) -> Role:
    """An element with a tool result in it answers a call, whatever else it says."""
    roles = [message.role for message in found]
    if Role.TOOL in roles:
        return Role.TOOL
    named = element.get("role") if isinstance(element, dict) else ""
    return roles[0] if roles else parse_role(str(named))


def _units(items: Sequence[_Item]) -> list[list[int]]:
    """Item indexes that go together, in the order they go."""
    indexes = [index for index, item in enumerate(items) if item.role is not Role.SYSTEM]
    questions = [index for index in indexes if items[index].role is Role.USER]
    if not questions:
        return []
    within = _within_calls(items)
    exchanges = _groups(indexes, _begin(items, indexes, Role.USER) - within)
    last = next(unit for unit in exchanges if questions[-1] in unit)
    answers = [index for index in last if index > questions[-1]]
    steps = _groups(answers, _begin(items, answers, Role.ASSISTANT) - within)
    whole = [unit for unit in steps[:-1] if unit[0] not in within]
    return [*(unit for unit in exchanges if unit[-1] < last[0]), *whole]


def _begin(items: Sequence[_Item], indexes: Sequence[int], role: Role) -> set[int]:
    """Where a run of this role begins."""
    roles = [items[index].role for index in indexes]
    starts = (i for i, is_role in enumerate(roles) if is_role is role)
    return {indexes[i] for i in starts if i == 0 or roles[i - 1] is not role}


def _within_calls(items: Sequence[_Item]) -> set[int]:
    """Items that stand behind a tool call and not behind its result: no cut is before them."""
    asked: dict[str, int] = {}
    starts: list[int] = []  # of each item, from where on it allows no cut up to itself
    for index, item in enumerate(items):
        calls = (asked[id] + 1 for id in item.results & asked.keys())
        starts.append(min(calls, default=index + 1))
        asked.update(dict.fromkeys(item.calls, index))
    within: set[int] = set()
    start = len(items)
    for index in range(len(items) - 1, -1, -1):
        start = min(start, starts[index])
        if start <= index:
            within.add(index)
    return within


def _groups(indexes: Sequence[int], begins: Collection[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for index in indexes:
        if index in begins or not groups:
            groups.append([])
        groups[-1].append(index)
    return groups
