"""The bodies that the admin API accepts, and the answers that it gives.

Bodies are parsed as these types. Answers are made by `engine.admin`; their types document them, and
`tests/proxy/test_openapi.py` compares them with the answers of a running proxy. An answer may have
further keys. A key is absent where its field is unset.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from evoke_proxy.core.policy.prefetch import PREFETCH_REASONS
from evoke_proxy.core.request.look_ahead import KINDS
from evoke_proxy.core.session.accounting import PATHS
from evoke_proxy.core.session.block_map import STATES

_MAX_TOKENS = 2**30  # llama-server counts tokens in 32 bits

Tokens = Annotated[int, Meta(ge=0, description="Number of tokens.")]
Position = Annotated[int, Meta(ge=0, le=_MAX_TOKENS, description="Position in the prompt, tokens.")]
Budget = Annotated[int, Meta(gt=0, le=_MAX_TOKENS, description="Tokens.")]
Time = Annotated[float, Meta(description="Seconds since the epoch.")]
Flag = Annotated[bool, Meta(description="true or false.")]
Ranges = Annotated[list[tuple[int, int]], Meta(description="Ranges [start, end) of positions.")]


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request; other keys are refused."""


class SessionChange(Body):
    """Changes of a session, at least one."""

    pinned: Annotated[bool, Meta(description="Keep it, and its snapshots.")] | UnsetType = UNSET
    # null: no limit. "default": the budget of all sessions.
    budget: Budget | Literal["default"] | None | UnsetType = UNSET


class BlockChange(Body):
    """A change of the blocks in the range [p0, p1); p1 must be greater than p0."""

    action: Literal["pin", "unpin", "drop"]
    p0: Position
    p1: Position


class Fork(Body):
    """A branch of a session."""

    name: Annotated[
        str,
        Meta(
            description="The `X-Evoke-Session` of its requests.",
            min_length=1,
            max_length=256,
            pattern="^[!-~]([ -~]{0,254}[!-~])?$",
        ),
    ]


class Draft(Struct, kw_only=True):
    """The body of a chat completion whose last message is a draft of the user's next one."""

    messages: Annotated[
        list[dict[str, Any]],
        Meta(description="The conversation and the draft.", min_length=1),
    ]


class BlockCount(Struct, kw_only=True):
    """Blocks, and the tokens in them."""

    blocks: Annotated[int, Meta(ge=0, description="Number of blocks.")]
    tokens: Tokens


class Prefetched(Struct, kw_only=True):
    """What was brought back for a draft."""

    reason: Annotated[
        Literal["", *PREFETCH_REASONS],  # type: ignore[valid-type]
        Meta(description="Why less was brought back than the draft needs; empty otherwise."),
    ]
    recovered: BlockCount
    # What the draft needs and was not in the slot.
    needed: BlockCount
    resident: Tokens
    budget: Budget | None
    ms: Annotated[float, Meta(ge=0, description="Milliseconds that the call took.")]


class BudgetChange(Body):
    """The budget of sessions without one of their own; null for no limit."""

    budget: Budget | Literal["auto"] | None


class ServerChange(Body):
    """A change of one of several servers."""

    draining: Flag


class Problem(Struct, kw_only=True):
    """What is configured but not in force at a server, and what to do."""

    server: str
    reason: str
    problem: str
    fix: str


class Store(Struct, kw_only=True):
    """Bytes of saved blocks in one tier, and how many copies were lost there."""

    used: int
    budget: int
    dropped: int | UnsetType = UNSET
    failed: int | UnsetType = UNSET


class AuditedBudget(Struct, kw_only=True):
    """What the audits of turns with one budget have found."""

    budget: Tokens
    audits: Annotated[int, Meta(description="Audited answers of the sessions.")]
    others: Annotated[
        int, Meta(description="Of these, with another most probable token without eviction.")
    ]
    text: Annotated[str, Meta(description="Both in one sentence.")]


class Overview(Struct, kw_only=True):
    """Totals of all servers since the start of the proxy."""

    tokens: dict[str, float]
    blocks_evicted: float
    blocks_recovered: float
    budget: Budget | Literal["auto"] | None
    cells: int
    resident: int
    ram: Store | None
    disk: Store | None
    problems: list[Problem]
    audits: list[AuditedBudget]


class Server(Struct, kw_only=True):
    """One of several llama-servers."""

    name: str
    url: str
    state: str
    takes: Annotated[bool, Meta(description="Whether it gets new requests.")]
    breaker: str
    draining: bool
    foreign: Annotated[bool, Meta(description="Whether it runs another model.")]
    failures: int
    retry_in_s: float | None
    mode: str
    slots: int
    in_flight: int
    queued: int
    sessions: int
    fingerprint: Any
    snapshots: Any


class Servers(Struct, kw_only=True):
    """All servers; empty where there is only one."""

    servers: list[Server]


class Status(Struct, kw_only=True):
    """The state of the proxy, without a call of llama-server."""

    version: str
    mode: str
    server: Annotated[str, Meta(description="The state of llama-server, in words.")]
    reachable: bool
    build: str
    slots: Annotated[list[str | None], Meta(description="The session of each slot.")]
    queued: int
    policy: str
    budget: Annotated[Budget | None, Meta(description="At most the cells of a slot.")]
    degraded: Annotated[
        bool, Meta(description="Requests are served, but not as configured: see /evoke/ready.")
    ]
    snapshots_off: Annotated[
        bool, Meta(description="Whether a configured directory of snapshots cannot be used.")
    ]
    event: Annotated[int, Meta(description="Number of the latest event.")]
    draining: bool
    servers: list[Server] | UnsetType = UNSET


