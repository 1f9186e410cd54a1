"""Conversations on hybrids and sliding windows begin with the saved state of a common prefix."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask, llama_server, proxy, server_binary, server_counter
from tenant_keys import KEYS, proxy_with_keys

from bench.random_models import SHAPES, ensure
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository

JSON = {"Content-Type": "application/json"}
PATH = "/v1/chat/completions"
# Sends a request of a sub-agent to a port; returns the reply.
AskAgent = Callable[[int, bytes], Mapping[str, Any]]
N_AGENTS = 10
N_OWN = 40  # most tokens of an agent after the common prefix
SYSTEM = "You are a helpful assistant. " + "".join(f"Rule {i}: {FILLER}" for i in range(14))
BRIEFING = "".join(f"Fact {i}: {FILLER}" for i in range(7))
SHAPE_NAMES = ("tiny-gemma", "tiny-jamba", "tiny-lfm2", "tiny-qwen35")
HYBRID = "tiny-qwen35"


@contextmanager
def serve(
    folder: Path, shape: str = HYBRID, n_slots: int = 4, saves: bool = True, port: int = 0
) -> Iterator[int]:
    """Start a patched llama-server; with `saves` it saves slots in `folder`."""
    options = ["-np", str(n_slots), "-no-kvu", "-c", str(4096 * n_slots), "--evoke-ram", "64"]
    options += ["--metrics", *(("--slot-save-path", str(folder)) if saves else ())]
    binary = server_binary(patched=True)
    with llama_server(binary, *options, model=ensure(SHAPES[shape]), port=port) as used:
        yield used


def settings_for(folder: Path) -> Mapping[str, object]:
    """The settings of a proxy with a directory for states, which saves however fast it decodes."""
    return {
        "snapshots__directory": str(folder),
        "snapshots__min_free_mib": 0,
        "snapshots__min_gain": 0.0,
    }


@contextmanager
def deployed(
    folder: Path, shape: str = HYBRID, n_slots: int = 4
) -> Iterator[tuple[RunningProxy, int]]:
    """A proxy with a directory for states, and the port of its llama-server."""
    with serve(folder, shape, n_slots) as port, proxy(port, **settings_for(folder)) as running:
        yield running, port


def agent_body(number: int, system: str = SYSTEM, briefing: str = "", n_tokens: int = 4) -> bytes:
    """The first request of a sub-agent."""
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"{briefing}Task {number}: look at part {number}."},
    ]
    fields = {"evoke_session": f"agent-{number}", "max_tokens": n_tokens}
    body = {"messages": messages, "temperature": 0, "logprobs": True, **fields}
    return json.dumps(body).encode()


def ask_agent(port: int, body: bytes, headers: Mapping[str, str] = JSON) -> Mapping[str, Any]:
    """Send a request of a sub-agent; returns the reply."""
    answer = ask(port, "POST", PATH, body, {**JSON, **headers})
    assert answer.status == 200, answer.body
    reply: Mapping[str, Any] = json.loads(answer.body)
    assert reply["timings"]["evoke"]["marker"] == "ok"
    assert reply["timings"]["evoke"]["omitted"] == 0
    return reply


def ask_agents(running: RunningProxy, bodies: Sequence[bytes], at_once: int) -> int:
    """Send the requests of sub-agents, `at_once` at a time; returns the longest prompt."""
    with ThreadPoolExecutor(at_once) as pool:
        replies = list(pool.map(lambda body: ask_agent(running.port, body), bodies))
    assert running.metric("evoke_degraded_total", stage="share") == 0
    assert running.metric("evoke_budget_breach_total") == 0
    assert running.metric("evoke_plan_failures_total", reason="books_differ") == 0
    return max(reply["timings"]["evoke"]["n_prompt"] for reply in replies)


def ask_while_first_leaves(port: int, ask_one: AskAgent) -> Sequence[Mapping[str, Any]]:
    """Return the replies to three sub-agents; a fourth, which came first, closes its connection."""
    body = agent_body(0)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as leaving:
        leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(ask_one, port, agent_body(i)) for i in (1, 2, 3)]
            leaving.close()
            return [each.result() for each in asked]


def decoded(port: int) -> int:
    """The prompt tokens that a llama-server has decoded."""
    return server_counter(port, "prompt_tokens_total")


@pytest.mark.parametrize("at_once", [1, N_AGENTS])
@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_sub_agents_decode_a_common_prefix_once(tmp_path: Path, shape: str, at_once: int) -> None:
    """Ten on four slots, one after the other and all at once."""
    with deployed(tmp_path, shape) as (running, port):
        n_prompt = ask_agents(running, [agent_body(i) for i in range(N_AGENTS)], at_once)
        assert n_prompt > 1500
        assert decoded(port) <= 1.05 * n_prompt + N_OWN * N_AGENTS
        # What is decoded up to the boundary is counted as decoded, too.
        assert running.metric("evoke_tokens_total", kind="decoded") > n_prompt
        # In a slot with a context checkpoint at the end of the prefix nothing is restored.
        assert running.metric("evoke_shared_tokens_total") > 1500


def test_agents_share_one_slot(tmp_path: Path) -> None:
    with deployed(tmp_path, n_slots=1) as (running, port):
        n_prompt = ask_agents(running, [agent_body(i) for i in range(N_AGENTS)], N_AGENTS)
        assert decoded(port) <= 1.05 * n_prompt + N_OWN * N_AGENTS


@pytest.mark.parametrize("at_once", [1, N_AGENTS])
def test_a_common_beginning_of_user_messages_is_shared(tmp_path: Path, at_once: int) -> None:
    """One after the other, the second agent shows what is common, and saves that state."""
    with deployed(tmp_path) as (running, port):
        bodies = [agent_body(i, briefing=BRIEFING) for i in range(N_AGENTS)]
        n_prompt = ask_agents(running, bodies, at_once)
        n_briefing = 950
        assert decoded(port) <= 1.05 * n_prompt + N_OWN * N_AGENTS + n_briefing


@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_a_shared_state_gives_the_answer_of_a_decoded_prefix(tmp_path: Path, shape: str) -> None:
    """The same tokens with the same log probabilities, bit by bit."""
    body = agent_body(7, n_tokens=24)
    answers = []
    for name, has_other in (("alone", False), ("after another", True)):
        folder = tmp_path / name
        folder.mkdir()
        with deployed(folder, shape, n_slots=2) as (running, _):
            if has_other:
                ask_agent(running.port, agent_body(1))
            answers.append(ask_agent(running.port, body)["choices"][0])
            assert (running.metric("evoke_shared_tokens_total") > 1500) == has_other
    assert answers[0]["message"] == answers[1]["message"]
    assert answers[0]["logprobs"] == answers[1]["logprobs"]
    with serve(tmp_path, shape, n_slots=1, saves=False) as port, proxy(port) as running:
        plain = ask_agent(running.port, body)["choices"][0]
    assert plain["message"] == answers[0]["message"]
    # A prefix that is decoded by itself ends in another batch, which adds up in another order.
    pairs = zip(plain["logprobs"]["content"], answers[0]["logprobs"]["content"], strict=True)
    assert max(abs(one["logprob"] - other["logprob"]) for one, other in pairs) < 0.005


def test_a_state_belongs_to_its_tenant(tmp_path: Path) -> None:
    with serve(tmp_path) as port:
        with proxy_with_keys(port, tmp_path, **settings_for(tmp_path)) as running:
            before = 0
            for tenant, number, is_new in (("alice", 1, True), ("bob", 2, True), ("bob", 3, False)):
                key = {"Authorization": f"Bearer {KEYS[tenant]}"}
                ask_agent(running.port, agent_body(number), key)
                n_decoded = decoded(port) - before
                before += n_decoded
                assert (n_decoded > 1500) == is_new


def test_a_damaged_state_is_set_aside(tmp_path: Path) -> None:
    with deployed(tmp_path, n_slots=1) as (running, port):
        ask_agent(running.port, agent_body(1))
        running.wait_for_background()
        for file in tmp_path.glob("*.evoke-kv"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        ask_agent(running.port, agent_body(2, system="Something else."))
        ask_agent(running.port, agent_body(3))
        assert running.metric("evoke_snapshot_restores_total", result="quarantined") == 1
        assert decoded(port) > 2 * 1500
        assert running.metric("evoke_degraded_total", stage="share") == 0


def test_agents_do_not_wait_for_a_server_that_cannot_save(tmp_path: Path) -> None:
    with serve(tmp_path, saves=False) as port, proxy(port, **settings_for(tmp_path)) as running:
        ask_agents(running, [agent_body(i) for i in range(N_AGENTS)], N_AGENTS)
        assert running.metric("evoke_shared_tokens_total") == 0


@pytest.mark.parametrize(
    ("saves", "code"), [(True, "other_directory"), (False, "no_save_path")], ids=["other", "none"]
)
def test_a_directory_that_the_server_does_not_use_is_degraded_with_the_fix(
    saves: bool, code: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are answered without it; nothing but one test file is saved elsewhere."""
    slots, named = tmp_path / "slots", tmp_path / "named"
    slots.mkdir()
    with serve(slots, saves=saves) as port, proxy(port, **settings_for(named)) as running:
        running.wait_for_background()  # llama-server is checked at start
        (logged,) = [it for it in caplog.records if "snapshots are off" in it.getMessage()]
        status = json.loads(ask(running.port, "GET", "/evoke/status").body)
        assert status["snapshots_off"] and status["mode"] == "budgeted"
        ready = json.loads(ask(running.port, "GET", "/evoke/ready").body)
        assert (ready["status"], ready["reasons"]) == ("degraded", [f"snapshots:{code}"])
        detail = ready["checks"]["snapshots"]["detail"]
        assert (logged.levelname, logged.getMessage()) == ("WARNING", detail)
        (problem,) = json.loads(ask(running.port, "GET", "/evoke/overview").body)["problems"]
        assert (problem["reason"], problem["fix"] in detail) == (code, True)
        ask_agents(running, [agent_body(i) for i in range(N_AGENTS)], N_AGENTS)
        running.wait_for_background()
        assert running.metric("evoke_shared_tokens_total") == 0
        assert running.metric("evoke_snapshot_saves_total", result="failed") == 0
    assert len(list(slots.iterdir())) == saves


