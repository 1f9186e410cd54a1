"""Metrics, health and readiness, with llama-server idle, slow or unresponsive."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import time
from pathlib import Path

import pytest
from conversation import FILLER, ChatClient
from fake_upstream import Exchange, fake_upstream
from harness import RunningProxy, ask, llama_server, proxy, server_binary

from evoke_proxy.engine.admin import exposition

JSON = {"Content-Type": "application/json"}
CHAT = b'{"messages":[{"role":"user","content":"hi"}]}'
BUDGET, HANG_S = 320, 60.0
# Metrics that the dashboard uses.
DOCUMENTED = """
evoke_blocks_evicted_total evoke_blocks_recovered_total evoke_tokens_total evoke_resident_tokens
evoke_plan_seconds_bucket evoke_ttft_seconds_bucket evoke_bypass_total evoke_budget_breach_total
evoke_upstream_errors_total evoke_requests_total evoke_sessions evoke_build_info
""".split()


async def _hang(exchange: Exchange) -> None:
    await asyncio.sleep(HANG_S)


def test_every_documented_metric_is_exported(patched_proxy: RunningProxy) -> None:
    client = ChatClient(patched_proxy.port, "m", {"evoke_budget": BUDGET})
    for number in range(4):
        client.say(f"Turn {number}. {FILLER}")
    client.say("Not managed.", evoke=False)
    patched_proxy.gateway.metrics.upstream_errors.labels(kind="upstream_timeout").inc()
    text = ask(patched_proxy.port, "GET", "/metrics").body.decode()
    of_server, of_proxy = text.split("# HELP evoke_", 1)
    assert "llamacpp:prompt_tokens_total" in of_server and "llamacpp:" not in of_proxy
    names = set(re.findall(r"^(evoke_\w+)", text, re.MULTILINE))
    assert [name for name in DOCUMENTED if name not in names] == []
    kinds = re.findall(r'^evoke_tokens_total\{kind="(\w+)"\} (\d+)', text, re.MULTILINE)
    assert sorted(kind for kind, _ in kinds) == sorted(
        ["decoded", "recovered", "resident_before", "omitted"]
    )
    assert re.search(r'^evoke_bypass_total\{reason="disabled"\} 1', text, re.MULTILINE)
    # No label value is a session, a user or text of a prompt.
    values = re.findall(r'="([^"]*)"', text)
    assert values and not [value for value in values if "Turn" in value or value == "m"]


def test_every_sample_has_a_type(patched_proxy: RunningProxy) -> None:
    text = ask(patched_proxy.port, "GET", "/metrics").body.decode()
    typed = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    for name in re.findall(r"^([a-z_:]+)[{ ]", text, re.MULTILINE):
        base = re.sub(r"_(bucket|sum|count|total|created)$", "", name)
        assert {name, base, f"{base}_total"} & typed, name


def _samples(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("evoke_")]
    return {name: float(value) for name, value in lines}


def test_metrics_of_host_memory_and_disk_are_those_of_the_server(tmp_path: Path) -> None:
    """1 MiB of host memory holds about 500 tokens of the model; older copies move to disk."""
    options = ("-np", "1", "-c", "1024", "--ctx-logical", "8192", "--evoke-ram", "1")
    options += ("--evoke-disk", f"{tmp_path / 'blocks'}:8")
    with (
        llama_server(server_binary(patched=True), *options) as port,
        proxy(port, policy__budget=BUDGET) as running,
    ):
        client = ChatClient(running.port, "m")
        client.say("My favorite number is 68285.")
        for number in range(8):
            client.say(f"Turn {number}. {FILLER}")
        client.say("What is my favorite number?")
        running.wait_for_background()
        metrics = _samples(ask(running.port, "GET", "/metrics").body.decode())
        state = json.loads(ask(port, "GET", "/slots/0/blocks").body)
    server = '{server=""}'
    assert metrics[f"evoke_ram_used_bytes{server}"] == state["ram"]["used"] > 0
    assert metrics[f"evoke_ram_budget_bytes{server}"] == 1 << 20
    assert metrics[f"evoke_ram_dropped_total{server}"] == state["ram"]["n_dropped"]
    assert metrics[f"evoke_disk_used_bytes{server}"] == state["disk"]["used"] > 0
    assert metrics[f"evoke_disk_budget_bytes{server}"] == 8 << 20
    assert metrics[f"evoke_disk_files{server}"] == state["disk"]["n_files"] > 0
    assert metrics[f"evoke_budget_in_force{server}"] == 1
    evicted = [metrics[f'evoke_evictions_total{{reason="{x}"}}'] for x in ("plan", "decode")]
    assert sum(evicted) == metrics["evoke_blocks_evicted_total"] > 0
    assert metrics['evoke_recoveries_total{reason="question"}'] > 0
    assert metrics['evoke_recoveries_total{reason="slot"}'] == 0


def test_copies_dropped_because_host_memory_is_full_are_counted() -> None:
    options = ("-np", "1", "-c", "1024", "--ctx-logical", "8192", "--evoke-ram", "1")
    with (
        llama_server(server_binary(patched=True), *options) as port,
        proxy(port, policy__budget=BUDGET) as running,
    ):
        client = ChatClient(running.port, "m")
        for number in range(12):
            client.say(f"Turn {number}. {FILLER}")
        running.wait_for_background()
        metrics = _samples(ask(running.port, "GET", "/metrics").body.decode())
    assert metrics['evoke_ram_dropped_total{server=""}'] > 0
    assert metrics['evoke_disk_used_bytes{server=""}'] == 0


def test_a_metric_of_each_server_states_whether_its_budget_is_in_force(stock_port: int) -> None:
    with proxy(stock_port, policy__budget=3000) as running:
        metrics = _samples(ask(running.port, "GET", "/metrics").body.decode())
    assert metrics['evoke_budget_in_force{server=""}'] == 0


def test_a_slow_scrape_of_the_server_omits_only_its_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exposition, "_SCRAPE_S", 0.2)
    with fake_upstream(_hang) as fake, proxy(fake.port) as running:
        began = time.monotonic()
        answer = ask(running.port, "GET", "/metrics")
    assert time.monotonic() - began < HANG_S / 2
    assert answer.body.startswith(b"# llama-server has no metrics now: it is too slow\n")
    assert b"evoke_build_info" in answer.body


def test_health_is_answered_while_requests_wait() -> None:
    with fake_upstream(_hang, patched=True) as fake, proxy(fake.port) as running:
        waiting = [threading.Thread(target=_time_out, args=(running.port,)) for _ in range(8)]
        for thread in waiting:
            thread.start()
        for _ in range(20):
            began = time.monotonic()
            assert ask(running.port, "GET", "/evoke/health").status == 200
            assert time.monotonic() - began < HANG_S / 2
        for thread in waiting:
            thread.join()


def _time_out(port: int) -> None:
    """Send a request, and give up because it is not answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=0.5)
    connection.request("POST", "/v1/chat/completions", CHAT, JSON)
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()


def test_a_stopping_proxy_is_not_ready_and_names_the_failed_check(
    stock_proxy: RunningProxy,
) -> None:
    stock_proxy.gateway.shared.draining = True
    try:
        answer = ask(stock_proxy.port, "GET", "/evoke/ready")
        health = ask(stock_proxy.port, "GET", "/evoke/health")
    finally:
        stock_proxy.gateway.shared.draining = False
    ready = json.loads(answer.body)
    assert (answer.status, ready["status"], ready["failed"]) == (503, "not_ready", ["accepting"])
    assert ready["checks"]["upstream"]["ok"] is True
    assert health.status == 200
