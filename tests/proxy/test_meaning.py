"""A trained encoder behind the real proxy: a question without a word of the fact brings it back."""

from __future__ import annotations

import time

import pytest
from running import RunningProxy, llama_server, proxy, server_binary
from talking import FILLER, Talk

from bench.export_minilm import ensure

BUDGET = 320


@pytest.mark.parametrize("embeds", [True, False])
def test_a_question_in_other_words_brings_the_fact_back(embeds: bool) -> None:
    directory = str(ensure()) if embeds else ""
    options = ("-np", "1", "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as upstream:
        with proxy(upstream, embedder__directory=directory, embedder__timeout_ms=5000) as ours:
            talk = Talk(ours.port, "meaning", {"evoke_budget": BUDGET})
            talk.say("The key is hidden under the geranium.")
            for number in range(7):
                talk.say(f"Turn {number}. {FILLER}")
            wait_for_vectors(ours)
            said = talk.say("How can I get inside when the door is locked?")
            assert said.books["n_resident_peak"] <= BUDGET
            session = next(iter(ours.engine.conversations)).session
            back = [b.text for b in session.layout.blocks if b.label in session._recovered]
            assert any("geranium" in text for text in back) is embeds
            assert (ours.metric("evoke_embedded_total", kind="question") > 0) is embeds


def wait_for_vectors(ours: RunningProxy) -> None:
    """Until every block that is being embedded has its vectors, a minute at most."""
    ours.quiet()
    known, deadline = next(iter(ours.engine.conversations)), time.monotonic() + 60
    keys = [key for keys in known.awaited.values() for key in keys]
    while any(ours.engine.embedding.vector(key) is None for key in keys):
        assert time.monotonic() < deadline, "blocks wait for their vectors"
        time.sleep(0.05)
