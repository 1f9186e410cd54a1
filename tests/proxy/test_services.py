"""The systemd units and the Kubernetes manifest, run natively with what they say.

Both start the processes with the command lines, environments, files and folders that the shipped
files name. Paths and ports are those of this machine. The model is the bundled one, which was
trained for 8,192 tokens, so that the cells are fewer than those of the files.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from harness import server_binary
from shipped_stack import PROXY, ROOT, Installed, Program, bare_environment, running

from evoke_proxy.demo.processes import free_port
from evoke_proxy.models import bundled_model

DEPLOY = ROOT / "deploy"
# Cells of both slots; the files have more, for larger models.
CELLS = "4096"
# Host memory for evicted blocks. All of the 4 GiB of the files would be written at each start.
RAM_MIB = "64"
# Nothing can be fetched, as without a network; one thread is best for so small a model.
MACHINE = {"EVOKE_EMBEDDER_MIRROR": "http://127.0.0.1:9", "LLAMA_ARG_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Ports:
    """Free ports of this machine, in place of those of the files."""

    clients: int
    admin: int
    server: int

    def installed(self, folder: Path) -> Installed:
        """What listens on them."""
        return Installed(self.clients, self.admin, self.server, folder)

    def replaced(self, text: str) -> str:
        """A text with these ports in place of 8090, 18090 and 8080, on loopback."""
        for shipped, port in ((18090, self.admin), (8090, self.clients), (8080, self.server)):
            text = re.sub(rf"(?:0\.0\.0\.0|127\.0\.0\.1):{shipped}\b", f"127.0.0.1:{port}", text)
        return text


def _free_ports() -> Ports:
    return Ports(free_port(), free_port(), free_port())


@dataclass(frozen=True, slots=True)
class Unit:
    """A systemd unit with this machine's paths.

    Attributes:
        name: Of the file, without its ending.
        root: Stands for the root directory.
        values: The values of each key, in order.
    """

    name: str
    root: Path
    values: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, name: str, root: Path) -> Unit:
        """Read a unit of deploy/; %S is the directory of the states of services."""
        values: dict[str, list[str]] = {}
        for line in (DEPLOY / f"{name}.service").read_text("utf-8").splitlines():
            if line and line[0] not in "#[":
                key, _, value = line.partition("=")
                values.setdefault(key, []).append(value.replace("%S", str(root / "var/lib")))
        return cls(name, root, values)

    def program(self, binary: Sequence[str], port: int) -> Program:
        """The process that systemd starts: folders are made, files of variables override."""
        for folder in self._one("StateDirectory").split():
            (self.root / "var/lib" / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        environment = bare_environment() | MACHINE | _variables("\n".join(self._settings()))
        path = self.root / self._one("EnvironmentFile").lstrip("-/")
        environment |= _variables(path.read_text("utf-8"))
        _, *words = shlex.split(self._one("ExecStart"))
        words = [re.sub(r"^/etc/", f"{self.root}/etc/", word) for word in words]
        folder = Path(self._one("WorkingDirectory"))
        assert self._one("UMask") == "0077", "the one that processes of tests get"
        return Program(self.name, [*binary, *words], environment, port, folder)

    def _one(self, key: str) -> str:
        (value,) = self.values[key]
        return value

    def _settings(self) -> Iterator[str]:
        for value in self.values["Environment"]:
            yield from shlex.split(value)


def _variables(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE))


def _install_units(root: Path, ports: Ports) -> None:
    """What deploy/README.md says: the files are copied, the model and its cells are set."""
    folder = root / "etc/evoke-proxy"
    folder.mkdir(parents=True)
    example = (ROOT / "config/evoke.example.yaml").read_text("utf-8")
    (folder / "evoke.yaml").write_text(ports.replaced(example))
    for name in ("evoke-proxy.env", "llama-server.env"):
        text = (DEPLOY / name).read_text("utf-8")
        text = re.sub(r"(?m)^LLAMA_ARG_MODEL=.*$", f"LLAMA_ARG_MODEL={bundled_model()}", text)
        text = re.sub(r"(?m)^LLAMA_ARG_CTX_SIZE=.*$", f"LLAMA_ARG_CTX_SIZE={CELLS}", text)
        text = re.sub(r"(?m)^LLAMA_ARG_EVOKE_RAM=.*$", f"LLAMA_ARG_EVOKE_RAM={RAM_MIB}", text)
        if name == "llama-server.env":
            assert str(bundled_model()) in text and CELLS in text and f"={RAM_MIB}\n" in text
            text += f"LLAMA_ARG_PORT={ports.server}\n"
        (folder / name).write_text(text)


def test_the_systemd_units_evict_recover_and_survive_a_restart(tmp_path: Path) -> None:
    ports, root = _free_ports(), tmp_path / "root"
    _install_units(root, ports)
    programs = [
        Unit.read("llama-server", root).program([server_binary(patched=True)], ports.server),
        Unit.read("evoke-proxy", root).program(PROXY, ports.clients),
    ]
    installed = ports.installed(tmp_path)
    with running(programs, tmp_path):
        client = installed.talk()
        installed.assert_recalls_beyond_the_cells(client)
        installed.assert_scraped(free_port())
    blocks = root / "var/lib/llama-server/blocks"
    assert list(blocks.rglob("*")), "no saved blocks are in the state directory"
    with running(programs, tmp_path):
        installed.assert_continues_after_a_restart(client)


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod of the manifest; its volumes are folders of this machine.

    Attributes:
        folder: Has a folder for each volume.
        ports: In place of those of the manifest.
        parts: The objects of the manifest, by kind.
    """

    folder: Path
    ports: Ports
    parts: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path, ports: Ports) -> Pod:
        """Read the manifest, and fill its volumes as a cluster would."""
        text = ports.replaced((DEPLOY / "kubernetes/evoke.yaml").read_text("utf-8"))
        pod = cls(folder, ports, {part["kind"]: part for part in yaml.safe_load_all(text)})
        for container in (*pod.spec["initContainers"], *pod.spec["containers"]):
            for mount in container["volumeMounts"]:
                (folder / mount["name"]).mkdir(parents=True, exist_ok=True)
        proxy = pod.container("proxy")
        for name, setting in pod.parts["ConfigMap"]["data"].items():
            (folder / "config" / name).write_text(pod.native(proxy, setting))
        shutil.copy(bundled_model(), folder / "models/model.gguf")
        return pod

    @property
    def spec(self) -> Mapping[str, Any]:
        """The pod of the set."""
        found: Mapping[str, Any] = self.parts["StatefulSet"]["spec"]["template"]["spec"]
        return found

    def container(self, name: str) -> Mapping[str, Any]:
        """A container of the pod."""
        (found,) = [item for item in self.spec["containers"] if item["name"] == name]
        return found

    def native(self, container: Mapping[str, Any], text: str) -> str:
        """A text with folders of this machine in place of the paths where volumes are mounted."""
        paths = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        pattern = "|".join(sorted(map(re.escape, paths), key=len, reverse=True))
        return re.sub(
            rf"(?<![\w/.])({pattern})(?=[/:\s\"']|$)",
            lambda found: str(self.folder / paths[found[1]]),
            text,
        )

    def environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        """The environment of a container: that of its image, and its own."""
        image = container["image"].partition("/")[2].partition(":")[0].removeprefix("evoke-")
        values = _image_variables(f"{image}.Dockerfile")
        values |= {item["name"]: item["value"] for item in container.get("env", ())}
        values = {name: self.native(container, value) for name, value in values.items()}
        values = {name: self.ports.replaced(value) for name, value in values.items()}
        if "LLAMA_ARG_PORT" in values:
            values |= {"LLAMA_ARG_PORT": str(self.ports.server), "LLAMA_ARG_CTX_SIZE": CELLS}
            assert "LLAMA_ARG_EVOKE_RAM" in values
            values["LLAMA_ARG_EVOKE_RAM"] = RAM_MIB
        return bare_environment() | MACHINE | values

    def command(self, container: Mapping[str, Any], entry: Sequence[str]) -> list[str]:
        """The command line of a container; `entry` is the entry point of its image."""
        command, args = container.get("command"), container.get("args", ())
        # The entry point is a program of this machine: a checkout may be below a mounted path.
        first = entry if command is None else [self.native(container, word) for word in command]
        return [*first, *(self.native(container, word) for word in args)]

    def initialise(self) -> None:
        """Run the containers that run first, in order."""
        for container in self.spec["initContainers"]:
            completed = subprocess.run(
                self.command(container, PROXY),
                env=self.environment(container),
                capture_output=True,
                text=True,
            )
            assert completed.returncode == 0, (container["name"], completed.stderr)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the pod until the block ends."""
        self.initialise()
        programs = []
        for name, entry, port in (
            ("llama-server", [server_binary(patched=True)], self.ports.server),
            ("proxy", PROXY, self.ports.clients),
        ):
            container = self.container(name)
            command, env = self.command(container, entry), self.environment(container)
            programs.append(Program(name, command, env, port, self.folder))
        with running(programs, self.folder):
            yield


def _image_variables(dockerfile: str) -> dict[str, str]:
    """The variables that the last stage of a Dockerfile sets, but PATH, which is the image's."""
    lines = (ROOT / "docker" / dockerfile).read_text("utf-8").splitlines()
    words = [shlex.split(line)[1:] for line in lines if line.startswith("ENV ")]
    found = dict(word.split("=", 1) for line in words for word in line)
    return {name: value for name, value in found.items() if name != "PATH"}


def _make_secret(folder: Path) -> str:
    """Make the secret `evoke-keys` of the manifest; returns the key of its only client."""
    folder.mkdir(parents=True)
    command = [*PROXY, "keys", "add", "alice", "--file", str(folder / "keys")]
    completed = subprocess.run(
        command, env=bare_environment(), capture_output=True, text=True, check=True
    )
    return completed.stdout.strip()


def test_the_kubernetes_pod_evicts_recovers_and_survives_a_restart(tmp_path: Path) -> None:
    key = _make_secret(tmp_path / "secret")
    pod = Pod.read(tmp_path, _free_ports())
    installed = pod.ports.installed(tmp_path)
    with pod.running():
        client = installed.talk(key)
        installed.assert_recalls_beyond_the_cells(client)
        token = (tmp_path / "data/admin-token").read_text("utf-8").strip()
        installed.assert_opens_with_the_token(token)
        installed.assert_scraped(free_port())
    assert list((tmp_path / "data/blocks").rglob("*")), "no saved blocks are on the volume"
    # A new pod has the volume of the old one, and an empty `run`.
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with pod.running():
        installed.assert_continues_after_a_restart(client)
        installed.assert_opens_with_the_token(token)
