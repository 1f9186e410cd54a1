"""A stock llama-server that can be restarted, with a proxy that saves snapshots of its slots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import RunningProxy, ask, llama_server, proxy, server_binary, server_counter

from bench.random_models import SHAPES, chat_template, ensure

_JSON = {"Content-Type": "application/json"}
# Settings with which every conversation is saved, however small its gain.
SAVE_ALWAYS = {"min_free_mib": 0, "stall_share": 1.0, "min_gain": 0.0}


def template(name: str) -> list[str]:
    """Return the options for a chat template of the pinned llama.cpp tree."""
    return ["--jinja", "--chat-template-file", str(chat_template(name))]


@dataclass(frozen=True, slots=True)
class Deployment:
    """How a stock server is started.

    Attributes:
        folder: The directory of slot files and snapshots.
        shape: The shape of a random model; the bundled model if empty.
        options: More options of llama-server.
    """

    folder: Path
    shape: str = ""
    options: tuple[str, ...] = ()

    @contextmanager
    def server(self, port: int = 0) -> Iterator[int]:
        """Start a stock server; by default on a free port."""
        model = ("-m", str(ensure(SHAPES[self.shape]))) if self.shape else ()
        defaults = ("--slot-save-path", str(self.folder), "--metrics")
        if "-np" not in self.options:
            defaults += ("-np", "1")
        command = (server_binary(patched=False), *model, *defaults, *self.options)
        with llama_server(*command, port=port) as used:
            yield used

    @contextmanager
    def proxy(self, port: int, **snapshots: object) -> Iterator[RunningProxy]:
        """Start a proxy that saves as often as possible; `snapshots` replaces its settings."""
        settings = {"directory": str(self.folder)} | SAVE_ALWAYS | snapshots
        overrides = {f"snapshots__{key}": value for key, value in settings.items()}
        with proxy(port, **overrides) as running:
            yield running

    @contextmanager
    def server_and_proxy(self, **snapshots: object) -> Iterator[RunningProxy]:
        """Start a server and a proxy in front of it."""
        with self.server() as port, self.proxy(port, **snapshots) as running:
            yield running

    def files(self) -> list[Path]:
        """Return all snapshot files."""
        return sorted(self.folder.glob("*.evoke-kv"))


@dataclass(slots=True)
class Chat:
    """A client that resends its history.

    Attributes:
        messages: The history; `add_reply` appends the latest reply.
        fields: Fields of every request.
        reply: The message of the latest reply, with thoughts if it has any.
    """

    messages: list[dict[str, Any]]
    fields: Mapping[str, Any] = field(default_factory=dict)
    reply: dict[str, Any] = field(default_factory=dict)

    def ask(self, port: int, text: str | None = None, **fields: Any) -> tuple[int, int]:
        """Send a turn, or the last one again without `text`; returns cached and decoded tokens."""
        if text is not None:
            self.messages.append({"role": "user", "content": text})
        request = {
            "messages": self.messages,
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        body = json.dumps({**request, **self.fields, **fields}).encode()
        answer = ask(port, "POST", "/v1/chat/completions", body, _JSON)
        assert answer.status == 200, answer.body
        response = json.loads(answer.body)
        self.reply = response["choices"][0]["message"]
        return response["timings"]["cache_n"], response["timings"]["prompt_n"]

    def add_reply(self) -> None:
        """Append the latest reply to the history, without its thoughts."""
        self.messages.append({"role": "assistant", "content": self.reply["content"]})


def long_chat(n_words: int, start: int = 0) -> Chat:
    """Return a chat of `n_words` in messages of 100 words, with thoughts in its answers."""
    messages: list[dict[str, Any]] = []
    for first in range(start, start + n_words, 100):
        words = " ".join(f"w{number % 211}" for number in range(first, first + 100))
        messages.append({"role": "user", "content": f"{first}: {words}"})
        thought = f"<think>\nso {first}\n</think>\n\n"
        messages.append({"role": "assistant", "content": f"{thought}Yes {first}."})
    return Chat(messages)


def decoded(port: int) -> int:
    """Return how many prompt tokens a server has decoded since its start."""
    return server_counter(port, "prompt_tokens_total")


def final_metric(running: RunningProxy, name: str, **labels: str) -> float:
    """Wait for background tasks; returns the value of a metric."""
    running.wait_for_background()
    return running.metric(name, **labels)
