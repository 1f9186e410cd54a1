"""The services of docker/compose.yaml, run natively with their commands and environments."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from harness import ask, server_binary
from shipped_stack import PROXY, ROOT, Installed, Program, running

from evoke_proxy.demo.processes import free_port

DOCKER = ROOT / "docker"
# A variable whose default contains no other variable.
_INNERMOST = re.compile(r"\$\{([A-Z_]+):-([^${}]*)\}")


def compose(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the services with the variables of an .env file; others have their defaults."""
    text, n_replaced = (DOCKER / "compose.yaml").read_text("utf-8"), 1
    while n_replaced:
        text, n_replaced = _INNERMOST.subn(lambda found: variables.get(found[1]) or found[2], text)
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
        variables: The variables of the .env file.
    """

    folder: Path
    ports: Mapping[str, int]
    variables: Mapping[str, str] = field(default_factory=dict)

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
        assert service["env_file"] == [{"path": ".env", "required": False}]
        container = image_variables(service["build"]["dockerfile"])
        container |= {**self.variables, **service.get("environment", {})}
        native = {name: self.native(service, str(value)) for name, value in container.items()}
        native |= {"LLAMA_ARG_HOST": "127.0.0.1"} if "LLAMA_ARG_HOST" in native else {}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("EVOKE_", "LLAMA_"))
        }
        # The embedder cannot be fetched, as without a network.
        return inherited | {"EVOKE_EMBEDDER_MIRROR": "http://127.0.0.1:9"} | native


@contextmanager
def stack(host: Host) -> Iterator[None]:
    """Run the one-shot services, then llama-server and the proxy, until the block ends."""
    services = compose(host.variables)
    for name in ("fetch-embedder", "admin-token"):
        assert services["proxy"]["depends_on"][name]["condition"].endswith("successfully")
        service = services[name]
        command = host.command(service, PROXY)
        completed = subprocess.run(command, env=host.environment(service), capture_output=True)
        assert completed.returncode == 0, completed.stderr
    programs = []
    for name, words, address in (
        ("llama-server", [server_binary(patched=True)], "llama-server:8080"),
        ("proxy", [*PROXY, "serve"], "0.0.0.0:8090"),
    ):
        service, port = services[name], host.ports[address]
        env = host.environment(service)
        if name == "llama-server":
            env |= {"LLAMA_ARG_PORT": str(port), "LLAMA_ARG_THREADS": "1"}
            # All of the 1024 MiB of the default would be written at each start.
            assert "LLAMA_ARG_EVOKE_RAM" in env
            env |= {"LLAMA_ARG_EVOKE_RAM": "64"}
        programs.append(Program(name, host.command(service, words), env, port, host.folder))
    with running(programs, host.folder):
        yield


def host_with(folder: Path, **variables: str) -> Host:
    """Return this machine with free ports for all services; `variables` are those of .env."""
    addresses = ("llama-server:8080", "0.0.0.0:8090", "0.0.0.0:18090")
    return Host(folder, {address: free_port() for address in addresses}, variables)


def test_the_proxy_uses_the_key_of_llama_server(tmp_path: Path) -> None:
    host = host_with(tmp_path, LLAMA_API_KEY="secret")
    port = host.ports["0.0.0.0:8090"]
    with stack(host):
        ready = ask(port, "GET", "/evoke/ready")
        assert ready.status == 200 and b"upstream:api_key" not in ready.body, ready.body
        assert ask(port, "GET", "/v1/models").status == 401
        with_key = {"Authorization": "Bearer secret"}
        assert ask(port, "GET", "/v1/models", headers=with_key).status == 200


def test_the_stack_evicts_recovers_and_survives_a_restart(tmp_path: Path) -> None:
    host = host_with(tmp_path)
    installed = Installed(
        clients=host.ports["0.0.0.0:8090"],
        admin=host.ports["0.0.0.0:18090"],
        server=host.ports["llama-server:8080"],
        folder=tmp_path,
    )
    with stack(host):
        client = installed.talk()
        installed.assert_recalls_beyond_the_cells(client)
        token = (tmp_path / "state/admin-token").read_text("utf-8").strip()
        installed.assert_opens_with_the_token(token)
        installed.assert_scraped(free_port())
    assert list((tmp_path / "blocks").rglob("*")), "no saved blocks are on the volume"
    with stack(host):
        installed.assert_continues_after_a_restart(client)
        assert (tmp_path / "state/admin-token").read_text("utf-8").strip() == token
