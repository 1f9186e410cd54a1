"""Capturing attention: the captured values are the model's softmax, by position."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from attention_limits import LAYERS, limit_memory, many_cells
from first_layer import attention, queries_and_keys
from llama import Json, Llama, running, sample_text
from native import run

from bench.random_models import SHAPES, ensure

ROW_SUM = 1e-5
HEADS = 4


def masses(server: Llama, n: int, slot: int = 0, **more: object) -> Json:
    """The attention mass of each of the first `n` positions."""
    body = {"ranges": [[i, i + 1] for i in range(n)]} | more
    answer: Json = server.post(f"/slots/{slot}?action=attention", body)
    return answer


def by_head(server: Llama, n: int, slot: int = 0) -> npt.NDArray[np.float64]:
    """The attention mass, of shape [layer and head, position]."""
    return np.array([h["mass"] for h in masses(server, n, slot, per_head=True)["heads"]])


def text(server: Llama, answer: Json, prompt: list[int], slot: int = 0) -> list[int]:
    """The decoded tokens of a slot: all but the last one sampled."""
    tokens: list[int] = (prompt + answer["tokens"])[: server.slot(slot)["n_tokens"]]
    return tokens


def test_rows_are_the_softmax_through_evictions_and_loads(
    server: Llama, request: pytest.FixtureRequest
) -> None:
    prompt = server.tokens(sample_text(300))
    server.act("attn-capture", layers=[0], mode="ewma", decay=0, per_head=True)
    tokens = text(server, server.complete(prompt), prompt)
    end = len(tokens)
    whole = attention(tokens, end - 1)
    assert np.allclose(by_head(server, end), whole, atol=3e-4)
    assert np.unique(whole.round(4)).size > 100  # not a flat row that would match anything

    server.act("block-save", name="b", p0=40, p1=220, evict=True)
    if request.node.callspec.params["server"] == "shared":
        server.complete(server.tokens(sample_text(100)), slot=1)  # takes cells of the block
    answer = server.complete(tokens, n_predict=30)
    tokens = text(server, answer, tokens)
    row = by_head(server, len(tokens))
    assert np.all(row[:, 40:220] == 0)
    hidden = attention(tokens, len(tokens) - 1, range(40, 220))
    assert np.allclose(row, hidden, atol=3e-4)
    assert not np.allclose(row, attention(tokens, len(tokens) - 1), atol=3e-4)

    # Rows decoded meanwhile took cells of the block, so it is loaded into other cells.
    assert not server.act("block-load", names=["b"])["same_cells"]
    tokens = text(server, server.complete(tokens), tokens)
    assert np.allclose(by_head(server, len(tokens)), attention(tokens, len(tokens) - 1), atol=3e-4)


def test_sums_are_over_every_generated_token_and_the_end_of_the_prompt(server: Llama) -> None:
    """Most tokens reuse one compute graph; none of their rows may be missing."""
    prompt = server.tokens(sample_text(100))
    server.act("attn-capture", layers=[0], mode="sum", window=6)
    tokens = text(server, server.complete(prompt, n_predict=40), prompt)
    first = len(prompt) - 6
    expected = np.zeros(len(tokens))
    for row in range(first, len(tokens)):
        expected[: row + 1] += attention(tokens, row).mean(axis=0)
    answer = masses(server, len(tokens))
    assert answer["n_obs"] == len(tokens) - first
    assert answer["total"] == pytest.approx(answer["n_obs"], rel=ROW_SUM)
    assert np.allclose(answer["mass"], expected, rtol=3e-4, atol=1e-3)
    assert answer["life"][0] == answer["n_obs"] and answer["life"][len(tokens) - 1] == 1


def test_snapkv_is_the_mean_of_the_last_rows(server: Llama) -> None:
    prompt = server.tokens(sample_text(100))
    server.act("attn-capture", layers=[0], mode="snapkv", window=16)
    tokens = text(server, server.complete(prompt, n_predict=6), prompt)
    expected = np.zeros(len(tokens))
    for row in range(len(tokens) - 16, len(tokens)):
        expected[: row + 1] += attention(tokens, row).mean(axis=0) / 16
    answer = masses(server, len(tokens))
    assert answer["total"] == pytest.approx(1, abs=ROW_SUM)
    assert np.allclose(answer["mass"], expected, atol=3e-4)


def test_ewma_weighs_the_last_rows_most(server: Llama) -> None:
    prompt = server.tokens(sample_text(60))
    server.act("attn-capture", layers=[1, 3], mode="ewma", decay=0.95)
    server.complete(prompt, n_predict=20)
    answer = server.get("/slots/0/attention?ranges=0-10,10-100000")
    assert answer["total"] == pytest.approx(1 - 0.95 ** answer["n_obs"], abs=ROW_SUM)
    assert sum(answer["mass"]) == pytest.approx(answer["total"], abs=ROW_SUM)


def last_rows(server: Llama, prompt: list[int], layers: list[int]) -> npt.NDArray[np.float64]:
    """The attention of the last token in each layer and head; the prompt fills several batches."""
    server.act("attn-capture", layers=layers, mode="ewma", decay=0, per_head=True)
    server.complete(prompt, n_predict=3)
    return by_head(server, len(prompt) + 2)


def test_every_layer_and_head_sums_to_one_with_and_without_flash_attention(
    one: Llama, shared: Llama
) -> None:
    prompt = one.tokens(sample_text(700))
    assert len(prompt) > 600
    found = []
    for server in (one, shared):
        server.erase()
        found.append(last_rows(server, prompt, LAYERS))
        server.erase()
    flash, plain = found
    assert flash.shape == plain.shape == (len(LAYERS) * HEADS, len(prompt) + 2)
    assert np.allclose(flash.sum(axis=1), 1, atol=ROW_SUM)
    assert np.allclose(plain.sum(axis=1), 1, atol=ROW_SUM)
    # in deeper layers the rounding of flash attention shows
    assert np.allclose(flash, plain, atol=2e-2)


@pytest.mark.parametrize("shape", ["tiny-gemma2", "tiny-gpt-oss"])
def test_soft_caps_and_sinks_are_those_of_the_model(shape: str) -> None:
    """Without flash attention the capture reads upstream's own softmax."""
    found = []
    for flash in ("on", "off"):
        options = ("-c", "1024", "--evoke-ram", "8", "-np", "1", "-fa", flash)
        with running(True, *options, model=ensure(SHAPES[shape])) as server:
            full = server.get("/props")["evoke"]["limits"]["attention"]["layers"]
            assert full == [1, 3]  # the other layers have a sliding window
            prompt = server.tokens(sample_text(120))
            server.act("attn-capture", layers=[1], mode="ewma", decay=0, per_head=True)
            server.complete(prompt, n_predict=4)
            found.append(by_head(server, len(prompt) + 3))
            error = server.refuse("attn-capture", layers=[0])
            assert error["code"] == 400 and "0 is not a layer" in error["message"]
    assert np.allclose(found[0], found[1], atol=3e-4)
    total = found[1].sum(axis=1)
    if shape == "tiny-gpt-oss":  # the sinks take the rest
        assert np.all(total < 0.999) and np.all(total > 0.5)
    else:
        assert np.allclose(total, 1, atol=ROW_SUM)


