"""Access control for clients: their keys, the paths open to them, the headers sent on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from aiohttp import web
from multidict import CIMultiDict

from evoke_proxy.adapters.secret_files import KeyFile
from evoke_proxy.config import Config
from evoke_proxy.core.tenants.api_keys import Caller, presented
from evoke_proxy.engine.parsing.request import TENANT
from evoke_proxy.errors import Forbidden, Unauthenticated
from evoke_proxy.web import endpoints
from evoke_proxy.web.operator_access import OPERATOR_ACCESS, is_own_route

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CREDENTIALS = frozenset(("authorization", "x-api-key"))
# The headers that are forwarded for a client with a key of the proxy. The only other header that
# llama-server reads is X-Conversation-Id. It is dropped: it lets tenants end each other's streams,
# and lets a stream continue after its client has disconnected.
FORWARDED = frozenset(
    """
    accept accept-encoding accept-language access-control-request-headers
    access-control-request-method anthropic-beta anthropic-version content-encoding content-length
    content-type origin traceparent tracestate user-agent x-evoke-server x-request-id
    """.split()
)
_CALLER = web.RequestKey("caller", Caller)
# The paths that are open to tenants, compared without decoding. llama-server decodes paths: with
# decoding, %73lots would reach what tenants share (/slots, /lora-adapters, loading of models).
_TENANTS = {
    "GET": frozenset(("/props", "/models", "/v1/models")),
    "POST": endpoints.ANSWER_PATHS.keys()
    | endpoints.COUNT_PATHS.keys()
    | {endpoints.PREFETCH_PATH}
    | frozenset(
        """
        /tokenize /detokenize /apply-template /embedding /embeddings /v1/embeddings /rerank
        /reranking /v1/rerank /v1/reranking /v1/audio/transcriptions
        """.split()
    ),
}
_TENANTS["HEAD"] = _TENANTS["GET"]
_TENANTS["OPTIONS"] = _TENANTS["GET"] | _TENANTS["POST"]


class Access:
    """Checks client keys and maps them to tenants; without configured keys all are admitted."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError when the key file cannot be read."""
        path = config.security.keys_file
        self._file = KeyFile(Path(path)) if path else None
        self._api_key = config.upstream.api_key

    def check(self, request: web.Request) -> None:
        """Raises Unauthenticated without a valid key, Forbidden on a path closed to clients."""
        # OperatorAccess checks the requests to the proxy's own paths, except prefetches.
        is_own_path = is_own_route(request) and request.raw_path.startswith("/evoke/")
        is_own_path = is_own_path and request.path != endpoints.PREFETCH_PATH
        if self._file is None or request.raw_path in endpoints.HEALTH_PATHS or is_own_path:
            return
        is_open = _is_open_to_tenants(request)
        if request.method == "OPTIONS" and is_open:
            return  # a browser's preflight request carries no key
        request[_CALLER] = _caller(request, self._file)
        if not is_open:
            raise Forbidden("this path is not open to keys of clients", "evoke_forbidden")

    def forwarded(self, headers: CIMultiDict[str]) -> CIMultiDict[str]:
        """The headers to forward to llama-server.

        Without configured keys these are all headers of the client. With keys these are the headers
        in FORWARDED and the proxy's own credentials.
        """
        if self._file is None:
            return headers
        forwarded = CIMultiDict((k, v) for k, v in headers.items() if k.lower() in FORWARDED)
        self._add_credentials(forwarded)
        return forwarded

    def client(self, request: web.Request) -> Mapping[str, str]:
        """The client's headers for the engine, with the tenant that its key names."""
        caller = request.get(_CALLER)
        if caller is None:
            return request.headers
        items = request.headers.items()
        headers = CIMultiDict((k, v) for k, v in items if k.lower() not in CREDENTIALS)
        self._add_credentials(headers)
        headers[TENANT] = caller.tenant
        return headers

    def _add_credentials(self, headers: CIMultiDict[str]) -> None:
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"


ACCESS = web.AppKey("access", Access)


@web.middleware
async def client_access_check(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that checks the key of a client before the request is processed."""
    if not request.app[OPERATOR_ACCESS].is_admin_address(request):
        request.app[ACCESS].check(request)
    return await handler(request)


def _caller(request: web.Request, file: KeyFile) -> Caller:
    """The caller whose key the request presents; raises Unauthenticated without a valid key."""
    callers = (file.keys.caller(key) for key in presented(request.headers))
    caller = next((caller for caller in callers if caller is not None), None)
    if caller is None:
        raise Unauthenticated("Invalid API Key")
    return caller


def _is_open_to_tenants(request: web.Request) -> bool:
    path = request.raw_path.partition("?")[0]
    return path == request.path and path in _TENANTS.get(request.method, frozenset())
