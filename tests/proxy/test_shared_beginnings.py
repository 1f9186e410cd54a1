"""At a stock llama-server a new conversation begins with the saved state of a common prefix.

Requests are those of sub-agents with one system prompt. Counts include what the proxy decodes.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import ask as request
from harness import bare_llama_server, proxy, server_binary, server_counter, until
from stock_deployment import SAVE_ALWAYS, Deployment, decoded, final_metric
from tenant_keys import KEYS, proxy_with_keys
from test_shared_states import (
    BRIEFING,
    JSON,
    N_AGENTS,
    N_OWN,
    PATH,
    agent_body,
    ask_while_first_leaves,
)

from bench.random_models import SHAPES, ensure
from evoke_proxy.adapters.llama.stock_api import PrefillResult, StockApi
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.slot_contents import SlotStatus

HYBRID = "tiny-qwen35"
SHAPE_NAMES = (HYBRID, "tiny-gemma", "tiny-dense")
# Slots with cells of their own; slots that share cells, which llama-server empties when idle.
SEPARATE = ("-np", "4", "-no-kvu", "-c", "16384")
EMPTIED = ("-np", "4", "-kvu", "-c", "16384")
N_PREFIX = 1500


def ask_agent(port: int, body: bytes, headers: Mapping[str, str] = JSON) -> Mapping[str, Any]:
    """Send a request of a sub-agent; returns the reply."""
    answer = request(port, "POST", PATH, body, {**JSON, **headers})
    assert answer.status == 200, answer.body
    reply: Mapping[str, Any] = json.loads(answer.body)
    return reply


def ask_agents(port: int, bodies: Sequence[bytes], at_once: int) -> int:
    """Send the requests of sub-agents, `at_once` at a time; returns the longest prompt."""
    with ThreadPoolExecutor(at_once) as pool:
        replies = list(pool.map(lambda body: ask_agent(port, body), bodies))
    return max(reply["usage"]["prompt_tokens"] for reply in replies)


@pytest.mark.parametrize("at_once", [1, N_AGENTS])
@pytest.mark.parametrize("options", [SEPARATE, EMPTIED], ids=["separate", "emptied"])
@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_sub_agents_decode_a_common_prefix_once(
    tmp_path: Path, shape: str, options: tuple[str, ...], at_once: int
) -> None:
    """Ten on four slots, one after the other and all at once."""
    deployment = Deployment(tmp_path, shape, options)
    with deployment.server() as port, deployment.proxy(port) as running:
        before = decoded(port)
        n_prompt = ask_agents(running.port, [agent_body(i) for i in range(N_AGENTS)], at_once)
        assert n_prompt > N_PREFIX
        assert decoded(port) - before <= 1.05 * n_prompt + N_OWN * N_AGENTS
        assert final_metric(running, "evoke_degraded_total", stage="share") == 0
        assert running.metric("evoke_snapshot_restores_total", result="wasted") == 0


@pytest.mark.parametrize("at_once", [1, N_AGENTS])
def test_a_common_beginning_of_user_messages_is_shared(tmp_path: Path, at_once: int) -> None:
    """One after the other, the second agent finds what is common, and saves that state."""
    deployment = Deployment(tmp_path, HYBRID, SEPARATE)
    with deployment.server() as port, deployment.proxy(port) as running:
        before = decoded(port)
        bodies = [agent_body(i, briefing=BRIEFING) for i in range(N_AGENTS)]
        n_prompt = ask_agents(running.port, bodies, at_once)
        n_briefing = 950
        assert decoded(port) - before <= 1.05 * n_prompt + N_OWN * N_AGENTS + n_briefing


@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_a_shared_state_gives_the_answer_of_a_decoded_prefix(tmp_path: Path, shape: str) -> None:
    """The same tokens; bit by bit the same log probabilities after each restore."""
    body, answers = agent_body(7, n_tokens=24), []
    for name, other in (("alone", None), ("after another", 1), ("after a third", 2)):
        folder = tmp_path / name
        folder.mkdir()
        deployment = Deployment(folder, shape, SEPARATE)
        with deployment.server_and_proxy(look_ahead=False) as running:
            if other is not None:
                ask_agent(running.port, agent_body(other))
            answers.append(ask_agent(running.port, body)["choices"][0])
            useful = final_metric(running, "evoke_snapshot_restores_total", result="useful")
            assert useful == (other is not None)
    alone, *restored = answers
    assert all(answer["message"] == alone["message"] for answer in restored)
    assert restored[0]["logprobs"] == restored[1]["logprobs"]
    # Alone, the prefix is decoded in one batch with what follows, which some CPUs add up in another
    # order.
    pairs = zip(alone["logprobs"]["content"], restored[0]["logprobs"]["content"], strict=True)
    differences = [abs(one["logprob"] - other["logprob"]) for one, other in pairs]
    assert max(differences) < 0.005


def test_a_state_belongs_to_its_tenant(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, HYBRID, SEPARATE)
    settings = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()}
    settings["snapshots__directory"] = str(tmp_path)
    with (
        deployment.server() as port,
        proxy_with_keys(port, tmp_path, **settings) as running,
    ):
        before = decoded(port)
        for tenant, number, is_new in (("alice", 1, True), ("bob", 2, True), ("bob", 3, False)):
            key = {"Authorization": f"Bearer {KEYS[tenant]}"}
            ask_agent(running.port, agent_body(number), key)
            n_decoded = decoded(port) - before
            before += n_decoded
            assert (n_decoded > N_PREFIX) == is_new


def test_a_first_request_that_restores_nothing_keeps_no_other_one_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only their template is that of the saved conversation. The first one decodes for long."""
    prefill, is_answered, n_long = StockApi.prefill, threading.Event(), 1000
    ended_after_answer = list[bool]()

    async def slow_prefill(
        api: StockApi, tokens: Tokens, slot: int | None, epoch: int | None = None
    ) -> PrefillResult:
        if len(tokens) > n_long:
            ended_after_answer.append(await asyncio.to_thread(is_answered.wait, 10))
        return await prefill(api, tokens, slot, epoch)

    def body(word: str, n_words: int) -> bytes:
        message = {"role": "user", "content": word + " cat" * n_words}
        return json.dumps({"messages": [message], "max_tokens": 1, "evoke_session": word}).encode()

    deployment = Deployment(tmp_path, "tiny-dense", SEPARATE)
    with deployment.server() as port, deployment.proxy(port, look_ahead=False) as running:
        ask_agent(running.port, body("one", 300))
        running.wait_for_background()
        monkeypatch.setattr(StockApi, "prefill", slow_prefill)
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(ask_agent, running.port, body("two", 1500))
            until(lambda: running.gateway.server.slots.pool.n_busy == 1, "the long one has a slot")
            ask_agent(running.port, body("three", 300))
            is_answered.set()
            assert long.result()["choices"]
        assert ended_after_answer and all(ended_after_answer)


