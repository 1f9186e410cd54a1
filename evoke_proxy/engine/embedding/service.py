"""Embeds questions within a time limit, and blocks in the background.

Inference runs in two threads, one for questions and one with low priority for blocks. Everything
else runs in the event loop, so no locks are needed.
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

from evoke_proxy.adapters.embedders.choice import load_encoder
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import EmbedderConfig
from evoke_proxy.core.retrieval.encoding import (
    NO_SIMILAR_WORDS,
    Encoder,
    SimilarWords,
    Vectors,
)
from evoke_proxy.core.retrieval.vectors import VectorCache
from evoke_proxy.core.tenants.fair_share import FairQueue
from evoke_proxy.engine.embedding.question_queue import PIECE_CHARS, Question, QuestionQueue
from evoke_proxy.errors import EmbedderError

_log = logging.getLogger(__name__)

# On a CPU a batch is no faster than single texts, and other tenants have to wait for it.
_BATCH = 4
# The leading bytes of a key that identify its tenant.
_SHARE_BYTES = 4
_NICENESS = 10
# Blocks wait for questions for so many seconds; then a batch of them runs beside a question.
_BLOCKS_WAIT_S = 1.0


class EmbeddingService:
    """The embedder of the proxy, an async context manager.

    With `embedder.model: none` it is off: questions get no vectors, and submitted blocks are
    ignored.
    """

    def __init__(
        self,
        config: EmbedderConfig,
        metrics: Metrics,
        load: Callable[[EmbedderConfig], Encoder | None] = load_encoder,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._load = load
        self._encoder: Encoder | None = None
        self._cache = VectorCache(config.cache_mib << 20, _share_of)
        self._waiting = FairQueue()
        self._questions = QuestionQueue()
        # Since when a piece of a question is being embedded, and since when blocks wait for
        # questions, both in time of the event loop.
        self._question_since: float | None = None
        self._blocks_wait_since: float | None = None
        self._running: dict[bytes, str] = {}
        self._closing = False
        self._failing = False
        self._question_thread = ThreadPoolExecutor(1, "embed-question")
        self._block_thread = ThreadPoolExecutor(1, "embed-blocks", initializer=_lower_priority)

    async def __aenter__(self) -> EmbeddingService:
        """Load the encoder in a thread; raises ConfigError when it cannot be loaded."""
        loop = asyncio.get_running_loop()
        self._encoder = await loop.run_in_executor(self._question_thread, self._load, self._config)
        name = self._encoder.name if self._encoder is not None else "none"
        self._metrics.embedder.labels(embedder=name).set(1)
        _log.info("%s", self.describe())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Drop waiting texts, and wait for the batch that runs."""
        self._closing = True
        self._waiting.clear()
        self._questions.clear()
        for pool in (self._question_thread, self._block_thread):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)

    @property
    def on(self) -> bool:
        """Whether an encoder is loaded."""
        return self._encoder is not None

    @property
    def is_english(self) -> bool:
        """Whether the encoder is for English only."""
        return self._encoder is not None and self._encoder.is_english

    @property
    def is_immediate(self) -> bool:
        """Whether texts are embedded where vectors are needed, and not in the background."""
        return self._encoder is not None and self._encoder.is_immediate

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the encoder; empty without one."""
        return self._encoder.fingerprint if self._encoder is not None else b""

    @property
    def similar_words(self) -> SimilarWords:
        """Words of similar meaning; empty without an encoder that knows some."""
        return self._encoder.similar_words if self._encoder is not None else NO_SIMILAR_WORDS

    def describe(self) -> str:
        """One line for the log: how blocks are ranked."""
        if self._encoder is None:
            return "no embedder (embedder.model is none): blocks are ranked by words alone"
        return f"embedder {self._encoder.describe()}"

    def key(self, text: str, tenant: str = "") -> bytes:
        """The key of a block's text, for `vector` and `submit`; it costs a hash of the text.

        The same text has another key for each tenant, and is embedded for each. With a shared
        vector a tenant could measure whether another tenant has used exactly this text.
        """
        return self._key("d", text, tenant)

    def vector(self, key: bytes) -> Vectors | None:
        """The unit vector [d] of a text, read-only; None while it is not embedded."""
        return self._cache.get(key)

    def forget(self) -> None:
        """Forget all vectors and all waiting texts, and those that are being embedded."""
        self._cache = VectorCache(self._config.cache_mib << 20, _share_of)
        self._waiting.clear()

    def embed_blocks(self, texts: Sequence[str]) -> Vectors:
        """The unit vectors [n, d] of texts of blocks, at once; for an immediate encoder only.

        May run in a thread. Raises EmbedderError.
        """
        if self._encoder is None or not self._encoder.is_immediate:
            raise EmbedderError("this embedder takes too long to be waited for")
        vectors = self._encoder.documents(texts)
        self._metrics.embedded.labels(kind="block").inc(len(texts))
        return vectors

    def submit(self, texts: Iterable[tuple[bytes, str]]) -> None:
        """Embed texts in the background: pairs of `key` and text; cached ones are skipped.

        The latest texts are embedded first, in turns between tenants, so that a long history delays
        no other session. When the queue is full, texts of the tenant with the most waiting texts
        are dropped and counted. A dropped text must be submitted again.
        """
        if self._encoder is None or self._closing:
            return
        for key, text in texts:
            if key not in self._cache and key not in self._running:
                self._waiting.put(_share_of(key).hex(), key, text)
        while len(self._waiting) > self._config.queue:
            self._waiting.drop()
            self._metrics.embed_failures.labels(reason="queue_full").inc()
        self._start_batch()

    async def embed_queries(self, texts: Sequence[str], tenant: str = "") -> list[Vectors | None]:
        """The unit vector [d] of each text of a question, under one time limit.

        None, counted, for a text whose inference fails or takes too long. Tenants take turns. An
        immediate encoder runs in the event loop.
        """
        if self._encoder is not None and self._encoder.is_immediate:
            self._metrics.embedded.labels(kind="question").inc(len(texts))
            return list(self._encoder.queries(texts))
        keys = [self._key("q", text, tenant) for text in texts]
        missing = {
            key: text for key, text in zip(keys, texts, strict=True) if key not in self._cache
        }
        if missing and self._encoder is not None and not self._closing:
            await self._ask(missing, tenant)
        return [self._cache.get(key) for key in keys]

    async def _ask(self, missing: dict[bytes, str], tenant: str) -> None:
        loop = asyncio.get_running_loop()
        began, limit_s = loop.time(), self._config.timeout_ms / 1000
        question = Question(missing)
        # When a piece takes longer than the limit, waiting would cost every turn the time limit.
        is_late = self._question_since is not None and began - self._question_since > limit_s
        if is_late or not self._questions.put(tenant, question):
            self._metrics.embed_failures.labels(reason="busy").inc()
            return
        self._start_piece()
        try:
            await asyncio.wait([question.done], timeout=limit_s)
            if not question.done.done():
                self._metrics.embed_failures.labels(reason="timeout").inc()
        finally:
            self._questions.drop(tenant, question)
        self._metrics.embed_seconds.observe(loop.time() - began)

    def _start_piece(self) -> None:
        """Start the next piece of a question, unless one is being embedded."""
        if self._encoder is None or not self._questions or self._closing:
            return
        if self._question_since is None:
            loop = asyncio.get_running_loop()
            self._question_since = loop.time()
            question, piece = self._questions.take()
            texts = list(piece.values())
            work = loop.run_in_executor(self._question_thread, self._encoder.queries, texts)
            work.add_done_callback(partial(self._answered, question, list(piece), self._cache))

    def _answered(
        self,
        question: Question,
        keys: Sequence[bytes],
        cache: VectorCache,
        work: asyncio.Future[Vectors],
    ) -> None:
        self._question_since = None
        self._cache_result(keys, cache, work, "question")
        if not question.has_more:
            question.end()
        self._start_piece()
        self._start_batch()

    def _start_batch(self) -> None:
        """Start the next batch of blocks, unless a batch or a question runs.

        Blocks that have waited long for questions run beside one.
        """
        idle = not (self._running or self._closing)
        if self._encoder is not None and idle and self._waiting and self._may_start_blocks():
            self._blocks_wait_since = None
            self._running = self._waiting.take(_BATCH, PIECE_CHARS)
            loop, texts = asyncio.get_running_loop(), list(self._running.values())
            work = loop.run_in_executor(self._block_thread, self._encoder.documents, texts)
            work.add_done_callback(partial(self._embedded, self._cache))
        self._metrics.embed_waiting.set(len(self._waiting))

    def _may_start_blocks(self) -> bool:
        """Whether no question is embedded, or blocks have waited for questions long enough."""
        if self._question_since is None:
            return True
        now = asyncio.get_running_loop().time()
        if self._blocks_wait_since is None:
            self._blocks_wait_since = now
        return now - self._blocks_wait_since > _BLOCKS_WAIT_S

    def _embedded(self, cache: VectorCache, work: asyncio.Future[Vectors]) -> None:
        keys, self._running = list(self._running), {}
        self._cache_result(keys, cache, work, "block")
        self._start_batch()

    def _cache_result(
        self, keys: Sequence[bytes], cache: VectorCache, work: asyncio.Future[Vectors], kind: str
    ) -> None:
        """Cache the result, even a late one; a failure is counted and affects these texts only.

        `cache` is the one of when the work began: after `forget` nobody reads it any more.
        """
        if work.cancelled():
            return
        error = work.exception()
        if error is None:
            self._failing = False
            for key, vector in zip(keys, work.result(), strict=True):
                cache.put(key, vector)
            self._metrics.embedded.labels(kind=kind).inc(len(keys))
            return
        self._metrics.embed_failures.labels(reason="error").inc()
        level = logging.DEBUG if self._failing else logging.WARNING
        expected = isinstance(error, EmbedderError)
        trace = None if expected else error
        _log.log(level, "a %s could not be embedded: %s", kind, error, exc_info=trace)
        self._failing = True

    def _key(self, kind: str, text: str, tenant: str) -> bytes:
        named = f"{kind}\0{tenant}\0{text}".encode("utf-8", "surrogatepass")
        share = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=_SHARE_BYTES)
        return (
            share.digest() + hashlib.blake2b(named, digest_size=16, key=self.fingerprint).digest()
        )


def _share_of(key: bytes) -> bytes:
    """The tenant's part of a key, so that no tenant can evict all vectors of another."""
    return key[:_SHARE_BYTES]


def _lower_priority() -> None:
    """Lower the priority of this thread, below llama-server and questions; only on Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            priority = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, priority + _NICENESS)
