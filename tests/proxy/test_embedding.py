"""A trained encoder behind the real proxy: a paraphrased question recovers the fact.

What a conversation is about decides what stays.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from admin_client import operate
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask, proxy, until

import bench.policies  # noqa: F401 -- registers baselines
from bench.export_minilm import ensure

BUDGET = 320
NARROW = 180  # for one of three topics
# What is kept is a matter of the topic alone: nothing is looked for, and nothing is old.
TOPIC_ALONE = {"policy__name": "evoke_focus"}
DOGS = (
    "My dog loves long walks and barks at the postman every morning.",
    "A puppy needs a lead, a collar and much patience when it is trained.",
    "The dog sleeps in a kennel and fetches sticks in the park.",
)
CATS = (
    "My cat purrs on the sofa and catches mice in the barn at night.",
    "A kitten needs a litter box and something to sharpen its claws on.",
    "The cat climbs trees, drinks milk and hates to be washed.",
)
SHIPS = (
    "The ship left the harbour with a cargo of steel and coal.",
    "Sailors hoisted the sails when the wind came from the west.",
    "The captain steers the vessel across the ocean by the stars.",
)
TRAINING = "How do I train my {}?"


@pytest.mark.parametrize("embedder", ["encoder", "built-in", "none"])
def test_a_paraphrased_question_recovers_the_fact(patched_port: int, embedder: str) -> None:
    embeds = embedder != "none"
    given = {"embedder__directory": str(ensure())} if embedder == "encoder" else {}
    given |= {"embedder__model": "none"} if embedder == "none" else {}
    with proxy(patched_port, embedder__timeout_ms=20_000, **given) as ours:
        talk = ChatClient(ours.port, f"meaning {embedder}", {"evoke_budget": BUDGET})
        talk.say("The key is hidden under the geranium.")
        for number in range(7):
            talk.say(f"Turn {number}. {FILLER}")
        wait_for_vectors(ours)
        said = talk.say("How can I get inside when the door is locked?")
        assert said.accounting["n_resident_peak"] <= BUDGET
        session = next(iter(ours.engine.conversations)).session
        back = [b.text for b in session.layout.blocks if b.label in session._recovered]
        # Without vectors the room that the question leaves is filled with other blocks: by chance.
        assert any("geranium" in text for text in back) or not embeds
        assert (ours.metric("evoke_embedded_total", kind="question") > 0) is embeds


def test_a_paraphrased_question_recovers_the_fact_after_a_restart(
    patched_port: int, tmp_path: Path
) -> None:
    """Nothing but the question is embedded again; what is written down goes with its session."""
    given = {"embedder__directory": str(ensure()), "embedder__timeout_ms": 20_000}
    given |= {"snapshots__directory": str(tmp_path)}
    with proxy(patched_port, **given) as ours:
        talk = ChatClient(ours.port, "meaning again", {"evoke_budget": BUDGET})
        talk.say("The key is hidden under the geranium.")
        for number in range(7):
            talk.say(f"Turn {number}. {FILLER}")
            ours.settled()  # each writes down what there was when it began
            wait_for_vectors(ours)
        ours.settled()
    with proxy(patched_port, **given) as ours:
        talk.port = ours.port
        talk.say("How can I get inside when the door is locked?")
        (known,) = ours.engine.conversations
        session = known.session
        back = [b.text for b in session.layout.blocks if b.label in session._recovered]
        assert any("geranium" in text for text in back)
        ours.settled()
        store = sqlite3.connect(tmp_path / "index.sqlite")
        parts = "SELECT count(*) FROM records WHERE id GLOB ?"
        assert store.execute(parts, (f"{known.id}#*",)).fetchone()[0] > 1
        assert operate(ours, "DELETE", f"sessions/{known.id}")["left"] == []
        assert store.execute(parts, ("*",)).fetchone()[0] == 0


def test_built_in_vectors_are_there_for_the_first_question(patched_port: int) -> None:
    """Of a conversation that the proxy has not seen, and after a restart without records."""
    told = ["The key is hidden under the geranium.", *(f"Turn {n}. {FILLER}" for n in range(7))]
    history = [
        message
        for text in told
        for message in (
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Noted."},
        )
    ]
    with proxy(patched_port) as ours:
        talk = ChatClient(ours.port, "unseen", {"evoke_budget": 4 * BUDGET})
        talk.messages += history
        talk.say("How can I get inside when the door is locked?")
        (known,) = ours.engine.conversations
        index = known.session.index
        assert len(index) > 8 and index.n_with_vectors >= len(index) - 2
        assert not known.vectors.pending


@pytest.fixture(scope="module")
def topical(patched_port: int) -> Iterator[RunningProxy]:
    """A proxy with the encoder that goes by the topic alone."""
    given = {"embedder__directory": str(ensure()), "embedder__timeout_ms": 20_000, **TOPIC_ALONE}
    with proxy(patched_port, **given) as running:
        yield running


def test_blocks_of_the_current_topic_stay(patched_port: int, topical: RunningProxy) -> None:
    talk = told(topical, "turning")
    for asked, wanted in ((TRAINING.format("dog"), DOGS), ("Where does the ship go?", SHIPS)):
        assert talk.say(asked).accounting["n_resident_peak"] <= NARROW
        assert set(wanted) <= resident_messages(patched_port, talk)
    assert not set(DOGS) <= resident_messages(patched_port, talk)


@pytest.mark.parametrize("boundary", [True, False])
def test_the_task_lasts_until_the_client_sets_a_boundary(
    patched_port: int, topical: RunningProxy, boundary: bool
) -> None:
    talk = told(topical, f"boundary {boundary}")
    talk.say(TRAINING.format("dog"))
    held = resident_messages(patched_port, talk)
    assert len(held & set(DOGS)) > len(held & set(CATS))
    talk.say(TRAINING.format("cat"), evoke_task_boundary=boundary)  # not so much another topic
    held = resident_messages(patched_port, talk)
    assert (len(held & set(CATS)) > len(held & set(DOGS))) is boundary


def test_the_topic_has_no_effect_without_its_signal(patched_port: int) -> None:
    given = {"embedder__directory": str(ensure()), "embedder__timeout_ms": 20_000, **TOPIC_ALONE}
    with proxy(patched_port, **{**given, "policy__name": "evoke_no_signal"}) as running:
        talk = told(running, "unmoved")
        talk.say(TRAINING.format("dog"))
        assert not set(DOGS) <= resident_messages(patched_port, talk)


def told(running: RunningProxy, session: str) -> ChatClient:
    """A conversation about three things in turns, on a budget for one of them."""
    talk = ChatClient(running.port, session, {"evoke_budget": NARROW})
    for said in zip(DOGS, SHIPS, CATS, strict=True):
        for text in said:
            talk.say(text)
    wait_for_vectors(running)
    return talk


def resident_messages(upstream: int, talk: ChatClient) -> set[str]:
    """Which of the user's messages the slot holds whole, by the server's own account."""
    body = json.dumps({"dialect": "chat", "body": {"messages": talk.messages[:-1]}}).encode()
    spans = posted(upstream, "/evoke/render", body)["spans"]
    resident = posted(upstream, "/slots/0/blocks")["resident"]
    return {
        talk.messages[span["index"]]["content"]
        for span in spans
        if any(start <= span["p0"] and span["p1"] <= end for start, end in resident)
    }


def posted(port: int, path: str, body: bytes | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    answer = ask(port, "GET" if body is None else "POST", path, body, headers)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def wait_for_vectors(ours: RunningProxy) -> None:
    """Until every block that is being embedded has its vectors."""
    ours.quiet()
    awaited = [
        keys for known in ours.engine.conversations for keys in known.vectors.pending.values()
    ]
    vector = ours.engine.shared.embedding.vector
    until(lambda: all(vector(key) is not None for keys in awaited for key in keys))
