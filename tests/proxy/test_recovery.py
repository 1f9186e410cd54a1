"""Recovery of evicted blocks: as rows or as text, by question, tool call or name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from dialects import KINDS, PATHS, STREAM, accounting_of, body_of, post
from harness import RunningProxy, ask, llama_server, proxy, server_binary
from recovery_texts import BUDGET, FACT, QUESTION

import bench.policies  # noqa: F401 -- registers baselines

JSON = {"Content-Type": "application/json"}
# A question about nothing, with too many words to be understood as a follow-up of the last turn.
UNRELATED = "Zzz yyy xxx qqq vvv kkk?"
Json = dict[str, Any]
RecordingProxy = tuple[RunningProxy, list[Json]]


def _messages(path: str, body: Json) -> list[Json]:
    """Return the messages of a body, or its items in the Responses API."""
    items: list[Json] = body["input" if path == "/v1/responses" else "messages"]
    return items


def _request_for(path: str, stream: bool, **fields: Any) -> Json:
    request = {"evoke_budget": BUDGET, "stream": stream, **fields}
    if stream and path.endswith("completions"):
        request["stream_options"] = {"include_usage": True}
    return request


def _run_until_evicted(
    port: int, path: str, session: str, first: str = FACT, **fields: Any
) -> list[str]:
    """Run a conversation until its first message is evicted; returns its texts so far."""
    texts = [first, "Noted."]
    for number in range(6):
        texts += [f"Turn {number}. {FILLER}", f"Noted {number}."]
        accounting_of(post(port, path, texts[:-1], session, evoke_budget=BUDGET, **fields))
    return texts


@PATHS
@STREAM
def test_a_breadcrumb_quotes_an_evicted_block_in_the_last_message(
    recording_proxy: RecordingProxy, path: str, stream: bool
) -> None:
    running, forwarded = recording_proxy
    fields = _request_for(path, stream, evoke_policy="breadcrumb")
    texts = _run_until_evicted(running.port, path, "crumbs", evoke_policy="breadcrumb")
    texts.append(QUESTION)
    n_before = running.metric("evoke_blocks_as_text_total")
    answer = post(running.port, path, texts, "crumbs", **fields)
    accounting = accounting_of(answer)
    assert accounting["recovered"] == 0
    assert accounting["resident_peak"] <= BUDGET
    assert accounting["as_text"]["blocks"] > 0
    assert accounting["as_text"]["tokens"] > 0
    n_quoted, n_tokens = accounting["as_text"]["blocks"], accounting["as_text"]["tokens"]
    assert answer.headers["x-evoke-as-text"] == f"blocks={n_quoted};tokens={n_tokens}"
    assert running.metric("evoke_blocks_as_text_total") == n_before + n_quoted
    *before, last = _messages(path, forwarded[-1])
    original = json.loads(body_of(path, texts))
    assert before == _messages(path, original)[:-1]
    assert last["role"] == "user"
    assert last["content"].startswith("Recovered context, ")
    assert f"\n[user:1] {FACT}\n" in last["content"]
    assert last["content"].endswith("\n\n" + QUESTION)
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert running.metric(untouched) == 0
    # The quotation, which is not in the client's history, does not split the conversation in two.
    sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
    assert [(session["name"], session["turns"]) for session in sessions] == [("crumbs", 7)]


def test_the_turn_after_a_breadcrumb_decodes_the_quoting_message_without_the_quotation(
    patched_proxy: RunningProxy,
) -> None:
    decoded = {}
    for policy in ("discard", "breadcrumb"):
        client = ChatClient(patched_proxy.port, policy, {"evoke_budget": BUDGET})
        client.fields = client.fields | {"evoke_policy": policy}  # type: ignore[operator]
        client.say(FACT)
        for number in range(6):
            client.say(f"Turn {number}. {FILLER}")
        quoting = client.say(QUESTION)
        following = client.say("Thank you.")
        for turn in (quoting, following):
            assert sum(turn.accounting[kind] for kind in KINDS) == turn.accounting["n_prompt"]
            assert turn.accounting["n_resident_peak"] <= BUDGET
        decoded[policy] = [turn.accounting["decoded"] for turn in (quoting, following)]
    for plain, quoted in zip(decoded["discard"], decoded["breadcrumb"], strict=True):
        assert quoted > plain + 15


def test_a_breadcrumb_quotes_nothing_for_an_unrelated_message(
    recording_proxy: RecordingProxy,
) -> None:
    running, forwarded = recording_proxy
    path = "/v1/chat/completions"
    texts = _run_until_evicted(running.port, path, "calm", evoke_policy="breadcrumb")
    texts.append(UNRELATED)
    answer = post(
        running.port, path, texts, "calm", **_request_for(path, False, evoke_policy="breadcrumb")
    )
    assert accounting_of(answer)["as_text"] == {"blocks": 0, "tokens": 0}
    assert forwarded[-1]["messages"][-1]["content"] == UNRELATED


@pytest.mark.parametrize(
    ("path", "content", "kind"),
    [
        ("/v1/chat/completions", [{"type": "text", "text": QUESTION}], "text"),
        ("/v1/messages", [{"type": "text", "text": QUESTION}], "text"),
        ("/v1/responses", [{"type": "input_text", "text": QUESTION}], "input_text"),
    ],
)
def test_a_breadcrumb_is_a_separate_part_of_a_message_of_parts(
    recording_proxy: RecordingProxy, path: str, content: list[Json], kind: str
) -> None:
    running, forwarded = recording_proxy
    texts = [
        *_run_until_evicted(running.port, path, "parts", evoke_policy="breadcrumb"),
        QUESTION,
    ]
    body = json.loads(body_of(path, texts, **_request_for(path, False, evoke_policy="breadcrumb")))
    _messages(path, body)[-1]["content"] = content
    headers = JSON | {"X-Evoke-Session": "parts"}
    accounting = accounting_of(ask(running.port, "POST", path, json.dumps(body).encode(), headers))
    assert accounting["as_text"]["blocks"] > 0
    note, *rest = _messages(path, forwarded[-1])[-1]["content"]
    assert note["type"] == kind and FACT in note["text"]
    assert rest == content


def _call(number: int, path: str) -> Json:
    function = {"name": "read", "arguments": json.dumps({"path": path})}
    calls = [{"id": f"call_{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(number: int, text: str) -> Json:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


@pytest.fixture(scope="module", params=["tools.jinja", "alternating.jinja"])
def strict_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a patched llama-server with a template that shows tool calls and results."""
    template = str(Path(__file__).with_name(request.param))
    options = ("-np", "1", "--evoke-ram", "64", "--chat-template-file", template)
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


