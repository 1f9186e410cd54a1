"""What the server says it would decode is what it decodes."""

from __future__ import annotations

import pytest
from llama import Llama

MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Remember: The door code for the Oslo lab is 4821."},
    {"role": "assistant", "content": "Got it."},
    {"role": "user", "content": [{"type": "text", "text": "What is the door code?"}]},
]


def render(server: Llama, dialect: str, body: object) -> dict:
    answer: dict = server.post("/evoke/render", {"dialect": dialect, "body": body})
    return answer


def test_tokens_are_those_of_the_template(one: Llama) -> None:
    rendered = render(one, "chat", {"messages": MESSAGES})
    prompt = one.post("/apply-template", {"messages": MESSAGES})["prompt"]
    assert rendered["tokens"] == one.tokens(prompt)
    usage = one.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})["usage"]
    assert usage["prompt_tokens"] == len(rendered["tokens"])


def test_spans_cover_the_prompt_message_by_message(one: Llama) -> None:
    rendered = render(one, "chat", {"messages": MESSAGES})
    spans = rendered["spans"]
    assert [span["index"] for span in spans] == [0, 1, 2, 3]
    assert [span["role"] for span in spans] == ["system", "user", "assistant", "user"]
    assert spans[0]["p0"] == 0 and spans[-1]["p1"] == rendered["generation"]
    for left, right in zip(spans, spans[1:], strict=False):
        assert left["p1"] == right["p0"]
    for span, message in zip(spans, MESSAGES, strict=True):
        text = one.post("/detokenize", {"tokens": rendered["tokens"][span["p0"] : span["p1"]]})
        content = message["content"]
        assert (content if isinstance(content, str) else content[0]["text"]) in text["content"]
        assert text["content"].startswith(f"<|im_start|>{message['role']}")
    tail = one.post("/detokenize", {"tokens": rendered["tokens"][rendered["generation"] :]})
    assert tail["content"] == "<|im_start|>assistant\n"


@pytest.mark.parametrize("dialect", ["messages", "responses", "completions"])
def test_other_dialects(one: Llama, dialect: str) -> None:
    bodies = {
        "messages": {
            "system": "You are a helpful assistant.",
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 1,
        },
        "responses": {"instructions": "You are a helpful assistant.", "input": "Hello!"},
        "completions": {"prompt": "The river follows the machine."},
    }
    paths = {
        "messages": "/v1/messages/count_tokens",
        "responses": "/v1/responses/input_tokens",
    }
    rendered = render(one, dialect, bodies[dialect])
    if dialect in paths:
        counted = one.post(paths[dialect], bodies[dialect])["input_tokens"]
        assert len(rendered["tokens"]) == counted
        assert [span["role"] for span in rendered["spans"]] == ["system", "user"]
    else:
        assert rendered["tokens"] == one.tokens("The river follows the machine.")


def test_the_messages_dialect_carries_slot_and_marker(two: Llama) -> None:
    for slot in (0, 1):
        two.erase(slot)
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
    more = {"id_slot": 1, "evoke": {"epoch": two.epoch(1)}, "cache_prompt": True}
    two.post("/v1/messages", body | more)
    assert two.slot(1)["n_tokens"] > 0 and two.slot(1)["reserved"]
    assert two.slot(0)["n_tokens"] == 0


def test_the_view_tells_what_each_slot_shares(two: Llama) -> None:
    for slot in (0, 1):
        two.erase(slot)
    body = {"messages": MESSAGES}
    two.post("/v1/chat/completions", body | {"id_slot": 1, "max_tokens": 4})
    rendered = render(two, "chat", body)
    views = {view["id"]: view for view in rendered["slots"]}
    assert views[0]["n_common"] == 0
    assert views[1]["n_common"] == len(rendered["tokens"])
    assert views[1]["resident"] == two.slot(1)["resident"]
    assert views[1]["epoch"] == two.epoch(1)


@pytest.mark.parametrize(
    "body",
    [
        {"dialect": "chat"},
        {"dialect": "klingon", "body": {}},
        {"dialect": "chat", "body": {"messages": "x"}},
        {"dialect": "completions", "body": {"prompt": ["a", "b"]}},
    ],
)
def test_bad_requests_are_400(one: Llama, body: object) -> None:
    status, answer = one.ask("POST", "/evoke/render", body)
    assert status == 400 and answer["error"]["message"]
