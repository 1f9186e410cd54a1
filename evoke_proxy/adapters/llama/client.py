"""Client of one llama-server: streamed requests and JSON calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote

import orjson

from evoke_proxy.adapters.llama.transport import Body, HttpTransport, Reply, mapped_errors
from evoke_proxy.config import UpstreamConfig
from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.core.request.json_parsing import parse_in_pieces
from evoke_proxy.core.servers.disk_status import unusable_reason
from evoke_proxy.core.servers.server_info import ServerInfo, trained_context
from evoke_proxy.errors import (
    STATUS_LOADING,
    EvokeError,
    Forbidden,
    RequestError,
    Unauthenticated,
    UpstreamProtocolError,
    UpstreamRejected,
    UpstreamUnavailable,
)
from evoke_proxy.thread_pools import for_body, run_in

# Longer replies are parsed in a thread, so that the event loop stays responsive.
_INLINE_JSON_BYTES = 256 * 1024
_CREDENTIAL_HEADERS = ("Authorization", "X-Api-Key")
_STATUSES_WITHOUT_KEY = (401, 403)
# The codes with which evoke-proxy refuses a call; those of llama-server are numbers.
_PROXY_CODES = (Unauthenticated.code, Forbidden.code)
# Most seconds to wait for what the server says only between two decodes, where it is not needed.
_BUSY_S = 2.0
# The call with which a router is made to load a model: it is short and changes no slot.
_LOAD_TARGET = "/tokenize?"


class CallTimes(Protocol):
    """Records when calls were made."""

    def add_call(self, label: str, began: float, ended: float) -> None:
        """Record a call with its label and times of the monotonic clock, seconds."""


# Records the calls of the current task; None: times are not recorded.
AWAITED: ContextVar[CallTimes | None] = ContextVar("AWAITED", default=None)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How one JSON call is made.

    Attributes:
        label: name under which AWAITED records the call.
        is_long: whether `upstream.long_call_timeout_s` limits the call, not `call_timeout_s`.
        check: called with each piece of a reply whose status is below 400; an exception that it
            raises ends the call.
    """

    label: str = "other"
    is_long: bool = False
    check: Callable[[bytes], None] | None = None


_DEFAULT_OPTIONS = CallOptions()


@dataclass(frozen=True, slots=True)
class KeyProblem:
    """llama-server refuses the proxy's own calls because of their API key.

    Attributes:
        problem: What happens, as a clause without a full stop.
        fix: What to set.
    """

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.fix}"