def _run_file_task(port: int, fields: Json) -> ChatClient:
    """Run a task that reads a file, until the file is evicted."""
    client = ChatClient(port, "task", {"evoke_budget": BUDGET} | fields)
    client.say("Please read src/config.py.")
    client.messages[-1:] = [_call(0, "src/config.py"), _result(0, "retry limit = 17")]
    assert client.post().status == 200
    client.messages.append({"role": "assistant", "content": "Read."})
    for number in range(6):
        client.say(f"Turn {number}. {FILLER}")
    return client


def _is_resident(port: int, running: RunningProxy, key: str) -> bool:
    """Whether all blocks with this name are resident in the slot."""
    running.wait_until_idle()
    (conversation,) = running.gateway.conversations
    spans = [
        b.span
        for b in conversation.session.layout.blocks
        if b.display_name.rpartition("#")[0] == key
    ]
    rows = json.loads(ask(port, "GET", "/slots/0/blocks").body)["resident"]
    assert spans
    return all(any(a <= s.start and s.end <= b for a, b in rows) for s in spans)


def test_a_breadcrumb_quotes_an_evicted_block_in_a_tool_result(strict_port: int) -> None:
    with proxy(strict_port) as running:
        client = _run_file_task(running.port, {"evoke_policy": "breadcrumb"})
        plain = client.say("What is the retry limit?")
        assert plain.headers["x-evoke-as-text"] != "blocks=0;tokens=0"
        client.messages[-1:] = [_call(7, "src/config.py"), _result(7, "unchanged")]
        answer = client.post()
        assert answer.status == 200, answer.body
        assert answer.headers["x-evoke-as-text"] != "blocks=0;tokens=0"
        assert running.metric("evoke_degraded_total", stage="render") == 0


