"""Vectors of questions and blocks: a question at once or not at all, blocks when there is time.

Inference runs in two threads of its own, one for questions and one, at low priority, for blocks.
Everything else here runs in the event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from evoke_proxy.adapters.embedder import Embedder
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import EmbedderConfig
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.vectors import VectorCache
from evoke_proxy.core.tenants.fair_share import FairQueue
from evoke_proxy.errors import EmbedderError

_log = logging.getLogger(__name__)

# On a CPU a batch is no faster than its texts one by one, and a question may have to wait for it.
_BATCH = 4
# Bytes of a key that tell whose it is.
_SHARE_BYTES = 4
_NICENESS = 10


class Encoder(Protocol):
    """What makes vectors; see `evoke_proxy.adapters.embedder.Embedder`."""

    fingerprint: bytes

    def described(self) -> str: ...

    def queries(self, texts: Sequence[str]) -> Vectors: ...

    def documents(self, texts: Sequence[str]) -> Vectors: ...


class EmbeddingService:
    """The embedder of the whole proxy; use as an async context manager.

    Without `embedder.directory` it is off: no question gets a vector, submitted blocks are ignored.
    """

    def __init__(
        self,
        config: EmbedderConfig,
        metrics: Metrics,
        load: Callable[[EmbedderConfig], Encoder] = Embedder,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._load = load
        self._encoder: Encoder | None = None
        self._cache = VectorCache(config.cache_mib << 20, _share_of)
        self._waiting = FairQueue()
        self._questions = 0
        self._late: asyncio.Future[Vectors] | None = None
        self._running: dict[bytes, str] = {}
        self._closing = False
        self._failing = False
        self._at_once = ThreadPoolExecutor(1, "embed-question")
        self._behind = ThreadPoolExecutor(1, "embed-blocks", initializer=_yield_the_processor)

    async def __aenter__(self) -> EmbeddingService:
        """Load the encoder, off the event loop; ConfigError when it does not load."""
        if self._config.directory:
            loop = asyncio.get_running_loop()
            self._encoder = await loop.run_in_executor(self._at_once, self._load, self._config)
        _log.info("%s", self.described())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Drop what waits; what runs already is waited for, a batch of blocks at most."""
        self._closing = True
        self._waiting.clear()
        for pool in (self._at_once, self._behind):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)

    @property
    def on(self) -> bool:
        """Whether there is an encoder."""
        return self._encoder is not None

    @property
    def mark(self) -> bytes:
        """Which encoder it is; empty without one."""
        return self._encoder.fingerprint if self._encoder is not None else b""

    def described(self) -> str:
        """One line for a person: what blocks are ranked by."""
        if self._encoder is None:
            return "no embedder (embedder.directory is empty): blocks are ranked by words alone"
        return f"embedder {self._encoder.described()}"

    def key(self, text: str, tenant: str = "") -> bytes:
        """What `vector` knows a block's text by; to be kept, for it costs as much as hashing does.

        It is of one tenant. Text that two of them have is embedded for each: a shared vector would
        tell one, by the time it takes, that the other has had exactly this text.
        """
        return self._hashed("d", text, tenant)

    def vector(self, key: bytes) -> Vectors | None:
        """The unit vector [d] of a block's text, read-only; None while there is none."""
        return self._cache.get(key)

    def forget(self) -> None:
        """Forget every vector, and what waits for one."""
        self._cache = VectorCache(self._config.cache_mib << 20, _share_of)
        self._waiting.clear()

    def submit(self, texts: Iterable[tuple[bytes, str]]) -> None:
        """Have blocks embedded in the background: pairs of `key` and text; known ones cost nothing.

        The latest come first, in turns between tenants, so that a long history keeps no other
        session waiting. What the queue has no room for, of the tenant that has most of it, is
        counted and forgotten: submit again what still has no vector.
        """
        if self._encoder is None or self._closing:
            return
        for key, text in texts:
            if key not in self._cache and key not in self._running:
                self._waiting.put(_share_of(key).hex(), key, text)
        while len(self._waiting) > self._config.queue:
            self._waiting.drop()
            self._metrics.embed_failures.labels(reason="queue_full").inc()
        self._go_on()

    async def embed_query(self, text: str, tenant: str = "") -> Vectors | None:
        """The unit vector [d] of a question; None, counted, when it fails or takes too long."""
        found = await self.embed_queries([text], tenant)
        return found[0]

    async def embed_queries(self, texts: Sequence[str], tenant: str = "") -> list[Vectors | None]:
        """One vector or None for each of the questions, in one inference and one time limit."""
        keys = [self._hashed("q", text, tenant) for text in texts]
        missing = {
            key: text for key, text in zip(keys, texts, strict=True) if key not in self._cache
        }
        if missing and self._encoder is not None and not self._closing:
            await self._ask(missing, self._encoder)
        return [self._cache.get(key) for key in keys]

    async def _ask(self, missing: dict[bytes, str], encoder: Encoder) -> None:
        if self._late is not None and not self._late.done():
            # It is over its time already: waiting behind it would cost every turn the limit.
            self._metrics.embed_failures.labels(reason="busy").inc()
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._questions += 1
        work = loop.run_in_executor(self._at_once, encoder.queries, list(missing.values()))
        work.add_done_callback(partial(self._answered, list(missing)))
        await asyncio.wait([work], timeout=self._config.timeout_ms / 1000)
        if not work.done():
            self._late = work
            self._metrics.embed_failures.labels(reason="timeout").inc()
        self._metrics.embed_seconds.observe(loop.time() - began)

    def _answered(self, keys: Sequence[bytes], work: asyncio.Future[Vectors]) -> None:
        self._questions -= 1
        self._keep(keys, work, "question")
        self._go_on()

    def _go_on(self) -> None:
        """Start the next batch of blocks, unless one runs or a question does."""
        idle = not (self._running or self._questions or self._closing)
        if self._encoder is not None and idle and self._waiting:
            count = min(_BATCH, len(self._waiting))
            self._running = dict(self._waiting.take() for _ in range(count))
            loop, texts = asyncio.get_running_loop(), list(self._running.values())
            work = loop.run_in_executor(self._behind, self._encoder.documents, texts)
            work.add_done_callback(self._embedded)
        self._metrics.embed_waiting.set(len(self._waiting))

    def _embedded(self, work: asyncio.Future[Vectors]) -> None:
        keys, self._running = list(self._running), {}
        self._keep(keys, work, "block")
        self._go_on()

    def _keep(self, keys: Sequence[bytes], work: asyncio.Future[Vectors], kind: str) -> None:
        """Cache what came of it, late or not; a failure is counted and costs these texts only."""
        if work.cancelled():
            return
        error = work.exception()
        if error is None:
            self._failing = False
            for key, vector in zip(keys, work.result(), strict=True):
                self._cache.put(key, vector)
            self._metrics.embedded.labels(kind=kind).inc(len(keys))
            return
        self._metrics.embed_failures.labels(reason="error").inc()
        level = logging.DEBUG if self._failing else logging.WARNING
        ours = isinstance(error, EmbedderError)
        _log.log(level, "no vector of a %s: %s", kind, error, exc_info=None if ours else error)
        self._failing = True

    def _hashed(self, kind: str, text: str, tenant: str) -> bytes:
        encoder = self._encoder.fingerprint if self._encoder is not None else b""
        named = f"{kind}\0{tenant}\0{text}".encode("utf-8", "surrogatepass")
        share = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=_SHARE_BYTES)
        return share.digest() + hashlib.blake2b(named, digest_size=16, key=encoder).digest()


def _share_of(key: bytes) -> bytes:
    """Whose a key is: no tenant can have all vectors of another forgotten."""
    return key[:_SHARE_BYTES]


def _yield_the_processor() -> None:
    """Let llama-server and questions go first; only Linux has priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            mine = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, mine + _NICENESS)
