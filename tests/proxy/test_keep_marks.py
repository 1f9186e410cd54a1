"""Messages marked by `evoke_keep`, `evoke_pinned` or `evoke_priority` stay resident longer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask

from evoke_proxy.demo.client import resident_now

BUDGET = 320
NOTE = "The Meridian vault was painted in teal by the old gardener."
NEUTRAL = "Carry on as though nobody interrupted anything."


def _span(port: int, client: ChatClient, index: int) -> tuple[int, int]:
    """Return the span of a message in the prompt, as rendered by llama-server."""
    body = {"dialect": "chat", "body": {"messages": client.messages}}
    headers = {"Content-Type": "application/json"}
    answer = json.loads(ask(port, "POST", "/evoke/render", json.dumps(body).encode(), headers).body)
    span = next(span for span in answer["spans"] if span["index"] == index)
    return span["p0"], span["p1"]


@pytest.mark.parametrize(
    ("message_fields", "fields", "stays"),
    [
        ({}, {}, False),
        ({"evoke_keep": "pin"}, {}, True),
        ({"evoke_keep": "prefer"}, {}, True),
        ({}, {"evoke_pinned": True}, True),
        ({}, {"evoke_priority": 2.0}, True),
        ({}, {"evoke_priority": 0.5}, False),
    ],
)
def test_only_a_message_to_keep_stays_resident_when_newer_ones_are_evicted(
    patched_port: int,
    patched_proxy: RunningProxy,
    message_fields: dict[str, Any],
    fields: dict[str, Any],
    stays: bool,
) -> None:
    session = "keep-" + "-".join(f"{k}{v}" for k, v in {**message_fields, **fields}.items())
    # Without recall: the ranking would bring the note back as a statement of the user.
    client = ChatClient(
        patched_proxy.port, session, {"evoke_budget": BUDGET, "evoke_recall": "none"}
    )
    client.messages.append({"role": "user", "content": NOTE, **message_fields})
    client.post(**fields)
    client.messages.append({"role": "assistant", "content": "Noted."})
    for number in range(6):
        client.say(f"Turn {number}. {FILLER}")
    turn = client.say(NEUTRAL)
    assert turn.accounting["n_resident_peak"] <= BUDGET
    start, end = _span(patched_port, client, 1)
    is_resident = any(a <= start and end <= b for a, b in resident_now(patched_port) or [])
    assert is_resident == stays
