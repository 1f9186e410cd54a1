"""Bounds the parameters of a request that size allocations, loops or recursion in llama-server.

Each bound prevents an observed failure of llama-server: a crash, gigabytes of memory, or a main
loop that is busy for minutes. llama-server refuses other invalid parameters itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import numpy as np

from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.request.grammar_cost import grammar_cost, pattern_cost
from evoke_proxy.core.request.json_shape import measure
from evoke_proxy.core.request.large_json import HUGE_BYTES, TruncatedString
from evoke_proxy.errors import RequestError

# Two buffers of this many entries are allocated for each sampler.
_LAST_N = ("repeat_last_n", "dry_penalty_last_n")
# Tokens of 4 bytes: 1 MiB for a buffer.
_MAX_LAST_N: Final = 262_144
# For each generated token, this many probabilities with their texts are kept.
_PROBABILITIES = ("n_probs", "logprobs", "top_logprobs")
# Each entry costs a sampler with its buffers, a walk over the vocabulary, or a compiled pattern.
_COSTLY_LISTS = (
    *("samplers", "dry_sequence_breakers", "grammar_triggers", "lora"),
    "reasoning_budget_end_tags",
)
_MAX_COSTLY_ENTRIES: Final = 32
# Deepest nesting of parentheses in a grammar: llama-server parses it by recursion on its stack.
_MAX_GRAMMAR_DEPTH: Final = 256
# Each entry costs a little for every token or answer.
_LISTS = ("stop", "logit_bias", "preserved_tokens", "response_fields")
# Each entry is a message of a conversation, or a task of its own.
_BATCHES = ("messages", "input", "prompt", "content", "documents", "texts", "input_extra", "query")
_SCHEMAS = ("json_schema", "response_format", "tools", "functions", "text")
# All schemas of a request together may have this many times the keys of one object.
_SCHEMA_OBJECTS = 32
# Lists whose entries become alternatives of a grammar, which takes quadratic time.
_ALTERNATIVES = frozenset(("enum", "type", "anyOf", "oneOf", "allOf"))
# All schemas of a request together may have this many times the entries of one list.
_SCHEMA_LISTS = 4
# All patterns of a request together may have this many characters.
_PATTERN_CHARS = 8192
# With the pieces of its tokens, the reply of /tokenize takes 200 times the memory of the text.
_PIECES_CHARS = 1 << 20
# llama-server expects this from its own template rendering, and executes it as a program.
_INTERNAL = ("chat_parser",)
_TRIGGER_CHARS = 256
_TRIGGER_PATTERNS = (2, 3)
_OPENING, _CLOSING = b"("[0], b")"[0]
# Parts of a grammar that cannot open a group; each alternative also matches an unterminated part.
_NOT_NESTING = re.compile(
    rb'"(?:[^"\\]|\\.)*+"?|\[(?:[^\]\\]|\\.)*+\]?|<[^>]*+>?|#[^\n]*+', re.DOTALL
)


def check_parameters(body: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Raise RequestError when a parameter of a parsed body exceeds its limit."""
    for name in _INTERNAL:
        if body.get(name) is not None:
            _refuse(f"{name} is internal to llama-server and not accepted; remove it")
    for name in _LAST_N:
        _check_number(body, name, _MAX_LAST_N)
    for name in _PROBABILITIES:
        _check_number(body, name, limits.n_probs, "limits.n_probs")
    for name in _COSTLY_LISTS:
        _check_count(body, name, _MAX_COSTLY_ENTRIES)
    for name in _LISTS:
        _check_count(body, name, limits.json_keys, "limits.json_keys")
    for name in _BATCHES:
        _check_batch(body, name, limits.messages)
    _check_triggers(body.get("grammar_triggers"))
    _check_grammar(body.get("grammar"), limits)
    _check_arguments(body, limits)
    _check_schemas(body, limits)
    content = body.get("content")
    if body.get("with_pieces") and isinstance(content, str) and len(content) > _PIECES_CHARS:
        _refuse(f"with_pieces is accepted for at most {_PIECES_CHARS} characters of content")


def check_grammar(grammar: bytes, limits: LimitsConfig) -> None:
    """Raise RequestError when a grammar is larger or nested deeper than the limits allow."""
    if len(grammar) > limits.grammar_bytes:
        _refuse(
            f"the grammar has {len(grammar)} bytes; limits.grammar_bytes allows"
            f" {limits.grammar_bytes}"
        )
    if nesting(grammar) > _MAX_GRAMMAR_DEPTH:
        _refuse(f"the parentheses of the grammar are nested deeper than {_MAX_GRAMMAR_DEPTH}")
    _check_paths("the grammar", grammar_cost(grammar.decode("utf-8", "replace")), limits)


def _check_paths(name: str, cost: int, limits: LimitsConfig) -> None:
    if cost > limits.grammar_paths:
        _refuse(
            f"{name} has too many optional parts or alternatives that can follow one another"
            f" ({cost}; limits.grammar_paths allows {limits.grammar_paths})"
        )


