"""Security at the client address: keys, forbidden paths, invalid HTTP, slow clients, log text."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import fake_upstream as fake_upstream_module
import pytest
from fake_upstream import Exchange, FakeUpstream, answer_ok, chunked, fake_upstream, response
from harness import TIMEOUT_S, RunningProxy, ask, proxy, until
from tenant_keys import KEYS, write_keys

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.config import load
from evoke_proxy.errors import ConfigError
from evoke_proxy.web.client_access import Access

JSON = {"Content-Type": "application/json"}
CHAT = b'{"messages":[{"role":"user","content":"hi"}]}'
ALICE, BOB = KEYS["alice"], KEYS["bob"]
UPSTREAM_KEY = "upstream-key-of-the-proxy"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "keys"
    write_keys(path)
    return path


@pytest.fixture
def keyed(echo: FakeUpstream, keys: Path) -> Iterator[RunningProxy]:
    settings = {"security__keys_file": str(keys), "upstream__api_key": UPSTREAM_KEY}
    with proxy(echo.port, **settings) as running:
        yield running


def _bearer(key: str) -> dict[str, str]:
    return {**JSON, "Authorization": f"Bearer {key}"}


def _raw(port: int, sent: bytes) -> bytes:
    """Send bytes; returns what is received until the connection ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S / 2) as client:
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize(
    "headers",
    [{}, _bearer("evk_no"), {"Authorization": f"Basic {ALICE}"}, {"X-Api-Key": ""}, {":x": ALICE}],
    ids=["none", "wrong", "basic", "empty", "odd"],
)
def test_requests_without_a_valid_key_are_refused(
    keyed: RunningProxy, echo: FakeUpstream, headers: Mapping[str, str]
) -> None:
    for path in ("/v1/chat/completions", "/tokenize", "/slots/0?action=erase", "/metrics", "/"):
        sent = {name: value for name, value in headers.items() if name[0] > ":"}
        answer = ask(keyed.port, "POST", path, CHAT, sent)
        assert answer.status == 401, path
        assert json.loads(answer.body)["error"]["type"] == "authentication_error"
    assert ask(keyed.port, "POST", "/v1/messages", CHAT).status == 401
    assert echo.requests == []


def test_the_key_of_the_client_is_replaced_by_the_upstream_key(
    keyed: RunningProxy, echo: FakeUpstream
) -> None:
    for headers in (_bearer(ALICE), {**JSON, "X-Api-Key": BOB}):
        for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
            assert ask(keyed.port, "POST", path, CHAT, headers).status == 200
    heads = b"".join(request.head for request in echo.requests)
    assert ALICE.encode() not in heads and BOB.encode() not in heads
    assert heads.count(b"Authorization: Bearer " + UPSTREAM_KEY.encode()) == len(echo.requests) == 6


def test_no_key_is_forwarded_without_an_upstream_key(echo: FakeUpstream, keys: Path) -> None:
    with proxy(echo.port, security__keys_file=str(keys)) as running:
        assert ask(running.port, "POST", "/v1/chat/completions", CHAT, _bearer(ALICE)).status == 200
    assert b"authorization" not in echo.requests[0].head.lower()


def test_a_removed_key_is_refused_at_once(echo: FakeUpstream, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, ["alice"])
    with proxy(echo.port, security__keys_file=str(path)) as running:
        request = ("POST", "/v1/chat/completions", CHAT, _bearer(ALICE))
        assert ask(running.port, *request).status == 200
        write_keys(path, ["bob"])
        assert ask(running.port, *request).status == 401


