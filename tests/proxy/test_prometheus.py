"""A real Prometheus scrapes a proxy and evaluates every alert rule and dashboard query."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask, proxy

from evoke_proxy.demo.processes import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool: apt-get install prometheus",
)
# What label values may look like: no user, session or arbitrary path.
_LABEL_VALUE = re.compile(r"[a-z0-9_/{}.+-]{0,48}|\+Inf|[0-9.]+[a-z0-9.+]*")


@pytest.fixture(scope="module")
def used_proxy(patched_port: int) -> Iterator[RunningProxy]:
    """A proxy that has answered several turns."""
    with proxy(patched_port, policy__budget=320) as running:
        client = ChatClient(running.port, "a-session-of-somebody")
        for number in range(4):
            client.say(f"Turn {number}. {FILLER}")
        ask(running.port, "GET", "/v1/no/such/path")
        running.wait_until_idle()
        yield running


@pytest.fixture(scope="module")
def prometheus(used_proxy: RunningProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a Prometheus with the shipped configuration, which scrapes every second."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{used_proxy.port}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "prometheus/alerts.yml", folder)
    command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log:
        with subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process:
            try:
                _await_scrape(port, folder / "log")
                yield port
            finally:
                process.terminate()


def _await_scrape(port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            # Two scrapes for rates, and one more for an evaluation of the rules after them.
            if _query(port, 'count_over_time(up{job="evoke-proxy"}[1m]) > 2'):
                return
        except (OSError, AssertionError):
            pass
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


def _query(port: int, expression: str) -> list[dict[str, Any]]:
    query = urllib.parse.urlencode({"query": expression})
    answer = ask(port, "GET", f"/api/v1/query?{query}")
    assert answer.status == 200, (expression, answer.body)
    result: list[dict[str, Any]] = json.loads(answer.body)["data"]["result"]
    return result


def _promtool(*arguments: str, stdin: bytes = b"") -> str:
    completed = subprocess.run(
        ["promtool", *arguments], input=stdin, capture_output=True, cwd=DEPLOY / "prometheus"
    )
    assert completed.returncode == 0, (completed.stdout + completed.stderr).decode()
    return (completed.stdout + completed.stderr).decode()


def test_promtool_accepts_the_configuration_and_every_alert_has_a_test() -> None:
    _promtool("check", "config", "prometheus.yml")
    _promtool("check", "rules", "alerts.yml")
    _promtool("test", "rules", "alerts_test.yml")
    tested = (DEPLOY / "prometheus/alerts_test.yml").read_text()
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    untested = [rule["alert"] for rule in group["rules"] if f"{rule['alert']}\n" not in tested]
    assert untested == []


def test_metric_names_and_labels_follow_the_conventions(used_proxy: RunningProxy) -> None:
    text = used_proxy.gateway.metrics.exposition()
    assert _promtool("check", "metrics", stdin=text).strip() == ""
    for name, value in re.findall(r'[{,](\w+)="([^"]*)"', text.decode()):
        assert name in ("version", "implementation") or _LABEL_VALUE.fullmatch(value), (name, value)
    assert b"somebody" not in text and b"such" not in text
    for family in used_proxy.gateway.metrics.registry.collect():
        # Nothing should take longer than ten minutes, so the last finite bucket covers that.
        is_time = family.name.endswith("_seconds")
        if family.type == "histogram" and family.samples and is_time:
            edges = {float(s.labels["le"]) for s in family.samples if "le" in s.labels}
            assert sorted(edges)[-2] >= 600, family.name


def test_a_prometheus_server_scrapes_every_metric(
    used_proxy: RunningProxy, prometheus: int
) -> None:
    (up,) = _query(prometheus, 'up{job="evoke-proxy"}')
    assert up["value"][1] == "1"
    (info,) = _query(prometheus, "evoke_build_info")
    assert set(info["metric"]) == {"__name__", "instance", "job", "version"}
    accounting = {
        row["metric"]["kind"]: float(row["value"][1])
        for row in _query(prometheus, "evoke_tokens_total")
    }
    kinds = ("decoded", "recovered", "resident_before", "omitted")
    assert accounting == {
        kind: used_proxy.metric("evoke_tokens_total", kind=kind) for kind in kinds
    }
    assert _query(prometheus, "llamacpp:prompt_tokens_total")
    assert _query(prometheus, "evoke_upstream_up == 1")


def test_every_dashboard_query_returns_data(used_proxy: RunningProxy, prometheus: int) -> None:
    board = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    text = ask(used_proxy.port, "GET", "/metrics").body.decode()
    exported = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    expressions += [rule["expr"] for rule in rules]
    assert len(expressions) > 30
    for expression in expressions:
        for name in re.findall(r"\b((?:evoke_|llamacpp:|process_)\w+)", expression):
            assert {name, name.removesuffix("_bucket")} & exported, name
        query = expression.replace("$__rate_interval", "1m").replace("$instance", ".+")
        result = _query(prometheus, query)
        # Metrics of failures, or of several servers, have no series here.
        assert result or re.search(
            r"errors|degraded|bypass|corrupt|saves|restores|diverg|>|==|dropped|_server_", query
        ), query


def test_alert_rules_are_evaluated_and_none_fires(prometheus: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        (group,) = json.loads(ask(prometheus, "GET", "/api/v1/rules").body)["data"]["groups"]
        states = {rule["name"]: (rule["health"], rule["state"]) for rule in group["rules"]}
        if all(health != "unknown" for health, _ in states.values()):
            break
        assert time.monotonic() < deadline, states
        time.sleep(0.2)
    assert set(states.values()) == {("ok", "inactive")}, states
