"""Chat requests as they come in: made the same at their front where that is wanted, parsed, freed
of our own fields."""

from __future__ import annotations

from collections.abc import Mapping

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.core.request.chat import ChatRequest, parse_chat, strip_own_fields
from evoke_proxy.core.session.identity import hint_of
from evoke_proxy.engine.parsing.body_cache import BodyCache, ReadBody
from evoke_proxy.engine.parsing.json_object import parse_object
from evoke_proxy.engine.parsing.large_bodies import run_off_loop
from evoke_proxy.engine.parsing.normalizer import Normalizer
from evoke_proxy.engine.parsing.tenant import tenant_of
from evoke_proxy.engine.turns.forwarding import Forwarding
from evoke_proxy.errors import RequestError


class RequestParser:
    """Every request passes through, and remembers what the next of its conversation will repeat."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._config = config
        self._normaliser = Normalizer(config.normalise, metrics)
        self._bodies = BodyCache()

    def adjust(self, config: Config) -> None:
        """Go on with another configuration."""
        self._config = config
        self._normaliser.config = config.normalise

    async def read(
        self, way: Forwarding, dialect: str, client: Mapping[str, str]
    ) -> ChatRequest | str:
        """The parsed request, its bytes freed of our fields; or why it cannot be parsed.

        With keys of ours that is an error: llama-server might find in it what we would take out. A
        large body is read in a thread.
        """
        return await run_off_loop(way.body, self._read, way, dialect, client)

    def _read(self, way: Forwarding, dialect: str, client: Mapping[str, str]) -> ChatRequest | str:
        if client.get("Content-Encoding", "identity").lower() != "identity":
            request: ChatRequest | str = "content_encoding"
        else:
            way.body = self._normaliser.apply(way.body, dialect, tenant_of(client))
            request = self._parsed(way, dialect, client)
        if isinstance(request, str) and self._config.security.keys_file:
            raise RequestError("the request body is not JSON that can be read", "invalid_json")
        return request

    def _parsed(
        self, way: Forwarding, dialect: str, client: Mapping[str, str]
    ) -> ChatRequest | str:
        tenant = tenant_of(client)
        try:
            read = self._bodies.read(way.body, tenant) or ReadBody(way.body, parse_object(way.body))
        except RequestError:
            # llama-server says what is wrong with it, as it would directly.
            return "not_json"
        body = read.parsed
        way.hint = hint_of(client, body)
        named = body.get("id_slot")
        way.id_slot = named if isinstance(named, int) and not isinstance(named, bool) else None
        request = parse_chat(dialect, body, self._config.policy.bench_fields, read.n_shared)
        way.known = read.before.rendered if read.before is not None else None
        way.kept = self._bodies.keep(read, tenant) if request.plain else None
        if request.tags.given:
            way.body = strip_own_fields(way.body, body)
        way.is_batch = request.n > 1 and isinstance(body.get("prompt"), list)
        return request
