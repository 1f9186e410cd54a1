"""What works by default, as a user sees it: command line, budget, embedder, restarts, warnings."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stack
import yaml

FILLER = "the quick brown fox jumps over the lazy dog. " * 6
FACT, QUESTION, VALUE = "My favorite number is 68285.", "What is my favorite number?", "68285"
KINDS = ("decoded", "recovered", "resident_before", "omitted")
# More tokens than a question with its template, fewer than a turn.
MAX_NEW_TOKENS = 40


def conversation_with_fact(port: int, turns: int, **fields: Any) -> stack.Chat:
    """Run a conversation of `turns` turns after a message with a fact."""
    chat = stack.Chat("wanted", fields, [{"role": "system", "content": "You are helpful."}])
    for text in [FACT, *(f"Turn {number}. {FILLER}" for number in range(turns))]:
        chat.say(port, text)
    return chat


def exposition(proxy: stack.Process) -> str:
    """Return the metrics of a proxy."""
    return stack.request(proxy.admin_port, "GET", "/metrics").body.decode()


def check_config(tmp_path: Path, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run `evoke-proxy check-config` with this file and environment."""
    file = tmp_path / "evoke.yaml"
    file.write_text(text, encoding="utf-8")
    return stack.command_line("check-config", "--config", str(file), **env)


@contextlib.contextmanager
def up_process(*options: str) -> Iterator[stack.Process]:
    """Start `evoke-proxy up` with the bundled model; the block begins once it listens."""
    command = [sys.executable, "-m", "evoke_proxy", "up", "-m", str(stack.MODEL)]
    command += ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *options]
    # One thread is best for so small a model.
    environment = stack.environment(LLAMA_ARG_THREADS="1")
    with stack.listening(command, None, environment) as proxy:
        yield proxy


# The command `up`


def test_up_answers_a_chat_four_times_the_cells() -> None:
    with up_process("--", "-c", "1024") as proxy:
        chat = conversation_with_fact(proxy.port, 30)
        reply = chat.say(proxy.port, QUESTION)
        assert VALUE in stack.text_of(reply)
        assert reply["usage"]["prompt_tokens"] > 4 * 1024
        text = exposition(proxy)
        for name in ("evoke_blocks_evicted_total", "evoke_blocks_recovered_total"):
            assert stack.sample(text, name) > 0


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGKILL"])
def test_up_leaves_no_process_behind(signal_name: str) -> None:
    with up_process() as proxy:
        option = f"--port\0{stack.served_port(proxy.output)}"
        proxy.stop() if signal_name == "SIGTERM" else proxy.kill()
        assert stack.eventually(lambda: not stack.processes_with(option), 20)


def test_plan_prints_the_table_and_starts_nothing() -> None:
    completed = stack.command_line(
        *("plan", str(stack.MODEL), "--vram", "16GiB", "--context", "131072", "--sessions", "4")
    )
    assert completed.returncode == 0, completed.stderr
    for word in ("cells", "budget", "host memory", "disk", "--ctx-logical", "llama-server"):
        assert word in completed.stdout


# The budget


def test_with_a_logical_context_an_evicted_fact_is_recalled_without_a_budget_setting() -> None:
    options = ("-c", "768", "--ctx-logical", "6144", "-np", "1", "--evoke-ram", "64")
    with (
        stack.server(*options, patched=True) as server,
        stack.proxy(server.port) as proxy,
    ):
        chat = conversation_with_fact(proxy.port, 30)
        reply = chat.say(proxy.port, QUESTION)
        assert VALUE in stack.text_of(reply)
        assert stack.sample(exposition(proxy), "evoke_blocks_recovered_total") > 0


def test_the_example_configuration_has_the_budget_auto(tmp_path: Path) -> None:
    example = yaml.safe_load((stack.ROOT / "config/evoke.example.yaml").read_text("utf-8"))
    assert example["policy"]["budget"] == "auto"
    completed = check_config(tmp_path, "policy: {budget: auto}")
    assert completed.returncode == 0, completed.stderr


def test_the_start_names_the_missing_option_if_nothing_can_be_evicted() -> None:
    options = ("-c", "2048", "-np", "1", "--evoke-ram", "64")
    with stack.server(*options, patched=True) as server, stack.proxy(server.port) as proxy:
        assert stack.eventually(lambda: "--ctx-logical" in proxy.output, 5)


