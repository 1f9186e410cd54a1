"""The tree of errors, with the HTTP status and code of each.

::

    EvokeError                    500 evoke_error            a defect; base of all errors
      ConfigError                 500 config_invalid         at start only: exit code 2
      RequestError                400 invalid_request        a chat request that cannot be forwarded
        BudgetTooSmall            400 evoke_budget_too_small budget below the smallest possible one
        PinBudgetExceeded         400 evoke_pin_budget_exceeded
        Unauthenticated           401 invalid_api_key        no key, or an unknown one
        Forbidden                 403 evoke_forbidden        a path that clients may not use
        MethodRefused             405 method_not_allowed     501 for an unknown method
      CapacityError               503 capacity_exceeded      with Retry-After
        SlotsBusy                 503 slots_busy             queue full, or waited too long
        BodyMemoryFull            503 body_memory_full       no memory for further bodies
        Draining                  503 draining               stopping: takes no new requests
        NoServer                  503 no_server              no server of the pool takes requests
      UpstreamError               502 upstream_error         a fault of llama-server
        UpstreamUnavailable       503 upstream_unavailable   refused, reset, loading
        UpstreamTimeout           504 upstream_timeout
        UpstreamRejected          as sent                    its own 4xx or 5xx, body unchanged
        UpstreamProtocolError     502 upstream_protocol      not JSON, or in another format
      PlanRefused                 502 plan_refused           caught in the engine: the request goes
                                                             on without a plan
      PromptTooLong               400 prompt_too_long        caught in the engine: the request goes
                                                             on without a plan
      SnapshotUnusable            500 snapshot_unusable      caught in the engine: the request goes
                                                             on without it
      IndexUnusable               500 index_unusable         caught in the engine: it is replaced
      EmbedderError               500 embedder_failed        caught in the engine: blocks are ranked
                                                             by their words alone
      DownloadError               500 download_failed        on the command line: exit code 1
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


class EvokeError(Exception):
    """Base of all errors; `str(error)` is for people, `code` and `status` are for programs."""

    status: int = 500
    code: str = "evoke_error"


class ConfigError(EvokeError):
    """The configuration cannot be used."""

    code = "config_invalid"


class RequestError(EvokeError):
    """The client's request is invalid; `code` names the rule that it breaks."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, code: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.status = status or type(self).status


class BudgetTooSmall(RequestError):
    """The budget cannot hold the sinks, the recent tokens and one block."""

    code = "evoke_budget_too_small"

    def __init__(self, budget: int, needed: int) -> None:
        super().__init__(
            f"a budget of {budget} tokens is too small: sinks, recent tokens and one block"
            f" need {needed}"
        )
        self.budget = budget
        self.needed = needed


class PinBudgetExceeded(RequestError):
    """The client pins more tokens than its budget allows."""

    code = "evoke_pin_budget_exceeded"

    def __init__(self, pinned_tokens: int, pin_cap: int) -> None:
        super().__init__(
            f"{pinned_tokens} tokens are pinned, at most {pin_cap} may be:"
            " pin less, or raise the budget"
        )
        self.pinned_tokens = pinned_tokens
        self.pin_cap = pin_cap


class Unauthenticated(RequestError):
    """The request has no valid key."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The client may not make this request."""

    status = 403
    code = "evoke_forbidden"


