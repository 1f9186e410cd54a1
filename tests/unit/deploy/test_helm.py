"""The Helm chart, rendered by Helm's own code; deploy/kubernetes/evoke.yaml is its default."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from evoke_proxy import __version__

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())
CHART = ROOT / "deploy/helm/evoke-proxy"


def _render(name: str, values: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """The rendered objects by kind."""
    chart = pytest.importorskip("helm_python.chart", reason="needs the extra [docker]")
    files = chart.Chart.load(CHART).render(values, name=name)
    parts = [
        part
        for file, text in files.items()
        if file.endswith(".yaml")
        for part in yaml.safe_load_all(text)
    ]
    return {part["kind"]: part for part in parts}


def test_the_manifest_is_the_chart_with_its_default_values() -> None:
    manifest = yaml.safe_load_all((ROOT / "deploy/kubernetes/evoke.yaml").read_text("utf-8"))
    assert {part["kind"]: part for part in manifest} == _render("evoke")


def test_helm_lint_finds_nothing() -> None:
    chart = pytest.importorskip("helm_python.chart", reason="needs the extra [docker]")
    report = chart.lint(CHART, strict=True)
    assert not report["errors"]
    assert [item["error"] for item in report["messages"]] == ["icon is recommended"]
    described = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert described["version"] == described["appVersion"] == __version__


def test_values_reach_their_places_and_the_result_is_valid(tmp_path: Path) -> None:
    values = {
        "replicas": 3,
        "model": {"claim": "weights", "file": "big.gguf"},
        "images": {"proxy": "a/b:1", "llamaServer": "a/c:1"},
        "cells": 131072,
        "blocks": {"ramMiB": 65536, "diskMiB": 2000000},
        "storage": {"size": "3Ti", "className": "fast"},
        "resources": {"llamaServer": {"limits": {"nvidia.com/gpu": 1}}},
    }
    parts = _render("other", values)
    spec = parts["StatefulSet"]["spec"]
    pod = spec["template"]["spec"]
    containers = {item["name"]: item for item in pod["containers"]}
    env = {item["name"]: item["value"] for item in containers["llama-server"]["env"]}
    assert (spec["replicas"], spec["serviceName"]) == (3, "other")
    assert env["LLAMA_ARG_MODEL"] == "/models/big.gguf" and env["LLAMA_ARG_CTX_SIZE"] == "131072"
    assert env["LLAMA_ARG_EVOKE_DISK"] == "/data/blocks:2000000"
    assert containers["llama-server"]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    images = set(re.findall(r"image: (\S+)", yaml.safe_dump(pod)))
    assert images == {"a/b:1", "a/c:1"}
    assert "evoke-0" not in yaml.safe_dump_all(parts.values())
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(yaml.safe_dump_all(parts.values()), "utf-8")
    tool = Path(sys.executable).with_name("kubernetes-validate")
    if tool.exists():
        done = subprocess.run([tool, "--strict", str(rendered)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", [{"replica": 1}, {"cells": "many"}, {"model": {"claim": ""}}])
def test_values_that_do_not_exist_or_have_another_type_are_refused(values: dict[str, Any]) -> None:
    chart = pytest.importorskip("helm_python.chart", reason="needs the extra [docker]")
    with pytest.raises(Exception, match=r"(?i)additional|integer|length|schema"):
        chart.Chart.load(CHART).validate_schema(values)
