"""Access to the admin API: addresses, tokens, requests from pages of other sites."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from fake_upstream import Exchange, fake_upstream, response
from harness import TIMEOUT_S, until

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.config import Config, SecurityConfig, load
from evoke_proxy.core.tenants.api_keys import Caller, key_of, line_of
from evoke_proxy.errors import ConfigError
from evoke_proxy.web.operator_access import OPERATOR_ACCESS, OperatorAccess
from evoke_proxy.web.serve import _listen_for_admin

TOKEN = "0123456789abcdef-of-the-admin"
KEY = key_of(b"k" * 32)
ADMIN_PATHS = ("/evoke/sessions",)


@contextmanager
def _serving(port: int, *options: str) -> Iterator[tuple[int, int, str]]:
    """Start a proxy process; yields its client port, its admin port (or 0) and its log."""
    command = [sys.executable, "-m", "evoke_proxy", "serve", "--listen", "127.0.0.1:0"]
    command += ["--upstream", f"http://127.0.0.1:{port}", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, text=True)
        try:
            # The lines about the client address and the admin address come in either order.
            lines = (r"listens on http://.*:(\d+)\n", r"(?:has its page at|serves no admin).*\n")
            until(
                lambda: process.poll() is not None or all(re.search(x, _read(log)) for x in lines)
            )
            assert process.poll() is None, _read(log)
            listens = re.search(lines[0], _read(log))
            operated = re.search(r"has its page at http://.*:(\d+)/evoke/\n", _read(log))
            assert listens is not None
            yield int(listens[1]), int(operated[1]) if operated else 0, _read(log)
        finally:
            process.kill()
            process.wait()


def _read(log: object) -> str:
    log.seek(0)  # type: ignore[attr-defined]
    return log.read()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def upstream() -> Iterator[int]:
    async def echo(exchange: Exchange) -> None:
        await exchange.send(response(b"ok"))

    with fake_upstream(echo) as fake:
        yield fake.port


def _status(
    port: int, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> int:
    """Return the status of the response to a request; `headers` may replace Host."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in ({"Host": f"127.0.0.1:{port}"} | dict(headers or {})).items():
        connection.putheader(name, value.encode())
    connection.endheaders()
    with contextlib.closing(connection), connection.getresponse() as answer:
        answer.read()
        return answer.status


def test_the_client_address_has_no_admin_and_the_admin_address_no_llama_server(
    upstream: int,
) -> None:
    with _serving(upstream, "--admin-listen", "127.0.0.1:0") as (clients, admin, _):
        for path in ADMIN_PATHS:
            assert _status(clients, path) == 403
            assert _status(admin, path) == 200
        for path in ("/evoke/health", "/evoke/ready", "/metrics"):
            assert _status(clients, path) == _status(admin, path) == 200
        assert _status(clients, "/anything") == 200
        for path in ("/anything", "/v1/models", "/slots", "/", "/evok/../slots", "/%65voke/x/.."):
            assert _status(admin, path) == 404
        for method in ("HEAD", "POST", "OPTIONS"):
            assert _status(admin, "/metrics", method=method) == 404, (
                "these are paths of llama-server"
            )
        # A page of another site whose host name resolves to this address.
        for host in ("evil.example", "evil.example@127.0.0.1", "127.0.0.1#a", "127.0.0.1/a"):
            for path in ("/evoke/sessions", "/metrics"):
                assert _status(admin, path, {"Host": host}) == 403
        for host in ("localhost:1", "[::1]", "127.0.0.1"):
            for path in ("/evoke/sessions", "/metrics"):
                assert _status(admin, path, {"Host": host}) == 200
        for site in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
            for path in ("/evoke/sessions", "/metrics"):
                assert _status(admin, path, site) == 403
        # The metrics of this address are read under any name, like llama-server's paths.
        assert _status(clients, "/metrics", {"Host": "evoke.example"}) == 200


