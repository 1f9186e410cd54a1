"""The truncate policy: make a conversation fit by leaving its oldest messages out of the request.

This changes what is asked, unlike every other policy: the text is not in the prompt any more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence, Sized

from evoke_proxy.core.blocks import Role
from evoke_proxy.core.rendered import MessageSpan, role_named
from evoke_proxy.core.splice import remove_elements
from evoke_proxy.errors import RequestError


def truncate_messages(
    body: bytes, spans: Iterable[MessageSpan], tokens: Sized, budget: int, reserve: int
) -> bytes:
    """A chat completions body whose prompt should fit `budget - reserve` tokens.

    Oldest first, whole exchanges go (a question with its answers, so that templates which insist on
    turns stay content), then, of the last exchange, whole tool calls with their results. System
    messages, the last user message and the last answer after it always stay, fitting or not.
    RequestError when the body is no JSON object.
    """
    costs = {item.index: len(item.span) for item in spans}
    excess = len(tokens) - (budget - reserve)
    dropped: set[int] = set()
    for unit in _units(_roles(body)):
        if excess <= 0:
            break
        dropped |= set(unit)
        excess -= sum(costs.get(index, 0) for index in unit)
    return remove_elements(body, "messages", dropped)


def _roles(body: bytes) -> list[Role]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request body is not JSON: {error}", "invalid_json") from error
    messages = parsed.get("messages") if isinstance(parsed, dict) else None
    given = messages if isinstance(messages, list) else []
    return [role_named(str(item.get("role")) if isinstance(item, dict) else "") for item in given]


def _units(roles: Sequence[Role]) -> list[list[int]]:
    """Message indexes that go together, in the order they go."""
    indexes = [index for index, role in enumerate(roles) if role is not Role.SYSTEM]
    questions = [index for index in indexes if roles[index] is Role.USER]
    if not questions:
        return []
    last_question = questions[-1]
    exchanges = _groups(indexes, _begin_exchange(roles, indexes))
    last = next(unit for unit in exchanges if last_question in unit)
    answers = [index for index in last if index > last_question]
    steps = _groups(answers, {index for index in answers if roles[index] is Role.ASSISTANT})
    return [*(unit for unit in exchanges if unit[-1] < last[0]), *steps[:-1]]


def _begin_exchange(roles: Sequence[Role], indexes: Sequence[int]) -> set[int]:
    before = [None, *indexes[:-1]]
    return {
        index
        for index, previous in zip(indexes, before, strict=True)
        if roles[index] is Role.USER and (previous is None or roles[previous] is not Role.USER)
    }


def _groups(indexes: Sequence[int], begins: Collection[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for index in indexes:
        if index in begins or not groups:
            groups.append([])
        groups[-1].append(index)
    return groups
