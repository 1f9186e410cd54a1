"""Defaults that are wanted and not yet implemented: each test is an expected failure.

They are strict: as soon as one passes, it fails the run until its mark is removed. The reason of a
mark says in plain words what is missing.
"""

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
FEW = 40


def missing(behaviour: str) -> pytest.MarkDecorator:
    """Mark a test of a behaviour that is wanted and not there."""
    return pytest.mark.xfail(strict=True, reason=f"not there yet: {behaviour}")


def conversation_with_fact(port: int, turns: int, **fields: Any) -> stack.Chat:
    """A conversation whose first message is a fact."""
    chat = stack.Chat("wanted", fields, [{"role": "system", "content": "You are helpful."}])
    for text in [FACT, *(f"Turn {number}. {FILLER}" for number in range(turns))]:
        chat.say(port, text)
    return chat


def exposition(proxy: stack.Process) -> str:
    """What a proxy exports."""
    return stack.request(proxy.admin_port, "GET", "/metrics").body.decode()


def check_config(tmp_path: Path, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The result of `evoke-proxy check-config`."""
    file = tmp_path / "evoke.yaml"
    file.write_text(text, encoding="utf-8")
    return stack.command_line("check-config", "--config", str(file), **env)


@contextlib.contextmanager
def up_process(*options: str) -> Iterator[stack.Process]:
    """`evoke-proxy up` with the bundled model, once it listens."""
    command = [sys.executable, "-m", "evoke_proxy", "up", "-m", str(stack.MODEL)]
    command += ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *options]
    with stack.listening(command, None, stack.environment()) as proxy:
        yield proxy


# One command


def test_up_answers_a_chat_four_times_the_cells() -> None:
    with up_process("--", "-c", "1024") as proxy:
        chat = conversation_with_fact(proxy.port, 30)
        reply = chat.say(proxy.port, QUESTION)
        assert VALUE in stack.text_of(reply)
        assert reply["usage"]["prompt_tokens"] > 4 * 1024
        shown = exposition(proxy)
        for name in ("evoke_blocks_evicted_total", "evoke_blocks_recovered_total"):
            assert stack.sample(shown, name) > 0


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGKILL"])
def test_up_leaves_no_process(signal_name: str) -> None:
    with up_process() as proxy:
        mark = f"--port\0{stack.served_port(proxy.output)}"
        proxy.stop() if signal_name == "SIGTERM" else proxy.kill()
        assert stack.eventually(lambda: not stack.processes_with(mark), 20)


def test_plan_prints_the_table_and_starts_nothing() -> None:
    done = stack.command_line(
        *("plan", str(stack.MODEL), "--vram", "16GiB", "--context", "131072", "--sessions", "4")
    )
    assert done.returncode == 0, done.stderr
    for word in ("cells", "budget", "host memory", "disk", "--ctx-logical", "llama-server"):
        assert word in done.stdout


# The budget


def test_a_logical_context_without_a_budget_recalls_what_no_longer_fits() -> None:
    options = ("-c", "768", "--ctx-logical", "6144", "-np", "1", "--evoke-ram", "64")
    with (
        stack.server(*options, patched=True) as server,
        stack.proxy(server.port) as proxy,
    ):
        chat = conversation_with_fact(proxy.port, 30)
        reply = chat.say(proxy.port, QUESTION)
        assert VALUE in stack.text_of(reply)
        assert stack.sample(exposition(proxy), "evoke_blocks_recovered_total") > 0


def test_the_default_budget_is_auto(tmp_path: Path) -> None:
    example = yaml.safe_load((stack.ROOT / "config/evoke.example.yaml").read_text("utf-8"))
    assert example["policy"]["budget"] == "auto"
    done = check_config(tmp_path, "policy: {budget: auto}")
    assert done.returncode == 0, done.stderr


def test_a_start_that_cannot_evict_names_the_option_that_would_help() -> None:
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
        # The first tokens of a prompt always stay: these are of the system prompt.
        chat = stack.Chat("words", {}, [{"role": "system", "content": FILLER}])
        chat.say(proxy.port, "The key is hidden under the geranium.")
        for number in range(8):
            chat.say(proxy.port, f"Turn {number}. {FILLER}")
        reply = chat.say(proxy.port, "How can I get inside when the door is locked?")
        first = _span_of_message(proxy, "words", 1)
        assert stack.accounting(reply)["recovered"] > 0
        assert first and all(block["state"] == "resident" for block in first)


def _span_of_message(proxy: stack.Process, session: str, message: int) -> list[stack.Json]:
    shown = stack.request(proxy.admin_port, "GET", "/evoke/sessions").json["sessions"]
    id = next(each["id"] for each in shown if each["name"] == session)
    blocks = stack.request(proxy.admin_port, "GET", f"/evoke/sessions/{id}").json["blocks"]
    return [block for block in blocks if block.get("message") == message]


def test_the_command_line_fetches_an_embedder() -> None:
    done = stack.command_line("embedder", "fetch", "--help")
    assert done.returncode == 0, done.stderr
    assert "bge-small-en-v1.5" in done.stdout and "--mirror" in done.stdout


# Restarts


def _go_on_after(folder: Path, killed: str) -> stack.Json:
    """The token accounting of the turn after one or both were killed."""
    port = stack.free_port()
    options = ("-c", "4096", "-np", "1", "--evoke-ram", "64", "--evoke-disk", f"{folder}/blocks")
    with contextlib.ExitStack() as ends:
        server = ends.enter_context(stack.server(*options, patched=True, port=port))
        proxy = ends.enter_context(stack.proxy(port, policy__budget=448))
        chat = conversation_with_fact(proxy.port, 7)
        # What is done between two turns of a person is done: copies, files, notes.
        time.sleep(2)
        if killed in ("server", "both"):
            server.kill()
            server = ends.enter_context(stack.server(*options, patched=True, port=port))
        if killed in ("proxy", "both"):
            proxy.kill()
            proxy = ends.enter_context(stack.proxy(port, policy__budget=448))
        reply = chat.say(proxy.port, QUESTION)
        assert VALUE in stack.text_of(reply)
        return stack.accounting(reply)


def test_a_session_continues_after_a_killed_proxy(tmp_path: Path) -> None:
    assert _go_on_after(tmp_path, "proxy")["decoded"] <= FEW


def test_a_session_continues_after_a_killed_server_with_a_disk(tmp_path: Path) -> None:
    assert _go_on_after(tmp_path, "server")["decoded"] <= FEW


def test_a_session_continues_after_a_killed_server_and_proxy(tmp_path: Path) -> None:
    assert _go_on_after(tmp_path, "both")["decoded"] <= FEW


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
    done = stack.command_line("build-server", "--help")
    for option in ("--cuda", "--vulkan", "--hip", "--metal", "--cmake-arg"):
        assert option in done.stdout


# No silent misconfiguration


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


def test_a_misspelt_variable_is_refused(tmp_path: Path) -> None:
    done = check_config(tmp_path, EVOKE_POLICY_BUDJET="3000")
    assert done.returncode == 2
    assert "EVOKE_POLICY_BUDJET" in done.stderr and "EVOKE_POLICY_BUDGET" in done.stderr


def test_an_upstream_with_a_path_of_the_api_is_refused(tmp_path: Path) -> None:
    done = check_config(tmp_path, "upstream: {url: 'http://127.0.0.1:8080/v1'}")
    assert done.returncode == 2
    assert "upstream.url" in done.stderr and "/v1" in done.stderr


def test_an_open_address_without_keys_is_warned_about(tmp_path: Path) -> None:
    done = check_config(tmp_path, "listen: ['0.0.0.0:8090']")
    assert done.returncode == 0, done.stderr
    assert "security.keys_file" in done.stdout + done.stderr


def test_a_taken_port_names_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = stack.command_line("serve", "--listen", address, "--admin-listen", "127.0.0.1:0")
        assert done.returncode == 1
        assert address in done.stderr and "Errno" not in done.stderr
        assert str(os.getpid()) in done.stderr


def test_doctor_tells_what_to_change_on_a_patched_server() -> None:
    with stack.server("-c", "2048", "-np", "1", patched=True) as server:
        done = stack.command_line("doctor", "--upstream", f"http://127.0.0.1:{server.port}")
        for option in ("--evoke-ram", "--ctx-logical", "--evoke-disk"):
            assert option in done.stdout


# What operators see


def test_metrics_show_host_memory_and_disk() -> None:
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
