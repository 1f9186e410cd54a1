"""Runs the web application: listens, reloads the configuration on SIGHUP, drains on SIGTERM."""

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

from evoke_proxy.adapters.allocator import use_one_heap
from evoke_proxy.adapters.port_owner import owner_of
from evoke_proxy.config import Config, SecurityConfig, parse_listen
from evoke_proxy.config.loader import reloaded, risks_of
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
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

# Seconds that aiohttp waits for handlers whose connections were closed at the end of the drain.
_SHUTDOWN_S = 1.0


def make_runner(engine: ProxyGateway) -> web.AppRunner:
    """The runner of the application.

    It cancels the handler of a client that disconnects, and does not decompress bodies, which are
    forwarded unchanged.
    """
    limits = engine.config.limits
    return ClientRunner(
        create_app(engine),
        limits,
        engine.metrics,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        logger=_http_log(),
        shutdown_timeout=_SHUTDOWN_S,
        keepalive_timeout=limits.idle_timeout_s,
    )


def _http_log() -> logging.Logger:
    """The log of malformed requests, without their bytes: these may be part of a prompt."""
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


async def serve(config: Config, reload: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT, then refuse new requests and wait for running answers.

    `reload` reads the configuration again, on SIGHUP. Raises OSError when an address cannot be
    bound.
    """
    use_one_heap()
    sys.setswitchinterval(SWITCH_S)
    _warn(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    async with build_gateway(config) as engine:
        loop.add_signal_handler(signal.SIGHUP, _reload, engine, reload)
        runner = make_runner(engine)
        await runner.setup()
        collection = DeferredCollection(lambda: runner.app[ACTIVE_REQUESTS].idle_s)
        collection.start()
        try:
            await _listen(runner, engine)
            await stop.wait()
            await drain(engine, runner)
        finally:
            collection.stop()
            await runner.cleanup()


async def drain(engine: ProxyGateway, runner: web.AppRunner) -> None:
    """Refuse new requests, wait for running ones, and save state to disk.

    Running requests have `limits.drain_timeout_s` seconds to end.
    """
    engine.shared.draining = True
    engine.feed.publish("stopping")
    limit_s = engine.config.limits.drain_timeout_s
    _log.info("stopping: running requests have %g s to end", limit_s)
    count = await runner.app[ACTIVE_REQUESTS].wait_until_idle(limit_s)
    if count:
        _log.warning("stopping: %d requests are ended after %g s", count, limit_s)
    await engine.save_all()
    engine.feed.end()


def _reload(engine: ProxyGateway, read: Callable[[], Config]) -> None:
    """Apply the settings that can change at run time; keep all of them when any is invalid."""
    try:
        found = reloaded(engine.config, read())
    except ConfigError as error:
        engine.metrics.reloads.labels(result="failed").inc()
        _log.error("settings not reloaded, the old ones stay: %s", error)
        return
    engine.adjust(found.config)
    engine.metrics.reloads.labels(result="done").inc()
    logs.configure_logging(found.config.log)
    _log.info("settings reloaded; changed: %s", ", ".join(found.applied) or "nothing")
    _warn(found.config)
    if found.waiting:
        _log.warning("settings that need a restart: %s", ", ".join(found.waiting))


def _warn(config: Config) -> None:
    """Log the settings that are valid and probably not intended."""
    for risk in risks_of(config):
        _log.warning("%s", risk)


async def listen_for_clients(
    runner: web.AppRunner, engine: ProxyGateway, listen: Sequence[str]
) -> None:
    """Listen on these addresses, for at most `limits.connections` connections in all."""
    most = engine.config.limits.connections
    files = raise_file_limit(most)
    if files < 2 * most:
        _log.warning(
            "the limit on open files is %d; %d connections may need twice as many", files, most
        )
    limit = ConnectionLimit(most, engine.metrics)
    for address in listen:
        host, port = parse_listen(address)
        await ClientSite(runner, host, port, limit).start()


async def _listen(runner: web.AppRunner, engine: ProxyGateway) -> None:
    """Listen on the admin addresses first: only those bound by then count as admin addresses."""
    config = engine.config
    await _listen_for_admin(runner, config.security, config.listen)
    admin = list(runner.addresses)
    await listen_for_clients(runner, engine, config.listen)
    for address in runner.addresses[len(admin) :]:
        _print(f"listens on {_url(address)}")
    for address in admin:
        _print(f"has its page at {_url(address)}/evoke/")


async def _listen_for_admin(
    runner: web.AppRunner, config: SecurityConfig, listen: tuple[str, ...]
) -> None:
    if not config.admin_listen:
        return
    # That the default address is in use is no error: several proxies may run on a machine. An
    # address that the configuration names must be free.
    is_default = config.admin_listen == SecurityConfig().admin_listen
    for address in config.admin_listen:
        if is_default and _port(address) in map(_port, listen):
            _without_admin(address, "is also in listen")
            continue
        try:
            await web.TCPSite(runner, *parse_listen(address)).start()
        except OSError:
            if not is_default:
                raise
            _without_admin(address, f"is taken by {owner_of(_port(address))}")
    runner.app[OPERATOR_ACCESS].set_addresses(runner.addresses)


def _without_admin(address: str, reason: str) -> None:
    """Say why the admin API is not served at an address, and which option names another."""
    fix = "--admin-listen 127.0.0.1:PORT names another address"
    _print(f"serves no admin API: {address} (security.admin_listen) {reason}; {fix}")


def _port(address: str) -> int:
    return parse_listen(address)[1]


def _url(address: Any) -> str:
    host, port, *_ = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _print(text: str) -> None:
    """Print one line about the proxy to standard error."""
    # The proxy serves even when standard error is a file on a full disk.
    with contextlib.suppress(OSError):
        print(f"evoke-proxy {text}", file=sys.stderr, flush=True)
