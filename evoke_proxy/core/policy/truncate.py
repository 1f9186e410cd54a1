"""The truncate policy: removes the oldest messages from the request until it fits the budget.

Unlike every other policy this changes what is asked: the text is not in the prompt any more.
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

# Of each dialect the list that contains the conversation, and the function that reads it.
_LISTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Sequence[Message]]]] = {
    "chat": ("messages", from_chat),
    "responses": ("input", from_responses),
    "messages": ("messages", from_anthropic),
}
# At most the budget divided by this is kept free for an answer: a client that asks for the longest
# possible answer would be left without any history. The stream holds the budget for the rest.
_MAX_RESERVE_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class _Item:
    """One element of that list.

    Attributes:
        role: Its role.
        messages: Indexes of the messages that llama-server makes of it.
        calls: Ids of the tool calls that it contains.
        results: Ids of the tool calls whose results it contains.
    """

    role: Role
    messages: range
    calls: frozenset[str] = frozenset()
    results: frozenset[str] = frozenset()


def prompt_limit(budget: int, reserve: int) -> int:
    """Return how many tokens a prompt may have when `reserve` are kept for the answer."""
    return budget - min(reserve, budget // _MAX_RESERVE_DIVISOR)


def truncate_messages(
    body: bytes, dialect: str, messages: Sequence[Message], rendered: Rendered, limit: int
) -> tuple[bytes, tuple[Message, ...]]:
    """Return a body whose prompt has at most `limit` tokens, and its messages.

    `messages` and `rendered` are those of `body`, which is returned itself when it fits. The oldest
    exchanges are removed first: a question with all its answers, because some templates require
    alternating roles. Then steps of the last exchange are removed: tool calls with their results.
    Pinned messages, system messages, the last user message and the last step after it always stay,
    whether they fit or not. RequestError when the body is not a JSON object, KeyError for another
    dialect.
    """
    excess = len(rendered.tokens) - limit
    if excess <= 0:
        return body, tuple(messages)
    items = _items(body, dialect)
    costs = {item.index: len(item.span) for item in rendered.spans}
    dropped: set[int] = set()
    removed: set[int] = set()
    for unit in _units(items):
        of_unit = {index for i in unit for index in items[i].messages}
        if excess <= 0:
            break
        if not _pinned(messages, of_unit):
            dropped |= set(unit)
            removed |= of_unit
            excess -= sum(costs.get(index, 0) for index in of_unit)
    left = tuple(message for index, message in enumerate(messages) if index not in removed)
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
    """Return the role of an element; one with a tool result answers a call."""
    roles = [message.role for message in found]
    if Role.TOOL in roles:
        return Role.TOOL
    named = element.get("role") if isinstance(element, dict) else ""
    return roles[0] if roles else parse_role(str(named))


def _units(items: Sequence[_Item]) -> list[list[int]]:
    """Return groups of item indexes that are removed together, in the order of removal."""
    indexes = [index for index, item in enumerate(items) if item.role is not Role.SYSTEM]
    questions = [index for index in indexes if items[index].role is Role.USER]
    if not questions:
        return []
    within = _within_calls(items)
    exchanges = _groups(indexes, _begin(items, indexes, Role.USER) - within)
    last = next(unit for unit in exchanges if questions[-1] in unit)
    answers = [index for index in last if index > questions[-1]]
    steps = _groups(answers, _begin(items, answers, Role.ASSISTANT) - within)
    removable = [unit for unit in steps[:-1] if unit[0] not in within]
    return [*(unit for unit in exchanges if unit[-1] < last[0]), *removable]


def _begin(items: Sequence[_Item], indexes: Sequence[int], role: Role) -> set[int]:
    """Return the indexes where a run of this role begins."""
    roles = [items[index].role for index in indexes]
    starts = (i for i, is_role in enumerate(roles) if is_role is role)
    return {indexes[i] for i in starts if i == 0 or roles[i - 1] is not role}


def _within_calls(items: Sequence[_Item]) -> set[int]:
    """Return the items after a tool call and up to its result, before which nothing is cut."""
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
