"""Settings: types, ranges, choices, defaults and documentation of every key, as frozen values.

The fields of these classes are the only place that defines a setting. `loader` reads values for
them, `reference` writes their documentation.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from msgspec import Meta

from evoke_proxy.errors import ConfigError

AUTO: Literal["auto"] = "auto"
RECOVERIES = ("kv_restore", "breadcrumb", "discard")
RECALLS = ("text", "model", "fused", "none")
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


def setting(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    reloadable: bool = False,
    why: str = "",
) -> Any:
    """Declare a setting.

    `choices` are the only values of a text. A `reloadable` setting takes effect in a running proxy.
    `why` explains the range to a reader of the error message.
    """
    metadata = {"doc": doc, "choices": choices, "reloadable": reloadable, "why": why}
    return field(default=default, metadata=metadata)


def tuning(default: Any) -> Any:
    """Declare a constant that benches and tests vary; files and variables cannot set it."""
    return field(default=default, metadata={"reloadable": True})


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """The llama-server behind the proxy, and how it is called."""

    url: str = setting("http://127.0.0.1:8080", "URL of llama-server.")
    api_key: str = setting(
        "",
        "API key for the proxy's own calls to llama-server. Empty: the client's credentials are"
        " used.",
    )
    # Seconds to wait for a connection; a reachable machine accepts or refuses one within a second.
    connect_timeout_s: Number = tuning(5.0)
    call_timeout_s: Number = setting(
        60.0, "Seconds for a call of the proxy's own that decodes nothing (render, plan)."
    )
    long_call_timeout_s: Number = setting(
        1800.0, "Seconds for a call of the proxy's own that decodes a prompt or loads a model."
    )
    read_timeout_s: Number = setting(
        300.0,
        "Seconds that llama-server may pause within an answer, and may take to complete the head of"
        " an answer that it has started. The start of an answer has no limit: prefill is slow.",
    )
    # Seconds between two questions whether a server that could not be reached is back.
    probe_interval_s: Number = tuning(2.0)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Several llama-servers that run the same model. A conversation stays with one of them; new
    conversations go to the least busy one. The settings of `upstream`, except its URL, apply to
    each."""

    upstreams: tuple[str, ...] = setting(
        (), "Servers, each as URL or NAME=URL. Not empty: these are used instead of upstream.url."
    )
    health_interval_s: Number = setting(2.0, "Seconds between two health checks of a server.")
    # Seconds that a health check may take; llama-server answers it beside its decoding.
    health_timeout_s: Number = tuning(5.0)
    failures: Count = setting(
        3, "Consecutive failures of checks or requests after which a server gets no requests."
    )
    # Seconds until such a server is checked; doubles with each failed check up to the second value.
    backoff_s: Number = tuning(1.0)
    backoff_max_s: Number = tuning(30.0)

    @property
    def servers(self) -> dict[str, str]:
        """URL of each server by name, in order; ConfigError for an invalid or repeated entry."""
        servers: dict[str, str] = {}
        for entry in self.upstreams:
            name, url = _named_url(entry)
            if name in servers or url in servers.values():
                raise ConfigError(f"pool.upstreams: {entry!r} is there twice")
            servers[name] = url
        return servers


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Limits on connections, requests and memory."""

    body_bytes: Count = setting(
        64 * 1024 * 1024,
        "Largest request body, bytes, of requests that are parsed: all that generate, count,"
        " tokenize, embed or rank, and every POST when security.keys_file is set. Other bodies are"
        " streamed without a limit.",
    )
    bodies_mib: Count = setting(
        1024,
        "Memory, MiB, for the bodies of all running requests. A parsed body counts three times."
        " When it is full, the newest body of the client key with most of them waits briefly and"
        " is then answered 503. Up to as much again is used for the latest body of each"
        " conversation, which speeds up parsing the next.",
        reloadable=True,
    )
    connections: Count = setting(
        512, "Open client connections; a further one is answered 503 and closed."
    )
    idle_timeout_s: Number = setting(
        60.0,
        "Seconds that a connection may be idle, that a request's head may take to arrive, and that"
        " a client may take to read the next part of an answer.",
    )
    body_timeout_s: Number = setting(120.0, "Seconds that a request's body may take to arrive.")
    sessions: Count = setting(
        64,
        "Conversations whose blocks are kept in memory. The least recently used one of the tenant"
        " with most of them is dropped first.",
        reloadable=True,
    )
    queue: CountOrZero = setting(
        64,
        "Requests that may wait for a slot; further ones are answered 503. When the queue is full,"
        " a request of a tenant with fewer waiting requests displaces the newest one of the tenant"
        " with most.",
        reloadable=True,
    )
    tenant_queue: CountOrZero = setting(
        0, "Most waiting requests of one tenant. 0: no separate limit.", reloadable=True
    )
    queue_timeout_s: Number = setting(
        120.0, "Seconds that a request may wait for a slot.", reloadable=True
    )
    # Seconds between keep-alive comments to a streaming client that waits; proxies between it and
    # this one close connections that are silent for 30 s or more.
    keepalive_s: Number = tuning(5.0)
    drain_timeout_s: Number = setting(
        60.0,
        "Seconds that running answers may take to finish after SIGTERM. New requests get 503.",
        reloadable=True,
    )
    json_depth: Annotated[int, Meta(gt=0, le=_MAX_DEPTH)] = setting(
        128,
        "Deepest nesting of objects and lists in a request body. This and the following limits are"
        " answered 400; they keep llama-server from crashing or computing for minutes.",
        reloadable=True,
    )
    json_keys: Count = setting(4096, "Most keys of one JSON object.", reloadable=True)
    json_values: Count = setting(
        100_000,
        "Most objects, lists and keys of a body in total, and a fifth of the most list elements.",
        reloadable=True,
    )
    json_number_chars: Count = setting(1000, "Most characters of one number.", reloadable=True)
    messages: Count = setting(
        4096,
        "Most messages of a conversation, or prompts or documents of a batch.",
        reloadable=True,
    )
    grammar_bytes: CountOrZero = setting(
        65536, "Largest grammar, bytes. 0: grammars are refused.", reloadable=True
    )
    grammar_paths: Count = setting(
        4096,
        "Most paths through a grammar, or a pattern of a JSON schema, at one point: the parts that"
        " can come next, times those of them that can be skipped.",
        reloadable=True,
    )
    schema_items: Count = setting(
        1024,
        "Most entries of enum, type, anyOf, oneOf and allOf in JSON schemas and tools, 4 times as"
        " many in a whole request; and twice the most keys of one object there, 16 times as many in"
        " a whole request.",
        reloadable=True,
    )
    n_probs: CountOrZero = setting(
        128, "Largest n_probs, logprobs and top_logprobs.", reloadable=True
    )

    @property
    def json_elements(self) -> int:
        """Most list elements of a body in total; most are numbers or texts, which cost little."""
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
        "evoke: evicts what the question needs least, recovers what it needs. discard: evicts like"
        " evoke, recovers nothing. truncate: drops the oldest messages from the request."
        " no_eviction: only counts. Policies that only serve as a comparison: docs/policies.md.",
        reloadable=True,
    )
    recovery: str = setting(
        "kv_restore",
        "How evoke recovers a block. kv_restore: copies its saved rows back. breadcrumb:"
        " saves no rows; adds the block's text to the last message, where it is decoded. discard:"
        " never recovers.",
        choices=RECOVERIES,
        reloadable=True,
    )
    recall: str = setting(
        "text",
        "How evoke finds the blocks that a question needs. text: by words, and vectors"
        " with an embedder. model: by the model's attention at the start of an answer, which"
        " decodes the end of the prompt twice. fused: by both, the model only where text is"
        " unsure. none: not at all.",
        choices=RECALLS,
        reloadable=True,
    )
    block_tokens: Count = setting(64, "Largest block, tokens.", reloadable=True)
    reserve_tokens: Count = setting(
        256, "Tokens kept free for the answer when the request has no limit.", reloadable=True
    )
    writeback: bool = setting(
        True,
        "Copy blocks to host memory while no request runs, so that evicting them later needs no"
        " copy.",
        reloadable=True,
    )
    # First tokens of a prompt, never evicted: models attend to them whatever they say.
    sink_tokens: CountOrZero = tuning(16)
    # Last tokens of a prompt, never evicted: the end of the question and the start of the answer.
    recent_tokens: CountOrZero = tuning(64)
    # Share of the budget that pinned blocks may take, of what system prompt and first tokens leave.
    pin_share: Share = tuning(0.6)
    # Number of layers whose attention is captured, evenly spread.
    attention_layers: Count = tuning(4)
    # Tokens that the model generates to show what it attends to; 64 at most.
    probe_tokens: Count = tuning(12)

    @property
    def least_budget(self) -> int:
        """The smallest budget: the first and last tokens that always stay, and one block."""
        return self.sink_tokens + self.recent_tokens + self.block_tokens


@dataclass(frozen=True, slots=True)
class PolicyConfig(PolicyOptions):
    """The policy of a session: the options, and the budget that is in force.

    Attributes:
        budget: Tokens that the session may keep in the KV cache; None: no limit.
    """

    budget: int | None = None


@dataclass(frozen=True, slots=True)
class PolicySettings(PolicyOptions):
    """What a session may keep in the KV cache, and how blocks are chosen."""

    budget: Annotated[int, Meta(gt=0, le=_MAX_TOKENS)] | Literal["auto"] | None = setting(
        AUTO,
        "Tokens that a session may keep in the KV cache. auto: what the cells of a slot hold, less"
        " reserve_tokens, where llama-server accepts longer conversations (--ctx-logical);"
        " otherwise no limit. off: no limit, the proxy never evicts.",
        reloadable=True,
    )

    def with_budget(self, budget: int | None) -> PolicyConfig:
        """Return the policy of sessions that may keep `budget` tokens; None: no limit."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(PolicyOptions)}
        return PolicyConfig(**values, budget=budget)


