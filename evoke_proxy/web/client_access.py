"""Who may ask what of the proxy, and what llama-server is told of who asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from aiohttp import web
from multidict import CIMultiDict

from evoke_proxy.adapters.secret_files import KeyFile
from evoke_proxy.config import Config
from evoke_proxy.core.tenants.api_keys import Caller, presented
from evoke_proxy.engine.parsing.tenant import TENANT
from evoke_proxy.errors import Forbidden, Unauthenticated
from evoke_proxy.web import dialects
from evoke_proxy.web.operator_access import OPERATOR_ACCESS, is_ours

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CREDENTIALS = frozenset(("authorization", "x-api-key"))
# The headers that llama-server gets of a client with a key of ours. It reads none but these; of the
# others X-Conversation-Id would let tenants end each other's streams, and would have a stream go on
# when its client has gone.
FORWARDED = frozenset(
    """
    accept accept-encoding accept-language access-control-request-headers
    access-control-request-method anthropic-beta anthropic-version content-encoding content-length
    content-type origin traceparent tracestate user-agent x-evoke-server x-request-id
    """.split()
)
_CALLER = web.RequestKey("caller", Caller)
# What a tenant may ask of llama-server, spelled just so: it decodes %73lots, so anything else might
# be a way to what belongs to others (/slots, /lora-adapters, loading and unloading of models).
_TENANTS = {
    "GET": frozenset(("/props", "/models", "/v1/models")),
    "POST": dialects.ANSWER_PATHS.keys()
    | dialects.COUNT_PATHS.keys()
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
    """The rules for clients; every request passes when no keys are configured."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError when the file of the keys is of no use."""
        named = config.security.keys_file
        self._file = KeyFile(Path(named)) if named else None
        self._api_key = config.upstream.api_key

    def check(self, request: web.Request) -> None:
        """Raises Unauthenticated without a key that counts, Forbidden when the path is for none."""
        ours = is_ours(request) and request.raw_path.startswith("/evoke/")
        if (
            self._file is None or request.raw_path in dialects.HEALTH_PATHS or ours
        ):  # that has a guard of its own
            return
        if request.method == "OPTIONS" and _for_tenants(request):
            return  # a browser asks with it whether it may send a key
        request[_CALLER] = self._caller(request)
        if not _for_tenants(request):
            raise Forbidden("this path is not open to keys of clients", "evoke_forbidden")

    def _caller(self, request: web.Request) -> Caller:
        assert self._file is not None
        keys = self._file.keys
        found = (keys.caller(key) for key in presented(request.headers))
        caller = next((caller for caller in found if caller is not None), None)
        if caller is None:
            raise Unauthenticated("Invalid API Key")
        return caller

    def forwarded(self, headers: CIMultiDict[str]) -> CIMultiDict[str]:
        """The client's headers as llama-server gets them: all without keys of ours, with keys those
        in FORWARDED and our own credentials."""
        if self._file is None:
            return headers
        kept = CIMultiDict((k, v) for k, v in headers.items() if k.lower() in FORWARDED)
        self._add_credentials(kept)
        return kept

    def client(self, request: web.Request) -> Mapping[str, str]:
        """The headers as the engine is to see them, with the tenant that our key says."""
        caller = request.get(_CALLER)
        if caller is None:
            return request.headers
        headers = request.headers.items()
        seen = CIMultiDict((k, v) for k, v in headers if k.lower() not in CREDENTIALS)
        self._add_credentials(seen)
        seen[TENANT] = caller.tenant
        return seen

    def _add_credentials(self, headers: CIMultiDict[str]) -> None:
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"


ACCESS = web.AppKey("access", Access)


@web.middleware
async def client_access_check(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets a request through when its key does; the first thing that looks at it."""
    if not request.app[OPERATOR_ACCESS].is_admin_address(request):
        request.app[ACCESS].check(request)
    return await handler(request)


def _for_tenants(request: web.Request) -> bool:
    path = request.raw_path.partition("?")[0]
    return path == request.path and path in _TENANTS.get(request.method, frozenset())
