"""Every error of ours, with the HTTP status and code it becomes.

::

    EvokeError                    500 evoke_error            a defect, or the base of the rest
      ConfigError                 500 config_invalid         startup only: exit 2
      RequestError                400 invalid_request        not a chat request we can forward
        BudgetTooSmall            400 evoke_budget_too_small budget under sinks + recent + one block
        PinBudgetExceeded         400 evoke_pin_budget_exceeded
        Unauthenticated           401 invalid_api_key        no key, or one that nobody has
        Forbidden                 403 evoke_forbidden        a path that is not for clients
        MethodRefused             405 method_not_allowed     501 when the method is unknown
      CapacityError               503 capacity_exceeded      sends Retry-After
        SlotsBusy                 503 slots_busy             queue full, or waited too long
        BodyMemoryFull            503 body_memory_full       other bodies take all memory
        Draining                  503 draining               stopping: answers end, none begin
        NoServer                  503 no_server              of several none takes requests now
      UpstreamError               502 upstream_error         something about llama-server
        UpstreamUnavailable       503 upstream_unavailable   refused, reset, loading
        UpstreamTimeout           504 upstream_timeout
        UpstreamRejected          as sent                    its own 4xx/5xx, body unchanged
        UpstreamProtocolError     502 upstream_protocol      not JSON, or of the wrong shape
      PlanRefused                 502 plan_refused           caught in the engine: the request goes
                                                             on without a plan
      PromptTooLong               400 prompt_too_long        caught in the engine: the request goes
                                                             on without a plan
      SnapshotUnusable            500 snapshot_unusable      caught in the engine: the request goes
                                                             on without it
      IndexUnusable               500 index_unusable         caught in the engine: it is set aside
      EmbedderError               500 embedder_failed        caught in the engine: blocks are ranked
                                                             by their words alone
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


class EvokeError(Exception):
    """Base of all; `str(error)` is for a person, `code` and `status` are for a program."""

    status: int = 500
    code: str = "evoke_error"


class ConfigError(EvokeError):
    """The configuration cannot be used."""

    code = "config_invalid"


class RequestError(EvokeError):
    """The client's request cannot be served; `code` says which rule it breaks."""

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
    """The client pins more tokens than its budget can spare."""

    code = "evoke_pin_budget_exceeded"

    def __init__(self, pinned_tokens: int, pin_cap: int) -> None:
        super().__init__(
            f"{pinned_tokens} tokens are pinned, at most {pin_cap} may be:"
            " pin less, or raise the budget"
        )
        self.pinned_tokens = pinned_tokens
        self.pin_cap = pin_cap


class Unauthenticated(RequestError):
    """The request shows no key that counts."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """Whoever asks may not ask this."""

    status = 403
    code = "evoke_forbidden"


class MethodRefused(RequestError):
    """The method is not accepted here; `allow` lists those that are."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, allow: Iterable[str], known: bool = True) -> None:
        self.allow = ", ".join(allow)
        super().__init__(
            f"method {method} is not accepted, {self.allow} are",
            None if known else "method_not_implemented",
            None if known else 501,
        )


class CapacityError(EvokeError):
    """No room now; trying again after `retry_after` seconds may help."""

    status = 503
    code = "capacity_exceeded"

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SlotsBusy(CapacityError):
    """The queue for a slot is full, or the wait in it was too long."""

    code = "slots_busy"


class BodyMemoryFull(CapacityError):
    """The bodies of requests under way take all of the memory there is for them."""

    code = "body_memory_full"

    def __init__(self) -> None:
        super().__init__(
            "the bodies of other requests take the memory that limits.bodies_mib allows;"
            " try again soon",
            retry_after=2.0,
        )


class Draining(CapacityError):
    """The proxy is stopping; whoever comes again finds the next one."""

    code = "draining"

    def __init__(self) -> None:
        super().__init__("evoke-proxy is stopping and takes no new requests; try again soon")


class NoServer(CapacityError):
    """None of several llama-servers takes requests."""

    code = "no_server"


class UpstreamError(EvokeError):
    """llama-server did not do its part; `url` says which, where that is known. One that was not
    `reached` knows nothing of the request. `counted`: the metric of failures has this one.

    The message is for operators; `public` is the message for clients, without the internal URL.
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
    """llama-server refuses connections, broke one off, or is still loading."""

    status = 503
    code = "upstream_unavailable"
    retry_after: float = 5.0


class UpstreamTimeout(UpstreamError):
    """llama-server did not answer in time."""

    status = 504
    code = "upstream_timeout"


class UpstreamRejected(UpstreamError):
    """llama-server answered with an error of its own; `status` and `body` are as it sent them."""

    code = "upstream_rejected"

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"llama-server answered {status}: {body[:200].decode('utf-8', 'replace')}")
        self.status = status
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        """The `error` object of the body; empty when it has none."""
        try:
            parsed = json.loads(self.body)
        except ValueError:
            return {}
        error = parsed.get("error") if isinstance(parsed, dict) else None
        return error if isinstance(error, dict) else {}


class UpstreamProtocolError(UpstreamError):
    """llama-server's answer is not JSON, or not of the agreed shape."""

    code = "upstream_protocol"


class PlanRefused(EvokeError):
    """llama-server refused block calls; nothing was changed.

    `type` is its error type (`stale_epoch`, `unknown_block`, ...), `name` the label it names, `op`
    the index of the failing op; both are None when it names none. `operation` is what that op is
    (`save`, `attn-capture`, ...), empty where the caller does not say.
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
        """The refusal that a rejected block call stands for."""
        error = rejected.error
        name, op = error.get("name"), error.get("op")
        return cls(
            type=str(error.get("type") or rejected.status),
            message=str(error.get("message") or ""),
            name=name if isinstance(name, str) else None,
            op=op if isinstance(op, int) else None,
        )


class PromptTooLong(EvokeError):
    """A prompt has more tokens than the context of the server; no plan can be made for it."""

    status = 400
    code = "prompt_too_long"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the prompt has more than the {limit} tokens of the context")


class SnapshotUnusable(EvokeError):
    """A snapshot that must not be restored, or was not saved; `reason` is one word for why."""

    code = "snapshot_unusable"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class IndexUnusable(EvokeError):
    """The index of snapshots is none, or is damaged."""

    code = "index_unusable"


class EmbedderError(EvokeError):
    """The embedder made no vectors of these texts; loading one fails with a ConfigError."""

    code = "embedder_failed"
