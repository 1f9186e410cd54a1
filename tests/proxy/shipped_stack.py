"""What each shipped installation must do, checked from outside while it runs on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from conversation import FILLER, ChatClient
from harness import ask, until

from evoke_proxy.demo.processes import healthy

ROOT = Path(__file__).parents[2]
PROXY = [sys.executable, "-m", "evoke_proxy"]
FACT, QUESTION, VALUE = "My favorite number is 68285.", "What is my favorite number?", "68285"
# Turns of about 145 tokens: more than the cells of a slot, fewer than the model was trained on.
TURNS = 36


@dataclass(frozen=True, slots=True)
class Program:
    """A process of an installation.

    Attributes:
        name: Its name.
        command: Its command line on this machine.
        environment: All of its environment.
        port: Where it answers `GET /health`.
        folder: Its working directory.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    port: int
    folder: Path


@contextmanager
def running(programs: Sequence[Program], logs: Path) -> Iterator[None]:
    """Run the programs in order, each when the one before answers, until the block ends."""
    with ExitStack() as ends:
        for program in programs:
            log = ends.enter_context((logs / f"{program.name}.log").open("ab"))
            process = subprocess.Popen(
                program.command,
                env=dict(program.environment),
                cwd=program.folder,
                umask=0o077,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            ends.callback(_stop, process)
            until(lambda port=program.port: healthy(port), f"{program.name} answers")  # type: ignore[misc]
        yield


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    assert process.wait(60) == 0


@dataclass(slots=True)
class KeyedClient(ChatClient):
    """A client that sends the key of the proxy; "" for none."""

    key: str = field(default="", kw_only=True)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        plain = {"Content-Type": "application/json", "X-Evoke-Session": str(self.session)}
        return plain | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


@dataclass(frozen=True, slots=True)
class Installed:
    """An installation that runs on this machine.

    Attributes:
        clients: Port for clients.
        admin: Port of the page, the admin API and the metrics.
        server: Port of llama-server.
        folder: For the files of Prometheus.
    """

    clients: int
    admin: int
    server: int
    folder: Path

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample of the proxy's metrics, summed over the labels that are not given."""
        text = ask(self.admin, "GET", "/metrics").body.decode()
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        pairs = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(x.rpartition(" ")[2]) for x in lines if all(pair in x for pair in pairs))

    def talk(self, key: str = "") -> KeyedClient:
        """State a fact and talk until it has left the cache; returns the client."""
        client = KeyedClient(self.clients, "shipped", key=key)
        client.messages.append({"role": "user", "content": FACT})
        for number in range(TURNS):
            client.messages.append({"role": "assistant", "content": "Noted."})
            client.messages.append({"role": "user", "content": f"Turn {number}. {FILLER}"})
        client.messages.append({"role": "assistant", "content": "Noted."})
        client.say("The river follows the machine near the old bridge. Name a planet.")
        return client

    def assert_recalls_beyond_the_cells(self, client: KeyedClient) -> None:
        """Check that the fact is recalled, and that it was evicted and recovered for that."""
        turn = client.say(QUESTION)
        assert VALUE in turn.text
        props = json.loads(ask(self.server, "GET", "/props").body)
        cells = int(props["evoke"]["limits"]["n_slot_cells"])
        assert turn.accounting["n_prompt"] > cells > turn.accounting["n_resident_peak"]
        assert self.metric("evoke_blocks_evicted_total") > 0
        assert self.metric("evoke_blocks_recovered_total") > 0
        until(
            lambda: self.metric("evoke_embedded_total", kind="question") > 0,
            "the question has a vector",
        )

    def assert_continues_after_a_restart(self, client: KeyedClient) -> None:
        """Check that the fact is recalled and that most of the prompt was not decoded again."""
        turn = client.say("And what is it again? What is my favorite number?")
        assert VALUE in turn.text
        assert turn.accounting["decoded"] < turn.accounting["n_prompt"] // 2

    def assert_opens_with_the_token(self, token: str) -> None:
        """Check that the admin API is closed without its token and open with it."""
        bearer = {"Authorization": f"Bearer {token}"}
        assert ask(self.admin, "GET", "/evoke/sessions").status == 401
        assert ask(self.admin, "GET", "/evoke/sessions", headers=bearer).status == 200

    def assert_scraped(self, port: int) -> None:
        """Check that Debian's Prometheus, with the shipped configuration, scrapes the proxy.

        Prometheus listens on `port`.
        """
        if shutil.which("prometheus") is None:
            pytest.skip("needs prometheus: apt-get install prometheus")
        folder = self.folder / "prometheus"
        folder.mkdir()
        text = (ROOT / "deploy/prometheus/prometheus.yml").read_text("utf-8")
        config = yaml.safe_load(text.replace("proxy:18090", f"127.0.0.1:{self.admin}"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(ROOT / "deploy/prometheus/alerts.yml", folder)
        command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
        command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            deadline = time.monotonic() + 60
            while not _scraped(port, "evoke_blocks_recovered_total > 0"):
                assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.2)
        finally:
            process.terminate()
            process.wait()


def _scraped(port: int, expression: str) -> bool:
    query = urllib.parse.urlencode({"query": expression})
    try:
        answer = ask(port, "GET", f"/api/v1/query?{query}")
    except OSError:
        return False
    return answer.status == 200 and bool(json.loads(answer.body)["data"]["result"])


def bare_environment() -> dict[str, str]:
    """What a service inherits: hardly anything, and no home.

    PYTHONPATH stands for the installed package; the tests' reaper finds processes by TESTED_BY.
    """
    kept = {name: os.environ[name] for name in ("PATH", "TESTED_BY") if name in os.environ}
    return kept | {"HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
