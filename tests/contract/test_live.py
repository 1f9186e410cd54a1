"""Block calls while a slot decodes: they are answered and do not disturb the answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama import TIME_FACTOR, Llama, running, sample_text

# Tokens to generate: enough for a second or more of decoding on any machine.
LENGTH = round(1400 / TIME_FACTOR)


@pytest.fixture
def generating(two: Llama) -> Llama:
    """A server whose slot 0 is in the middle of a long answer."""
    for slot in (0, 1):
        two.erase(slot)
    prompt = two.tokens(sample_text(300))
    answers: list[dict] = []
    worker = threading.Thread(
        target=lambda: answers.append(two.complete(prompt, 0, n_predict=LENGTH))
    )
    worker.start()
    while not (two.slot(0)["is_processing"] and two.slot(0)["n_tokens"] > len(prompt) + 10):
        assert worker.is_alive()
    yield two
    worker.join(60 * TIME_FACTOR)
    assert answers and answers[0]["timings"]["predicted_n"] == LENGTH
    assert answers[0]["timings"]["evoke"]["marker"] == "ok"


def test_block_calls_run_while_the_slot_decodes(generating: Llama) -> None:
    saved = generating.act("block-save", name="live", p0=64, p1=128, evict=True)
    assert saved["n_evicted"] == 64
    loaded = generating.act("block-load", names=["live"])
    assert loaded["n_loaded"] == 64
    assert generating.slot(0)["is_processing"]


def test_many_calls_at_once_are_all_answered(generating: Llama) -> None:
    """Many deferred stock slot actions hang forever; block calls do not."""

    def save(i: int) -> int:
        path = "/slots/0?action=block-save"
        body = {"epoch": generating.epoch(0), "name": f"n{i}", "p0": i, "p1": i + 1}
        return generating.ask("POST", path, body)[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(save, range(24))) == [200] * 24


def test_adopting_into_a_busy_slot_is_503(generating: Llama) -> None:
    generating.act("block-save", name="head", p0=0, p1=4)
    tokens = generating.tokens(sample_text(300))[:4]
    error = generating.refuse("block-adopt", tokens=tokens, names=["head"])
    assert (error["code"], error["type"]) == (503, "unavailable_error")


def test_evicting_the_rows_being_decoded_is_refused(generating: Llama) -> None:
    top = generating.slot(0)["n_tokens"]
    error = generating.refuse("block-evict", p0=top - 40, p1=top + 1000)
    assert error["code"] == 400
    assert generating.slot(0)["n_tokens"] >= top


def test_the_other_slot_answers_while_one_decodes(generating: Llama) -> None:
    answer = generating.complete(generating.tokens(sample_text(60)), 1, n_predict=4)
    assert answer["timings"]["predicted_n"] == 4


def test_a_reserved_idle_slot_is_saved_before_another_takes_its_cells() -> None:
    """Both slots share 1024 cells, and slot 1 needs cells of the reserved slot 0."""
    options = ("-c", "1024", "-np", "2", "-kvu", "--evoke-ram", "8", "-fa", "on")
    with running(True, *options) as server:
        cached = server.tokens(sample_text(2000))
        server.complete(cached[:600], 0, n_predict=1)
        for p0, p1 in ((64, 128), (300, 400)):
            server.act("block-save", 0, name=f"own {p0}", p0=p0, p1=p1)
        server.act("block-evict", 0, names=["own 64"])
        before = server.slot(0)
        assert before["reserved"] or server.act("stream", 0, budget=600)
        reference = server.complete(
            cached[:600], 0, n_predict=1, n_probs=5, post_sampling_probs=True
        )
        other = server.complete(cached[700:1500], 1, marker=False, n_predict=1)
        assert other["timings"]["prompt_n"] == 800
        after = server.slot(0)
        assert after["n_resident"] == 0 and after["epoch"] != before["epoch"]
        saved = {(b["p0"], b["p1"]): b["name"] for b in after["blocks"]}
        names = [name for name in saved.values() if name.startswith("auto/")]
        covered = sorted(span for span, name in saved.items() if name.startswith("auto/"))
        assert sum(p1 - p0 for p0, p1 in covered) == 600 - 64
        server.erase(1)
        server.act("block-adopt", 0, tokens=cached[:600], names=names)
        assert server.slot(0)["resident"] == before["resident"]
        repeated = server.complete(
            cached[:600], 0, n_predict=1, n_probs=5, post_sampling_probs=True
        )
        assert repeated["timings"]["evoke"]["omitted"] == 64
        assert repeated["tokens"] == reference["tokens"]


def test_an_idle_slot_that_is_not_reserved_is_emptied_first() -> None:
    options = ("-c", "1024", "-np", "3", "-kvu", "--evoke-ram", "8", "-fa", "on")
    with running(True, *options) as server:
        cached = server.tokens(sample_text(2000))
        server.act("stream", 0, budget=400)
        server.complete(cached[:300], 0, n_predict=1)
        server.complete(cached[400:700], 2, marker=False, n_predict=1)
        before = server.slot(0)
        server.complete(cached[700:1300], 1, marker=False, n_predict=1)
        assert server.slot(0)["resident"] == before["resident"]
        assert server.slot(0)["epoch"] == before["epoch"]
        assert server.slot(2)["n_resident"] == 0
