"""Stages of a request: the forwarded body, and what a trace measures."""

from __future__ import annotations

import asyncio
import json

import pytest
import virtual_time

from evoke_proxy.engine.gateway import ForwardedBody, RequestTrace
from evoke_proxy.errors import UpstreamError


def test_members_are_inserted_at_the_front_of_the_body() -> None:
    assert ForwardedBody(b'{"a":1}').content == b'{"a":1}'
    content = ForwardedBody(b'{"a":1}', {"id_slot": b"3"}).content
    data = content if isinstance(content, bytes) else b"".join(content)
    assert list(json.loads(data).items()) == [("id_slot", 3), ("a", 1)]


def test_waits_add_up_and_steps_are_recorded_only_on_request() -> None:
    quiet, full = RequestTrace(1.0), RequestTrace(1.0, records_steps=True)
    for trace in (quiet, full):
        trace.add_call("render", 1.0, 1.5)
        trace.add_call("render", 2.0, 2.25)
        trace.add_wait("slot", 3.0)
        assert trace.waits == {"render": 0.75, "slot": 3.0}
    assert quiet.steps is None
    assert full.steps == [("render", 1.0, 1.5), ("render", 2.0, 2.25)]


def test_one_request_counts_one_failure_for_each_attempt() -> None:
    async def counted() -> list[bool]:
        trace = RequestTrace(0.0)
        errors = [UpstreamError("x") for _ in range(3)]
        trace.note_failure(errors[0])
        trace.note_failure(errors[1])
        trace.begin_attempt()
        trace.note_failure(errors[2])
        return [error.counted for error in errors]

    assert asyncio.run(counted()) == [False, True, False]


def test_another_attempt_is_measured_from_its_begin_and_the_arrival_stays() -> None:
    async def work() -> None:
        trace = RequestTrace(0.0)
        trace.add_wait("slot", 3.0)
        trace.stage, trace.own_s = "plan", 0.2
        await asyncio.sleep(5)
        trace.begin_attempt()
        assert (trace.arrived_at, trace.attempted_at) == (0.0, pytest.approx(5))
        assert (trace.stage, trace.own_s, trace.waits) == ("render", None, {})

    virtual_time.run(work())


def test_a_wait_is_published_from_its_begin_to_its_end_and_inner_ones_change_nothing() -> None:
    async def work() -> None:
        trace = RequestTrace(0.0)
        await asyncio.sleep(2)
        with trace.waiting():
            assert trace.waiting_since == pytest.approx(2) and trace.wait_changed.is_set()
            trace.wait_changed.clear()
            with trace.waiting():
                await asyncio.sleep(1)
            assert trace.waiting_since == pytest.approx(2) and not trace.wait_changed.is_set()
        assert trace.waiting_since is None and trace.wait_changed.is_set()

    virtual_time.run(work())


def test_work_beside_the_rendering_is_summed_also_when_it_fails() -> None:
    async def work() -> float:
        trace = RequestTrace(0.0)
        with trace.beside():
            await asyncio.sleep(1)
        with pytest.raises(ValueError), trace.beside():
            await asyncio.sleep(2)
            raise ValueError
        return trace.beside_s

    assert virtual_time.run(work()) == pytest.approx(3)
