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
    down, or sleeps (never wake it). `evoke_upstream_up` says whether any of them answers."""
    metrics.upstream_up.set(0)
    asked = [_of(upstream, metrics) for upstream in servers.values()]
    texts = await asyncio.gather(*asked)
    return texts[0] if len(texts) == 1 else labelled(dict(zip(servers, texts, strict=True)))


async def _of(upstream: Upstream, metrics: Metrics) -> bytes:
    """llama-server answers between two decodes. A scraper has less patience than some decodes take,
    and is to have our part then."""
    try:
        async with asyncio.timeout(_SCRAPE_S):
            body = await _asked(upstream, metrics)
    except (EvokeError, TimeoutError) as error:
        why = " ".join(str(error).split()) or "it is too slow"  # it may quote lines
        return f"# llama-server has no metrics now: {why}\n".encode()
    return body if not body or body.endswith(b"\n") else body + b"\n"


async def _asked(upstream: Upstream, metrics: Metrics) -> bytes:
    try:
        sleeping = (await upstream.info()).sleeping
    except UpstreamRejected:
        metrics.upstream_up.set(1)
        raise
    metrics.upstream_up.set(1)
    if sleeping:
        return b"# llama-server sleeps: its metrics are left out\n"
    async with upstream.open("GET", "/metrics", upstream.own_headers()) as reply:
        return await reply.read() if reply.status == 200 else b""
