"""Block calls while a slot works: answered at once, never deferred, harmless to the stream."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama import Llama, story

# What is left of a slot: whoever asks meanwhile has a second or more for it on any machine.
LENGTH = 1400


@pytest.fixture
def generating(two: Llama) -> Llama:
    """A server whose slot 0 is in the middle of a long answer."""
    for slot in (0, 1):
        two.erase(slot)
    prompt = two.tokens(story(300))
    answers: list[dict] = []
    worker = threading.Thread(
        target=lambda: answers.append(two.complete(prompt, 0, n_predict=LENGTH))
    )
    worker.start()
    while not (two.slot(0)["is_processing"] and two.slot(0)["n_tokens"] > len(prompt) + 10):
        assert worker.is_alive()
    yield two
    worker.join(60)
    assert answers and answers[0]["timings"]["predicted_n"] == LENGTH
    assert answers[0]["timings"]["evoke"]["marker"] == "ok"


def test_calls_run_between_two_decodes(generating: Llama) -> None:
    saved = generating.act("block-save", name="live", p0=64, p1=128, evict=True)
    assert saved["n_evicted"] == 64
    loaded = generating.act("block-load", names=["live"])
    assert loaded["n_loaded"] == 64
    assert generating.slot(0)["is_processing"]


def test_many_calls_at_once_are_all_answered(generating: Llama) -> None:
    """Upstream's own slot actions, deferred in numbers, hang for ever; these do not."""

    def save(i: int) -> int:
        path = "/slots/0?action=block-save"
        body = {"epoch": generating.epoch(0), "name": f"n{i}", "p0": i, "p1": i + 1}
        return generating.ask("POST", path, body)[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(save, range(24))) == [200] * 24


def test_adopting_into_a_busy_slot_is_503(generating: Llama) -> None:
    generating.act("block-save", name="head", p0=0, p1=4)
    tokens = generating.tokens(story(300))[:4]
    error = generating.refuse("block-adopt", tokens=tokens, names=["head"])
    assert (error["code"], error["type"]) == (503, "unavailable_error")


def test_evicting_up_to_the_write_cursor_is_refused(generating: Llama) -> None:
    top = generating.slot(0)["n_tokens"]
    error = generating.refuse("block-evict", p0=top - 40, p1=top + 1000)
    assert error["code"] == 400
    assert generating.slot(0)["n_tokens"] >= top


def test_the_other_slot_is_served_meanwhile(generating: Llama) -> None:
    answer = generating.complete(generating.tokens(story(60)), 1, n_predict=4)
    assert answer["timings"]["predicted_n"] == 4