def test_agents_continue_when_the_one_that_decodes_for_them_leaves(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, HYBRID, SEPARATE)
    with deployment.server_and_proxy() as running:
        replies = ask_while_first_leaves(running.port, ask_agent)
        assert all(reply["choices"] for reply in replies)


def test_agents_go_on_when_the_prefix_cannot_be_decoded_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not wait for the reply of the first one, which generates for long."""
    prefill, failed = StockApi.prefill, list[int]()

    async def fail_once(api: StockApi, tokens: Tokens, slot: int | None) -> PrefillResult:
        if len(tokens) > N_PREFIX and not failed:
            failed.append(len(tokens))
            raise OSError("a bug")
        return await prefill(api, tokens, slot)

    monkeypatch.setattr(StockApi, "prefill", fail_once)
    deployment = Deployment(tmp_path, HYBRID, SEPARATE)
    with deployment.server_and_proxy() as running, ThreadPoolExecutor(4) as pool:
        slow = pool.submit(ask_agent, running.port, agent_body(0, n_tokens=1500))
        until(lambda: bool(failed), "the first agent")
        others = [pool.submit(ask_agent, running.port, agent_body(i)) for i in (1, 2, 3)]
        assert all(each.result()["choices"] for each in others)
        assert not slow.done()
        assert slow.result()["choices"]
        assert running.metric("evoke_degraded_total", stage="prefill") == 1


def test_a_late_list_of_slots_is_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other slots have is still known after a turn that was shorter than the answer took."""
    list_slots, late, may_arrive = StockApi.list_slots, list[bool](), asyncio.Event()

    async def list_late(api: StockApi) -> Sequence[SlotStatus] | None:
        slots = await list_slots(api)
        if not late:
            late.append(True)
            await may_arrive.wait()
        return slots

    deployment = Deployment(tmp_path, HYBRID, SEPARATE)
    with deployment.server_and_proxy(look_ahead=False) as running, ThreadPoolExecutor(1) as pool:
        running.wait_for_background()
        monkeypatch.setattr(StockApi, "list_slots", list_late)
        waiting = pool.submit(ask_agent, running.port, agent_body(0, system="Be brief."))
        until(lambda: bool(late), "the slots are listed")
        ask_agent(running.port, agent_body(1))
        conversations = running.servers[0].conversations
        until(lambda: any(each.snapshots.contents for each in conversations), "what it left")
        running.loop.call_soon_threadsafe(may_arrive.set)
        assert waiting.result()["choices"]
        running.wait_until_idle()
        assert all(each.snapshots.contents for each in conversations)