@pytest.mark.parametrize(
    ("shape", "options", "layers"),
    [
        ("tiny-lfm2", (), [1, 3]),  # the other layers are recurrent
        ("tiny-qwen2vl", (), LAYERS),
        ("tiny-moe", ("-ctk", "q8_0", "-ctv", "q8_0"), LAYERS),
    ],
)
def test_rows_are_the_softmax_with_other_memory_kinds(
    shape: str, options: tuple[str, ...], layers: list[int]
) -> None:
    usual = ("-c", "1024", "--evoke-ram", "8", "-np", "1", "-fa", "on")
    with running(True, *usual, *options, model=ensure(SHAPES[shape])) as server:
        limits = server.get("/props")["evoke"]["limits"]["attention"]
        assert limits == {"layers": layers, "max_layers": 16, "max_window": 64}
        prompt = server.tokens(sample_text(200))
        server.act("attn-capture", layers=layers, mode="snapkv", window=8)
        server.complete(prompt, n_predict=12)
        server.act("block-save", name="b", p0=20, p1=100, evict=True)
        server.complete(prompt, n_predict=12)
        answer = server.get("/slots/0/attention?ranges=0-20,20-100,100-2000")
        assert answer["total"] == pytest.approx(1, abs=ROW_SUM)
        assert answer["mass"][1] == 0 and min(answer["mass"][0], answer["mass"][2]) > 0.01


