"""The rendering of a request: its tokens are those that the server decodes."""

from __future__ import annotations

import base64
import time
from itertools import pairwise
from typing import Any

import pytest
from llama import Llama, running, sample_text

from bench.random_models import chat_template
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.prompt.segment import TextAlignment

MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Remember: The door code for the Oslo lab is 4821."},
    {"role": "assistant", "content": "Got it."},
    {"role": "user", "content": [{"type": "text", "text": "What is the door code?"}]},
]


LONG = [
    {"role": "system", "content": "Réponds, s'il te plaît. 日本語 ok \U0001f642"},
    *(
        {"role": ("user", "assistant")[i % 2], "content": f"Turn {i}. {sample_text(60, seed=i)}"}
        for i in range(20)
    ),
    {"role": "user", "content": "And now?"},
]
BODIES: dict[str, list[dict[str, Any]]] = {
    "chat": [{"messages": MESSAGES}, {"messages": LONG}],
    "messages": [
        {"system": "Short.", "messages": MESSAGES[1:], "max_tokens": 1},
        {"messages": LONG[1:], "max_tokens": 1},
    ],
    "responses": [
        {"instructions": "You are a helpful assistant.", "input": "Hello!"},
        {"input": LONG[1:2]},
    ],
    "completions": [{"prompt": sample_text(400)}, {"prompt": "a"}, {"prompt": [5, 6, 7, 2047]}],
}


def render(server: Llama, dialect: str, body: object, **more: object) -> dict[str, Any]:
    answer: dict[str, Any] = server.post(
        "/evoke/render", {"dialect": dialect, "body": body, **more}
    )
    return answer


