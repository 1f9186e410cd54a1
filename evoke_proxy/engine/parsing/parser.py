"""Reads requests: normalizes the front of chats, and removes the proxy's own fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from evoke_proxy.adapters.clock import uptime_s
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, NormaliseConfig
from evoke_proxy.core.request.chat import parse_chat, strip_own_fields
from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.core.request.json_parsing import count_byte
from evoke_proxy.core.request.large_json import HUGE_BYTES
from evoke_proxy.core.request.normalise import (
    BILLING,
    DATES,
    MAX_TEXTS,
    TOOLS,
    DateFreezer,
    Path,
    system_texts,
    with_sorted_tools,
    with_texts,
    without_billing,
)
from evoke_proxy.core.session.identity import hint_of
from evoke_proxy.engine.parsing.body_cache import BodyCache, ReadBody
from evoke_proxy.engine.parsing.body_parsing import LARGE_BYTES, parse_object, run_off_loop
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat, ParsedRequest, tenant_of
from evoke_proxy.errors import RequestError
from evoke_proxy.thread_pools import for_body, run_in

# Lets an unpatched llama-server move rows of the slot, whoever has sent their text, to other
# positions of a prompt. It keeps them as rows of that prompt for every request that begins alike.
_REUSE_OF_ROWS = "n_cache_reuse"
# A body may have fields that are removed if it has one of these; an escape may stand for a letter.
_SIGNS_OF_FIELDS = (b"evoke", _REUSE_OF_ROWS.encode(), b"\\u00")
# To find the fields to remove, each member of the body and of its messages is read: more of them,
# each with a colon, take over 10 ms.
_MANY_COLONS = 512


class Normalizer:
    """Applies the `normalise` settings, so that unchanged prompts stay in the cache."""

    def __init__(self, config: NormaliseConfig, metrics: Metrics) -> None:
        self.config = config
        self._metrics = metrics
        self._clock = DateFreezer()

    def apply(self, body: bytes, dialect: str, tenant: str) -> bytes:
        """The normalized body; the same object when nothing changes."""
        config = self.config
        if dialect == "completions" or not (config.billing or config.dates_h or config.tools):
            return body
        if len(body) > HUGE_BYTES:  # parsing would shorten its long strings
            return body
        try:
            parsed = parse_object(body)
        except RequestError:  # the request parser reports it
            return body
        if parsed.get("evoke") is False:
            return body
        texts = dict(self._texts(parsed, dialect, tenant))
        body = with_texts(body, texts) if texts else body
        ordered = with_sorted_tools(body, parsed.get("tools")) if config.tools else body
        if ordered is not body:
            self._metrics.normalised.labels(what=TOOLS).inc()
        return ordered

    def _texts(
        self, parsed: Mapping[str, Any], dialect: str, tenant: str
    ) -> Iterator[tuple[Path, str]]:
        """Paths and new contents of the system prompt's texts that change."""
        for path, text in islice(system_texts(parsed, dialect), MAX_TEXTS):
            unbilled = without_billing(text) if self.config.billing else text
            if unbilled != text:
                self._metrics.normalised.labels(what=BILLING).inc()
            result = unbilled
            if self.config.dates_h:
                result = self._clock.freeze(unbilled, tenant, uptime_s(), self.config.dates_h)
            if result != unbilled:
                self._metrics.normalised.labels(what=DATES).inc()
            if result != text:
                yield path, result


class RequestParser:
    """Reads every request, and remembers the part that the next one of its conversation repeats."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._config = config
        self._normalizer = Normalizer(config.normalise, metrics)
        self._bodies = BodyCache()

    def adjust(self, config: Config) -> None:
        """Continue with another configuration; applies to the next request."""
        self._config = config
        self._normalizer.config = config.normalise

    async def parse(self, incoming: IncomingRequest) -> ParsedRequest:
        """Read a request, and take the proxy's own fields out of its body.

        Raises RequestError for wrong fields of the proxy. Where clients have keys, also when the
        body cannot be read: llama-server might read the proxy's fields from it; `n_cache_reuse` is
        removed there, because rows of one tenant would become those of a prompt of another. A large
        body is read in a thread.
        """
        if _has_long_edit(incoming.body):
            return await run_in(for_body(len(incoming.body)), self._parse, incoming)
        return await run_off_loop(incoming.body, self._parse, incoming)

    def _parse(self, incoming: IncomingRequest) -> ParsedRequest:
        tenant, body = tenant_of(incoming.headers), incoming.body
        reason = "content_encoding"
        if incoming.headers.get("Content-Encoding", "identity").lower() == "identity":
            body, reason = self._normalizer.apply(body, incoming.dialect, tenant), "not_json"
            try:
                read = self._bodies.read(body, tenant) or ReadBody(body, parse_object(body))
            except RequestError:
                pass  # llama-server says what is wrong with it, as it would directly
            else:
                return self._chat(incoming, read, tenant)
        if self._config.security.keys_file:
            raise RequestError("the request body is not JSON that can be read", "invalid_json")
        return ParsedRequest(incoming=incoming, tenant=tenant, body=body, unreadable=reason)

    def _chat(self, incoming: IncomingRequest, read: ReadBody, tenant: str) -> ParsedChat:
        fields = read.parsed
        hint = hint_of(incoming.headers, fields)
        chat = parse_chat(incoming.dialect, fields, read.n_shared)
        forwarded = strip_own_fields(read.body) if chat.options.is_set else read.body
        if self._config.security.keys_file and _REUSE_OF_ROWS in chat.keys:
            forwarded = edit_top_level(forwarded, {}, (_REUSE_OF_ROWS,))
        id_slot = fields.get("id_slot")
        is_slot = isinstance(id_slot, int) and not isinstance(id_slot, bool)
        return ParsedChat(
            incoming=incoming,
            tenant=tenant,
            body=forwarded,
            chat=chat,
            model=str(fields.get("model")),
            hint=hint,
            id_slot=id_slot if is_slot else None,
            is_batch=chat.n > 1 and isinstance(fields.get("prompt"), list),
            cached_body=self._bodies.keep(read, tenant) if chat.plain else None,
            previous=read.before.rendered if read.before is not None else None,
        )


def _has_long_edit(body: bytes) -> bool:
    """Whether removing fields may take too long for the event loop; False for a large body."""
    if len(body) > LARGE_BYTES:  # run_off_loop decides, and searching it takes long, too
        return False
    is_edited = any(sign in body for sign in _SIGNS_OF_FIELDS)
    return is_edited and count_byte(body, b":") > _MANY_COLONS
