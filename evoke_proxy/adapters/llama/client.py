"""Client of one llama-server: streamed requests and JSON calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import orjson

from evoke_proxy.adapters.llama.transport import Body, HttpTransport, Reply, mapped_errors
from evoke_proxy.config import UpstreamConfig
from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.core.request.json_parsing import parse_in_pieces
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.errors import (
    RequestError,
    UpstreamProtocolError,
    UpstreamRejected,
    UpstreamUnavailable,
)

# Longer JSON is parsed or edited in a thread.
_INLINE_JSON_BYTES = 256 * 1024
_CREDENTIAL_HEADERS = ("Authorization", "X-Api-Key")
_STATUS_LOADING = 503
# A call that makes a router load a model. It is short, and changes no slot.
_LOAD_TARGET = "/tokenize?"
# Seconds that calls have waited in the current task, by the label of the call; None: not recorded.
AWAITED: ContextVar[dict[str, float] | None] = ContextVar("AWAITED", default=None)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How one JSON call is made.

    Attributes:
        label: name under which AWAITED records the time of the call.
        is_long: whether `long_call_timeout_s` bounds the call instead of `call_timeout_s`.
        check: called with each piece of a reply that is no error; what it raises ends the call.
    """

    label: str = "other"
    is_long: bool = False
    check: Callable[[bytes], None] | None = None


_DEFAULT_OPTIONS = CallOptions()


class LlamaClient:
    """Client of one llama-server, or of one model behind a router; an async context manager.

    A client that `as_caller`, `bound_to` or `failing_while_loading` returns shares the connections
    of the one it comes from, and needs no entering.

    Attributes:
        config: address, key and time-outs.
        url: base URL without a trailing slash.
        model: model that every call names; empty for a server with one model.
    """

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
        self.url = config.url.rstrip("/")
        self.model = ""
        self._transport = HttpTransport(config)
        self._owns_transport = True
        self._fails_while_loading = False
        # The key of the caller as headers; not sent when a key is configured.
        self._credentials: Mapping[str, str] = {}

    async def __aenter__(self) -> LlamaClient:
        if self._owns_transport:
            await self._transport.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._owns_transport:
            await self._transport.__aexit__()

    def as_caller(self, headers: Mapping[str, str]) -> LlamaClient:
        """A client whose calls send the key in `headers`, when no key is configured.

        `headers` are those of a client's request; all but its key are ignored.
        """
        bound = self._sharing_transport()
        names = [name for name in _CREDENTIAL_HEADERS if name in headers]
        bound._credentials = {name: headers[name] for name in names}
        return bound

    def bound_to(self, model: str) -> LlamaClient:
        """A client whose calls are about one model of a router and load no model."""
        bound = self._sharing_transport()
        bound.model = model
        return bound

    def failing_while_loading(self) -> LlamaClient:
        """A client whose `open` raises UpstreamUnavailable on a 503, before any body is read."""
        failing = self._sharing_transport()
        failing._fails_while_loading = True
        return failing

    @asynccontextmanager
    async def open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None = None,
    ) -> AsyncIterator[Reply]:
        """Send a request with this client's credentials and model, as `Transport.open` does."""
        async with self._transport.open(method, self._addressed(target), headers, body) as reply:
            if self._fails_while_loading and reply.status == _STATUS_LOADING:
                message = f"llama-server at {self.url} takes no requests yet"
                raise UpstreamUnavailable(message, self.url, reached=False)
            yield reply

    async def call(
        self,
        method: str,
        target: str,
        body: object = None,
        options: CallOptions = _DEFAULT_OPTIONS,
    ) -> dict[str, Any]:
        """Make one JSON call; a body of bytes, or a tuple of them, is sent unchanged.

        Raises UpstreamRejected on a status of 400 or above, UpstreamTimeout after the configured
        time, UpstreamProtocolError when the reply is no JSON object, and what `options.check`
        raises.
        """
        data: Any = await self._with_model(body)
        if not (data is None or isinstance(data, bytes | tuple)):
            data = orjson.dumps(data)
        config = self.config
        limit_s = config.long_call_timeout_s if options.is_long else config.call_timeout_s
        with mapped_errors(self.url):
            async with asyncio.timeout(limit_s):
                with _timed(options.label):
                    headers = self.own_headers()
                    async with self.open(method, target, headers, data) as reply:
                        raw = await reply.read(options.check if reply.status < 400 else None)
        if len(raw) > _INLINE_JSON_BYTES:
            answer = await asyncio.to_thread(_parsed, target, reply.status, raw)
        else:
            answer = _parsed(target, reply.status, raw)
        if self.model and target == "/v1/models":  # a router lists all of its models
            models = answer.get("data") or ()
            answer["data"] = [item for item in models if item.get("id") == self.model]
        return answer

    async def info(self) -> ServerInfo:
        """Ask what the server is and can do; UpstreamError when it does not say.

        A router does not route block calls, so a model behind one has none of their features.
        """
        props = await self.call("GET", "/props")
        info = ServerInfo.parse(props)
        if not self.model:
            return info
        without_features = {key: value for key, value in props.items() if key != "evoke"}
        return replace(ServerInfo.parse(without_features), instance=info.instance)

    async def is_loaded(self) -> bool:
        """Whether the router has this model loaded; no slot holds rows of one that is not."""
        answer = await self.call("GET", "/v1/models")
        return any((it.get("status") or {}).get("value") == "loaded" for it in answer["data"])

    async def load(self) -> None:
        """Have the router load this model; UpstreamError when that fails.

        Nothing happens where the server has only one model.
        """
        if self.model:
            options = CallOptions("load", is_long=True)
            await self.call("POST", _LOAD_TARGET, {"content": ""}, options)

    def own_headers(self) -> dict[str, str]:
        """Headers of a call of the proxy, with the configured key or that of the caller."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.config.api_key:
            return headers | {"Authorization": f"Bearer {self.config.api_key}"}
        return headers | dict(self._credentials)

    def _sharing_transport(self) -> LlamaClient:
        client = copy(self)
        client._owns_transport = False
        return client

    def _addressed(self, target: str) -> str:
        """The target with the model, where the client is bound to one; no model is loaded."""
        if not self.model or target == _LOAD_TARGET:
            return target
        query = f"model={quote(self.model, safe='')}&autoload=false"
        return f"{target}{'&' if '?' in target else '?'}{query}"

    async def _with_model(self, body: object) -> object:
        """The body with the model, where the client is bound to one."""
        if self.model and isinstance(body, dict):
            return body | {"model": self.model}
        if self.model and isinstance(body, bytes):
            fields = {"model": orjson.dumps(self.model)}
            return await asyncio.to_thread(edit_top_level, body, fields, ())
        return body


def _parsed(target: str, status: int, raw: bytes) -> dict[str, Any]:
    try:
        answer = (
            parse_in_pieces(raw, orjson.loads)
            if len(raw) > _INLINE_JSON_BYTES
            else orjson.loads(raw)
        )
    except (orjson.JSONDecodeError, RequestError) as error:
        if status >= 400:
            raise UpstreamRejected(status, raw) from error
        raise UpstreamProtocolError(f"llama-server answered {target} with no JSON") from error
    if status >= 400:
        raise UpstreamRejected(status, raw)
    if not isinstance(answer, dict):
        raise UpstreamProtocolError(f"llama-server answered {target} with no JSON object")
    return answer


@contextmanager
def _timed(label: str) -> Iterator[None]:
    seconds, started = AWAITED.get(), time.perf_counter()
    try:
        yield
    finally:
        if seconds is not None:
            seconds[label] = seconds.get(label, 0.0) + time.perf_counter() - started
