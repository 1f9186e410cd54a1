"""Probes: a probe is decoded for its queries and leaves the turn as it was before."""

from __future__ import annotations

from llama import ROUNDING, Json, Llama, distributions, largest_difference, running, sample_text

from bench.random_models import SHAPES, ensure

VOCABULARY = 2048


def probe(server: Llama, prompt: list[int], *ops: Json, **more: object) -> Json:
    server.act("block-plan", ops=[*ops, {"op": "probe"}])
    return server.complete(prompt, **{"n_predict": 6} | more)


def test_the_answer_is_that_of_a_turn_without_a_probe(server: Llama) -> None:
    history, prompt = server.tokens(sample_text(150)), server.tokens(sample_text(190))
    server.complete(history)
    server.act("block-save", name="b", p0=40, p1=100, evict=True)
    server.act("block-load", names=["b"])
    plain = server.complete(prompt, n_predict=10, n_probs=VOCABULARY)

    server.erase()
    server.complete(history)
    server.act("block-evict", p0=40, p1=100)
    probed = probe(server, prompt, n_predict=10, n_probs=VOCABULARY)
    server.act("block-plan", ops=[{"op": "load", "names": ["b"]}])
    repeated = server.complete(prompt, n_predict=10, n_probs=VOCABULARY)
    # The probe's rows took cells of the block; in other cells the attention rounds differently.
    expected = distributions(plain)
    assert largest_difference(expected, distributions(repeated)) < ROUNDING
    assert largest_difference(expected, distributions(probed)) > 3 * ROUNDING
    tail = plain["timings"]["evoke"]["decoded"]
    assert probed["timings"]["evoke"]["decoded"] == tail
    accounting = repeated["timings"]["evoke"]
    assert (accounting["decoded"], accounting["recovered"], accounting["omitted"]) == (tail, 60, 0)
    assert accounting["resident_before"] == accounting["n_prompt"] - tail - 60


def test_rows_loaded_for_a_probe_count_as_recovered_in_the_answer(one: Llama) -> None:
    one.erase()
    history, prompt = one.tokens(sample_text(150)), one.tokens(sample_text(190))
    one.complete(history)
    one.act("block-plan", ops=[
        {"op": "save", "name": name, "p0": p0, "p1": p0 + 30} for name, p0 in (("a", 20), ("b", 60))
    ] + [{"op": "evict", "names": ["a", "b"]}])  # fmt: skip
    one.complete(history)
    probed = probe(one, prompt, {"op": "load", "names": ["a"]})
    assert probed["timings"]["evoke"]["recovered"] == 30
    one.act("block-plan", ops=[{"op": "load", "names": ["b"]}])
    accounting = one.complete(prompt)["timings"]["evoke"]
    assert (accounting["recovered"], accounting["omitted"]) == (60, 0)
    assert accounting["resident_before"] + accounting["decoded"] + 60 == accounting["n_prompt"]
    # The peak includes the rows of the probe.
    assert accounting["n_resident_peak"] >= probed["timings"]["evoke"]["n_resident"] + 30
    # The next turn has its own accounting.
    later = one.complete(prompt)["timings"]["evoke"]
    assert (later["recovered"], later["omitted"]) == (0, 0)


def test_rows_of_a_probe_are_not_reused(one: Llama) -> None:
    one.erase()
    history, prompt = one.tokens(sample_text(150)), one.tokens(sample_text(190))
    n_past = one.complete(history)["timings"]["evoke"]["n_prompt"]
    probe(one, prompt)
    view = one.post("/evoke/render", {"dialect": "completions", "body": {"prompt": prompt}})
    common = view["slots"][0]["n_common"]
    assert n_past <= common < len(prompt)
    assert one.complete(prompt)["timings"]["prompt_n"] == len(prompt) - common


def test_an_unmarked_request_is_not_decoded_as_a_probe(one: Llama) -> None:
    one.erase()
    prompt = one.tokens(sample_text(150))
    one.complete(prompt)
    one.act("block-plan", ops=[{"op": "probe"}])
    one.complete(prompt, marker=False)
    one.complete(prompt)
    assert one.complete(prompt)["timings"]["prompt_n"] == 1


def test_a_memory_that_cannot_be_rolled_back_is_not_probed() -> None:
    with running(
        True, "-c", "1024", "--evoke-ram", "16", model=ensure(SHAPES["tiny-qwen35"])
    ) as hybrid:
        assert "probe" not in hybrid.get("/props")["evoke"]["features"]
        error = hybrid.refuse("block-plan", ops=[{"op": "probe"}])
        assert error["code"] == 501