def expanded(compact: dict[str, Any]) -> dict[str, Any]:
    """The plain reply that a compact reply encodes."""
    plain = dict(compact)
    edges = plain.pop("edges")
    assert [end for end, _ in edges] == compact["spans"]["end"][-8:]
    assert plain.pop("from") == 0
    raw = base64.b64decode(plain.pop("tokens_b64"), validate=True)
    assert len(raw) % 4 == 0
    plain["tokens"] = [
        int.from_bytes(raw[at : at + 4], "little", signed=True) for at in range(0, len(raw), 4)
    ]
    bits = base64.b64decode(plain.pop("stops_b64"), validate=True)
    assert len(bits) == (len(plain["tokens"]) + 7) // 8
    plain["stops"] = [at for at in range(8 * len(bits)) if bits[at // 8] >> at % 8 & 1]
    columns = plain.pop("spans")
    assert columns.keys() == {"index", "role", "end"}
    ends = pairwise([0, *columns["end"]])
    plain["spans"] = [
        {"index": index, "role": role, "p0": p0, "p1": p1}
        for index, role, (p0, p1) in zip(columns["index"], columns["role"], ends, strict=True)
    ]
    return plain


def check_compact_is_plain(server: Llama) -> None:
    """Compares the compact with the plain rendering, for every body of every dialect."""
    for dialect, bodies in BODIES.items():
        for body in bodies:
            plain = render(server, dialect, body)
            assert plain["tokens"] and bool(plain["spans"]) == (dialect != "completions")
            assert render(server, dialect, body, compact=False) == plain
            assert expanded(render(server, dialect, body, compact=True)) == plain


def test_rendered_tokens_are_those_of_the_applied_template(one: Llama) -> None:
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


PROSE = "One. Two!  Three? 4.5 is a number; v1.2\nnext line\n\n  indented.\r\nlast; end"
ASIAN = "\u7b2c\u4e00\u3002\u7b2c\u4e8c\uff01 \u7b2c\u4e09"


@pytest.mark.parametrize("text", [PROSE, ASIAN, f"  {PROSE}\n", "a", ". .", "..."])
def test_the_server_and_the_proxy_find_the_same_sentence_starts(one: Llama, text: str) -> None:
    """The server reports them as `stops`: as many as the proxy finds, at the same words."""
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes. No."}]
    answer = render(one, "chat", {"messages": [*messages, *MESSAGES[-1:]]})
    rendered = Rendered.parse(answer)
    assert rendered.sentence_starts.tolist() == answer["stops"]
    for span, message in zip(rendered.spans, messages, strict=False):
        shares = TextAlignment(message["content"], span.span, rendered.sentence_starts)
        ends = [*shares.sentence_starts, span.span.end][1:]
        for start, end in zip(shares.sentence_starts, ends, strict=True):
            tokens = rendered.tokens[start:end].tolist()
            sentence = one.post("/detokenize", {"tokens": tokens})["content"]
            assert sentence.split("<|")[0].strip() == shares.of(Span(start, end)).strip()
    assert text != PROSE or len(answer["stops"]) == 8 + 1
    assert text != ASIAN or len(answer["stops"]) == 2 + 1


@pytest.mark.parametrize("dialect", ["messages", "responses", "completions"])
def test_other_dialects_render_the_tokens_that_the_server_counts(one: Llama, dialect: str) -> None:
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


def test_the_messages_dialect_accepts_a_slot_and_a_marker(two: Llama) -> None:
    for slot in (0, 1):
        two.erase(slot)
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
    more = {"id_slot": 1, "evoke": {"epoch": two.epoch(1)}, "cache_prompt": True}
    two.post("/v1/messages", body | more)
    assert two.slot(1)["n_tokens"] > 0 and two.slot(1)["reserved"]
    assert two.slot(0)["n_tokens"] == 0


def test_a_rendering_reports_the_common_prefix_with_each_slot(two: Llama) -> None:
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


def test_slots_are_compared_with_the_end_of_a_prompt(two: Llama) -> None:
    for slot in (0, 1):
        two.erase(slot)
    before = LONG[-7:]
    two.post("/v1/chat/completions", {"messages": before, "id_slot": 1, "max_tokens": 4})
    previous, n_slot = render(two, "chat", {"messages": before}), two.slot(1)["n_tokens"]
    generation, asked = previous["generation"], {"role": "user", "content": "Why?"}
    for told in ("A word that it has not said.", "A"):
        more = [{"role": "assistant", "content": told}, asked]
        whole = render(two, "chat", {"messages": [*before, *more]})
        for n_before in (1, 3):
            body = {"messages": [*before[-n_before:], *more]}
            last = render(two, "chat", body, behind=[generation, n_before])
            assert last["slots"][1]["n_common"] == whole["slots"][1]["n_common"] < n_slot
            assert last["tokens"] == render(two, "chat", body)["tokens"]
            # The first tokens of the slot are not read, and there may be fewer.
            other = render(two, "chat", body, behind=[n_slot + 1, n_before])
            assert [view["n_common"] for view in other["slots"]] == [0, n_slot]
    alone = render(two, "chat", {"messages": before[-1:]}, behind=[generation, 1])
    assert alone["slots"][1]["n_common"] == len(previous["tokens"])


@pytest.mark.parametrize(
    "body",
    [
        {"dialect": "chat"},
        {"dialect": "klingon", "body": {}},
        {"dialect": "chat", "body": {"messages": "x"}},
        {"dialect": "completions", "body": {"prompt": ["a", "b"]}},
        *(
            {"dialect": "completions", "body": {"prompt": "a"}, "compact": value}
            for value in (1, 0, "true", None, [], {})
        ),
        *(
            {"dialect": "completions", "body": {"prompt": "a"}, "known": value}
            for value in (1, {}, "x", [1], [[]], [[1, 2]], [["1", "a"]], [[1, "a"]] * 65)
        ),
        *(
            {"dialect": "completions", "body": {"prompt": "a"}, "behind": value}
            for value in (1, {}, None, [], [1], [0, 1], [1, 0], [1 << 31, 1], [1.5, 1], ["1", 1])
        ),
    ],
)
def test_an_invalid_rendering_request_is_400(one: Llama, body: object) -> None:
    status, answer = one.ask("POST", "/evoke/render", body)
    assert status == 400 and answer["error"]["message"]
    assert (answer["error"]["code"], answer["error"]["type"]) == (400, "invalid_request_error")


def test_a_compact_rendering_equals_the_plain_one(one: Llama, two: Llama) -> None:
    two.complete(two.tokens(sample_text(100)), slot=1)
    for server in (one, two):
        check_compact_is_plain(server)


def test_a_compact_reply_omits_the_prefix_that_the_client_has(one: Llama) -> None:
    """With the earlier rendering it is complete. If the prefix differs, nothing is omitted."""
    before = render(one, "chat", {"messages": LONG[:14]}, compact=True)
    body = {"messages": LONG}
    whole = render(one, "chat", body, compact=True)
    short = render(one, "chat", body, compact=True, known=before["edges"])
    assert short["from"] == before["generation"] > 0
    assert short["spans"]["index"] == whole["spans"]["index"][14:]
    assert len(short["tokens_b64"]) < len(whole["tokens_b64"])
    completed, read = Rendered.parse(short, Rendered.parse(before)), Rendered.parse(whole)
    assert completed.tokens.tolist() == read.tokens.tolist()
    assert completed.sentence_starts.tolist() == read.sentence_starts.tolist()
    assert (
        list(completed.spans) == list(read.spans)
        and completed.message_hashes == read.message_hashes
    )
    other = [MESSAGES[0], *LONG[1:]]
    for edges, messages in (
        (before["edges"], other),
        ([[end, "0" * 16] for end, _ in before["edges"]], LONG),
        ([[end - 1, hashed] for end, hashed in before["edges"]], LONG),
        ([], LONG),
    ):
        full = render(one, "chat", {"messages": messages}, compact=True, known=edges)
        assert full == render(one, "chat", {"messages": messages}, compact=True)


@pytest.mark.parametrize(
    "template", ["Qwen3.5-4B", "Mistral-Small-3.2-24B-Instruct-2506", "openai-gpt-oss-120b"]
)
def test_a_compact_rendering_equals_the_plain_one_with_other_templates(template: str) -> None:
    file = str(chat_template(template))
    options = ("-c", "512", "-np", "1", "--evoke-ram", "8", "--chat-template-file", file)
    with running(True, *options) as server:
        check_compact_is_plain(server)


def test_a_text_that_the_template_changed_is_not_searched_for_hours() -> None:
    """The search for a text of one letter in a text of that letter has a limit."""
    n = 1_200_000
    file = str(chat_template("Qwen3.5-4B"))
    options = ("-c", "512", "-np", "1", "--evoke-ram", "8", "--chat-template-file", file)

    def seconds(answer: str) -> float:
        messages = [
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "a" * n},
        ]
        before = time.monotonic()
        rendered = render(server, "chat", {"messages": messages}, compact=True)
        assert rendered["spans"]["end"]
        return time.monotonic() - before

    with running(True, *options) as server:
        usual = seconds("b" * (n // 2))
        assert seconds("a" * (n // 2) + "</think>Hi!") < 2 * usual + 2
