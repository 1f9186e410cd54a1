"""The model of an unpatched llama-server, against the rules of its source."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from bench.traces.replay import Costs, Counts, run
from bench.traces.stock import PromptCache, StockServer
from bench.traces.texts import Prompt, Scale

_SCALE = Scale(64)
_NO_CACHE, _ALL = PromptCache(0), float("inf")


def _tokens(*runs: tuple[int, int]) -> npt.NDArray[np.int32]:
    return np.concatenate([np.arange(start, start + n, dtype=np.int32) for start, n in runs])


def _prompt(*runs: tuple[int, int], n_answer: int = 1) -> Prompt:
    answer = np.full(n_answer, 7, np.int32)
    return Prompt(np.zeros(0, np.int64), (), _tokens(*runs), answer)


def _counts(server: StockServer, *prompts: Prompt) -> list[Counts]:
    async def work() -> list[Counts]:
        return [await server.ask(prompt, "") for prompt in prompts]

    return run(work())


def _decoded(server: StockServer, *prompts: Prompt) -> list[int]:
    return [counts.decoded for counts in _counts(server, *prompts)]


def _loaded(server: StockServer, *prompts: Prompt) -> list[int]:
    return [counts.loaded for counts in _counts(server, *prompts)]


def test_a_request_takes_the_most_similar_slot_else_the_least_recently_used() -> None:
    one, other = _prompt((0, 100)), _prompt((1000, 100))
    server = StockServer(2, _NO_CACHE, _SCALE)
    assert _decoded(server, one, other, one, other) == [100, 100, 1, 1]
    third = _prompt((5000, 100))
    assert _decoded(server, third, other, one) == [100, 1, 100]


def test_the_ram_cache_brings_back_a_slot_that_was_taken() -> None:
    one, other = _prompt((0, 100)), _prompt((1000, 100))
    assert _decoded(StockServer(1, _NO_CACHE, _SCALE), one, other, one) == [100, 100, 100]
    assert _decoded(StockServer(1, PromptCache(_ALL), _SCALE), one, other, one) == [
        100,
        100,
        1,
    ]
    # What is saved takes time, but is not loaded.
    assert _loaded(StockServer(1, PromptCache(_ALL), _SCALE), one, other, one) == [0, 0, 100]
    # A state that exceeds the limit is not saved.
    assert _decoded(StockServer(1, PromptCache(99), _SCALE), one, other, one) == [100, 100, 100]


def test_the_oldest_states_leave_the_ram_cache() -> None:
    cache = PromptCache(250)
    for start in (0, 1000, 2000):
        assert cache.save(_tokens((start, 100))) == 100
    assert [int(state[0]) for state in cache.states] == [1000, 2000]
    # A longer prompt replaces those that it continues, and a shorter one is already there.
    assert cache.save(_tokens((2000, 120))) == 120
    assert cache.save(_tokens((2000, 50))) == 0
    assert [len(state) for state in cache.states] == [100, 120]


def test_a_state_is_loaded_only_if_a_quarter_of_it_is_used() -> None:
    cache = PromptCache(_ALL)
    cache.save(_tokens((0, 100)))
    empty = np.zeros(0, np.int32)
    assert cache.load(empty, _tokens((0, 24), (500, 10))) is None
    taken = cache.load(empty, _tokens((0, 25), (500, 10)))
    assert taken is not None and len(taken) == 100
    assert not cache.states  # its rows are only in the slot now


def test_requests_wait_for_a_slot_and_the_first_token_has_a_time() -> None:
    server = StockServer(1, _NO_CACHE, _SCALE, Costs(prefill=100.0, decode=10.0))

    async def work() -> list[Counts]:
        prompts = (_prompt((0, 200), n_answer=20), _prompt((1000, 100), n_answer=10))
        return list(await asyncio.gather(*(server.ask(each, "") for each in prompts)))

    assert [counts.first_token_s for counts in run(work())] == [2.0, 2.0 + 2.0 + 1.0]
    assert server.peak == 219
