"""A request to a generating or counting endpoint: as it arrived, and as it was read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.session.identity import Hint
from evoke_proxy.engine.parsing.body_cache import CachedBody

# The pseudo header that carries the tenant of a key of ours; no request header has a colon in it.
TENANT = ":tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingRequest:
    """One request as the client sent it."""

    # Name of the request's schema, one of those that `parse_chat` reads.
    dialect: str
    body: bytes
    # The client's headers: tenant, credentials, session name.
    headers: Mapping[str, str]
    # Raw path and query, sent on as they are.
    target: str = ""
    # The headers that are sent on to llama-server.
    forwarded_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request whose body was read; the same value for every server it is tried at.

    One that can be read is a `ParsedChat`.
    """

    incoming: IncomingRequest
    # Hash of the client's key, "" without one. Tenants share no conversations and no copies.
    tenant: str
    # The body to forward: normalised, without the proxy's own fields.
    body: bytes
    # Why the body cannot be read, as a label of `evoke_bypass_total`; "" when it can.
    unreadable: str = ""

    @property
    def headers(self) -> Mapping[str, str]:
        """The client's headers, for calls that are made with its credentials."""
        return self.incoming.headers

    @property
    def streams(self) -> bool:
        """Whether the client wants an event stream."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedChat(ParsedRequest):
    """A request to generate, read."""

    chat: ChatRequest
    # The model that the request names.
    model: str = ""
    # What the client calls the conversation.
    hint: Hint | None = None
    # The slot that the request names.
    id_slot: int | None = None
    # The request brings several prompts.
    is_batch: bool = False
    # The body as the next request of the conversation is compared with it; None for short bodies.
    cached_body: CachedBody | None = None
    # The rendering of the earlier body that this one continues.
    previous: Rendered | None = None

    @property
    def streams(self) -> bool:
        """Whether the client wants an event stream."""
        return self.chat.stream

    @property
    def is_verbose(self) -> bool:
        """Whether the client asked to be told what the proxy did."""
        return self.chat.options.is_set or "X-Evoke-Session" in self.headers


def tenant_of(headers: Mapping[str, str]) -> str:
    """The tenant that a request belongs to; clients with different keys never share blocks.

    A key of ours names its tenant. Any other key is hashed and kept nowhere; a request without one
    belongs to the tenant "".
    """
    if TENANT in headers:
        return headers[TENANT]
    key = headers.get("Authorization") or headers.get("X-Api-Key") or ""
    # A header may have bytes that are not UTF-8.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16] if key else ""
