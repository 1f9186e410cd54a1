"""Who may ask what of the proxy, and what llama-server is told of who asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from aiohttp import web
from multidict import CIMultiDict

from evoke_proxy.adapters.secret_files import KeyFile
from evoke_proxy.config import Config
from evoke_proxy.core.keys import Caller, presented
from evoke_proxy.engine.intake.reading import TENANT
from evoke_proxy.errors import Forbidden, Unauthenticated
from evoke_proxy.web import dialects
from evoke_proxy.web.guard import DOOR, is_ours

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CREDENTIALS = frozenset(("authorization", "x-api-key"))
_CALLER = web.RequestKey("caller", Caller)
# Said to whoever asks: a load balancer has no key, and they tell nothing of anybody.
_OPEN = frozenset(("/health", "/v1/health"))
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
        if self._file is None or request.raw_path in _OPEN or ours:  # that has a guard of its own
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
        """What llama-server gets of a client's headers: with keys of ours, none of them."""
        if self._file is None:
            return headers
        kept = CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in CREDENTIALS)
        if self._api_key:
            kept["Authorization"] = f"Bearer {self._api_key}"
        return kept

    def client(self, request: web.Request) -> Mapping[str, str]:
        """The headers as the engine is to see them, with the tenant that our key says."""
        caller = request.get(_CALLER)
        if caller is None:
            return request.headers
        known = self.forwarded(request.headers.copy())
        known[TENANT] = caller.tenant
        return known


ACCESS = web.AppKey("access", Access)


@web.middleware
async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets a request through when its key does; the first thing that looks at it."""
    if not request.app[DOOR].is_own(request):
        request.app[ACCESS].check(request)
    return await handler(request)


def _for_tenants(request: web.Request) -> bool:
    path = request.raw_path.partition("?")[0]
    return path == request.path and path in _TENANTS.get(request.method, frozenset())
