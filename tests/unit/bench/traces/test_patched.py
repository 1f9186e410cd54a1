"""The model of the patched server: its rules, and its account of a replay through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from bench.traces.patched import BlockPool, Limits, PatchedServer, PoolFull, sums_of
from bench.traces.proxied import proxied
from bench.traces.replay import DEFAULT_COSTS, Replay, Served, run
from bench.traces.texts import Agent, Request, Scale, tokenized
from evoke_proxy.errors import UpstreamRejected

_SCALE, _SMALL = Scale(64), Scale(16)


def _words(first: int, n: int) -> str:
    syllables = [a + b for a in "bdfghjklmn" for b in "aeiou"]
    names = [a + b for a in syllables for b in syllables]
    return " ".join(names[first : first + n])


def _ask(text: str, slot: int = 0, epoch: int | None = None) -> dict[str, Any]:
    marker = {} if epoch is None else {"evoke": {"epoch": epoch}}
    return {"messages": [{"role": "user", "content": text}], "id_slot": slot, **marker}


async def _served(server: PatchedServer, body: Mapping[str, Any]) -> dict[str, Any]:
    decoded = await server.decode(body)
    timings = await server.answer(decoded, np.array([3, 4, 5], np.int32))
    found: dict[str, Any] = timings["evoke"]
    return found


async def _plan(server: PatchedServer, slot: int, *ops: dict[str, Any]) -> dict[str, Any]:
    body = {"epoch": server.slots[slot].epoch, "ops": ops, "tenant": "", "session": "s"}
    return await server.call("POST", f"/slots/{slot}?action=block-plan", body)


def test_tokens_are_decoded_without_an_answer_and_counted_for_their_session() -> None:
    async def work() -> None:
        server = PatchedServer(Limits(1, 512, 1024, 4096), _SCALE)
        text = _words(0, 300)
        await _served(server, _ask(text, epoch=1))
        save = {"op": "save", "name": "b", "p0": 0, "p1": 64}
        epoch = (await _plan(server, 0, save))["epoch"]
        tokens = tokenized(text, False)[:200].tolist()
        body = {"prompt": tokens, "n_predict": 0, "id_slot": 0, "evoke": {"epoch": epoch}}
        answer = await server.call("POST", "/completion", body)
        assert answer["timings"]["evoke"]["decoded"] == 1  # the last token always is
        assert server.slots[0].n_rows == len(server.slots[0].tokens) == 200
        await server.call("POST", "/completion", body | {"prompt": tokens[:100] + tokens[:50]})
        assert server.prefilled == {"s": 51}

    run(work())


def test_a_plan_keeps_the_copies_that_it_loads() -> None:
    """Copies that it makes displace others, or are refused."""

    async def work() -> None:
        server = PatchedServer(Limits(1, 512, 1024, 192), _SCALE)
        text = _words(0, 300)
        await _served(server, _ask(text, epoch=1))
        for name, start in (("a", 0), ("b", 64), ("c", 128)):
            await _plan(server, 0, {"op": "save", "name": name, "p0": start, "p1": start + 64})
        await _plan(server, 0, {"op": "evict", "p0": 0, "p1": 64})
        save = {"op": "save", "name": "d", "p0": 192, "p1": 256}
        await _plan(server, 0, save, {"op": "load", "names": ["a"]})
        assert server.pool.names.keys() == {"a", "c", "d"}
        await _plan(server, 0, {"op": "evict", "p0": 0, "p1": 64})
        with pytest.raises(UpstreamRejected, match="ram_budget"):
            large = {"op": "save", "name": "e", "p0": 64, "p1": 256}
            await _plan(server, 0, large, {"op": "load", "names": ["a"]})
        assert server.pool.names.keys() == {"a", "c", "d"}

    run(work())


def test_rows_leave_and_come_back_and_their_tokens_are_counted_once() -> None:
    async def work() -> None:
        server = PatchedServer(Limits(1, 512, 1024, 4096), _SCALE)
        text = _words(0, 300)
        first = await _served(server, _ask(text, epoch=1))
        assert (first["decoded"], first["n_resident"]) == (301, 303)
        save = {"op": "save", "name": "b", "p0": 64, "p1": 128}
        await _plan(server, 0, save, {"op": "evict", "p0": 64, "p1": 192})
        again = await _served(server, _ask(text + " " + _words(400, 9), epoch=1))
        # The answer was another text, so that the prompt continues at 300.
        assert [again[key] for key in ("resident_before", "omitted", "decoded")] == [172, 128, 10]
        await _plan(server, 0, {"op": "load", "names": ["b"]})
        last = await _served(server, _ask(text + " " + _words(500, 9), epoch=1))
        assert (last["recovered"], last["omitted"]) == (64, 64)
        assert sum(last[k] for k in ("decoded", "recovered", "resident_before", "omitted")) == 310
        with pytest.raises(UpstreamRejected, match="already_resident"):
            await _plan(server, 0, {"op": "load", "names": ["b"]})
        with pytest.raises(UpstreamRejected, match="unknown_block"):
            await _plan(server, 0, {"op": "load", "names": ["c"]})

    run(work())


def test_a_refused_plan_changes_nothing() -> None:
    async def work() -> None:
        server = PatchedServer(Limits(1, 512, 1024, 4096), _SCALE)
        await _served(server, _ask(_words(0, 300), epoch=1))
        before = server.slots[0].rows.copy()
        evict = {"op": "evict", "p0": 0, "p1": 64}
        with pytest.raises(UpstreamRejected):
            await _plan(server, 0, evict, {"op": "load", "names": ["none"]})
        assert np.array_equal(server.slots[0].rows, before)
        with pytest.raises(UpstreamRejected, match="stale_epoch"):
            body = {"epoch": 99, "ops": [evict]}
            await server.call("POST", "/slots/0?action=block-plan", body)

    run(work())


def test_the_budget_holds_and_evicts_in_the_given_order() -> None:
    async def work() -> None:
        server = PatchedServer(Limits(1, 512, 4096, 4096), _SCALE)
        await _served(server, _ask(_words(0, 199), epoch=1))
        stream = {"op": "stream", "budget": 256, "sink": 16, "recent": 64, "block": 64}
        order = [{"name": "first", "p0": 100, "p1": 128}]
        await _plan(server, 0, stream | {"protect": [[64, 100]], "order": order})
        found = await _served(server, _ask(_words(0, 900), epoch=1))
        assert found["n_resident_peak"] == 256 and found["marker"] == "ok"
        assert found["auto_evicted"][0] == (100, 128, "first")
        rows = server.slots[0].rows
        assert rows[:16].all() and rows[64:100].all() and not rows[100:500].any()
        assert server.slots[0].n_whole == 16 and "first" in server.pool.names

    run(work())


def test_only_whole_rows_are_shared_with_another_session() -> None:
    async def work() -> None:
        server = PatchedServer(Limits(2, 512, 4096, 4096), _SCALE)
        text = _words(0, 300)
        await _served(server, _ask(text, epoch=1))
        tokens = tokenized(text, False)
        blocks = [{"name": f"n{at}", "p0": at, "p1": at + 64} for at in (0, 64, 128)]
        body = {"tokens": tokens.tolist(), "blocks": blocks, "tenant": "", "session": "other"}
        share = "/slots/1?action=block-share"
        found = await server.call("POST", share, body)
        assert [it["from"] for it in found["blocks"]] == ["slot"] * 3
        adopt = {"tokens": tokens[:192].tolist(), "names": ["n0", "n64", "n128"], "epoch": 1}
        await server.call("POST", "/slots/1?action=block-adopt", adopt | {"session": "other"})
        taken = await _served(server, _ask(text, 1, server.slots[1].epoch))
        assert (taken["recovered"], taken["decoded"]) == (192, 109)
        # What is decoded behind a missing row is not whole.
        await _plan(server, 0, {"op": "evict", "p0": 0, "p1": 64})
        await _served(server, _ask(text + " " + _words(400, 200), epoch=1))
        longer = tokenized(text + " " + _words(400, 200), False)
        body |= {"tokens": longer.tolist(), "session": "third"}
        body |= {"blocks": [{"name": "late", "p0": 320, "p1": 384}]}
        assert not (await server.call("POST", share, body))["blocks"]

    run(work())


def test_copies_move_to_disk_and_the_oldest_are_lost() -> None:
    def key(number: int) -> tuple[int, int, int, int]:
        return number * 64, number * 64 + 64, number, 0

    pool = BlockPool(ram=128, disk=64)
    for number in range(4):
        assert pool.add(key(number), f"b{number}", "s")
    assert not pool.add(key(3), "again", "s")
    assert (pool.ram_used, pool.disk_used, pool.n_lost) == (128, 64, 64)
    assert sorted(pool.names) == ["again", "b1", "b2", "b3"]
    assert pool.read([pool.names["b1"]]) == 64 and pool.names["b2"].on_disk
    with pytest.raises(PoolFull):
        pool.add((0, 129, 9, 0), "large", "s")
    for name in ("b1", "b2", "b3", "again"):
        assert pool.drop(name)
    assert (pool.ram_used, pool.disk_used, len(pool.copies)) == (0, 0, 0)


def test_equal_prefixes_have_equal_hashes() -> None:
    tokens = np.arange(100, dtype=np.int32)
    other = tokens.copy()
    other[50] = 7
    same = sums_of(tokens) == sums_of(other)
    assert same[:51].all() and not same[51:].any()


def _conversation(name: str, start: int, n: int = 6) -> Agent:
    prompts = [list(range(start, start + 12 + 4 * at)) for at in range(n)]
    requests = [Request(2.0, 64, np.array(ids, np.int64)) for ids in prompts]
    return Agent(name, 256, 64, requests)


def _replay(
    limits: Limits, agents: list[Agent], n_users: int, scale: Scale = _SMALL
) -> tuple[list[Served], PatchedServer]:
    server = PatchedServer(limits, scale)

    async def work() -> list[Served]:
        async with proxied(server, {"embedder.model": "none"}, DEFAULT_COSTS) as arm:
            return await Replay(agents, scale).run(arm, n_users)

    return run(work()), server


def test_the_engine_decodes_each_token_once_although_slots_change_hands() -> None:
    agents = [_conversation(f"c{i}", 1000 * i) for i in range(3)]
    record, server = _replay(Limits(1, 400, 4096, 1 << 20), agents, 3)
    assert len(record) == 18 and not server.refusals
    assert sum(each.repeated for each in record) <= 18 * 16
    assert server.peak <= 400
    assert any(each.counts.omitted for each in record)


def test_sub_agents_that_start_together_decode_their_prefix_once() -> None:
    subs = [_conversation("c", 5000, 1) for _ in range(4)]
    for at, sub in enumerate(subs):
        sub.requests[0].ids[10:] = np.arange(9000 + 10 * at, 9002 + 10 * at)
    parent = _conversation("c", 0, 2)
    requests = [parent.requests[0], Request(1.0, 64, parent.requests[1].ids, tuple(subs))]
    agent = Agent("c", 256, 64, requests)
    record, _ = _replay(Limits(4, 4096, 8192, 1 << 20), [agent], 1, _SCALE)
    decoded = [each.counts.decoded for each in record if "/" in each.label]
    # 10 of their 12 blocks are equal.
    assert len(decoded) == 4 and sum(decoded) <= (10 + 4 * 2) * 64 + 4 * 8


def test_virtual_time_does_not_pass_while_threads_work() -> None:
    async def work() -> float:
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)
        await asyncio.sleep(100.0)
        return loop.time()

    assert run(work()) == 100.0
