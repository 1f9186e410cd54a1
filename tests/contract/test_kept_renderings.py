"""Kept renderings: a request that names its rendering is decoded from it, or rendered again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama import Llama, sample_text

MESSAGES = [
    {"role": "user", "content": f"Remember this. {sample_text(40)}"},
    {"role": "assistant", "content": "I will."},
    {"role": "user", "content": 'What was it about? \u00e9\u65e5 {"quoted": "}"}'},
]
TOOL = {"name": "look_up", "description": "Looks a word up."}
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 12,
            "temperature": 0,
            "tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}],
            "logprobs": True,
        },
    ),
    "responses": (
        "/v1/responses",
        {"input": MESSAGES[:1], "max_output_tokens": 12, "temperature": 0},
    ),
    "messages": (
        "/v1/messages",
        {
            "system": "Be brief.",
            "messages": MESSAGES,
            "max_tokens": 12,
            "temperature": 0,
            "tools": [{**TOOL, "input_schema": SCHEMA}],
        },
    ),
}
EACH = pytest.mark.parametrize("dialect", DIALECTS)


def render(server: Llama, dialect: str, body: bytes, **more: object) -> str:
    """Renders a body, and returns the id of its rendering; empty when it is not kept."""
    call = json.dumps({"dialect": dialect, "keep": True, **more}).encode()
    status, raw = server.raw("POST", "/evoke/render", call[:-1] + b', "body":' + body + b"}")
    assert status == 200, raw
    rendering: str = json.loads(raw)["rendering"]
    return rendering


def keep(server: Llama, dialect: str, body: bytes, **more: object) -> str:
    """Renders a body, and returns the id of its rendering, which must be kept."""
    rendering = render(server, dialect, body, **more)
    assert len(rendering) == 32
    return rendering


def forward(server: Llama, path: str, body: bytes, rendering: str, **more: object) -> Any:
    """The reply to a body with a marker in front that names a rendering, and its accounting."""
    evoke = {"epoch": server.epoch(), "rendering": rendering}
    marker = json.dumps({"id_slot": 0, "cache_prompt": True, "evoke": evoke, **more}).encode()
    status, raw = server.raw("POST", path, marker[:-1] + b"," + body.lstrip()[1:])
    assert status == 200, raw
    reply = json.loads(raw)
    return reply, reply.get("timings", {}).get("evoke")


def comparable(reply: dict[str, Any]) -> Any:
    """A reply without ids and times."""
    parts = reply.get("choices") or reply.get("output") or reply.get("content")
    text = json.dumps(parts, sort_keys=True)
    for item in parts if isinstance(parts, list) else []:
        for key in ("id", "call_id"):
            text = text.replace(str(item.get(key, "\0")), "")
    usage = {k: v for k, v in reply["usage"].items() if isinstance(v, int)}
    return text, usage


@EACH
def test_a_request_that_names_its_rendering_is_answered_as_without(
    one: Llama, dialect: str
) -> None:
    path, fields = DIALECTS[dialect]
    body = json.dumps(fields).encode()
    one.erase()
    plain, accounting = forward(one, path, body, "")
    assert accounting["reused_rendering"] is False
    one.erase()
    reused, accounting = forward(one, path, body, keep(one, dialect, body))
    assert accounting["reused_rendering"] is True
    assert accounting["n_prompt"] == accounting["decoded"] > 20
    assert comparable(reused) == comparable(plain)


def test_a_rendering_is_used_once(one: Llama) -> None:
    path, fields = DIALECTS["chat"]
    body = json.dumps(fields).encode()
    rendering = keep(one, "chat", body)
    used = [forward(one, path, body, rendering)[1]["reused_rendering"] for _ in range(2)]
    assert used == [True, False]


@pytest.mark.parametrize(
    "changed",
    [
        {"messages": MESSAGES[:1]},
        {"temperature": 0.5},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"response_format": {"type": "text"}},
        {"tools": None},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_body_is_rendered_again(one: Llama, changed: dict[str, Any]) -> None:
    path, fields = DIALECTS["chat"]
    rendering = keep(one, "chat", json.dumps(fields).encode())
    other = {key: value for key, value in (fields | changed).items() if value is not None}
    reply, accounting = forward(one, path, json.dumps(other).encode(), rendering)
    assert accounting["reused_rendering"] is False
    counted = one.post("/evoke/render", {"dialect": "chat", "body": other})["tokens"]
    assert accounting["n_prompt"] == len(counted) == reply["usage"]["prompt_tokens"]


def test_a_rendering_of_another_dialect_is_not_used(one: Llama) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 4}).encode()
    rendering = keep(one, "messages", body)
    _, accounting = forward(one, "/v1/chat/completions", body, rendering)
    assert accounting["reused_rendering"] is False


def test_a_body_that_repeats_the_marker_is_rendered_again(one: Llama) -> None:
    """A later member of the same name would count, as in any JSON object."""
    body = json.dumps({"messages": MESSAGES, "max_tokens": 4, "cache_prompt": False}).encode()
    rendering = keep(one, "chat", body)
    _, accounting = forward(one, "/v1/chat/completions", body, rendering)
    assert accounting["reused_rendering"] is False
    assert accounting["resident_before"] == 0


@pytest.mark.parametrize(
    "marker",
    [
        b'"evoke":{"epoch":0,"rendering":"%b"},"model":"x",',
        b'"evoke":{"epoch":0,"rendering":{"a":"%b"}},',
        b'"evoke":{"rendering":["%b"]},',
        b'"model":"x","evoke":{"rendering":"%b"},',
        b'"evoke":{"rendering":"%b"},"evoke":{},',
    ],
)
def test_a_marker_of_another_form_is_rendered_again_or_refused(one: Llama, marker: bytes) -> None:
    path, fields = DIALECTS["chat"]
    body = json.dumps(fields).encode()
    rendering = keep(one, "chat", body).encode()
    status, raw = one.raw("POST", path, b"{" + marker.replace(b"%b", rendering) + body[1:])
    assert status in (200, 400), raw
    evoke = json.loads(raw).get("timings", {}).get("evoke") if status == 200 else None
    assert not (evoke or {}).get("reused_rendering")


def test_spaces_around_the_body_do_not_matter(one: Llama) -> None:
    path, fields = DIALECTS["chat"]
    body = b" \n" + json.dumps(fields, indent=1).encode() + b"\n "
    rendering = keep(one, "chat", body)
    _, accounting = forward(one, path, body, rendering)
    assert accounting["reused_rendering"] is True


def test_a_tenant_with_many_renderings_loses_its_own_oldest(one: Llama) -> None:
    path, fields = DIALECTS["chat"]
    body = json.dumps(fields).encode()
    small = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    first = keep(one, "chat", body, tenant="quiet")
    oldest = keep(one, "chat", small, tenant="busy")
    for _ in range(300):
        newest = keep(one, "chat", small, tenant="busy")
    reused = [
        forward(one, path, text, rendering)[1]["reused_rendering"]
        for text, rendering in ((body, first), (small, oldest), (small, newest))
    ]
    assert reused == [True, False, True]


# A rendering of more than 16 MiB is not kept. Each part of this unused member is five bytes of text
# and takes 64 bytes of memory.
NESTED = b'"input":[0' + 270_000 * b",[[]]" + b"]"
# The parser of a reply takes about 16 times the bytes of a schema.
LARGE = json.dumps({"type": "object", "description": (1 << 20) * "x"}).encode()


def test_an_unused_member_of_a_body_counts_for_its_memory(one: Llama) -> None:
    messages = json.dumps(MESSAGES).encode()
    assert render(one, "chat", b'{"messages":%b,%b}' % (messages, NESTED)) == ""
    keep(one, "chat", b'{"messages":%b,%b}' % (messages, NESTED[: len(NESTED) // 2] + b"]"))


@pytest.mark.parametrize(
    ("dialect", "name", "wrapped"),
    [
        ("chat", b"response_format", b'{"type":"json_schema","json_schema":{"schema":%b}}'),
        ("chat", b"response_form\\u0061t", b'{"type":"json_schema","json_schema":{"schema":%b}}'),
        ("chat", b"json\\u005fschema", b"%b"),
        ("responses", b"text", b'{"format":{"type":"json_schema","schema":%b}}'),
    ],
)
def test_a_schema_counts_for_its_memory_under_each_name(
    one: Llama, dialect: str, name: bytes, wrapped: bytes
) -> None:
    if "0c1e57098" in one.get("/props")["build_info"]:
        pytest.skip("this release keeps no parser with a rendering")
    prompt = b'"input":"Hi"' if dialect == "responses" else b'"messages":%b'
    prompt = prompt.replace(b"%b", json.dumps(MESSAGES).encode())
    body = b'{%b,"%b":%b}'
    assert render(one, dialect, body % (prompt, name, wrapped % LARGE)) == ""
    keep(one, dialect, body % (prompt, name, wrapped % LARGE.replace(1000 * b"x", b"")))


def test_messages_do_not_count_as_schemas(one: Llama) -> None:
    messages = b"[" + (2 << 20) * b" " + json.dumps(MESSAGES).encode()[1:]
    keep(one, "chat", b'{"messages":%b}' % messages)


def test_keep_must_be_true_or_false(one: Llama) -> None:
    status, _ = one.ask("POST", "/evoke/render", {"body": {"messages": MESSAGES}, "keep": 1})
    assert status == 400
