"""Declares every setting: type, range, choices, default and documentation.

Each section is a frozen dataclass. Its fields are the only place that defines a setting: `loader`
reads values for them, and `reference` writes their documentation.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from msgspec import Meta

from evoke_proxy.errors import ConfigError

AUTO: Literal["auto"] = "auto"
RECOVERIES = ("kv_restore", "discard")
RECALLS = ("text", "model", "fused", "none")
PASTS = ("off", "quote")
WITHIN_TURNS = ("budget", "full")
REANCHORS = ("exact", "approximate")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEVICES = ("auto", "cpu", "cuda")

_MAX = 2**40
_MAX_TOKENS = 2**30  # llama-server counts tokens in 32 bits
_MAX_DEPTH = 1000  # deeper JSON cannot be parsed

Count = Annotated[int, Meta(gt=0, le=_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=_MAX)]
Number = Annotated[float, Meta(gt=0, le=_MAX)]
NumberOrZero = Annotated[float, Meta(ge=0, le=_MAX)]
Share = Annotated[float, Meta(gt=0, le=1)]
ShareOrZero = Annotated[float, Meta(ge=0, le=1)]


def setting(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    reloadable: bool = False,
    why: str = "",
) -> Any:
    """Declare a setting; its type and range are those of the field.

    Args:
        default: The default value.
        doc: The description in the reference and the example file.
        choices: The only values that a text may have; empty for any.
        reloadable: Whether a changed value takes effect in a running proxy.
        why: The reason for the range, for the error message; may be empty.
    """
    metadata = {"doc": doc, "choices": choices, "reloadable": reloadable, "why": why}
    return field(default=default, metadata=metadata)


def tuning(default: Any) -> Any:
    """Declare a value that only code sets (`overrides` of `load`), such as benches and tests."""
    return field(default=default, metadata={"reloadable": True})


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """The llama-server behind the proxy, and how it is called."""

    url: str = setting(
        "http://127.0.0.1:8080",
        "URL of llama-server, without /v1. Its own default port is 9931, in older releases 8080.",
    )
    api_key: str = setting(
        "",
        "API key for the calls to llama-server that the proxy makes itself. Empty: they carry the"
        " key of the client whose request they belong to.",
    )
    # Seconds to wait for a connection; a reachable machine accepts or refuses one within a second.
    connect_timeout_s: Number = tuning(5.0)
    call_timeout_s: Number = setting(
        60.0,
        "Most seconds for a call that the proxy makes itself and that decodes nothing, such as"
        " rendering a prompt or running a plan.",
    )
    long_call_timeout_s: Number = setting(
        1800.0,
        "Most seconds for a call that the proxy makes itself and that decodes a prompt or loads a"
        " model.",
    )
    read_timeout_s: Number = setting(
        300.0,
        "Most seconds of silence within an answer, and from the first byte of an answer to the end"
        " of its head. The wait for the first byte has no limit, because prefill may take minutes.",
    )
    # Seconds between two checks of a server that could not be reached.
    probe_interval_s: Number = tuning(2.0)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Several llama-servers that run the same model. A conversation stays with one of them; new
    conversations go to the least busy one. The settings of `upstream`, except its URL, apply to
    each."""

    upstreams: tuple[str, ...] = setting(
        (),
        "The llama-servers, each as URL or NAME=URL. They replace upstream.url. Empty: there is"
        " only the server at upstream.url.",
    )
    health_interval_s: Number = setting(2.0, "Seconds between two health checks of a server.")
    # Seconds that a health check may take; llama-server answers it beside its decoding.
    health_timeout_s: Number = tuning(5.0)
    failures: Count = setting(
        3,
        "Number of consecutive failed health checks and requests after which a server gets no"
        " requests until it is healthy again.",
    )
    # Seconds until a server without requests is checked, and the limit of that time: it doubles
    # with each failed check.
    backoff_s: Number = tuning(1.0)
    backoff_max_s: Number = tuning(30.0)

    @property
    def servers(self) -> dict[str, str]:
        """Return the URLs by name, in order; ConfigError for an invalid or repeated entry."""
        servers: dict[str, str] = {}
        for entry in self.upstreams:
            name, url = _named_url(entry)
            if name in servers or url in servers.values():
                raise ConfigError(f"pool.upstreams: {entry!r} repeats the name or URL of another")
            servers[name] = url
        return servers


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Limits on connections, requests and memory."""

    body_bytes: Count = setting(
        64 * 1024 * 1024,
        "Largest body, bytes, of a request that the proxy parses: requests that generate, count"
        " tokens, tokenize, embed or rank, and all others if security.keys_file is set. Other"
        " bodies are streamed without a limit.",
    )
    bodies_mib: Count = setting(
        1024,
        "Memory, MiB, for the bodies of all running requests; a parsed body takes three times its"
        " size. When the memory is full, the newest request of the tenant that uses most of it"
        " waits briefly and is then answered 503. The same amount again may be used to keep the"
        " latest body of each conversation, which makes it faster to parse the next one.",
        reloadable=True,
    )
    connections: Count = setting(
        512, "Most open client connections. A further one is answered 503 and closed."
    )
    idle_timeout_s: Number = setting(
        60.0,
        "Most seconds that a connection may be idle, that the head of a request may take to arrive,"
        " and that a client may take to read the next part of an answer.",
    )
    body_timeout_s: Number = setting(
        120.0, "Most seconds that the body of a request may take to arrive."
    )
    sessions: Count = setting(
        64,
        "Most conversations whose blocks the proxy keeps track of in memory. A further one"
        " displaces the least recently used conversation of the tenant that has the most.",
        reloadable=True,
    )
    queue: CountOrZero = setting(
        64,
        "Most requests that may wait for a slot; further ones are answered 503. When the queue is"
        " full, a request of a tenant with fewer waiting requests displaces the newest waiting"
        " request of the tenant that has the most.",
        reloadable=True,
    )
    tenant_queue: CountOrZero = setting(
        0, "Most waiting requests of one tenant. 0: no separate limit.", reloadable=True
    )
    queue_timeout_s: Number = setting(
        120.0, "Most seconds that a request may wait for a slot.", reloadable=True
    )
    # Seconds between keep-alive comments to a streaming client that waits; proxies between it and
    # this one close connections that are silent for 30 s or more.
    keepalive_s: Number = tuning(5.0)
    drain_timeout_s: Number = setting(
        60.0,
        "Most seconds that running answers may take to finish after SIGTERM. New requests are"
        " answered 503 meanwhile.",
        reloadable=True,
    )
    json_depth: Annotated[int, Meta(gt=0, le=_MAX_DEPTH)] = setting(
        128,
        "Deepest nesting of objects and lists in a request body. A request that exceeds this or one"
        " of the following limits is answered 400, because it could crash llama-server or keep it"
        " busy for minutes.",
        reloadable=True,
    )
    json_keys: Count = setting(4096, "Most keys of one JSON object.", reloadable=True)
    json_values: Count = setting(
        100_000,
        "Most objects, lists and keys of a body in total. A body may also contain five times as"
        " many list elements.",
        reloadable=True,
    )
    json_number_chars: Count = setting(1000, "Most characters of one number.", reloadable=True)
    messages: Count = setting(
        4096,
        "Most messages of a conversation, and most prompts or documents of a batch.",
        reloadable=True,
    )
    grammar_bytes: CountOrZero = setting(
        65536, "Largest grammar, bytes. 0: grammars are refused.", reloadable=True
    )
    grammar_paths: Count = setting(
        4096,
        "Most ways in which a grammar, or a pattern of a JSON schema, can continue at one point:"
        " the number of parts that can come next times the number of those that can be skipped.",
        reloadable=True,
    )
    schema_items: Count = setting(
        1024,
        "Most entries of one enum, type, anyOf, oneOf or allOf in JSON schemas and tools; all of"
        " these in one request may have 4 times as many entries. One object there may have half as"
        " many keys, and all objects there in one request 16 times as many keys.",
        reloadable=True,
    )
    run_chars: CountOrZero = setting(
        12_000,
        "Most letters, digits, white-space or other characters in a row in a text, where clients"
        " have keys and a llama-server is not patched: more than 26,000 end it, with the"
        " vocabularies of gpt-oss, DeepSeek, Mistral Nemo and others. 0: no limit.",
        reloadable=True,
    )
    n_probs: CountOrZero = setting(
        128, "Largest value of n_probs, logprobs and top_logprobs.", reloadable=True
    )

    @property
    def json_elements(self) -> int:
        """Most list elements of a body in total.

        More than `json_values`, because most elements are numbers or texts, which cost little.
        """
        return 5 * self.json_values

    @property
    def schema_keys(self) -> int:
        """Most keys of one object in JSON schemas and tools; the time grows with their cube."""
        return max(1, self.schema_items // 2)


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """How blocks are chosen: the settings of `policy` without the budget."""

    name: str = setting(
        "evoke",
        "How blocks are evicted and recovered. evoke: evicts what the question needs least,"
        " recovers what it needs. discard: evicts like evoke, recovers nothing. truncate: drops the"
        " oldest messages from the request. no_eviction: never evicts, only counts tokens."
        " docs/policies.md describes them, and further ones for comparison.",
        reloadable=True,
    )
    recovery: str = setting(
        "kv_restore",
        "How the policy evoke recovers a block. kv_restore: copies its saved KV rows back."
        " discard: recovers nothing.",
        choices=RECOVERIES,
        reloadable=True,
    )
    recall: str = setting(
        "text",
        "How the policy evoke finds the blocks that a question needs. text: by common words, and by"
        " vectors if there is an embedder. model: by the attention of the model at the start of an"
        " answer; for that the end of the prompt is decoded twice. A turn without room or time for"
        " that is ranked by text. fused: as text, and as model only if text gives no clear result."
        " none: does not look for them.",
        choices=RECALLS,
        reloadable=True,
    )
    past: str = setting(
        "off",
        "What happens with messages that a client has removed from its conversation: replaced by a"
        " summary, dropped as the oldest ones, or cleared as old tool results. off: they are"
        " forgotten. quote: they are kept, 1 MiB of text for each conversation, and a question that"
        " finds them gets them quoted at the beginning of its message, so the request is changed.",
        choices=PASTS,
        reloadable=True,
    )
    past_tokens: Count = setting(
        1024,
        "Most tokens of such quotations in one request; with a budget at most a quarter of it.",
        reloadable=True,
    )
    reanchor: str = setting(
        "exact",
        "What happens with the text behind an edit: a message that the client has changed, inserted"
        " or removed. exact: it is decoded again. approximate: its rows are moved to their new"
        " positions, and only the first block behind the edit is decoded again; those rows still"
        " depend on the old text. For models with dense memory on patched servers.",
        choices=REANCHORS,
        reloadable=True,
    )
    within_turn: str = setting(
        "budget",
        "What a request gets whose system prompt, tools and running task exceed the budget. budget:"
        " a part of them is hidden. full: it is served with its whole prompt, and the budget holds"
        " again after the turn, so a slot needs cells for the whole prompt.",
        choices=WITHIN_TURNS,
        reloadable=True,
    )
    block_tokens: Count = setting(64, "Largest block, tokens.", reloadable=True)
    reserve_tokens: Count = setting(
        256,
        "Tokens of the budget kept free for the answer if the request does not limit its length"
        " (max_tokens).",
        reloadable=True,
    )
    writeback: bool = setting(
        True,
        "Copy blocks to host memory while no request runs, so that evicting them later needs no"
        " copy.",
        reloadable=True,
    )
    # Number of first tokens of a prompt (attention sinks) that are never evicted, because models
    # attend to them whatever their content is.
    sink_tokens: CountOrZero = tuning(16)
    # Number of last tokens of a prompt that are never evicted: the end of the question, and the
    # tokens with which the answer starts.
    recent_tokens: CountOrZero = tuning(64)
    # Share that pinned blocks may take of the budget without system prompt and first tokens.
    pin_share: Share = tuning(0.6)
    # Number of layers whose attention is captured, evenly spread.
    attention_layers: Count = tuning(4)
    # Tokens that an attention probe generates, whose attention is captured; 64 at most.
    probe_tokens: Count = tuning(12)

    @property
    def least_budget(self) -> int:
        """The smallest budget: the first and last tokens that always stay, and one block."""
        return self.sink_tokens + self.recent_tokens + self.block_tokens


@dataclass(frozen=True, slots=True)
class PolicyConfig(PolicyOptions):
    """The policy of a session: the options, and the budget that is in force.

    Attributes:
        budget: Most tokens that the session may keep in the KV cache; None for no limit.
        n_cells: Cells of a slot, which no budget exceeds; None where they bound none: they are
            unknown, or the longest prompt fits into them.
        n_slot_cells: Cells that a slot can fill while all others are full, which bound what
            llama-server must not evict while it decodes; None when unknown.
    """

    budget: int | None = None
    n_cells: int | None = None
    n_slot_cells: int | None = None

    def within_cells(self) -> PolicyConfig:
        """Return the policy with the budget that a slot has cells for.

        It is None when the cells cannot hold what always stays: llama-server then evicts itself.
        """
        if self.budget is None or self.n_cells is None or self.budget <= self.n_cells:
            return self
        budget = self.n_cells if self.n_cells >= self.least_budget else None
        return dataclasses.replace(self, budget=budget)


@dataclass(frozen=True, slots=True)
class PolicySettings(PolicyOptions):
    """What a session may keep in the KV cache, and how blocks are chosen."""

    budget: Annotated[int, Meta(gt=0, le=_MAX_TOKENS)] | Literal["auto"] | None = setting(
        AUTO,
        "Most tokens that a session may keep in the KV cache. auto: the cells of a slot less"
        " reserve_tokens if llama-server accepts conversations longer than the cells"
        " (--ctx-logical), otherwise no limit. off: no limit, the proxy never evicts.",
        reloadable=True,
    )

    def with_budget(self, budget: int | None) -> PolicyConfig:
        """Return the policy of sessions that may keep `budget` tokens; None for no limit."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(PolicyOptions)}
        return PolicyConfig(**values, budget=budget)


