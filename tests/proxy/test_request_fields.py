"""Fields of the proxy: validated and removed from the request in every dialect."""

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
# Each dialect's body, and the list in it whose objects may be marked.
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": [USER, PARTS]}, "messages"),
    "/v1/messages": ({"system": "Be brief.", "messages": [PARTS, USER]}, "messages"),
    "/v1/responses": ({"instructions": "Be brief.", "input": [USER, ITEM]}, "input"),
    "/v1/completions": ({"prompt": "Hello."}, ""),
    "/completion": ({"prompt": "Hello."}, ""),
    "/infill": ({"input_prefix": "a", "input_suffix": "b"}, ""),
}
CHATS = list(BODIES)[:3]
# Paths that count what a chat of the dialect would have: its fields are the same there.
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
WRONG = [
    ("evoke", "no"),
    ("evoke_budget", 0),
    ("evoke_budget", "many"),
    ("evoke_policy", "lru"),
    ("evoke_recovery", "later"),
    ("evoke_priority", -1),
    ("evoke_pinned", "yes"),
    ("evoke_task_boundary", 1),
    ("evoke_session", "a b"),
    ("evoke_recover", "file:a.py"),
    ("evoke_recover", [1]),
    ("evoke_recover", ["x"] * 65),
    ("evoke_oracle", "user:1"),
]
WRONG_MARKS = [("evoke_keep", "always"), ("evoke_name", "")]


async def _ok(exchange: Exchange) -> None:
    await exchange.send(response(b"{}", b"application/json"))


def _post(port: int, path: str, body: dict[str, Any], **headers: str) -> Answer:
    named = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(port, "POST", path, json.dumps(body).encode(), named)


def _marked(path: str, mark: dict[str, Any]) -> dict[str, Any]:
    body, key = BODIES[path]
    return {**body, key: [item | mark for item in body[key]]}


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_only_fields_of_the_proxy_are_removed(path: str, patched: bool) -> None:
    body, key = BODIES[path]
    marks = {"evoke_keep": "prefer", "evoke_name": "file:a.py"}
    marked = _marked(path, marks) if key else body
    with fake_upstream(_ok, patched=patched) as fake, proxy(fake.port) as running:
        _post(running.port, path, FIELDS | marked, X_Evoke_Session="mine")
        post = f"POST {path} ".encode()
        (seen,) = [seen for seen in fake.requests if seen.head.startswith(post)]
    arrived = json.loads(seen.body)
    assert {name: item for name, item in arrived.items() if name != "id_slot"} == body
    assert b"evoke" not in seen.head.lower()


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [(path, *wrong) for path in BODIES for wrong in WRONG]
    + [(path, *wrong) for path in (*CHATS, *COUNTS) for wrong in WRONG_MARKS],
)
def test_a_wrong_value_is_400_and_the_field_is_named(path: str, field: str, value: object) -> None:
    body = BODIES[path][0] | {field: value}
    if (field, value) in WRONG_MARKS:
        body = _marked(path, {field: value})
    with fake_upstream(_ok) as fake, proxy(fake.port) as running:
        answer = _post(running.port, path, body)
        assert fake.requests == []
    assert answer.status == 400
    error = json.loads(answer.body)["error"]
    assert field in error["message"]
    assert error.get("code") in (f"{field}_invalid", None if "messages" in path else "")


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_400_and_the_nearest_is_named(path: str) -> None:
    with fake_upstream(_ok) as fake, proxy(fake.port) as running:
        for field, named in (
            ("evoke_bugdet", "mean evoke_budget?"),
            ("evoke_zzzzzzzz", "known: evoke"),
        ):
            answer = _post(running.port, path, BODIES[path][0] | {field: 512})
            error = json.loads(answer.body)["error"]
            assert (answer.status, fake.requests) == (400, [])
            assert repr(field) in error["message"] and named in error["message"]
            known = "evoke_field_unknown"
            assert error.get("code") in (known, None if "messages" in path else known)


