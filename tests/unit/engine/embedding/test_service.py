"""The embedding service: questions are embedded at once or not at all, blocks in the background.

The encoder is a fake that can be blocked and made to fail; tests/embedder uses real ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import EmbedderConfig
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.engine.embedding import service
from evoke_proxy.engine.embedding.question_queue import MOST_WAITING, PIECE_CHARS
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.errors import ConfigError, EmbedderError

DIMENSIONS = 8


async def embed_query(embedding: EmbeddingService, text: str, tenant: str = "") -> Vectors | None:
    """The vector of a single question."""
    (vector,) = await embedding.embed_queries([text], tenant)
    return vector


def vector_of(text: str) -> Vectors:
    random = np.random.default_rng(abs(hash(text)))
    row = random.normal(size=DIMENSIONS).astype(np.float32)
    return np.asarray(row / np.linalg.norm(row), np.float32)


class FakeEncoder:
    """Records its calls in order; blocks and questions can be blocked separately."""

    def __init__(self, fingerprint: bytes = b"fake") -> None:
        self.name = "fake"
        self.is_immediate = self.is_english = False
        self.similar_words = {"boss": [("supervisor", 0.6)]}
        self.fingerprint = fingerprint
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.threads: list[tuple[str, int]] = []
        self.may_ask, self.may_embed = threading.Event(), threading.Event()
        self.may_ask.set()
        self.may_embed.set()
        self.fails: Exception | None = None

    def describe(self) -> str:
        return "of the tests"

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self._encoded("question", self.may_ask, texts)

    def documents(self, texts: Sequence[str]) -> Vectors:
        return self._encoded("block", self.may_embed, texts)

    def _encoded(self, kind: str, gate: threading.Event, texts: Sequence[str]) -> Vectors:
        self.calls.append((kind, tuple(texts)))
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.threads.append((threading.current_thread().name, niceness))
        assert gate.wait(60), "the test did not release the encoder"
        if self.fails is not None:
            raise self.fails
        return np.stack([vector_of(kind[0] + text) for text in texts])

    def of(self, kind: str) -> list[str]:
        return [text for call_kind, texts in self.calls if call_kind == kind for text in texts]


class Rig:
    """An EmbeddingService with a fake encoder, and its metrics."""

    def __init__(self, encoder: FakeEncoder, **settings: Any) -> None:
        self.encoder = encoder
        self.metrics = Metrics()
        config = EmbedderConfig(**{"directory": "/somewhere", "timeout_ms": 20_000} | settings)
        self.embedding = EmbeddingService(config, self.metrics, load=lambda _: encoder)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def submit(self, *texts: str, tenant: str = "") -> list[bytes]:
        keys = [self.embedding.key(text, tenant) for text in texts]
        self.embedding.submit(zip(keys, texts, strict=True))
        return keys

    def when_stopping(self, act: Callable[[], None]) -> None:
        """Calls `act` as soon as the waiting work has been dropped."""
        pool = self.embedding._question_thread

        def watch() -> None:
            while not pool._shutdown:
                time.sleep(0.001)
            with pool._shutdown_lock:  # waiting work is dropped under this lock
                act()

        threading.Thread(target=watch, daemon=True).start()

    async def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, "the condition never became true"
            await asyncio.sleep(0.002)


def started(tasks: asyncio.TaskGroup, rig: Rig, text: str) -> asyncio.Task[Vectors | None]:
    return tasks.create_task(embed_query(rig.embedding, text))


def run(scene: Callable[[Rig], Awaitable[None]], **settings: Any) -> Rig:
    """Runs a scene between start and stop of an EmbeddingService."""
    rig = Rig(FakeEncoder(), **settings)

    async def scenario() -> None:
        async with rig.embedding:
            try:
                await scene(rig)
            finally:
                rig.encoder.may_ask.set()
                rig.encoder.may_embed.set()

    asyncio.run(scenario())
    return rig


def test_a_question_is_embedded_once() -> None:
    async def scene(rig: Rig) -> None:
        first = await embed_query(rig.embedding, "why?")
        second = await embed_query(rig.embedding, "why?")
        assert first is not None and first.tolist() == vector_of("qwhy?").tolist()
        assert second is first
        assert rig.encoder.of("question") == ["why?"]
        assert rig.count("evoke_embedded_total", kind="question") == 1
        assert rig.count("evoke_embed_seconds_count") == 1

    run(scene)


def test_several_questions_are_one_inference() -> None:
    async def scene(rig: Rig) -> None:
        await embed_query(rig.embedding, "b")
        found = await rig.embedding.embed_queries(["a", "b", "c", "a"])
        assert [None if v is None else v.tolist() for v in found] == [
            vector_of("q" + text).tolist() for text in "abca"
        ]
        assert rig.encoder.calls[1:] == [("question", ("a", "c"))]
        assert await rig.embedding.embed_queries([]) == []

    run(scene)


def test_an_immediate_encoder_needs_no_thread_and_no_cache() -> None:
    async def scene(rig: Rig) -> None:
        assert not rig.embedding.is_immediate
        with pytest.raises(EmbedderError, match="too long"):
            rig.embedding.embed_blocks(["a"])
        rig.encoder.is_immediate = True
        assert rig.embedding.similar_words is rig.encoder.similar_words
        found = await rig.embedding.embed_queries(["a", "a"])
        assert [vector.tolist() for vector in found if vector is not None] == [
            vector_of("qa").tolist()
        ] * 2
        assert rig.embedding.embed_blocks(["b"]).tolist() == [vector_of("bb").tolist()]
        assert {name for name, _ in rig.encoder.threads} == {threading.current_thread().name}
        assert len(rig.embedding._cache) == 0
        assert rig.count("evoke_embedded_total", kind="question") == 2
        assert rig.count("evoke_embedded_total", kind="block") == 1

    run(scene)


def test_blocks_get_vectors_in_the_background() -> None:
    async def scene(rig: Rig) -> None:
        texts = [f"block {i}" for i in range(50)]
        keys = rig.submit(*texts)
        assert rig.embedding.vector(keys[0]) is None
        await rig.until(lambda: rig.embedding.vector(keys[0]) is not None)
        for key, text in zip(keys, texts, strict=True):
            found = rig.embedding.vector(key)
            assert found is not None and found.tolist() == vector_of("b" + text).tolist()
        rig.submit(*texts)
        assert sorted(rig.encoder.of("block")) == sorted(texts), "each text must be embedded once"
        assert rig.count("evoke_embedded_total", kind="block") == 50
        assert rig.count("evoke_embed_waiting") == 0

    run(scene)


def test_waiting_and_running_texts_are_not_embedded_twice() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_embed.clear()
        texts = [f"block {i}" for i in range(9)]
        keys = rig.submit(*texts)
        await rig.until(lambda: bool(rig.encoder.calls))
        rig.submit(*texts)
        rig.encoder.may_embed.set()
        await rig.until(lambda: all(rig.embedding.vector(key) is not None for key in keys))
        assert sorted(rig.encoder.of("block")) == sorted(texts)

    run(scene)


def test_what_was_being_embedded_is_forgotten_too() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_embed.clear()
        (key,) = rig.submit("secret")
        await rig.until(lambda: bool(rig.encoder.calls))
        rig.embedding.forget()
        rig.encoder.may_embed.set()
        await rig.until(lambda: rig.count("evoke_embedded_total", kind="block") == 1)
        assert rig.embedding.vector(key) is None
        rig.submit("secret")
        await rig.until(lambda: rig.embedding.vector(key) is not None)

    run(scene)


def test_the_latest_blocks_are_embedded_first() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_embed.clear()
        rig.submit(*[f"old {i}" for i in range(40)])
        (key,) = rig.submit("new")
        rig.encoder.may_embed.set()
        await rig.until(lambda: rig.embedding.vector(key) is not None)
        assert rig.encoder.of("block").index("new") < 10

    run(scene)


def test_a_full_queue_drops_and_counts_the_oldest_texts() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_embed.clear()
        rig.submit("runs already")
        await rig.until(lambda: bool(rig.encoder.calls))
        keys = rig.submit(*[f"block {i}" for i in range(10)])
        assert rig.count("evoke_embed_waiting") == 6
        assert rig.count("evoke_embed_failures_total", reason="queue_full") == 4
        rig.encoder.may_embed.set()
        await rig.until(lambda: rig.count("evoke_embedded_total", kind="block") == 7)
        found = [rig.embedding.vector(key) is not None for key in keys]
        assert found == [False] * 4 + [True] * 6
        rig.submit(*[f"block {i}" for i in range(10)])
        await rig.until(lambda: all(rig.embedding.vector(key) is not None for key in keys))

    run(scene, queue=6)


def test_questions_are_embedded_before_blocks() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_embed.clear()
        rig.encoder.may_ask.clear()
        rig.submit(*[f"block {i}" for i in range(40)])
        await rig.until(lambda: len(rig.encoder.calls) == 1)
        async with asyncio.TaskGroup() as tasks:
            question = started(tasks, rig, "why?")
            await rig.until(lambda: len(rig.encoder.calls) == 2)
            assert rig.encoder.calls[1][0] == "question", "the question must not wait for the batch"
            rig.encoder.may_embed.set()
            await rig.until(lambda: rig.count("evoke_embedded_total", kind="block") > 0)
            await asyncio.sleep(0.05)
            assert len(rig.encoder.calls) == 2, (
                "no batch may start while a question is being embedded"
            )
            rig.encoder.may_ask.set()
            assert await question is not None
        await rig.until(lambda: rig.count("evoke_embedded_total", kind="block") == 40)

    run(scene)


def test_inference_does_not_block_the_event_loop() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_ask.clear()
        async with asyncio.TaskGroup() as tasks:
            question = started(tasks, rig, "why?")
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not question.done()
            rig.encoder.may_ask.set()
            assert await question is not None
        assert {name for name, _ in rig.encoder.threads} == {"embed-question_0"}

    run(scene)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_blocks_are_embedded_at_low_priority() -> None:
    async def scene(rig: Rig) -> None:
        (key,) = rig.submit("block")
        await rig.until(lambda: rig.embedding.vector(key) is not None)
        await embed_query(rig.embedding, "why?")
        own_niceness = os.getpriority(os.PRIO_PROCESS, 0)
        assert rig.encoder.threads[0][1] >= min(own_niceness + 1, 19)
        assert rig.encoder.threads[1][1] == own_niceness

    run(scene)


def test_a_slow_question_delays_a_turn_by_the_time_limit_only() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_ask.clear()
        start = time.monotonic()
        assert await embed_query(rig.embedding, "slow") is None
        assert 0.02 <= time.monotonic() - start < 20  # and not as long as it would be waited for
        assert rig.count("evoke_embed_failures_total", reason="timeout") == 1
        # The slow question still runs, so the next one is refused at once.
        assert await embed_query(rig.embedding, "next") is None
        assert rig.count("evoke_embed_failures_total", reason="busy") == 1
        assert rig.encoder.of("question") == ["slow"]
        rig.encoder.may_ask.set()
        await rig.until(lambda: rig.count("evoke_embedded_total", kind="question") == 1)
        assert await embed_query(rig.embedding, "slow") is not None, (
            "the late vector must be cached"
        )
        assert rig.encoder.of("question") == ["slow"]
        await embed_query(rig.embedding, "next")  # a busy machine may take longer than that
        await rig.until(lambda: rig.count("evoke_embedded_total", kind="question") == 2)
        assert await embed_query(rig.embedding, "next") is not None

    run(scene, timeout_ms=30)


def _long_texts(name: str) -> list[str]:
    """Texts of a question that is embedded in ten pieces."""
    return [f"{name} {number} ".ljust(PIECE_CHARS, "a") for number in range(10)]


def test_a_question_of_a_tenant_waits_for_one_piece_of_another_tenants_questions() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_ask.clear()
        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                long = rig.embedding.embed_queries(_long_texts(f"long {number}"), "mallory")
                tasks.create_task(long)
            await rig.until(lambda: bool(rig.encoder.calls))
            asked = tasks.create_task(embed_query(rig.embedding, "when?", "alice"))
            await asyncio.sleep(0)
            rig.encoder.may_ask.set()
            assert await asked is not None
        assert rig.encoder.of("question").index("when?") == 1
        assert len(rig.encoder.of("question")) == 51

    run(scene)


def test_what_nobody_waits_for_any_more_is_not_embedded() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_ask.clear()
        async with asyncio.TaskGroup() as tasks:
            left = [
                tasks.create_task(rig.embedding.embed_queries(_long_texts(f"long {number}")))
                for number in range(8)
            ]
            await rig.until(lambda: bool(rig.encoder.calls))
            for one in left:
                one.cancel()
        rig.encoder.may_ask.set()
        assert await embed_query(rig.embedding, "when?") is not None
        texts = rig.encoder.of("question")
        assert len(texts) == 2 and texts[1] == "when?"

    run(scene)


def test_few_questions_of_a_tenant_wait_and_further_ones_are_counted() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_ask.clear()
        async with asyncio.TaskGroup() as tasks:
            for number in range(MOST_WAITING + 3):
                tasks.create_task(embed_query(rig.embedding, f"why {number}?"))
            await rig.until(lambda: rig.count("evoke_embed_failures_total", reason="busy") == 2)
            other = tasks.create_task(embed_query(rig.embedding, "when?", "alice"))
            await asyncio.sleep(0)
            rig.encoder.may_ask.set()
            assert await other is not None
        assert rig.count("evoke_embed_failures_total", reason="busy") == 2

    run(scene)


def test_blocks_are_embedded_though_questions_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_BLOCKS_WAIT_S", 0.05)

    async def scene(rig: Rig) -> None:
        async def ask_for_ever() -> None:
            number = 0
            while True:
                number += 1
                await embed_query(rig.embedding, f"why {number}?", f"tenant {number % 2}")

        rig.encoder.may_ask.clear()
        async with asyncio.TaskGroup() as tasks:
            askers = [tasks.create_task(ask_for_ever()) for _ in range(4)]
            await rig.until(lambda: bool(rig.encoder.calls))
            (key,) = rig.submit("block", tenant="alice")
            rig.encoder.may_ask.set()
            await rig.until(lambda: rig.embedding.vector(key) is not None)
            assert not any(asker.done() for asker in askers), "questions still come"
            for asker in askers:
                asker.cancel()

    run(scene)


def test_a_cancelled_question_leaves_no_state() -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.may_ask.clear()
        async with asyncio.TaskGroup() as tasks:
            question = started(tasks, rig, "gone")
            await rig.until(lambda: bool(rig.encoder.calls))
            question.cancel()
        assert question.cancelled()
        rig.encoder.may_ask.set()
        (key,) = rig.submit("block")
        await rig.until(lambda: rig.embedding.vector(key) is not None)

    run(scene)


@pytest.mark.parametrize("error", [EmbedderError("broken"), RuntimeError("a defect")])
def test_a_failed_inference_affects_its_texts_only(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(rig: Rig) -> None:
        rig.encoder.fails = error
        assert await embed_query(rig.embedding, "why?") is None
        keys = rig.submit("a", "b")
        await rig.until(lambda: rig.count("evoke_embed_failures_total", reason="error") == 2)
        assert rig.embedding.vector(keys[0]) is None
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [record.getMessage() for record in warnings] == [
            f"a question could not be embedded: {error}"
        ]
        assert bool(warnings[0].exc_info) == isinstance(error, RuntimeError)
        rig.encoder.fails = None
        assert await embed_query(rig.embedding, "why?") is not None
        rig.submit("a", "b")
        await rig.until(lambda: rig.embedding.vector(keys[0]) is not None)

    run(scene)


def test_keys_differ_by_tenant_kind_of_text_and_encoder() -> None:
    async def scene(rig: Rig) -> None:
        keys = [rig.embedding.key("same", tenant) for tenant in ("", "a", "b")]
        assert len(set(keys)) == 3 and rig.embedding.key("same", "a") == keys[1]
        rig.embedding.submit([(keys[1], "same")])
        await rig.until(lambda: rig.embedding.vector(keys[1]) is not None)
        assert rig.embedding.vector(keys[2]) is None
        for tenant in ("a", "a", "b"):
            assert await embed_query(rig.embedding, "same", tenant) is not None
        assert rig.encoder.of("question") == ["same"] * 2
        other = Rig(FakeEncoder(b"another"))
        async with other.embedding:
            assert other.embedding.key("same", "a") != keys[1]

    run(scene)


def test_a_lone_surrogate_has_a_key() -> None:
    async def scene(rig: Rig) -> None:
        assert rig.embedding.key("\ud800") != rig.embedding.key("\ud801")

    run(scene)


def test_stopping_drops_waiting_texts_and_waits_for_the_running_batch() -> None:
    rig = Rig(FakeEncoder())
    earlier = set(threading.enumerate())

    async def scenario() -> None:
        rig.encoder.may_embed.clear()
        async with rig.embedding:
            keys = rig.submit(*[f"block {i}" for i in range(40)])
            await rig.until(lambda: len(rig.encoder.calls) == 1)
            rig.when_stopping(rig.encoder.may_embed.set)
        assert len(rig.encoder.calls) == 1
        started = set(threading.enumerate()) - earlier
        assert not [thread for thread in started if thread.name.startswith("embed-")]
        # A stopped service answers without vectors and raises no error.
        rig.submit("late")
        assert await embed_query(rig.embedding, "late") is None
        assert rig.embedding.vector(keys[0]) is None

    asyncio.run(scenario())


def test_a_running_question_ends_when_the_service_stops() -> None:
    rig = Rig(FakeEncoder())

    async def scenario() -> None:
        rig.encoder.may_ask.clear()
        async with asyncio.TaskGroup() as tasks:
            async with rig.embedding:
                runs, waits = started(tasks, rig, "runs"), started(tasks, rig, "waits")
                await rig.until(lambda: bool(rig.encoder.calls))
                rig.when_stopping(rig.encoder.may_ask.set)
        assert runs.result() is not None and waits.result() is None

    asyncio.run(scenario())


def test_without_an_encoder_the_service_is_off_and_logs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def scene(rig: Rig) -> None:
        assert not rig.embedding.on
        assert await embed_query(rig.embedding, "why?") is None
        keys = rig.submit("block")
        assert rig.embedding.vector(keys[0]) is None

    rig = Rig(FakeEncoder(), directory="", model="none")
    rig.embedding = EmbeddingService(rig.embedding._config, rig.metrics)

    async def scenario() -> None:
        async with rig.embedding:
            await scene(rig)

    asyncio.run(scenario())
    assert rig.encoder.calls == []
    assert rig.count("evoke_embed_seconds_count") == 0
    assert rig.count("evoke_embedder_info", embedder="none") == 1
    log = [
        r.getMessage() for r in caplog.records if r.name == "evoke_proxy.engine.embedding.service"
    ]
    assert log == ["no embedder (embedder.model is none): blocks are ranked by words alone"]


def test_the_start_logs_the_encoder(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scene(rig: Rig) -> None:
        assert rig.embedding.on
        assert rig.count("evoke_embedder_info", embedder="fake") == 1

    run(scene)
    assert "embedder of the tests" in [record.getMessage() for record in caplog.records]


def test_an_encoder_that_does_not_load_is_an_error_at_start() -> None:
    def refuse(_: EmbedderConfig) -> FakeEncoder:
        raise ConfigError("embedder.directory: no")

    async def scenario() -> None:
        config = EmbedderConfig(directory="/somewhere")
        async with EmbeddingService(config, Metrics(), load=refuse):
            pytest.fail("it started")

    with pytest.raises(ConfigError, match="no"):
        asyncio.run(scenario())
