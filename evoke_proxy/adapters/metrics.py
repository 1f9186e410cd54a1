"""Prometheus metrics of the proxy, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from evoke_proxy import __version__
from evoke_proxy.core.request.normalise import NORMALISATIONS
from evoke_proxy.core.session.accounting import PATHS
from evoke_proxy.core.session.drift import CAUSES

# Prefill of a long history takes minutes, a block plan takes microseconds.
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PLAN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 10, 60, 600)
# The `path` labels of requests that are no turns of a conversation.
OTHER_PATHS = ("side", "relay")
# The kinds of prompt tokens in the token accounting: labels of `evoke_tokens_total`.
TOKEN_KINDS = ("decoded", "recovered", "resident_before", "omitted")
# Why blocks leave the KV cache: a plan of the proxy, llama-server itself while it decodes under a
# budget or finds no free cell, an operator.
EVICTION_REASONS = ("plan", "decode", "operator")
# Why blocks come back: a question needs them, their session gets a slot again, as text.
RECOVERY_REASONS = ("question", "slot", "text")

# Each counter would have a second series with the time of its creation.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class BlockStore:
    """Saved blocks of one llama-server, as it reports them; 0 for a tier that it does not have.

    Attributes:
        ram_used: Bytes of host memory in use.
        ram_budget: Bytes of `--evoke-ram`.
        ram_dropped: Copies given up since its start: neither memory nor disk had room.
        disk_used: Bytes of the files.
        disk_budget: Bytes of `--evoke-disk`.
        disk_files: Number of files.
        disk_deleted: Files deleted since its start to make room, or because they were damaged.
        disk_failed: Failed writes since its start.
    """

    ram_used: int = 0
    ram_budget: int = 0
    ram_dropped: int = 0
    disk_used: int = 0
    disk_budget: int = 0
    disk_files: int = 0
    disk_deleted: int = 0
    disk_failed: int = 0


@dataclass(frozen=True, slots=True)
class MetricDescription:
    """One metric, as the reference of metrics describes it.

    Attributes:
        section: What it is about.
        name: Its name in the text format; a counter's ends in `_total`.
        kind: counter, gauge or histogram.
        about: One sentence.
        labels: Names of its labels.
    """

    section: str
    name: str
    kind: str
    about: str
    labels: tuple[str, ...] = ()


# Name, description and kind of the metric of each field of `BlockStore`.
_STORE_METRICS = {
    "ram_used": ("evoke_ram_used_bytes", "Host memory that saved blocks use.", False),
    "ram_budget": ("evoke_ram_budget_bytes", "Host memory for saved blocks: --evoke-ram.", False),
    "ram_dropped": (
        "evoke_ram_dropped",
        "Saved blocks that llama-server gave up, for lack of room in memory and on disk.",
        True,
    ),
    "disk_used": ("evoke_disk_used_bytes", "Disk space that saved blocks use.", False),
    "disk_budget": ("evoke_disk_budget_bytes", "Disk space for saved blocks: --evoke-disk.", False),
    "disk_files": ("evoke_disk_files", "Files of saved blocks.", False),
    "disk_deleted": (
        "evoke_disk_deleted",
        "Files of saved blocks that llama-server deleted, to make room or as damaged.",
        True,
    ),
    "disk_failed": (
        "evoke_disk_write_failures",
        "Saved blocks that llama-server could not write to disk.",
        True,
    ),
}
assert _STORE_METRICS.keys() == {item.name for item in fields(BlockStore)}


class _StoreCollector(Collector):
    """Exports the block stores of the servers that the latest scrape has asked."""

    def __init__(self) -> None:
        self.stores: dict[str, BlockStore] = {}

    def collect(self) -> Iterator[Metric]:
        """One family for each field, with a sample for each server."""
        stores = self.stores or {"": BlockStore()}
        for field, (name, about, is_counter) in _STORE_METRICS.items():
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = kind(name, about, labels=["server"])
            for server, store in stores.items():
                family.add_metric([server], getattr(store, field))
            yield family


class Metrics:
    """Counters, gauges and histograms; no label contains a session, a user or a raw path.

    Attributes:
        descriptions: The metrics in the order of the reference.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.descriptions: list[MetricDescription] = []
        self._section = ""
        self._register_load()
        self._register_tokens()
        self._register_faults()
        self._register_embedder()
        self._register_snapshots()
        self._register_servers()
        self._register_stores()
        ProcessCollector(registry=self.registry)

    def _register_load(self) -> None:
        self._section = "Requests and time"
        self.requests = self._counter(
            "evoke_requests", "Answered requests, by path and status.", "endpoint", "code"
        )
        self.in_flight = self._gauge("evoke_requests_in_flight", "Requests that are running.")
        self.request_seconds = self._histogram(
            "evoke_request_seconds",
            "Seconds from the request to the last byte of its answer.",
            _TTFT_BUCKETS,
            "endpoint",
        )
        self.queued = self._gauge("evoke_queue_depth", "Requests that wait for a slot.")
        self.queue_seconds = self._histogram(
            "evoke_queue_wait_seconds", "Seconds that requests wait for a slot.", _PLAN_BUCKETS
        )
        self.plan_seconds = self._histogram(
            "evoke_plan_seconds",
            "Seconds to render a prompt and to make and run its plan.",
            _PLAN_BUCKETS,
        )
        self.own_seconds = self._histogram(
            "evoke_own_seconds",
            "Seconds of the proxy's own work before a chat request is forwarded.",
            _PLAN_BUCKETS,
        )
        self.ttft_seconds = self._histogram(
            "evoke_ttft_seconds",
            "Seconds from a chat request to the first byte of its answer.",
            _TTFT_BUCKETS,
            "path",
        )
        for path in (*PATHS, *OTHER_PATHS):
            self.ttft_seconds.labels(path=path)
        self._gauge("evoke_build_info", "Always 1.", "version").labels(version=__version__).set(1)

    def _register_tokens(self) -> None:
        self._section = "Tokens and blocks"
        self.tokens = self._counter(
            "evoke_tokens", "Prompt tokens, by how they got into the cache for the answer.", "kind"
        )
        for kind in TOKEN_KINDS:
            self.tokens.labels(kind=kind)
        self.redecoded = self._counter(
            "evoke_tokens_decoded_again",
            "Decoded tokens that the previous prompt of the session contained too.",
        )
        self.evicted = self._counter("evoke_blocks_evicted", "Blocks evicted from the KV cache.")
        self.recovered = self._counter(
            "evoke_blocks_recovered", "Blocks recovered into the KV cache by a copy."
        )
        self.evictions = self._counter(
            "evoke_evictions", "Blocks evicted from the KV cache, by reason.", "reason"
        )
        for reason in EVICTION_REASONS:
            self.evictions.labels(reason=reason)
        self.recoveries = self._counter(
            "evoke_recoveries", "Blocks recovered into the KV cache, by reason.", "reason"
        )
        for reason in RECOVERY_REASONS:
            self.recoveries.labels(reason=reason)
        self.probes = self._counter("evoke_probes", "Attention probes, by result.", "result")
        self.probe_tokens = self._counter(
            "evoke_probe_tokens", "Tokens decoded by attention probes."
        )
        self.probe_seconds = self._histogram(
            "evoke_probe_seconds",
            "Seconds of an attention probe with its evaluation.",
            _PLAN_BUCKETS,
        )
        self.as_text = self._counter(
            "evoke_blocks_as_text", "Blocks recovered as text, which is decoded again."
        )
        self.written_behind = self._counter(
            "evoke_blocks_written_behind", "Blocks copied by write-back while no request ran."
        )
        self.writebacks = self._counter("evoke_writebacks", "Write-back runs, by result.", "result")
        for result in ("done", "interrupted", "refused"):
            self.writebacks.labels(result=result)
        self.resident = self._gauge(
            "evoke_resident_tokens", "Tokens resident in managed slots after their last reply."
        )
        self.sessions = self._gauge(
            "evoke_sessions", "Conversations that the proxy keeps track of."
        )

    def _register_faults(self) -> None:
        self._section = "Faults"
        self.bypass = self._counter(
            "evoke_bypass", "Chat requests forwarded without a budget, by reason.", "reason"
        )
        self.degraded = self._counter(
            "evoke_degraded", "Requests without a plan because of an error, by stage.", "stage"
        )
        self.plan_failures = self._counter(
            "evoke_plan_failures", "Block plans that llama-server refused, by reason.", "reason"
        )
        self.breaches = self._counter(
            "evoke_budget_breach", "Turns that exceeded their budget, or ran without one by error."
        )
        self.clients_dropped = self._counter(
            "evoke_clients_dropped",
            "Disconnected clients: too slow, too many connections or pipelined requests.",
            "reason",
        )
        for reason in ("slow_body", "slow_reader", "connections", "pipelining"):
            self.clients_dropped.labels(reason=reason)
        self.budget_in_force = self._gauge(
            "evoke_budget_in_force",
            "0 while a configured budget is not in force, else 1; /evoke/ready has the reason.",
            "server",
        )
        self.upstream_up = self._gauge(
            "evoke_upstream_up", "1 when llama-server has answered this scrape."
        )
        self.reloads = self._counter(
            "evoke_config_reloads", "Reloads of the configuration, by result.", "result"
        )
        for result in ("done", "failed"):
            self.reloads.labels(result=result)
        self.upstream_errors = self._counter(
            "evoke_upstream_errors", "Failures of llama-server, by kind.", "kind"
        )

    def _register_embedder(self) -> None:
        self._section = "Embedder"
        self.embedder = self._gauge(
            "evoke_embedder_info", "1 for the embedder in use, or none.", "embedder"
        )
        self.embedded = self._counter("evoke_embedded", "Embedded texts.", "kind")
        self.embed_failures = self._counter(
            "evoke_embed_failures",
            "Questions and batches of blocks that were not embedded, by reason.",
            "reason",
        )
        self.embed_seconds = self._histogram(
            "evoke_embed_seconds",
            "Seconds that a request waits for the vectors of its question.",
            _PLAN_BUCKETS,
        )
        self.embed_waiting = self._gauge("evoke_embed_waiting", "Blocks that wait to be embedded.")

    def _register_snapshots(self) -> None:
        self._section = "Snapshots of stock servers"
        self.saves = self._counter(
            "evoke_snapshot_saves", "Saves of slots to disk, by result.", "result"
        )
        self.restores = self._counter(
            "evoke_snapshot_restores", "Restores of slots from disk, by result.", "result"
        )
        self.snapshots_evicted = self._counter(
            "evoke_snapshot_evictions",
            "Deleted snapshots, by the limit that they exceeded.",
            "reason",
        )
        self.index_failures = self._counter(
            "evoke_index_failures",
            "Changes of the index of snapshots and records that could not be written.",
        )
        self.snapshots_bad = self._counter(
            "evoke_snapshot_corrupt", "Corrupt snapshots, moved to quarantine, by reason.", "reason"
        )
        self.save_seconds = self._histogram(
            "evoke_snapshot_save_seconds",
            "Seconds to save a slot, during which nothing is decoded.",
            _PLAN_BUCKETS,
        )
        self.restore_seconds = self._histogram(
            "evoke_snapshot_restore_seconds", "Seconds to verify and restore a slot.", _PLAN_BUCKETS
        )
        self.restored_bytes = self._counter(
            "evoke_snapshot_restored_bytes", "Bytes of restored slots."
        )
        self.restored_tokens = self._counter(
            "evoke_restored_tokens", "Tokens that were restored instead of decoded."
        )
        self.look_aheads = self._counter(
            "evoke_look_aheads", "Look-ahead decodes of the next prompt, by result.", "result"
        )
        self.drifts = self._counter(
            "evoke_prefix_divergence",
            "Requests that do not continue the previous one, by cause.",
            "cause",
        )
        for cause in CAUSES:  # so that a rate exists from the first event on
            self.drifts.labels(cause=cause)
        self.normalised = self._counter("evoke_normalised", "Normalized parts of requests.", "what")
        for what in NORMALISATIONS:
            self.normalised.labels(what=what)
        self.snapshots = self._gauge("evoke_snapshots", "Snapshots on disk.")
        self.snapshot_bytes = self._gauge("evoke_snapshot_bytes", "Bytes of the snapshots on disk.")

    def _register_servers(self) -> None:
        """Metrics of several llama-servers; `server` is the name of each in the configuration."""
        self._section = "Several llama-servers"
        self.server_up = self._gauge(
            "evoke_server_up", "1 when the server has answered its latest health check.", "server"
        )
        self.server_breaker = self._gauge(
            "evoke_server_breaker",
            "State of the circuit breaker: 0 closed, 1 half open, 2 open.",
            "server",
        )
        self.server_draining = self._gauge(
            "evoke_server_draining",
            "1 while conversations are moved away from the server.",
            "server",
        )
        self.server_foreign = self._gauge(
            "evoke_server_foreign",
            "1 when the server serves another model than the others.",
            "server",
        )
        self.server_in_flight = self._gauge(
            "evoke_server_requests_in_flight", "Requests that run or wait at the server.", "server"
        )
        self.openings = self._counter(
            "evoke_server_breaker_openings",
            "Times that the circuit breaker of the server opened.",
            "server",
        )
        self.failovers = self._counter(
            "evoke_server_failovers",
            "Requests that were sent to another server after a failure.",
            "server",
        )
        self.moved = self._counter(
            "evoke_sessions_moved",
            "Conversations that moved to another server, by reason.",
            "reason",
        )
        for reason in ("away", "drained"):
            self.moved.labels(reason=reason)

    def _register_stores(self) -> None:
        self._section = "Stores of saved blocks"
        self._stores = _StoreCollector()
        self.registry.register(self._stores)
        for name, about, is_counter in _STORE_METRICS.values():
            self._describe(name, "counter" if is_counter else "gauge", about, ("server",))

    def count_tokens(self, counts: Mapping[str, int]) -> None:
        """Add the token accounting of one reply; missing kinds count as zero."""
        for kind in TOKEN_KINDS:
            self.tokens.labels(kind=kind).inc(counts.get(kind, 0))

    def count_evictions(self, reason: str, count: int) -> None:
        """Count evicted blocks; `reason` is one of EVICTION_REASONS."""
        self.evictions.labels(reason=reason).inc(count)
        if reason != "operator":
            self.evicted.inc(count)

    def count_recoveries(self, reason: str, count: int) -> None:
        """Count recovered blocks; `reason` is one of RECOVERY_REASONS."""
        self.recoveries.labels(reason=reason).inc(count)
        total = self.as_text if reason == "text" else self.recovered
        total.inc(count)

    def totals(self) -> dict[str, Any]:
        """Tokens of all prompts by kind, and the numbers of evicted and recovered blocks."""
        return {
            "tokens": {kind: _sum(self.tokens, kind=kind) for kind in TOKEN_KINDS},
            "blocks_evicted": _sum(self.evictions),
            "blocks_recovered": _sum(self.recoveries),
        }

    def set_stores(self, stores: Mapping[str, BlockStore]) -> None:
        """Export these block stores, by the name of their server."""
        self._stores.stores = dict(stores)

    def exposition(self) -> bytes:
        """The registry in Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        self._describe(name, "counter", about, labels)
        return Counter(name, about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        self._describe(name, "gauge", about, labels)
        return Gauge(name, about, labels, registry=self.registry)

    def _histogram(
        self, name: str, about: str, buckets: Sequence[float], *labels: str
    ) -> Histogram:
        self._describe(name, "histogram", about, labels)
        return Histogram(name, about, labels, buckets=buckets, registry=self.registry)

    def _describe(self, name: str, kind: str, about: str, labels: tuple[str, ...]) -> None:
        full = f"{name}_total" if kind == "counter" else name
        self.descriptions.append(MetricDescription(self._section, full, kind, about, labels))


def _sum(counter: Counter, **labels: str) -> int:
    """The sum of the samples of a counter that have these labels."""
    samples = [sample for family in counter.collect() for sample in family.samples]
    return round(sum(it.value for it in samples if labels.items() <= it.labels.items()))