def test_a_deleted_key_file_refuses_all_keys_and_a_damaged_one_changes_nothing(
    echo: FakeUpstream, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    write_keys(path, ["alice"])
    with proxy(echo.port, security__keys_file=str(path)) as running:
        request = ("POST", "/v1/chat/completions", CHAT, _bearer(ALICE))
        write_secret(path, "nonsense")
        assert ask(running.port, *request).status == 200
        path.unlink()
        assert ask(running.port, *request).status == 401
        write_keys(path, ["alice"])
        assert ask(running.port, *request).status == 200


@pytest.mark.parametrize(
    "target",
    """/slots /slots/0?action=erase /slots/0?action=block-load /slots/0/blocks?tenant=bob
    /%73lots/0?action=erase //slots /./slots /v1/../slots/0?action=erase /slots%2f0 /props
    /lora-adapters /models/load /models/unload /v1/chat/completions/ /v1/chat/completions%00
    /v1%2fchat/completions /%65voke/sessions /metrics http://127.0.0.1/slots
    """.split(),
)
def test_clients_may_not_use_operator_paths(
    keyed: RunningProxy, echo: FakeUpstream, target: str
) -> None:
    answer = ask(keyed.port, "POST", target, CHAT, _bearer(ALICE))
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (403, "evoke_forbidden")
    assert echo.requests == []


@pytest.mark.parametrize(
    "rest", ["%0A", "%0A/../../slots", "%0a/../../slots/0?action=erase", "../slots"]
)
def test_no_path_under_evoke_reaches_the_server(
    keyed: RunningProxy, echo: FakeUpstream, rest: str
) -> None:
    assert ask(keyed.port, "POST", f"/evoke/{rest}", CHAT).status == 404
    assert echo.requests == []


@pytest.mark.parametrize("host", ["[", "[::1", "a]b", "[x]"])
def test_an_invalid_host_header_is_refused(
    shared_proxy: tuple[RunningProxy, FakeUpstream], host: str
) -> None:
    head = f"GET /evoke/sessions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert int(_raw(shared_proxy[0].port, head.encode()).split(b" ")[1]) in (400, 403)


@pytest.mark.parametrize("path", ["/evil%0Aline", "/x%0A/../slots", "/%7f", "/v1/models%00"])
def test_no_control_character_of_a_path_reaches_the_server(
    shared_proxy: tuple[RunningProxy, FakeUpstream], path: str
) -> None:
    running, fake = shared_proxy
    fake.requests.clear()
    assert ask(running.port, "GET", path).status == 400
    assert fake.requests == []


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"not json", {}),
        (b"\xff\xfe{}", {}),
        (b'{"messages":[],"evoke":{"epoch":1}}', {}),
        (b'{"messages":[],"\\u0065voke":{"epoch":1}}', {}),
        (b'[{"messages":[]}]', {}),
        (CHAT, {"Content-Encoding": "gzip"}),
    ],
    ids=["words", "bytes", "marker", "spelled", "list", "gzip"],
)
def test_bodies_that_the_proxy_cannot_read_are_refused_with_keys(
    keyed: RunningProxy, echo: FakeUpstream, body: bytes, headers: Mapping[str, str]
) -> None:
    answer = ask(keyed.port, "POST", "/v1/chat/completions", body, {**_bearer(ALICE), **headers})
    assert answer.status == 400
    assert echo.requests == []


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_body_takes_no_thread_of_llama_server_before_it_is_complete(
    echo: FakeUpstream, keyed: RunningProxy, method: str
) -> None:
    path = "/tokenize" if method == "POST" else "/v1/models"
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ALICE}\r\n"
    lost, in_flight = echo.lost, keyed.gateway.metrics.in_flight._value.get
    with ExitStack() as stack:
        for number in range(1, 21):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", keyed.port)))
            client.sendall(f"{head}Content-Length: 10\r\n\r\n1".encode())
            until(lambda n=number: in_flight() == n)  # type: ignore[misc]
        client.settimeout(TIMEOUT_S)
        client.sendall(b"234567890")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
    until(lambda: in_flight() == 0)
    assert (len(echo.requests), echo.requests[0].body, echo.lost) == (1, b"1234567890", lost)


def test_health_and_preflights_need_no_key(keyed: RunningProxy) -> None:
    for path in ("/evoke/health", "/evoke/ready", "/health"):
        assert ask(keyed.port, "GET", path).status == 200
    assert ask(keyed.port, "OPTIONS", "/v1/chat/completions").status == 200
    assert ask(keyed.port, "OPTIONS", "/slots").status == 401


