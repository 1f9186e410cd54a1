"""One model of a llama-server that routes to several."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import orjson

from evoke_proxy.adapters.llama.client import Body, LlamaClient, Reply
from evoke_proxy.core.request.splice import edit_top_level
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.intake.large import read_apart

# As any other call, but that the router does what it was started to do.
_LOADING = "/tokenize?"


class OneModel(LlamaClient):
    """Our calls about a model say which they mean.

    Its router is entered and left on its own. What clients send names a model itself.
    """

    def __init__(self, router: LlamaClient, model: str) -> None:
        super().__init__(router.config)
        self._router = router
        self._model = model

    async def __aenter__(self) -> OneModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    @asynccontextmanager
    async def open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None = None,
    ) -> AsyncIterator[Reply]:
        """As of any llama-server; no model is loaded for it."""
        query = f"model={quote(self._model, safe='')}&autoload=false"
        if target != _LOADING:
            target += ("&" if "?" in target else "?") + query
        async with self._router.open(method, target, headers, body) as reply:
            yield reply

    async def call(
        self,
        method: str,
        target: str,
        body: object = None,
        client: Mapping[str, str] | None = None,
        name: str = "other",
        patient: bool = False,
        check: Callable[[bytes], None] | None = None,
    ) -> dict[str, Any]:
        """As of any llama-server."""
        if isinstance(body, dict):
            body = body | {"model": self._model}
        elif isinstance(body, bytes):
            named = {"model": orjson.dumps(self._model)}
            body = await read_apart(body, edit_top_level, body, named, ())
        answer = await super().call(method, target, body, client, name, patient, check)
        if target == "/v1/models":  # a router tells of all of them
            answer["data"] = [it for it in answer.get("data") or () if it.get("id") == self._model]
        return answer

    async def info(self, client: Mapping[str, str] | None = None) -> ServerInfo:
        """What the model's server is, without what is not routed to it: block calls."""
        props = await self.call("GET", "/props", client=client)
        server = ServerInfo.parse({key: props[key] for key in props if key != "evoke"})
        return replace(server, instance=ServerInfo.parse(props).instance)

    async def loaded(self) -> bool:
        """Whether the router has it loaded now; of one that is not, nothing is in any slot."""
        answer = await self.call("GET", "/v1/models")
        return any((it.get("status") or {}).get("value") == "loaded" for it in answer["data"])

    async def load(self, client: Mapping[str, str] | None) -> None:
        """Have it loaded as a request would; raises UpstreamError when that fails."""
        asked = {"content": ""}
        await self.call("POST", _LOADING, asked, client, "load", patient=True)
