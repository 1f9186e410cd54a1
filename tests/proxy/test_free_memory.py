"""Memory that a burst of requests needed goes back to the system; threads have no heaps."""

from __future__ import annotations

import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from fake_upstream import Exchange, fake_upstream, response
from harness import ask, until

from bench.llama import process
from evoke_proxy.demo.processes import free_port, serving

PATH = "/v1/chat/completions"
# The proxy, with full collections each second while it is idle.
COMMAND = """
from evoke_proxy.web import garbage_collection
garbage_collection._INTERVAL_S = garbage_collection._WORTH_IT_S = 1.0
garbage_collection._TRIM_INTERVAL_S = 1.0
from evoke_proxy.cli.main import main
main()
"""


def _body(seed: int) -> bytes:
    words = random.Random(seed).choices(("house", "river", "stone", "window", "alpha"), k=500_000)
    texts = [" ".join(words[at : at + 200]) for at in range(0, len(words), 200)]
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return json.dumps({"messages": messages}).encode()


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) / 1024


def _n_heaps_of_threads(pid: int) -> int:
    """How many reservations of 64 MiB there are in which malloc makes the heap of a thread."""
    found, size = 0, 64 * 1024 * 1024
    lines = Path(f"/proc/{pid}/maps").read_text("ascii").splitlines()
    ranges = [re.match(r"(\w+)-(\w+) (\S+)", line) for line in lines]
    parts = [(int(m[1], 16), int(m[2], 16), m[3]) for m in ranges if m is not None]
    for (start, end, rights), (rest, limit, others) in pairwise(parts):
        is_reserved = rights == "rw-p" and others == "---p" and end == rest
        found += is_reserved and start % size == 0 and limit - start == size
    return found


def test_memory_of_a_burst_goes_back_once_the_proxy_is_idle(tmp_path: Path) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.send(response(b'{"choices":[]}', b"application/json"))

    port, headers = free_port(), {"Content-Type": "application/json"}
    command = [sys.executable, "-c", COMMAND, "serve", "--listen", f"127.0.0.1:{port}"]
    with fake_upstream(behave) as fake, ThreadPoolExecutor(8) as pool:
        command += ["--upstream", f"http://127.0.0.1:{fake.port}"]
        with serving(command, port, tmp_path / "proxy.log"):
            pid = int(process(port).name)
            assert ask(port, "POST", PATH, _body(0), headers).status == 200
            before = _resident_mib(pid)
            bodies = [_body(seed) for seed in range(8)]
            for _ in range(2):
                answers = pool.map(lambda body: ask(port, "POST", PATH, body, headers), bodies)
                assert {answer.status for answer in answers} == {200}
            assert not _n_heaps_of_threads(pid)
            until(lambda: _resident_mib(pid) < before + 10, "the memory is free")
