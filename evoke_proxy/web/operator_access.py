"""Access control for operators: every path under /evoke/ except health and readiness."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from evoke_proxy.adapters.secret_files import read_token
from evoke_proxy.config import Config
from evoke_proxy.core.tenants.api_keys import presented
from evoke_proxy.errors import Forbidden, RequestError, Unauthenticated

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OperatorAccess:
    """Checks the address and the token of requests to the admin API.

    Until `set_addresses` is called every address counts as an admin address, for an application
    that is served by a runner of its own.
    """

    def __init__(self, config: Config) -> None:
        """Raises ConfigError when the token file cannot be read."""
        named = config.security.admin_token_file
        setting = "security.admin_token_file"
        self._token = read_token(Path(named), setting) if named else ""
        self._addresses: frozenset[tuple[str, int]] | None = None

    def set_addresses(self, addresses: Iterable[Any]) -> None:
        """Serve the admin API on these addresses only, and nothing else there."""
        self._addresses = frozenset((str(host), int(port)) for host, port, *_ in addresses)

    def is_admin_address(self, request: web.Request) -> bool:
        """Whether a request came in on an address that serves the admin API only."""
        return bool(self._addresses) and self._is_at_admin_address(request)

    def admit(self, request: web.Request) -> None:
        """Return when the request may operate the proxy.

        Raises Forbidden at another address or for the page of another site, and Unauthenticated
        without the token.
        """
        if self._addresses is not None and not self._is_at_admin_address(request):
            raise Forbidden(
                "this is served where the proxy is operated (security.admin_listen), which it says"
                " when it starts"
            )
        if not self._token:
            _refuse_names(request)
            return
        # As bytes: compare_digest accepts only ASCII text.
        keys = (key.encode("utf-8", "replace") for key in presented(request.headers))
        if not any([hmac.compare_digest(key, self._token.encode()) for key in keys]):
            raise Unauthenticated("the token of the admin is missing or wrong")

    def _is_at_admin_address(self, request: web.Request) -> bool:
        addresses = self._addresses or frozenset()
        found = request.transport.get_extra_info("sockname") if request.transport else None
        if not isinstance(found, tuple):
            return False
        host, port = str(found[0]), int(found[1])
        # A socket bound to all addresses reports the address that the client used.
        wildcards = {("0.0.0.0", port), ("::", port)}
        return (host, port) in addresses or bool(wildcards & addresses)


OPERATOR_ACCESS = web.AppKey("door", OperatorAccess)


def admit(request: web.Request) -> None:
    """Return when a request may operate the proxy; raises Forbidden or Unauthenticated.

    After a 401 the admin page asks its user for the token, and sends it as `Authorization: Bearer`.
    """
    request.app[OPERATOR_ACCESS].admit(request)


def is_operator(request: web.Request) -> bool:
    """Whether `admit` lets this request pass."""
    try:
        admit(request)
    except (Forbidden, Unauthenticated):
        return False
    return True


def admit_page(request: web.Request) -> None:
    """Like `admit`, without a token: for the static files of the page, which hold no secrets."""
    with suppress(Unauthenticated):
        admit(request)


def is_own_route(request: web.Request) -> bool:
    """Whether the proxy answers the request itself.

    The matched route decides: an encoded path may begin like one and lead elsewhere.
    """
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else ""
    return route.startswith("/evoke/") or route in ("/evoke", "/metrics")


@web.middleware
async def admin_only_address(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that relays nothing from admin addresses, where no client keys are checked."""
    if request.app[OPERATOR_ACCESS].is_admin_address(request) and not is_own_route(request):
        raise RequestError("this address is for the admin alone", "not_found", 404)
    return await handler(request)


def _refuse_names(request: web.Request) -> None:
    """Accept only an IP address or localhost as the Host of a request without a token.

    This prevents DNS rebinding: the page of another site can make a browser send requests here
    under its own host name, but not under an IP address.
    """
    host = ""
    try:
        host = urlsplit(f"//{request.host}").hostname or ""
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            message = "without security.admin_token_file, ask by number or as localhost"
            raise Forbidden(message) from None