def test_keys_and_the_admin_token_open_their_own_paths_only(upstream: int, tmp_path: Path) -> None:
    write_secret(tmp_path / "keys", line_of(Caller("alice", "lab"), KEY))
    write_secret(tmp_path / "token", TOKEN)
    security = {"keys_file": str(tmp_path / "keys"), "admin_token_file": str(tmp_path / "token")}
    settings = tmp_path / "evoke.yaml"
    settings.write_text(json.dumps({"security": security | {"admin_listen": ["127.0.0.1:0"]}}))
    bearer = {word: {"Authorization": f"Bearer {word}"} for word in (TOKEN, KEY, TOKEN[:-1], "é")}
    with _serving(upstream, "--config", str(settings)) as (clients, admin, _):
        for path in ADMIN_PATHS:
            assert _status(admin, path, bearer[TOKEN]) == 200
            assert _status(admin, path, bearer[TOKEN] | {"Host": "evoke.example"}) == 200
            for headers in ({}, bearer[KEY], bearer[TOKEN[:-1]], {"Authorization": "Bearer "}):
                assert _status(admin, path, headers) == 401
            for headers in ({}, bearer[KEY], bearer[TOKEN]):
                assert _status(clients, path, headers) == 403
        assert _status(clients, "/v1/models", bearer[KEY]) == 200
        assert _status(clients, "/v1/models", bearer[TOKEN]) == 401
        assert _status(clients, "/metrics", bearer[KEY]) == 403
        assert _status(admin, "/metrics") == _status(admin, "/metrics", {"Host": "proxy:1"}) == 200
        site = {"Host": "evil.example"}
        assert _status(admin, "/metrics", site) == 403
        assert _status(admin, "/metrics", site | bearer[TOKEN]) == 200
        output = _check_config(settings)
    assert "keys      1 of 1 tenants\n" in output and "with a token\n" in output


def _check_config(settings: Path) -> str:
    command = [sys.executable, "-m", "evoke_proxy", "check-config", "--config", str(settings)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_default_admin_address_in_use_is_reported_and_a_configured_one_ends_the_start(
    upstream: int,
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Another test's proxy may use the port for a moment; another process may keep it.
        for _ in range(100):
            with contextlib.suppress(OSError):
                other.bind(("127.0.0.1", 18090))
                other.listen()
                break
            time.sleep(0.1)
        with _serving(upstream) as (clients, admin, log):
            assert not admin and "serves no admin API: 127.0.0.1:18090" in log
            assert "is taken by " in log and "; --admin-listen " in log
            assert _status(clients, "/evoke/sessions") == 403
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "evoke_proxy", "serve", "--listen", "127.0.0.1:0"]
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        completed = subprocess.run([*command, "--admin-listen", address], timeout=60)
        assert completed.returncode == 1


@pytest.mark.parametrize("address", [":18090", "127.0.0.1:18090"])
def test_a_proxy_does_not_use_a_client_address_for_the_admin(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def addresses() -> list[object]:
        app = web.Application()
        app[OPERATOR_ACCESS] = OperatorAccess(Config())
        runner = web.AppRunner(app)
        await runner.setup()
        await _listen_for_admin(runner, SecurityConfig(), ("127.0.0.1:0", address))
        listening = list(runner.addresses)
        await runner.cleanup()
        return listening

    assert asyncio.run(addresses()) == []
    assert "serves no admin API: 127.0.0.1:18090 (security.admin_listen) is also in" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("address", ["0.0.0.0:18090", ":1", "[::]:1", "10.0.0.1:1", "host:1"])
def test_an_admin_address_beyond_localhost_needs_a_token(address: str) -> None:
    with pytest.raises(ConfigError, match="set security.admin_token_file"):
        load(None, {}, {"security.admin_listen": [address]})
    with pytest.raises(ConfigError, match="set security.admin_token_file"):
        load(None, {}, {"security.admin_listen": [], "listen": [address]})
    load(None, {}, {"security.admin_listen": [address], "security.admin_token_file": "/x"})
