"""The Prometheus metrics of the proxy: names, labels and descriptions.

docs/metrics.md is generated from the descriptions (engine/admin/metrics_reference.py).
"""

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
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.prefetch import PREFETCH_REASONS
from evoke_proxy.core.request.normalise import NORMALISATIONS
from evoke_proxy.core.session.accounting import PATHS
from evoke_proxy.core.session.drift import CAUSES

# Upper bounds of histogram buckets, in seconds. The prefill of a long history takes minutes, most
# block plans take less than a millisecond.
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PLAN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 10, 60, 600)
# The `path` labels of requests that are not a turn of a conversation: a side request of an agent,
# such as a title, and a request that is only forwarded.
OTHER_PATHS = ("side", "relay")
# The kinds of prompt tokens in the token accounting: labels of `evoke_tokens_total`.
TOKEN_KINDS = ("decoded", "recovered", "resident_before", "omitted")
# Why blocks were evicted. plan: by a plan of the proxy. decode: by llama-server itself, because of
# the budget or for lack of a free cell while it decoded. after_turn: after a turn that was served
# with its whole prompt. operator: through the admin API.
EVICTION_REASONS = ("plan", "decode", "after_turn", "operator")
# Why blocks were recovered. question: a question needs them. slot: their session got a slot again.
# text: a question needs them, and their text was added to the prompt. past: the same of messages
# that the client has removed. prefetch: the draft of a message needs them.
RECOVERY_REASONS = ("question", "slot", "text", "past", "prefetch")
# done: an answer was compared. nothing_omitted: the whole prompt was in the cache. interrupted: a
# request has arrived. no_slot: every slot has a conversation. no_cells: too few are free. no_text:
# the answer is a tool call, has a thought, or cannot be generated token by token. unsaved: a block
# has no copy. changed: the conversation has continued. refused, failed: llama-server refused a
# call, or a call failed.
AUDIT_RESULTS = (
    *("done", "nothing_omitted", "interrupted", "no_slot", "no_cells", "no_text", "unsaved"),
    *("changed", "refused", "failed"),
)
# Upper bounds of changes of a log probability, in nats.
_CHANGE_BUCKETS = (-3, -1, -0.3, -0.1, -0.03, -0.01, -0.001, 0.001, 0.01, 0.03, 0.1, 0.3, 1, 3)

# By default prometheus_client exports for each counter a second series with its creation time.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class BlockStore:
    """Saved blocks of one llama-server, as it reports them; 0 for a tier that it does not have.

    Attributes:
        ram_used: Host memory in use, bytes.
        ram_budget: Limit of host memory (`--evoke-ram`), bytes.
        ram_dropped: Number of saved blocks dropped since the server's start, because neither host
            memory nor disk had room.
        disk_used: Size of the files, bytes.
        disk_budget: Limit of disk space (`--evoke-disk`), bytes.
        disk_files: Number of files.
        disk_deleted: Number of files deleted since the server's start, to make room or because they
            were damaged.
        disk_failed: Number of failed writes to disk since the server's start.
        disk_unusable: 1 if the server was started with a disk tier and cannot use its directory.
    """

    ram_used: int = 0
    ram_budget: int = 0
    ram_dropped: int = 0
    disk_used: int = 0
    disk_budget: int = 0
    disk_files: int = 0
    disk_deleted: int = 0
    disk_failed: int = 0
    disk_unusable: int = 0


@dataclass(frozen=True, slots=True)
class MetricDescription:
    """One metric, as docs/metrics.md describes it.

    Attributes:
        section: Heading of its table in docs/metrics.md.
        name: Its exported name; that of a counter ends in `_total`.
        kind: counter, gauge or histogram.
        about: Its help text.
        labels: Names of its labels.
    """

    section: str
    name: str
    kind: str
    about: str
    labels: tuple[str, ...] = ()


