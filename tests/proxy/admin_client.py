"""Requests to the admin API, and a conversation for them to act on."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

from conversation import FILLER, ChatClient, TurnResult
from harness import PATIENCE_S, RunningProxy, ask

JSON = {"Content-Type": "application/json"}
FACT = "The access code of the Meridian vault is 7741."
ASKS = "What is the access code of the Meridian vault?"
BUDGET = 320


def operate(
    running: RunningProxy, method: str, path: str, body: Any = None, status: int = 200
) -> Any:
    """What `/evoke/` answers, which must be of this status; as soon as no request is under way."""
    running.quiet()
    data = None if body is None else json.dumps(body).encode()
    answer = ask(running.port, method, f"/evoke/{path}", data, {} if body is None else JSON)
    assert answer.status == status, answer.body
    return json.loads(answer.body)


def conversation_with_evicted_fact(port: int, session: str, turns: int = 6) -> ChatClient:
    """A fact that was said first and evicted since."""
    talk = ChatClient(port, session, {"evoke_budget": BUDGET})
    talk.say(FACT)
    for number in range(turns):
        talk.say(f"Turn {number}. {FILLER}")
    return talk


def recovered(talk: ChatClient) -> TurnResult:
    """The turn that asks for it."""
    said = talk.say(ASKS)
    assert said.books["recovered"] > 0
    return said


def fact_block(shown: dict[str, Any]) -> dict[str, Any]:
    """The block that has the fact: the first of the user's behind the sinks, which stay."""
    return next(b for b in shown["blocks"] if b["role"] == "user" and b["p0"] >= 16)


def events(port: int, headers: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kinds and facts, as they are told."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/evoke/events", headers=headers)
    kind = ""
    with contextlib.closing(connection), connection.getresponse() as response:
        while line := response.readline():
            if line.startswith(b"event: "):
                kind = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield kind, json.loads(line[6:])
