"""Events to whoever listens, and an end to whoever does not keep up."""

from __future__ import annotations

import asyncio

from evoke_proxy.engine.operator.feed import Feed, Listener


async def _heard(listener: Listener) -> list[int]:
    found = []
    while (event := await listener.next(0.0)) is not None:
        found.append(event.number)
    return found


def test_everybody_hears_everything_from_when_they_came() -> None:
    async def run() -> None:
        feed = Feed()
        feed.tell("turn", session="a")
        with feed.listen(lambda: None) as new, feed.listen(lambda: None, after=0) as old:
            assert len(feed) == 2
            feed.tell("answer", session="a")
            assert await _heard(new) == [2] and await _heard(old) == [1, 2]
        assert len(feed) == 0

    asyncio.run(run())


def test_who_comes_back_hears_what_was_missed_of_this_proxy() -> None:
    async def run() -> None:
        feed = Feed()
        for _ in range(700):
            feed.tell("turn")
        with feed.listen(lambda: None, after=697) as one:
            assert await _heard(one) == [698, 699, 700]
        with feed.listen(lambda: None, after=10_000) as of_another:
            assert (await _heard(of_another))[-1] == 700 and not of_another.over
        with feed.listen(lambda: None, after=0) as long_gone:
            heard = await _heard(long_gone)
        assert heard == list(range(heard[0], 701)) and len(heard) == 256

    asyncio.run(run())


def test_a_slow_one_is_cut_off_once_and_holds_up_nobody() -> None:
    async def run() -> None:
        feed, cut = Feed(), []
        with feed.listen(lambda: cut.append("slow")) as slow, feed.listen(lambda: None) as quick:
            for number in range(600):
                feed.tell("turn")
                assert await _heard(quick) == [number + 1]
            assert cut == ["slow"] and slow.over and not quick.over
            assert await _heard(slow) == list(range(1, 257))

    asyncio.run(run())


def test_at_the_end_everybody_is_let_go() -> None:
    async def run() -> None:
        feed = Feed()
        with feed.listen(lambda: None) as early:
            waiting = asyncio.get_running_loop().create_task(early.next(60.0))
            await asyncio.sleep(0)
            feed.end()
            assert await waiting is None and early.over
        with feed.listen(lambda: None) as late:
            assert late.over

    asyncio.run(run())