class Drift(Struct, kw_only=True):
    """How the latest request of a session differs from what was expected."""

    cause: str
    message: int | None
    characters: tuple[int, int]
    # Patched servers: requests of the session with this cause, and tokens decoded again for them.
    count: int | UnsetType = UNSET
    tokens: int | UnsetType = UNSET


class Audit(Struct, kw_only=True):
    """The audited answers of a session."""

    audits: int
    others: Annotated[int, Meta(description="With another most probable token without eviction.")]
    change: Annotated[
        float | None, Meta(description="Mean change of the log probability per token, nats.")
    ]


class SessionRow(Struct, kw_only=True):
    """A session in the list. One that is only on disk has fewer keys."""

    id: str
    tenant: str
    name: Annotated[str | None, Meta(description="The name that its client gives it.")]
    live: Annotated[bool, Meta(description="false: only its snapshots on disk exist.")]
    turns: int
    tokens: Tokens
    # null before its first answer.
    used: Time | None
    pinned: bool
    bytes: Annotated[int, Meta(description="Size of its snapshots.")]
    snapshots: Annotated[int, Meta(description="Number of its snapshots.")]
    slot: int | None | UnsetType = UNSET
    busy: bool | UnsetType = UNSET
    # While its prompt is decoded: the tokens in its slot, and all of them.
    prefill: tuple[int, int] | None | UnsetType = UNSET
    resident: Tokens | UnsetType = UNSET
    saved_blocks: int | UnsetType = UNSET
    # The budget of its latest turn.
    budget: Budget | None | UnsetType = UNSET
    # The budget of its next turn, and whether it is its own.
    limit: Budget | None | UnsetType = UNSET
    own_budget: bool | UnsetType = UNSET
    policy: str | None | UnsetType = UNSET
    drift: Drift | None | UnsetType = UNSET
    # Its audited answers; null before the first.
    audit: Audit | None | UnsetType = UNSET
    server: str | UnsetType = UNSET


class Sessions(Struct, kw_only=True):
    """All sessions, the latest used first, then those on disk only."""

    sessions: list[SessionRow]


class BlockRow(Struct, kw_only=True):
    """A block of a session: where its rows are, without its text."""

    p0: Position
    p1: Position
    state: Annotated[str, Meta(extra_json_schema={"enum": list(STATES)})]
    resident: Tokens
    role: str
    pinned: bool
    score: float | None
    turn: int | UnsetType = UNSET
    message: int | UnsetType = UNSET
    name: str | UnsetType = UNSET


class Turn(Struct, kw_only=True):
    """A turn of a session: decoded + recovered + resident_before + omitted = prompt."""

    number: int
    at: Time
    path: Annotated[str, Meta(extra_json_schema={"enum": list(PATHS)})]
    decision: str
    ttft_s: float | None
    prompt: Tokens
    decoded: Tokens
    recovered: Tokens
    resident_before: Tokens
    omitted: Tokens
    resident: Tokens
    peak: Tokens
    budget: Budget | None
    evicted: Ranges
    recovered_spans: Ranges
    ranges_left_out: Annotated[
        int,
        Meta(
            ge=0,
            description="How many ranges are neither in `evicted` nor in `recovered_spans`: of each"
            " a turn keeps the 256 longest, and the turns of a session keep 8192 together, those of"
            " the latest turns.",
        ),
    ]


class SnapshotRow(Struct, kw_only=True):
    """A snapshot of a session on disk."""

    id: str
    kind: Annotated[
        str,
        Meta(
            description="Where in the session it was taken: after a message of the user (`user`),"
            " after the latest step (`step`; `whole` where other sessions may begin with it), after"
            " a beginning that sessions share (`prefix`).",
            extra_json_schema={"enum": list(KINDS)},
        ),
    ]
    n_tokens: Tokens
    n_bytes: int
    created: Time
    used: Time
    pinned: bool


class Session(SessionRow, kw_only=True):
    """One session: its blocks, its latest turns, its snapshots."""

    snapshots: list[SnapshotRow]  # type: ignore[assignment]
    blocks: list[BlockRow]
    totals: Annotated[dict[str, int], Meta(description="Tokens by state.")]
    history: list[Turn]
    fresh: bool | UnsetType = UNSET


class Deleted(Struct, kw_only=True):
    """What was deleted, and what could not be reached."""

    sessions: int
    snapshots: int
    left: list[str]


class Health(Struct, kw_only=True):
    """The proxy runs."""

    status: Literal["ok"]


class Check(Struct, kw_only=True):
    """A check of the readiness."""

    ok: bool
    detail: str
    reason: str | UnsetType = UNSET


class Readiness(Struct, kw_only=True):
    """Whether requests can be served. Only operators get `checks`."""

    status: Literal["ready", "degraded", "not_ready"]
    failed: list[str]
    reasons: list[str]
    mode: str
    checks: dict[str, Check] | UnsetType = UNSET


class ErrorDetail(Struct, kw_only=True):
    """An error."""

    message: str
    type: str
    code: str
    param: None | UnsetType = UNSET


class Error(Struct, kw_only=True):
    """The body of an answer with an error."""

    error: ErrorDetail
