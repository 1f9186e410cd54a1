"""A stock server that is started repeatedly, with a proxy that saves snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import RunningProxy, ask, counted, llama_server, proxy, server_binary

from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build.cache import cache_dir

_JSON = {"Content-Type": "application/json"}
QUICK = {"min_free_mib": 0, "stall_share": 1.0, "min_gain": 0.0}


def template(name: str) -> list[str]:
    """Options for a chat template of the pinned tree."""
    (file,) = cache_dir().glob(f"source/*/models/templates/{name}.jinja")
    return ["--jinja", "--chat-template-file", str(file)]


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model, the options of its server, and the directory for slots."""

    folder: Path
    shape: str = ""
    options: tuple[str, ...] = ()

    @contextmanager
    def server(self, port: int = 0) -> Iterator[int]:
        """A new stock server, on a free port unless one is given."""
        model = ("-m", str(ensure(SHAPES[self.shape]))) if self.shape else ()
        usual = ("--slot-save-path", str(self.folder), "--metrics")
        if "-np" not in self.options:
            usual += ("-np", "1")
        command = (server_binary(patched=False), *model, *usual, *self.options)
        with llama_server(*command, port=port) as served:
            yield served

    @contextmanager
    def proxy(self, port: int, **snapshots: object) -> Iterator[RunningProxy]:
        """A proxy that saves as often as possible; `snapshots` replaces settings."""
        settings = {"directory": str(self.folder)} | QUICK | snapshots
        named = {f"snapshots__{key}": value for key, value in settings.items()}
        with proxy(port, **named) as running:
            yield running

    @contextmanager
    def both(self, **snapshots: object) -> Iterator[RunningProxy]:
        """A server and a proxy in front of it."""
        with self.server() as port, self.proxy(port, **snapshots) as running:
            yield running

    def files(self) -> list[Path]:
        """All snapshot files."""
        return sorted(self.folder.glob("*.evoke-kv"))


@dataclass(slots=True)
class Chat:
    """A client that resends its history, with or without thoughts."""

    messages: list[dict[str, Any]]
    fields: Mapping[str, Any] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)

    def ask(self, port: int, text: str | None = None, **fields: Any) -> tuple[int, int]:
        """Make a turn, without text repeat the last; returns cached and decoded tokens."""
        if text is not None:
            self.messages.append({"role": "user", "content": text})
        given = {"messages": self.messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**given, **self.fields, **fields}).encode()
        answer = ask(port, "POST", "/v1/chat/completions", body, _JSON)
        assert answer.status == 200, answer.body
        reply = json.loads(answer.body)
        self.said = reply["choices"][0]["message"]
        return reply["timings"]["cache_n"], reply["timings"]["prompt_n"]

    def hear(self) -> None:
        """Append the answer to the history, without its thoughts."""
        self.messages.append({"role": "assistant", "content": self.said["content"]})


def long_chat(n_words: int, start: int = 0) -> Chat:
    """A chat of `n_words` in messages of 100, with thoughts in answers."""
    messages: list[dict[str, Any]] = []
    for at in range(start, start + n_words, 100):
        words = " ".join(f"w{number % 211}" for number in range(at, at + 100))
        messages.append({"role": "user", "content": f"{at}: {words}"})
        thought = f"<think>\nso {at}\n</think>\n\n"
        messages.append({"role": "assistant", "content": f"{thought}Yes {at}."})
    return Chat(messages)


def decoded(port: int) -> int:
    """Prompt tokens that a server has decoded since its start."""
    return counted(port, "prompt_tokens_total")


def quiet_metric(running: RunningProxy, name: str, **labels: str) -> float:
    """The value of a metric after all background work."""
    running.settled()
    return running.metric(name, **labels)