@dataclass(frozen=True, slots=True)
class EmbedderConfig:
    """The encoder that makes vectors of questions and blocks."""

    model: str = setting(
        "auto",
        "auto: the encoder in `directory` if that is set, else the one that `evoke-proxy embedder"
        " fetch` has stored, else built-in. built-in: the table of word vectors in the package."
        " none: blocks are ranked by words alone. Any other value: the name of a fetched encoder.",
    )
    directory: str = setting(
        "",
        "Directory of a BERT-like encoder: model.onnx or onnx/model.onnx, tokenizer.json, and the"
        " configuration files of sentence-transformers if present. Empty: `model` decides.",
    )
    store: str = setting(
        "",
        "Directory in which `evoke-proxy embedder fetch` stores encoders. Empty:"
        " evoke-proxy/embedders in $XDG_DATA_HOME, which is by default ~/.local/share.",
    )
    mirror: str = setting(
        "https://huggingface.co",
        "Base URL that `evoke-proxy embedder fetch` downloads from: the model hub or a copy of it.",
    )
    device: str = setting(
        "auto",
        "auto: CUDA if onnxruntime supports it, else the CPU. cpu or cuda: that device; if it"
        " cannot be used, the proxy does not start.",
        choices=DEVICES,
    )
    threads: Count = setting(
        1, "Threads of one inference. More threads take cores from llama-server."
    )
    query_instruction: str | None = setting(
        None,
        "Text put before each question. null: the query prompt in the encoder's files; if they have"
        " no prompts, that of the bge models for an encoder with cls pooling, else none.",
    )
    document_instruction: str | None = setting(
        None,
        "Text put before each block. null: the document prompt in the encoder's files, else none.",
    )
    timeout_ms: Count = setting(
        200,
        "Most milliseconds to embed a question. After that, blocks are ranked by words alone.",
    )
    # Most texts that may wait to be embedded; when there are more, texts of the tenant that has the
    # most waiting texts are dropped.
    queue: Count = tuning(4096)
    cache_mib: Count = setting(
        64, "Memory for vectors, MiB. The least recently used are dropped first."
    )


