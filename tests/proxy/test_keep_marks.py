"""Messages marked with `evoke_keep` stay longer, on a real patched llama-server."""

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


def _span(port: int, talk: ChatClient, index: int) -> tuple[int, int]:
    """Where a message lies in the prompt, as the server says."""
    body = {"dialect": "chat", "body": {"messages": talk.messages}}
    headers = {"Content-Type": "application/json"}
    answer = json.loads(ask(port, "POST", "/evoke/render", json.dumps(body).encode(), headers).body)
    found = next(span for span in answer["spans"] if span["index"] == index)
    return found["p0"], found["p1"]


@pytest.mark.parametrize(
    ("mark", "fields", "stays"),
    [
        ({}, {}, False),
        ({"evoke_keep": "pin"}, {}, True),
        ({"evoke_keep": "prefer"}, {}, True),
        ({}, {"evoke_pinned": True}, True),
        ({}, {"evoke_priority": 2.0}, True),
        ({}, {"evoke_priority": 0.5}, False),
    ],
)
def test_marked_blocks_stay_longer_than_their_age_allows(
    patched_port: int,
    patched_proxy: RunningProxy,
    mark: dict[str, Any],
    fields: dict[str, Any],
    stays: bool,
) -> None:
    session = "keep-" + "-".join(f"{k}{v}" for k, v in {**mark, **fields}.items())
    talk = ChatClient(patched_proxy.port, session, {"evoke_budget": BUDGET})
    talk.messages.append({"role": "user", "content": NOTE, **mark})
    talk.post(**fields)
    talk.messages.append({"role": "assistant", "content": "Noted."})
    for number in range(6):
        talk.say(f"Turn {number}. {FILLER}")
    said = talk.say(NEUTRAL)
    assert said.accounting["n_resident_peak"] <= BUDGET
    start, end = _span(patched_port, talk, 1)
    there = any(a <= start and end <= b for a, b in resident_now(patched_port) or [])
    assert there == stays
