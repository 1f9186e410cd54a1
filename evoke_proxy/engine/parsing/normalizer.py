"""Normalizes the front of chat requests, so that unchanged prompts stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from evoke_proxy.adapters.clock import uptime_s
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import NormaliseConfig
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
from evoke_proxy.engine.parsing.body_parsing import parse_object
from evoke_proxy.errors import RequestError


class Normalizer:
    """Applies the `normalise` settings to the bodies of chat requests."""

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