@dataclass(frozen=True, slots=True)
class SnapshotsConfig:
    """Slot contents saved to disk. With a stock llama-server, a conversation then continues without
    being decoded again after a restart or sleep of the server, and after another conversation has
    used its slot."""

    directory: str = setting(
        "",
        "The directory of llama-server's --slot-save-path, by its path as the proxy sees it. Empty:"
        " nothing is saved or restored. The proxy makes it accessible only for its owner, so run"
        " both as the same user.",
    )
    key_file: str = setting(
        "",
        "File with the key that saved files are encrypted with: 64 hexadecimal digits, mode 0600"
        " (`evoke-proxy keys token` creates one). Empty: they are not encrypted. llama-server"
        " itself writes and reads unencrypted files, which exist during a save or restore: to"
        " protect these, use a directory in memory or on an encrypted disk.",
    )
    shared: bool = setting(
        False,
        "Share the directory with other proxies on this machine that serve the same model, so that"
        " a conversation may continue at any of them. Set it for all of them. Does not work on"
        " network file systems, because the index is an SQLite file.",
    )
    # Shortest prompt to save, in tokens; a shorter one is decoded about as fast as it is restored.
    min_tokens: Count = tuning(256)
    look_ahead: bool = setting(
        True,
        "While a client reads an answer, decode the part of its next request that is already"
        " known.",
    )
    max_mib: Count | Literal["auto"] = setting(
        AUTO,
        "Largest size of all snapshots together, MiB. The least recently used are deleted first."
        " auto: half of the disk space that is free or that snapshots take, at most 256 GiB.",
        reloadable=True,
    )
    max_count: Count = setting(
        256, "Most snapshots. The least recently used are deleted first.", reloadable=True
    )
    max_age_h: Number = setting(
        168.0, "Hours without use after which a snapshot is deleted.", reloadable=True
    )
    min_free_mib: CountOrZero = setting(2048, "Free disk space to keep, MiB.", reloadable=True)
    tenant_mib: CountOrZero = setting(
        0, "Largest size of one tenant's snapshots, MiB. 0: no separate limit.", reloadable=True
    )
    stall_share: Share = setting(
        0.1,
        "Largest share of time that saving may take. During a save no slot decodes. A slot that"
        " another conversation takes is saved in any case where decoding it again takes longer.",
    )
    # A snapshot is restored if the decoding time that it saves is at least this many times the
    # measured time of a restore. 0: whenever it saves any decoding.
    min_gain: NumberOrZero = tuning(2.0)
    one_at_a_time: bool = setting(
        False,
        "Run only one request at a time. There are reports that llama-server answers from another"
        " conversation when it moves two slots to its RAM cache at once; starting it with"
        " --cache-ram 0 avoids that as well.",
    )