def test_a_key_file_readable_by_others_prevents_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="security.keys_file: others may read"):
        Access(load(None, {}, {"security.keys_file": str(path)}))


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1",
        b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
        b"Content-Length : 4\r\n\r\nabcd",
        b"Content-Length: +4\r\n\r\nabcd",
        b"Transfer-Encoding: xchunked\r\n\r\nabcd",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\nabc\r\n0\r\n\r\n",
        b"X: a\r\n b\r\n\r\n",
        b"X: a\nY: b\r\n\r\n",
        b"X: a\x00b\r\n\r\n",
        b":tenant: bob\r\n\r\n",
        b"Host: b\r\n\r\n",
        b"".join(b"X-%d: 1\r\n" % number for number in range(200)) + b"\r\n",
        b"X: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
    ids="cl-te cl-cl space plus te te-te te2 vt 0x minus fold lf nul colon host many long".split(),
)
def test_requests_with_ambiguous_framing_are_refused(
    shared_proxy: tuple[RunningProxy, FakeUpstream], lines: bytes
) -> None:
    running, fake = shared_proxy
    n_before = len(fake.requests)
    answer = _raw(running.port, b"POST /x HTTP/1.1\r\nHost: a\r\n" + lines)
    head, _, body = answer.partition(b"\r\n\r\n")
    too_large = len(lines) > 1000
    assert head.startswith(b"HTTP/1.0 431 " if too_large else b"HTTP/1.0 400 "), answer[:80]
    code = "headers_too_large" if too_large else "invalid_request"
    assert json.loads(body)["error"]["code"] == code
    assert len(fake.requests) == n_before


@pytest.fixture(scope="module")
def shared_proxy() -> Iterator[tuple[RunningProxy, FakeUpstream]]:
    """A proxy without keys, and the fake llama-server behind it; shared by the tests."""
    with fake_upstream(answer_ok) as fake, proxy(fake.port) as running:
        yield running, fake


@pytest.mark.parametrize("name", ["content-length", "transfer-encoding", "host"])
def test_a_header_listed_in_connection_does_not_change_the_framing(
    shared_proxy: tuple[RunningProxy, FakeUpstream], name: str
) -> None:
    running, fake = shared_proxy
    fake.requests.clear()
    head = f"POST /x HTTP/1.1\r\nHost: a\r\nConnection: close, {name}\r\nContent-Length: 3\r\n\r\n"
    assert _raw(running.port, head.encode() + b"abc").startswith(b"HTTP/1.1 200")
    (request,) = fake.requests
    assert request.body == b"abc" and request.head.count(b"\r\nHost: 127.0.0.1:") == 1


@pytest.mark.parametrize(
    "target",
    """@evil.example/x //evil.example/x http://evil.example/x https://u@evil.example:1/x *
    evil.example:443 .evil.example/x :99/x /\\evil.example ?x #x https:/x /%0d%0aHost:%20x
    /%00 /../../x""".split(),
)
def test_no_target_reaches_another_server(
    shared_proxy: tuple[RunningProxy, FakeUpstream], target: str
) -> None:
    """A request is forwarded to llama-server or not at all, never to a host that it names."""
    running, fake = shared_proxy
    fake.requests.clear()
    head = f"GET {target} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    status = int(_raw(running.port, head.encode()).split(b" ")[1])
    assert (status == 200) == (len(fake.requests) == 1) and status in (200, 400, 404)
    for request in fake.requests:
        assert f"\r\nHost: 127.0.0.1:{fake.port}\r\n".encode() in request.head
        assert request.head.startswith(b"GET /") and b"evil.example:" not in request.head


def test_redirects_of_the_server_are_not_followed() -> None:
    async def redirect(exchange: Exchange) -> None:
        lines = b"HTTP/1.1 302 Found\r\nLocation: http://evil.example/\r\nContent-Length: 0\r\n\r\n"
        await exchange.send(lines)

    with fake_upstream(redirect) as fake, proxy(fake.port) as running:
        answer = ask(running.port, "GET", "/x")
        assert (answer.status, answer.headers["location"]) == (302, "http://evil.example/")
        assert len(fake.requests) == 1


def test_malformed_bodies_are_answered_200_or_400(
    shared_proxy: tuple[RunningProxy, FakeUpstream],
) -> None:
    running, _ = shared_proxy
    rng = random.Random(11)
    deep = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    bodies = [b"", b"{", b"null", b'""', b"[]", b"1e999", b'{"messages":1}', b"\x00" * 64, deep]
    for _ in range(200):
        body = bytearray(CHAT)
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        bodies.append(bytes(body))
    for number, body in enumerate(bodies):
        path = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/completion")[number % 4]
        assert ask(running.port, "POST", path, body, JSON).status in (200, 400), body[:80]
    assert ask(running.port, "GET", "/evoke/health").status == 200


