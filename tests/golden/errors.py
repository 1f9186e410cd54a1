"""Status, headers and body of every error that a client can get, in each dialect."""

from __future__ import annotations

import http.client
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "blackbox"))

import stack  # noqa: E402

from . import recording  # noqa: E402
from .requests import CHAT, DIALECTS, MESSAGES, PLAIN, RESPONSES, STREAM  # noqa: E402
from .scenarios import FILLER  # noqa: E402

_KEPT = ("content-type", "retry-after", "connection", "www-authenticate", "allow")
_PATHS = (*DIALECTS.values(), "/tokenize")
Bodies = Mapping[str, Any]


def lines() -> list[str]:
    """All of them, each under what causes it."""
    parts: tuple[Callable[[], Iterator[str]], ...] = (
        _keys,
        _upstream_away,
        _upstream_refuses,
        _busy,
        _waiting_streams,
        _sizes,
        _patched,
        _admin,
        _several,
        _draining,
    )
    with stack.forked_proxies():
        return [line for part in parts for line in part()]


def _shown(name: str, answer: stack.Answer) -> Iterator[str]:
    yield f"{name}: {answer.status}"
    for key in _KEPT:
        if key in answer.headers:
            yield f"    {key}: {answer.headers[key]}"
    kind = answer.headers.get("content-type", "")
    error = answer.status >= 400 and kind.startswith("application/json")
    if error or kind.startswith("text/event-stream"):
        yield f"    {_plain(answer.body)}"


def _plain(body: bytes) -> str:
    """The body without what is different in every run."""
    text = body.decode("latin-1")
    text = re.sub(r"127\.0\.0\.1:\d+|\('127\.0\.0\.1', \d+\)", "HOST:PORT", text)
    # What a library says of an answer that is no HTTP is none of ours to fix.
    text = re.sub(r"400, message=.*?(?=\",\"type\"|\"}}$)", "*", text)
    text = re.sub(r"'[0-9a-f]{8,}'", "'ID'", text)
    return text.rstrip("\n").replace("\n", "\\n")


def _each(
    name: str, port: int, bodies: Bodies = PLAIN, headers: Mapping[str, str] | None = None
) -> Iterator[str]:
    for path in _PATHS:
        body = bodies.get(path, b'{"content":"a"}')
        answer = stack.request(port, "POST", path, body, headers)
        yield from _shown(f"{name}, POST {path}", answer)


