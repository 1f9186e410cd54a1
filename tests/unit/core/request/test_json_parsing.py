"""Parsing and writing JSON in pieces: equal to a parser's result, and every step is short."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from evoke_proxy.core.request import json_parsing
from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.engine.parsing.body_parsing import parse_object
from evoke_proxy.errors import RequestError

MIB = 1 << 20
LONGEST_S = 0.02
SCALARS = (1, 2.5, -3, None, True, "a", 'q"\\', "[,]{}:", "\\", "é€😀", "", "word " * 9)
KEYS = ("a", "b", '"', "\\", 'c"\\"', "[,]{", "é")
BREAKS = (b"", b",", b"]", b"}", b"[", b"{", b'"', b"\\", b":", b" " * 90, b"1", b"\\ud83d")


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8)
    if depth <= 0 or kind < 3:
        return rng.choice(SCALARS)
    if kind < 6:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(6))]
    names = (rng.choice((*KEYS, f"key {rng.random()}")) for _ in range(rng.randrange(6)))
    return {name: _value(rng, depth - 1) for name in names}


def _text(rng: random.Random) -> bytes:
    """A JSON text, with repeated keys in some cases, and invalid in about half of them."""
    indent, plain = rng.choice((None, None, 1)), rng.random() < 0.5
    text = json.dumps(_value(rng, 6), indent=indent, ensure_ascii=plain).encode()
    if rng.random() < 0.3:
        text = text.replace(b'"b":', b'"a":')
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(BREAKS) + text[at + rng.randrange(2) :]
    return text


def _outcome(parse: Callable[[bytes], Any], text: bytes) -> str:
    try:
        return repr(parse(text))
    except (ValueError, RequestError):
        return "refused"


def _parse_pieces(text: bytes) -> Any:
    return json_parsing.parse_in_pieces(text, orjson.loads)


def _parse_whole(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return json.loads(text.decode())


@pytest.mark.parametrize("piece_bytes", [3, 7, 13, 40, 64])
def test_parsing_in_pieces_equals_parsing_at_once(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_parsing, "PIECE_BYTES", piece_bytes)
    refused = 0
    for seed in range(1500):
        text = _text(random.Random(f"{piece_bytes} {seed}"))
        expected = _outcome(_parse_whole, text)
        assert _outcome(_parse_pieces, text) == expected, text
        refused += expected == "refused"
    assert 100 < refused < 1000


def test_writing_in_pieces_equals_a_serialiser() -> None:
    for seed in range(300):
        value = _value(random.Random(seed), 6)
        assert json_parsing.write_in_pieces(value, orjson.dumps) == orjson.dumps(value)


def _list_of(item: bytes, n: int) -> bytes:
    return b'{"id_slot":1,"a":[%s]}' % b",".join([item] * n)


BODIES: dict[str, Callable[[], bytes]] = {
    "strings of 100 bytes": lambda: _list_of(b'"%s"' % (b"a" * 100), 500_000),
    "strings of 1,000 bytes": lambda: _list_of(b'"%s"' % (b"a" * 1000), 60_000),
    "strings of escapes": lambda: _list_of(b'"%s"' % (b"\\u4e2d" * 16), 500_000),
    "small lists": lambda: _list_of(b'["%s","","","",""]' % (b"a" * 600), 99_000),
    "small objects": lambda: _list_of(b'{"%s":"%s"}' % (b"k" * 300, b"a" * 300), 49_000),
    "white space": lambda: b'{"a":[1,%s2]}' % (b" " * (60 * MIB)),
    "broken at its end": lambda: _list_of(b'"%s"' % (b"a" * 100), 500_000)[:-1] + b"]",
}


@pytest.mark.usefixtures("no_full_collections")
@pytest.mark.parametrize("name", BODIES)
def test_other_threads_run_while_many_short_strings_are_parsed(name: str) -> None:
    body = BODIES[name]()
    longest = _least_longest_step(lambda: parse_object(body), LONGEST_S)
    assert longest < LONGEST_S, longest


@pytest.mark.usefixtures("no_full_collections")
def test_other_threads_run_while_a_body_of_many_strings_is_edited() -> None:
    body = BODIES["strings of 100 bytes"]()
    # Decoding, joining and encoding the whole text are one step each; how long a copy of it takes
    # depends on the machine.
    limit_s = LONGEST_S + 2 * max(_seconds_to_copy(body.decode()) for _ in range(3))
    longest = _least_longest_step(lambda: edit_top_level(body, {"id_slot": b"2"}, ()), limit_s)
    assert longest < limit_s, longest


def _seconds_to_copy(text: str) -> float:
    """The CPU time of joining two parts of a text into a new one."""
    parts = (text[:1000], text[1000:])
    start = time.thread_time()
    "".join(parts)
    return time.thread_time() - start


def _least_longest_step(work: Callable[[], object], limit_s: float) -> float:
    """The longest step of the best of up to 20 runs, which end with the first below the limit.

    A busy machine may keep this thread from running when the other gives way.
    """
    found = math.inf
    for _ in range(20):
        found = min(found, _longest_step(work))
        if found < limit_s:
            break
    return found


def _longest_step(work: Callable[[], object]) -> float:
    """The longest CPU time of the working thread between two turns of this one, in seconds."""
    worker: list[int] = []
    ended: list[bool] = []
    last = threading.Event()

    def run() -> None:
        worker.append(time.pthread_getcpuclockid(threading.get_ident()))
        try:
            result = work()
        except RequestError as error:
            result = error
        ended.append(True)
        last.wait()
        del result

    thread = threading.Thread(target=run)
    thread.start()
    longest = before = 0.0
    while not ended:
        if worker:
            now = time.clock_gettime(worker[0])
            longest, before = max(longest, now - before), now
        time.sleep(0.0005)
    last.set()
    thread.join()
    return longest


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": [1, 2, {"b": "{,}"}]}', bytes(range(256)) * 3])
def test_a_byte_is_counted_as_bytes_count_does(body: bytes) -> None:
    for byte in (b"{", b"[", b",", b'"', b"\xff"):
        assert json_parsing.count_byte(body, byte) == body.count(byte)
