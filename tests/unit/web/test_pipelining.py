"""A connection parses few requests ahead, whatever its client sends."""

from __future__ import annotations

import asyncio

from aiohttp import web

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config.schema import LimitsConfig
from evoke_proxy.web.connections import ClientConnection, ClientRunner

_N_SENT = 100
_REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def test_a_connection_parses_two_requests_ahead_and_answers_all() -> None:
    """aiohttp reads the limit from a global name of its module, which is not documented."""

    async def run() -> tuple[int, int]:
        may_answer, has_begun = asyncio.Event(), asyncio.Event()

        async def handle(_: web.Request) -> web.Response:
            has_begun.set()
            await may_answer.wait()
            return web.Response(text="ok")

        app = web.Application()
        app.router.add_get("/", handle)
        runner = ClientRunner(app, LimitsConfig(), Metrics(), access_log=None)
        await runner.setup()
        assert runner.server is not None
        listener = await asyncio.get_running_loop().create_server(runner.server, "127.0.0.1", 0)
        try:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            writer.write(_REQUEST * _N_SENT)
            await has_begun.wait()
            for _ in range(20):  # whatever else would be parsed is parsed by then
                await asyncio.sleep(0.005)
            (connection,) = runner.server.connections
            assert isinstance(connection, ClientConnection)
            n_ahead = len(connection._messages)
            may_answer.set()
            n_answered = 0
            async with asyncio.timeout(30):
                while n_answered < _N_SENT:
                    n_answered += (await reader.read(1 << 16)).count(b"HTTP/1.1 200 OK")
            writer.close()
        finally:
            listener.close()
            await runner.cleanup()
        return n_ahead, n_answered

    assert asyncio.run(run()) == (2, _N_SENT)
