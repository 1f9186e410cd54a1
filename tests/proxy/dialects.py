"""Chat bodies and answers of each dialect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conversation import events
from harness import Answer, ask

JSON = {"Content-Type": "application/json"}
SYSTEM = "You are a helpful assistant."
KINDS = ("resident_before", "recovered", "decoded", "omitted")
Json = dict[str, Any]


def chat(texts: list[str]) -> Json:
    """Return the body of a chat completion for alternating user and assistant texts."""
    return {"messages": [{"role": "system", "content": SYSTEM}, *_turns(texts)], "max_tokens": 12}


def responses(texts: list[str]) -> Json:
    """Return the same as a body of the Responses API."""
    return {"instructions": SYSTEM, "input": [*_turns(texts, True)], "max_output_tokens": 12}


def messages(texts: list[str]) -> Json:
    """Return the same as a body of the Anthropic Messages API."""
    return {"system": SYSTEM, "messages": [*_turns(texts)], "max_tokens": 12}


def _turns(texts: list[str], typed: bool = False) -> Iterator[Json]:
    """Yield messages by user and assistant in turn.

    With `typed`, an answer is an item of the Responses API.
    """
    for number, text in enumerate(texts):
        if number % 2 == 0:
            yield {"role": "user", "content": text}
        elif typed:
            part = {"type": "output_text", "text": text}
            yield {"type": "message", "role": "assistant", "content": [part]}
        else:
            yield {"role": "assistant", "content": text}


DIALECTS: dict[str, Callable[[list[str]], Json]] = {
    "/v1/chat/completions": chat,
    "/chat/completions": chat,
    "/v1/responses": responses,
    "/responses": responses,
    "/v1/messages": messages,
}
# One path of each dialect.
PATHS = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def body_of(path: str, texts: list[str], **fields: Any) -> bytes:
    return json.dumps({**DIALECTS[path](texts), "temperature": 0, **fields}).encode()


def post(port: int, path: str, texts: list[str], session: str = "", **fields: Any) -> Answer:
    headers = JSON | ({"X-Evoke-Session": session} if session else {})
    return ask(port, "POST", path, body_of(path, texts, **fields), headers)


def usages(answer: Answer) -> list[Json]:
    """Return every usage object of an answer, streamed or not."""
    if answer.body.startswith(b"{"):
        items: list[Json] = [json.loads(answer.body)]
    else:
        items = list(events(answer.body))
    holders = [item.get("response") or item.get("message") or item for item in items]
    return [holder["usage"] for holder in holders if isinstance(holder.get("usage"), dict)]


def accounting_of(answer: Answer) -> Json:
    """Return the token accounting of an answer, which must be in its last usage object only."""
    assert answer.status == 200, answer.body
    found = usages(answer)
    assert ["evoke" in usage for usage in found] == [False] * (len(found) - 1) + [True]
    accounting: Json = found[-1]["evoke"]
    return accounting


TEXTS = ["Tell me about the river.", "It is long.", "And the mountain?"]