@pytest.mark.parametrize("layout", ["two", "shared"])
def test_attention_of_slots_that_decode_together_does_not_mix(
    layout: str, request: pytest.FixtureRequest
) -> None:
    server: Llama = request.getfixturevalue(layout)
    prompts = [server.tokens(sample_text(150, seed=2)), server.tokens(sample_text(60, seed=3))]
    for slot in (0, 1):
        server.erase(slot)
        server.act("attn-capture", slot, layers=[0], mode="sum", window=4, per_head=bool(slot))

    def decode(slot: int) -> Any:
        return server.complete(prompts[slot], slot, n_predict=60)

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(decode, (0, 1)))
    for slot, answer in enumerate(answers):
        tokens = text(server, answer, prompts[slot], slot)
        first = len(prompts[slot]) - 4
        expected = np.zeros(len(tokens))
        for row in range(first, len(tokens)):
            expected[: row + 1] += attention(tokens, row).mean(axis=0)
        got = masses(server, len(tokens), slot)
        # a prompt decoded in two batches, because of the other slot's token, has two ends
        assert len(tokens) - first <= got["n_obs"] <= len(tokens) - first + 4
        assert got["total"] == pytest.approx(got["n_obs"], rel=ROW_SUM)
        if got["n_obs"] == len(tokens) - first:
            assert np.allclose(got["mass"], expected, rtol=3e-4, atol=2e-3)


def test_capturing_changes_no_token(server: Llama) -> None:
    prompt = server.tokens(sample_text(120))

    def answer() -> Any:
        return server.complete(prompt, n_predict=12, n_probs=50)["completion_probabilities"]

    plain = answer()
    for layers in ([2], LAYERS, []):
        server.erase()
        server.act("attn-capture", layers=layers, queries=8)
        assert answer() == plain


def test_invalid_attention_requests_are_refused(one: Llama) -> None:
    one.erase()
    for wrong in (
        {"layers": [4]},
        {"layers": [-1]},
        {"layers": ["1"]},
        {"layers": 1},
        {},
        {"layers": [0], "mode": "best"},
        {"layers": [0], "decay": 1},
        {"layers": [0], "window": 65},
        {"layers": [0], "per_head": 1},
        {"layers": [0], "queries": 65},
    ):
        error = one.refuse("attn-capture", **wrong)
        assert error["code"] == 400, wrong
    one.act("attn-capture", layers=[0])
    for query in ("ranges=1", "ranges=5-1", "ranges=0-1,", "per_head=1", "ranges=1e3-2"):
        status, _ = one.ask("GET", f"/slots/0/attention?{query}")
        assert status == 400, query
    status, _ = one.ask("GET", "/slots/9/attention")
    assert status == 404


def numbers(text: str, *shape: int) -> npt.NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(shape)