def test_a_directory_that_the_server_uses_is_ready(tmp_path: Path) -> None:
    with deployed(tmp_path) as (running, _):
        ready = json.loads(ask(running.port, "GET", "/evoke/ready").body)
        assert ready["status"] == "ready"
        assert ready["checks"]["snapshots"]["detail"].startswith(f"snapshots in {tmp_path}: 0 ")
        assert not json.loads(ask(running.port, "GET", "/evoke/status").body)["snapshots_off"]
        running.wait_for_background()
        assert not list(tmp_path.glob("*.evoke-part"))


def test_a_model_whose_blocks_suffice_needs_no_saved_slots(
    patched_port: int, tmp_path: Path
) -> None:
    with proxy(patched_port, **settings_for(tmp_path)) as running:
        ready = json.loads(ask(running.port, "GET", "/evoke/ready").body)
        assert ready["status"] == "ready" and "snapshots" not in ready["checks"]


def test_the_problem_ends_when_the_server_is_started_again_with_the_directory(
    tmp_path: Path,
) -> None:
    with ExitStack() as first, ExitStack() as later:
        port = first.enter_context(serve(tmp_path, saves=False))
        running = later.enter_context(proxy(port, **settings_for(tmp_path)))
        assert json.loads(ask(running.port, "GET", "/evoke/ready").body)["status"] == "degraded"
        first.close()
        later.enter_context(serve(tmp_path, port=port))
        ready = json.loads(ask(running.port, "GET", "/evoke/ready").body)
        assert (ready["status"], ready["reasons"]) == ("ready", [])
        ask_agents(running, [agent_body(i) for i in range(N_AGENTS)], 1)
        assert running.metric("evoke_shared_tokens_total") > 0


