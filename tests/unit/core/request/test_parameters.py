"""Limits on parameters that determine allocations, loops or recursion in llama-server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from evoke_proxy.config import LimitsConfig
from evoke_proxy.engine.parsing.body_checks import check_body
from evoke_proxy.errors import RequestError

LIMITS = LimitsConfig()
_DEEP = "[" * 5000 + "]" * 5000


def _check(body: dict[str, Any], limits: LimitsConfig = LIMITS) -> None:
    check_body(json.dumps(body).encode(), "application/json", limits)


def _properties(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}}


def _call(arguments: str) -> dict[str, Any]:
    function = {"name": "run", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


REFUSED: dict[str, dict[str, Any]] = {
    "last_n": {"repeat_last_n": 2**31 - 1},
    "dry_last_n": {"dry_penalty_last_n": 2**31 - 1},
    "last_n_as_float": {"repeat_last_n": 2147483647.0},
    "last_n_that_wraps_from_below": {"repeat_last_n": -(2**32) - 2},
    "last_n_that_wraps_from_above": {"dry_penalty_last_n": 2**33 - 1},
    "n_probs": {"n_probs": 150_000},
    "logprobs": {"logprobs": 150_000},
    "top_logprobs": {"logprobs": True, "top_logprobs": 150_000},
    "samplers": {"samplers": ["dry"] * 33},
    "samplers_as_characters": {"samplers": "d" * 33},
    "breakers": {"dry_sequence_breakers": [str(i) for i in range(33)]},
    "triggers": {"grammar_triggers": [{"type": 1, "value": "x"}] * 33},
    "long_trigger": {"grammar_triggers": [{"type": 1, "value": "(" * 60_000}]},
    "pattern_trigger": {"grammar_triggers": [{"type": 2, "value": "(a+)+$"}]},
    "full_pattern_trigger": {"grammar_triggers": [{"type": 3.0, "value": "a"}]},
    "lora": {"lora": [{"id": 0, "scale": 1.0}] * 33},
    "end_tags": {"reasoning_budget_end_tags": ["x"] * 33},
    "stop": {"stop": ["x"] * 4097},
    "logit_bias": {"logit_bias": [[1, 1.0]] * 4097},
    "chat_parser": {"chat_parser": "{}"},
    "messages": {"messages": [{}] * 4097},
    "items": {"input": [{}] * 4097},
    "prompts": {"prompt": ["x"] * 4097},
    "documents": {"query": "x", "documents": ["x"] * 4097},
    "nested_grammar": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "grammar_nested_between_quotes": {"grammar": "root ::= " + '( ")" ' * 400},
    "grammar_nested_between_classes": {"grammar": "root ::= " + "( [)] " * 400},
    "grammar_nested_between_comments": {"grammar": "root ::= " + "( # )\n" * 400},
    "grammar_nested_between_tokens": {"grammar": "root ::= " + "( <)> " * 400},
    "grammar_nested_after_closings": {"grammar": ")" * 500 + "(" * 400},
    "long_grammar": {"grammar": 'root ::= "' + "a" * 65536 + '"'},
    "optional_parts": {"grammar": 'root ::= ("a"? "b"?){0,125} "b"'},
    "optional_rules": {"grammar": "root ::= " + "x " * 70 + '\nx ::= "a"?'},
    "optional_parts_of_a_pattern": {"json_schema": {"pattern": "^(a?b?){0,125}$"}},
    "long_pattern": {"tools": [{"input_schema": {"pattern": "a" * 8193}}]},
    "enum": {"json_schema": {"enum": list(range(1025))}},
    "enums": {"json_schema": {"allOf": [{"enum": list(range(900))}] * 5}},
    "any_of": {"tools": [{"name": "x", "input_schema": {"anyOf": [{"type": "null"}] * 1025}}]},
    "types": {"response_format": {"schema": {"type": ["string"] * 1025}}},
    "pieces": {"content": "a" * 1_100_000, "with_pieces": True},
    "schema": {"json_schema": _properties(600)},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": _properties(600)}}
    },
    "text_format": {"text": {"format": {"type": "json_schema", "schema": _properties(600)}}},
    "tools": {"tools": [{"type": "function", "function": {"parameters": _properties(600)}}]},
    "input_schema": {"tools": [{"name": "x", "input_schema": _properties(600)}]},
    "many_schemas": {"tools": [{"name": "x", "input_schema": _properties(500)}] * 40},
    "arguments": {"messages": [_call(_DEEP)]},
    "arguments_of_responses": {"input": [{"type": "function_call", "arguments": _DEEP}]},
    "many_keys": {f"k{i}": 1 for i in range(4097)},
    "long_number_in_arguments": {"messages": [_call('{"a":' + "[" * 140 + "1" * 5000)]},
}
ALLOWED: dict[str, dict[str, Any]] = {
    "penalties": {"repeat_last_n": -1, "dry_penalty_last_n": 4096, "n_probs": 20},
    "logprobs": {"logprobs": True, "top_logprobs": 20},
    "samplers": {"samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]},
    "breakers": {"dry_sequence_breakers": ["\n", ":", '"', "*"]},
    "bans": {"logit_bias": {str(i): -100 for i in range(2000)}},
    "words": {"grammar_triggers": [{"type": 1, "value": "<tool_call>"}], "stop": ["x"] * 100},
    "tokens": {"prompt": list(range(100_000))},
    "grammar": {"grammar": 'root ::= ("a" | "(((" [((((] | ("b" # ((((\n))*' * 200},
    "words_of_a_grammar": {"grammar": "root ::= " + " | ".join(f'"w{i}"' for i in range(3000))},
    "enum": {"json_schema": {"enum": list(range(1024))}},
    "property_called_pattern": {"json_schema": {"properties": {"pattern": {"type": "string"}}}},
    "pattern": {"json_schema": {"pattern": r"^\\d{4}-\\d{2}(-\\d{2}(T\\d+)?)?$"}},
    "tokens_of_a_long_text": {"content": "a word " * 160_000},
    "schema": {"json_schema": _properties(200)},
    "tools": {"tools": [{"name": "x", "input_schema": _properties(50)}] * 60},
    "arguments": {"messages": [_call(json.dumps({"a": "[" * 9999, "b": [[[[1]]]]}))]},
    "messages": {"messages": [{"role": "user", "content": "x"}] * 4096},
    "nothing": {"repeat_last_n": None, "grammar": None, "samplers": None, "stop": "x"},
    "wrong_types": {"repeat_last_n": "x", "grammar": 5, "samplers": 5, "grammar_triggers": [5, {}]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_that_would_harm_llama_server_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as refused:
        _check(REFUSED[name])
    assert refused.value.status == 400
    assert refused.value.code in ("parameter_too_large", "request_too_complex")


@pytest.mark.parametrize("name", ALLOWED)
def test_usual_parameters_are_allowed(name: str) -> None:
    _check(ALLOWED[name])


def test_a_limit_of_0_grammar_bytes_refuses_all_grammars() -> None:
    closed = replace(LIMITS, grammar_bytes=0)
    _check({"grammar": ""}, closed)
    with pytest.raises(RequestError):
        _check({"grammar": 'root ::= "a"'}, closed)