def test_query_rows_and_key_bounds_are_those_of_the_first_layer(server: Llama) -> None:
    prompt = server.tokens(sample_text(120))
    server.act("attn-capture", layers=[0, 2], queries=8)
    server.complete(prompt, n_predict=5)
    queries, keys = queries_and_keys(prompt)
    ranges = [[0, 40], [40, 100], [100, len(prompt)]]

    def read() -> Json:
        body = {"with_queries": True, "bounds": ranges}
        answer: Json = server.post("/slots/0?action=attention", body)
        return answer

    answer = read()
    rows = answer["query_rows"]
    assert rows["pos"] == list(range(len(prompt) - 8, len(prompt)))
    found = numbers(rows["data"], 2, 8, HEADS, 64)
    assert np.allclose(found[0], queries[-8:], atol=1e-3)
    assert not np.allclose(found[1], queries[-8:], atol=0.1)

    bounds = answer["key_bounds"]
    assert (bounds["layers"], bounds["n_key"]) == ([0, 2], [128, 128])
    assert bounds["known"] == [True, True, True]
    limits = numbers(bounds["data"], 3, 2, 2, 128)
    for (start, end), found in zip(ranges, limits[:, 0], strict=True):
        flat = keys[start:end].reshape(end - start, 128)
        assert np.allclose(found, [flat.min(axis=0), flat.max(axis=0)], atol=5e-3)

    server.act("block-save", name="b", p0=40, p1=100, evict=True)
    server.act("block-evict", p0=10, p1=20)
    answer = read()
    assert answer["key_bounds"]["known"] == [False, True, True]
    assert np.array_equal(numbers(answer["key_bounds"]["data"], 2, 2, 2, 128), limits[1:])


