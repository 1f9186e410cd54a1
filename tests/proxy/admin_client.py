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
    """Make an admin call when no request runs; returns the JSON of an answer with `status`."""
    running.quiet()
    data = None if body is None else json.dumps(body).encode()
    answer = ask(running.port, method, f"/evoke/{path}", data, {} if body is None else JSON)
    assert answer.status == status, answer.body
    return json.loads(answer.body)


def conversation_with_evicted_fact(
    port: int, session: str, turns: int = 6, system: str = ""
) -> ChatClient:
    """A conversation whose first message has a fact that is now evicted."""
    talk = ChatClient(port, session, {"evoke_budget": BUDGET})
    talk.messages[0]["content"] += system
    talk.say(FACT)
    for number in range(turns):
        talk.say(f"Turn {number}. {FILLER}")
    return talk


def recovered(talk: ChatClient) -> TurnResult:
    """Ask for the fact; returns the turn, which recovered blocks."""
    said = talk.say(ASKS)
    assert said.accounting["recovered"] > 0
    return said


def fact_block(shown: dict[str, Any]) -> dict[str, Any]:
    """The block with the fact: the first one of the user after the sinks."""
    return next(b for b in shown["blocks"] if b["role"] == "user" and b["p0"] >= 16)


def events(port: int, headers: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and data of each event, as they arrive."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/evoke/events", headers=headers)
    kind = ""
    with contextlib.closing(connection), connection.getresponse() as response:
        while line := response.readline():
            if line.startswith(b"event: "):
                kind = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield kind, json.loads(line[6:])