@pytest.mark.parametrize(
    ("path", "is_recovered"), [("src/config.py", True), ("docs/notes.md", False)]
)
def test_the_first_reading_of_a_file_is_recovered_at_its_next_reading(
    strict_port: int, path: str, is_recovered: bool
) -> None:
    # Without vectors, by which the small block may come into room that is left.
    with proxy(strict_port, embedder__model="none") as running:
        client = _run_file_task(running.port, {})
        assert not _is_resident(strict_port, running, "file:config.py")
        client.messages += [{"role": "user", "content": "Go on."}, _call(7, path)]
        client.messages += [_result(7, "unchanged")]
        assert client.post().status == 200
        assert _is_resident(strict_port, running, "file:config.py") is is_recovered


@PATHS
def test_a_block_requested_by_name_is_recovered(patched_proxy: RunningProxy, path: str) -> None:
    port = patched_proxy.port
    texts = [*_run_until_evicted(port, path, "named"), "Go on."]
    fields = {"evoke_recover": ["user:0", "user:1", "file:a.py"], "evoke_budget": BUDGET}
    answer = post(port, path, texts, "named", **fields)
    accounting = accounting_of(answer)
    assert accounting["recovered"] > 0
    # Message 0 is the system prompt, not a user message.
    assert accounting["recover"] == {"unknown": ["user:0", "file:a.py"], "missing": []}
    assert accounting["resident_peak"] <= BUDGET


def test_requested_names_that_are_unknown_or_not_saved_are_reported(
    patched_proxy: RunningProxy,
) -> None:
    path = "/v1/chat/completions"
    texts = [
        *_run_until_evicted(patched_proxy.port, path, "gone", evoke_policy="discard"),
        "Go on.",
    ]
    fields = {"evoke_recover": ["user:1", "user:13"], "evoke_budget": BUDGET}
    answer = post(patched_proxy.port, path, texts, "gone", evoke_policy="discard", **fields)
    accounting = accounting_of(answer)
    assert accounting["recovered"] == 0
    assert accounting["recover"] == {"unknown": [], "missing": ["user:1"]}


def test_a_breadcrumb_quotes_a_block_by_the_name_that_the_client_gave_it(
    recording_proxy: RecordingProxy,
) -> None:
    running, forwarded = recording_proxy
    client = ChatClient(running.port, "own", {"evoke_budget": BUDGET, "evoke_policy": "breadcrumb"})
    client.messages.append({"role": "user", "content": FACT, "evoke_name": "vault"})
    client.messages.append({"role": "assistant", "content": "Noted."})
    for number in range(6):
        client.say(f"Turn {number}. {FILLER}")
    client.messages.append({"role": "user", "content": "Go on."})
    accounting = json.loads(client.post(evoke_recover=["vault"]).body)["usage"]["evoke"]
    assert accounting["recover"] == {"unknown": [], "missing": []}
    assert f"[vault] {FACT}" in forwarded[-1]["messages"][-1]["content"]