def test_agents_of_the_messages_api_share_a_state(tmp_path: Path) -> None:
    """Their requests name no slot."""
    deployment = Deployment(tmp_path, HYBRID, SEPARATE)
    with deployment.server() as port, deployment.proxy(port) as running:
        before, prompts = decoded(port), []
        for number in range(4):
            system, user = json.loads(agent_body(number))["messages"]
            body = {"system": system["content"], "messages": [user], "max_tokens": 4}
            answer = request(running.port, "POST", "/v1/messages", json.dumps(body).encode(), JSON)
            usage = json.loads(answer.body)["usage"]
            prompts.append(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))
        assert max(prompts) > N_PREFIX
        assert decoded(port) - before <= 1.05 * max(prompts) + N_OWN * len(prompts)


def test_agents_of_each_model_of_a_router_share_a_state(tmp_path: Path) -> None:
    models, slots = tmp_path / "models", tmp_path / "slots"
    models.mkdir()
    slots.mkdir()
    names = (HYBRID, "tiny-lfm2")
    for shape in names:
        (models / f"{shape}.gguf").symlink_to(ensure(SHAPES[shape]))
    options = ["--models-dir", str(models), "--slot-save-path", str(slots), "--metrics"]
    options += ["-np", "4", "-no-kvu", "-c", "16384", "-t", "1"]
    settings = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()}
    settings["snapshots__directory"] = str(slots)
    with bare_llama_server(server_binary(patched=False), *options) as port:
        with proxy(port, **settings) as running:
            for name in names:
                bodies = [json.loads(agent_body(i)) | {"model": name} for i in range(N_AGENTS)]
                sent = [json.dumps(body).encode() for body in bodies]
                n_prompt = ask_agents(running.port, sent, N_AGENTS)
                n_decoded = server_counter(port, "prompt_tokens_total", name)
                assert N_PREFIX < n_decoded <= 1.05 * n_prompt + N_OWN * N_AGENTS


def test_agents_do_not_wait_for_a_server_that_cannot_save(tmp_path: Path) -> None:
    server, other = tmp_path / "server", tmp_path / "other"
    server.mkdir()
    other.mkdir()
    deployment = Deployment(server, HYBRID, SEPARATE)
    with deployment.server() as port, deployment.proxy(port, directory=str(other)) as running:
        ask_agents(running.port, [agent_body(i) for i in range(N_AGENTS)], N_AGENTS)
        assert final_metric(running, "evoke_snapshot_saves_total", result="saved") == 0
