"""The block calls of a patched server: an `attention` call that is too much work is split."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.errors import PlanRefused

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
