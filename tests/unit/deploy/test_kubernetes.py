"""The Kubernetes manifests: valid against the schemas and our settings. No cluster is used."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from evoke_proxy.cli.main import build_parser
from evoke_proxy.config import load
from evoke_proxy.web import admin

MANIFEST = Path(__file__).parents[3] / "deploy/kubernetes/evoke.yaml"
PARTS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text()))


def _part(kind: str) -> dict[str, Any]:
    (found,) = [part for part in PARTS if part["kind"] == kind]
    return found


POD = _part("StatefulSet")["spec"]["template"]["spec"]
CONTAINERS = {item["name"]: item for item in POD["containers"]}


def test_the_manifest_matches_the_kubernetes_schema(tmp_path: Path) -> None:
    tool = shutil.which("kubernetes-validate", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("needs the extra [docker]")
    assert subprocess.run([tool, "--strict", str(MANIFEST)], capture_output=True).returncode == 0
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(MANIFEST.read_text().replace("readinessProbe:", "readynessProbe:"))
    assert subprocess.run([tool, "--strict", str(wrong)], capture_output=True).returncode != 0


def test_the_settings_of_the_manifest_are_valid(tmp_path: Path) -> None:
    (name,) = _part("ConfigMap")["data"]
    (tmp_path / name).write_text(_part("ConfigMap")["data"][name])
    config = load(tmp_path / name, {})
    mounts = {item["name"]: item["mountPath"] for item in CONTAINERS["proxy"]["volumeMounts"]}
    assert CONTAINERS["proxy"]["args"] == ["serve", "--config", f"{mounts['config']}/{name}"]
    ports = {port["name"]: port["containerPort"] for port in CONTAINERS["proxy"]["ports"]}
    assert config.listen == (f"0.0.0.0:{ports['clients']}",)
    assert config.security.admin_listen == (f"0.0.0.0:{ports['admin']}",)
    env = {item["name"]: item["value"] for item in CONTAINERS["llama-server"]["env"]}
    assert config.upstream.url == f"http://127.0.0.1:{env['LLAMA_ARG_PORT']}"
    assert env["LLAMA_ARG_HOST"] == "127.0.0.1", "only the proxy may reach the server"
    assert config.security.keys_file == POD["initContainers"][0]["command"][-1]
    assert config.security.keys_file.startswith(mounts["run"] + "/")
    inits = {item["name"]: item for item in POD["initContainers"]}
    assert config.security.admin_token_file == inits["token-copy"]["command"][-1]
    token_arguments = build_parser(inits["token"]["args"]).parse_args(inits["token"]["args"])
    assert token_arguments.keep and str(token_arguments.file) == inits["token-copy"]["command"][-2]
    # Blocks, slot files and the token are on the volume.
    assert config.snapshots.directory == inits["folders"]["command"][-1]
    assert CONTAINERS["llama-server"]["args"] == ["--slot-save-path", config.snapshots.directory]
    on_volume = [env["LLAMA_ARG_EVOKE_DISK"], config.snapshots.directory, str(token_arguments.file)]
    assert all(path.startswith(mounts["data"] + "/") for path in on_volume)
    assert env["LLAMA_ARG_KV_EVICTION"] == "1" and config.policy.budget == "auto"


def test_probes_use_existing_paths_and_stopping_leaves_time_to_drain(tmp_path: Path) -> None:
    served = {route.path for route in admin.routes(None)}  # type: ignore[arg-type]
    proxy = CONTAINERS["proxy"]
    assert proxy["readinessProbe"]["httpGet"]["path"] == "/evoke/ready"
    for probe in ("readinessProbe", "livenessProbe"):
        assert proxy[probe]["httpGet"]["path"] in served
    name, text = next(iter(_part("ConfigMap")["data"].items()))
    (tmp_path / name).write_text(text)
    drain = load(tmp_path / name, {}).limits.drain_timeout_s
    waits = {
        key: int(item["lifecycle"]["preStop"]["exec"]["command"][1])
        for key, item in CONTAINERS.items()
    }
    assert waits["proxy"] + drain < waits["llama-server"] < POD["terminationGracePeriodSeconds"]


def test_containers_run_without_root_on_read_only_file_systems() -> None:
    assert POD["securityContext"]["runAsNonRoot"] and POD["securityContext"]["runAsUser"] > 0
    for container in (*POD["containers"], *POD["initContainers"]):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
    named = {volume["name"] for volume in POD["volumes"]} | {"data"}
    used = {mount["name"] for item in CONTAINERS.values() for mount in item["volumeMounts"]}
    assert used <= named
