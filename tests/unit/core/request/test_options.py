"""The proxy's own fields of a request and of its messages."""

from __future__ import annotations

from typing import Any

import pytest

from evoke_proxy.core.request.chat import (
    MESSAGE_FIELDS,
    TOP_LEVEL_FIELDS,
    ChatRequest,
    RequestOptions,
    parse_chat,
)
from evoke_proxy.core.session.identity import hint_of, hint_of_name
from evoke_proxy.errors import RequestError


def chat(**fields: Any) -> ChatRequest:
    return parse_chat("chat", {"messages": [{"role": "user", "content": "hi"}]} | fields)


def test_options_are_read_from_the_evoke_fields() -> None:
    options = chat(
        evoke=True,
        evoke_budget=512,
        evoke_policy="discard",
        evoke_recovery="discard",
        evoke_priority=2,
        evoke_pinned=True,
        evoke_task_boundary=True,
        evoke_session="a/b: 1",
    ).options
    assert options == RequestOptions(
        True, 512, "discard", "discard", 2.0, True, True, "a/b: 1", is_set=True
    )


@pytest.mark.parametrize("field", TOP_LEVEL_FIELDS)
def test_a_null_field_is_ignored_or_refused(field: str) -> None:
    try:
        options = chat(**{field: None}).options
    except RequestError as error:
        assert error.code == f"{field}_invalid"
    else:
        assert options == RequestOptions(is_set=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("evoke", {"epoch": 3}),
        ("evoke", "no"),
        ("evoke_budget", 0),
        ("evoke_budget", -5),
        ("evoke_budget", 5.5),
        ("evoke_budget", True),
        ("evoke_budget", "512"),
        ("evoke_policy", "lru"),
        ("evoke_policy", ["evoke"]),
        ("evoke_recovery", "magic"),
        ("evoke_recovery", "breadcrumb"),
        ("evoke_recovery", ["breadcrumb"]),
        ("evoke_priority", "high"),
        ("evoke_priority", float("nan")),
        ("evoke_priority", -1),
        ("evoke_priority", 1e9),
        ("evoke_priority", True),
        ("evoke_pinned", 1),
        ("evoke_task_boundary", "yes"),
        ("evoke_session", ""),
        ("evoke_session", " a"),
        ("evoke_session", "a\nb"),
        ("evoke_session", "x" * 257),
        ("evoke_session", 7),
    ],
)
def test_an_invalid_field_is_a_request_error_with_its_own_code(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        chat(**{field: value})
    assert (caught.value.status, caught.value.code) == (400, f"{field}_invalid")
    assert ("kv_restore replaces it" in str(caught.value)) is (value == "breadcrumb")


@pytest.mark.parametrize("name", ["try 2", "a", "x" * 256, " a", "a ", "a\tb", "é", "x" * 257, ""])
def test_a_field_a_header_and_a_fork_have_one_rule_for_names(name: str) -> None:
    is_usable = hint_of_name(name) is not None
    assert (hint_of({"X-Evoke-Session": name}, {}) is not None) is is_usable
    if is_usable:
        assert chat(evoke_session=name).options.session == name
    else:
        with pytest.raises(RequestError, match="without a space at either end"):
            chat(evoke_session=name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("evoke_keep", "pinned"),
        ("evoke_keep", 1),
        ("evoke_keep", ""),
        ("evoke_name", ""),
        ("evoke_name", "a\nb"),
        ("evoke_name", "x" * 101),
        ("evoke_name", 3),
    ],
)
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_an_invalid_mark_on_a_message_is_a_request_error(
    field: str, value: Any, dialect: str
) -> None:
    item = {"role": "user", "content": "hi", field: value}
    key = "input" if dialect == "responses" else "messages"
    with pytest.raises(RequestError, match=field) as caught:
        parse_chat(dialect, {key: [item]})
    assert caught.value.code == f"{field}_invalid"


@pytest.mark.parametrize("field", MESSAGE_FIELDS)
def test_a_mark_on_a_message_counts_as_a_set_option(field: str) -> None:
    item = {"role": "user", "content": "hi", field: "pin"}
    assert parse_chat("chat", {"messages": [item]}).options.is_set
    assert not chat().options.is_set
