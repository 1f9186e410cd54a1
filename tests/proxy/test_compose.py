"""The services of docker/compose.yaml, run natively with their commands and environments."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conversation import FILLER, ChatClient
from harness import ask, server_binary, until

from evoke_proxy.demo.processes import free_port, healthy

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
FACT, QUESTION, VALUE = "My favorite number is 68285.", "What is my favorite number?", "68285"
# Turns of about 145 tokens: more than the cells of a slot, fewer than the model was trained on.
TURNS = 36
_DEFAULT = re.compile(r"\$\{[A-Z_]+:-([^}]*)\}")


def compose() -> dict[str, Any]:
    """Return the services as they are without an .env file: every variable has its default."""
    text = _DEFAULT.sub(r"\1", (DOCKER / "compose.yaml").read_text("utf-8"))
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def image_variables(dockerfile: str) -> dict[str, str]:
    """Return the variables that the last stage of a Dockerfile sets."""
    lines = (ROOT / dockerfile).read_text("utf-8").splitlines()
    words = [shlex.split(line)[1:] for line in lines if line.startswith("ENV ")]
    return dict(word.split("=", 1) for line in words for word in line)


@dataclass(frozen=True, slots=True)
class Host:
    """Paths and ports on this machine that replace those of the containers.

    Attributes:
        folder: The directory of the volumes.
        ports: The port on this machine of each container address.
    """

    folder: Path
    ports: Mapping[str, int]

    def native(self, service: Mapping[str, Any], text: str) -> str:
        """Replace the paths and addresses in a value of a service by those on this machine."""
        for address, port in self.ports.items():
            text = text.replace(address, f"127.0.0.1:{port}")
        for source, target in self._mounts(service):
            text = re.sub(rf"^{target}(?=/|:|$)", str(source), text)
        return text

    def _mounts(self, service: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
        for volume in service.get("volumes", ()):
            source, target = (
                (volume["source"], volume["target"])
                if isinstance(volume, dict)
                else volume.split(":")[:2]
            )
            if source.startswith("."):
                yield (DOCKER / source).resolve(), target
                continue
            path = self.folder / source
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            yield path, target

    def command(self, service: Mapping[str, Any], program: list[str]) -> list[str]:
        """Return the command of a service, run by `program`."""
        words = [self.native(service, word) for word in service.get("command", ())]
        return [*program, *words]

    def environment(self, service: Mapping[str, Any]) -> dict[str, str]:
        """Return the environment of a service on this machine."""
        container = image_variables(service["build"]["dockerfile"]) | service.get("environment", {})
        native = {name: self.native(service, str(value)) for name, value in container.items()}
        native |= {"LLAMA_ARG_HOST": "127.0.0.1"} if "LLAMA_ARG_HOST" in native else {}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("EVOKE_", "LLAMA_"))
        }
        # The embedder cannot be fetched, as without a network.
        return inherited | {"EVOKE_EMBEDDER_MIRROR": "http://127.0.0.1:9"} | native


PROXY = [sys.executable, "-m", "evoke_proxy"]


@contextmanager
def stack(host: Host) -> Iterator[None]:
    """Run the one-shot services, then llama-server and the proxy, until the block ends."""
    services = compose()
    for name in ("fetch-embedder", "admin-token"):
        assert services["proxy"]["depends_on"][name]["condition"].endswith("successfully")
        service = services[name]
        command = host.command(service, PROXY)
        completed = subprocess.run(command, env=host.environment(service), capture_output=True)
        assert completed.returncode == 0, completed.stderr
    with ExitStack() as ends:
        for name, program in (
            ("llama-server", [server_binary(patched=True)]),
            ("proxy", [*PROXY, "serve"]),
        ):
            service = services[name]
            env = host.environment(service)
            if name == "llama-server":
                env |= {"LLAMA_ARG_PORT": str(host.ports["llama-server:8080"])}
                env |= {"LLAMA_ARG_THREADS": "1"}
            log = ends.enter_context((host.folder / f"{name}.log").open("ab"))
            process = subprocess.Popen(
                host.command(service, program), env=env, stdout=log, stderr=log
            )
            ends.callback(_stop, process)
            port = host.ports["llama-server:8080" if name == "llama-server" else "0.0.0.0:8090"]
            until(lambda port=port: healthy(port), f"{name} answers")  # type: ignore[misc]
        yield


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    assert process.wait(60) == 0


def metric(host: Host, name: str, **labels: str) -> float:
    """Return a sample of the proxy's metrics, summed over the labels that are not given."""
    text = ask(host.ports["0.0.0.0:18090"], "GET", "/metrics").body.decode()
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    pairs = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(x.rpartition(" ")[2]) for x in lines if all(pair in x for pair in pairs))


