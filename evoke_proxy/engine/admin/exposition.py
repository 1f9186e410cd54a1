"""Collects the metrics of llama-servers, and registers gauges over all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from evoke_proxy.adapters.llama.block_api import LATEST, BlockApi
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import BlockStore, Metrics
from evoke_proxy.core.servers.disk_status import unusable_reason
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.errors import EvokeError, UpstreamError, UpstreamRejected

_log = logging.getLogger(__name__)
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


@dataclass(frozen=True, slots=True)
class _Scrape:
    """What one llama-server says.

    Attributes:
        exposition: its metrics.
        answered: whether it answered.
        is_stock: whether it answered that it saves no blocks.
        store: its saved blocks; None when it saves none or did not say.
    """

    exposition: Exposition
    answered: bool
    is_stock: bool
    store: BlockStore | None


class Scraped(Protocol):
    """The llama-servers to scrape, by name, and the metrics that say whether any is up."""

    @property
    def clients(self) -> Mapping[str, LlamaClient]: ...

    metrics: Metrics


class UpstreamMetrics:
    """Scrapes the metrics of all llama-servers of a proxy."""

    def __init__(self, proxy: Scraped) -> None:
        self._proxy = proxy
        # Names of servers that a scrape has woken up: older versions of llama-server.
        self.woken_by_scrapes: set[str] = set()
        # The saved blocks that each server has reported last. They stay while it does not answer,
        # because a counter that falls to 0 and returns counts for Prometheus as an increase.
        self._stores: dict[str, BlockStore] = {}

    async def scrape(self) -> Exposition:
        """The metrics of all servers; where there are several, with the label `server`.

        A server contributes nothing when it has no metrics, is down, or would be woken up by a
        scrape. Sets `evoke_upstream_up` once, after all servers have answered, so that overlapping
        scrapes never export the value of an unfinished one.
        """
        clients = self._proxy.clients
        scrapes = [self._scrape_one(name, client) for name, client in clients.items()]
        results = await asyncio.gather(*scrapes)
        self._proxy.metrics.upstream_up.set(any(result.answered for result in results))
        for name, result in zip(clients, results, strict=True):
            if result.store is not None:
                self._stores[name] = result.store
            elif result.is_stock:
                self._stores.pop(name, None)
        self._proxy.metrics.set_stores(self._stores)
        expositions = [result.exposition for result in results]
        if len(expositions) == 1:
            return expositions[0]
        texts = dict(zip(clients, [item.text for item in expositions], strict=True))
        return Exposition(merge_by_server(texts))

    async def _scrape_one(self, name: str, client: LlamaClient) -> _Scrape:
        """Scrape one server.

        llama-server answers between two decodes, which may take longer than Prometheus waits. After
        `_SCRAPE_S` the proxy's own metrics are exported without those of the server.
        """
        answered, is_stock, store = False, False, None
        try:
            async with asyncio.timeout(_SCRAPE_S):
                try:
                    info = await client.info()
                except UpstreamRejected:
                    answered = True
                    raise
                answered, is_stock = True, not info.patched
                if info.answers_block_calls:
                    store = block_store(await BlockApi(client).slot(0, "", LATEST))
                exposition = await self._metrics_of(name, client, info.sleeping)
                return _Scrape(exposition, answered, is_stock, store)
        except (EvokeError, TimeoutError) as error:
            message = error.public if isinstance(error, UpstreamError) else str(error)
            reason = " ".join(message.split()) or "it is too slow"  # may quote several lines
            text = f"# llama-server has no metrics now: {reason}\n".encode()
            return _Scrape(Exposition(text), answered, is_stock, store)

    async def _metrics_of(self, name: str, client: LlamaClient, is_sleeping: bool) -> Exposition:
        if is_sleeping and name in self.woken_by_scrapes:
            return Exposition(b"# llama-server sleeps: its metrics are omitted\n")
        async with client.open("GET", "/metrics", client.own_headers()) as reply:
            body = await reply.read()
        if is_sleeping and not (await client.info()).sleeping:
            self.woken_by_scrapes.add(name)
        if reply.status != 200:
            return Exposition(b"")
        return Exposition(body if not body or body.endswith(b"\n") else body + b"\n", reply.headers)


def block_store(answer: Mapping[str, Any]) -> BlockStore:
    """The saved blocks in an answer about a slot; 0 for what it does not contain."""
    tiers = {name: answer.get(name) for name in ("ram", "disk")}

    def count(tier: str, name: str) -> int:
        values = tiers[tier]
        value = values.get(name) if isinstance(values, dict) else None
        return value if isinstance(value, int) else 0

    return BlockStore(
        ram_used=count("ram", "used"),
        ram_budget=count("ram", "budget"),
        ram_dropped=count("ram", "n_dropped"),
        disk_used=count("disk", "used"),
        disk_budget=count("disk", "budget"),
        disk_files=count("disk", "n_files"),
        disk_deleted=count("disk", "n_deleted"),
        disk_failed=count("disk", "n_failed"),
        disk_unusable=int(bool(unusable_reason(answer))),
    )


def merge_by_server(texts: Mapping[str, bytes]) -> bytes:
    """One exposition of several servers' metrics, with the label `server` on every sample.

    HELP and TYPE are those of the first server that has the metric, and precede all of its samples.
    Comments are dropped, and so is the text of a server that is not in Prometheus format.
    """
    families: dict[str, Metric] = {}
    lines: dict[str, list[str]] = {}
    for server, text in texts.items():
        try:
            parsed = list(text_string_to_metric_families(text.decode()))
        except ValueError as error:
            _log.warning("the metrics of server %s cannot be parsed: %s", server, error)
            continue
        for family in parsed:
            families.setdefault(family.name, family)
            lines.setdefault(family.name, []).extend(_sample_lines(family.samples, server))
    merged: list[str] = []
    for name, family in families.items():
        if lines[name]:
            merged += [*_header_lines(family), *lines[name]]
    return "".join(f"{line}\n" for line in merged).encode()


def _header_lines(family: Metric) -> list[str]:
    # The parser strips `_total` from the names of counters; the text format has it in the header.
    is_total = family.type == "counter" and any(s.name != family.name for s in family.samples)
    name = f"{family.name}_total" if is_total else family.name
    lines = []
    if family.documentation:
        text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {text}")
    if family.type != "unknown":
        lines.append(f"# TYPE {name} {family.type}")
    return lines


def _sample_lines(samples: Iterable[Sample], server: str) -> list[str]:
    lines = []
    for sample in samples:
        pairs = [f'{key}="{_escaped(value)}"' for key, value in sample.labels.items()]
        labels = ",".join([f'server="{server}"', *pairs])
        value = repr(sample.value) if sample.value != float("inf") else "+Inf"
        value = {"-inf": "-Inf", "nan": "NaN"}.get(value, value)
        time = f" {round(float(sample.timestamp) * 1000)}" if sample.timestamp is not None else ""
        lines.append(f"{sample.name}{{{labels}}} {value}{time}")
    return lines


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _is_in_force(monitor: ServerMonitor) -> int:
    return int(not monitor.budget.is_degraded)


def register_gauges(proxy: ProxyGateway) -> None:
    """Have the gauges of budgets, queued requests, sessions and tokens computed at each scrape."""
    metrics = proxy.metrics

    def resident() -> int:
        conversations = [it for served in proxy.served_models for it in served.server.conversations]
        return sum(it.budgeted.n_resident for it in conversations)

    for served in proxy.served_models:
        gauge = metrics.budget_in_force.labels(server=served.server_name)
        gauge.set_function(partial(_is_in_force, served.server.monitor))
    metrics.queued.set_function(
        lambda: sum(served.server.slots.pool.queued for served in proxy.served_models)
    )
    metrics.sessions.set_function(
        lambda: sum(len(served.server.conversations) for served in proxy.served_models)
    )
    metrics.resident.set_function(resident)