@pytest.mark.parametrize(("gold", "is_recovered"), [([], False), ([1], True), (["user:1"], True)])
def test_the_oracle_policy_recovers_the_named_blocks(
    patched_port: int, gold: list[str | int], is_recovered: bool
) -> None:
    path, policy = "/v1/chat/completions", {"evoke_policy": "oracle"}
    with proxy(patched_port) as running:
        texts = [*_run_until_evicted(running.port, path, "told", **policy), f"Turn 6. {FILLER}"]
        # Without recall: the ranking would bring the fact back as a statement of the user.
        fields = policy | {"evoke_budget": BUDGET, "evoke_oracle": gold, "evoke_recall": "none"}
        accounting_of(post(running.port, path, texts, "told", **fields))
        assert _is_resident(patched_port, running, "user:1") is is_recovered


@pytest.mark.parametrize("name", ["evoke", "infllm", "discard", "recency", "streaming"])
def test_every_policy_stays_in_the_budget(patched_proxy: RunningProxy, name: str) -> None:
    client = ChatClient(patched_proxy.port, name, {"evoke_budget": BUDGET, "evoke_policy": name})
    client.say(FACT)
    turns = [client.say(f"Turn {number}. {FILLER}") for number in range(7)]
    turns.append(client.say(QUESTION))
    for turn in turns:
        assert turn.headers["x-evoke-policy"] == name
        assert turn.accounting["n_resident_peak"] <= BUDGET
    assert sum(turn.accounting["omitted"] for turn in turns) > BUDGET
    assert (turns[-1].accounting["recovered"] > 0) is (name in ("evoke", "infllm"))
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert patched_proxy.metric(untouched) == 0


def _empty_tool_call(path: str) -> list[Json]:
    """Return a tool call that asks for the fact, and its result without it."""
    arguments = {"of": "the access code of the Meridian vault"}
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "c", "name": "look"}
        call["arguments"] = json.dumps(arguments)
        return [call, {"type": "function_call_output", "call_id": "c", "output": "none"}]
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": "c", "name": "look", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "none"}
        return [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
    function = {"name": "look", "arguments": json.dumps(arguments)}
    calls = [{"id": "c", "type": "function", "function": function}]
    answer = {"role": "tool", "tool_call_id": "c", "content": "none"}
    return [{"role": "assistant", "content": "", "tool_calls": calls}, answer]


@PATHS
def test_a_breadcrumb_quotes_in_tool_results_of_every_dialect(strict_port: int, path: str) -> None:
    fields = {"evoke_policy": "breadcrumb"}
    with proxy(strict_port) as running:
        texts = [*_run_until_evicted(running.port, path, "tools", **fields), UNRELATED]
        # A turn without a quotation, so that the next one decodes no message again.
        accounting_of(
            post(running.port, path, texts, "tools", **_request_for(path, False, **fields))
        )
        texts += ["Hm.", "Look it up."]
        body = json.loads(body_of(path, texts, **_request_for(path, False, **fields)))
        _messages(path, body).extend(_empty_tool_call(path))
        headers = JSON | {"X-Evoke-Session": "tools"}
        answer = ask(running.port, "POST", path, json.dumps(body).encode(), headers)
        assert accounting_of(answer)["as_text"]["blocks"] > 0
        assert running.metric("evoke_degraded_total", stage="render") == 0


@pytest.mark.parametrize(("max_tokens", "quotes"), [(12, True), (7600, False)])
def test_a_breadcrumb_must_leave_room_for_the_answer_in_the_context(
    recording_proxy: RecordingProxy, max_tokens: int, quotes: bool
) -> None:
    running, forwarded = recording_proxy
    path, fields = "/v1/chat/completions", {"evoke_policy": "breadcrumb"}
    texts = [*_run_until_evicted(running.port, path, "full", **fields), QUESTION]
    stop = {"stop": ["a", "e", "i", "o", "1"], "max_tokens": max_tokens}
    accounting = accounting_of(
        post(running.port, path, texts, "full", **_request_for(path, False, **fields), **stop)
    )
    assert (accounting["as_text"]["blocks"] > 0) is quotes
    assert ("Recovered" in forwarded[-1]["messages"][-1]["content"]) is quotes
