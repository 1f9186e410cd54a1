"""The metrics that llama-servers export themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.servers.labelled import labelled
from evoke_proxy.errors import EvokeError, UpstreamError, UpstreamRejected

# Half of the default scrape timeout of Prometheus.
_SCRAPE_S = 5.0


@dataclass(frozen=True, slots=True)
class Exposition:
    """Metrics in the text format of Prometheus.

    Attributes:
        text: the metrics, or a comment that says why there are none.
        headers: headers of llama-server's reply; empty where there are several servers.
    """

    text: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class UpstreamMetrics:
    """Scrapes the metrics of llama-servers, which `clients` names."""

    def __init__(self, clients: Mapping[str, LlamaClient], metrics: Metrics) -> None:
        self._clients = clients
        self._metrics = metrics
        # Names of servers that a scrape has woken up: older versions of llama-server.
        self.woken_by_scrapes: set[str] = set()

    async def scrape(self) -> Exposition:
        """The metrics of all servers; where there are several, with the label `server`.

        A server without metrics contributes nothing, as does one that is down or that a scrape
        would wake up. Sets `evoke_upstream_up` once, when all have answered: a scrape that overlaps
        with another one never exports a value of "not asked yet".
        """
        scrapes = [self._scrape_one(name, client) for name, client in self._clients.items()]
        results = await asyncio.gather(*scrapes)
        self._metrics.upstream_up.set(any(answered for _, answered in results))
        expositions = [exposition for exposition, _ in results]
        if len(expositions) == 1:
            return expositions[0]
        texts = dict(zip(self._clients, [item.text for item in expositions], strict=True))
        return Exposition(labelled(texts))

    async def _scrape_one(self, name: str, client: LlamaClient) -> tuple[Exposition, bool]:
        """The metrics of one server, and whether it answered at all.

        llama-server answers between two decodes, which may take longer than a scraper waits: after
        `_SCRAPE_S` the proxy's own metrics are exported without those of the server.
        """
        answered = False
        try:
            async with asyncio.timeout(_SCRAPE_S):
                try:
                    is_sleeping = (await client.info()).sleeping
                except UpstreamRejected:
                    answered = True
                    raise
                answered = True
                return await self._metrics_of(name, client, is_sleeping), answered
        except (EvokeError, TimeoutError) as error:
            message = error.public if isinstance(error, UpstreamError) else str(error)
            reason = " ".join(message.split()) or "it is too slow"  # may quote several lines
            text = f"# llama-server has no metrics now: {reason}\n".encode()
            return Exposition(text), answered

    async def _metrics_of(self, name: str, client: LlamaClient, is_sleeping: bool) -> Exposition:
        if is_sleeping and name in self.woken_by_scrapes:
            return Exposition(b"# llama-server sleeps: its metrics are left out\n")
        async with client.open("GET", "/metrics", client.own_headers()) as reply:
            body = await reply.read()
        if is_sleeping and not (await client.info()).sleeping:
            self.woken_by_scrapes.add(name)
        if reply.status != 200:
            return Exposition(b"")
        return Exposition(body if not body or body.endswith(b"\n") else body + b"\n", reply.headers)
