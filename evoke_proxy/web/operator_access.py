"""Who may operate the proxy: asked before everything under /evoke/ but health and readiness."""

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
    """Where the admin comes in, and with which token.

    Until addresses are named, every address is one for the admin too: whoever makes a runner of
    their own has them to themselves.
    """

    def __init__(self, config: Config) -> None:
        """Raises ConfigError when the file of the token is of no use."""
        named = config.security.admin_token_file
        setting = "security.admin_token_file"
        self._token = read_token(Path(named), setting) if named else ""
        self._addresses: frozenset[tuple[str, int]] | None = None

    def open_at(self, addresses: Iterable[Any]) -> None:
        """From now on only requests to these addresses are the admin's, and to them no others."""
        self._addresses = frozenset((str(host), int(port)) for host, port, *_ in addresses)

    def is_admin_address(self, request: web.Request) -> bool:
        """Whether a request came to an address that is the admin's alone."""
        return bool(self._addresses) and self._at(request)

    def admit(self, request: web.Request) -> None:
        """Raises Forbidden at another address or for another site's page, Unauthenticated without
        the token."""
        if self._addresses is not None and not self._at(request):
            raise Forbidden(
                "this is served where the proxy is operated (security.admin_listen), which it says"
                " when it starts"
            )
        if not self._token:
            _refuse_names(request)
            return
        # Both as bytes: compare_digest takes no other text than ASCII.
        shown = (key.encode("utf-8", "replace") for key in presented(request.headers))
        if not any([hmac.compare_digest(key, self._token.encode()) for key in shown]):
            raise Unauthenticated("the token of the admin is missing or wrong")

    def _at(self, request: web.Request) -> bool:
        assert self._addresses is not None
        found = request.transport.get_extra_info("sockname") if request.transport else None
        if not isinstance(found, tuple):
            return False
        host, port = str(found[0]), int(found[1])
        # One that is bound to every address is reached at another than it is bound to.
        every = {("0.0.0.0", port), ("::", port)}
        return (host, port) in self._addresses or bool(every & self._addresses)


OPERATOR_ACCESS = web.AppKey("door", OperatorAccess)


def admit(request: web.Request) -> None:
    """Return when this request may see and change what is everybody's; else raise an EvokeError.

    A browser sends the token that its user has typed in as `Authorization: Bearer`, once an answer
    was 401.
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
    """As `admit`, for the files of the page: they say nothing, and a browser asks for them before
    anybody can have typed in a token."""
    with suppress(Unauthenticated):
        admit(request)


def is_ours(request: web.Request) -> bool:
    """Whether a handler of ours gets it: what a path begins with does not say where it leads."""
    resource = request.match_info.route.resource
    leads = resource.canonical if resource is not None else ""
    return leads.startswith("/evoke/") or leads in ("/evoke", "/metrics")


@web.middleware
async def apart(request: web.Request, handler: Handler) -> web.StreamResponse:
    """At an address of the admin nothing goes on to llama-server: it asks nobody for a key."""
    if request.app[OPERATOR_ACCESS].is_admin_address(request) and not is_ours(request):
        raise RequestError("this address is for the admin alone", "not_found", 404)
    return await handler(request)


def _refuse_names(request: web.Request) -> None:
    """Without a token, a page of somebody else could have a browser ask us under a name of its
    own that leads here; it cannot do so under a number."""
    host = ""
    try:
        host = urlsplit(f"//{request.host}").hostname or ""
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            message = "without security.admin_token_file, ask by number or as localhost"
            raise Forbidden(message) from None
