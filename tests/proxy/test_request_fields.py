"""The proxy validates its own request fields, and removes them, in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from fake_upstream import Exchange, fake_upstream, response
from harness import Answer, RunningProxy, ask, proxy

import bench.policies  # noqa: F401 -- registers the oracle
from evoke_proxy.config import RECOVERIES
from evoke_proxy.config.policy_names import policy_names

JSON = {"Content-Type": "application/json"}
BUDGET = 320
USER = {"role": "user", "content": "Hello."}
ITEM = {"type": "function_call_output", "call_id": "c", "output": "1"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "evoke_keep is not a field here"}]}
# A body of each path, and the key of its list of messages, which may have message fields.
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": [USER, PARTS]}, "messages"),
    "/v1/messages": ({"system": "Be brief.", "messages": [PARTS, USER]}, "messages"),
    "/v1/responses": ({"instructions": "Be brief.", "input": [USER, ITEM]}, "input"),
    "/v1/completions": ({"prompt": "Hello."}, ""),
    "/completion": ({"prompt": "Hello."}, ""),
    "/infill": ({"input_prefix": "a", "input_suffix": "b"}, ""),
}
CHATS = list(BODIES)[:3]
# Paths that count the tokens of a chat, and the path of the chat; both accept the same fields.
COUNTS = {
    "/v1/chat/completions/input_tokens": CHATS[0],
    "/v1/messages/count_tokens": CHATS[1],
    "/v1/responses/input_tokens": CHATS[2],
}
BODIES |= {path: BODIES[chat] for path, chat in COUNTS.items()}
FIELDS: dict[str, Any] = {
    "evoke": True,
    "evoke_budget": 512,
    "evoke_policy": "discard",
    "evoke_recovery": "kv_restore",
    "evoke_priority": 2.5,
    "evoke_pinned": False,
    "evoke_task_boundary": True,
    "evoke_session": "mine",
    "evoke_recover": ["file:a.py", "user:1"],
}
INVALID = [
    ("evoke", "no"),
    ("evoke_budget", 0),
    ("evoke_budget", "many"),
    ("evoke_policy", "lru"),
    ("evoke_recovery", "later"),
    ("evoke_priority", -1),
    ("evoke_pinned", "yes"),
    ("evoke_task_boundary", 1),
    ("evoke_session", " a"),
    ("evoke_recover", "file:a.py"),
    ("evoke_recover", [1]),
    ("evoke_recover", ["x"] * 65),
    ("evoke_oracle", "user:1"),
]
INVALID_MESSAGE_FIELDS = [("evoke_keep", "always"), ("evoke_name", "")]


async def _ok(exchange: Exchange) -> None:
    await exchange.send(response(b"{}", b"application/json"))


def _post(port: int, path: str, body: dict[str, Any], **headers: str) -> Answer:
    sent = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(port, "POST", path, json.dumps(body).encode(), sent)


def _with_message_fields(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a path with these fields in every message."""
    body, key = BODIES[path]
    return {**body, key: [item | fields for item in body[key]]}


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_only_fields_of_the_proxy_are_removed(path: str, patched: bool) -> None:
    body, key = BODIES[path]
    message_fields = {"evoke_keep": "prefer", "evoke_name": "file:a.py"}
    sent = _with_message_fields(path, message_fields) if key else body
    with fake_upstream(_ok, patched=patched) as fake, proxy(fake.port) as running:
        _post(running.port, path, FIELDS | sent, X_Evoke_Session="mine")
        post = f"POST {path} ".encode()
        (request,) = [each for each in fake.requests if each.head.startswith(post)]
    forwarded = json.loads(request.body)
    assert {name: item for name, item in forwarded.items() if name != "id_slot"} == body
    assert b"evoke" not in request.head.lower()


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [(path, *invalid) for path in BODIES for invalid in INVALID]
    + [(path, *invalid) for path in (*CHATS, *COUNTS) for invalid in INVALID_MESSAGE_FIELDS],
)
def test_an_invalid_value_is_answered_400_and_its_field_is_named(
    path: str, field: str, value: object
) -> None:
    body = BODIES[path][0] | {field: value}
    if (field, value) in INVALID_MESSAGE_FIELDS:
        body = _with_message_fields(path, {field: value})
    with fake_upstream(_ok) as fake, proxy(fake.port) as running:
        answer = _post(running.port, path, body)
        assert fake.requests == []
    assert answer.status == 400
    error = json.loads(answer.body)["error"]
    assert field in error["message"]
    assert error.get("code") in (f"{field}_invalid", None if "messages" in path else "")


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_answered_400_and_the_nearest_name_is_suggested(path: str) -> None:
    with fake_upstream(_ok) as fake, proxy(fake.port) as running:
        for field, hint in (
            ("evoke_bugdet", "mean evoke_budget?"),
            ("evoke_zzzzzzzz", "known: evoke"),
        ):
            answer = _post(running.port, path, BODIES[path][0] | {field: 512})
            error = json.loads(answer.body)["error"]
            assert (answer.status, fake.requests) == (400, [])
            assert repr(field) in error["message"] and hint in error["message"]
            code = "evoke_field_unknown"
            assert error.get("code") in (code, None if "messages" in path else code)