@dataclass(frozen=True, slots=True)
class NormaliseConfig:
    """Changes to parts at the beginning of prompts that some clients vary with each request, so
    that nothing after them can be reused from the cache. The model then reads another text than the
    client has sent, so all changes are off by default. Requests with `evoke: false` are not
    changed."""

    billing: bool = setting(
        False,
        "Remove `x-anthropic-billing-header: ...` from the system prompt.",
        reloadable=True,
    )
    dates_h: NumberOrZero = setting(
        0.0,
        "Hours during which the system prompt of a conversation keeps the dates and times of its"
        " first request; the model may then read times that are this old. 0: off. Like `billing`,"
        " it only changes the first and last 200 lines of a text, within 8,192 characters of its"
        " ends.",
        reloadable=True,
    )
    tools: bool = setting(False, "Sort `tools` by name.", reloadable=True)


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may send requests, and who may operate the proxy."""

    keys_file: str = setting(
        "",
        "File of hashed client keys, mode 0600; `evoke-proxy keys add` creates it. If set, each"
        " request needs one of these keys. Each key belongs to a tenant, and tenants share nothing."
        " llama-server receives upstream.api_key instead of the client's key. Empty: clients need"
        " no key.",
    )
    admin_listen: tuple[str, ...] = setting(
        ("127.0.0.1:18090",),
        "Addresses of the status page, of the admin API and, if keys_file is set, of /metrics. []:"
        " the addresses of `listen`. If the default address is in use by another program, the proxy"
        " logs that and starts without it.",
    )
    admin_token_file: str = setting(
        "",
        "File with the token that admin requests must carry, mode 0600; `evoke-proxy keys token`"
        " creates it. Required if other machines can reach an admin address. Empty: no token.",
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log on standard error."""

    level: str = setting(
        "info",
        "Least severity that is logged. info includes a line for each request, without text of its"
        " prompt.",
        choices=LOG_LEVELS,
        reloadable=True,
    )
    format: str = setting(
        "text",
        "text, or json: one object per line, with a key for each number of a request.",
        choices=LOG_FORMATS,
        reloadable=True,
    )
    traces: bool = setting(
        False,
        "Export a trace of each chat request with OpenTelemetry: render, plan, copy, prefill, first"
        " byte. Needs the extra [otel]. OTEL_* variables say where to; by default to"
        " http://localhost:4318 (OTLP over HTTP).",
    )