@dataclass(frozen=True, slots=True)
class EmbedderConfig:
    """The encoder that makes vectors of questions and blocks."""

    model: str = setting(
        "auto",
        "auto: the encoder in `directory` if one is given, else the one that `evoke-proxy embedder"
        " fetch` has stored, else built-in. built-in: the table of word vectors that travels with"
        " the package. none: blocks are ranked by words alone. Or the name of a fetched encoder.",
    )
    directory: str = setting(
        "",
        "Directory of a BERT-like encoder: model.onnx or onnx/model.onnx, tokenizer.json, and the"
        " files of sentence-transformers if present. Empty: as `model` says.",
    )
    store: str = setting(
        "",
        "Directory of the encoders that `evoke-proxy embedder fetch` stores. Empty:"
        " evoke-proxy/embedders in $XDG_DATA_HOME, by default ~/.local/share.",
    )
    mirror: str = setting(
        "https://huggingface.co",
        "Base URL that `evoke-proxy embedder fetch` downloads from: the model hub or a copy of it.",
    )
    device: str = setting(
        "auto",
        "auto: CUDA if onnxruntime supports it, else the CPU. cpu, cuda: that device, or the proxy"
        " does not start.",
        choices=DEVICES,
    )
    threads: Count = setting(1, "Threads of one inference. llama-server needs the cores more.")
    query_instruction: str | None = setting(
        None, "Text before each question. null: as in the directory, else that of bge for cls."
    )
    document_instruction: str | None = setting(
        None, "Text before each block. null: as in the directory."
    )
    timeout_ms: Count = setting(
        200, "Milliseconds to embed a question; after that it is ranked by words alone."
    )
    # Texts that may wait to be embedded; further ones are dropped, of the tenant with most.
    queue: Count = tuning(4096)
    cache_mib: Count = setting(
        64, "Memory for vectors, MiB; the least recently used are dropped first."
    )


