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
# The ends of names that no site on the internet has: of services, of machines of a local network.
_LOCAL_NAMES = (".svc", ".local", ".internal", ".localhost", ".home.arpa")


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
        if not self.serves_admin(request):
            raise Forbidden(
                "the admin API is served only at the address that security.admin_listen names; the"
                " proxy prints that address when it starts"
            )
        if not self._token:
            _refuse_names(request)
        elif not self._has_token(request):
            raise Unauthenticated(
                "the admin token is missing or wrong: send the token of"
                " security.admin_token_file as Authorization: Bearer"
            )

    def check_scrape(self, request: web.Request) -> None:
        """Return when the request may read the metrics of an admin address, also without a token.

        Raises Forbidden when the page of another site may have made it. With a token the names of
        containers and services are accepted, too, and with the token in the request every name.
        """
        if not self._token:
            _refuse_names(request)
        elif not (self._has_token(request) or _is_local(_host_of(request))):
            raise Forbidden(
                "the host must be an IP address, localhost, a name without a dot, or one that ends"
                f" in {', '.join(_LOCAL_NAMES)}; under other names send the token of"
                " security.admin_token_file as Authorization: Bearer"
            )

    def serves_admin(self, request: web.Request) -> bool:
        """Whether a request has arrived at an address that serves the admin API."""
        return self._addresses is None or self._is_at_admin_address(request)

    def _has_token(self, request: web.Request) -> bool:
        # As bytes: compare_digest accepts only ASCII text.
        keys = (key.encode("utf-8", "replace") for key in presented(request.headers))
        return any([hmac.compare_digest(key, self._token.encode()) for key in keys])

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
    if not _is_address(_host_of(request)):
        message = "without security.admin_token_file the host must be an IP address or localhost"
        raise Forbidden(message)


def _host_of(request: web.Request) -> str:
    """The host that a request is for, without its port; empty when it is malformed."""
    try:
        if _NO_HOST.intersection(request.host):
            return ""
        return urlsplit(f"//{request.host}").hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    """Whether a host is an IP address, or localhost."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def _is_local(host: str) -> bool:
    """Whether a host is an address, or has a name that no site on the internet can have."""
    return bool(host) and ("." not in host or _is_address(host) or host.endswith(_LOCAL_NAMES))