class LlamaClient:
    """Client of one llama-server, or of one model behind a router; an async context manager.

    Only the client that the constructor makes is entered. The clients that `as_caller`, `bound_to`
    and `failing_while_loading` return use its connections.

    Attributes:
        config: address, key and time-outs.
        url: base URL without a trailing slash.
        model: name of the model that every call is for; empty for a server with one model.
    """

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
        self.url = config.url.rstrip("/")
        self.model = ""
        self._transport = HttpTransport(config)
        self._owns_transport = True
        self._fails_while_loading = False
        # By instance of the server: the context that its model was trained for, and why it cannot
        # use its disk tier.
        self._trained: dict[str, int | None] = {}
        self._unusable_disks: dict[str, str] = {}
        # Headers with the key of the caller; not sent if `upstream.api_key` is set.
        self._credentials: Mapping[str, str] = {}

    async def __aenter__(self) -> LlamaClient:
        if self._owns_transport:
            await self._transport.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._owns_transport:
            await self._transport.__aexit__()

    def as_caller(self, headers: Mapping[str, str]) -> LlamaClient:
        """Return a client whose own calls carry the key in `headers`, unless a key is configured.

        `headers` are those of a request to the proxy; only Authorization and X-Api-Key are used.
        """
        bound = self._sharing_transport()
        names = [name for name in _CREDENTIAL_HEADERS if name in headers]
        bound._credentials = {name: headers[name] for name in names}
        return bound

    def bound_to(self, model: str) -> LlamaClient:
        """Return a client whose calls name one model of a router, and do not load it."""
        bound = self._sharing_transport()
        bound.model = model
        return bound

    def failing_while_loading(self) -> LlamaClient:
        """Return a client whose `open` raises UpstreamUnavailable for a reply with STATUS_LOADING.

        It raises before the body is read, so that the request can be sent to another server.
        """
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
        """Send a request and yield its reply, as `HttpTransport.open` does.

        Adds the model to `target` if the client is bound to one; sends `headers` unchanged.
        """
        async with self._transport.open(method, self._addressed(target), headers, body) as reply:
            if self._fails_while_loading and reply.status == STATUS_LOADING:
                raise UpstreamUnavailable.while_loading(self.url)
            yield reply

    async def call(
        self,
        method: str,
        target: str,
        body: object = None,
        options: CallOptions = _DEFAULT_OPTIONS,
    ) -> dict[str, Any]:
        """Make one JSON call and return the object in the reply.

        `body` is encoded as JSON; bytes, or a tuple of bytes to send one after the other, are JSON
        already. Raises UpstreamRejected for a status of 400 or above, UpstreamTimeout after the
        configured time, UpstreamUnavailable when the connection fails, UpstreamProtocolError when
        the reply is not a JSON object, and any exception of `options.check`.
        """
        data: Any = await self._with_model(body)
        if not (data is None or isinstance(data, bytes | tuple)):
            data = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)
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
        """Ask the server for its properties and features; UpstreamError when that fails.

        A router does not forward block calls, so a model behind one has none of their features.
        """
        props = await self.call("GET", "/props")
        info = ServerInfo.parse(props)
        if not self.model:
            trained, reason = await self._trained_context(info), await self._unusable_disk(info)
            return replace(info, n_ctx_train=trained, disk_unusable=reason)
        without_features = {key: value for key, value in props.items() if key != "evoke"}
        return replace(ServerInfo.parse(without_features), instance=info.instance)

    async def _trained_context(self, info: ServerInfo) -> int | None:
        """Return what the model of a patched server was trained for; each instance is asked once.

        None when it does not say; also of another server, where nothing depends on it.
        """
        if not info.answers_block_calls or info.n_ctx is None:
            return None
        if info.instance not in self._trained:
            try:
                found = trained_context(await self.call("GET", "/v1/models"))
            except EvokeError:
                return None
            self._trained.clear()
            self._trained[info.instance] = found
        return self._trained[info.instance]

    async def _unusable_disk(self, info: ServerInfo) -> str:
        """Return why a patched server cannot use its disk tier; each instance is asked once.

        Empty when it can or has none, and while it is too busy to say.
        """
        if info.has_disk or not info.answers_block_calls:
            return ""
        if info.instance not in self._unusable_disks:
            try:
                async with asyncio.timeout(_BUSY_S):
                    answer = await self.call("GET", "/slots/0/blocks?tenant=&since=latest")
            except (EvokeError, TimeoutError):
                return ""
            self._unusable_disks.clear()
            self._unusable_disks[info.instance] = unusable_reason(answer)
        return self._unusable_disks[info.instance]

    async def is_loaded(self) -> bool:
        """Whether the router has loaded this model; otherwise its slots are empty."""
        answer = await self.call("GET", "/v1/models")
        return any((it.get("status") or {}).get("value") == "loaded" for it in answer["data"])

    async def load(self) -> None:
        """Have the router load this model; UpstreamError when that fails.

        Nothing happens where the server has only one model.
        """
        if self.model:
            options = CallOptions("load", is_long=True)
            await self.call("POST", _LOAD_TARGET, {"content": ""}, options)

    def key_problem(self, error: EvokeError) -> KeyProblem | None:
        """Return what is wrong if a call without a client's key was refused; None otherwise.

        A proxy such as this one is recognised: its keys open no calls but those of clients.
        """
        if not isinstance(error, UpstreamRejected) or error.status not in _STATUSES_WITHOUT_KEY:
            return None
        if error.error.get("code") in _PROXY_CODES:
            return KeyProblem(
                f"{self.url} is a proxy that asks clients for a key ({error.status}"
                f" {error.error['code']})",
                "name llama-server's own address instead (--upstream, upstream.url)",
            )
        sent = "the key in upstream.api_key" if self.config.api_key else "no key"
        return KeyProblem(
            f"llama-server at {self.url} answers {error.status} to the calls that the proxy makes"
            f" itself, with {sent}",
            "set upstream.api_key (EVOKE_UPSTREAM_API_KEY) to a key that llama-server has from"
            " --api-key, --api-key-file or LLAMA_API_KEY",
        )

    def own_headers(self) -> dict[str, str]:
        """Return the headers for a call of the proxy, with the configured or the caller's key."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.config.api_key:
            return headers | {"Authorization": f"Bearer {self.config.api_key}"}
        return headers | dict(self._credentials)

    def _sharing_transport(self) -> LlamaClient:
        client = copy(self)
        client._owns_transport = False
        return client

    def _addressed(self, target: str) -> str:
        """Add to a target the model, if the client is bound to one, and that it is not loaded."""
        if not self.model or target == _LOAD_TARGET:
            return target
        query = f"model={quote(self.model, safe='')}&autoload=false"
        return f"{target}{'&' if '?' in target else '?'}{query}"

    async def _with_model(self, body: object) -> object:
        """Add the model to a body, if the client is bound to one."""
        if self.model and isinstance(body, dict):
            return body | {"model": self.model}
        if self.model and isinstance(body, bytes):
            fields = {"model": orjson.dumps(self.model)}
            return await run_in(for_body(len(body)), edit_top_level, body, fields, ())
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
        raise UpstreamProtocolError(f"llama-server's answer to {target} is not JSON") from error
    if status >= 400:
        raise UpstreamRejected(status, raw)
    if not isinstance(answer, dict):
        raise UpstreamProtocolError(f"llama-server's answer to {target} is not a JSON object")
    return answer


@contextmanager
def _timed(label: str) -> Iterator[None]:
    times, began = AWAITED.get(), time.monotonic()
    try:
        yield
    finally:
        if times is not None:
            times.add_call(label, began, time.monotonic())
