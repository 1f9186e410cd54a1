"""Memory kinds other than the bundled model's: each row of patches/SUPPORT.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from invalid_bodies import send_invalid_calls
from llama import (
    ROUNDING,
    Json,
    Llama,
    binary,
    distributions,
    largest_difference,
    running,
    sample_text,
)
from operations import run_operations

from bench.random_models import SHAPES, ensure
from bench.support import CASES, TABLE, Case, document, probe, row

WINDOWED, HYBRIDS = "tiny-gemma", ("tiny-jamba", "tiny-lfm2", "tiny-qwen35")
# Attention reads the rows that an index chooses; the keys of the index are in a cache of their own.
INDEXED, INDEXED_WINDOWED = ("tiny-dsa", "tiny-dsa-shared", "tiny-msa"), "tiny-dsa-window"
VOCABULARY = 4096  # more than any model has, so that all log probabilities are listed
STREAM = {"budget": 192, "sink": 4, "recent": 32, "block": 32}


@contextmanager
def serving(shape: str, *options: str) -> Iterator[Llama]:
    usual = ("-c", "4096", "--evoke-ram", "16", "-np", "1")
    with running(True, *usual, *options, model=ensure(SHAPES[shape])) as server:
        yield server


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.shape} {case.settings}")
def test_the_table_of_supported_models_matches_a_run(case: Case) -> None:
    assert row(case, *probe(case, binary(patched=True))) in TABLE.read_text("utf-8")


def test_the_table_has_no_other_rows() -> None:
    written = TABLE.read_text("utf-8")
    assert written.startswith(document([]))
    assert written.count("\n") == document([]).count("\n") + len(CASES)


@pytest.mark.parametrize(
    "shape", ["tiny-dense", WINDOWED, "tiny-qwen2vl", *HYBRIDS, *INDEXED, INDEXED_WINDOWED]
)
def test_evicting_and_loading_restores_the_whole_slot_state(shape: str, tmp_path: Path) -> None:
    """The state file has rows, positions (also in an image), windows, recurrent states, indexes."""

    def state(server: Llama, name: str) -> bytes:
        server.post("/slots/0?action=save", {"filename": name})
        return (tmp_path / name).read_bytes()

    with serving(shape, "--slot-save-path", str(tmp_path)) as server:
        server.complete(server.tokens(sample_text(300)))
        before = state(server, "before")
        server.act("block-save", name="b", p0=40, p1=160, evict=True)
        assert state(server, "holed") != before
        assert server.act("block-load", names=["b"])["same_cells"]
        assert state(server, "after") == before


@pytest.mark.parametrize("shape", HYBRIDS)
def test_a_slot_with_a_hole_is_restored_from_its_file(shape: str) -> None:
    with serving(shape) as server:
        prompt = server.tokens(sample_text(300))
        first = server.complete(prompt)
        server.act("block-save", name="b", p0=40, p1=160, evict=True)
        server.post("/slots/0?action=save", {"filename": "holed"})
        more = prompt + first["tokens"] + server.tokens(sample_text(20, seed=3))
        reference = server.complete(more)
        server.erase()
        server.post("/slots/0?action=restore", {"filename": "holed"})
        answer = server.complete(more)
        assert answer["tokens"] == reference["tokens"]
        assert answer["timings"]["evoke"]["omitted"] == 120
        assert answer["timings"]["evoke"]["decoded"] == reference["timings"]["evoke"]["decoded"]


@pytest.mark.parametrize("shape", [WINDOWED, "tiny-qwen2vl", *HYBRIDS, *INDEXED, INDEXED_WINDOWED])
def test_a_budget_limits_rows_in_prefill_and_in_generation(shape: str) -> None:
    with serving(shape) as server:
        server.act("stream", **STREAM)
        prompt = server.tokens(sample_text(500))
        evoke = server.complete(prompt, n_predict=100)["timings"]["evoke"]
        assert evoke["n_resident_peak"] <= STREAM["budget"] and evoke["budget_breaches"] == 0
        assert evoke["decoded"] == len(prompt)
        state = server.slot()
        assert all(
            any(a <= p0 and p1 <= b for a, b in state["resident"]) for p0, p1 in state["held"]
        )


@pytest.mark.parametrize("shape", [WINDOWED, *HYBRIDS, INDEXED_WINDOWED])
def test_another_client_gets_a_correct_answer_after_a_hole(shape: str) -> None:
    """An unmarked request is answered as if nothing had been evicted."""
    with serving(shape) as server:
        prompt = server.tokens(sample_text(300))
        first = server.complete(prompt)
        more = prompt + first["tokens"] + server.tokens(sample_text(20, seed=3))
        server.erase()
        whole = distributions(server.complete(more, marker=False, n_probs=VOCABULARY))
        server.erase()
        assert server.complete(prompt)["tokens"] == first["tokens"]
        server.act("block-evict", p0=40, p1=160)
        holed = distributions(server.complete(more, n_probs=VOCABULARY))
        answer = server.complete(more, marker=False, n_probs=VOCABULARY)
        assert answer["timings"]["cache_n"] <= 40
        assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == len(more)
        # up to rounding: the cached prefix differs, so the batches have another shape
        rounding = largest_difference(whole, distributions(answer))
        assert rounding < min(ROUNDING, largest_difference(whole, holed) / 3)


@pytest.mark.parametrize("shape", INDEXED)
def test_after_a_hole_another_client_gets_the_answer_of_a_shorter_cached_prefix(shape: str) -> None:
    """To the bit: what rounding does to the choice of rows is the same with and without a hole."""

    def answer(server: Llama, tokens: list[int], evict: bool) -> Json:
        server.erase()
        server.complete(tokens, n_predict=1)
        if evict:
            server.act("block-evict", p0=40, p1=160)
        return server.complete(prompt, marker=False, n_probs=VOCABULARY)

    with serving(shape) as server:
        prompt = server.tokens(sample_text(300))
        shorter = answer(server, prompt[:40] + prompt[:200], evict=False)
        holed = answer(server, prompt[:200], evict=True)
        assert shorter["timings"]["cache_n"] == holed["timings"]["cache_n"] == 40
        assert distributions(holed) == distributions(shorter)


@pytest.mark.parametrize("shape", ["tiny-dense", WINDOWED, *HYBRIDS])
def test_a_marked_request_reuses_no_more_than_its_limit(shape: str) -> None:
    def reuse(server: Llama, n_tokens: int) -> None:
        server.act("block-plan", ops=[{"op": "reuse", "n_tokens": n_tokens}])

    def common(server: Llama, prompt: list[int]) -> int:
        body = {"dialect": "completions", "body": {"prompt": prompt}}
        return int(server.post("/evoke/render", body)["slots"][0]["n_common"])

    with serving(shape) as server:
        prompt = server.tokens(sample_text(300))
        first = server.complete(prompt, n_probs=VOCABULARY)
        server.act("block-evict", p0=40, p1=160)
        reuse(server, 40)
        assert common(server, prompt) == 40
        answer = server.complete(prompt, n_probs=VOCABULARY)
        # in batches of another shape
        assert largest_difference(distributions(first), distributions(answer)) < ROUNDING
        accounting = answer["timings"]["evoke"]
        assert accounting["omitted"] == 0 and accounting["resident_before"] <= 40
        assert common(server, prompt) == len(prompt), "the limit holds for one request"
        reuse(server, 0)
        assert server.complete(prompt)["timings"]["evoke"]["decoded"] == len(prompt)
        ops = [{"op": "reuse", "n_tokens": len(prompt) + len(first["tokens"])}]
        assert server.refuse("block-plan", ops=ops)["code"] == 400


@pytest.mark.parametrize("shape", [WINDOWED, *HYBRIDS])
def test_a_repeated_prompt_whose_row_before_the_last_was_evicted(shape: str) -> None:
    """Decoding starts before the hole and reuses no row after its start."""
    accounting = accounting_after_hole(shape, lambda end: (end - 3, end - 1))
    assert accounting["decoded"] >= 1
    assert accounting["decoded"] + accounting["resident_before"] == accounting["n_prompt"]


def test_a_windowed_prompt_with_only_its_ends_resident_is_decoded_whole() -> None:
    """The windows have only the last rows, so that decoding cannot continue after the first."""
    evoke = accounting_after_hole(WINDOWED, lambda end: (40, end - 1))
    assert evoke["decoded"] == evoke["n_prompt"]


def accounting_after_hole(shape: str, hole: Callable[[int], tuple[int, int]]) -> Json:
    """The accounting of a prompt repeated after an eviction; its answer must not change."""
    with serving(shape) as server:
        prompt = server.tokens(sample_text(1200))
        assert len(prompt) > 2000
        server.complete(prompt, n_predict=1)
        whole = server.complete(prompt, n_predict=12, n_probs=VOCABULARY)
        server.erase()
        server.complete(prompt, n_predict=1)
        p0, p1 = hole(len(prompt))
        server.act("block-evict", p0=p0, p1=p1)
        answer = server.complete(prompt, n_predict=12, n_probs=VOCABULARY)
        assert answer["timings"]["evoke"]["omitted"] == 0
        # in batches of another shape
        assert largest_difference(distributions(whole), distributions(answer)) < ROUNDING
        accounting: Json = answer["timings"]["evoke"]
        return accounting


@pytest.mark.parametrize("shape", HYBRIDS)
def test_the_row_of_a_checkpoint_is_not_evicted(shape: str) -> None:
    with serving(shape) as server:
        prompt = server.tokens(sample_text(300))
        server.complete(prompt)
        checkpoint_rows = server.slot()["held"]
        assert len(checkpoint_rows) == 2 and all(p1 - p0 == 1 for p0, p1 in checkpoint_rows)
        first, last = checkpoint_rows[0][0], checkpoint_rows[1][0]
        error = server.refuse("block-evict", p0=last - 8, p1=last + 2)
        assert (error["code"], error["type"], error["p0"]) == (409, "held_row", last)
        server.act("block-evict", p0=first + 1, p1=last)
        # another ending: decoding continues from the checkpoint, not from the start
        other = prompt[: last + 1] + server.tokens(sample_text(30, seed=8))
        evoke = server.complete(other)["timings"]["evoke"]
        assert evoke["omitted"] == last - first - 1
        assert evoke["resident_before"] == first + 2
        assert evoke["decoded"] == len(other) - last - 1


@pytest.mark.parametrize("shape", INDEXED)
def test_a_block_of_a_model_with_an_index_outlives_the_server(shape: str, tmp_path: Path) -> None:
    """The file of a copy has the keys of the index, too: the answer is the same to the bit."""
    options = ("--evoke-disk", f"{tmp_path}:8")
    with serving(shape, *options) as server:
        prompt = server.tokens(sample_text(200))
        server.complete(prompt, n_predict=1)
        server.act("block-save", name="all", p0=0, p1=len(prompt))
        never = distributions(server.complete(prompt, n_predict=8, n_probs=VOCABULARY))
        server.post("/slots/0?action=block-spill", {"all": True})
    with serving(shape, *options) as server:
        server.act("block-adopt", tokens=prompt, names=["all"])
        answer = server.complete(prompt, n_predict=8, n_probs=VOCABULARY)
        assert answer["timings"]["evoke"]["decoded"] == 1
        assert distributions(answer) == never


@pytest.mark.parametrize("shape", INDEXED)
def test_positions_of_a_model_with_an_index_are_not_shifted(shape: str) -> None:
    with serving(shape) as server:
        features = server.get("/props")["evoke"]["features"]
        assert not {"compact", "attention"} & set(features)
        server.complete(server.tokens(sample_text(100)), n_predict=1)
        assert server.refuse("block-compact")["code"] == 501


@pytest.mark.parametrize("shape", [WINDOWED, HYBRIDS[0], INDEXED_WINDOWED])
def test_adopting_is_refused_for_models_with_state_besides_rows(shape: str) -> None:
    with serving(shape) as server:
        assert "adopt" not in server.get("/props")["evoke"]["features"]
        prompt = server.tokens(sample_text(100))
        server.complete(prompt, n_predict=1)
        server.act("block-save", name="all", p0=0, p1=len(prompt))
        before = server.slot()
        error = server.refuse("block-adopt", tokens=prompt, names=["all"])
        assert (error["code"], error["type"]) == (501, "not_supported_error")
        assert server.slot() == before


@pytest.mark.parametrize("shape", [WINDOWED, "tiny-qwen2vl", *HYBRIDS, *INDEXED, INDEXED_WINDOWED])
@pytest.mark.parametrize("streams", ["-kvu", "-no-kvu"])
def test_random_operations_and_invalid_calls(shape: str, streams: str) -> None:
    with serving(shape, "-np", "2", streams) as server:
        assert sum(run_operations(server, 120).done.values()) == 120
        assert sum(send_invalid_calls(server, 80).values()) == 80


def test_a_rendering_begins_with_the_bos_token_of_the_vocabulary() -> None:
    with serving("tiny-bos") as server:
        bos = server.tokens("")
        assert len(bos) == 1
        body = {"messages": [{"role": "user", "content": sample_text(20)}]}
        view = server.post("/evoke/render", {"dialect": "chat", "body": body})
        assert view["tokens"][0] == bos[0] and view["tokens"].count(bos[0]) == 1
        assert view["spans"][0]["p0"] == 0
        marker = {"id_slot": 0, "cache_prompt": True, "evoke": {"epoch": server.epoch()}}
        answer = server.post("/v1/chat/completions", body | marker | {"max_tokens": 1})
        assert answer["timings"]["evoke"]["n_prompt"] == len(view["tokens"])
