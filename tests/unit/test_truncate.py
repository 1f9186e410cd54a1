from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.blocks import Role, Span
from evoke_proxy.core.chat import truncate_messages
from evoke_proxy.core.rendered import MessageSpan
from evoke_proxy.errors import RequestError

COST = 10


def truncated(roles: str, budget: int, reserve: int = 0) -> str:
    """The roles (s, u, a, t) left of a conversation whose messages are 10 tokens each."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]
    spans = [MessageSpan(i, Role.USER, Span(i * COST, i * COST + COST)) for i in range(len(roles))]
    body = json.dumps({"messages": messages, "x": 1.0}).encode()
    edited = truncate_messages(body, spans, range(len(roles) * COST), budget, reserve)
    left = json.loads(edited)
    assert left["x"] == 1.0
    return "".join(roles[int(message["content"])] for message in left["messages"])


@pytest.mark.parametrize(
    ("roles", "budget", "left"),
    [
        ("suau", 40, "suau"),
        ("suau", 39, "su"),
        ("suauau", 60, "suauau"),
        ("suauau", 59, "suau"),
        ("suauau", 39, "su"),
        ("suauau", 1, "su"),
        ("uatatau", 60, "u"),
        # of one long task only whole steps go, and never the last
        ("suatatat", 60, "suatat"),
        ("suatatat", 1, "suat"),
        ("suattat", 60, "suat"),
        ("suauatat", 60, "suatat"),
        ("suauatat", 40, "suat"),
        ("usau", 20, "su"),
        ("auau", 30, "uau"),
        ("uua", 10, "uua"),
        ("uauu", 20, "uu"),
        ("sa", 10, "sa"),
        ("", 0, ""),
    ],
)
def test_the_oldest_go_first_in_wholes(roles: str, budget: int, left: str) -> None:
    assert truncated(roles, budget) == left


def test_the_reserve_is_kept_free() -> None:
    assert truncated("suau", 45, reserve=5) == "suau"
    assert truncated("suau", 45, reserve=6) == "su"


@given(st.text("suat", max_size=12), st.integers(0, 130))
def test_what_must_stay_stays_and_order_is_kept(roles: str, budget: int) -> None:
    left = truncated(roles, budget)
    assert left.count("s") == roles.count("s")
    assert ("u" in left) == ("u" in roles)
    # a call and its results go together: no result loses the message before it
    kept = iter(roles)
    assert all(role in kept for role in left)
    for i, role in enumerate(left):
        if role == "t" and "u" in roles:
            assert left[:i].strip("s") or roles.strip("s").startswith("t")


def test_a_body_is_not_changed_when_it_fits() -> None:
    body = b'{"messages": [ {"role":"user"} ]}'
    assert truncate_messages(body, [], range(5), 10, 0) is body


def test_what_is_no_json_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="not JSON"):
        truncate_messages(b"{", [], [], 0, 0)
    assert truncate_messages(b'{"messages":3}', [], [1], 0, 0) == b'{"messages":3}'
