"""Runs the application on its addresses: SIGHUP reads the settings again, SIGTERM lets the streams
finish and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from evoke_proxy.config import Config, SecurityConfig, parse_listen
from evoke_proxy.config.reloading import reloaded
from evoke_proxy.engine import Front, front
from evoke_proxy.engine.server.session_worker import SWITCH_S
from evoke_proxy.errors import ConfigError
from evoke_proxy.web import logs
from evoke_proxy.web.active_requests import ACTIVE_REQUESTS
from evoke_proxy.web.app import create_app
from evoke_proxy.web.connection_limit import ClientSite, ConnectionLimit, raise_file_limit
from evoke_proxy.web.connections import ClientRunner
from evoke_proxy.web.garbage_collection import DeferredCollection
from evoke_proxy.web.operator_access import OPERATOR_ACCESS

_log = logging.getLogger(__name__)

# What has not ended in its time is cut off; so long it may take to notice.
_CUT_S = 1.0


def make_runner(engine: Front) -> web.AppRunner:
    """A runner that cancels a handler when its client goes away and never touches bodies."""
    limits = engine.config.limits
    return ClientRunner(
        create_app(engine),
        limits,
        engine.metrics,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        logger=_http_log(),
        shutdown_timeout=_CUT_S,
        keepalive_timeout=limits.idle_timeout_s,
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


async def serve(config: Config, again: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT; then refuse new requests and wait for answers under way.

    `again` reads the configuration anew, for SIGHUP. Raises OSError when an address cannot be
    bound.
    """
    sys.setswitchinterval(SWITCH_S)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    async with front(config) as engine:
        loop.add_signal_handler(signal.SIGHUP, _reload, engine, again)
        runner = make_runner(engine)
        await runner.setup()
        garbage = DeferredCollection(lambda: runner.app[ACTIVE_REQUESTS].idle)
        garbage.start()
        try:
            await _listen(runner, engine)
            await stop.wait()
            await drain(engine, runner)
        finally:
            garbage.stop()
            await runner.cleanup()


async def drain(engine: Front, runner: web.AppRunner) -> None:
    """Take no new requests, let those under way end within `limits.drain_timeout_s`, and keep on
    disk what is to outlive us."""
    engine.shared.draining = True
    engine.feed.publish("stopping")
    limit_s = engine.config.limits.drain_timeout_s
    _log.info("stopping: answers under way have %g s to end", limit_s)
    left = await runner.app[ACTIVE_REQUESTS].ended(limit_s)
    if left:
        _log.warning("stopping: %d answers are cut off after %g s", left, limit_s)
    await engine.keep()
    engine.feed.end()


def _reload(engine: Front, again: Callable[[], Config]) -> None:
    """Take over what can be of the settings as they are now; all stays when they are broken."""
    try:
        found = reloaded(engine.config, again())
    except ConfigError as error:
        engine.metrics.reloads.labels(result="failed").inc()
        _log.error("settings not reloaded, the old ones stay: %s", error)
        return
    engine.adjust(found.config)
    engine.metrics.reloads.labels(result="done").inc()
    logs.set_up(found.config.log)
    _log.info("settings reloaded; changed: %s", ", ".join(found.applied) or "nothing")
    if found.waiting:
        _log.warning("settings that need a restart: %s", ", ".join(found.waiting))


async def listen_for_clients(runner: web.AppRunner, engine: Front, listen: Sequence[str]) -> None:
    """Serve at these addresses, with no more connections than `limits.connections` in all."""
    most = engine.config.limits.connections
    files = raise_file_limit(most)
    if files < 2 * most:
        _log.warning("%d files may be open, %d connections may take twice as many", files, most)
    crowd = ConnectionLimit(most, engine.metrics)
    for address in listen:
        await ClientSite(runner, *parse_listen(address), crowd).start()


async def _listen(runner: web.AppRunner, engine: Front) -> None:
    """The addresses of the admin first, so that no other is ever taken for one."""
    config = engine.config
    await _listen_apart(runner, config.security, config.listen)
    admin = list(runner.addresses)
    await listen_for_clients(runner, engine, config.listen)
    for address in runner.addresses[len(admin) :]:
        _say(f"listens on {_shown(address)}")
    for address in admin:
        _say(f"is operated at {_shown(address)}/evoke/")


async def _listen_apart(
    runner: web.AppRunner, config: SecurityConfig, listen: tuple[str, ...]
) -> None:
    if not config.admin_listen:
        return
    # Two proxies on a machine are nothing wrong, nor one that has clients at our default; a place
    # that somebody has chosen is.
    default = config.admin_listen == SecurityConfig().admin_listen
    for address in config.admin_listen:
        if default and _port(address) in map(_port, listen):
            _say(f"is not operated: security.admin_listen, {address}, is among listen")
            continue
        try:
            await web.TCPSite(runner, *parse_listen(address)).start()
        except OSError:
            if not default:
                raise
            _say(f"is not operated: security.admin_listen, {address}, is taken")
    runner.app[OPERATOR_ACCESS].open_at(runner.addresses)


def _port(address: str) -> int:
    return parse_listen(address)[1]


def _shown(address: Any) -> str:
    host, port, *_ = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(what: str) -> None:
    # A log on a full disk is no reason not to serve.
    with contextlib.suppress(OSError):
        print(f"evoke-proxy {what}", file=sys.stderr, flush=True)
