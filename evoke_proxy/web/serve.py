"""Runs the application on its addresses until SIGTERM, then lets the streams finish."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from evoke_proxy.config import Config, parse_listen
from evoke_proxy.engine import Engine
from evoke_proxy.web.app import create_app

# A turn of a long conversation makes thousands of objects, and next to none of them in rings:
# looking for those after every 700 would take a twentieth of its time.
_NEW_OBJECTS = 20_000


def make_runner(engine: Engine) -> web.AppRunner:
    """A runner that cancels a handler when its client goes away and never touches bodies."""
    limits = engine.config.limits
    return web.AppRunner(
        create_app(engine),
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        logger=_http_log(),
        shutdown_timeout=limits.drain_timeout_s,
        keepalive_timeout=limits.idle_timeout_s,
        max_line_size=limits.header_bytes,
        max_field_size=limits.header_bytes,
        max_headers=limits.headers,
    )


def _http_log() -> logging.Logger:
    """Where it is said that a request was no HTTP: not what it was, which may be part of a body."""
    log = logging.getLogger("evoke_proxy.http")
    if not log.filters:
        log.addFilter(_without_bytes)
    return log


def _without_bytes(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args = f"not HTTP: {type(error).__name__}", ()
        record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
    return True


async def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT; then refuse new connections and wait for answers under way.

    Raises OSError when an address cannot be bound.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    async with Engine(config) as engine:
        runner = make_runner(engine)
        await runner.setup()
        try:
            await _listen(runner, config)
            await stop.wait()
            engine.draining = True
        finally:
            await runner.cleanup()


async def _listen(runner: web.AppRunner, config: Config) -> None:
    for address in config.listen:
        host, port = parse_listen(address)
        await web.TCPSite(runner, host, port).start()
    for host, port, *_ in runner.addresses:
        shown = f"[{host}]" if ":" in host else host
        print(f"evoke-proxy listens on http://{shown}:{port}", file=sys.stderr, flush=True)