def test_a_chat_beyond_the_context_gets_an_error_with_advice() -> None:
    options = ("-c", "1024", "-np", "1", "--evoke-ram", "64")
    with stack.server(*options, patched=True) as server, stack.proxy(server.port) as proxy:
        chat = stack.Chat(messages=[{"role": "user", "content": FILLER * 40}])
        answer = chat.post(proxy.port)
        assert answer.status == 400
        assert "--ctx-logical" in answer.body.decode()
        assert "exceed_context_size_error" in answer.body.decode()


# The embedder


def test_questions_and_blocks_get_vectors_without_a_setting() -> None:
    options = ("-c", "4096", "-np", "1", "--evoke-ram", "64")
    with (
        stack.server(*options, patched=True) as server,
        stack.proxy(server.port, policy__budget=320) as proxy,
    ):
        conversation_with_fact(proxy.port, 4)

        def embedded(kind: str) -> float:
            return stack.sample(exposition(proxy), "evoke_embedded_total", kind=kind)

        assert stack.eventually(lambda: embedded("block") > 0 and embedded("question") > 0, 5)


def test_a_paraphrased_question_recovers_the_fact() -> None:
    options = ("-c", "4096", "-np", "1", "--evoke-ram", "64")
    with (
        stack.server(*options, patched=True) as server,
        stack.proxy(server.port, policy__budget=320) as proxy,
    ):
        # The system prompt is long, because the first tokens of a prompt are never evicted.
        chat = stack.Chat("words", {}, [{"role": "system", "content": FILLER}])
        chat.say(proxy.port, "The key is hidden under the geranium.")
        for number in range(8):
            chat.say(proxy.port, f"Turn {number}. {FILLER}")
        reply = chat.say(proxy.port, "How can I get inside when the door is locked?")
        fact_blocks = _blocks_of_message(proxy, "words", 1)
        assert stack.accounting(reply)["recovered"] > 0
        assert fact_blocks and all(block["state"] == "resident" for block in fact_blocks)


def _blocks_of_message(proxy: stack.Process, session: str, message: int) -> list[stack.Json]:
    sessions = stack.request(proxy.admin_port, "GET", "/evoke/sessions").json["sessions"]
    id = next(each["id"] for each in sessions if each["name"] == session)
    blocks = stack.request(proxy.admin_port, "GET", f"/evoke/sessions/{id}").json["blocks"]
    return [block for block in blocks if block.get("message") == message]


def test_the_command_line_can_fetch_an_embedder() -> None:
    completed = stack.command_line("embedder", "fetch", "--help")
    assert completed.returncode == 0, completed.stderr
    assert "bge-small-en-v1.5" in completed.stdout and "--mirror" in completed.stdout


# Restarts


def _accounting_after_kill(folder: Path, killed: str) -> stack.Json:
    """Kill the "server", the "proxy" or "both" after a turn; returns the next turn's accounting."""
    port = stack.free_port()
    options = ("-c", "4096", "-np", "1", "--evoke-ram", "64", "--evoke-disk", f"{folder}/blocks")
    with contextlib.ExitStack() as exits:
        server = exits.enter_context(stack.server(*options, patched=True, port=port))
        proxy = exits.enter_context(stack.proxy(port, policy__budget=448))
        chat = conversation_with_fact(proxy.port, 7)
        time.sleep(2)  # for the background tasks of the last turn
        if killed in ("server", "both"):
            server.kill()
            server = exits.enter_context(stack.server(*options, patched=True, port=port))
        if killed in ("proxy", "both"):
            proxy.kill()
            proxy = exits.enter_context(stack.proxy(port, policy__budget=448))
        reply = chat.say(proxy.port, QUESTION)
        assert VALUE in stack.text_of(reply)
        return stack.accounting(reply)


def test_a_session_continues_after_a_killed_proxy(tmp_path: Path) -> None:
    assert _accounting_after_kill(tmp_path, "proxy")["decoded"] <= MAX_NEW_TOKENS


def test_a_session_continues_after_a_killed_server_with_a_disk(tmp_path: Path) -> None:
    assert _accounting_after_kill(tmp_path, "server")["decoded"] <= MAX_NEW_TOKENS


def test_a_session_continues_after_a_killed_server_and_proxy(tmp_path: Path) -> None:
    assert _accounting_after_kill(tmp_path, "both")["decoded"] <= MAX_NEW_TOKENS


# The patched server


@pytest.mark.skipif(shutil.which("npm") is None, reason="the web UI is built with npm")
def test_the_patched_server_has_the_web_ui() -> None:
    with stack.server("-c", "512", patched=True) as server:
        answer = stack.request(server.port, "GET", "/", headers={"Accept-Encoding": "gzip"})
        assert answer.status == 200 and "text/html" in answer.headers["content-type"]


