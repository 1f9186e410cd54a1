"""Starts a real llama-server with the bundled model and makes block calls."""

from __future__ import annotations

import functools
import http.client
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoke_proxy.demo.processes import START_S, free_port, healthy, serving
from evoke_proxy.server_build.build import ensure_server

# Makes a patched server answer `block-rows`, which returns a checksum of each row of a slot.
os.environ["LLAMA_EVOKE_ROW_SUMS"] = "1"

MODEL = Path(__file__).parents[2] / "evoke_proxy/models/tiny-recall-f16.gguf"

# How many times as long as usual an answer may take: a backend that is emulated is slow
# (tests/matrix.py).
TIME_FACTOR = float(os.environ.get("MATRIX_TIME_FACTOR", "1"))

Json = dict[str, Any]


def binary(patched: bool) -> Path:
    """The server to test: that named in the environment, else the one that `make build` built."""
    named = os.environ.get("EVOKE_PATCHED_SERVER" if patched else "EVOKE_STOCK_SERVER")
    return Path(named) if named else _built_server(patched)


@functools.cache
def _built_server(patched: bool) -> Path:
    return ensure_server(patched=patched, progress=False)


@dataclass(frozen=True)
class Llama:
    """A running server. `ask` and `raw` return any status; the other calls require a 200."""

    port: int

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        status, raw = self.raw(method, path, None if body is None else json.dumps(body).encode())
        return status, json.loads(raw)

    def raw(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        limit = 120 * TIME_FACTOR
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, body = self.ask("GET", path)
        assert status == 200, body
        return body

    def post(self, path: str, body: object) -> Any:
        status, answer = self.ask("POST", path, body)
        assert status == 200, answer
        return answer

    def slot(self, slot: int = 0) -> Json:
        answer: Json = self.get(f"/slots/{slot}/blocks")
        return answer

    def act(self, action: str, slot: int = 0, **body: object) -> Any:
        """Makes a block call with the slot's current epoch; requires a 200."""
        return self.post(f"/slots/{slot}?action={action}", {"epoch": self.epoch(slot)} | body)

    def refuse(self, action: str, slot: int = 0, **body: object) -> Json:
        """Makes a block call that must fail; returns its error, whose code is the HTTP status."""
        epoch = self.epoch(slot) if slot < 2 else 0
        path = f"/slots/{slot}?action={action}"
        status, answer = self.ask("POST", path, {"epoch": epoch} | body)
        assert status != 200, answer
        assert answer["error"]["code"] == status
        error: Json = answer["error"]
        return error

    def epoch(self, slot: int = 0) -> int:
        return int(self.slot(slot)["epoch"])

    def tokens(self, text: str) -> list[int]:
        answer: list[int] = self.post("/tokenize", {"content": text, "add_special": True})["tokens"]
        return answer

    def complete(
        self, prompt: object, slot: int = 0, *, marker: bool = True, **more: object
    ) -> Json:
        """Decodes greedily. With `marker` the request keeps the holes of its slot."""
        body: Json = {"prompt": prompt, "temperature": 0, "n_predict": 8, "cache_prompt": True}
        body |= {"id_slot": slot, "return_tokens": True, "ignore_eos": True}
        body |= {"evoke": {"epoch": self.epoch(slot)}} if marker else {}
        answer: Json = self.post("/completion", body | more)
        return answer

    def erase(self, slot: int = 0) -> None:
        self.post(f"/slots/{slot}?action=erase", {})


# The largest difference of two log probabilities that come from the same rows, but in batches of
# another shape or from other cells: a sum in another order rounds differently, on each CPU.
ROUNDING = 0.05
_UNLIKELY = -6.0


def distributions(answer: Json) -> list[dict[int, float]]:
    """The log probabilities by token id, per generated token; the request must set `n_probs`."""
    steps = answer["completion_probabilities"]
    return [{p["id"]: p["logprob"] for p in step["top_logprobs"]} for step in steps]


def largest_difference(one: list[dict[int, float]], other: list[dict[int, float]]) -> float:
    """The largest difference of two log probabilities, up to the first different token.

    Both must list the whole vocabulary in each step. Tokens less likely than one in 400 are left
    out, because their log probabilities amplify rounding.
    """
    most = 0.0
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        likely = [token for token in a if max(a[token], b[token]) > _UNLIKELY]
        most = max(most, *(abs(a[token] - b[token]) for token in likely))
        if max(a, key=a.__getitem__) != max(b, key=b.__getitem__):
            break
    return most


@contextmanager
def running(patched: bool, *options: str, model: Path = MODEL) -> Iterator[Llama]:
    """Runs a server on a free loopback port until the block ends. A failed start shows its log.

    `EVOKE_SERVER_ARGS` may contain further options, such as those of a backend (tests/matrix.py).
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(binary(patched)), "-m", str(model), "-t", "1", "--port", str(port)]
        command += ["--slot-save-path", folder, *options]
        command += os.environ.get("EVOKE_SERVER_ARGS", "").split()
        log, start_s = Path(folder) / "llama-server.log", START_S * TIME_FACTOR
        with serving(command, port, log, start_s=start_s):
            yield Llama(port)
            assert healthy(port), "the server died"


def sample_text(words: int, seed: int = 0) -> str:
    """Plain text in the model's vocabulary, different for each seed."""
    nouns = "river mountain machine garden letter engine window teacher forest market".split()
    verbs = "follows watches repairs carries finds builds crosses describes".split()
    parts = []
    for i in range(words // 5 + 1):
        n = i * 7 + seed * 13
        parts.append(f"The {nouns[n % 10]} {verbs[n % 7]} the {nouns[(n * 3 + 1) % 10]} {n % 97}.")
    return " ".join(parts)