@dataclass(frozen=True, slots=True)
class PageConfig:
    """The status page at /evoke/, the admin API and its events. None of them contains the text of
    conversations."""

    names: bool = setting(
        False,
        "Include the names of blocks: names of files and tools, which clients and models choose.",
        reloadable=True,
    )


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """Audits of turns: how probable the answer would have been without eviction."""

    share: ShareOrZero = setting(
        0.0,
        "Share of the turns with a budget that are repeated without eviction, such as 0.01, while"
        " no request uses the server and a slot without a conversation has enough free cells (-np 2"
        " or more). Answers with tool calls or thoughts are left out. 0: no audits.",
        reloadable=True,
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of `evoke-proxy serve`."""

    listen: tuple[str, ...] = setting(
        ("127.0.0.1:8090",),
        "Addresses for clients, each as HOST:PORT. With port 0 the system chooses a free port.",
    )
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    policy: PolicySettings = field(default_factory=PolicySettings)
    embedder: EmbedderConfig = field(default_factory=EmbedderConfig)
    snapshots: SnapshotsConfig = field(default_factory=SnapshotsConfig)
    normalise: NormaliseConfig = field(default_factory=NormaliseConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    log: LogConfig = field(default_factory=LogConfig)
    page: PageConfig = field(default_factory=PageConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)


_FIXED = "the proxy uses its built-in value"
# Settings of earlier versions, and what replaces each.
REMOVED: Mapping[str, str] = {
    "policy.margin": _FIXED,
    "policy.residency_turns": _FIXED,
    "policy.weight_recency": _FIXED,
    "policy.weight_focus": _FIXED,
    "policy.weight_attention": "attention is a signal of policies for comparison only",
    "policy.weight_relevance": _FIXED,
    "policy.attention_layers": _FIXED,
    "policy.recall_layers": "the proxy chooses the layers",
    "policy.probe_tokens": _FIXED,
    "policy.probe_worth_s": _FIXED,
    "policy.infllm_blocks": "infllm is a policy for comparison, see docs/policies.md",
    "policy.bench_fields": "the policy oracle is one of bench.policies, see docs/policies.md",
    "policy.sink_tokens": _FIXED,
    "policy.recent_tokens": _FIXED,
    "policy.pin_share": f"{_FIXED}; a larger policy.budget has room for more pinned blocks",
    "upstream.probe_interval_s": _FIXED,
    "upstream.connect_timeout_s": _FIXED,
    "pool.health_timeout_s": _FIXED,
    "pool.backoff_s": _FIXED,
    "pool.backoff_max_s": _FIXED,
    "limits.header_bytes": "request heads are limited to what llama-server can parse",
    "limits.headers": "request heads are limited to what llama-server can parse",
    "limits.write_timeout_s": "limits.idle_timeout_s applies to clients that do not read as well",
    "limits.remembered_bodies_mib": "limits.bodies_mib applies to these bodies as well",
    "limits.keepalive_s": _FIXED,
    "limits.json_elements": "limits.json_values allows five list elements for each value",
    "limits.grammar_depth": _FIXED,
    "limits.schema_keys": "limits.schema_items allows half as many keys in an object",
    "limits.last_n": _FIXED,
    "limits.sampling_items": _FIXED,
    "embedder.queue": _FIXED,
    "embedder.pooling": "1_Pooling/config.json in embedder.directory replaces it",
    "embedder.output": "the proxy chooses the output that has a vector for each token",
    "embedder.max_tokens": "sentence_bert_config.json in embedder.directory replaces it",
    "snapshots.half_life_h": "the least recently used snapshots are deleted first",
    "snapshots.min_tokens": _FIXED,
    "snapshots.min_gain": _FIXED,
}
# Values of earlier versions by setting, and what replaces each.
REMOVED_VALUES: Mapping[str, Mapping[str, str]] = {
    "policy.recovery": {"breadcrumb": "kv_restore replaces it, which copies the rows back"},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the configuration, as its class declares it.

    Attributes:
        key: The dotted key, for example `policy.budget`.
        type: The type, with its range as `msgspec.Meta`.
        default: The default value.
        doc: The description in the reference and the example file.
        choices: The values that a text may have; empty for any.
        reloadable: Whether a change takes effect in a running proxy.
        is_tuning: Whether only code sets it, and no file, variable or option; see `tuning`.
        why: The reason for its range, for the error message; may be empty.
    """

    key: str
    type: Any
    default: Any
    doc: str
    choices: tuple[str, ...]
    reloadable: bool
    is_tuning: bool
    why: str

    @property
    def words(self) -> tuple[str, ...]:
        """The words that it accepts besides a number, without `off`."""
        parts = typing.get_args(self.type)
        literals = (part for part in parts if typing.get_origin(part) is Literal)
        return next((typing.get_args(part) for part in literals), ())

    @property
    def allows_off(self) -> bool:
        """Whether it has words and accepts `off` for None."""
        return bool(self.words) and types.NoneType in typing.get_args(self.type)


@cache
def all_fields() -> Mapping[str, Setting]:
    """Every setting and tuning value of `Config` by dotted key, in the order of the classes."""
    return {item.key: item for item in _fields_of(Config, "")}


@cache
def settings() -> Mapping[str, Setting]:
    """Every setting, without tuning values, by dotted key, in the order of the classes."""
    return {key: item for key, item in all_fields().items() if not item.is_tuning}


def keys() -> tuple[str, ...]:
    """The dotted keys that a file may contain, in the order of the classes."""
    return tuple(settings())


def sections() -> Mapping[str, type]:
    """The class of each section of `Config` by name."""
    hints = typing.get_type_hints(Config)
    return {name: kind for name, kind in hints.items() if kind.__module__ == __name__}


def _fields_of(cls: type, prefix: str) -> Iterator[Setting]:
    hints = typing.get_type_hints(cls, include_extras=True)
    for item in dataclasses.fields(cls):
        kind = hints[item.name]
        if dataclasses.is_dataclass(kind):
            yield from _fields_of(typing.cast(type, kind), f"{prefix}{item.name}.")
            continue
        yield Setting(
            key=prefix + item.name,
            type=kind,
            default=item.default,
            doc=item.metadata.get("doc", ""),
            choices=item.metadata.get("choices", ()),
            reloadable=item.metadata["reloadable"],
            is_tuning="doc" not in item.metadata,
            why=item.metadata.get("why", ""),
        )


def env_name(key: str) -> str:
    """The environment variable of a dotted key: EVOKE_UPSTREAM_URL for `upstream.url`."""
    return "EVOKE_" + key.replace(".", "_").upper()


def removed_value(key: str, value: object) -> str | None:
    """What replaces a value that a setting had in earlier versions; None for any other value."""
    values = REMOVED_VALUES.get(key, {})
    return values.get(value) if isinstance(value, str) else None


def value_at(config: Config, key: str) -> Any:
    """The value of a dotted key in a configuration."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


# A host name, an IPv4 address, or an IPv6 address with or without brackets; may be empty.
_LISTEN_HOST = re.compile(r"\[[0-9A-Za-z:.%]+\]|[^\x00-\x20\x7f\[\]/@]*")


def parse_listen(address: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `[IPV6]:PORT` or `:PORT`, whose host is 0.0.0.0.

    Raises ConfigError for any other text.
    """
    host, colon, port = address.rpartition(":")
    valid = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not valid or int(port) > 65535 or not _LISTEN_HOST.fullmatch(host):
        raise ConfigError(f"listen: {address!r} is not HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; of all host names only for `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Without white space and control characters, which no URL has, and without query and fragment.
_URL = re.compile(r"[^\x00-\x20\x7f?#]+")


def is_url(text: str) -> bool:
    """Whether a text is an http or https URL with a host, and without a query or fragment."""
    try:
        url = urlsplit(text)
        has_host = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        return has_host and _URL.fullmatch(text) is not None
    except ValueError:
        return False


def without_api_path(url: str) -> str:
    """Return the URL of a llama-server without `/v1` and what follows it.

    A path before `/v1` stays: it is the server's `--api-prefix`. Users of OpenAI clients are used
    to URLs that end in /v1, and are likely to enter one here.
    """
    parts = urlsplit(url)
    prefix, api, _ = f"{parts.path}/".partition("/v1/")
    return urlunsplit((parts.scheme, parts.netloc, prefix, "", "")) if api else url


# A server's name is a label of metrics and part of a path.
_SERVER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,47}")


def _named_url(entry: str) -> tuple[str, str]:
    """Return name and URL of an entry of `pool.upstreams`; by default the name is HOST:PORT."""
    name, equals, url = entry.partition("=")
    if not equals or "/" in name:
        name, url = "", entry
    url = url.rstrip("/")
    if is_url(url) and not name:
        parts = urlsplit(url)
        name = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    if not is_url(url) or not _SERVER_NAME.fullmatch(name):
        raise ConfigError(f"pool.upstreams: {entry!r} is not http://HOST:PORT or NAME=http://...")
    return name, url
