"""Relaying between a client and a server on real sockets: headers, bytes, errors, accounting."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientPayloadError, ClientSession, web
from aiohttp.test_utils import TestServer, make_mocked_request

from evoke_proxy.adapters.llama.transport import HttpTransport
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, UpstreamConfig
from evoke_proxy.errors import MethodRefused, RequestError, UpstreamUnavailable
from evoke_proxy.web import relay
from evoke_proxy.web.client_access import ACCESS, Access
from evoke_proxy.web.relay import RelayOptions
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD, SlowClientGuard

EVOKE = {"decoded": 60, "recovered": 30, "resident_before": 10, "omitted": 0, "n_prompt": 100}
ANSWER = {"choices": [], "usage": {"prompt_tokens": 100}, "timings": {"evoke": EVOKE}}
JSON = [("Content-Type", "application/json")]


def http(body: bytes, *headers: tuple[str, str], status: str = "200 OK") -> bytes:
    fields = [*headers, ("Content-Length", str(len(body)))]
    head = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def relayed(
    answer: bytes,
    use: Callable[[ClientSession, list[bytes]], Awaitable[None]],
    options: RelayOptions | None = None,
) -> None:
    """Call `use` with a client of a proxy, and the requests that its server has received.

    The server answers with these bytes and closes the connection.
    """
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        received.append(head)
        writer.write(answer)
        writer.close()

    async def work() -> None:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with listener, HttpTransport(UpstreamConfig(url=url)) as upstream:

            async def handle(request: web.Request) -> web.StreamResponse:
                if options is None:
                    return await relay.passthrough(request, upstream)
                async with upstream.open("GET", "/x", {}) as reply:
                    return await relay.send(request, reply, options)

            app = web.Application()
            app[ACCESS] = Access(Config())
            app[SLOW_CLIENT_GUARD] = SlowClientGuard(Config().limits, Metrics())
            app.on_response_prepare.append(relay.remove_added_headers)
            app.router.add_route("*", "/{path:.*}", handle)
            async with TestServer(app) as server:
                async with ClientSession(server.make_url("/"), auto_decompress=False) as client:
                    await use(client, received)

    asyncio.run(work())


def test_a_request_reaches_the_server_with_the_headers_of_the_client_alone() -> None:
    async def use(client: ClientSession, received: list[bytes]) -> None:
        headers = {"X-Own": "1", "Connection": "keep-alive, X-Hop", "X-Hop": "1", "TE": "trailers"}
        skipped = {"User-Agent", "Accept", "Accept-Encoding"}
        async with client.get("/a%2Fb?q=%20", headers=headers, skip_auto_headers=skipped) as got:
            assert await got.read() == b"ok"
        line, *fields = received[0].decode().rstrip().split("\r\n")
        assert line == "GET /a%2Fb?q=%20 HTTP/1.1"
        assert [field for field in fields if not field.startswith("Host:")] == ["X-Own: 1"]

    relayed(http(b"ok"), use)


def test_an_answer_reaches_the_client_with_the_headers_of_the_server_alone() -> None:
    body = gzip.compress(b"text")
    sent = [
        ("X-Own", "1"),
        ("Content-Encoding", "gzip"),
        ("Keep-Alive", "timeout=5"),
        ("X-Own", "2"),
    ]

    async def use(client: ClientSession, _: list[bytes]) -> None:
        async with client.get("/x") as got:
            assert (got.status, got.reason) == (418, "A teapot")
            assert await got.read() == body
            assert got.headers.getall("X-Own") == ["1", "2"]
            assert {name.lower() for name in got.headers} == {
                "x-own",
                "content-encoding",
                "content-length",
            }

    relayed(http(body, *sent, status="418 A teapot"), use)


def test_the_client_of_a_broken_answer_notices_that_it_is_incomplete() -> None:
    async def use(client: ClientSession, _: list[bytes]) -> None:
        async with client.get("/x") as got:
            with pytest.raises(ClientPayloadError):
                await got.read()

    relayed(http(b"complete").replace(b"complete", b"cut"), use)


def test_the_accounting_is_added_to_the_usage_and_the_length_is_corrected() -> None:
    observed: list[bytes] = []

    async def use(client: ClientSession, _: list[bytes]) -> None:
        async with client.get("/x") as got:
            body = await got.read()
            assert int(got.headers["Content-Length"]) == len(body)
        usage = json.loads(body)["usage"]
        assert usage["prompt_tokens"] == 100
        assert usage["evoke"]["recovered"] == 30 and usage["evoke"]["extra"] == 1

    answer = json.dumps(ANSWER).encode()
    options = RelayOptions(observe=observed.append, usage_extra={"extra": 1})
    relayed(http(answer, *JSON), use, options)
    assert b"".join(observed) == answer


@pytest.mark.parametrize(
    "headers", [[("Content-Type", "text/plain")], [*JSON, ("Content-Encoding", "gzip")]]
)
def test_an_answer_that_is_no_plain_json_is_not_edited(headers: list[tuple[str, str]]) -> None:
    body = json.dumps(ANSWER).encode()

    async def use(client: ClientSession, _: list[bytes]) -> None:
        async with client.get("/x") as got:
            assert await got.read() == body

    relayed(http(body, *headers), use, RelayOptions(usage_extra={"extra": 1}))


def test_only_errors_are_edited_by_the_editor_of_errors() -> None:
    options = RelayOptions(edit_error=lambda body: body + b" ", headers={"X-Evoke-Session": "s"})
    for status, expected in (("400 Bad Request", b"{} "), ("200 OK", b"{}")):

        async def use(client: ClientSession, _: list[bytes], expected: bytes = expected) -> None:
            async with client.get("/x") as got:
                assert await got.read() == expected
                assert got.headers["X-Evoke-Session"] == "s"

        relayed(http(b"{}", *JSON, status=status), use, options)


def test_an_answer_that_breaks_off_before_its_first_byte_is_an_error() -> None:
    class Broken:
        status, reason, headers = 200, "OK", relay.end_to_end_headers(dict(JSON))

        async def chunks(self) -> Any:
            raise UpstreamUnavailable("broke off")
            yield b""

    request = make_mocked_request("GET", "/x")
    with pytest.raises(UpstreamUnavailable):
        asyncio.run(relay.send(request, Broken(), RelayOptions(usage_extra={})))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/%00", "/a%0d%0ab", "/a%7F"])
def test_a_path_with_control_characters_is_refused(path: str) -> None:
    with pytest.raises(RequestError):
        relay.raw_target(make_mocked_request("GET", path))


def test_headers_for_another_body_lack_its_framing_and_those_of_the_connection() -> None:
    sent = {"Connection": "X-Hop", "X-Hop": "1", "Content-Length": "5", "Content-Encoding": "gzip"}
    assert dict(relay.end_to_end_headers(sent | {"X-Own": "1"})) == {"X-Own": "1"}


def test_the_target_is_spelled_as_by_the_client() -> None:
    for target in ("/", "/a%2Fb/../c?q=%41&r", "//x/y"):
        assert relay.raw_target(make_mocked_request("GET", target)) == target


@pytest.mark.parametrize(
    ("origin", "is_forwarded"),
    [
        ("http://localhost:3000", True),
        ("null", True),
        ("https://[::1]:8", True),
        ("x", False),
        ("http://a b", False),
        ("http://" + "a" * 300, False),
    ],
)
def test_only_a_well_formed_origin_is_forwarded(origin: str, is_forwarded: bool) -> None:
    request = make_mocked_request("GET", "/health", headers={"Origin": origin})
    assert relay.origin_header(request) == ({"Origin": origin} if is_forwarded else {})


def test_health_accepts_no_method_that_changes_something() -> None:
    class Nowhere:
        def open(self, *_: object) -> Any:
            raise AssertionError("a request is sent")

    with pytest.raises(MethodRefused):
        asyncio.run(relay.health(make_mocked_request("POST", "/health"), Nowhere()))  # type: ignore[arg-type]