@pytest.mark.skipif(
    not Path("/usr/include/openssl/ssl.h").is_file(), reason="HTTPS needs libssl-dev"
)
def test_the_patched_server_speaks_https(tmp_path: Path) -> None:
    key, cert, port = tmp_path / "key.pem", tmp_path / "cert.pem", stack.free_port()
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
        + ["-days", "2", "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    command = [str(stack.server_binary(True)), "-m", str(stack.MODEL), "-c", "512"]
    command += ["--port", str(port), "--ssl-key-file", str(key), "--ssl-cert-file", str(cert)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            assert stack.eventually(lambda: _speaks_tls(port, running), 20)
        finally:
            running.kill()


def _speaks_tls(port: int, running: subprocess.Popen[bytes]) -> bool:
    assert running.poll() is None, "the server has ended"
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ConnectionRefusedError):
        plain = socket.create_connection(("127.0.0.1", port), 5)
        with context.wrap_socket(plain) as wrapped:
            return wrapped.version() is not None
    return False


def test_build_server_has_an_option_for_each_backend() -> None:
    completed = stack.command_line("build-server", "--help")
    for option in ("--cuda", "--vulkan", "--hip", "--metal", "--cmake-arg"):
        assert option in completed.stdout


# Configurations that cannot work are refused or reported


def _ready(proxy: stack.Process) -> stack.Json:
    answer: stack.Json = stack.request(proxy.admin_port, "GET", "/evoke/ready").json
    return answer


def test_a_budget_beyond_the_cells_is_degraded() -> None:
    options = ("-c", "2048", "-np", "1", "--evoke-ram", "64")
    with (
        stack.server(*options, patched=True) as server,
        stack.proxy(server.port, policy__budget=8192) as proxy,
    ):
        ready = _ready(proxy)
        assert ready["status"] == "degraded" and ready["reasons"]


def test_a_budget_without_host_memory_is_degraded() -> None:
    with (
        stack.server("-c", "2048", "-np", "1", patched=True) as server,
        stack.proxy(server.port, policy__budget=512) as proxy,
    ):
        ready = _ready(proxy)
        assert ready["status"] == "degraded" and ready["reasons"]
        assert "--evoke-ram" in proxy.output


def test_a_misspelt_environment_variable_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    completed = check_config(tmp_path, EVOKE_POLICY_BUDJET="3000")
    assert completed.returncode == 2
    assert "EVOKE_POLICY_BUDJET" in completed.stderr and "EVOKE_POLICY_BUDGET" in completed.stderr


def test_an_upstream_url_with_an_api_path_is_refused(tmp_path: Path) -> None:
    completed = check_config(tmp_path, "upstream: {url: 'http://127.0.0.1:8080/v1'}")
    assert completed.returncode == 2
    assert "upstream.url" in completed.stderr and "/v1" in completed.stderr


def test_check_config_warns_of_an_address_open_to_other_machines_without_keys(
    tmp_path: Path,
) -> None:
    completed = check_config(tmp_path, "listen: ['0.0.0.0:8090']")
    assert completed.returncode == 0, completed.stderr
    assert "security.keys_file" in completed.stdout + completed.stderr


def test_the_error_for_an_occupied_port_names_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        completed = stack.command_line(
            "serve", "--listen", address, "--admin-listen", "127.0.0.1:0"
        )
        assert completed.returncode == 1
        assert address in completed.stderr and "Errno" not in completed.stderr
        assert str(os.getpid()) in completed.stderr


def test_doctor_names_the_missing_options_of_a_patched_server() -> None:
    with stack.server("-c", "2048", "-np", "1", patched=True) as server:
        completed = stack.command_line("doctor", "--upstream", f"http://127.0.0.1:{server.port}")
        for option in ("--evoke-ram", "--ctx-logical", "--evoke-disk"):
            assert option in completed.stdout


# Metrics


def test_metrics_include_host_memory_and_disk() -> None:
    options = ("-c", "4096", "-np", "1", "--evoke-ram", "64")
    with (
        stack.server(*options, patched=True) as server,
        stack.proxy(server.port, policy__budget=320) as proxy,
    ):
        conversation_with_fact(proxy.port, 4)
        names = {line.split("{")[0].split(" ")[0] for line in exposition(proxy).splitlines()}
        for words in (("ram", "used"), ("ram", "budget"), ("disk", "used")):
            assert any(
                name.startswith("evoke_") and all(word in name for word in words) for name in names
            )


def test_metrics_have_no_created_series() -> None:
    with stack.proxy(stack.free_port()) as proxy:
        assert "evoke_requests" in exposition(proxy)
        assert "_created" not in exposition(proxy)
