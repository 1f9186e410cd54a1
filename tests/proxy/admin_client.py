"""Client of the admin API, and a conversation for its requests to act on."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

from conversation import FILLER, ChatClient, TurnResult
from harness import TIMEOUT_S, RunningProxy, ask

JSON = {"Content-Type": "application/json"}
FACT = "The access code of the Meridian vault is 7741."
QUESTION = "What is the access code of the Meridian vault?"
BUDGET = 320


def admin_call(
    running: RunningProxy, method: str, path: str, body: Any = None, status: int = 200
) -> Any:
    """Send an admin request once the proxy is idle; returns the JSON of a reply with `status`."""
    running.wait_until_idle()
    data = None if body is None else json.dumps(body).encode()
    answer = ask(running.port, method, f"/evoke/{path}", data, {} if body is None else JSON)
    assert answer.status == status, answer.body
    return json.loads(answer.body)


def conversation_with_evicted_fact(
    port: int, session: str, turns: int = 6, system: str = ""
) -> ChatClient:
    """Return a conversation whose first message, a fact, has been evicted."""
    client = ChatClient(port, session, {"evoke_budget": BUDGET})
    client.messages[0]["content"] += system
    client.say(FACT)
    for number in range(turns):
        client.say(f"Turn {number}. {FILLER}")
    return client


def ask_for_fact(client: ChatClient) -> TurnResult:
    """Ask for the evicted fact; returns the turn, which must recover blocks."""
    turn = client.say(QUESTION)
    assert turn.accounting["recovered"] > 0
    return turn


def fact_block(session: dict[str, Any]) -> dict[str, Any]:
    """Return the block with the fact: the user's first block after the sinks."""
    return next(b for b in session["blocks"] if b["role"] == "user" and b["p0"] >= 16)


def admin_events(port: int, headers: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kind and data of each event as it arrives."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", "/evoke/events", headers=headers)
    kind = ""
    with contextlib.closing(connection), connection.getresponse() as response:
        while line := response.readline():
            if line.startswith(b"event: "):
                kind = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield kind, json.loads(line[6:])