def test_key_products_are_the_maximum_over_resident_or_saved_rows(server: Llama) -> None:
    prompt = server.tokens(sample_text(120))
    server.act("attn-capture", layers=[0, 2], queries=8)
    server.complete(prompt, n_predict=5)
    queries, keys = queries_and_keys(prompt)
    ranges = [[0, 40], [40, 100], [100, len(prompt)]]
    expected = np.stack(
        [
            np.einsum("rhc,thc->trh", queries[-8:], keys[a:b].repeat(HEADS // 2, axis=1)).max(0)
            for a, b in ranges
        ]
    )

    def read() -> Json:
        answer: Json = server.post("/slots/0?action=attention", {"products": ranges})
        found: Json = answer["key_products"]
        return found

    resident = read()
    assert resident["known"] == [True, True, True]
    assert (resident["layers"], resident["n_head"], resident["n_embd"]) == ([0, 2], HEADS, 64)
    assert resident["pos"] == list(range(len(prompt) - 8, len(prompt)))
    whole = numbers(resident["data"], 3, 2, 8, HEADS)
    assert np.allclose(whole[:, 0], expected, atol=0.02)
    assert not np.allclose(whole[:, 1], expected, atol=0.5)

    # A copy has the products of the rows that it was made from, in every layer.
    server.act("block-save", name="b", p0=40, p1=100, evict=True)
    server.act("block-evict", p0=10, p1=20)
    saved = read()
    assert saved["known"] == [False, True, True]
    assert np.array_equal(numbers(saved["data"], 2, 2, 8, HEADS), whole[1:])
    server.act("block-drop", names=["b"])
    assert read()["known"] == [False, False, True]


def test_a_probe_keeps_the_queries_of_its_tokens(one: Llama) -> None:
    one.erase()
    prompt = one.tokens(sample_text(120))
    one.act("attn-capture", layers=[0], queries=8)
    one.act("block-plan", ops=[{"op": "probe"}])
    tokens = one.complete(prompt, n_predict=5)["tokens"]
    rows = one.post("/slots/0?action=attention", {"with_queries": True})["query_rows"]
    # The last generated token has not been decoded.
    assert rows["pos"] == list(range(len(prompt) - 4, len(prompt) + 4))
    queries, _ = queries_and_keys([*prompt, *tokens[:-1]])
    assert np.allclose(numbers(rows["data"], 1, 8, HEADS, 64)[0], queries[-8:], atol=1e-3)

    one.complete(prompt, n_predict=5)
    rows = one.post("/slots/0?action=attention", {"with_queries": True})["query_rows"]
    assert rows["pos"] == list(range(len(prompt) - 8, len(prompt)))


def test_a_request_of_another_client_ends_the_capture(one: Llama) -> None:
    one.erase()
    prompt = one.tokens(sample_text(60))
    one.act("attn-capture", layers=[0], mode="sum")
    one.complete(prompt)
    assert one.get("/slots/0/attention")["n_obs"] > 8
    one.complete(prompt, marker=False)
    cleared = one.get("/slots/0/attention")
    assert (cleared["layers"], cleared["n_obs"], cleared["total"]) == ([], 0, 0)


def test_removed_tokens_have_no_mass(one: Llama) -> None:
    one.erase()
    prompt = one.tokens(sample_text(100))
    one.act("attn-capture", layers=[0], mode="sum")
    one.complete(prompt, n_predict=20)
    one.complete(prompt[:50] + prompt[60:70], n_predict=1)
    answer = one.get("/slots/0/attention?ranges=0-50,50-60,60-1000")
    assert answer["mass"][0] > 0 and answer["mass"][1] > 0
    assert answer["mass"][2] == 0


def test_an_eval_callback_sees_the_softmax_that_is_captured(tmp_path: Path) -> None:
    """A C++ program reads upstream's own tensors, without a server or JSON."""
    tokens = run(Path(__file__).parents[1] / "attn_capture/attn_capture.cpp", tmp_path)
    assert tokens.count("upstream's softmax") == tokens.count("in all layers") == 3


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[tuple[Llama, int]]:
    """A server with so many cells that rows of attention are large, and its process id."""
    with many_cells(tmp_path / "log") as server:
        yield server


def test_a_capture_that_does_not_fit_memory_is_refused_and_changes_no_slot(
    wide: tuple[Llama, int],
) -> None:
    server, process = wide
    prompt = server.tokens(sample_text(300))
    server.complete(prompt, 1, n_predict=1)
    server.complete(prompt, 0, n_predict=1)
    limit_memory(process, 96 << 20)
    other = server.slot(1)
    error = server.refuse("attn-capture", 0, layers=LAYERS, window=64)
    assert (error["code"], error["type"]) == (503, "no_memory")
    assert error["needed"] > 96 << 20
    error = server.refuse("block-plan", 0, ops=[
        {"op": "save", "name": "b", "p0": 0, "p1": 64},
        {"op": "attn-capture", "layers": LAYERS, "window": 64},
    ])  # fmt: skip
    assert (error["type"], error["op"]) == ("no_memory", 1)
    assert server.slot(0)["blocks"] == [] and server.slot(1) == other
    small = server.act("attn-capture", 0, layers=[0], window=1)  # for this there is memory
    assert small["layers"] == [0]
    for slot in (0, 1):
        answer = server.complete([*prompt, *prompt[:40]], slot, n_predict=4)
        assert answer["timings"]["evoke"]["decoded"] < 50, "the slot was emptied"
    assert masses(server, 64)["n_obs"] > 0


def test_capturing_attention_allocates_no_memory_while_decoding(
    wide: tuple[Llama, int],
) -> None:
    """All memory is allocated before the call is answered; no decode allocates more."""
    server, process = wide
    prompt = server.tokens(sample_text(3000))[:2000]
    for slot in (0, 1):
        server.complete(prompt[:400], slot, n_predict=1)
    for slot in (0, 1):
        server.act("attn-capture", slot, layers=LAYERS, window=64, queries=32)
    limit_memory(process, 24 << 20)  # enough for request threads, not for 200 MiB of rows
    with ThreadPoolExecutor(2) as pool:
        turns = [pool.submit(server.complete, prompt, slot, n_predict=30) for slot in (0, 1)]
        assert all(turn.result()["timings"]["evoke"]["decoded"] > 0 for turn in turns)
    for slot in (0, 1):
        answer = masses(server, 64, slot)
        assert answer["layers"] == LAYERS and answer["n_obs"] > 64


def test_the_window_is_halved_when_captured_rows_exceed_their_limit(
    wide: tuple[Llama, int],
) -> None:
    """Slots that share cells share the limit on captured rows too; it is short for the third."""
    server, _ = wide
    settings = {"layers": LAYERS, "window": 64, "queries": 64, "per_head": True, "mode": "sum"}
    windows = [server.act("attn-capture", slot, **settings)["window"] for slot in (0, 1, 2)]
    assert windows == [64, 64, 32]
    answer = server.act("attn-capture", 2, **settings)
    assert (answer["window"], answer["queries"]) == (32, 32)
    for slot in (0, 1, 2):
        server.complete(server.tokens(sample_text(100)), slot, n_predict=2)
        assert masses(server, 64, slot)["n_obs"] > 0
