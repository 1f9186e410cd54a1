"""Conversations at a stock llama-server keep their cache across restarts and slots.

Most tests count all tokens that llama-server decodes, also those of the proxy's own requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import ask, llama_server, server_binary, until
from stock_deployment import Chat, Deployment, decoded, final_metric, long_chat, template

QWEN = tuple(template("Qwen3.5-4B"))
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
# A new message, and the tokens that a turn may decode besides it.
NEW, SLACK = "And what comes after that?", 64
HYBRID, WINDOWED = "tiny-qwen35", "tiny-gemma"


def n_tokens(port: int, text: str) -> int:
    """Return the number of tokens of a text."""
    answer = ask(port, "POST", "/tokenize", json.dumps({"content": text}).encode())
    return len(json.loads(answer.body)["tokens"])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (HYBRID, QWEN),
        ("tiny-dense", (*QWEN, "-np", "4", "-kvu")),
        (WINDOWED, QWEN),
    ],
    ids=["qwen35", "dense", "windows"],
)
def test_only_new_text_is_decoded_after_a_restart_of_server_and_proxy(
    shape: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    deployment, chat = Deployment(tmp_path, shape, options), long_chat(1100)
    with deployment.server_and_proxy() as running:
        first = sum(chat.ask(running.port, "So what is it?"))
        assert first > 4000
        running.wait_for_background()
        chat.add_reply()
    with deployment.server_and_proxy() as running:
        limit = n_tokens(running.port, NEW) + SLACK
        before = decoded(running.port)
        chat.ask(running.port, NEW)
        assert decoded(running.port) - before <= limit
        assert final_metric(running, "evoke_snapshot_restores_total", result="useful") == 1
    with deployment.server_and_proxy() as running:  # the client sends the same request again
        before = decoded(running.port)
        chat.ask(running.port)
        assert decoded(running.port) - before <= SLACK
        assert final_metric(running, "evoke_snapshot_restores_total", result="useful") == 1
        assert running.metric("evoke_degraded_total", stage="restore") == 0


def test_lookahead_reduces_the_decoded_tokens_of_a_hybrid_model_to_a_fifth(
    tmp_path: Path,
) -> None:
    deployment = Deployment(tmp_path, HYBRID, QWEN)
    n_decoded = {}
    for look_ahead in (False, True):
        chat = long_chat(1100)
        chat.fields = NO_THINKING | {"max_tokens": 300, "seed": 1}
        with deployment.server_and_proxy(look_ahead=look_ahead) as running:
            chat.ask(running.port, "So what is it?")
            running.wait_for_background()
            chat.add_reply()
            before = decoded(running.port)
            chat.ask(running.port, NEW)
            n_decoded[look_ahead] = decoded(running.port) - before
            result = "done" if look_ahead else "none"
            assert final_metric(running, "evoke_look_aheads_total", result=result) == 2 * look_ahead
        for file in deployment.files():
            file.unlink()
    assert n_decoded[True] <= n_decoded[False] / 5


def test_the_last_user_message_before_a_tool_loop_is_saved(tmp_path: Path) -> None:
    """Two snapshots are kept: of the latest step, and of the history up to the last user message.

    The second one is needed because the template changes the steps once the user writes again. A
    third one has the tools alone, for other conversations.
    """
    deployment, chat = Deployment(tmp_path, HYBRID, QWEN), long_chat(400)
    chat.fields = {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]}
    with deployment.server_and_proxy(look_ahead=False) as running:
        chat.ask(running.port, "Look twice.")
        running.wait_for_background()
        for id in ("c0", "c1"):
            call = {"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
            step = {"role": "assistant", "content": "", "reasoning_content": f"so {id}"}
            chat.messages.append(step | {"tool_calls": [call]})
            result = {"role": "tool", "tool_call_id": id, "content": "a b c d " * 20}
            chat.messages.append(result)
            chat.ask(running.port)
            running.wait_for_background()
        assert len(deployment.files()) == 3
    for continues, limit in ((True, SLACK), (False, 500)):
        if not continues:
            chat.messages.append({"role": "assistant", "content": "Done."})
        with deployment.server_and_proxy(look_ahead=False) as running:
            before = decoded(running.port)
            cached, _ = chat.ask(running.port, None if continues else NEW)
            assert cached > 1000 and decoded(running.port) - before <= limit
            assert final_metric(running, "evoke_snapshot_restores_total", result="useful") == 1


def test_restores_that_save_nothing_stop_and_are_reported(tmp_path: Path) -> None:
    """Without checkpoints no file of a model with recurrent layers and windows is continued."""
    options = ("--cache-ram", "0", "--ctx-checkpoints", "0")
    deployment = Deployment(tmp_path, "tiny-lfm2-window", options)
    with deployment.server_and_proxy(look_ahead=False) as running:
        chats = [long_chat(300, start) for start in (0, 7)]
        for turn in range(3):
            for chat in chats:
                cached, new = chat.ask(running.port, f"Turn {turn}?")
                assert cached + new > 900
                running.wait_for_background()
                chat.add_reply()
        wasted = running.metric("evoke_snapshot_restores_total", result="wasted")
        assert wasted == 3
        detail = json.loads(ask(running.port, "GET", "/evoke/ready").body)["checks"]["snapshots"]
        assert "given up restoring" in detail["detail"]


def test_a_prompt_that_diverges_from_restored_windows_is_answered_correctly(
    tmp_path: Path,
) -> None:
    """With --swa-full llama-server would continue from windows that are incomplete."""
    deployment = Deployment(tmp_path, WINDOWED, (*QWEN, "--swa-full", "--cache-ram", "0"))
    chat = long_chat(300)
    chat.fields = NO_THINKING
    fields = NO_THINKING | {"logprobs": True, "top_logprobs": 4, "max_tokens": 2}
    with deployment.server_and_proxy() as running:
        chat.ask(running.port, "Begin.", max_tokens=50)
        running.wait_for_background()
        chat.add_reply()
    last = len(chat.messages) - 1
    with deployment.server() as port, deployment.proxy(port) as running:
        chat.ask(running.port, NEW)
        assert final_metric(running, "evoke_snapshot_restores_total", result="useful") == 1
        chat.messages[last:] = [{"role": "assistant", "content": "No."}]
        chat.messages.append({"role": "user", "content": "Why?"})
        body = {"messages": chat.messages, "temperature": 0, **fields}
        answers = []
        for to_port, more in ((running.port, {}), (port, {"cache_prompt": False})):
            answer = ask(to_port, "POST", "/v1/chat/completions", json.dumps(body | more).encode())
            answers.append(json.loads(answer.body))
        steps = [answer["choices"][0]["logprobs"]["content"] for answer in answers]
        restored, uncached = [
            [token["logprob"] for step in each for token in step["top_logprobs"]] for each in steps
        ]
        assert restored == pytest.approx(uncached, abs=0.01)


def test_conversations_that_share_one_slot_decode_only_new_text(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, HYBRID, (*QWEN, "--cache-ram", "0"))
    with deployment.server_and_proxy() as running:
        chats = [long_chat(400, start) for start in (0, 7, 13)]
        for chat in chats:
            chat.ask(running.port, "Begin.")
            running.wait_for_background()
            chat.add_reply()
        before = decoded(running.port)
        for chat in chats:
            chat.ask(running.port, NEW)
            running.wait_for_background()
        assert decoded(running.port) - before <= 3 * (SLACK + 10)
        assert running.metric("evoke_snapshot_restores_total", result="useful") == 3


def test_the_ram_cache_of_the_server_is_used(tmp_path: Path) -> None:
    """By default llama-server moves idle slots into RAM, which holds more than a snapshot."""
    deployment = Deployment(tmp_path, "", ("-np", "4", "-kvu"))
    with deployment.server_and_proxy(look_ahead=False) as running:
        chats = [long_chat(300, start) for start in (0, 7)]
        for chat in chats:
            chat.ask(running.port, "Begin.")
            running.wait_for_background()
            chat.add_reply()
        before = decoded(running.port)
        chats[0].ask(running.port, NEW)
        assert decoded(running.port) - before <= SLACK
        assert final_metric(running, "evoke_snapshot_restores_total", result="useful") == 0


def test_a_request_cancels_the_lookahead(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "", ("-c", "8192"))
    with deployment.server_and_proxy() as running:
        other, chat = Chat([]), long_chat(300)
        other.ask(running.port, "Nothing of note.")
        running.wait_for_background()
        lookahead, calls = running.gateway.server.strategies.snapshots._lookahead, []

        async def slow_decode(*args: Any) -> None:
            calls.append(1)
            await args[3].run(asyncio.sleep(60))

        lookahead._decode = slow_decode  # type: ignore[method-assign,assignment]
        chat.ask(running.port, "Begin.")
        until(lambda: calls)
        other.ask(running.port)
        assert running.metric("evoke_look_aheads_total", result="cancelled") == 1


def test_there_is_no_lookahead_while_a_request_waits(tmp_path: Path) -> None:
    with Deployment(tmp_path).server_and_proxy() as running:
        chats = [long_chat(300, start) for start in (0, 7)]
        upstream, slots, first = (
            running.gateway.upstream,
            running.gateway.server.slots,
            iter([True]),
        )
        original = upstream.open

        @asynccontextmanager
        async def open_once_queued(method: str, target: str, *args: Any) -> AsyncIterator[Any]:
            """Forward the first chat request once the second one waits for the slot."""
            if target == "/v1/chat/completions" and next(first, False):
                while not slots.pool.queued:
                    await asyncio.sleep(0.01)
            async with original(method, target, *args) as reply:
                yield reply

        upstream.open = open_once_queued  # type: ignore[method-assign,assignment]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda chat: chat.ask(running.port, "Begin."), chats))
        running.wait_for_background()
        results = {
            result: running.metric("evoke_look_aheads_total", result=result)
            for result in ("done", "skipped", "cancelled")
        }
        assert results["done"] == 1 == results["skipped"] + results["cancelled"]


def test_a_directory_that_the_server_does_not_use_is_degraded_with_the_fix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slot_folder, other = tmp_path / "slots", tmp_path / "other"
    slot_folder.mkdir()
    deployment, chat = Deployment(slot_folder), long_chat(300)
    with deployment.server() as port, deployment.proxy(port, directory=str(other)) as running:
        ready = json.loads(ask(running.port, "GET", "/evoke/ready").body)
        assert (ready["status"], ready["reasons"]) == ("degraded", ["snapshots:other_directory"])
        detail = ready["checks"]["snapshots"]["detail"]
        assert "is not the --slot-save-path" in detail
        assert "Change this: set snapshots.directory to the directory of llama-server's" in detail
        (problem,) = json.loads(ask(running.port, "GET", "/evoke/overview").body)["problems"]
        assert (problem["reason"], problem["fix"] in detail) == ("other_directory", True)
        assert json.loads(ask(running.port, "GET", "/evoke/status").body)["snapshots_off"]
        (logged,) = [it for it in caplog.records if "snapshots are off" in it.getMessage()]
        assert (logged.levelname, logged.getMessage()) == ("WARNING", detail)
        assert not any(
            "Chats keep their slots on disk," in it.getMessage() for it in caplog.records
        )
        chat.ask(running.port, "Begin.")
        assert final_metric(running, "evoke_snapshot_saves_total", result="skipped_reduced") == 1
    assert not list(other.glob("*.evoke-*"))


def test_a_server_without_a_directory_for_slots_is_degraded_with_the_fix(tmp_path: Path) -> None:
    with llama_server(server_binary(patched=False), "-np", "1") as port:
        with Deployment(tmp_path).proxy(port) as running:
            ready = json.loads(ask(running.port, "GET", "/evoke/ready").body)
    assert (ready["status"], ready["reasons"]) == ("degraded", ["snapshots:no_save_path"])
    assert f"start it with --slot-save-path {tmp_path}" in ready["checks"]["snapshots"]["detail"]


def test_a_request_is_answered_after_an_internal_error_in_its_prefill(tmp_path: Path) -> None:
    deployment, chat = Deployment(tmp_path), long_chat(300)
    with deployment.server_and_proxy() as running:
        running.wait_for_background()  # a starting proxy decodes a few tokens to probe llama-server
        calls = running.gateway.server.strategies.snapshots._api

        async def broken(*_: object) -> None:
            raise RuntimeError("broken on purpose")

        calls.prefill = broken  # type: ignore[method-assign,assignment]
        chat.ask(running.port, "Begin.")
        assert running.metric("evoke_degraded_total", stage="prefill") == 1
        cached, new = chat.ask(running.port)
        assert cached + new > 900


def test_requests_without_a_conversation_are_forwarded_unchanged(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    with deployment.server_and_proxy() as running:
        raw = {"prompt": "a b " * 300, "max_tokens": 4, "temperature": 0}
        answer = ask(running.port, "POST", "/v1/completions", json.dumps(raw).encode())
        assert answer.status == 200
        for fields in ({"cache_prompt": False}, {"id_slot": 0}, {"evoke": False}):
            long_chat(300).ask(running.port, "Begin.", **fields)
        running.wait_for_background()
        assert deployment.files() == []
        assert len(running.gateway.conversations) == 0


@pytest.mark.parametrize(
    ("name", "plain", "with_tools"),
    [
        ("Qwen3.5-4B", (True, True), (True, True)),
        ("ibm-granite-granite-4.0", (True, True), (True, True)),
        ("Mistral-Small-3.2-24B-Instruct-2506", (True, True), (False, False)),
    ],
)
def test_the_prefix_stability_of_real_templates_is_measured_at_start(
    name: str, plain: tuple[bool, bool], with_tools: tuple[bool, bool], tmp_path: Path
) -> None:
    deployment = Deployment(tmp_path, "", tuple(template(name)))
    with deployment.server_and_proxy() as running:
        assert ask(running.port, "GET", "/evoke/ready").status == 200
        probe = running.gateway.server.strategies.snapshots.probe
        measured = [probe.stability(tools) for tools in (False, True)]
    assert [(each.boundary, each.ahead) for each in measured] == [plain, with_tools]


@pytest.mark.parametrize("options", [("-np", "4", "-kvu"), ("-np", "4", "-no-kvu", "-c", "16384")])
def test_concurrent_chats_decode_at_most_a_third_more_tokens_than_without_the_proxy(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """Six chats of three turns each on four slots."""
    totals = {}
    for arm in ("direct", "proxied"):
        deployment = Deployment(tmp_path / arm, "", options)
        deployment.folder.mkdir()
        with deployment.server() as port, deployment.proxy(port) as running:
            chats = [long_chat(200, start) for start in (0, 7, 13, 29, 31, 37)]
            with ThreadPoolExecutor(len(chats)) as pool:
                to_port = port if arm == "direct" else running.port
                list(pool.map(lambda chat, to_port=to_port: _three_turns(chat, to_port), chats))
            running.wait_for_background()
            totals[arm] = decoded(port)
            assert not running.gateway.metrics.degraded.collect()[0].samples
    assert totals["proxied"] <= 1.3 * totals["direct"]


def test_with_one_at_a_time_requests_never_run_concurrently_and_slots_are_saved(
    tmp_path: Path,
) -> None:
    deployment = Deployment(tmp_path, "", ("-np", "4", "-kvu"))
    busiest = 0
    with deployment.server() as port, deployment.proxy(port, one_at_a_time=True) as running:
        chats = [long_chat(200, start) for start in (0, 7, 13)]
        with ThreadPoolExecutor(3) as pool:
            turns = [pool.submit(_three_turns, chat, running.port) for chat in chats]
            while not all(turn.done() for turn in turns):
                slots = json.loads(ask(port, "GET", "/slots").body)
                busiest = max(busiest, sum(slot["is_processing"] for slot in slots))
        assert [turn.result() for turn in turns] == [None] * 3
        running.wait_for_background()
        before = decoded(port)
        for chat in chats:
            chat.ask(running.port, NEW)
            running.wait_for_background()
        assert decoded(port) - before <= 3 * (SLACK + 10)
        assert not running.gateway.metrics.degraded.collect()[0].samples
    assert busiest == 1


def _three_turns(chat: Chat, port: int) -> None:
    for turn in range(3):
        cached, new = chat.ask(port, f"Turn {turn}.")
        assert cached + new > 600
        chat.add_reply()


def test_a_cache_lost_in_sleep_is_restored(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, HYBRID, (*QWEN, "--sleep-idle-seconds", "2"))
    chat = long_chat(400)
    with deployment.server_and_proxy() as running:
        chat.ask(running.port, "Begin.")
        running.wait_for_background()
        chat.add_reply()
        until(lambda: json.loads(ask(running.port, "GET", "/props").body)["is_sleeping"])
        cached, new = chat.ask(running.port, NEW)
        assert cached > 1000 and new <= SLACK
        assert final_metric(running, "evoke_snapshot_restores_total", result="useful") == 1


TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
TOOL_USE = {
    "type": "tool_use",
    "id": "t1",
    "name": "look",
    "input": {"place": "caf\u00e9", "n": 1.5},
}
TOOL_RESULT = {
    "type": "tool_result",
    "tool_use_id": "t1",
    "content": [{"type": "text", "text": "x"}],
}
SYSTEM = "x-anthropic-billing-header: v=1; cch=a5145;You are a coding agent."


def _message(port: int, messages: list[object], **fields: object) -> dict[str, object]:
    body = {"messages": messages, "max_tokens": 24, "tools": [TOOL], "system": SYSTEM} | fields
    answer = ask(port, "POST", "/v1/messages", json.dumps(body).encode())
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def test_conversations_of_the_messages_api_keep_their_cache(tmp_path: Path) -> None:
    """Their bodies name no slot; llama-server finds the restored one itself."""
    deployment = Deployment(tmp_path, HYBRID, (*QWEN, "-np", "2", "-no-kvu", "-c", "16384"))
    chat: list[object] = [
        {"role": "user", "content": "one two three four " * 300},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, TOOL_USE]},
        {"role": "user", "content": [TOOL_RESULT, {"type": "text", "text": "So?"}]},
    ]
    with deployment.server_and_proxy() as running:
        reply = _message(running.port, chat)
        running.wait_for_background()
        assert running.metric("evoke_snapshot_saves_total", result="skipped_miscounted") == 0
    chat += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": NEW}]
    with deployment.server_and_proxy() as running:
        before = decoded(running.port)
        usage = _message(running.port, chat)["usage"]
        assert decoded(running.port) - before <= 24 + SLACK
        assert usage["cache_read_input_tokens"] > 1000  # type: ignore[index]
        assert final_metric(running, "evoke_snapshot_restores_total", result="useful") == 1
        files = deployment.files()

        async def wrong_count(*_: object) -> int:
            return 7

        running.gateway.server.strategies.snapshots._api.count_tokens = wrong_count  # type: ignore[method-assign,assignment]
        assert _message(running.port, [{"role": "user", "content": "two " * 300}])["content"]
        assert final_metric(running, "evoke_snapshot_saves_total", result="skipped_miscounted") == 1
        assert deployment.files() == files


def test_a_diverging_request_is_reported_with_position_and_cause(tmp_path: Path) -> None:
    chat = long_chat(300)
    chat.messages.insert(0, {"role": "system", "content": "You help.\nToday is Monday, 12:00."})
    with Deployment(tmp_path).server_and_proxy(look_ahead=False) as running:
        chat.ask(running.port, "Begin.")
        running.wait_for_background()
        chat.add_reply()
        chat.messages[0]["content"] = "You help.\nToday is Monday, 12:34."
        chat.ask(running.port, NEW)
        assert final_metric(running, "evoke_prefix_divergence_total", cause="date_line") == 1
        latest = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"][0]
        assert latest["drift"] == {"cause": "date_line", "message": 0, "characters": [30, 32]}


def _respond(port: int, items: list[object], **fields: object) -> dict[str, object]:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    body = {"input": items, "max_output_tokens": 24, "tools": [tool], "instructions": "Help."}
    answer = ask(port, "POST", "/v1/responses", json.dumps(body | fields).encode())
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def test_conversations_of_the_responses_api_keep_their_cache(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, HYBRID, (*QWEN, "-np", "2", "-no-kvu", "-c", "16384"))
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a":1}'}
    items: list[object] = [
        {"role": "user", "content": "one two three four " * 300},
        {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
        {"role": "user", "content": [{"type": "input_text", "text": "So?"}]},
    ]
    with deployment.server_and_proxy() as running:
        reply = _respond(running.port, items)
        running.wait_for_background()
        assert running.metric("evoke_snapshot_saves_total", result="skipped_miscounted") == 0
    items += [*reply["output"], {"role": "user", "content": NEW}]  # type: ignore[misc]
    with deployment.server_and_proxy() as running:
        before = decoded(running.port)
        usage = _respond(running.port, items)["usage"]
        assert decoded(running.port) - before <= 24 + SLACK
        assert usage["input_tokens_details"]["cached_tokens"] > 1000  # type: ignore[index]
        assert final_metric(running, "evoke_snapshot_restores_total", result="useful") == 1
