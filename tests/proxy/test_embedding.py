"""Embeddings of a real proxy: paraphrased questions recover facts, and the topic's blocks stay."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from admin_client import admin_call
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask, proxy, until

import bench.policies  # noqa: F401 -- registers baselines
from recipes.export_minilm import ensure

BUDGET = 320
TOPIC_BUDGET = 180  # enough for one of the three topics
# A policy that keeps blocks by the topic alone, without recovery or recency.
TOPIC_ONLY = {"policy__name": "evoke_focus"}
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
    settings = {"embedder__directory": str(ensure())} if embedder == "encoder" else {}
    settings |= {"embedder__model": "none"} if embedder == "none" else {}
    with proxy(patched_port, embedder__timeout_ms=20_000, **settings) as running:
        client = ChatClient(running.port, f"meaning {embedder}", {"evoke_budget": BUDGET})
        client.say("The key is hidden under the geranium.")
        for number in range(7):
            client.say(f"Turn {number}. {FILLER}")
        wait_for_vectors(running)
        turn = client.say("How can I get inside when the door is locked?")
        assert turn.accounting["n_resident_peak"] <= BUDGET
        assert turn.accounting["omitted"] > 0
        # Without vectors, whether the block is there is a matter of chance. With an encoder it may
        # have come back in a turn before, since its vectors are there some time after its text.
        assert _is_resident(patched_port, running, "geranium") or not embeds
        assert (running.metric("evoke_embedded_total", kind="question") > 0) is embeds


def _is_resident(port: int, running: RunningProxy, word: str) -> bool:
    """Whether all blocks with a word are resident in the slot."""
    running.wait_until_idle()
    (conversation,) = running.gateway.conversations
    spans = [b.span for b in conversation.session.layout.blocks if word in b.text]
    rows = json.loads(ask(port, "GET", "/slots/0/blocks").body)["resident"]
    assert spans
    return all(any(a <= s.start and s.end <= b for a, b in rows) for s in spans)


def test_a_paraphrased_question_recovers_the_fact_after_a_restart(
    patched_port: int, tmp_path: Path
) -> None:
    """Saved vectors are read again, and are deleted with their session."""
    settings = {"embedder__directory": str(ensure()), "embedder__timeout_ms": 20_000}
    settings |= {"snapshots__directory": str(tmp_path)}
    with proxy(patched_port, **settings) as running:
        client = ChatClient(running.port, "meaning again", {"evoke_budget": BUDGET})
        client.say("The key is hidden under the geranium.")
        for number in range(7):
            client.say(f"Turn {number}. {FILLER}")
            running.wait_for_background()  # a turn saves the vectors that existed when it began
            wait_for_vectors(running)
        running.wait_for_background()
    with proxy(patched_port, **settings) as running:
        client.port = running.port
        client.say("How can I get inside when the door is locked?")
        (conversation,) = running.gateway.conversations
        session = conversation.session
        texts = [b.text for b in session.layout.blocks if b.label in session._recovered]
        assert any("geranium" in text for text in texts)
        running.wait_for_background()
        store = sqlite3.connect(tmp_path / "index.sqlite")
        count = "SELECT count(*) FROM records WHERE id GLOB ?"
        assert store.execute(count, (f"{conversation.id}#*",)).fetchone()[0] > 1
        assert admin_call(running, "DELETE", f"sessions/{conversation.id}")["left"] == []
        assert store.execute(count, ("*",)).fetchone()[0] == 0


def test_built_in_vectors_of_a_new_conversation_exist_for_its_first_question(
    patched_port: int,
) -> None:
    """The conversation is new to the proxy, as after a restart without session records."""
    texts = ["The key is hidden under the geranium.", *(f"Turn {n}. {FILLER}" for n in range(7))]
    history = [
        message
        for text in texts
        for message in (
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Noted."},
        )
    ]
    with proxy(patched_port) as running:
        client = ChatClient(running.port, "unseen", {"evoke_budget": 4 * BUDGET})
        client.messages += history
        client.say("How can I get inside when the door is locked?")
        (conversation,) = running.gateway.conversations
        index = conversation.session.index
        assert len(index) > 8 and index.n_with_vectors >= len(index) - 2
        assert not conversation.vectors.pending


@pytest.fixture(scope="module")
def topic_proxy(patched_port: int) -> Iterator[RunningProxy]:
    """A proxy with the encoder that keeps blocks by the topic alone."""
    settings = {"embedder__directory": str(ensure()), "embedder__timeout_ms": 20_000, **TOPIC_ONLY}
    with proxy(patched_port, **settings) as running:
        yield running


def test_blocks_of_the_current_topic_stay(patched_port: int, topic_proxy: RunningProxy) -> None:
    client = converse_about_three_topics(topic_proxy, "turning")
    for question, topic in ((TRAINING.format("dog"), DOGS), ("Where does the ship go?", SHIPS)):
        assert client.say(question).accounting["n_resident_peak"] <= TOPIC_BUDGET
        assert set(topic) <= resident_messages(patched_port, client)
    assert not set(DOGS) <= resident_messages(patched_port, client)


@pytest.mark.parametrize("boundary", [True, False])
def test_the_topic_of_a_task_lasts_until_the_client_sets_a_boundary(
    patched_port: int, topic_proxy: RunningProxy, boundary: bool
) -> None:
    client = converse_about_three_topics(topic_proxy, f"boundary {boundary}")
    client.say(TRAINING.format("dog"))
    resident = resident_messages(patched_port, client)
    assert len(resident & set(DOGS)) > len(resident & set(CATS))
    # The question is similar to the one before, so the topic alone does not change.
    client.say(TRAINING.format("cat"), evoke_task_boundary=boundary)
    resident = resident_messages(patched_port, client)
    assert (len(resident & set(CATS)) > len(resident & set(DOGS))) is boundary


def test_the_topic_has_no_effect_without_its_signal(patched_port: int) -> None:
    settings = {"embedder__directory": str(ensure()), "embedder__timeout_ms": 20_000}
    with proxy(patched_port, **settings, policy__name="evoke_no_signal") as running:
        client = converse_about_three_topics(running, "unmoved")
        client.say(TRAINING.format("dog"))
        assert not set(DOGS) <= resident_messages(patched_port, client)


def converse_about_three_topics(running: RunningProxy, session: str) -> ChatClient:
    """Return a conversation about three topics in turn, with a budget for one of them."""
    client = ChatClient(running.port, session, {"evoke_budget": TOPIC_BUDGET})
    for texts in zip(DOGS, SHIPS, CATS, strict=True):
        for text in texts:
            client.say(text)
    wait_for_vectors(running)
    return client


def resident_messages(upstream: int, client: ChatClient) -> set[str]:
    """Return the user messages whose rows are all in the slot, by llama-server's own state."""
    body = json.dumps({"dialect": "chat", "body": {"messages": client.messages[:-1]}}).encode()
    spans = request_json(upstream, "/evoke/render", body)["spans"]
    resident = request_json(upstream, "/slots/0/blocks")["resident"]
    return {
        client.messages[span["index"]]["content"]
        for span in spans
        if any(start <= span["p0"] and span["p1"] <= end for start, end in resident)
    }


def request_json(port: int, path: str, body: bytes | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    answer = ask(port, "GET" if body is None else "POST", path, body, headers)
    assert answer.status == 200, answer.body
    parsed: dict[str, Any] = json.loads(answer.body)
    return parsed


def wait_for_vectors(running: RunningProxy) -> None:
    """Wait until every block that is being embedded has its vectors."""
    running.wait_until_idle()
    awaited = [
        keys
        for conversation in running.gateway.conversations
        for keys in conversation.vectors.pending.values()
    ]
    vector = running.gateway.shared.embedding.vector
    until(lambda: all(vector(key) is not None for keys in awaited for key in keys))