@contextmanager
def _key() -> Iterator[tuple[str, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        added = stack.command_line("keys", "add", "a", "--tenant", "t", "--file", str(file))
        yield added.stdout.split()[-1], file


def _keys() -> Iterator[str]:
    with _key() as (key, file), recording.recorder() as upstream:
        with stack.proxy(upstream.port, security__keys_file=file) as proxy:
            right = {"Authorization": f"Bearer {key}"}
            yield from _each("no key", proxy.port)
            yield from _each("wrong key", proxy.port, headers={"X-Api-Key": "wrong"})
            for method, path in (
                ("GET", "/slots"),
                ("POST", "/lora-adapters"),
                ("GET", "/nowhere"),
            ):
                answer = stack.request(proxy.port, method, path, None, right)
                yield from _shown(f"a path that is not for clients, {method} {path}", answer)
            broken = dict.fromkeys(PLAIN, b'{"messages":[}')
            yield from _each("with a key, no JSON", proxy.port, broken, right)
            number = dict.fromkeys(PLAIN, b"7")
            yield from _each("with a key, no object", proxy.port, number, right)


def _upstream_away() -> Iterator[str]:
    with stack.proxy(stack.free_port()) as proxy:
        yield from _each("llama-server away", proxy.port)
        yield from _each("llama-server away, streamed", proxy.port, STREAM)


def _upstream_refuses() -> Iterator[str]:
    refusal = b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}'

    def refuse(_: recording.Received, connection: socket.socket) -> None:
        connection.sendall(recording.whole(refusal, "400 Bad Request"))

    with recording.recorder(refuse) as upstream, stack.proxy(upstream.port) as proxy:
        yield from _each("refused by llama-server", proxy.port)

    def nonsense(_: recording.Received, connection: socket.socket) -> None:
        connection.sendall(b"nonsense\r\n\r\n")
        connection.close()

    with recording.recorder(nonsense) as upstream, stack.proxy(upstream.port) as proxy:
        yield from _each("llama-server speaks no HTTP", proxy.port)

    def hang_up(_: recording.Received, connection: socket.socket) -> None:
        connection.close()

    with recording.recorder(hang_up) as upstream, stack.proxy(upstream.port) as proxy:
        yield from _each("llama-server hangs up", proxy.port)


@contextmanager
def _occupied(**settings: object) -> Iterator[tuple[stack.Process, Callable[[], None]]]:
    """A proxy whose only slot generates for somebody, and how to make them leave."""
    options = ("-c", "8192", "-np", "1", "--evoke-ram", "16")
    with (
        stack.server(*options, patched=True) as server,
        stack.proxy(server.port, **settings) as proxy,
    ):
        body = (
            b'{"ignore_eos":true,'
            + STREAM[CHAT].replace(b'"max_tokens":1', b'"max_tokens":6000')[1:]
        )
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200 and response.read1(5)

        def leave() -> None:
            response.close()
            connection.close()

        try:
            yield proxy, leave
        finally:
            leave()


def _busy() -> Iterator[str]:
    with _occupied(limits__queue=0) as (proxy, _):
        yield from _each("queue full", proxy.port)
    with _occupied(limits__queue_timeout_s=0.3) as (proxy, _):
        for path, answer in _at_once(proxy.port, PLAIN):
            yield from _shown(f"waited too long, POST {path}", answer)


def _at_once(port: int, bodies: Bodies) -> list[tuple[str, stack.Answer]]:
    """Answers of requests that wait at the same time: the slot is not occupied for long."""
    paths = list(DIALECTS.values())
    with ThreadPoolExecutor(len(paths)) as pool:
        sent = [pool.submit(stack.request, port, "POST", path, bodies[path]) for path in paths]
        return [(path, one.result()) for path, one in zip(paths, sent, strict=True)]


def _waiting_streams() -> Iterator[str]:
    """What a stream is sent that waits for its slot, and then cannot have it."""
    given = {"limits__queue_timeout_s": 1.0, "limits__keepalive_s": 0.2}
    with _occupied(**given) as (proxy, _):
        for path, answer in _at_once(proxy.port, STREAM):
            body = re.sub(rb"(: waiting\n\n)+", rb": waiting (several)\n\n", answer.body)
            whole = stack.Answer(answer.status, answer.headers, body)
            yield from _shown(f"a stream waited too long, POST {path}", whole)


def _sizes() -> Iterator[str]:
    given = {"limits__body_bytes": 2000}
    with recording.recorder() as upstream, stack.proxy(upstream.port, **given) as proxy:
        large = {path: body[:-1] + b" " * 3000 + b"}" for path, body in PLAIN.items()}
        yield from _each("body too large", proxy.port, large)
    with recording.recorder() as upstream, stack.proxy(upstream.port) as proxy:
        long = {"X-Long": "a" * 100_000}
        yield from _shown("a header of 100,000 bytes", _raw(proxy.port, "/health", long))
        many = {f"X-Many-{n}": "a" for n in range(200)}
        yield from _shown("200 headers", _raw(proxy.port, "/health", many))
        target = "/health?" + "a" * 100_000
        yield from _shown("a target of 100,000 bytes", _raw(proxy.port, target, {}))


def _raw(port: int, target: str, headers: Mapping[str, str]) -> stack.Answer:
    try:
        answer = stack.request(port, "GET", target, None, headers)
    except (OSError, http.client.HTTPException) as error:
        return stack.Answer(0, {}, type(error).__name__.encode())
    # What a library says of a head it does not parse is none of ours to fix.
    ours = answer.headers.get("content-type", "").startswith("application/json")
    return answer if ours else stack.Answer(answer.status, answer.headers, b"(not JSON)")


def _patched() -> Iterator[str]:
    options = ("-c", "2048", "-np", "1", "--evoke-ram", "16")
    with stack.server(*options, patched=True) as server:
        with stack.proxy(server.port, policy__budget=512) as proxy:
            wrong = {
                "an unknown field": b'{"evoke_bugdet":7,',
                "a wrong field": b'{"evoke_budget":"many",',
                "a budget that is too small": b'{"evoke_budget":8,',
                "a wrong policy": b'{"evoke_policy":"best",',
                "a field for benches": b'{"evoke_oracle":["a"],',
            }
            for name, start in wrong.items():
                yield from _each(name, proxy.port, {p: start + b[1:] for p, b in PLAIN.items()})
            pinned = [{"role": "user", "content": FILLER * 10, "evoke_keep": "pin"}]
            for path, key in ((CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")):
                body = {key: [*pinned, {"role": "user", "content": "Hi"}], "max_tokens": 4}
                answer = stack.request(proxy.port, "POST", path, body)
                yield from _shown(f"too much is pinned, POST {path}", answer)
            long = [{"role": "user", "content": FILLER * 60}]
            for path, key in ((CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")):
                answer = stack.request(proxy.port, "POST", path, {key: long, "max_tokens": 4})
                yield from _shown(f"more than the context, POST {path}", answer)


def _admin() -> Iterator[str]:
    with recording.recorder() as upstream, stack.proxy(upstream.port) as proxy:
        calls: tuple[tuple[str, str, object, Mapping[str, str]], ...] = (
            ("GET", "/evoke/nothing", None, {}),
            ("PUT", "/evoke/status", {}, {}),
            ("GET", "/evoke/status", None, {"Sec-Fetch-Site": "cross-site"}),
            ("GET", "/evoke/status", None, {"Host": "example.org"}),
            ("GET", "/evoke/sessions/none", None, {}),
            ("PATCH", "/evoke/sessions/none", {"pinned": 1}, {}),
            ("PATCH", "/evoke/sessions/none", {"pinned": True}, {}),
            ("PATCH", "/evoke/sessions/none", b"{", {}),
            ("PATCH", "/evoke/sessions/none", {"other": 1}, {}),
            ("PUT", "/evoke/budget", {"budget": -1}, {}),
            ("PUT", "/evoke/budget", b"{}", {"Content-Type": "text/plain"}),
            ("POST", "/evoke/sessions/none/blocks", {"action": "burn", "p0": 1, "p1": 2}, {}),
            ("POST", "/evoke/sessions/none/blocks", {"action": "pin", "p0": 2, "p1": 1}, {}),
            ("PATCH", "/evoke/servers/a", {"draining": True}, {}),
            ("POST", CHAT, PLAIN[CHAT], {}),
        )
        for method, path, body, headers in calls:
            answer = stack.request(proxy.admin_port, method, path, body, headers)
            extra = "".join(f", {k}: {v}" for k, v in headers.items())
            said = body.decode() if isinstance(body, bytes) else str(body)
            yield from _shown(f"admin: {method} {path} {said}{extra}", answer)
        for path in ("/evoke/status", "/evoke/", "/evoke/events"):
            answer = stack.request(proxy.port, "GET", path)
            yield from _shown(f"where clients connect: GET {path}", answer)
    with tempfile.TemporaryDirectory() as folder, recording.recorder() as upstream:
        token = Path(folder) / "token"
        stack.command_line("keys", "token", "--file", str(token))
        with stack.proxy(upstream.port, security__admin_token_file=token) as proxy:
            for path in ("/evoke/status", "/metrics"):
                answer = stack.request(proxy.admin_port, "GET", path)
                yield from _shown(f"without the token: GET {path}", answer)


def _several() -> Iterator[str]:
    ports = stack.free_port(), stack.free_port()
    away = ",".join(f"{name}=http://127.0.0.1:{p}" for name, p in zip("ab", ports, strict=True))
    with stack.proxy(None, pool__upstreams=away) as proxy:
        yield from _each("no server of several", proxy.port)
        answer = stack.request(proxy.port, "POST", "/lora-adapters", {})
        yield from _shown("several servers and none is named: POST /lora-adapters", answer)
        answer = stack.request(proxy.port, "GET", "/props", None, {"X-Evoke-Server": "c"})
        yield from _shown("several servers and another is named", answer)


def _draining() -> Iterator[str]:
    with _occupied() as (proxy, leave):
        proxy.popen.terminate()

        def drains() -> bool:
            return stack.request(proxy.admin_port, "GET", "/evoke/ready").status == 503

        stack.wait_until(drains, "the proxy drains")
        yield from _each("stopping", proxy.port)
        leave()
        assert proxy.popen.wait(60) == 0