def test_the_stack_evicts_recovers_and_survives_a_restart(tmp_path: Path) -> None:
    addresses = ("llama-server:8080", "0.0.0.0:8090", "0.0.0.0:18090")
    host = Host(tmp_path, {address: free_port() for address in addresses})
    client, admin = ChatClient(host.ports["0.0.0.0:8090"], "composed"), host.ports["0.0.0.0:18090"]
    client.messages.append({"role": "user", "content": FACT})
    for number in range(TURNS):
        client.messages.append({"role": "assistant", "content": "Noted."})
        client.messages.append({"role": "user", "content": f"Turn {number}. {FILLER}"})
    with stack(host):
        cells = _cells(host)
        client.messages.append({"role": "assistant", "content": "Noted."})
        client.say("The river follows the machine near the old bridge. Name a planet.")
        turn = client.say(QUESTION)
        assert VALUE in turn.text
        assert turn.accounting["n_prompt"] > cells > turn.accounting["n_resident_peak"]
        assert metric(host, "evoke_blocks_evicted_total") > 0
        assert metric(host, "evoke_blocks_recovered_total") > 0
        until(
            lambda: metric(host, "evoke_embedded_total", kind="question") > 0,
            "the question has a vector",
        )
        token = (tmp_path / "state/admin-token").read_text("utf-8").strip()
        bearer = {"Authorization": f"Bearer {token}"}
        assert ask(admin, "GET", "/evoke/sessions").status == 401
        assert ask(admin, "GET", "/evoke/sessions", headers=bearer).status == 200
        _assert_scraped(host)
    assert list((tmp_path / "blocks").rglob("*")), "no saved blocks are on the volume"
    with stack(host):
        turn = client.say("And what is it again? What is my favorite number?")
        assert VALUE in turn.text
        assert turn.accounting["decoded"] < turn.accounting["n_prompt"] // 2
        assert (tmp_path / "state/admin-token").read_text("utf-8").strip() == token


def _cells(host: Host) -> int:
    props = json.loads(ask(host.ports["llama-server:8080"], "GET", "/props").body)
    return int(props["evoke"]["limits"]["n_slot_cells"])


def _assert_scraped(host: Host) -> None:
    """Check that Debian's Prometheus, with the shipped configuration, scrapes the proxy."""
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    port, folder = free_port(), host.folder / "prometheus"
    folder.mkdir()
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text("utf-8")
    config = yaml.safe_load(text.replace("proxy:18090", f"127.0.0.1:{host.ports['0.0.0.0:18090']}"))
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


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.cpu.yaml")])
def test_docker_compose_accepts_the_files_of_the_stack(files: tuple[str, ...]) -> None:
    command = ["docker", "compose"]
    if shutil.which("docker") is None or subprocess.run([*command, "version"]).returncode != 0:
        pytest.skip("needs the Docker CLI with its compose plugin")
    options = [word for name in files for word in ("-f", name)]
    completed = subprocess.run(
        [*command, *options, "config", "--quiet"], cwd=DOCKER, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
