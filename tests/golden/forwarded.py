"""The bytes that llama-server receives for each request."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "blackbox"))

import stack  # noqa: E402

from . import recording  # noqa: E402
from .requests import (  # noqa: E402
    BODIES,
    CHAT,
    COMPLETIONS,
    COUNTS,
    DRIFTING,
    HEADERS,
    MESSAGES,
    PLAIN,
    RESPONSES,
)

# A slot, the mark of its epoch and its rendering, which are different in every run.
_VOLATILE = (
    (re.compile(rb'("id_slot": ?)-?\d+'), rb"\1N"),
    (re.compile(rb'("epoch": ?)\d+'), rb"\1N"),
    (re.compile(rb'("rendering": ?)"[0-9a-f]{32}"'), rb"\1R"),
    (re.compile(rb"(?m)^(Host: |Content-Length: )[^\r\n]*"), rb"\1*"),
)
_GENERATED = re.compile(rb"(?m)^(X-Request-Id: )(?!golden)[^\r\n]*")


def lines() -> list[str]:
    """Every mode, one after the other."""
    with stack.forked_proxies():
        return [*_passthrough(), *_with_keys(), *_patched(), *_snapshots(), *_normalised()]


def _shown(name: str, received: list[recording.Received]) -> Iterator[str]:
    yield f"== {name}"
    if not received:
        yield "nothing is sent"
    for one in received:
        raw = one.head + b"\r\n\r\n" + one.body
        for pattern, instead in _VOLATILE:
            raw = pattern.sub(instead, raw)
        raw = _GENERATED.sub(rb"\1*", raw)
        head, _, body = raw.partition(b"\r\n\r\n")
        yield from (line.decode("latin-1") for line in head.split(b"\r\n"))
        yield ""
        yield repr(body)[2:-1]


def _dialects(
    title: str, proxy: stack.Process, recorder: recording.Recorder, only: tuple[str, ...] = ()
) -> Iterator[str]:
    for kind, bodies in BODIES.items():
        for path, body in bodies.items():
            if not only or kind in only:
                recorder.taken()
                answer = stack.request(proxy.port, "POST", path, body)
                name = f"{title}: {kind} POST {path} -> {answer.status}"
                yield from _shown(name, recorder.taken(path))


def _passthrough() -> Iterator[str]:
    title = "passthrough"
    with recording.recorder() as recorder, stack.proxy(recorder.port) as proxy:
        stack.wait_until(lambda: recorder.port, "started")
        yield from _dialects(title, proxy, recorder)
        for path in ("/chat/completions", "/responses", *COMPLETIONS, *COUNTS):
            recorder.taken()
            like = CHAT if "chat" in path else RESPONSES if "responses" in path else "/completion"
            body = PLAIN[MESSAGES if "messages" in path else like]
            stack.request(proxy.port, "POST", path, body)
            yield from _shown(f"{title}: POST {path}", recorder.taken(path))
        recorder.taken()
        stack.request(proxy.port, "POST", CHAT, PLAIN[CHAT], HEADERS)
        yield from _shown(f"{title}: with headers", recorder.taken(CHAT))
        stack.request(proxy.port, "POST", "/tokenize", b'{ "content" : "a" }', HEADERS)
        yield from _shown(f"{title}: another path, with headers", recorder.taken("/tokenize"))
        for method, target in _OTHERS:
            recorder.taken()
            answer = stack.request(proxy.port, method, target, None, {"X-Golden": "golden"})
            sent = recorder.taken(target.partition("?")[0])
            yield from _shown(f"{title}: {method} {target} -> {answer.status}", sent)
        broken = b'{"messages": [}'
        answer = stack.request(proxy.port, "POST", CHAT, broken)
        yield from _shown(f"{title}: no JSON -> {answer.status}", recorder.taken(CHAT))


_OTHERS = (
    ("GET", "/props"),
    ("GET", "/slots?fail_on_no_slot=1&a=%2Fb"),
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("GET", "/a%20path/that%2Fnobody/knows?q=1"),
    ("OPTIONS", CHAT),
    ("DELETE", "/anything"),
    ("POST", "/slots/0?action=save"),
)


def _with_keys() -> Iterator[str]:
    """With keys of ours the client's end at the proxy, and llama-server gets the proxy's own."""
    title = "keys"
    with tempfile.TemporaryDirectory() as folder, recording.recorder() as recorder:
        file = Path(folder) / "keys"
        added = stack.command_line("keys", "add", "a", "--tenant", "t", "--file", str(file))
        key = added.stdout.split()[-1]
        settings = {"security__keys_file": file, "upstream__api_key": "ours"}
        with stack.proxy(recorder.port, **settings) as proxy:
            for path in (CHAT, RESPONSES, MESSAGES, "/completion", "/tokenize"):
                recorder.taken()
                given: Mapping[str, str] = {**HEADERS, "Authorization": f"Bearer {key}"}
                body: Any = PLAIN.get(path, b'{"content":"a"}')
                answer = stack.request(proxy.port, "POST", path, body, given)
                sent = recorder.taken(path)
                yield from _shown(f"{title}: POST {path} -> {answer.status}", sent)


def _patched() -> Iterator[str]:
    options = ("-c", "4096", "-np", "1", "--evoke-ram", "16")
    with (
        stack.server(*options, patched=True) as server,
        recording.relay(server.port) as recorder,
    ):
        for title, settings in (
            ("patched, no budget", {}),
            ("patched, budget", {"policy__budget": 512}),
        ):
            with stack.proxy(recorder.port, **settings) as proxy:
                stack.wait_until(
                    lambda port=proxy.admin_port: _ready(port), "the proxy knows the server"
                )
                yield from _dialects(title, proxy, recorder)


def _ready(port: int) -> bool:
    return stack.request(port, "GET", "/evoke/ready").status == 200


def _snapshots() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        options = ("-c", "4096", "-np", "2", "--slot-save-path", folder)
        with (
            stack.server(*options, patched=False) as server,
            recording.relay(server.port) as recorder,
            stack.proxy(
                recorder.port, snapshots__directory=folder, snapshots__min_free_mib=0
            ) as proxy,
        ):
            stack.wait_until(lambda: _ready(proxy.admin_port), "the proxy knows the server")
            yield from _dialects("snapshots", proxy, recorder, ("plain", "odd", "tagged", "off"))


def _normalised() -> Iterator[str]:
    settings = {"normalise__billing": True, "normalise__dates_h": 1.0, "normalise__tools": True}
    with tempfile.TemporaryDirectory() as folder, recording.recorder() as recorder:
        with stack.proxy(recorder.port, **settings, snapshots__directory=folder) as proxy:
            for number, body in enumerate(DRIFTING):
                recorder.taken()
                stack.request(proxy.port, "POST", CHAT, body, {"X-Evoke-Session": "n"})
                yield from _shown(f"normalise: request {number}", recorder.taken(CHAT))
