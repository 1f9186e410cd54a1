"""Holes, budgets and copies under speculative decoding: the tokens and bits of no speculation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llama import MODEL, ROUNDING, Json, Llama, running, sample_text

from bench.random_models import SHAPES, ensure

CONTEXT = ("-c", "4096", "--evoke-ram", "64")
DRAFT_MODEL = ("-md", str(MODEL), "--spec-type", "draft-simple")
NGRAMS = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3")
NGRAMS += ("--spec-ngram-simple-size-m", "8")
STEPS = 80


@pytest.fixture(scope="module")
def drafted() -> Iterator[Llama]:
    """A server whose draft model is the model itself."""
    with running(True, *CONTEXT, "-np", "1", "-fa", "on", *DRAFT_MODEL) as server:
        yield server


@pytest.fixture(scope="module")
def copying() -> Iterator[Llama]:
    """A server that drafts what followed the last tokens before."""
    with running(True, *CONTEXT, "-np", "1", "-fa", "on", *NGRAMS) as server:
        yield server


@pytest.fixture(params=["drafted", "copying"])
def server(request: pytest.FixtureRequest) -> Llama:
    chosen: Llama = request.getfixturevalue(request.param)
    chosen.erase()
    chosen.post("/slots/0?action=block-drop", {"all": True})
    return chosen


def answers(server: Llama, evict: bool, load: bool, **more: object) -> list[Json]:
    """Two answers of one conversation, with rows evicted and loaded between them."""
    server.erase()
    history = server.tokens(sample_text(600))
    first = server.complete(history, n_predict=40)
    if evict:
        server.act("block-save", name="b", p0=100, p1=400, evict=True)
    if load:
        assert server.act("block-load", names=["b"])["same_cells"]
    follow_up = history + first["tokens"] + server.tokens(sample_text(40, seed=5))
    return [first, server.complete(follow_up, **({"n_predict": STEPS} | more))]


def margins(answer: Json) -> list[float]:
    """By how much each token was likelier than the second, in log probability."""
    tops = [step["top_logprobs"] for step in answer["completion_probabilities"]]
    return [first["logprob"] - second["logprob"] for first, second in tops]


@pytest.mark.parametrize("evict", [True, False])
def test_speculation_changes_no_token_except_ties(server: Llama, one: Llama, evict: bool) -> None:
    """A batch of another shape rounds differently, which decides between nearly equal tokens."""
    expected = answers(one, evict, load=False, n_probs=2)[1]
    found = answers(server, evict, load=False)[1]
    pairs = enumerate(zip(expected["tokens"], found["tokens"], strict=True))
    first = next((at for at, (a, b) in pairs if a != b), STEPS)
    assert first > STEPS // 4
    assert first == STEPS or margins(expected)[first] < ROUNDING


def test_an_evicted_and_loaded_block_changes_neither_tokens_nor_drafts(server: Llama) -> None:
    kept = answers(server, evict=False, load=False)
    loaded = answers(server, evict=True, load=True)
    for one, other in zip(kept, loaded, strict=True):
        assert one["tokens"] == other["tokens"]
        for key in ("draft_n", "draft_n_accepted"):
            assert one["timings"].get(key) == other["timings"].get(key)
    assert kept[1]["timings"]["draft_n_accepted"] > 0


def test_drafts_are_accepted_while_text_is_missing(drafted: Llama) -> None:
    timings = answers(drafted, evict=True, load=False)[1]["timings"]
    assert timings["evoke"]["omitted"] == 300
    assert timings["draft_n_accepted"] > timings["draft_n"] / 3


def test_the_budget_holds_with_drafts(server: Llama) -> None:
    budget = 300
    server.act("stream", budget=budget, sink=8, recent=40, block=32)
    answer = server.complete(server.tokens(sample_text(400)), n_predict=120)
    evoke = answer["timings"]["evoke"]
    assert answer["timings"]["draft_n"] > 0 and evoke["auto_evicted"]
    assert evoke["n_resident_peak"] <= budget and not evoke["budget_breaches"]


def test_rows_of_refused_drafts_are_in_no_copy(server: Llama) -> None:
    history = 2 * server.tokens(sample_text(100))
    answer = server.complete(history, n_predict=STEPS)
    assert answer["timings"]["draft_n"] > answer["timings"]["draft_n_accepted"]
    slot = server.slot()
    assert slot["resident"] == [[0, slot["n_tokens"]]] and slot["n_reusable"] == slot["n_tokens"]
    start = len(history)
    sums = server.act("block-rows", p0=start, p1=start + 60)["sums"]
    assert server.act("block-save", name="reply", p0=start, p1=start + 60, evict=True)["whole"]
    server.act("block-load", names=["reply"])
    assert server.act("block-rows", p0=start, p1=start + 60)["sums"] == sums


@pytest.mark.parametrize("cells", [("-np", "1"), ("-np", "2", "-kvu")])
@pytest.mark.parametrize("kind", [DRAFT_MODEL, NGRAMS])
def test_more_context_than_cells(kind: tuple[str, ...], cells: tuple[str, ...]) -> None:
    options = ("-c", "512", "--ctx-logical", "4096", "--evoke-ram", "64", "-fa", "on")
    with running(True, *options, *cells, *kind) as server:
        for slot in range(int(cells[1])):
            prompt = server.tokens(sample_text(500, seed=slot))
            answer = server.complete(prompt, slot, n_predict=200)
            timings = answer["timings"]
            assert len(answer["tokens"]) == 200 and timings["draft_n_accepted"] > 0
            assert timings["evoke"]["n_resident_peak"] <= 512
            assert not timings["evoke"]["budget_breaches"]


def test_a_slot_with_another_text_has_no_old_rows_of_the_draft(
    drafted: Llama, one: Llama, tmp_path: Path
) -> None:
    """After an adopt and a restore the draft context begins anew."""
    drafted.erase()
    text, other = drafted.tokens(sample_text(200)), drafted.tokens(sample_text(400, seed=3))
    drafted.complete(text, n_predict=1)
    end = drafted.slot()["n_tokens"]
    drafted.act("block-save", name="all", p0=0, p1=end)
    drafted.complete(other, n_predict=20)
    drafted.act("block-adopt", tokens=text[:end], names=["all"])
    timings = drafted.complete([*text, *other[:30]], n_predict=40)["timings"]
    assert timings["evoke"]["resident_before"] + timings["evoke"]["recovered"] == end
    with running(
        True, *CONTEXT, "-np", "1", *DRAFT_MODEL, "--slot-save-path", str(tmp_path)
    ) as server:
        server.complete(text, n_predict=1, marker=False)
        server.post("/slots/0?action=save", {"filename": "slot"})
        server.complete(other, n_predict=20, marker=False)
        server.post("/slots/0?action=restore", {"filename": "slot"})
        answer = server.complete([*text, *other[:30]], n_predict=40, marker=False)
        assert answer["timings"]["cache_n"] >= end - 1 and len(answer["tokens"]) == 40


def test_the_heads_of_a_hybrid_draft_beside_holes() -> None:
    """Every draft of random heads is refused, so that each step returns to a checkpoint."""
    found = {}
    options = (*CONTEXT, "-np", "1", "-fa", "on")
    for kind in ((), ("--spec-type", "draft-mtp")):
        with running(True, *options, *kind, model=ensure(SHAPES["tiny-mtp"])) as server:
            assert server.get("/props")["evoke"]["memory"] == "hybrid"
            for load in (True, False):
                found[kind, load] = answers(server, evict=True, load=load, n_predict=40)[1]
            kept = answers(server, evict=False, load=False, n_predict=40)[1]
            assert found[kind, True]["tokens"] == kept["tokens"]
            assert found[kind, False]["timings"]["evoke"]["omitted"] == 300
            assert ("draft_n" in kept["timings"]) == bool(kind)
