"""Every number the proxy exports, in a registry of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from evoke_proxy import __version__
from evoke_proxy.core.request.normalise import WHAT
from evoke_proxy.core.session.accounting import PATHS
from evoke_proxy.core.session.drift import CAUSES

# Local prefill of a long history takes minutes, a block plan takes microseconds.
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PLAN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 10, 60, 600)
# How a request got to its first token that is no turn of a conversation.
OTHER_PATHS = ("side", "relay")
TOKEN_KINDS = ("decoded", "recovered", "resident_before", "omitted")


class Metrics:
    """Counters, gauges and histograms; no label ever holds a session, a user or a raw path."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._register_load()
        self._register_books()
        self._register_faults()
        self._register_embedder()
        self._register_snapshots()
        self._register_servers()
        ProcessCollector(registry=self.registry)

    def _register_load(self) -> None:
        self.requests = self._counter(
            "evoke_requests", "Answers given, by path and status.", "endpoint", "code"
        )
        self.in_flight = self._gauge("evoke_requests_in_flight", "Requests that are not answered.")
        self.request_seconds = self._histogram(
            "evoke_request_seconds", "Request in to last byte out.", _TTFT_BUCKETS, "endpoint"
        )
        self.queued = self._gauge("evoke_queue_depth", "Requests that wait for a slot.")
        self.queue_seconds = self._histogram(
            "evoke_queue_wait_seconds", "Waiting for a slot.", _PLAN_BUCKETS
        )
        self.plan_seconds = self._histogram(
            "evoke_plan_seconds", "Rendering, deciding and running a plan.", _PLAN_BUCKETS
        )
        self.own_seconds = self._histogram(
            "evoke_own_seconds",
            "Chat request in to forwarded, without waiting for llama-server or a slot.",
            _PLAN_BUCKETS,
        )
        self.ttft_seconds = self._histogram(
            "evoke_ttft_seconds", "Chat request in to first answer byte out.", _TTFT_BUCKETS, "path"
        )
        for path in (*PATHS, *OTHER_PATHS):
            self.ttft_seconds.labels(path=path)
        self._gauge("evoke_build_info", "Always 1.", "version").labels(version=__version__).set(1)

    def _register_books(self) -> None:
        self.tokens = self._counter(
            "evoke_tokens", "Prompt tokens, by how they were there for the answer.", "kind"
        )
        for kind in TOKEN_KINDS:
            self.tokens.labels(kind=kind)
        self.decoded_again = self._counter(
            "evoke_tokens_decoded_again", "Decoded tokens that the session's prompt before had too."
        )
        self.evicted = self._counter("evoke_blocks_evicted", "Blocks taken out of the KV cache.")
        self.recovered = self._counter("evoke_blocks_recovered", "Blocks put back undecoded.")
        self.probes = self._counter(
            "evoke_probes", "Turns the model was asked what it looks for, or why not.", "result"
        )
        self.probe_tokens = self._counter(
            "evoke_probe_tokens", "Tokens decoded for that, besides those of the answers."
        )
        self.probe_seconds = self._histogram(
            "evoke_probe_seconds", "Asking: the probe, and what it was looking for.", _PLAN_BUCKETS
        )
        self.as_text = self._counter("evoke_blocks_as_text", "Blocks put back as text, decoded.")
        self.written_behind = self._counter(
            "evoke_blocks_written_behind", "Blocks copied while no request ran."
        )
        self.writebacks = self._counter(
            "evoke_writebacks", "Rounds of that, by how they ended.", "result"
        )
        for result in ("done", "interrupted", "refused"):
            self.writebacks.labels(result=result)
        self.resident = self._gauge(
            "evoke_resident_tokens", "Tokens resident in managed slots after their last reply."
        )
        self.sessions = self._gauge("evoke_sessions", "Conversations the proxy keeps books of.")

    def _register_faults(self) -> None:
        self.bypass = self._counter(
            "evoke_bypass", "Chat requests forwarded without a budget.", "reason"
        )
        self.degraded = self._counter(
            "evoke_degraded", "Requests that a fault of ours left without a plan.", "stage"
        )
        self.plan_failures = self._counter(
            "evoke_plan_failures", "Block plans llama-server refused.", "reason"
        )
        self.breaches = self._counter(
            "evoke_budget_breach", "Turns over their budget, or with nothing to hold it."
        )
        self.clients_dropped = self._counter(
            "evoke_clients_dropped", "Clients cut off: too slow, or one too many.", "reason"
        )
        for reason in ("slow_body", "slow_reader", "connections"):
            self.clients_dropped.labels(reason=reason)
        self.upstream_up = self._gauge(
            "evoke_upstream_up", "1 when llama-server has answered this very scrape."
        )
        self.reloads = self._counter(
            "evoke_config_reloads", "Settings that were read again, or not.", "result"
        )
        for result in ("done", "failed"):
            self.reloads.labels(result=result)
        self.upstream_errors = self._counter(
            "evoke_upstream_errors", "Failures of llama-server.", "kind"
        )

    def _register_embedder(self) -> None:
        self.embedded = self._counter("evoke_embedded", "Texts that got a vector.", "kind")
        self.embed_failures = self._counter(
            "evoke_embed_failures", "Questions or batches of blocks left without vectors.", "reason"
        )
        self.embed_seconds = self._histogram(
            "evoke_embed_seconds", "Waiting for the vectors of a question.", _PLAN_BUCKETS
        )
        self.embed_waiting = self._gauge("evoke_embed_waiting", "Blocks waiting for a vector.")

    def _register_snapshots(self) -> None:
        self.saves = self._counter("evoke_snapshot_saves", "Slots saved to disk, or not.", "result")
        self.restores = self._counter(
            "evoke_snapshot_restores", "Slots restored from disk, or not.", "result"
        )
        self.snapshots_gone = self._counter(
            "evoke_snapshot_evictions", "Snapshots deleted, by the bound they broke.", "reason"
        )
        self.index_failures = self._counter(
            "evoke_index_failures",
            "Changes of the index of snapshots and records that the disk did not take.",
        )
        self.snapshots_bad = self._counter(
            "evoke_snapshot_corrupt", "Snapshots set aside unrestored.", "reason"
        )
        self.save_seconds = self._histogram(
            "evoke_snapshot_save_seconds", "Saving a slot: nothing decodes.", _PLAN_BUCKETS
        )
        self.restore_seconds = self._histogram(
            "evoke_snapshot_restore_seconds", "Verifying and restoring a slot.", _PLAN_BUCKETS
        )
        self.restored_bytes = self._counter(
            "evoke_snapshot_restored_bytes", "Bytes of the slots that were restored."
        )
        self.restored_tokens = self._counter(
            "evoke_restored_tokens", "Tokens that a restore saved from being decoded."
        )
        self.look_aheads = self._counter(
            "evoke_look_aheads", "Prompts decoded before they were asked, or not.", "result"
        )
        self.drifts = self._counter(
            "evoke_prefix_divergence", "Requests that do not go on from the last one.", "cause"
        )
        for cause in CAUSES:  # a rate is known from the first one on
            self.drifts.labels(cause=cause)
        self.normalised = self._counter(
            "evoke_normalised", "Fronts of requests that were made as before.", "what"
        )
        for what in WHAT:
            self.normalised.labels(what=what)
        self.snapshots = self._gauge("evoke_snapshots", "Snapshots on disk.")
        self.snapshot_bytes = self._gauge("evoke_snapshot_bytes", "What they take.")

    def _register_servers(self) -> None:
        """Of several llama-servers; `server` is what the configuration calls each."""
        self.server_up = self._gauge(
            "evoke_server_up", "1 when the latest check was answered.", "server"
        )
        self.server_breaker = self._gauge(
            "evoke_server_breaker", "0: closed, 1: half open, 2: open.", "server"
        )
        self.server_draining = self._gauge(
            "evoke_server_draining", "1 when conversations are to leave it.", "server"
        )
        self.server_foreign = self._gauge(
            "evoke_server_foreign", "1 when it serves another model than the others.", "server"
        )
        self.server_in_flight = self._gauge(
            "evoke_server_requests_in_flight", "Requests there, those that wait too.", "server"
        )
        self.openings = self._counter(
            "evoke_server_breaker_openings", "Times its breaker was opened.", "server"
        )
        self.failovers = self._counter(
            "evoke_server_failovers", "Requests it failed that another was sent.", "server"
        )
        self.moved = self._counter(
            "evoke_sessions_moved", "Conversations that went on at another server.", "reason"
        )
        for reason in ("away", "drained"):
            self.moved.labels(reason=reason)

    def count_tokens(self, books: Mapping[str, int]) -> None:
        """Add the four books of one reply; missing kinds count as zero."""
        for kind in TOKEN_KINDS:
            self.tokens.labels(kind=kind).inc(books.get(kind, 0))

    def exposition(self) -> bytes:
        """The registry in Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(name, about, labels, registry=self.registry)

    def _histogram(
        self, name: str, about: str, buckets: Sequence[float], *labels: str
    ) -> Histogram:
        return Histogram(name, about, labels, buckets=buckets, registry=self.registry)
