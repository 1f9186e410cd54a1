"""The tree of errors, with the HTTP status and code of each.

::

    EvokeError                    500 evoke_error            a defect; base of all errors
      ConfigError                 500 config_invalid         on the command line: exit code 2
      RequestError                400 invalid_request        a chat request that cannot be forwarded
        BudgetTooSmall            400 evoke_budget_too_small budget below the smallest possible
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
        UpstreamRejected          as sent                    llama-server's own 4xx or 5xx
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
from typing import Any, Final

# Status of a llama-server that does not take requests yet: it still loads its model.
STATUS_LOADING: Final = 503


class EvokeError(Exception):
    """Base of all errors; `str(error)` is the message for a person.

    Attributes:
        status: HTTP status of a reply that reports it.
        code: Identifier for programs, in the `error` object of a reply.
    """

    status: int = 500
    code: str = "evoke_error"


class ConfigError(EvokeError):
    """A setting, an argument or a file that it names cannot be used; the message names it."""

    code = "config_invalid"


class RequestError(EvokeError):
    """The request of a client is invalid; `code` names the rule that it breaks."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, code: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.status = status or type(self).status


class BudgetTooSmall(RequestError):
    """The budget is too small for the tokens that are never evicted and one block.

    Attributes:
        budget: The budget, tokens.
        needed: The smallest possible budget, tokens.
    """

    code = "evoke_budget_too_small"

    def __init__(self, budget: int, needed: int) -> None:
        super().__init__(
            f"a budget of {budget} tokens is too small: it must be at least {needed}, for the first"
            " and last tokens of a prompt, which are never evicted, and one block"
        )
        self.budget = budget
        self.needed = needed


class PinBudgetExceeded(RequestError):
    """The client pins more tokens than the budget allows.

    Attributes:
        pinned_tokens: Number of pinned tokens.
        pin_cap: Most tokens that may be pinned.
    """

    code = "evoke_pin_budget_exceeded"

    def __init__(self, pinned_tokens: int, pin_cap: int) -> None:
        super().__init__(
            f"{pinned_tokens} tokens are pinned, but at most {pin_cap} may be:"
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
    """The path does not accept this method.

    The status is 501 if `is_standard` is false: no path accepts the method.

    Attributes:
        allow: The accepted methods, as the value of the header Allow.
    """

    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, allow: Iterable[str], is_standard: bool = True) -> None:
        self.allow = ", ".join(allow)
        super().__init__(
            f"the method {method} is not accepted here; accepted are {self.allow}",
            None if is_standard else "method_not_implemented",
            None if is_standard else 501,
        )


class CapacityError(EvokeError):
    """There is no capacity at present.

    Attributes:
        retry_after: Seconds after which a retry may succeed, for the header Retry-After.
    """

    status = 503
    code = "capacity_exceeded"

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SlotsBusy(CapacityError):
    """The queue for a slot is full, or the request waited in it for too long."""

    code = "slots_busy"


class BodyMemoryFull(CapacityError):
    """The bodies of running requests use all memory that they may (limits.bodies_mib)."""

    code = "body_memory_full"

    def __init__(self) -> None:
        super().__init__(
            "the bodies of other requests use all memory that limits.bodies_mib allows;"
            " try again soon",
            retry_after=2.0,
        )


class Draining(CapacityError):
    """The proxy is stopping; a later retry may reach the next process."""

    code = "draining"

    def __init__(self) -> None:
        super().__init__("evoke-proxy is stopping and takes no new requests; try again soon")


class NoServer(CapacityError):
    """No llama-server of the pool takes requests."""

    code = "no_server"


class UpstreamError(EvokeError):
    """llama-server failed. The message is for operators: it may contain the URL of the server.

    Attributes:
        url: URL of the server; empty if unknown.
        reached: False if the server cannot have received the request, so that another one may.
        public: The message for clients, without the URL.
        counted: Whether `evoke_upstream_errors_total` already includes this failure.
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

    @classmethod
    def while_loading(cls, url: str) -> UpstreamUnavailable:
        """Make the error of a server that answered a request with STATUS_LOADING."""
        return cls(f"llama-server at {url} takes no requests yet", url, reached=False)


class UpstreamTimeout(UpstreamError):
    """llama-server did not answer in time."""

    status = 504
    code = "upstream_timeout"


class UpstreamRejected(UpstreamError):
    """llama-server answered with an error.

    Attributes:
        status: The status of its answer.
        body: The body of its answer, unchanged.
    """

    code = "upstream_rejected"

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body
        text = self.error.get("message") or body.decode("utf-8", "replace")
        super().__init__(f"llama-server answered {status}: {str(text)[:200]}")

    @property
    def error(self) -> dict[str, Any]:
        """The `error` object in the body; {} when there is none."""
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
    """llama-server refused a block call, which has changed nothing.

    Attributes:
        type: The type of its error (`stale_epoch`, `unknown_block`, ...; see patches/API.md).
        name: The block label in its error; None if there is none.
        op: Index of the operation that failed, in the call; None if its error has none.
        operation: Kind of that operation (`save`, `attn-capture`, ...); empty if unknown.
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
        """Make the refusal from the error with which llama-server rejected a block call."""
        error = rejected.error
        name, op = error.get("name"), error.get("op")
        return cls(
            type=str(error.get("type") or rejected.status),
            message=str(error.get("message") or ""),
            name=name if isinstance(name, str) else None,
            op=op if isinstance(op, int) else None,
        )


class PromptTooLong(EvokeError):
    """A prompt has more tokens than the context of a slot (`limit`), so it cannot be planned."""

    status = 400
    code = "prompt_too_long"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the prompt has more than the {limit} tokens of the context")


class SnapshotUnusable(EvokeError):
    """A snapshot cannot be saved or restored.

    Attributes:
        reason: The cause in one word (`size`, `checksum`, `disk`, ...), a label of metrics.
    """

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


def pip_install(extra: str) -> str:
    """Return the command that installs an extra: for the package, and for a checkout of it."""
    return f"pip install 'evoke-proxy[{extra}]' (in a checkout: '.[{extra}]')"
