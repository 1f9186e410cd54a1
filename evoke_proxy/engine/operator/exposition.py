"""What llama-servers export themselves, as it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.servers.labelled import labelled
from evoke_proxy.errors import EvokeError, UpstreamError, UpstreamRejected

# Half of what Prometheus waits unless it is told otherwise.
_SCRAPE_S = 5.0


@dataclass(frozen=True, slots=True)
class Exposition:
    """The metrics of llama-servers. `headers` are those of the answer, when there is one server."""

    text: bytes
    headers: Mapping[str, str]


async def exposition(servers: Mapping[str, LlamaClient], metrics: Metrics) -> Exposition:
    """Their own metrics, of several each with the label `server`; nothing of one that has none, is
    down, or would be woken by being asked.

    `evoke_upstream_up` says whether any of them answered. It changes once, when all have: a scrape
    that overlaps with another one never reads a value that only stands for "not asked yet".
    """
    scrapes = [_Scrape(upstream) for upstream in servers.values()]
    texts = await asyncio.gather(*[scrape.text() for scrape in scrapes])
    metrics.upstream_up.set(any(scrape.answered for scrape in scrapes))
    if len(texts) == 1:
        return Exposition(texts[0], scrapes[0].headers)
    return Exposition(labelled(dict(zip(servers, texts, strict=True))), {})


class _Scrape:
    """One scrape of one llama-server; `answered` says whether it did, `headers` with what."""

    def __init__(self, upstream: LlamaClient) -> None:
        self._upstream = upstream
        self.answered = False
        self.headers: Mapping[str, str] = {}

    async def text(self) -> bytes:
        """Its metrics, or a comment that says why there are none.

        llama-server answers between two decodes. A scraper has less patience than some decodes
        take, and is to have our part then.
        """
        try:
            async with asyncio.timeout(_SCRAPE_S):
                body = await self._asked()
        except (EvokeError, TimeoutError) as error:
            said = error.public if isinstance(error, UpstreamError) else str(error)
            why = " ".join(said.split()) or "it is too slow"  # it may quote lines
            return f"# llama-server has no metrics now: {why}\n".encode()
        return body if not body or body.endswith(b"\n") else body + b"\n"

    async def _asked(self) -> bytes:
        try:
            sleeping = (await self._upstream.info()).sleeping
        except UpstreamRejected:
            self.answered = True
            raise
        self.answered = True
        if sleeping and self._upstream.wakes_for_metrics:
            return b"# llama-server sleeps: its metrics are left out\n"
        async with self._upstream.open("GET", "/metrics", self._upstream.own_headers()) as reply:
            body = await reply.read()
        if sleeping and not (await self._upstream.info()).sleeping:
            # Of older versions: it is not asked again while it sleeps.
            self._upstream.wakes_for_metrics = True
        if reply.status != 200:
            return b""
        self.headers = reply.headers
        return body