def nesting(grammar: bytes) -> int:
    """Maximum nesting depth of the parentheses of a grammar.

    Parentheses in literals, character classes, names of tokens and comments do not count. One that
    closes nothing is ignored.
    """
    data = np.frombuffer(_NOT_NESTING.sub(b"", grammar), np.uint8)
    if not len(data):
        return 0
    steps = (data == _OPENING).astype(np.int32) - (data == _CLOSING)
    depths = np.cumsum(steps)
    lowest = np.minimum(np.minimum.accumulate(depths), 0)
    return int((depths - lowest).max())


def _check_number(
    body: Mapping[str, Any], name: str, limit: int, setting: str = "the proxy"
) -> None:
    """Refuse a number over a limit; other types are left to llama-server."""
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    # llama-server cuts integers to 32 bits, which may turn a very negative one into a large one.
    if value > limit or value < -(2**31):
        _refuse(f"{name} is {value!s:.40}; {setting} allows at most {limit}")


def _check_count(
    body: Mapping[str, Any], name: str, limit: int, setting: str = "the proxy"
) -> None:
    value = body.get(name)
    # In `samplers`, each character of a text names a sampler. Elsewhere a text is a single entry.
    counted = list | dict | str if name == "samplers" else list | dict
    if isinstance(value, counted) and len(value) > limit:
        _refuse(f"{name} has {len(value)} entries; {setting} allows {limit}")


def _check_batch(body: Mapping[str, Any], name: str, limit: int) -> None:
    """Refuse a list with too many entries; tokens of a prompt do not count."""
    value = body.get(name)
    if not isinstance(value, list) or len(value) <= limit:
        return
    count = len(value) - sum(
        type(entry) is int for entry in value
    )  # integers are tokens of a prompt
    if count > limit:
        _refuse(f"{name} has {count} entries; limits.messages allows {limit}")


def _check_triggers(triggers: object) -> None:
    """Refuse triggers of a grammar that are patterns or long texts."""
    for trigger in triggers if isinstance(triggers, list) else ():
        if not isinstance(trigger, dict):
            continue
        kind, value = trigger.get("type"), trigger.get("value")
        # llama-server converts any number, and true, to an integer.
        if isinstance(kind, int | float) and any(n <= kind < n + 1 for n in _TRIGGER_PATTERNS):
            _refuse("grammar_triggers that are patterns are not accepted; name words or tokens")
        if isinstance(value, str) and len(value) > _TRIGGER_CHARS:
            _refuse(f"a word of grammar_triggers has more than {_TRIGGER_CHARS} characters")


def _check_grammar(grammar: object, limits: LimitsConfig) -> None:
    if isinstance(grammar, TruncatedString):
        _refuse(f"the grammar has more than {HUGE_BYTES} bytes; shorten it")
    if isinstance(grammar, str) and grammar:
        check_grammar(grammar.encode("utf-8", "surrogatepass"), limits)


def _check_arguments(body: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Limit the arguments of tool calls, which are JSON inside a text that templates parse."""
    messages, items = body.get("messages"), body.get("input")
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                _check_json_text(function.get("arguments"), limits)
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and "arguments" in item:
            _check_json_text(item["arguments"], limits)


def _check_json_text(text: object, limits: LimitsConfig) -> None:
    """Refuse JSON in a text that exceeds the limits on structure."""
    if not isinstance(text, str):
        return
    if isinstance(text, TruncatedString):
        _refuse(f"arguments of a tool call have more than {HUGE_BYTES} bytes; shorten them")
    # Most texts are short and flat: without this many brackets or colons none exceeds a limit.
    if (
        text.count("{") + text.count("[") <= limits.json_depth
        and text.count(":") <= limits.json_keys
    ):
        return
    measure(text.encode("utf-8", "surrogatepass"), limits)


def _check_schemas(body: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Limit JSON schemas: the time for their grammars grows with the cube of the properties."""
    remaining = [body[name] for name in _SCHEMAS if name in body]
    n_keys = n_entries = n_pattern_chars = 0
    while remaining:
        value = remaining.pop()
        if isinstance(value, list):
            remaining.extend(item for item in value if isinstance(item, dict | list))
            continue
        if not isinstance(value, dict):
            continue
        n_keys += len(value)
        if len(value) > limits.schema_keys or n_keys > _SCHEMA_OBJECTS * limits.schema_keys:
            _refuse(
                "a JSON schema or the tools have more keys than limits.schema_items allows"
                f" ({limits.schema_keys} in one object)"
            )
        for key, member in value.items():
            if isinstance(member, dict | list):
                remaining.append(member)
            if key == "pattern" and isinstance(member, str):
                n_pattern_chars += len(member)
                if n_pattern_chars > _PATTERN_CHARS:
                    _refuse(f"the patterns in JSON schemas have over {_PATTERN_CHARS} characters")
                _check_paths("a pattern in a JSON schema", pattern_cost(member), limits)
            elif key in _ALTERNATIVES and isinstance(member, list):
                n_entries += len(member)
                if max(len(member), n_entries / _SCHEMA_LISTS) > limits.schema_items:
                    _refuse(
                        f"{key} in a JSON schema has more entries than limits.schema_items allows"
                        f" ({limits.schema_items} in one list)"
                    )


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, "parameter_too_large")
