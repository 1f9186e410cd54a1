"""The event feed: who gets which events, and what happens to slow subscribers."""

from __future__ import annotations

import asyncio

from evoke_proxy.engine.feed import EventFeed, Subscriber


async def _numbers(subscriber: Subscriber) -> list[int]:
    numbers = []
    while (event := await subscriber.next(0.0)) is not None:
        numbers.append(event.number)
    return numbers


def test_a_subscriber_gets_every_event_from_its_start() -> None:
    async def run() -> None:
        feed = EventFeed()
        feed.publish("turn", session="a")
        with feed.subscribe(lambda: None) as new, feed.subscribe(lambda: None, after=0) as old:
            assert len(feed) == 2
            feed.publish("answer", session="a")
            assert await _numbers(new) == [2] and await _numbers(old) == [1, 2]
        assert len(feed) == 0

    asyncio.run(run())


def test_a_subscriber_that_reconnects_gets_the_events_it_missed() -> None:
    async def run() -> None:
        feed = EventFeed()
        for _ in range(700):
            feed.publish("turn")
        with feed.subscribe(lambda: None, after=697) as one:
            assert await _numbers(one) == [698, 699, 700]
        with feed.subscribe(lambda: None, after=10_000) as of_another:
            assert (await _numbers(of_another))[-1] == 700 and not of_another.has_ended
        with feed.subscribe(lambda: None, after=0) as long_absent:
            numbers = await _numbers(long_absent)
        assert numbers == list(range(numbers[0], 701)) and len(numbers) == 256

    asyncio.run(run())


def test_a_slow_subscriber_is_cut_off_once_and_delays_no_other() -> None:
    async def run() -> None:
        feed, cut = EventFeed(), list[str]()
        with (
            feed.subscribe(lambda: cut.append("slow")) as slow,
            feed.subscribe(lambda: None) as quick,
        ):
            for number in range(600):
                feed.publish("turn")
                assert await _numbers(quick) == [number + 1]
            assert cut == ["slow"] and slow.has_ended and not quick.has_ended
            assert await _numbers(slow) == list(range(1, 257))

    asyncio.run(run())


def test_ending_the_feed_ends_every_subscription() -> None:
    async def run() -> None:
        feed = EventFeed()
        with feed.subscribe(lambda: None) as early:
            waiting = asyncio.get_running_loop().create_task(early.next(60.0))
            await asyncio.sleep(0)
            feed.end()
            assert await waiting is None and early.has_ended
        with feed.subscribe(lambda: None) as late:
            assert late.has_ended

    asyncio.run(run())
