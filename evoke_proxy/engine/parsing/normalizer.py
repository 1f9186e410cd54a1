"""Chat requests whose front is made the same as that of the ones before, where that is wanted."""

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
    MOST_TEXTS,
    TOOLS,
    Clock,
    Path,
    system_texts,
    with_sorted_tools,
    with_texts,
    without_billing,
)
from evoke_proxy.engine.parsing.json_object import parse_object
from evoke_proxy.errors import RequestError


class Normalizer:
    """Every request passes through; without settings as it is."""

    def __init__(self, config: NormaliseConfig, metrics: Metrics) -> None:
        self.config = config
        self._metrics = metrics
        self._clock = Clock()

    def apply(self, body: bytes, dialect: str, tenant: str) -> bytes:
        """The bytes to go on with: those given unless something of them is to be another."""
        config = self.config
        if dialect == "completions" or not (config.billing or config.dates_h or config.tools):
            return body
        if len(body) > HUGE_BYTES:  # its strings may not be parsed whole
            return body
        try:
            parsed = parse_object(body)
        except RequestError:  # whoever reads it says what is wrong
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
        """The texts of the system prompt that are to be others."""
        for path, text in islice(system_texts(parsed, dialect), MOST_TEXTS):
            said = without_billing(text) if self.config.billing else text
            if said != text:
                self._metrics.normalised.labels(what=BILLING).inc()
            kept = said
            if self.config.dates_h:
                kept = self._clock.stopped(said, tenant, uptime_s(), self.config.dates_h)
            if kept != said:
                self._metrics.normalised.labels(what=DATES).inc()
            if kept != text:
                yield path, kept
