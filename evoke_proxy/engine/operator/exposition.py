"""What llama-servers export themselves, as it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.upstream import Upstream
from evoke_proxy.core.servers.labelled import labelled
from evoke_proxy.errors import EvokeError, UpstreamRejected

# Half of what Prometheus waits unless it is told otherwise.
_SCRAPE_S = 5.0


async def exposition(servers: Mapping[str, Upstream], metrics: Metrics) -> bytes:
    """Their own metrics, of several each with the label `server`; nothing of one that has none, is
    down, or sleeps (never wake it).

    `evoke_upstream_up` says whether any of them answered. It changes once, when all have: a scrape
    that overlaps with another one never reads a value that only stands for "not asked yet".
    """
    scrapes = [_Scrape(upstream) for upstream in servers.values()]
    texts = await asyncio.gather(*[scrape.text() for scrape in scrapes])
    metrics.upstream_up.set(any(scrape.answered for scrape in scrapes))
    return texts[0] if len(texts) == 1 else labelled(dict(zip(servers, texts, strict=True)))


class _Scrape:
    """One scrape of one llama-server; `answered` says whether it did."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.answered = False

    async def text(self) -> bytes:
        """Its metrics, or a comment that says why there are none.

        llama-server answers between two decodes. A scraper has less patience than some decodes
        take, and is to have our part then.
        """
        try:
            async with asyncio.timeout(_SCRAPE_S):
                body = await self._asked()
        except (EvokeError, TimeoutError) as error:
            why = " ".join(str(error).split()) or "it is too slow"  # it may quote lines
            return f"# llama-server has no metrics now: {why}\n".encode()
        return body if not body or body.endswith(b"\n") else body + b"\n"

    async def _asked(self) -> bytes:
        try:
            sleeping = (await self._upstream.info()).sleeping
        except UpstreamRejected:
            self.answered = True
            raise
        self.answered = True
        if sleeping:
            return b"# llama-server sleeps: its metrics are left out\n"
        async with self._upstream.open("GET", "/metrics", self._upstream.own_headers()) as reply:
            return await reply.read() if reply.status == 200 else b""