def test_a_body_over_the_limit_is_not_read_to_its_end(echo: FakeUpstream) -> None:
    with proxy(echo.port, limits__body_bytes=1000) as running:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        chunks = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n"
        with socket.create_connection(("127.0.0.1", running.port), timeout=TIMEOUT_S) as client:
            client.sendall(chunks)
            assert client.recv(100).startswith(b"HTTP/1.1 413")
    assert echo.requests == []


@pytest.mark.parametrize("sent", [b"", b"GET /x HTTP/1.1\r\nHost"], ids=["nothing", "half"])
def test_a_connection_without_a_complete_head_is_closed(echo: FakeUpstream, sent: bytes) -> None:
    with proxy(echo.port, limits__idle_timeout_s=0.3) as running:
        began = time.monotonic()
        assert _raw(running.port, sent) == b""
        assert time.monotonic() - began > 0.2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_request_without_its_body_is_ended(echo: FakeUpstream, path: str) -> None:
    with proxy(echo.port, limits__body_timeout_s=0.3) as running:
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n".encode()
        try:
            assert _raw(running.port, head + b'{"messages') == b""
        except ConnectionResetError:
            pass
        assert running.metric("evoke_clients_dropped_total", reason="slow_body") == 1
        assert ask(running.port, "POST", path, CHAT, JSON).status == 200


def test_a_server_that_reads_slowly_does_not_count_as_a_slow_client(
    monkeypatch: pytest.MonkeyPatch, echo: FakeUpstream
) -> None:
    read = fake_upstream_module._read

    async def slow_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange:
        await asyncio.sleep(3.2)
        return await read(reader, writer)

    monkeypatch.setattr(fake_upstream_module, "_read", slow_read)
    with proxy(echo.port, limits__body_timeout_s=3.0) as running:
        # A body larger than all buffers between client and server.
        assert ask(running.port, "POST", "/x", b"x" * (32 << 20)).status == 200
        assert running.metric("evoke_clients_dropped_total", reason="slow_body") == 0


def test_a_client_that_does_not_read_releases_its_slot() -> None:
    async def send_large_stream(exchange: Exchange) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        await exchange.send(head + b"Transfer-Encoding: chunked\r\n\r\n")
        await exchange.send(*[chunked(b"data: " + b"x" * 65_000 + b"\n\n")] * 400)

    with (
        fake_upstream(send_large_stream) as fake,
        proxy(fake.port, limits__idle_timeout_s=0.3) as running,
    ):
        body = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s"
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            client.sendall(body % (len(CHAT), CHAT))
            until(lambda: fake.lost)
            assert fake.lost == 1
        assert running.metric("evoke_clients_dropped_total", reason="slow_reader") == 1


def test_no_text_of_a_prompt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The text is in bodies, headers, paths and replies, and requests fail in several ways."""
    secret = "hunter2-marker"
    replies = [
        response(secret.encode()),
        b"HTTP/1.1 500 " + secret.encode() + b"\r\n\r\n",
        b"nonsense",
    ]
    refused = b'{"error":{"message":"%s","type":"x"}}' % secret.encode()
    replies += [response(refused, b"application/json", b"400 Bad Request"), b""]

    async def behave(exchange: Exchange) -> None:
        await exchange.send(rng.choice(replies))
        exchange.writer.close()

    rng = random.Random(3)
    chat = json.dumps({"messages": [{"role": "user", "content": secret}], "stream": True}).encode()
    bodies = (chat, chat[:-1], secret.encode(), chat.replace(b"role", b"evoke_keep"))
    with caplog.at_level(logging.INFO):
        for patched in (False, True):
            with fake_upstream(behave, patched=patched) as fake, proxy(fake.port) as running:
                for number in range(40):
                    path = ("/v1/chat/completions", "/v1/messages", f"/{secret}")[number % 3]
                    headers = {**JSON, "X-Api-Key": secret}
                    try:
                        ask(running.port, "POST", path, bodies[number % 4], headers)
                    except OSError:
                        pass
                _raw(running.port, f"{secret}\r\n{secret}: {secret}\r\n\r\n".encode())
    asyncio.run(asyncio.sleep(0))
    assert "POST" in caplog.text
    assert [record.getMessage() for record in caplog.records if secret in record.getMessage()] == []
    assert secret not in caplog.text
