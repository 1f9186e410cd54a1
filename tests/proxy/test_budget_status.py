"""Readiness and the log report a budget that is not in force, on real servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import RunningProxy, ask, llama_server, pool, proxy, server_binary, until, unused_port


@pytest.fixture(scope="module")
def small_port() -> Iterator[int]:
    """A patched server whose context is its 1,024 cells."""
    options = ("-np", "1", "-c", "1024", "--evoke-ram", "16")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


@pytest.fixture(scope="module")
def long_port() -> Iterator[int]:
    """A patched server whose context is four times its 1,024 cells."""
    options = ("-np", "1", "-c", "1024", "--evoke-ram", "16", "--ctx-logical", "4096")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


def ready(running: RunningProxy) -> dict[str, Any]:
    answer = ask(running.port, "GET", "/evoke/ready")
    assert answer.status == 200
    body: dict[str, Any] = json.loads(answer.body)
    return body


def test_a_budget_that_evicts_is_ready(long_port: int) -> None:
    with proxy(long_port, policy__budget=700) as running:
        status = ready(running)
    assert (status["status"], status["reasons"]) == ("ready", [])
    assert "sessions keep 700 tokens of up to 4096" in status["checks"]["budget"]["detail"]


def test_a_budget_beyond_the_cells_is_degraded_with_the_fix(long_port: int) -> None:
    with proxy(long_port, policy__budget=3000) as running:
        status = ready(running)
    assert (status["status"], status["reasons"]) == ("degraded", ["budget:exceeds_cells"])
    assert "--budget) to 768 or start" in status["checks"]["budget"]["detail"]


def test_a_budget_as_large_as_the_context_is_degraded(small_port: int) -> None:
    with proxy(small_port, policy__budget=1024) as running:
        status = ready(running)
    assert (status["status"], status["reasons"]) == ("degraded", ["budget:exceeds_context"])
    assert "--ctx-logical 4096" in status["checks"]["budget"]["detail"]


def test_a_budget_at_a_stock_server_is_degraded(
    stock_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with proxy(stock_port, policy__budget=3000) as running:
        status = ready(running)
    assert (status["status"], status["reasons"]) == ("degraded", ["budget:no_block_calls"])
    (logged,) = [record for record in caplog.records if "is not in force" in record.getMessage()]
    assert logged.levelname == "WARNING"
    assert "--evoke-ram" in logged.getMessage()


def test_a_reload_that_makes_the_budget_too_large_warns(
    long_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with proxy(long_port, policy__budget=700) as running:
        config = running.gateway.config
        larger = replace(config, policy=replace(config.policy, budget=3000))
        running.loop.call_soon_threadsafe(running.gateway.adjust, larger)
        until(lambda: ready(running)["status"] == "degraded")
    (logged,) = [
        record for record in caplog.records if "is more than the 1024 cells" in record.getMessage()
    ]
    assert logged.levelname == "WARNING"
    assert "--budget) to 768" in logged.getMessage()


def test_each_server_of_a_pool_has_its_own_reason(long_port: int, stock_port: int) -> None:
    with pool({"a": long_port, "b": stock_port}, policy__budget=700) as running:
        status = ready(running)
    assert (status["status"], status["reasons"]) == ("degraded", ["budget_b:no_block_calls"])


def test_a_logical_context_without_a_budget_does_not_claim_that_nothing_is_evicted(
    long_port: int,
) -> None:
    with proxy(long_port, policy__budget="off") as running:
        status = ready(running)
    detail = status["checks"]["budget"]["detail"]
    assert "nothing is evicted" not in detail
    assert "llama-server evicts the oldest blocks itself" in detail and "--budget" in detail


def check_config(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "evoke_proxy", "check-config", *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return completed.stdout.splitlines()


def test_check_config_compares_the_budget_with_the_servers(
    small_port: int, long_port: int, stock_port: int
) -> None:
    ports = {"small": small_port, "long": long_port, "stock": stock_port, "none": unused_port()}
    upstreams = [f"--upstream={name}=http://127.0.0.1:{port}" for name, port in ports.items()]
    lines = check_config("--budget", "700", "--listen", "127.0.0.1:0", *upstreams)
    servers = [line for line in lines if line.startswith("server ")]
    assert "small: patched, 1 slot of 1024 cells, context 1024 tokens" in servers[0]
    assert "long: patched, 1 slot of 1024 cells, context 4096 tokens" in servers[1]
    assert servers[3].endswith("whether it can keep the budget is unknown")
    (warning,) = [line for line in lines if line.startswith("warning ")]
    assert "stock: the budget of 700 tokens is not in force" in warning and "--evoke-ram" in warning
    assert lines[-1] == "the configuration is valid, with 1 warning"
    lines = check_config("--budget", "1500", *upstreams)
    assert sum(line.startswith("warning ") for line in lines) == 3
    (stock,) = [line for line in check_config(*upstreams) if " stock: " in line]
    assert "nothing is evicted" in stock and "build-server" in stock and "--evoke-ram" in stock
    lines = check_config("--budget", "1500", *upstreams, "--offline")
    assert lines[-1] == "the configuration is valid"


@pytest.fixture(scope="module")
def locked_port() -> Iterator[int]:
    """A patched server that needs a key."""
    options = ("-np", "1", "-c", "1024", "--evoke-ram", "16", "--api-key", "right")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


@pytest.mark.parametrize(("key", "sent"), [("", "no key"), ("wrong", "upstream.api_key")])
def test_a_server_that_refuses_the_own_calls_is_reported_with_the_fix(
    key: str, sent: str, locked_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with proxy(locked_port, upstream__api_key=key) as running:
        status = ready(running)
        facts = json.loads(ask(running.port, "GET", "/evoke/overview").body)
    assert (status["status"], status["reasons"]) == ("degraded", ["upstream:api_key"])
    (problem,) = facts["problems"]
    assert problem["reason"] == "api_key"
    (logged,) = {record.getMessage() for record in caplog.records if "401" in record.getMessage()}
    for text in (status["checks"]["upstream"]["detail"], f"{problem['problem']}: {problem['fix']}"):
        assert text == logged and sent in text and "EVOKE_UPSTREAM_API_KEY" in text


def test_a_client_with_a_key_does_not_hide_that_own_calls_are_refused(locked_port: int) -> None:
    body = b'{"messages":[{"role":"user","content":"hello"}],"max_tokens":2}'
    with proxy(locked_port) as running:
        headers = {"Authorization": "Bearer right"}
        assert ask(running.port, "POST", "/v1/chat/completions", body, headers).status == 200
        assert ready(running)["reasons"] == ["upstream:api_key"]
    with proxy(locked_port, upstream__api_key="right") as running:
        assert ready(running)["status"] == "ready"


def test_each_server_of_a_pool_that_refuses_the_own_calls_is_named(
    locked_port: int, small_port: int
) -> None:
    with pool({"a": locked_port, "b": small_port}) as running:
        assert ready(running)["reasons"] == ["upstream_a:api_key"]


def test_check_config_and_doctor_name_the_missing_key(locked_port: int) -> None:
    upstream = ["--upstream", f"http://127.0.0.1:{locked_port}"]
    lines = check_config(*upstream)
    (warning,) = [line for line in lines if line.startswith("warning ")]
    command = [sys.executable, "-m", "evoke_proxy", "doctor", *upstream]
    doctor = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert doctor.returncode == 2
    for text in (warning, doctor.stderr):
        assert "401" in text and "EVOKE_UPSTREAM_API_KEY" in text


def test_clients_get_the_reason_code_without_details(small_port: int, tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4, "utf-8")
    token.chmod(0o600)
    secured = {"security__admin_token_file": str(token)}
    with proxy(small_port, policy__budget=1024, **secured) as running:
        status = json.loads(ask(running.port, "GET", "/evoke/ready").body)
    assert (status["status"], status["reasons"]) == ("degraded", ["budget:exceeds_context"])
    assert "checks" not in status


def test_a_disk_tier_that_cannot_be_used_is_reported_with_the_fix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("x")
    folder = str(tmp_path / "file/blocks")
    options = ("-np", "1", "-c", "1024", "--evoke-ram", "16", "--evoke-disk", folder)
    with llama_server(server_binary(patched=True), *options) as port:
        with proxy(port) as running:
            status = ready(running)
            facts = json.loads(ask(running.port, "GET", "/evoke/overview").body)
            metrics = ask(running.port, "GET", "/metrics").body
        with pool({"a": port}) as running:
            assert ready(running)["reasons"] == ["disk_a:unusable"]
        (warning,) = [
            line
            for line in check_config("--upstream", f"http://127.0.0.1:{port}")
            if line.startswith("warning ")
        ]
    assert (status["status"], status["reasons"]) == ("degraded", ["disk:unusable"])
    (problem,) = facts["problems"]
    assert problem["reason"] == "disk_unusable" and facts["disk"] is None
    assert b'evoke_disk_unusable{server=""} 1.0' in metrics
    text = f"{problem['problem']}: {problem['fix']}"
    assert folder in text and "mode 0700" in text and "restart llama-server" in text
    assert status["checks"]["disk"]["detail"] == text and text in warning
    logged = [record for record in caplog.records if text in record.getMessage()]
    assert logged and all(record.levelname == "WARNING" for record in logged)


def test_a_server_with_or_without_a_disk_tier_is_no_problem(long_port: int, tmp_path: Path) -> None:
    options = ("-np", "1", "-c", "1024", "--evoke-ram", "16", "--evoke-disk", str(tmp_path / "a"))
    with llama_server(server_binary(patched=True), *options) as port:
        for used in (port, long_port):
            with proxy(used) as running:
                assert ready(running)["status"] == "ready"
                assert b'evoke_disk_unusable{server=""} 0.0' in (
                    ask(running.port, "GET", "/metrics").body
                )
