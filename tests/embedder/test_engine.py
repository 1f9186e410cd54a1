"""The proxy with an embedder: start, log line, and stop."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tiny_bert import CLS, POOLED_MEAN, RED, SEP, unit, write

from evoke_proxy.config import Config, load
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.errors import ConfigError

# Nothing listens there; these tests need no llama-server.
UNREACHABLE = {"upstream.url": "http://127.0.0.1:9"}


def _config(directory: Path | str, model: str = "auto") -> Config:
    settings = {"embedder.directory": str(directory)}
    settings |= {"embedder.timeout_ms": 20_000, "embedder.model": model}
    return load(None, {}, UNREACHABLE | settings | {"embedder.query_instruction": ""})


def _logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.name == "evoke_proxy.engine.embedding.service"
    ]


def test_the_embedding_service_works_between_start_and_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = set(threading.enumerate())  # proxies of other test files may run in this process

    async def scenario() -> None:
        async with build_router(_config(write(tmp_path, **POOLED_MEAN))) as engine:
            query = (await engine.shared.embedding.embed_queries(["red"], "tenant"))[0]
            key = engine.shared.embedding.key("red", "tenant")
            engine.shared.embedding.submit([(key, "red")])
            while (block := engine.shared.embedding.vector(key)) is None:
                await asyncio.sleep(0.01)
            assert query is not None and np.allclose(query, block)
            assert np.allclose(block, unit(CLS, RED, SEP), atol=1e-6)
            assert b'evoke_embedded_total{kind="block"} 1.0' in engine.metrics.exposition()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert _logged(caplog) == [f"embedder {tmp_path}: 3 dimensions, pooling mean, 512 tokens, CPU"]
    added = set(threading.enumerate()) - before
    assert not [thread.name for thread in added if thread.name.startswith("embed-")]


def test_built_in_vectors_are_used_without_a_setting(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with build_router(load(None, {}, UNREACHABLE)) as engine:
            query = (await engine.shared.embedding.embed_queries(["a red car"], "tenant"))[0]
            texts = ("the automobile is painted red", "the minutes of the meeting")
            keys = [engine.shared.embedding.key(text, "tenant") for text in texts]
            engine.shared.embedding.submit(zip(keys, texts, strict=True))
            while any(engine.shared.embedding.vector(key) is None for key in keys):
                await asyncio.sleep(0.01)
            near, far = (engine.shared.embedding.vector(key) @ query for key in keys)
            assert near > far + 0.2

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert _logged(caplog) == ["embedder built-in word vectors: 256 dimensions, CPU"]


def test_a_switched_off_embedder_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with build_router(_config("", "none")) as engine:
            assert (await engine.shared.embedding.embed_queries(["red"]))[0] is None

    asyncio.run(asyncio.wait_for(scenario(), 60))
    (line,) = _logged(caplog)
    assert "ranked by words alone" in line


def test_an_embedder_that_does_not_load_stops_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with build_router(_config(tmp_path)):
            pytest.fail("it started")

    with pytest.raises(ConfigError, match="neither model.onnx"):
        asyncio.run(asyncio.wait_for(scenario(), 60))


def test_serve_exits_with_2_and_one_line_when_the_embedder_does_not_load(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evoke_proxy", "serve", "--listen", "127.0.0.1:0"]
    env = os.environ | {"EVOKE_EMBEDDER_DIRECTORY": str(tmp_path / "none")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("evoke-proxy: embedder.directory: ")