class MethodRefused(RequestError):
    """The method is not accepted here; `allow` lists the accepted ones."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, allow: Iterable[str], is_standard: bool = True) -> None:
        self.allow = ", ".join(allow)
        super().__init__(
            f"method {method} is not accepted, {self.allow} are",
            None if is_standard else "method_not_implemented",
            None if is_standard else 501,
        )


class CapacityError(EvokeError):
    """There is no capacity now; a retry after `retry_after` seconds may succeed."""

    status = 503
    code = "capacity_exceeded"

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SlotsBusy(CapacityError):
    """The queue for a slot is full, or the request waited in it for too long."""

    code = "slots_busy"


class BodyMemoryFull(CapacityError):
    """The bodies of running requests use all of their memory."""

    code = "body_memory_full"

    def __init__(self) -> None:
        super().__init__(
            "the bodies of other requests take the memory that limits.bodies_mib allows;"
            " try again soon",
            retry_after=2.0,
        )


class Draining(CapacityError):
    """The proxy is stopping; a retry reaches its successor."""

    code = "draining"

    def __init__(self) -> None:
        super().__init__("evoke-proxy is stopping and takes no new requests; try again soon")


class NoServer(CapacityError):
    """No llama-server of the pool takes requests."""

    code = "no_server"


class UpstreamError(EvokeError):
    """llama-server failed. The message is for operators.

    Attributes:
        url: URL of the server; empty if unknown.
        reached: False if the server did not receive the request.
        public: The message for clients, without the URL.
        counted: Whether the metric of failures already includes this one.
    """

    status = 502
    code = "upstream_error"
    counted = False

    def __init__(self, message: str, url: str = "", reached: bool = True, public: str = "") -> None:
        super().__init__(message)
        self.url = url
        self.reached = reached
        hidden = (
            message.replace(f" at {url}", "").replace(url, "(llama-server)") if url else message
        )
        self.public = public or hidden


class UpstreamUnavailable(UpstreamError):
    """llama-server refused or closed a connection, or is still loading."""

    status = 503
    code = "upstream_unavailable"
    retry_after: float = 5.0


class UpstreamTimeout(UpstreamError):
    """llama-server did not answer in time."""

    status = 504
    code = "upstream_timeout"


class UpstreamRejected(UpstreamError):
    """llama-server answered with an error; `status` and `body` are unchanged."""

    code = "upstream_rejected"

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"llama-server answered {status}: {body[:200].decode('utf-8', 'replace')}")
        self.status = status
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        """The `error` object of the body; empty without one."""
        try:
            parsed = json.loads(self.body)
        except ValueError:
            return {}
        error = parsed.get("error") if isinstance(parsed, dict) else None
        return error if isinstance(error, dict) else {}


class UpstreamProtocolError(UpstreamError):
    """llama-server's answer is not JSON, or has an unexpected format."""

    code = "upstream_protocol"


class PlanRefused(EvokeError):
    """llama-server refused block calls and changed nothing.

    Attributes:
        type: Its error type (`stale_epoch`, `unknown_block`, ...).
        name: The block label in the error; None without one.
        op: The index of the failing operation; None without one.
        operation: The kind of that operation (`save`, `attn-capture`, ...); empty if unknown.
    """

    status = 502
    code = "plan_refused"

    def __init__(
        self, type: str, message: str = "", name: str | None = None, op: int | None = None
    ) -> None:
        super().__init__(f"{type}: {message}" if message else type)
        self.type = type
        self.name = name
        self.op = op
        self.operation = ""

    @classmethod
    def of(cls, rejected: UpstreamRejected) -> PlanRefused:
        """The refusal of a rejected block call."""
        error = rejected.error
        name, op = error.get("name"), error.get("op")
        return cls(
            type=str(error.get("type") or rejected.status),
            message=str(error.get("message") or ""),
            name=name if isinstance(name, str) else None,
            op=op if isinstance(op, int) else None,
        )


class PromptTooLong(EvokeError):
    """A prompt has more tokens than the server's context, so it cannot be planned."""

    status = 400
    code = "prompt_too_long"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the prompt has more than the {limit} tokens of the context")


class SnapshotUnusable(EvokeError):
    """A snapshot must not be restored, or was not saved; `reason` is one word."""

    code = "snapshot_unusable"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class IndexUnusable(EvokeError):
    """The file of the snapshot index is damaged, or not an index."""

    code = "index_unusable"


class EmbedderError(EvokeError):
    """The embedder failed on these texts; a failure to load it is a ConfigError."""

    code = "embedder_failed"


class DownloadError(EvokeError):
    """A file cannot be downloaded, or has another hash; the command line reports it."""

    code = "download_failed"
