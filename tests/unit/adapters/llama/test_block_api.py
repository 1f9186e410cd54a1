"""The block calls of a patched server: lists of saved blocks, and calls that are split."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from thread_steps import longest_step

from evoke_proxy.adapters.llama import block_api
from evoke_proxy.adapters.llama.block_api import BlockApi, PlanCall, copies_in, encode, of_session
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Evict, Plan
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.errors import PlanRefused, UpstreamProtocolError

ALLOWED = 100


class Server:
    """Refuses `attention` calls over more than ALLOWED positions; the data are range starts."""

    def __init__(self) -> None:
        self.calls: list[Mapping[str, Any]] = []

    async def call(
        self, _method: str, _target: str, body: Mapping[str, Any], _options: object
    ) -> dict[str, Any]:
        self.calls.append(body)
        answer: dict[str, Any] = {"mass": [1.0] * len(body["ranges"]), "layers": [0]}
        for key in ("bounds", "products"):
            if key not in body:
                continue
            if sum(p1 - p0 for p0, p1 in body[key]) > ALLOWED:
                raise PlanRefused("too_much_work")
            data = np.array([p0 for p0, _ in body[key]], "<f4").tobytes()
            known = [True] * len(body[key])
            encoded = base64.b64encode(data).decode()
            answer[f"key_{key}"] = {"layers": [0], "known": known, "data": encoded}
        return answer


def call_attention(key: str, spans: list[list[int]]) -> tuple[Server, dict[str, Any]]:
    server = Server()
    client: Any = server
    body = {"ranges": [[0, 4]] * 3, key: spans, "tenant": "t"}
    return server, asyncio.run(BlockApi(client).attention(0, body, key))


def values(part: Mapping[str, Any]) -> list[float]:
    floats: list[float] = np.frombuffer(base64.b64decode(part["data"]), "<f4").tolist()
    return floats


@pytest.mark.parametrize("key", ["bounds", "products"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 57])
def test_the_joined_answer_equals_that_of_one_call(key: str, count: int) -> None:
    spans = [[40 * i, 40 * i + 40] for i in range(count)]
    server, answer = call_attention(key, spans)
    assert answer["mass"] == [1.0] * 3 and answer[f"key_{key}"]["layers"] == [0]
    assert answer[f"key_{key}"]["known"] == [True] * count
    assert values(answer[f"key_{key}"]) == [span[0] for span in spans]
    assert len(server.calls) <= count + 8
    assert {call["tenant"] for call in server.calls} == {"t"}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_range_that_is_too_long_for_one_call_is_unknown(place: int) -> None:
    spans = [[0, 40], [40, 80]]
    spans.insert(place, [1000, 2000])
    _, answer = call_attention("products", spans)
    expected = [span[0] != 1000 for span in spans]
    assert answer["mass"] == [1.0] * 3
    assert answer["key_products"]["known"] == expected
    assert values(answer["key_products"]) == [0.0, 40.0]


def test_the_rest_of_the_answer_is_kept_when_every_range_is_too_long() -> None:
    server, answer = call_attention("bounds", [[0, 500], [500, 900]])
    assert answer["mass"] == [1.0] * 3
    assert answer["key_bounds"].get("known", []) == [False, False]
    assert len(server.calls) <= 8


def listed(n_copies: int) -> list[dict[str, Any]]:
    return [{"name": f"s{i % 2}/{i}", "p0": i, "p1": i + 1} for i in range(n_copies)]


def slot_with(copies: list[Any], session: str) -> dict[str, Any]:
    class Listing:
        async def call(self, *_: object) -> dict[str, Any]:
            return {"id": 0, "blocks": copies}

    client: Any = Listing()
    return asyncio.run(BlockApi(client).slot(0, "t", keep=of_session(session)))


@pytest.mark.parametrize("n_copies", [0, 10, 5000])
def test_only_the_saved_blocks_of_a_session_are_listed_in_their_order(n_copies: int) -> None:
    answer = slot_with(listed(n_copies), "s1")
    assert answer == {"id": 0, "blocks": listed(n_copies)[1::2]}
    assert list(copies_in(answer)) == [f"s1/{i}" for i in range(1, n_copies, 2)]


@pytest.mark.parametrize("copy", [{"p0": 0}, "s1/0", None])
def test_a_saved_block_without_a_name_is_not_overlooked(copy: Any) -> None:
    with pytest.raises(UpstreamProtocolError):
        copies_in(slot_with([*listed(4), copy], "s1"))


def test_other_threads_run_while_saved_blocks_are_selected() -> None:
    selected: list[Any] = []

    def select() -> None:
        selected.append(block_api._select(copies, lambda label: label.startswith("s1/")))

    steps = []
    for _ in range(3):  # in any one of them this thread may lack a processor
        copies = listed(200_000)
        steps.append(longest_step(select))
    assert min(steps) < 0.02 and not copies


@pytest.mark.parametrize("n_blocks", [3, 5000])
def test_the_operations_of_a_plan_are_sent_as_they_are(n_blocks: int) -> None:
    sent: list[bytes] = []

    class Running:
        async def call(self, _method: str, _target: str, body: bytes, _: object) -> dict[str, Any]:
            sent.append(body)
            return {"epoch": 8}

    client: Any = Running()
    plan = Plan(evicts=tuple(Evict(Span(i, i + 1)) for i in range(n_blocks)), reuse=4)
    view = SlotView(id=2, epoch=7, n_tokens=9, resident=(), n_free=0, n_common=0)
    more = [{"op": "probe"}]
    call = PlanCall(plan, view, {"tenant": "t", "session": "s"}, more_ops=more)
    assert asyncio.run(BlockApi(client).run_plan(call)) == 8
    encoded = asyncio.run(encode(call))
    again = replace(call, plan=Plan.EMPTY, more_ops=(), encoded=encoded)
    assert asyncio.run(BlockApi(client).run_plan(again)) == 8
    body, same = map(json.loads, sent)
    assert same == body
    assert body == {"epoch": 7, "ops": [*plan.ops(), *more], "tenant": "t", "session": "s"}
