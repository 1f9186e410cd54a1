"""Functions that process text of clients take at most linear time for any text."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cpu_time import exponent
from hostile_text import CHARACTERS

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.truncate import truncate_messages
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered
from evoke_proxy.core.prompt.segment import TextAlignment, cut
from evoke_proxy.core.request import normalise
from evoke_proxy.core.request.chat import is_side_request, parse_chat, strip_own_fields
from evoke_proxy.core.request.converters import anthropic_to_chat, responses_to_chat
from evoke_proxy.core.request.transcript import transcript_turns
from evoke_proxy.core.retrieval.analysis import TextAnalysis, ends_sentence
from evoke_proxy.core.retrieval.bm25 import (
    InvertedIndex,
    phrase_text,
    query_phrases,
    terms_of,
)
from evoke_proxy.core.retrieval.index import Index, cut_off, possible_names
from evoke_proxy.core.retrieval.query import Query, query_of
from evoke_proxy.core.retrieval.vectors import chunks_of
from evoke_proxy.core.retrieval.wordpiece import WordPieces
from evoke_proxy.core.session.drift import drift
from evoke_proxy.core.session.identity import hint_of
from evoke_proxy.engine.parsing.body_cache import BodyCache, ReadBody
from evoke_proxy.engine.parsing.body_parsing import parse_object

# Every unit is tried once at a small and a large size; the slowest few are measured closely, and
# all whose time grows by more than this power of the size.
_CLOSELY, _SUSPECT = 3, 1.2
# Shorter times are noise of the clock.
_LEAST_S = 0.0005
# Texts that are repeated.
UNITS = (
    *CHARACTERS,
    *(" \n", "?", "。"),
    *("a ", "a, ", " and ", " and also ", "a.b-c/", "aA", "A. ", "now ", "date 1", "12:30 ", "mon"),
    *(
        "x=y;",
        "cch=",
        "_session_aaaaaaaa",
        "x-anthropic-billing-header:",
        "what? ",
        "go on. ",
        "# ",
    ),
)


def _chat(text: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "go on"},
        ]
    }


def _asked(text: str) -> None:
    query_of(parse_chat("chat", _chat(text)))
    query_of(parse_chat("chat", {"messages": [{"role": "user", "content": text}]}))


def _retrieved(text: str) -> None:
    inverted = InvertedIndex()
    inverted.add(Counter(terms_of(text)))
    inverted.set_active(np.zeros(1, np.int64))
    terms = inverted.informative_terms(text)[:50]
    inverted.fuzzy_evidence({term: inverted.exact_evidence(term) for term in terms})


def _searched(text: str) -> None:
    blocks = BlockTable([Block("user:0#0", "s/0", Span(0, 9), Role.USER, 1, 0, text, (text,))])
    Index().relevance(Query.of(text), blocks)


def _rendered(n: int, spans: list[MessageSpan]) -> Rendered:
    starts = np.arange(0, n, 3) if len(spans) == 1 else np.zeros(0, np.int64)
    return Rendered(np.zeros(n, np.int32), n, spans, sentence_starts=starts)


def _cut(text: str) -> None:
    spans = [MessageSpan(0, Role.USER, Span(0, 1000))]
    messages = parse_chat("chat", {"messages": [{"role": "user", "content": text}]}).messages
    cut(_rendered(1000, spans), messages)
    TextAlignment(text, Span(0, 1000), np.arange(0, 1000, 3)).of(Span(10, 90))


OF_TEXT: dict[str, Callable[[str], object]] = {
    "asked": _asked,
    "question": lambda text: Query.of(text, text),
    "narrowed": lambda text: Query.of(text).narrowed(64),
    "retrieved": _retrieved,
    "searched": _searched,
    "terms": terms_of,
    "word pieces": WordPieces(("a", "##a", "a" * 20, "##" + "b" * 20, "語", "go")).ids,
    "possible_names": possible_names,
    "phrases": lambda text: query_phrases(text, {"a"}),
    "phrase_text": phrase_text,
    "ends_sentence": ends_sentence,
    "cut off": lambda text: cut_off(text, ("a", "go", "語")),
    "cut": _cut,
    "analysed": lambda text: TextAnalysis.of(text, Role.USER),
    "chunks": chunks_of,
    "transcript": transcript_turns,
    "dated": normalise.is_dated,
    "billing": normalise.without_billing,
    "clock": lambda text: normalise.DateFreezer().freeze(text + "date 1", "", 0.0, 1.0),
    "side": lambda text: is_side_request(parse_chat("chat", _chat(text)), 10, True, True),
    "hint": lambda text: hint_of({"X-Session-Id": text}, {"metadata": {"user_id": text}}),
    "drift": lambda text: drift(_chat(text + "a" + text), _chat(text + "b" + text)),
    "parsed": lambda text: parse_object(json.dumps(_chat(text), ensure_ascii=False).encode()),
    "anthropic": lambda text: anthropic_to_chat({"system": [{"type": "text", "text": text}]}),
}


def _seconds(run: Callable[[str], object], text: str) -> float:
    start = time.thread_time()
    run(text)
    return time.thread_time() - start


def _suspects(run: Callable[[str], object]) -> list[str]:
    """The units to measure closely: the slowest, and all whose time seems to grow fast."""
    grown: dict[str, float] = {}
    slow: dict[str, float] = {}
    for unit in UNITS:
        small, large = (_seconds(run, unit * (size // len(unit))) for size in (2048, 16384))
        grown[unit], slow[unit] = large / max(small, _LEAST_S), large
    slowest = sorted(UNITS, key=lambda unit: -slow[unit])[:_CLOSELY]
    fast_growing = [
        unit for unit in UNITS if slow[unit] > 2 * _LEAST_S and grown[unit] > 8**_SUSPECT
    ]
    return list(dict.fromkeys([*slowest, *fast_growing]))


@pytest.mark.parametrize("name", OF_TEXT)
def test_text_is_read_in_linear_time(name: str) -> None:
    run = OF_TEXT[name]
    for unit in _suspects(run):
        made = {size: unit * (size // len(unit)) for size in (2048, 4096, 8192, 16384)}
        assert exponent(lambda n, made=made: run(made[n]), 2048) < 1.3, unit  # type: ignore[misc]


def _quadratic(text: str) -> None:
    """Takes quadratic time, a few milliseconds, for spaces only."""
    for _ in range(text.count(" ") ** 2 // 2000):
        pass


def test_quadratic_time_of_one_unit_is_found() -> None:
    assert " " in _suspects(_quadratic)


def _messages(n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hello", **more} for _ in range(n)]


def _calls(n: int) -> list[dict[str, Any]]:
    call = {"id": "1", "function": {"name": "run", "arguments": '{"path": "a"}'}}
    first = {"role": "assistant", "tool_calls": [call]}
    results = [{"role": "tool", "tool_call_id": "1", "content": "x"} for _ in range(n)]
    return [first, {"role": "user", "content": "go"}, *results]


def _truncated(n: int) -> None:
    body = {"messages": [{"role": "user", "content": "a"}, *_calls(n), *_messages(2)]}
    request = parse_chat("chat", body)
    spans = tuple(
        MessageSpan(i, message.role, Span(i, i + 1)) for i, message in enumerate(request.messages)
    )
    rendered = Rendered(np.zeros(n + 9, np.int32), n + 9, spans)
    truncate_messages(json.dumps(body).encode(), "chat", request.messages, rendered, n // 2)


def _cut_results(n: int) -> None:
    results = [{"role": "tool", "tool_call_id": f"{i}", "content": "x"} for i in range(n)]
    messages = parse_chat("chat", {"messages": results}).messages
    cut(_rendered(n, [MessageSpan(i, Role.TOOL, Span(i, i + 1)) for i in range(n)]), messages)


def _bodies(n: int) -> None:
    bodies = BodyCache(0)
    first = json.dumps({"messages": _messages(n)}).encode()
    second = json.dumps({"messages": _messages(n + 1)}).encode()
    kept = bodies.keep(ReadBody(first, parse_object(first)), "")
    assert bodies.read(second, "") is not None and kept is not None


def _freed(body: dict[str, Any]) -> bytes:
    return strip_own_fields(json.dumps(body).encode())


def _doubled(n: int) -> None:
    text = '{"messages":[{"a":1' + ',"evoke_keep":"pin"' * n + "}]}"
    strip_own_fields(text.encode())


def _items(kind: str, n: int) -> dict[str, Any]:
    item = {"type": "message", "role": "assistant", "content": "abc " * 16}
    call = {"type": "function_call", "name": "run", "arguments": "{}", "call_id": "1"}
    return {"input": [item if kind == "message" else call for _ in range(n)]}


def _dated(n: int) -> None:
    parts = [{"type": "text", "text": "now 1"} for _ in range(n)]
    body = {"messages": [{"role": "system", "content": parts}]}
    texts = {path: "then" for path, _ in normalise.system_texts(body, "chat")}
    normalise.with_texts(json.dumps(body).encode(), texts)


OF_COUNT: dict[str, Callable[[int], object]] = {
    "chat": lambda n: tuple(parse_chat("chat", {"messages": _messages(n)}).messages),
    "marked": lambda n: parse_chat("chat", {"messages": _messages(n, evoke_keep="pin")}),
    "freed of one": lambda n: _freed({"messages": [*_messages(1, evoke_keep="pin"), *[{}] * n]}),
    "freed of all": lambda n: _freed({"messages": _messages(n, evoke_keep="pin")}),
    "freed of the same name": _doubled,
    "responses": lambda n: parse_chat("responses", _items("message", n)),
    "calls": lambda n: parse_chat("responses", _items("call", n)),
    "responses as chat": lambda n: responses_to_chat(_items("message", n)),
    "calls as chat": lambda n: responses_to_chat(_items("call", n)),
    "anthropic": lambda n: parse_chat("messages", {"messages": _messages(n)}),
    "anthropic as chat": lambda n: anthropic_to_chat({"messages": _messages(n)}),
    "truncated": _truncated,
    "results": _cut_results,
    "bodies": _bodies,
    "dates": _dated,
    "tools": lambda n: normalise.with_sorted_tools(
        json.dumps({"tools": [{"name": str(-i)} for i in range(n)]}).encode(),
        [{"name": str(-i)} for i in range(n)],
    ),
    "drift": lambda n: drift({"messages": _messages(n)}, {"messages": [*_messages(n), 5]}),
}


@pytest.mark.parametrize("name", OF_COUNT)
def test_messages_are_read_in_linear_time(name: str) -> None:
    assert exponent(OF_COUNT[name], 512) < 1.3
