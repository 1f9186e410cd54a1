"""The truncate policy: removes the oldest messages from the request until it fits the budget.

Unlike every other policy it changes the prompt: the removed text is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from evoke_proxy.core.model.blocks import Role, parse_role
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.request.client_text import has_only_additions
from evoke_proxy.core.request.converters import responses_indexes
from evoke_proxy.core.request.json_edit import remove_elements
from evoke_proxy.core.request.json_parsing import parse_in_pieces, parsed_json
from evoke_proxy.core.request.large_json import cut_long_strings
from evoke_proxy.core.request.messages import Message, from_anthropic, from_chat, from_responses

# For each dialect: the key of the list of messages, and the function that reads it.
_LISTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Sequence[Message]]]] = {
    "chat": ("messages", from_chat),
    "responses": ("input", from_responses),
    "messages": ("messages", from_anthropic),
}
# At most the budget divided by this is reserved for the answer. Otherwise a request for the longest
# possible answer would lose the complete history. The decode budget limits longer answers.
_MAX_RESERVE_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class _Item:
    """One element of the list of messages.

    Attributes:
        role: Its role; TOOL also for the result of a tool that a client sends as a message of the
            user, and for what a client adds in a message of its own after the result of a tool.
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
    items = _as_steps(_items(body, dialect), messages)
    costs = {item.index: len(item.span) for item in rendered.spans}
    removed_items: set[int] = set()
    removed_messages: set[int] = set()
    for unit in _units(items):
        of_unit = {index for i in unit for index in items[i].messages}
        if excess <= 0:
            break
        if not _pinned(messages, of_unit):
            removed_items |= set(unit)
            removed_messages |= of_unit
            excess -= sum(costs.get(index, 0) for index in of_unit)
    remaining_messages = tuple(
        message for index, message in enumerate(messages) if index not in removed_messages
    )
    return remove_elements(body, _LISTS[dialect][0], removed_items), remaining_messages


def _pinned(messages: Sequence[Message], indexes: Collection[int]) -> bool:
    return any(messages[i].keep == "pin" for i in indexes if i < len(messages))


def _items(body: bytes, dialect: str) -> list[_Item]:
    """Return the elements of the body's list of messages; empty when it has no such list."""
    key, read = _LISTS[dialect]
    # Only the structure matters here, so long strings are left out.
    parsed = parse_in_pieces(cut_long_strings(body).rest, parsed_json)
    elements = parsed.get(key) if isinstance(parsed, dict) else None
    if not isinstance(elements, list):
        return []
    by_element = [read({key: [element]}) for element in elements]
    if dialect == "responses":
        ranges = [range(index, index + 1) for index in responses_indexes(parsed)]
    else:
        n_before = len(read({**parsed, key: []}))  # 1 when the system prompt is not in the list
        ends = list(accumulate(map(len, by_element), initial=n_before))
        ranges = [range(start, end) for start, end in pairwise(ends)]
    return [
        _Item(
            role=_role(element, messages),
            messages=indexes,
            calls=frozenset(call.id for message in messages for call in message.tool_calls),
            results=frozenset(message.tool_call_id for message in messages) - {""},
        )
        for element, messages, indexes in zip(elements, by_element, ranges, strict=True)
    ]


def _as_steps(items: Sequence[_Item], messages: Sequence[Message]) -> list[_Item]:
    """Return the items, with the role TOOL for those that belong to the step of an agent.

    Coding agents send some of them with the role of the user, who would have no task otherwise.
    """
    seen: list[_Item] = []
    for item in items:
        own = [messages[index] for index in item.messages if index < len(messages)]
        is_user = item.role is Role.USER and len(own) > 0
        is_after_tool = len(seen) > 0 and seen[-1].role is Role.TOOL
        if is_user and (
            all(message.author is Role.TOOL for message in own)
            or (is_after_tool and all(has_only_additions(message.text) for message in own))
        ):
            item = replace(item, role=Role.TOOL)
        seen.append(item)
    return seen


def _role(element: object, read_messages: Sequence[Message]) -> Role:
    """Return the role of an element: TOOL if it has a tool result, else that of its messages."""
    roles = [message.role for message in read_messages]
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
    inside_calls = _items_inside_calls(items)
    exchanges = _groups(indexes, _run_starts(items, indexes, Role.USER) - inside_calls)
    last = next(unit for unit in exchanges if questions[-1] in unit)
    answers = [index for index in last if index > questions[-1]]
    steps = _groups(answers, _run_starts(items, answers, Role.ASSISTANT) - inside_calls)
    removable = [unit for unit in steps[:-1] if unit[0] not in inside_calls]
    return [*(unit for unit in exchanges if unit[-1] < last[0]), *removable]


def _run_starts(items: Sequence[_Item], indexes: Sequence[int], role: Role) -> set[int]:
    """Return the indexes where a run of this role begins."""
    roles = [items[index].role for index in indexes]
    starts = (i for i, is_role in enumerate(roles) if is_role is role)
    return {indexes[i] for i in starts if i == 0 or roles[i - 1] is not role}


def _items_inside_calls(items: Sequence[_Item]) -> set[int]:
    """Return the indexes of the items after a tool call, up to and including its result.

    A group that began at one of them would separate the result from its call.
    """
    call_indexes: dict[str, int] = {}
    # For each item, the index after the earliest call that it answers; its own index + 1 if none.
    starts: list[int] = []
    for index, item in enumerate(items):
        calls = (call_indexes[id] + 1 for id in item.results & call_indexes.keys())
        starts.append(min(calls, default=index + 1))
        call_indexes.update(dict.fromkeys(item.calls, index))
    inside_calls: set[int] = set()
    start = len(items)
    for index in range(len(items) - 1, -1, -1):
        start = min(start, starts[index])
        if start <= index:
            inside_calls.add(index)
    return inside_calls


def _groups(indexes: Sequence[int], group_starts: Collection[int]) -> list[list[int]]:
    """Divide the indexes into groups; the first, and each of `group_starts`, begins a new one."""
    groups: list[list[int]] = []
    for index in indexes:
        if index in group_starts or not groups:
            groups.append([])
        groups[-1].append(index)
    return groups