def test_agents_continue_when_the_one_that_decodes_for_them_leaves(tmp_path: Path) -> None:
    with deployed(tmp_path) as (running, _):
        replies = ask_while_first_leaves(running.port, ask_agent)
        assert all(reply["choices"] for reply in replies)


def test_a_state_fits_the_budget(tmp_path: Path) -> None:
    """Of a prefix that is longer than the budget as much is shared as the budget holds."""
    with serve(tmp_path) as port:
        for budget in (1024, 2048):
            with proxy(port, policy__budget=budget, **settings_for(tmp_path)) as running:
                for number in range(5):  # in four slots
                    body = agent_body(budget + number, f"Limit {budget}. {SYSTEM}")
                    answer = ask(running.port, "POST", PATH, body, JSON)
                    accounting = json.loads(answer.body)["timings"]["evoke"]
                    assert accounting["n_resident_peak"] <= budget
                n_shared = running.metric("evoke_shared_tokens_total")
                assert n_shared >= 2 * min(budget, 1500)
                assert running.metric("evoke_budget_breach_total") == 0


@contextmanager
def decodes_at_most(port: int, n_tokens: int) -> Iterator[None]:
    """A block in which a llama-server decodes no more prompt tokens than this."""
    before = decoded(port)
    yield
    assert decoded(port) - before <= n_tokens


