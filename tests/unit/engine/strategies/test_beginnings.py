"""First requests of conversations, and the states that they save for each other."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.engine.strategies.beginnings import MIN_SHARED_TOKENS, Beginning, Beginnings

N = MIN_SHARED_TOKENS


def prompt(n_common: int, own: int) -> Tokens:
    """Tokens that are the same for all up to `n_common`, with some of one's own behind them."""
    return np.concatenate([np.arange(n_common), np.full(10, 10_000 + own)]).astype(np.int32)


def test_the_longest_state_of_the_same_tenant_is_awaited() -> None:
    beginnings = Beginnings()
    first = Beginning("a", prompt(4 * N, 1))
    short, long = (beginnings.announce(first, n * N, False) for n in (1, 4))
    assert [state.end for state in first.states] == [N, 4 * N]
    assert beginnings.awaited(Beginning("a", prompt(4 * N, 2)), 0) is long
    assert beginnings.awaited(Beginning("a", prompt(2 * N, 2)), 0) is short
    assert beginnings.awaited(Beginning("a", prompt(2 * N, 2)), 1) is None
    assert beginnings.awaited(Beginning("a", prompt(4 * N, 2)), 3 * N + 1) is None
    assert beginnings.awaited(Beginning("b", prompt(4 * N, 2)), 0) is None
    # At least one token is left to decode.
    assert beginnings.awaited(Beginning("a", long.tokens), 0) is short


def test_what_a_prompt_has_in_common_with_others() -> None:
    beginnings = Beginnings()
    one, two, foreign = (
        Beginning(tenant, prompt(n * N, number))
        for number, (tenant, n) in enumerate((("a", 3), ("a", 2), ("b", 3)))
    )
    with beginnings.running(one), beginnings.running(two), beginnings.running(foreign):
        assert beginnings.others(one) == [two]
        assert beginnings.common_end(one, ()) == 2 * N
        assert beginnings.common_end(one, [prompt(5 * N, 9)]) == 3 * N
        assert beginnings.common_end(foreign, ()) == 0
        state = beginnings.announce(one, 2 * N, True)
        assert beginnings.n_that_wait(one, state) == 1
        assert beginnings.n_that_wait(one, beginnings.announce(one, 3 * N, True)) == 0
        two.is_decided = True
        assert beginnings.n_that_wait(one, state) == 0
    assert beginnings.others(one) == []


@pytest.mark.parametrize("is_saved", [False, True])
def test_states_that_were_not_saved_end_with_their_request(is_saved: bool) -> None:
    asyncio.run(_ends_with_its_request(is_saved))


async def _ends_with_its_request(is_saved: bool) -> None:
    beginnings = Beginnings()
    first, second = (Beginning("a", prompt(2 * N, own)) for own in (1, 2))
    async with asyncio.TaskGroup() as tasks:
        with beginnings.running(first):
            state = beginnings.announce(first, 2 * N, True)
            tasks.create_task(beginnings.wait(second, state))
            await asyncio.sleep(0)
            assert second.is_waiting
            state.is_saved = is_saved
        assert state.done.is_set() == state.has_failed == (not is_saved)
        if is_saved:  # its file is being completed
            beginnings.end(state)
    assert not second.is_waiting and beginnings.awaited(second, 0) is None
