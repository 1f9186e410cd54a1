"""SIGTERM while requests are decoded or wait: they are answered, and the server ends at once."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llama import Llama, binary

from bench.random_models import SHAPES, ensure
from evoke_proxy.demo.processes import free_port, healthy

# A handler looks once in a second whether the server stops; the rest allows for a busy machine.
ENDS_S = 6.0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[Llama, subprocess.Popen[bytes]]]:
    """A server that decodes a prompt of 60,000 tokens for many seconds, with copies on disk."""
    server, log = Llama(free_port()), tmp_path / "log"
    command = [str(binary(True)), "-m", str(ensure(SHAPES["long-2"])), "-np", "1", "-t", "1"]
    command += ["-c", "65536", "-b", "32", "--port", str(server.port), "--evoke-ram", "512"]
    command += ["--evoke-disk", str(tmp_path / "blocks"), "--metrics"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while not healthy(server.port):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield server, process
    finally:
        process.kill()
        process.wait()


def test_a_server_that_is_told_to_stop_answers_running_and_waiting_requests(
    process: tuple[Llama, subprocess.Popen[bytes]],
) -> None:
    server, running = process
    prompt = [5 + i % 100 for i in range(60_000)]
    bodies = [{"prompt": prompt, "n_predict": 1, "stream": stream} for stream in (False, True)]
    with ThreadPoolExecutor() as threads:
        # The first is decoded, the second waits for the slot: its stream has not begun.
        first = threads.submit(server.raw, "POST", "/completion", json.dumps(bodies[0]).encode())
        while not server.slot()["is_processing"]:
            time.sleep(0.01)
        second = threads.submit(server.raw, "POST", "/completion", json.dumps(bodies[1]).encode())
        while b"requests_deferred 1" not in server.raw("GET", "/metrics")[1]:
            time.sleep(0.01)
        start = time.monotonic()
        running.terminate()
        for answer in (first, second):
            status, text = answer.result()
            assert (status, json.loads(text)["error"]["message"]) == (
                503,
                "the server is stopping",
            )
        assert running.wait(60) == 0
    assert time.monotonic() - start < ENDS_S