@pytest.mark.parametrize("path", (*CHATS, *COUNTS))
def test_an_unknown_field_of_a_message_is_answered_400(path: str) -> None:
    body, key = BODIES[path]
    with fake_upstream(_ok) as fake, proxy(fake.port) as running:
        for sent, hint in (
            (_with_message_fields(path, {"evoke_kep": "pin"}), "did you mean evoke_keep?"),
            (_with_message_fields(path, {"evoke_budget": 512}), "a field of the whole request"),
            (body | {"evoke_name": "a"}, "a field of a message"),
        ):
            answer = _post(running.port, path, sent)
            error = json.loads(answer.body)["error"]
            assert (answer.status, fake.requests) == (400, [])
            assert hint in error["message"]
            code = "evoke_field_unknown"
            assert error.get("code") in (code, None if "messages" in path else code)
        other = _with_message_fields(path, {"my_evoke_kep": 1})
        assert _post(running.port, path, other).status == 200
        (request,) = [each for each in fake.requests if each.head.startswith(b"POST /v1/")]
        assert json.loads(request.body)[key] == other[key]


@pytest.mark.parametrize("path", COUNTS)
def test_a_token_count_does_not_depend_on_fields_of_the_proxy(
    patched_port: int, patched_proxy: RunningProxy, path: str
) -> None:
    body, key = BODIES[path]
    assert key
    direct = _post(patched_port, path, body)
    body_with_fields = FIELDS | _with_message_fields(path, {"evoke_keep": "pin"})
    proxied = _post(patched_proxy.port, path, body_with_fields)
    assert direct.status == 200 and b"input_tokens" in direct.body
    assert (proxied.status, proxied.body) == (200, direct.body)


@pytest.mark.parametrize("path", COUNTS)
def test_llama_server_refuses_a_token_count_of_a_body_that_is_not_json(
    patched_port: int, patched_proxy: RunningProxy, path: str
) -> None:
    direct, proxied = (ask(p, "POST", path, b"{", JSON) for p in (patched_port, patched_proxy.port))
    assert direct.status >= 400
    assert (proxied.status, proxied.body) == (direct.status, direct.body)


def test_an_unknown_recovery_is_refused_with_the_valid_names(patched_proxy: RunningProxy) -> None:
    answer = _post(patched_proxy.port, "/v1/chat/completions", {"evoke_recovery": "later"})
    assert answer.status == 400
    message = json.loads(answer.body)["error"]["message"]
    assert message == f"evoke_recovery must be one of {', '.join(RECOVERIES)}, not 'later'"


@pytest.mark.parametrize("path", CHATS)
def test_pins_beyond_their_share_of_the_budget_are_refused(
    patched_proxy: RunningProxy, path: str
) -> None:
    long = {"role": "user", "content": FILLER * 3}
    body = {"messages": [long], "input": [long], "max_tokens": 4, "evoke_budget": BUDGET}
    pins: list[dict[str, Any]] = [
        {"messages": [long | {"evoke_keep": "pin"}], "input": [long | {"evoke_keep": "pin"}]},
        {"evoke_pinned": True},
    ]
    for pin in pins:
        answer = _post(patched_proxy.port, path, body | pin)
        assert answer.status == 400
        error = json.loads(answer.body)["error"]
        assert "tokens are pinned, but at most" in error["message"]
        assert error.get("code", "evoke_pin_budget_exceeded") == "evoke_pin_budget_exceeded"
    assert _post(patched_proxy.port, path, body).status == 200


def test_a_pin_is_refused_if_the_sum_of_pins_is_too_large_and_earlier_pins_stay(
    patched_proxy: RunningProxy,
) -> None:
    client = ChatClient(patched_proxy.port, "pins", {"evoke_budget": BUDGET})
    client.say("The code is 7741.", evoke_pinned=True)
    for number in range(4):
        turn = client.say(f"Turn {number}. {FILLER}")
        assert turn.accounting["n_resident_peak"] <= BUDGET
    client.messages.append({"role": "user", "content": FILLER, "evoke_keep": "pin"})
    assert client.post().status == 200
    client.messages.append({"role": "user", "content": FILLER, "evoke_keep": "pin"})
    refused = client.post()
    assert json.loads(refused.body)["error"]["code"] == "evoke_pin_budget_exceeded"
    del client.messages[-1]
    assert client.say("Go on.").accounting["n_resident_peak"] <= BUDGET


def test_a_request_can_choose_its_recovery(patched_proxy: RunningProxy) -> None:
    client = ChatClient(patched_proxy.port, "own", {"evoke_budget": BUDGET})
    client.say("The access code of the Meridian vault is 7741.")
    for number in range(6):
        client.say(f"Turn {number}. {FILLER}")
    question = "What is the access code of the Meridian vault?"
    assert client.say(question, evoke_recovery="discard").accounting["recovered"] == 0
    for number in range(3):
        client.say(f"Again {number}. {FILLER}")
    assert client.say(question, evoke_recovery="kv_restore").accounting["recovered"] > 0


@pytest.mark.parametrize(("requested", "applied"), [(200, 200), (900, BUDGET), (None, BUDGET)])
def test_a_request_can_lower_the_budget_and_not_raise_it(
    patched_port: int, requested: int | None, applied: int
) -> None:
    with proxy(patched_port, policy__budget=BUDGET) as running:
        client = ChatClient(running.port, "low", {"evoke_budget": requested})
        turns = [client.say(f"Turn {number}. {FILLER}") for number in range(4)]
    assert [turn.accounting["budget"] for turn in turns] == [applied] * 4
    assert max(turn.accounting["n_resident_peak"] for turn in turns) <= applied


def test_a_request_can_choose_its_policy(patched_proxy: RunningProxy) -> None:
    client = ChatClient(patched_proxy.port, "own", {"evoke_budget": BUDGET})
    names = [name for name in policy_names() if "_" not in name]  # without variants
    for number, name in enumerate([*names, "evoke"]):
        turn = client.say(f"Turn {number}. {FILLER}", evoke_policy=name)
        assert turn.headers["x-evoke-policy"] == name
        assert turn.accounting["marker"] == "ok"