def parent_of_agents(running: RunningProxy) -> ChatClient:
    """A conversation of two turns with the system prompt of the agents."""
    client = ChatClient(running.port, "parent")
    client.messages[0]["content"] = SYSTEM
    for number in range(2):
        client.say(f"Fact {number}: {FILLER}{FILLER}")
    return client


@pytest.mark.parametrize("shape", (HYBRID, "tiny-gemma"))
@pytest.mark.parametrize("n_slots", (1, 2))
def test_a_branch_begins_with_the_state_of_its_session(
    tmp_path: Path, shape: str, n_slots: int
) -> None:
    """At once after the latest reply of the session, which goes on as before."""
    with deployed(tmp_path, shape, n_slots) as (running, port):
        client = parent_of_agents(running)
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        path = f"/evoke/sessions/{sessions[0]['id']}/fork"
        assert ask(running.port, "POST", path, b'{"name": "branch"}', JSON).status == 200
        branch = ChatClient(running.port, "branch", messages=list(client.messages))
        with decodes_at_most(port, 150):
            branch.say("Which number?")
        with decodes_at_most(port, 150):
            client.say("Say it again.")
        assert running.metric("evoke_degraded_total", stage="share") == 0


@pytest.mark.parametrize("shape", (HYBRID, "tiny-gemma"))
def test_a_session_that_agents_displace_is_saved_before(tmp_path: Path, shape: str) -> None:
    """It returns without a prefill; undo continues from the state of its system prompt."""
    with deployed(tmp_path, shape, n_slots=1) as (running, port):
        client = parent_of_agents(running)
        with decodes_at_most(port, 150):
            for number in range(2):
                ask_agent(running.port, agent_body(number))
        with decodes_at_most(port, 60):
            client.say("Go on.")
        del client.messages[-3:]
        with decodes_at_most(port, 900):
            assert client.say("Something else.").accounting["n_prompt"] > 2200


def test_a_session_whose_snapshot_the_server_refuses_is_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server empties the slot for a file that it does not accept; the plan is for that."""

    async def accept(*_: object) -> None:
        pass

    with deployed(tmp_path, n_slots=1) as (running, _):
        client = parent_of_agents(running)
        ask_agent(running.port, agent_body(1, system="Something else."))
        running.wait_for_background()
        for file in tmp_path.glob("*.evoke-kv"):
            file.write_bytes(b"?" * 8 + file.read_bytes()[8:])
        monkeypatch.setattr(SnapshotRepository, "verify", accept)
        reply = client.say("Go on.")
        assert reply.accounting["marker"] == "ok" and reply.accounting["omitted"] == 0
        assert running.metric("evoke_snapshot_restores_total", result="refused") >= 1
        page = ask(running.port, "GET", "/metrics").body.decode()
        failures = re.findall(r"evoke_plan_failures_total{.*} (.*)", page)
        assert not any(map(float, failures))


def test_a_state_with_missing_text_is_not_shared(tmp_path: Path) -> None:
    """Its snapshots are not those that a branch may begin with."""
    budget = 1024
    with serve(tmp_path, n_slots=1) as port:
        with proxy(port, policy__budget=budget, **settings_for(tmp_path)) as running:
            client = ChatClient(running.port, "parent")
            kinds = set()
            for number in range(12):
                client.say(f"Fact {number}: {FILLER}{FILLER}")
                running.wait_for_background()
                sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
                shown = ask(running.port, "GET", f"/evoke/sessions/{sessions[0]['id']}").body
                for item in json.loads(shown)["snapshots"]:
                    kinds.add(item["kind"])
                    assert item["kind"] == "step" or item["n_tokens"] <= budget
            assert kinds == {"whole", "step"}


def test_comments_say_how_much_of_a_prefix_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the state of the prefix is made, as afterwards."""
    monkeypatch.setattr("evoke_proxy.engine.server.prefill_progress._POLL_S", 0.02)
    settings = {**settings_for(tmp_path), "limits__keepalive_s": 0.02}
    body = json.dumps(json.loads(agent_body(1)) | {"stream": True}).encode()
    with serve(tmp_path) as port, proxy(port, **settings) as running:
        answer = ask(running.port, "POST", PATH, body, JSON).body
        assert answer.endswith(b"data: [DONE]\n\n")
        shown = re.findall(rb": decoding the prompt: (\d+) of (\d+) tokens", answer)
        assert any(0 < int(done) < 1800 < int(total) for done, total in shown), shown
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        assert [each["prefill"] for each in sessions] == [None]
