"""The proxy's dialect converters, compared with those of llama-server.

Bodies of the Anthropic and responses dialects are rendered twice: unchanged, and converted to chat
bodies. Both renderings must be equal, and the text that the proxy reads from a message must be in
that message's span.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from llama import Llama, running

from bench.random_models import chat_template
from evoke_proxy.core.request.converters import anthropic_to_chat, responses_to_chat
from evoke_proxy.core.request.messages import Message, from_anthropic, from_responses

# Templates that print tool calls and results: one with typed content, one without, and one that
# prints the arguments as the string in the message.
TEMPLATES = ("Qwen3.5-4B", "Qwen-QwQ-32B", "meetkai-functionary-medium-v3.2")
CONVERTERS = {"messages": anthropic_to_chat, "responses": responses_to_chat}
READERS = {"messages": from_anthropic, "responses": from_responses}
BILLING_SYSTEM = "x-anthropic-billing-header: cc_version=2; cch=a5145;You help."
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}}


@pytest.fixture(scope="module", params=TEMPLATES)
def templated(request: pytest.FixtureRequest) -> Iterator[Llama]:
    file = str(chat_template(request.param))
    options = ("-c", "1024", "-np", "1", "--evoke-ram", "8", "--chat-template-file", file)
    with running(True, *options) as server:
        yield server


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def anthropic_body(rng: random.Random) -> dict[str, Any]:
    """A body with every kind of block that llama-server accepts, in random numbers."""

    def words(kind: str) -> str:
        return f"{kind} {rng.randrange(10**6)}."

    messages: list[dict[str, Any]] = []
    for turn in range(rng.randrange(1, 4)):
        question = [text(words("question")) for _ in range(rng.randrange(1, 3))]
        messages.append({"role": "user", "content": rng.choice((question, words("plain")))})
        calls = [
            {
                "type": "tool_use",
                "id": f"c{turn}{number}",
                "name": "read",
                "input": {"path": words("file"), "n": [1, 2.5, None], "é": True},
            }
            for number in range(rng.randrange(3))
        ]
        thoughts = [{"type": "thinking", "thinking": words("thought")}] * rng.randrange(3)
        answer = [*thoughts, *(text(words("answer")) for _ in range(rng.randrange(3))), *calls]
        messages.append({"role": "assistant", "content": answer or words("answer")})
        contents = (words("result"), [text(words("one")), text(words("two"))], [], None)
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call["id"],
                "content": rng.choice(contents),
            }
            for call in calls
        ]
        if results:
            messages.append({"role": "user", "content": [*results, text(words("after"))]})
    messages.append({"role": "user", "content": words("last")})
    system = rng.choice(
        (BILLING_SYSTEM, [text(BILLING_SYSTEM), text("Be brief.")], "You help.", None)
    )
    tools = [{"name": "read", "description": "Reads a file.", "input_schema": TOOL}]
    body = {"messages": messages, "tools": tools, "max_tokens": 1}
    return body if system is None else body | {"system": system}


def responses_body(rng: random.Random) -> dict[str, Any]:
    """A body with every kind of item that llama-server accepts, in random numbers."""

    def words(kind: str) -> str:
        return f"{kind} {rng.randrange(10**6)}."

    def text_part(kind: str) -> dict[str, Any]:
        return {"type": kind, "text": words("part")}

    items: list[dict[str, Any]] = []
    for turn in range(rng.randrange(1, 4)):
        parts = [text_part("input_text") for _ in range(rng.randrange(1, 3))]
        items.append({"role": "user", "content": rng.choice((parts, words("plain")))})
        thought = {"type": "reasoning", "summary": [], "content": [text(words("thought"))]}
        answers = [[text_part("output_text"), text_part("output_text")], words("answer")]
        message = {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": rng.choice(answers),
        }
        calls = [
            {
                "type": "function_call",
                "call_id": f"c{turn}{number}",
                "name": "read",
                "arguments": json.dumps({"path": words("file"), "é": 1}),
            }
            for number in range(rng.randrange(3))
        ]
        items += [thought] * rng.randrange(2) + [message] * rng.randrange(1, 3) + calls
        outputs = (words("result"), [text_part("input_text"), text_part("input_text")])
        items += [
            {
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": rng.choice(outputs),
            }
            for call in calls
        ]
    items.append({"role": "user", "content": words("last")})
    tools = [{"type": "function", "name": "read", "parameters": TOOL}, {"type": "web_search"}]
    body = {"input": items, "tools": tools, "max_output_tokens": 1}
    return rng.choice((body, body | {"instructions": "You help."}))


def rendering(server: Llama, dialect: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/evoke/render", {"dialect": dialect, "body": body})
    return answer


def printed_values(message: Message) -> Iterator[str]:
    """What the template must print for a message: its text, and the texts in its calls."""
    yield from message.text.split("\n")
    for call in message.tool_calls:
        yield call.name
        yield call.path


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("dialect", "make"), [("messages", anthropic_body), ("responses", responses_body)]
)
def test_a_converted_body_renders_like_the_original(
    templated: Llama, dialect: str, make: Any, seed: int
) -> None:
    body = make(random.Random(seed))
    original = rendering(templated, dialect, body)
    converted = rendering(templated, "chat", CONVERTERS[dialect](body))
    assert converted["tokens"] == original["tokens"]
    assert converted["spans"] == original["spans"]
    messages = READERS[dialect](body)
    for span in original["spans"]:
        tokens = original["tokens"][span["p0"] : span["p1"]]
        printed = templated.post("/detokenize", {"tokens": tokens})["content"]
        message = messages[span["index"]]
        assert message.role == span["role"]
        assert [value for value in printed_values(message) if value not in printed] == []
    assert max(span["index"] for span in original["spans"]) == len(messages) - 1