# For each field of `BlockStore`: the name and help text of its metric, and whether it is a counter.
_STORE_METRICS = {
    "ram_used": ("evoke_ram_used_bytes", "Bytes of host memory that saved blocks use.", False),
    "ram_budget": (
        "evoke_ram_budget_bytes",
        "Bytes of host memory that saved blocks may use (--evoke-ram).",
        False,
    ),
    "ram_dropped": (
        "evoke_ram_dropped",
        "Saved blocks that llama-server dropped, because host memory and disk had no room.",
        True,
    ),
    "disk_used": ("evoke_disk_used_bytes", "Bytes on disk that saved blocks use.", False),
    "disk_budget": (
        "evoke_disk_budget_bytes",
        "Bytes on disk that saved blocks may use (--evoke-disk).",
        False,
    ),
    "disk_files": ("evoke_disk_files", "Number of files of saved blocks.", False),
    "disk_deleted": (
        "evoke_disk_deleted",
        "Files of saved blocks that llama-server deleted, to make room or because of damage.",
        True,
    ),
    "disk_failed": (
        "evoke_disk_write_failures",
        "Saved blocks that llama-server could not write to disk.",
        True,
    ),
    "disk_unusable": (
        "evoke_disk_unusable",
        "1 if llama-server cannot use the directory of --evoke-disk; /evoke/ready gives the"
        " reason.",
        False,
    ),
}
assert _STORE_METRICS.keys() == {item.name for item in fields(BlockStore)}