@dataclass(frozen=True, slots=True)
class SnapshotsConfig:
    """Slot contents saved to disk. With a stock server, a conversation continues after a restart, a
    sleep or another conversation in its slot without being decoded again."""

    directory: str = setting(
        "",
        "The server's --slot-save-path as mounted here. Empty: nothing is saved or restored. The"
        " proxy makes it readable for its owner alone, so run both as the same user.",
    )
    key_file: str = setting(
        "",
        "File with 64 hexadecimal digits, mode 0600 (`evoke-proxy keys token` makes one): saved"
        " files are encrypted with them. llama-server writes and reads a file unencrypted while it"
        " saves or restores; use a directory in memory or on an encrypted disk against that.",
    )
    shared: bool = setting(
        False,
        "Other proxies on this machine, in front of the same model, use the directory as well, and"
        " a conversation may continue at any of them. Set it for all of them. Not for network file"
        " systems: the index is SQLite.",
    )
    # Shortest prompt to save, tokens; to decode less takes about as long as to restore it.
    min_tokens: Count = tuning(256)
    look_ahead: bool = setting(
        True,
        "While a client reads the answer, decode the beginning of its next request.",
    )
    max_mib: Count = setting(
        32768,
        "Size of all snapshots, MiB; the least valuable are deleted first.",
        reloadable=True,
    )
    max_count: Count = setting(256, "Number of all snapshots.", reloadable=True)
    max_age_h: Number = setting(
        168.0, "Hours without use after which a snapshot is deleted.", reloadable=True
    )
    min_free_mib: CountOrZero = setting(2048, "Free disk space to keep, MiB.", reloadable=True)
    tenant_mib: CountOrZero = setting(
        0, "Size of one tenant's snapshots, MiB. 0: no separate limit.", reloadable=True
    )
    # Hours after which the value of an unused snapshot has halved.
    half_life_h: Number = tuning(6.0)
    stall_share: Share = setting(
        0.1, "Share of time that saving may take: each save stops all slots."
    )
    # A restore must save this many times its cost, as measured. 0: whenever it saves anything.
    min_gain: NumberOrZero = tuning(2.0)
    one_at_a_time: bool = setting(
        False,
        "Run only one request at a time. llama-server has been reported to answer from another"
        " conversation when two slots are moved to its RAM cache at once; --cache-ram 0 avoids that"
        " as well.",
    )


