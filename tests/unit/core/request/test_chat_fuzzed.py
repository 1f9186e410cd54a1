"""Fuzzing the request parsers: on any JSON they raise RequestError or nothing."""

from __future__ import annotations

import functools
import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import LimitsConfig, NormaliseConfig
from evoke_proxy.core.request.chat import is_side_request, parse_chat, strip_own_fields
from evoke_proxy.core.request.converters import anthropic_to_chat, responses_to_chat
from evoke_proxy.core.request.look_ahead import kind_of, snapshot_obstacle
from evoke_proxy.core.retrieval.query import query_of
from evoke_proxy.core.session.drift import drift, opening
from evoke_proxy.core.session.identity import hint_of
from evoke_proxy.engine.parsing.body_checks import check_body
from evoke_proxy.engine.parsing.body_parsing import parse_object
from evoke_proxy.engine.parsing.parser import Normalizer
from evoke_proxy.errors import RequestError

DIALECTS = ("chat", "responses", "messages", "completions")
_KEYS = st.sampled_from(
    """
    messages input system instructions tools tool_choice thinking reasoning prompt content role
    type text name arguments function tool_calls tool_call_id tool_use_id call_id id output
    input_schema parameters effort metadata user_id max_tokens n n_predict stream stop evoke
    evoke_keep evoke_name evoke_budget evoke_policy evoke_session evoke_recover evoke_oracle
    evoke_priority evoke_pinned reasoning_content logit_bias samplers grammar grammar_triggers
    repeat_last_n value evoke_other
    """.split()
)
_WORDS = st.sampled_from(
    """
    user system developer assistant tool function text input_text output_text tool_use
    tool_result function_call function_call_output message reasoning thinking image_url enabled
    auto any pin {} [
    """.split()
)
_LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), _WORDS, st.text(max_size=20)),
    st.just(1e308),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(_KEYS | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=25,
)
_ITEMS = st.dictionaries(_KEYS, _VALUES, max_size=6)
_BODIES = st.dictionaries(_KEYS, st.one_of(_VALUES, st.lists(_ITEMS, max_size=4)), max_size=8)


@functools.cache
def _metrics() -> Metrics:
    """Metrics for all examples: registering them takes longer than parsing a body."""
    return Metrics()


def _check_only_request_errors(body: dict[str, Any]) -> None:
    """Parses a body in every dialect; any exception other than RequestError is a failure."""
    text = json.dumps(body).encode()
    try:
        check_body(text, "application/json", LimitsConfig())
        parsed = parse_object(text)
    except RequestError:
        return
    for dialect in DIALECTS:
        try:
            request = parse_chat(dialect, parsed)
        except RequestError:
            continue
        query_of(request)
        strip_own_fields(text)
        is_side_request(request, 10, True, True)
        snapshot_obstacle(request)
        kind_of(request)
        [message.printed for message in request.messages]
        settings = NormaliseConfig(billing=True, dates_h=1.0, tools=True)
        Normalizer(settings, _metrics()).apply(text, dialect, "")
    for as_chat in (responses_to_chat, anthropic_to_chat):
        chat = as_chat(parsed)
        parse_chat_or_refuse(chat)
        drift(chat, parsed)
        opening(chat)
    hint_of({}, parsed)


def parse_chat_or_refuse(chat: dict[str, Any]) -> None:
    try:
        parse_chat("chat", chat)
    except RequestError:
        return


@settings(max_examples=200)
@given(_BODIES)
@example({"tools": 5, "input": [{"type": "reasoning", "content": [5]}]})
@example({"messages": [5, None, [], {"content": [5, None]}], "tools": [5]})
@example({"input": [{"role": "user", "content": 5}], "instructions": 5, "tools": {"a": 1}})
@example({"system": [5], "messages": [{"role": [], "content": [{"type": []}]}]})
@example({"messages": [{"tool_calls": [{"id": [], "function": {"name": {}, "arguments": 5}}]}]})
@example({"evoke_policy": [], "evoke_recovery": {}, "evoke_recall": [[]]})
def test_parsers_raise_only_request_errors(body: dict[str, Any]) -> None:
    _check_only_request_errors(body)


@settings(max_examples=100)
@given(
    st.binary(max_size=60)
    | st.text(max_size=40).map(str.encode)
    | _BODIES.map(json.dumps).map(str.encode)
)
def test_any_bytes_are_parsed_to_an_object_or_refused(body: bytes) -> None:
    for text in (body, b"\xef\xbb\xbf" + body, body[:-1], b'{"a":"\\ud800",' + body[1:]):
        try:
            check_body(text, "application/json", LimitsConfig())
            found = parse_object(text)
        except RequestError:
            continue
        assert isinstance(found, dict)


@pytest.mark.parametrize("digits", (4300, 4301, 100_000))
@pytest.mark.parametrize("mark", ("", "\ufeff", '{"x":"\\ud800"'))
def test_a_number_of_any_length_is_parsed_or_refused(digits: int, mark: str) -> None:
    number = "1" * digits
    text = f'{mark},"a":{number}}}' if mark.startswith("{") else f'{mark}{{"a":{number}}}'
    try:
        assert parse_object(text.encode())["a"] == float("inf")
    except RequestError as error:
        assert error.status == 400
    with pytest.raises(RequestError):
        check_body(text.encode(), "", LimitsConfig())


def test_a_deeply_nested_body_is_refused_with_and_without_a_byte_order_mark() -> None:
    for mark in ("", "\ufeff"):
        for deep in ("[" * 2000 + "]" * 2000, '{"a":' * 2000 + "1" + "}" * 2000):
            with pytest.raises(RequestError):
                parse_object(f'{mark}{{"a":{deep}}}'.encode())
    assert orjson.loads(b"[" * 500 + b"]" * 500)