class _StoreCollector(Collector):
    """Exports the state of the block stores, as each server reported it last.

    Attributes:
        stores: The block stores by name of the server; the name is empty for a single server.
    """

    def __init__(self) -> None:
        self.stores: dict[str, BlockStore] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield a metric for each field of `BlockStore`, with a sample for each server."""
        stores = self.stores or {"": BlockStore()}
        for field, (name, about, is_counter) in _STORE_METRICS.items():
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = kind(name, about, labels=["server"])
            for server, store in stores.items():
                family.add_metric([server], getattr(store, field))
            yield family


class Metrics:
    """Registers the metrics, which are attributes; no label contains a session, user or raw path.

    Attributes:
        registry: The registry of these metrics; separate from prometheus_client's default one.
        descriptions: The metrics in the order of docs/metrics.md.
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
            "evoke_requests", "Answered requests, by endpoint and HTTP status.", "endpoint", "code"
        )
        self.in_flight = self._gauge(
            "evoke_requests_in_flight", "Requests that have arrived and are not answered yet."
        )
        self.request_seconds = self._histogram(
            "evoke_request_seconds",
            "Seconds from the arrival of a request to the last byte of its answer.",
            _TTFT_BUCKETS,
            "endpoint",
        )
        self.queued = self._gauge("evoke_queue_depth", "Requests that wait for a slot.")
        self.queue_seconds = self._histogram(
            "evoke_queue_wait_seconds", "Seconds that a request waits for a slot.", _PLAN_BUCKETS
        )
        self.plan_seconds = self._histogram(
            "evoke_plan_seconds",
            "Seconds to render a prompt, plan its blocks and run the plan, without the wait for a"
            " slot.",
            _PLAN_BUCKETS,
        )
        self.own_seconds = self._histogram(
            "evoke_own_seconds",
            "Seconds that the proxy itself works before it forwards a chat request, without waiting"
            " for llama-server or a slot.",
            _PLAN_BUCKETS,
        )
        self.ttft_seconds = self._histogram(
            "evoke_ttft_seconds",
            "Seconds from the arrival of a chat request to the first byte of its answer, by where"
            " the tokens before its new messages came from (path).",
            _TTFT_BUCKETS,
            "path",
        )
        for path in (*PATHS, *OTHER_PATHS):
            self.ttft_seconds.labels(path=path)
        build_info = self._gauge(
            "evoke_build_info", "Always 1; the label is the version of evoke-proxy.", "version"
        )
        build_info.labels(version=__version__).set(1)

    def _register_tokens(self) -> None:
        self._section = "Tokens and blocks"
        self.tokens = self._counter(
            "evoke_tokens",
            "Prompt tokens, by kind: decoded, recovered by a copy, already resident in the slot, or"
            " omitted from the cache.",
            "kind",
        )
        for kind in TOKEN_KINDS:
            self.tokens.labels(kind=kind)
        self.drafts = self._counter(
            "evoke_draft_tokens",
            "Tokens that speculative decoding proposed for answers under a budget, by result"
            " (accepted, refused) and by what the model saw: the whole prompt, or a part of it.",
            "result",
            "prompt",
        )
        for prompt in ("whole", "part"):
            for result in ("accepted", "refused"):
                self.drafts.labels(result=result, prompt=prompt)
        self.redecoded = self._counter(
            "evoke_tokens_decoded_again",
            "Decoded tokens that were also in the previous prompt of their session.",
        )
        self.evicted = self._counter(
            "evoke_blocks_evicted", "Blocks evicted from the KV cache, except by an operator."
        )
        self.recovered = self._counter(
            "evoke_blocks_recovered", "Blocks recovered by a copy into the KV cache."
        )
        self.evictions = self._counter(
            "evoke_evictions",
            "Blocks evicted from the KV cache, by reason: a plan of the proxy, llama-server itself"
            " while it decodes, or an operator.",
            "reason",
        )
        for reason in EVICTION_REASONS:
            self.evictions.labels(reason=reason)
        self.recoveries = self._counter(
            "evoke_recoveries",
            "Recovered blocks, by reason: copied because a question needs them, copied because"
            " their session got a slot again or because the draft of a message needs them, or added"
            " to the prompt as text; past: of messages that the client has removed.",
            "reason",
        )
        for reason in RECOVERY_REASONS:
            self.recoveries.labels(reason=reason)
        self.prefetches = self._counter(
            "evoke_prefetches",
            "Calls of /evoke/prefetch, by result: done, or why less was brought back.",
            "result",
        )
        for result in ("done", *PREFETCH_REASONS):
            self.prefetches.labels(result=result)
        self.prefetched_tokens = self._counter(
            "evoke_prefetched_tokens", "Tokens whose rows were brought back for a draft."
        )
        self.shared = self._counter(
            "evoke_shared_tokens",
            "Tokens at the beginning of new conversations whose rows another conversation of the"
            " tenant had.",
        )
        self._reanchored = self._counter(
            "evoke_reanchored_tokens",
            "Tokens of edited prompts (policy.reanchor: approximate): moved, their rows were turned"
            " to new positions; decoded, those before and between them.",
            "kind",
        )
        for kind in ("moved", "decoded"):
            self._reanchored.labels(kind=kind)
        self.probes = self._counter("evoke_probes", "Attention probes, by result.", "result")
        self.probe_tokens = self._counter(
            "evoke_probe_tokens", "Tokens that attention probes decoded."
        )
        self.probe_seconds = self._histogram(
            "evoke_probe_seconds",
            "Seconds for an attention probe and its evaluation.",
            _PLAN_BUCKETS,
        )
        self.full_turns = self._counter(
            "evoke_full_turns",
            "Turns that were served with their whole prompt, because system prompt, tools and"
            " running task exceed the budget (policy.within_turn: full).",
        )
        self.full_turn_peak = self._gauge(
            "evoke_full_turn_peak_tokens",
            "Most tokens in the KV cache during a turn with its whole prompt, since the proxy"
            " started.",
        )
        self._full_peak = 0
        self.as_text = self._counter(
            "evoke_blocks_as_text",
            "Blocks whose text was added to the prompt, where it is decoded again.",
        )
        self.written_behind = self._counter(
            "evoke_blocks_written_behind",
            "Blocks that write-back copied to host memory while no request ran.",
        )
        self.writebacks = self._counter(
            "evoke_writebacks", "Runs of write-back, by result.", "result"
        )
        for result in ("done", "interrupted", "refused"):
            self.writebacks.labels(result=result)
        self.audits = self._counter("evoke_audits", "Audits of turns, by result.", "result")
        for result in AUDIT_RESULTS:
            self.audits.labels(result=result)
        self.audit_change = self._histogram(
            "evoke_audit_logprob_change",
            "Log probability of an audited answer with the blocks of its turn, less that with all"
            " blocks, per token in nats. Below 0: the budget has made the answer less probable.",
            _CHANGE_BUCKETS,
        )
        self.audit_others = self._counter(
            "evoke_audit_other_answers",
            "Audited answers with a token at which another one is most probable without eviction.",
        )
        self.resident = self._gauge(
            "evoke_resident_tokens",
            "Tokens of all conversations in the KV cache, as of the latest reply of each.",
        )
        self.sessions = self._gauge(
            "evoke_sessions", "Conversations that the proxy keeps track of."
        )

    def _register_faults(self) -> None:
        self._section = "Faults"
        self.bypass = self._counter(
            "evoke_bypass",
            "Chat requests that were forwarded without a plan for a budget, by reason.",
            "reason",
        )
        self.degraded = self._counter(
            "evoke_degraded",
            "Chat requests whose preparation or accounting failed, by the stage that failed.",
            "stage",
        )
        self.plan_failures = self._counter(
            "evoke_plan_failures",
            "Block plans that llama-server refused, or whose result differs from the plan, by"
            " reason.",
            "reason",
        )
        self.renderings = self._counter(
            "evoke_forwarded_renderings",
            "Planned turns, by whether llama-server decoded the tokens that the plan was made from"
            " (reused) or had to render the request again (rendered).",
            "result",
        )
        self.early_plans = self._counter(
            "evoke_early_plans",
            "Turns that were planned while llama-server rendered their prompt, by whether this plan"
            " was used (used) or the prompt or the slot was not as expected (replaced).",
            "result",
        )
        self.breaches = self._counter(
            "evoke_budget_breach",
            "Turns that exceeded their budget, or ran without one because of an error.",
        )
        self.clients_dropped = self._counter(
            "evoke_clients_dropped",
            "Clients that the proxy disconnected, by reason: slow to send a body or to read an"
            " answer, too many connections, too many pipelined requests, or a body in too many"
            " small chunks.",
            "reason",
        )
        for reason in ("slow_body", "slow_reader", "connections", "pipelining", "small_chunks"):
            self.clients_dropped.labels(reason=reason)
        self.budget_in_force = self._gauge(
            "evoke_budget_in_force",
            "0 if a budget is configured but not in force, else 1; /evoke/ready gives the reason.",
            "server",
        )
        self.upstream_up = self._gauge(
            "evoke_upstream_up", "1 if llama-server, or one of several, answered the latest scrape."
        )
        self.reloads = self._counter(
            "evoke_config_reloads", "Reloads of the configuration, by result.", "result"
        )
        for result in ("done", "failed"):
            self.reloads.labels(result=result)
        self.upstream_errors = self._counter(
            "evoke_upstream_errors",
            "Failures of llama-server, by kind: an error code, for example upstream_timeout.",
            "kind",
        )

    def _register_embedder(self) -> None:
        self._section = "Embedder"
        self.embedder = self._gauge(
            "evoke_embedder_info", "Always 1; the label names the embedder in use.", "embedder"
        )
        self.embedded = self._counter(
            "evoke_embedded", "Embedded texts, by kind: questions and blocks.", "kind"
        )
        self.embed_failures = self._counter(
            "evoke_embed_failures",
            "Questions, and batches of blocks, that were not embedded, by reason.",
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
            "evoke_snapshot_saves",
            "Saves of a slot to disk, skipped ones included, by result.",
            "result",
        )
        self.restores = self._counter(
            "evoke_snapshot_restores",
            "Restores of a slot from disk, failed ones included, by result.",
            "result",
        )
        self.snapshots_evicted = self._counter(
            "evoke_snapshot_evictions",
            "Deleted snapshots, by reason: for example the limit that was exceeded.",
            "reason",
        )
        self.index_failures = self._counter(
            "evoke_index_failures",
            "Changes to the index of snapshots and session records that could not be written.",
        )
        self.snapshots_bad = self._counter(
            "evoke_snapshot_corrupt",
            "Corrupt snapshots and damaged parts of their index, by reason. Corrupt files are moved"
            " to quarantine.",
            "reason",
        )
        self.save_seconds = self._histogram(
            "evoke_snapshot_save_seconds",
            "Seconds to save a slot; llama-server decodes nothing meanwhile.",
            _PLAN_BUCKETS,
        )
        self.restore_seconds = self._histogram(
            "evoke_snapshot_restore_seconds",
            "Seconds to verify a snapshot and restore a slot from it.",
            _PLAN_BUCKETS,
        )
        self.restored_bytes = self._counter(
            "evoke_snapshot_restored_bytes", "Bytes of the snapshots that were restored."
        )
        self.restored_tokens = self._counter(
            "evoke_restored_tokens", "Prompt tokens that were restored instead of decoded."
        )
        self.look_aheads = self._counter(
            "evoke_look_aheads",
            "Attempts to decode the beginning of the next prompt ahead, by result.",
            "result",
        )
        self.drifts = self._counter(
            "evoke_prefix_divergence",
            "Requests that do not continue the previous one of their conversation, by likely"
            " cause.",
            "cause",
        )
        for cause in CAUSES:  # so that a rate exists from the first event on
            self.drifts.labels(cause=cause)
        self.drift_tokens = self._counter(
            "evoke_prefix_divergence_tokens",
            "Prompt tokens decoded again because of these requests, at most what the previous"
            " prompt had behind the difference. Patched servers only.",
            "cause",
        )
        for cause in CAUSES:
            self.drift_tokens.labels(cause=cause)
        self.normalised = self._counter(
            "evoke_normalised",
            "Parts of requests that the `normalise` settings changed, by setting.",
            "what",
        )
        for what in NORMALISATIONS:
            self.normalised.labels(what=what)
        self.snapshots = self._gauge("evoke_snapshots", "Snapshots on disk.")
        self.snapshot_bytes = self._gauge("evoke_snapshot_bytes", "Bytes of the snapshots on disk.")

    def _register_servers(self) -> None:
        """Metrics of several llama-servers; `server` is the name of each in the configuration."""
        self._section = "Several llama-servers"
        self.server_up = self._gauge(
            "evoke_server_up",
            "1 while the server's circuit breaker is closed and its latest check or request did not"
            " fail.",
            "server",
        )
        self.server_breaker = self._gauge(
            "evoke_server_breaker",
            "State of the circuit breaker: 0 closed, 1 half open, 2 open.",
            "server",
        )
        self.server_draining = self._gauge(
            "evoke_server_draining",
            "1 while an operator drains the server: its conversations move to others.",
            "server",
        )
        self.server_foreign = self._gauge(
            "evoke_server_foreign",
            "1 if the server runs another model than the other servers.",
            "server",
        )
        self.server_in_flight = self._gauge(
            "evoke_server_requests_in_flight", "Requests that run or wait at the server.", "server"
        )
        self.openings = self._counter(
            "evoke_server_breaker_openings",
            "Number of times that the circuit breaker of the server opened.",
            "server",
        )
        self.failovers = self._counter(
            "evoke_server_failovers",
            "Requests that were sent to another server because this one failed.",
            "server",
        )
        self.moved = self._counter(
            "evoke_sessions_moved",
            "Conversations that moved to another server, by reason: their server took no requests"
            " (away), or was drained.",
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
        """Add the prompt tokens of one reply by kind (TOKEN_KINDS); missing kinds count as 0."""
        for kind in TOKEN_KINDS:
            self.tokens.labels(kind=kind).inc(counts.get(kind, 0))

    def count_audit(self, change: float, is_other: bool) -> None:
        """Count an audited answer: the change of its log probability per token, and of its text."""
        self.audit_change.observe(change)
        self.audit_others.inc(is_other)

    def count_drafts(self, drafted: int, accepted: int, is_whole: bool) -> None:
        """Count the tokens that were drafted for one answer, and those of them that were accepted.

        `is_whole` says whether the model saw all of the prompt.
        """
        prompt = "whole" if is_whole else "part"
        self.drafts.labels(result="accepted", prompt=prompt).inc(accepted)
        self.drafts.labels(result="refused", prompt=prompt).inc(max(0, drafted - accepted))

    def count_reanchored(self, moved: int, decoded: int) -> None:
        """Count the tokens of an edited prompt whose rows were moved, and those decoded for it."""
        self._reanchored.labels(kind="moved").inc(moved)
        self._reanchored.labels(kind="decoded").inc(decoded)

    def count_evictions(self, reason: str, count: int) -> None:
        """Count evicted blocks; `reason` is one of EVICTION_REASONS."""
        self.evictions.labels(reason=reason).inc(count)
        if reason != "operator":
            self.evicted.inc(count)

    def count_moves(self, plan: Plan) -> None:
        """Count the blocks that llama-server evicted and recovered when it ran a turn's plan."""
        self.count_evictions("plan", len(plan.evicts))
        self.count_recoveries("question", len(plan.loads))
        self.count_recoveries("slot", len(plan.adopt.labels if plan.adopt else ()))

    def count_full_turn(self, n_peak: int) -> None:
        """Count a turn without the budget of its session, and its peak in tokens."""
        self.full_turns.inc()
        self._full_peak = max(self._full_peak, n_peak)
        self.full_turn_peak.set(self._full_peak)

    def count_recoveries(self, reason: str, count: int) -> None:
        """Count recovered blocks; `reason` is one of RECOVERY_REASONS."""
        self.recoveries.labels(reason=reason).inc(count)
        total = self.as_text if reason in ("text", "past") else self.recovered
        total.inc(count)

    def totals(self) -> dict[str, Any]:
        """Return the prompt tokens by kind, and the numbers of evicted and recovered blocks.

        Counted since the start of the proxy, for the admin API.
        """
        return {
            "tokens": {kind: _sum(self.tokens, kind=kind) for kind in TOKEN_KINDS},
            "blocks_evicted": _sum(self.evicted),
            "blocks_recovered": _sum(self.recovered),
        }

    def set_stores(self, stores: Mapping[str, BlockStore]) -> None:
        """Replace the exported block stores with these, by the name of their server."""
        self._stores.stores = dict(stores)

    def exposition(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
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
