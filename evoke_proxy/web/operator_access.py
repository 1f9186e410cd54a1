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


# Characters that end the host in a URL, or precede it.
_NO_HOST = frozenset("@/?#\\")


class OperatorAccess:
    """Checks the address and the token of requests to the admin API.

    Until `set_addresses` is called, every address counts as an admin address.
    """

    def __init__(self, config: Config) -> None:
        """Raises ConfigError when the token file cannot be read."""
        path = config.security.admin_token_file
        setting = "security.admin_token_file"
        self._token = read_token(Path(path), setting) if path else ""
        self._addresses: frozenset[tuple[str, int]] | None = None

    def set_addresses(self, addresses: Iterable[Any]) -> None:
        """Serve the admin API on these addresses only, and only the admin API on them."""
        self._addresses = frozenset((str(host), int(port)) for host, port, *_ in addresses)

    def is_admin_address(self, request: web.Request) -> bool:
        """Whether a request has arrived at an address that serves only the admin API."""
        return bool(self._addresses) and self._is_at_admin_address(request)

    def admit(self, request: web.Request) -> None:
        """Return when the request may use the admin API.

        Raises Forbidden at another address or for the page of another site, and Unauthenticated
        without the token.
        """
        if self._addresses is not None and not self._is_at_admin_address(request):
            raise Forbidden(
                "the admin API is served only at the address that security.admin_listen names; the"
                " proxy prints that address when it starts"
            )
        if not self._token:
            _refuse_names(request)
            return
        # As bytes: compare_digest accepts only ASCII text.
        keys = (key.encode("utf-8", "replace") for key in presented(request.headers))
        if not any([hmac.compare_digest(key, self._token.encode()) for key in keys]):
            raise Unauthenticated(
                "the admin token is missing or wrong: send the token of"
                " security.admin_token_file as Authorization: Bearer"
            )

    def _is_at_admin_address(self, request: web.Request) -> bool:
        addresses = self._addresses or frozenset()
        local = request.transport.get_extra_info("sockname") if request.transport else None
        if not isinstance(local, tuple):
            return False
        host, port = str(local[0]), int(local[1])
        # A socket bound to all addresses reports the address that the client used.
        wildcards = {("0.0.0.0", port), ("::", port)}
        return (host, port) in addresses or bool(wildcards & addresses)


OPERATOR_ACCESS = web.AppKey("operator_access", OperatorAccess)


def admit(request: web.Request) -> None:
    """Return when a request may use the admin API; raises Forbidden or Unauthenticated.

    After a 401 the admin page asks its user for the token, and sends it as `Authorization: Bearer`.
    """
    request.app[OPERATOR_ACCESS].admit(request)


def is_operator(request: web.Request) -> bool:
    """Whether a request may use the admin API."""
    try:
        admit(request)
    except (Forbidden, Unauthenticated):
        return False
    return True


def admit_page(request: web.Request) -> None:
    """Like `admit`, but needs no token: for the static files of the page, which hold no secrets."""
    with suppress(Unauthenticated):
        admit(request)


def is_own_route(request: web.Request) -> bool:
    """Whether the proxy answers the request itself.

    The matched route decides, because an encoded path may begin like an own path and match another
    route.
    """
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else ""
    return route.startswith("/evoke/") or route in ("/evoke", "/metrics")


@web.middleware
async def admin_only_address(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that relays no requests of admin addresses, where client keys are not checked."""
    if request.app[OPERATOR_ACCESS].is_admin_address(request) and not is_own_route(request):
        raise RequestError(
            "this address serves only the admin API; use that of `listen` for other requests",
            "not_found",
            404,
        )
    return await handler(request)


def _refuse_names(request: web.Request) -> None:
    """Accept only an IP address or localhost as the Host of a request without a token.

    This prevents DNS rebinding: the page of another site can make a browser send requests to this
    address under the host name of that site, but not under an IP address.
    """
    host = ""
    try:
        if _NO_HOST.intersection(request.host):
            raise ValueError("not a host and a port")
        host = urlsplit(f"//{request.host}").hostname or ""
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            message = (
                "without security.admin_token_file the host must be an IP address or localhost"
            )
            raise Forbidden(message) from None