@pytest.mark.parametrize("path", COUNTS)
def test_counting_ignores_the_fields_of_the_proxy(
    patched_port: int, patched_proxy: RunningProxy, path: str
) -> None:
    body, key = BODIES[path]
    assert key
    direct = _post(patched_port, path, body)
    asked = _post(patched_proxy.port, path, FIELDS | _marked(path, {"evoke_keep": "pin"}))
    assert direct.status == 200 and b"input_tokens" in direct.body
    assert (asked.status, asked.body) == (200, direct.body)


@pytest.mark.parametrize("path", COUNTS)
def test_a_body_that_is_not_json_is_refused_by_the_server(
    patched_port: int, patched_proxy: RunningProxy, path: str
) -> None:
    direct, proxied = (ask(p, "POST", path, b"{", JSON) for p in (patched_port, patched_proxy.port))
    assert direct.status >= 400
    assert (proxied.status, proxied.body) == (direct.status, direct.body)


def test_a_name_that_cannot_be_recovered_is_reported(patched_proxy: RunningProxy) -> None:
    answer = _post(patched_proxy.port, "/v1/chat/completions", {"evoke_recovery": "later"})
    assert answer.status == 400
    message = json.loads(answer.body)["error"]["message"]
    assert message == f"evoke_recovery must be one of {', '.join(RECOVERIES)}, not 'later'"


@pytest.mark.parametrize("path", CHATS)
def test_pins_over_the_cap_are_refused(patched_proxy: RunningProxy, path: str) -> None:
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
        assert "tokens are pinned, at most" in error["message"]
        assert error.get("code", "evoke_pin_budget_exceeded") == "evoke_pin_budget_exceeded"
    assert _post(patched_proxy.port, path, body).status == 200


def test_pins_whose_sum_exceeds_the_cap_are_refused_and_earlier_pins_stay(
    patched_proxy: RunningProxy,
) -> None:
    talk = ChatClient(patched_proxy.port, "pins", {"evoke_budget": BUDGET})
    talk.say("The code is 7741.", evoke_pinned=True)
    for number in range(4):
        said = talk.say(f"Turn {number}. {FILLER}")
        assert said.accounting["n_resident_peak"] <= BUDGET
    talk.messages.append({"role": "user", "content": FILLER, "evoke_keep": "pin"})
    assert talk.post().status == 200
    talk.messages.append({"role": "user", "content": FILLER, "evoke_keep": "pin"})
    refused = talk.post()
    assert json.loads(refused.body)["error"]["code"] == "evoke_pin_budget_exceeded"
    del talk.messages[-1]
    assert talk.say("Go on.").accounting["n_resident_peak"] <= BUDGET


def test_a_request_chooses_its_recovery(patched_proxy: RunningProxy) -> None:
    talk = ChatClient(patched_proxy.port, "own", {"evoke_budget": BUDGET})
    talk.say("The access code of the Meridian vault is 7741.")
    for number in range(6):
        talk.say(f"Turn {number}. {FILLER}")
    question = "What is the access code of the Meridian vault?"
    assert talk.say(question, evoke_recovery="discard").accounting["recovered"] == 0
    for number in range(3):
        talk.say(f"Again {number}. {FILLER}")
    assert talk.say(question, evoke_recovery="kv_restore").accounting["recovered"] > 0


@pytest.mark.parametrize(("asked", "kept"), [(200, 200), (900, BUDGET), (None, BUDGET)])
def test_a_request_may_lower_the_budget_and_not_raise_it(
    patched_port: int, asked: int | None, kept: int
) -> None:
    with proxy(patched_port, policy__budget=BUDGET) as running:
        talk = ChatClient(running.port, "low", {"evoke_budget": asked})
        turns = [talk.say(f"Turn {number}. {FILLER}") for number in range(4)]
    assert [said.accounting["budget"] for said in turns] == [kept] * 4
    assert max(said.accounting["n_resident_peak"] for said in turns) <= kept


def test_a_request_chooses_its_policy(patched_proxy: RunningProxy) -> None:
    talk = ChatClient(patched_proxy.port, "own", {"evoke_budget": BUDGET})
    names = [name for name in policy_names() if "_" not in name]  # without variants
    for number, name in enumerate([*names, "evoke"]):
        said = talk.say(f"Turn {number}. {FILLER}", evoke_policy=name)
        assert said.headers["x-evoke-policy"] == name
        assert said.accounting["marker"] == "ok"
