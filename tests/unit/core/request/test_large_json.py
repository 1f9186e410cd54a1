"""Large JSON texts: read and edited with the same result as small ones, in short steps."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from typing import Any

import orjson
import pytest

from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.request import large_json
from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.engine.gateway import ForwardedBody
from evoke_proxy.engine.parsing.body_checks import check_body
from evoke_proxy.engine.parsing.body_parsing import parse_object
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedRequest
from evoke_proxy.engine.server.turn import PreparedTurn
from evoke_proxy.errors import RequestError

MIB = 1 << 20
PIECES = (
    *("a", " b", "é", "中", "😀", '\\"', "\\\\", "\\n", "\\u0041", "\\u4e2d", "\\ud83d\\ude00"),
    *("\\\\u0041", "\\\\\\\\", '\\\\\\"', "{", "[,:]", "\\\\\\u00e9"),
)


def _content(rng: random.Random, n_chars: int) -> str:
    pieces = [rng.choice(PIECES) * rng.choice((1, 1, 2, 50)) for _ in range(n_chars // 40)]
    return "".join(pieces)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every text large and every boundary occur."""
    monkeypatch.setattr(large_json, "LARGE_BYTES", 64)
    monkeypatch.setattr("evoke_proxy.core.request.json_edit.LARGE_BYTES", 64)
    monkeypatch.setattr(large_json, "_LONG_BYTES", 40)
    monkeypatch.setattr(large_json, "_PIECE_BYTES", 97)


@pytest.mark.parametrize("seed", range(60))
def test_large_texts_are_read_and_edited_like_small_ones(seed: int, small_steps: None) -> None:
    rng = random.Random(seed)
    text = ",".join(
        f'{{"role":"user","content":"{_content(rng, 600)}","evoke_name":"{_content(rng, 90)}"}}'
        for _ in range(rng.randint(1, 6))
    )
    key = _content(rng, 200)
    body = f'{{"messages":[{text}],"{key}":"{_content(rng, 300)}","evoke":false}}'.encode()
    expected = orjson.loads(body)
    assert parse_object(body) == expected
    edited = edit_top_level(body, {"id_slot": b"3"}, {"evoke"}, {"evoke_name"})
    del expected["evoke"]
    for message in expected["messages"]:
        del message["evoke_name"]
    assert orjson.loads(edited) == expected | {"id_slot": 3}
    assert edit_top_level(body, {}, ()) == body


@pytest.mark.parametrize("broken", [b"\xff", b"\n", b"\\x", b"\\u12"])
def test_an_invalid_long_string_is_refused(broken: bytes) -> None:
    body = b'{"a":"' + b"a" * (2 * MIB) + broken + b'"}'
    with pytest.raises(RequestError):
        parse_object(body)


def test_a_lone_surrogate_is_read_as_in_a_small_text() -> None:
    text = "\\ud83d" * (MIB // 2) + "\\ud83d\\ude00"
    assert parse_object(f'{{"a":"{text}"}}'.encode()) == json.loads(f'{{"a":"{text}"}}')


def test_of_a_huge_string_only_both_ends_are_read() -> None:
    text = "begin " + "a" * (20 * MIB) + " end"
    found = parse_object(f'{{"a":"{text}","b":"{"b" * (4 * MIB)}"}}'.encode())
    assert found["b"] == "b" * (4 * MIB)
    assert found["a"].startswith("begin a") and found["a"].endswith("a end")
    assert large_json.HUGE_BYTES <= len(found["a"]) <= large_json.HUGE_BYTES + MIB


@pytest.mark.parametrize("hidden", ["[" * 200 + "]" * 200, "[" * 50_000])
def test_deep_nesting_in_the_middle_of_huge_arguments_is_refused(hidden: str) -> None:
    arguments = json.dumps("a" * (10 * MIB) + hidden + "a" * (10 * MIB))
    call = f'{{"type":"function","function":{{"name":"f","arguments":{arguments}}}}}'
    body = f'{{"messages":[{{"role":"assistant","tool_calls":[{call}]}}]}}'.encode()
    with pytest.raises(RequestError, match="arguments"):
        check_body(body, "application/json", LimitsConfig())


def test_the_internal_marker_in_a_clients_text_is_read_as_text() -> None:
    mark = large_json._MARKER + "00000000"
    body = orjson.dumps({"a": "x" * (2 * MIB), "b": mark, mark: 1})
    assert parse_object(body) == orjson.loads(body)
    escaped = body.replace(mark.encode(), f"\\u0065{mark[1:]}".encode())
    assert parse_object(escaped) == orjson.loads(escaped)


def test_a_large_body_is_not_copied_when_members_are_inserted() -> None:
    body = b'{"messages":[{"role":"user","content":"' + b"a" * (2 * MIB) + b'"}]}'
    incoming = IncomingRequest(dialect="chat", body=body, headers={})
    request = ParsedRequest(incoming=incoming, tenant="", body=body)
    no_calls: Any = None
    turn = PreparedTurn(request=request, calls=no_calls, forwarded=ForwardedBody(body))
    parts = asyncio.run(turn.with_members({"id_slot": b"3"}, {"messages"})).content
    assert any(isinstance(part, memoryview) and part.obj is body for part in parts)
    expected = edit_top_level(body, {"id_slot": b"3"}, ())
    assert b"".join(map(bytes, parts)) == expected
    edited = asyncio.run(turn.with_members({"id_slot": b"4"}, {"messages", "id_slot"}))
    assert edited.content == edit_top_level(body, {"id_slot": b"4"}, ())


def test_many_strings_are_cut_out_of_a_large_text() -> None:
    body = b'{"a":[%s]}' % b",".join([b'"%s"' % (b"a" * 16_000)] * 4000)
    assert len(large_json.cut_long_strings(body).rest) < large_json.LARGE_BYTES
    assert parse_object(body) == orjson.loads(body)


@pytest.mark.parametrize("unit", ["a", "中", "\\u4e2d", "\\n", "\\\\"])
def test_other_threads_run_while_a_text_of_64_mib_is_read(unit: str) -> None:
    n_units = 64 * MIB // len(unit.encode())
    body = f'{{"messages":[{{"role":"user","content":"{unit * n_units}"}}]}}'.encode()
    longest = min(_longest_step(body) for _ in range(3))
    assert longest < 0.015, longest


def _longest_step(body: bytes) -> float:
    """The longest CPU time of the reading thread between two turns of this one, in seconds."""
    reader: list[int] = []
    ended: list[bool] = []
    last = threading.Event()

    def read() -> None:
        reader.append(time.pthread_getcpuclockid(threading.get_ident()))
        parse_object(body)
        ended.append(True)
        last.wait()

    thread = threading.Thread(target=read)
    thread.start()
    longest = before = 0.0
    while not ended:
        if reader:
            now = time.clock_gettime(reader[0])
            longest, before = max(longest, now - before), now
        time.sleep(0.0005)
    last.set()
    thread.join()
    return longest