@dataclass(frozen=True, slots=True)
class NormaliseConfig:
    """Changes at the front of prompts that clients vary with each request, which loses the cache.
    The model then reads other text than the client sent, so all are off by default. Requests with
    `evoke: false` are not changed."""

    billing: bool = setting(
        False,
        "Remove `x-anthropic-billing-header: ...` from the system prompt.",
        reloadable=True,
    )
    dates_h: NumberOrZero = setting(
        0.0,
        "Hours for which a system prompt keeps the dates and times of its first request, so that"
        " the model reads times that old. 0: off. Like `billing`, it only changes the first and"
        " last 200 lines of a text, within 8,192 characters of its ends.",
        reloadable=True,
    )
    tools: bool = setting(False, "Sort `tools` by name.", reloadable=True)


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may send requests, and who may operate the proxy."""

    keys_file: str = setting(
        "",
        "File of hashed client keys, mode 0600; `evoke-proxy keys add` makes it. If set, each"
        " request needs a key; each key belongs to a tenant, and tenants share nothing."
        " llama-server gets upstream.api_key instead of the client's key. Empty: no key is needed.",
    )
    admin_listen: tuple[str, ...] = setting(
        ("127.0.0.1:18090",),
        "Addresses of the page, the admin API and, if keys_file is set, /metrics. []: the addresses"
        " for clients. If the default address is in use, the proxy logs it and starts without it.",
    )
    admin_token_file: str = setting(
        "",
        "File with the token that admin requests must carry, mode 0600; `evoke-proxy keys token`"
        " makes one. Required for each address that other machines can reach. Empty: none.",
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log on standard error."""

    level: str = setting(
        "info",
        "Least severity: debug, info, warning or error. info logs a line per request, never prompt"
        " text.",
        choices=LOG_LEVELS,
        reloadable=True,
    )
    format: str = setting(
        "text",
        "text, or json: one object per line, with a key for each number of a request.",
        choices=LOG_FORMATS,
        reloadable=True,
    )


@dataclass(frozen=True, slots=True)
class PageConfig:
    """The page at /evoke/, the admin API and its events; none contains text of conversations."""

    names: bool = setting(
        False,
        "Include names of blocks: names of files and tools, which clients and models choose.",
        reloadable=True,
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of `evoke-proxy serve`."""

    listen: tuple[str, ...] = setting(
        ("127.0.0.1:8090",), "Addresses for clients, HOST:PORT each. Port 0 picks a free one."
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
    "snapshots.half_life_h": _FIXED,
    "snapshots.min_tokens": _FIXED,
    "snapshots.min_gain": _FIXED,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the configuration, as its class declares it.

    Attributes:
        key: The dotted key, for example `policy.budget`.
        type: The type, with its range as `msgspec.Meta`.
        default: The default value.
        doc: Its description in the example file.
        choices: The values that a text may have; empty for any.
        reloadable: Whether a change takes effect in a running proxy.
        is_tuning: Whether files, variables and options cannot set it.
        why: The reason for its range; may be empty.
    """

    key: str
    type: Any
    default: Any
    doc: str
    choices: tuple[str, ...]
    reloadable: bool
    is_tuning: bool
    why: str


@cache
def all_fields() -> Mapping[str, Setting]:
    """Every leaf of `Config` by dotted key, in the order of the classes; includes tuning values."""
    return {item.key: item for item in _fields_of(Config, "")}


@cache
def settings() -> Mapping[str, Setting]:
    """Every setting by dotted key, in the order of the classes."""
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
    """The variable that overrides a dotted key: `upstream.url` is EVOKE_UPSTREAM_URL."""
    return "EVOKE_" + key.replace(".", "_").upper()


def value_at(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


# An IPv6 address may be in brackets.
_LISTEN_HOST = re.compile(r"\[[0-9A-Za-z:.%]+\]|[^\x00-\x20\x7f\[\]/@]*")


def parse_listen(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `[v6]:PORT` or `:PORT`; ConfigError on anything else."""
    host, colon, port = address.rpartition(":")
    valid = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not valid or int(port) > 65535 or not _LISTEN_HOST.fullmatch(host):
        raise ConfigError(f"listen: {address!r} is not HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of all names only localhost counts."""
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
    """The URL of a llama-server, up to a path of its API; a path before that is `--api-prefix`.

    Clients are configured with URLs that end in /v1, so that is a likely mistake for a server.
    """
    parts = urlsplit(url)
    prefix, api, _ = f"{parts.path}/".partition("/v1/")
    return urlunsplit((parts.scheme, parts.netloc, prefix, "", "")) if api else url


# A server's name is a label of metrics and part of a path.
_SERVER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,47}")


def _named_url(entry: str) -> tuple[str, str]:
    """Name and URL of an entry of `pool.upstreams`; host and port are the name if it has none."""
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
