"""A client that changes the end of its first message continues its conversation."""

from __future__ import annotations

import json

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask


def n_sessions(running: RunningProxy) -> int:
    return len(json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"])


def started(running: RunningProxy, task: str, name: str | None) -> ChatClient:
    """A conversation of three turns whose first message ends with a reminder."""
    client = ChatClient(running.port, name)
    first = f"{task}. {FILLER * 3} Reminder: it is Monday."
    client.messages.append({"role": "user", "content": first})
    for i in range(2):
        client.messages.append({"role": "assistant", "content": f"Step {i} of {task}: {FILLER}"})
        client.messages.append({"role": "user", "content": f"Now step {i + 1}."})
    client.say("What is next?")
    return client


def edit_reminder(client: ChatClient) -> None:
    text = client.messages[1]["content"]
    client.messages[1]["content"] = text.replace("it is Monday", "today it is Tuesday already")


def test_an_edited_first_message_continues_the_session(patched_proxy: RunningProxy) -> None:
    client = started(patched_proxy, "look for the ferry", "ferry")
    before = n_sessions(patched_proxy)
    drifts = patched_proxy.metric("evoke_prefix_divergence_total", cause="edited_history")
    edit_reminder(client)
    counts = client.say("And then?").accounting
    assert n_sessions(patched_proxy) == before
    after = patched_proxy.metric("evoke_prefix_divergence_total", cause="edited_history")
    assert after == drifts + 1
    assert counts["marker"] == "ok" and counts["omitted"] == 0
    # All before the edit has rows.
    assert counts["resident_before"] + counts["recovered"] > 150
    assert client.say("And after that?").accounting["decoded"] < 60


@pytest.mark.parametrize("name", [None, "bridge"])
def test_another_history_or_no_name_is_another_session(
    patched_proxy: RunningProxy, name: str | None
) -> None:
    task = f"look for the bridge {name}"
    started(patched_proxy, task, name)
    before = n_sessions(patched_proxy)
    other = started(patched_proxy, task, name)
    assert n_sessions(patched_proxy) == before  # the same messages
    edit_reminder(other)
    if name:
        other.messages[2]["content"] = f"Another answer: {FILLER}"
    other.say("Continue.")
    assert n_sessions(patched_proxy) == before + 1
