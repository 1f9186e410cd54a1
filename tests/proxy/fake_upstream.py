"""A fake llama-server whose replies a test writes byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from harness import ThreadedLoop

Behaviour = Callable[["Exchange"], Awaitable[None]]


@dataclass(slots=True)
class Exchange:
    """A received request, and the connection to answer it on."""

    head: bytes
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    async def send(self, *parts: bytes, pause_s: float = 0.0) -> None:
        """Write each part separately, with `pause_s` after it."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(pause_s)


@dataclass(slots=True)
class FakeUpstream:
    """Answers `GET /props` with `props`, and every other request by calling `behave`.

    Attributes:
        requests: The requests received so far, without those of `/props`.
        lost: Connections that the other side closed so far.
    """

    behave: Behaviour
    props: bytes = b'{"total_slots":1}'
    port: int = 0
    requests: list[Exchange] = field(default_factory=list)
    lost: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until a behaviour or the client closes it."""
        try:
            while not writer.is_closing():
                exchange = await _read(reader, writer)
                if exchange.head.startswith(b"GET /props "):
                    await exchange.send(response(self.props, b"application/json"))
                    continue
                self.requests.append(exchange)
                await self.behave(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost += 1
        finally:
            writer.close()


_PATCHED = (
    b'{"total_slots":1,"evoke":{"version":1,'
    b'"features":["blocks","plan","render","reuse","stream","adopt"],"memory":"dense"}}'
)


def response(body: bytes, kind: bytes = b"text/plain", status: bytes = b"200 OK") -> bytes:
    """Return a reply with a Content-Length."""
    size = str(len(body)).encode()
    lines = [b"HTTP/1.1 " + status, b"Content-Type: " + kind, b"Content-Length: " + size, b"", body]
    return b"\r\n".join(lines)


def chunked(*parts: bytes) -> bytes:
    """Return parts in chunked framing, without the last chunk."""
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


@contextmanager
def fake_upstream(behave: Behaviour, *, patched: bool = False) -> Iterator[FakeUpstream]:
    """Start a fake server on a free port; it stops with the block."""
    fake = FakeUpstream(behave, _PATCHED) if patched else FakeUpstream(behave)
    with ThreadedLoop() as thread:
        starting = asyncio.start_server(fake.serve, "127.0.0.1", 0, limit=1 << 20)
        server = asyncio.run_coroutine_threadsafe(starting, thread.loop).result(10)
        fake.port = server.sockets[0].getsockname()[1]
        try:
            yield fake
        finally:
            asyncio.run_coroutine_threadsafe(_close(server), thread.loop).result(10)


async def _close(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange:
    head = await reader.readuntil(b"\r\n\r\n")
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        return Exchange(head, await _read_chunks(reader), writer, reader)
    size = 0
    for line in lowered.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            size = int(line.partition(b":")[2])
    return Exchange(head, await reader.readexactly(size), writer, reader)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return body


async def answer_ok(exchange: Exchange) -> None:
    """Answer every request with `ok`."""
    await exchange.send(response(b"ok"))
