"""Long texts and names of any kind, anywhere in a request, take the proxy little work and memory.

The server computes nothing, and counts no tokens for names and for arguments of tool calls: as a
model does whose template leaves them out. What the proxy does for a request is measured as its
processor time, which other load changes little, its memory, and the size of its records.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from harness import ask

from bench.llama import Proxy, cpu_s, process, proxied, rss_mib, settle
from bench.silent_llama import silent_llama
from evoke_proxy.adapters.snapshot_files import INDEX
from evoke_proxy.adapters.snapshot_index import Record, SnapshotIndex

N_CHARS = 200_000
# Several times what is measured on a slow machine, and far below what one of these texts took when
# each block of a message had all of its names.
MAX_CPU_S, MAX_GROWTH_MIB, MAX_RECORD_MIB = 5.0, 150, 2
_DRAWN = random.Random(3)
_NOISE = "".join(_DRAWN.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=N_CHARS))
TEXTS = {
    "letters": "a" * N_CHARS,
    "noise": _NOISE,
    "lines": "\n" * N_CHARS,
    "questions": "Who is he? " * (N_CHARS // 11),
    "rules": "You should always answer in French. " * (N_CHARS // 36),
    "names": "my name is Bob. " * (N_CHARS // 16),
    "labels": "User: a\n" * (N_CHARS // 8),
    "paths": "a/b_c-d1.txt " * (N_CHARS // 13),
    "unspaced": "中。" * (N_CHARS // 2),
}
Messages = list[dict[str, Any]]


def _call(id: str, name: str, arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def _question(text: str, _: str = "") -> Messages:
    return [{"role": "user", "content": text}]


def _answer(text: str, first: str) -> Messages:
    said = {"role": "assistant", "content": text}
    return [*_question(first), said, *_question("And what about him?")]


def _path(text: str, first: str) -> Messages:
    """A file whose path is this text, and a long result."""
    call = {"role": "assistant", "content": "", "tool_calls": [_call("1", "read", {"path": text})]}
    return [*_question(first), call, {"role": "tool", "tool_call_id": "1", "content": text}]


def _names(text: str, first: str) -> Messages:
    """Names of this text wherever a message can have one."""
    words = "Some words of an answer. " * 2000
    call = {"role": "assistant", "content": words, "tool_calls": [_call(f"c{text}", text, {})]}
    result = {"role": "tool", "tool_call_id": f"c{text}", "name": text, "content": words}
    return [{"role": "user", "content": first, "name": text}, call, result]


def _calls(text: str, first: str) -> Messages:
    """Thousands of calls in one long message, each of another file."""
    calls = [_call(f"c{i}", "read", {"path": f"{text[:20]}/{i}"}) for i in range(3000)]
    words = "Some words of an answer. " * 4000
    said = {"role": "assistant", "content": words, "tool_calls": calls}
    return [*_question(first), said, *_question("And what about him?")]


def _results(text: str, first: str) -> Messages:
    """Hundreds of results that name one call with long arguments."""
    arguments = {"path": "a.py", "content": text, "x": [0] * 12_000}
    call = {"role": "assistant", "content": "", "tool_calls": [_call("1", "edit", arguments)]}
    result = {"role": "tool", "tool_call_id": "1", "content": "Done."}
    return [*_question(first), call, *[result] * 800]


PLACES: dict[str, Callable[[str, str], Messages]] = {
    "question": _question, "answer": _answer, "path": _path, "names": _names, "calls": _calls,
    "results": _results,
}  # fmt: skip


def _new_records(folder: Path, known: set[str]) -> list[Record]:
    """The records of sessions that are not known, once one is written."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(sqlite3.Error), closing(SnapshotIndex(folder / INDEX)) as index:
            if new := [record for record in index.records() if record.id not in known]:
                known.update(record.id for record in new)
                return new
        time.sleep(0.1)
    raise AssertionError("no session was recorded")


@pytest.fixture(scope="module")
def known() -> set[str]:
    return set()


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def proxy(records: Path) -> Iterator[Proxy]:
    snapshots = {"directory": str(records), "min_free_mib": 0}
    settings = {"snapshots": snapshots, "policy": {"budget": 8192}}
    with silent_llama() as server, proxied(server, config=settings) as running:
        yield running


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_long_text_takes_little_work_and_memory(
    place: str, text: str, proxy: Proxy, records: Path, known: set[str]
) -> None:
    folder = process(proxy.port)
    used, resident = cpu_s(folder), rss_mib(proxy.pid)
    body = json.dumps({"messages": PLACES[place](TEXTS[text], f"Hi, {place} {text}.")}).encode()
    headers = {"Content-Type": "application/json", "X-Evoke-Session": f"{place}-{text}"}
    answer = ask(proxy.port, "POST", "/v1/chat/completions", body, headers)
    assert answer.status == 200, answer.body[:300]
    written = _new_records(records, known)
    settle(proxy.port)
    assert cpu_s(folder) - used < MAX_CPU_S
    assert rss_mib(proxy.pid) - resident < MAX_GROWTH_MIB
    assert max(len(record.packed) for record in written) < MAX_RECORD_MIB << 20
