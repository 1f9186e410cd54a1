"""A context longer than the cells: blocks are saved and evicted while decoding."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from llama import Json, Llama, binary, running
from operations import PARTS

from bench.random_models import SHAPES, ensure

# tests/proxy/test_logical_context.py runs a session as long in twice as many cells.
CELLS, LOGICAL, SESSION, BUDGET = 4096, 100_000, 66_500, 3000
TURNS = [SESSION * (turn + 1) // 7 for turn in range(7)]


@pytest.fixture(scope="module")
def long() -> Iterator[Llama]:
    """Two layers of random weights: decoding is fast at any length."""
    options = ("-c", str(CELLS), "-np", "1", "--evoke-ram", "128", "--ctx-logical", str(LOGICAL))
    with running(True, *options, model=ensure(SHAPES["long-2"])) as server:
        yield server


def text(n_tokens: int) -> list[int]:
    return [10 + (7 * i + i // 1900) % 1900 for i in range(n_tokens)]


def conversation_turns(server: Llama, turns: int, **more: object) -> Iterator[Json]:
    """The answers of a conversation of `turns` turns, each of which has the answers before it."""
    tokens: list[int] = []
    for end in TURNS[:turns]:
        tokens = tokens + text(SESSION)[len(tokens) : end]
        answer = server.complete(tokens, n_predict=16, **more)
        tokens = tokens + answer["tokens"]
        yield answer


def checked_accounting(answer: Json) -> Json:
    """The token accounting of a turn, which must sum to the prompt."""
    accounting: Json = answer["timings"]["evoke"]
    assert sum(accounting[kind] for kind in PARTS) == accounting["n_prompt"]
    assert accounting["budget_breaches"] == 0
    assert all(name for _, _, name in accounting["auto_evicted"])
    return accounting


def test_an_unmarked_session_of_66k_tokens_runs_in_4k_cells(long: Llama) -> None:
    """No token is decoded twice."""
    long.erase()
    turns = [
        checked_accounting(answer) for answer in conversation_turns(long, len(TURNS), marker=False)
    ]
    assert turns[-1]["n_prompt"] > 66_000
    for turn in turns:
        assert turn["marker"] == "none"
        assert CELLS // 2 < turn["n_resident_peak"] <= CELLS
    assert sum(turn["decoded"] for turn in turns) < SESSION + 16 * len(TURNS)
    state = long.slot()
    assert state["n_ctx_logical"] == LOGICAL
    assert state["n_cells"] == CELLS
    assert state["resident"][0] == [0, 4]
    # At least a quarter of the resident rows are the latest ones, without a gap.
    first, end = state["resident"][-1]
    assert end - first >= state["n_resident"] // 4


def test_a_budget_below_the_cells_limits_the_resident_rows(long: Llama) -> None:
    """tests/proxy/test_logical_context.py runs the whole session through the proxy."""
    long.erase()
    long.act("stream", budget=BUDGET, sink=4, recent=64, block=64)
    turns = [checked_accounting(answer) for answer in conversation_turns(long, 2)]
    assert turns[-1]["n_prompt"] > 3 * CELLS
    for turn in turns:
        assert turn["marker"] == "ok"
        assert turn["n_resident_peak"] <= BUDGET
    assert sum(turn["decoded"] for turn in turns) < TURNS[1] + 16 * 2


def test_a_stock_server_has_no_logical_context() -> None:
    model = ensure(SHAPES["long-2"])
    with running(False, "-c", str(CELLS), "-np", "1", model=model) as server:
        assert server.complete(text(CELLS - 500), marker=False)["timings"]["prompt_n"] > 0
        body = {"prompt": text(SESSION), "n_predict": 16}
        status, answer = server.ask("POST", "/completion", body)
    assert status == 400
    assert answer["error"]["type"] == "exceed_context_size_error"


def test_a_prompt_that_fits_the_cells_is_decoded_without_holes(long: Llama) -> None:
    """Holes that earlier turns left are decoded again."""
    long.erase()
    prompt = text(CELLS - 200)
    answer = long.complete(prompt, n_predict=1000, marker=False)
    assert checked_accounting(answer)["auto_evicted"]
    repeated = checked_accounting(long.complete(prompt, n_predict=1, marker=False))
    assert (repeated["omitted"], repeated["resident_before"]) == (0, 4)
    more = checked_accounting(long.complete(prompt + answer["tokens"], n_predict=1, marker=False))
    assert more["n_prompt"] > CELLS
    assert more["decoded"] <= 1000


def test_a_prompt_beyond_the_logical_context_gets_the_error_of_upstream(long: Llama) -> None:
    status, answer = long.ask("POST", "/completion", {"prompt": text(LOGICAL + 1)})
    assert status == 400
    assert answer["error"]["type"] == "exceed_context_size_error"
    assert f"exceeds the available context size ({LOGICAL} tokens)" in answer["error"]["message"]


def test_the_server_reports_its_eviction_settings(long: Llama) -> None:
    props = long.get("/props")
    assert props["evoke"]["limits"]["n_ctx_logical"] == LOGICAL
    assert props["default_generation_settings"]["n_ctx"] == LOGICAL
    settings = {"mode": "streaming", "first": 4, "evictable": 0, "recent": 0, "block": 64}
    assert props["evoke"]["kv_eviction"] == settings | {"aggregation": "sum"}


def test_without_the_option_the_context_is_as_long_as_the_cells(one: Llama) -> None:
    assert one.get("/props")["evoke"]["limits"]["n_ctx_logical"] == 4096
    assert one.get("/props")["evoke"]["kv_eviction"]["mode"] == "off"
    status, answer = one.ask("POST", "/completion", {"prompt": text(5000)})
    assert (status, answer["error"]["type"]) == (400, "exceed_context_size_error")


RAM = ("--evoke-ram", "16")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ("--ctx-logical", "9000", *RAM),
            "more than the 8192 tokens that the model was trained for",
        ),
        (
            ("--ctx-logical", "17000", "--rope-scaling", "yarn", "--rope-scale", "2", *RAM),
            "more than the 16384 tokens",
        ),
        (("--ctx-logical", "8000"), "add --evoke-ram MiB"),
        (("--kv-eviction", "1"), "add --evoke-ram MiB"),
        (("--kv-eviction", "4", *RAM), '"--kv-eviction": must be between 0 and 3'),
        (("--kv-sink-tokens", "257", *RAM), '"--kv-sink-tokens": must be between 0 and 256'),
        (("--kv-protected-tokens", "-1", *RAM), '"--kv-protected-tokens": must be between 0'),
        (("--kv-recent-tokens", "0", *RAM), '"--kv-recent-tokens": must be between 1'),
        (("--kv-block-size", "0", *RAM), '"--kv-block-size": must be between 1 and 4096'),
        (
            ("--kv-eviction", "1", "--kv-protected-tokens", "900", *RAM),
            "1024 cells of a slot cannot hold the first 900 and last 256 tokens",
        ),
        (
            ("--kv-eviction", "1", "--kv-evictable-tokens", "32", *RAM),
            "cannot hold one block of 64",
        ),
        (("--kv-eviction", "1", "--embedding", *RAM), "an embedding needs all of its text"),
        (
            ("--kv-eviction", "1", *RAM, "-m", str(ensure(SHAPES["tiny-mamba"]))),
            "recurrent memory: there are no rows",
        ),
        (
            ("--ctx-logical", "1025", *RAM, "-m", str(ensure(SHAPES["tiny-longrope"]))),
            "which the server uses only where a slot has more than 1024 cells",
        ),
        (
            ("--kv-eviction", "1", *RAM, "-m", str(ensure(SHAPES["tiny-longrope"]))),
            "choose a larger -c, or --ctx-logical 1024 or less",
        ),
    ],
)
def test_the_server_refuses_to_start_with_invalid_options(
    options: tuple[str, ...], reason: str
) -> None:
    model = str(ensure(SHAPES["tiny-dense"]))
    command = [str(binary(patched=True)), "-m", model, "-c", "1024", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode not in (0, -6)
    assert reason in done.stderr + done.stdout


@pytest.mark.parametrize(("cells", "logical"), [(512, 1024), (1280, 8000)])
def test_longrope_has_the_factors_of_its_logical_length(cells: int, logical: int) -> None:
    """The long factors are used exactly if positions exceed the range of the short ones."""
    options = ("-c", str(cells), "-np", "1", *RAM, "--ctx-logical", str(logical))
    with running(True, *options, model=ensure(SHAPES["tiny-longrope"])) as server:
        prompt = text(logical - 100)
        assert server.complete(prompt)["timings"]["evoke"]["n_prompt"] == len(prompt)


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_rope_scaling_extends_the_logical_context(scaling: str) -> None:
    scaled = ("--rope-scaling", scaling, "--rope-scale", "2", "--ctx-logical", "16000")
    options = ("-c", "1024", "-np", "1", *RAM, *scaled)
    with running(True, *options, model=ensure(SHAPES["tiny-dense"])) as server:
        assert server.slot()["n_ctx_logical"] == 16000
