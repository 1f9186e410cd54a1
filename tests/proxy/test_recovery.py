"""Recovery of evicted blocks: as rows or text, by question, tool call or name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask, llama_server, proxy, server_binary
from test_dialects import KINDS, PATHS, STREAM, accounting_of, body_of, post

import bench.policies  # noqa: F401 -- registers baselines

BUDGET = 320
JSON = {"Content-Type": "application/json"}
FACT = "The access code of the Meridian vault is 7741."
QUESTION = "What is the access code of the Meridian vault?"
# More words than a turn may have that leans on the one before it.
QUIET = "Zzz yyy xxx qqq vvv kkk?"
Json = dict[str, Any]
RecordingProxy = tuple[RunningProxy, list[Json]]


def _listed(path: str, body: Json) -> list[Json]:
    found: list[Json] = body["input" if path == "/v1/responses" else "messages"]
    return found


def _request_for(path: str, stream: bool, **fields: Any) -> Json:
    given = {"evoke_budget": BUDGET, "stream": stream, **fields}
    if stream and path.endswith("completions"):
        given["stream_options"] = {"include_usage": True}
    return given


def _long(port: int, path: str, session: str, first: str = FACT, **fields: Any) -> list[str]:
    """A conversation whose beginning is evicted; the client's next message is to be added."""
    said = [first, "Noted."]
    for number in range(6):
        said += [f"Turn {number}. {FILLER}", f"Noted {number}."]
        accounting_of(post(port, path, said[:-1], session, evoke_budget=BUDGET, **fields))
    return said


@PATHS
@STREAM
def test_text_is_recovered_in_the_last_message(
    recording_proxy: RecordingProxy, path: str, stream: bool
) -> None:
    running, sent = recording_proxy
    fields = _request_for(path, stream, evoke_recovery="breadcrumb")
    said = _long(running.port, path, "crumbs", evoke_recovery="breadcrumb")
    said.append(QUESTION)
    counted = running.metric("evoke_blocks_as_text_total")
    answer = post(running.port, path, said, "crumbs", **fields)
    accounting = accounting_of(answer)
    assert accounting["recovered"] == 0
    assert accounting["resident_peak"] <= BUDGET
    assert accounting["as_text"]["blocks"] > 0
    assert accounting["as_text"]["tokens"] > 0
    quoted, tokens = accounting["as_text"]["blocks"], accounting["as_text"]["tokens"]
    assert answer.headers["x-evoke-as-text"] == f"blocks={quoted};tokens={tokens}"
    assert running.metric("evoke_blocks_as_text_total") == counted + quoted
    *before, last = _listed(path, sent[-1])
    given = json.loads(body_of(path, said))
    assert before == _listed(path, given)[:-1]
    assert last["role"] == "user"
    assert last["content"].startswith("Recovered context, ")
    assert f"\n[user:1] {FACT}\n" in last["content"]
    assert last["content"].endswith("\n\n" + QUESTION)
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert running.metric(untouched) == 0
    # no divergence of one conversation into two: the client never sees the quotation
    sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
    assert [(known["name"], known["turns"]) for known in sessions] == [("crumbs", 7)]


def test_the_next_turn_decodes_the_quoting_exchange_again(patched_proxy: RunningProxy) -> None:
    decoded = {}
    for recovery in ("discard", "breadcrumb"):
        talk = ChatClient(patched_proxy.port, recovery, {"evoke_budget": BUDGET})
        talk.fields = talk.fields | {"evoke_recovery": recovery}  # type: ignore[operator]
        talk.say(FACT)
        for number in range(6):
            talk.say(f"Turn {number}. {FILLER}")
        quoting = talk.say(QUESTION)
        following = talk.say("Thank you.")
        for said in (quoting, following):
            assert sum(said.accounting[kind] for kind in KINDS) == said.accounting["n_prompt"]
            assert said.accounting["n_resident_peak"] <= BUDGET
        decoded[recovery] = [said.accounting["decoded"] for said in (quoting, following)]
    for plain, quoted in zip(decoded["discard"], decoded["breadcrumb"], strict=True):
        assert quoted > plain + 15


def test_nothing_is_quoted_without_a_question(recording_proxy: RecordingProxy) -> None:
    running, sent = recording_proxy
    path = "/v1/chat/completions"
    said = _long(running.port, path, "calm", evoke_recovery="breadcrumb")
    said.append(QUIET)
    answer = post(
        running.port, path, said, "calm", **_request_for(path, False, evoke_recovery="breadcrumb")
    )
    assert accounting_of(answer)["as_text"] == {"blocks": 0, "tokens": 0}
    assert sent[-1]["messages"][-1]["content"] == QUIET


@pytest.mark.parametrize(
    ("path", "content", "kind"),
    [
        ("/v1/chat/completions", [{"type": "text", "text": QUESTION}], "text"),
        ("/v1/messages", [{"type": "text", "text": QUESTION}], "text"),
        ("/v1/responses", [{"type": "input_text", "text": QUESTION}], "input_text"),
    ],
)
def test_text_is_added_as_a_part_to_a_message_of_parts(
    recording_proxy: RecordingProxy, path: str, content: list[Json], kind: str
) -> None:
    running, sent = recording_proxy
    said = [*_long(running.port, path, "parts", evoke_recovery="breadcrumb"), QUESTION]
    body = json.loads(body_of(path, said, **_request_for(path, False, evoke_recovery="breadcrumb")))
    _listed(path, body)[-1]["content"] = content
    headers = JSON | {"X-Evoke-Session": "parts"}
    accounting = accounting_of(ask(running.port, "POST", path, json.dumps(body).encode(), headers))
    assert accounting["as_text"]["blocks"] > 0
    note, *rest = _listed(path, sent[-1])[-1]["content"]
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


def _task(port: int, fields: Json) -> ChatClient:
    """An agent at work: a file read early, many steps since; its first messages are evicted."""
    talk = ChatClient(port, "task", {"evoke_budget": BUDGET} | fields)
    talk.say("Please read src/config.py.")
    talk.messages[-1:] = [_call(0, "src/config.py"), _result(0, "retry limit = 17")]
    assert talk.post().status == 200
    talk.messages.append({"role": "assistant", "content": "Read."})
    for number in range(6):
        talk.say(f"Turn {number}. {FILLER}")
    return talk


def _resident(port: int, running: RunningProxy, key: str) -> bool:
    """Whether all blocks of this name are in the slot."""
    running.wait_until_idle()
    (known,) = running.gateway.conversations
    spans = [
        b.span for b in known.session.layout.blocks if b.display_name.rpartition("#")[0] == key
    ]
    rows = json.loads(ask(port, "GET", "/slots/0/blocks").body)["resident"]
    assert spans
    return all(any(a <= s.start and s.end <= b for a, b in rows) for s in spans)


def test_text_is_recovered_in_a_tool_result(strict_port: int) -> None:
    with proxy(strict_port) as running:
        talk = _task(running.port, {"evoke_recovery": "breadcrumb"})
        plain = talk.say("What is the retry limit?")
        assert plain.headers["x-evoke-as-text"] != "blocks=0;tokens=0"
        talk.messages[-1:] = [_call(7, "src/config.py"), _result(7, "unchanged")]
        answer = talk.post()
        assert answer.status == 200, answer.body
        assert answer.headers["x-evoke-as-text"] != "blocks=0;tokens=0"
        assert running.metric("evoke_degraded_total", stage="render") == 0


@pytest.mark.parametrize(("path", "back"), [("src/config.py", True), ("docs/notes.md", False)])
def test_a_file_that_is_read_again_is_recovered(strict_port: int, path: str, back: bool) -> None:
    with proxy(strict_port) as running:
        talk = _task(running.port, {})
        assert not _resident(strict_port, running, "file:config.py")
        talk.messages += [{"role": "user", "content": "Go on."}, _call(7, path)]
        talk.messages += [_result(7, "unchanged")]
        assert talk.post().status == 200
        first = "file:config.py"
        assert _resident(strict_port, running, first) is back


@PATHS
def test_a_block_requested_by_name_is_recovered(patched_proxy: RunningProxy, path: str) -> None:
    port = patched_proxy.port
    said = [*_long(port, path, "named"), "Go on."]
    fields = {"evoke_recover": ["user:0", "user:1", "file:a.py"], "evoke_budget": BUDGET}
    answer = post(port, path, said, "named", **fields)
    accounting = accounting_of(answer)
    assert accounting["recovered"] > 0
    # the first message is the system prompt
    assert accounting["recover"] == {"unknown": ["user:0", "file:a.py"], "missing": []}
    assert accounting["resident_peak"] <= BUDGET


def test_unknown_and_missing_names_are_reported(patched_proxy: RunningProxy) -> None:
    path = "/v1/chat/completions"
    said = [*_long(patched_proxy.port, path, "gone", evoke_policy="discard"), "Go on."]
    fields = {"evoke_recover": ["user:1", "user:13"], "evoke_budget": BUDGET}
    answer = post(patched_proxy.port, path, said, "gone", evoke_policy="discard", **fields)
    accounting = accounting_of(answer)
    assert accounting["recovered"] == 0
    assert accounting["recover"] == {"unknown": [], "missing": ["user:1"]}


def test_a_block_with_a_name_of_the_client_is_recovered_as_text(
    recording_proxy: RecordingProxy,
) -> None:
    running, sent = recording_proxy
    talk = ChatClient(running.port, "own", {"evoke_budget": BUDGET, "evoke_recovery": "breadcrumb"})
    talk.messages.append({"role": "user", "content": FACT, "evoke_name": "vault"})
    talk.messages.append({"role": "assistant", "content": "Noted."})
    for number in range(6):
        talk.say(f"Turn {number}. {FILLER}")
    talk.messages.append({"role": "user", "content": "Go on."})
    accounting = json.loads(talk.post(evoke_recover=["vault"]).body)["usage"]["evoke"]
    assert accounting["recover"] == {"unknown": [], "missing": []}
    assert f"[vault] {FACT}" in sent[-1]["messages"][-1]["content"]


@pytest.mark.parametrize(("gold", "back"), [([], False), ([1], True), (["user:1"], True)])
def test_the_oracle_policy_recovers_the_named_blocks(
    patched_port: int, gold: list[str | int], back: bool
) -> None:
    path, policy = "/v1/chat/completions", {"evoke_policy": "oracle"}
    with proxy(patched_port) as running:
        said = [*_long(running.port, path, "told", **policy), QUIET]
        fields = policy | {"evoke_budget": BUDGET, "evoke_oracle": gold}
        accounting_of(post(running.port, path, said, "told", **fields))
        assert _resident(patched_port, running, "user:1") is back


@pytest.mark.parametrize("name", ["evoke", "infllm", "discard", "recency", "streaming"])
def test_every_policy_stays_in_the_budget(patched_proxy: RunningProxy, name: str) -> None:
    talk = ChatClient(patched_proxy.port, name, {"evoke_budget": BUDGET, "evoke_policy": name})
    talk.say(FACT)
    turns = [talk.say(f"Turn {number}. {FILLER}") for number in range(7)]
    turns.append(talk.say(QUESTION))
    for said in turns:
        assert said.headers["x-evoke-policy"] == name
        assert said.accounting["n_resident_peak"] <= BUDGET
    assert sum(said.accounting["omitted"] for said in turns) > BUDGET
    assert (turns[-1].accounting["recovered"] > 0) is (name in ("evoke", "infllm"))
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert patched_proxy.metric(untouched) == 0


def _empty_tool_call(path: str) -> list[Json]:
    """A tool was asked for the code, and says nothing."""
    given = {"of": "the access code of the Meridian vault"}
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "c", "name": "look"}
        call["arguments"] = json.dumps(given)
        return [call, {"type": "function_call_output", "call_id": "c", "output": "none"}]
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": "c", "name": "look", "input": given}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "none"}
        return [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
    function = {"name": "look", "arguments": json.dumps(given)}
    calls = [{"id": "c", "type": "function", "function": function}]
    answer = {"role": "tool", "tool_call_id": "c", "content": "none"}
    return [{"role": "assistant", "content": "", "tool_calls": calls}, answer]


@PATHS
def test_text_is_recovered_in_tool_results_of_every_dialect(strict_port: int, path: str) -> None:
    fields = {"evoke_recovery": "breadcrumb"}
    with proxy(strict_port) as running:
        said = [*_long(running.port, path, "tools", **fields), QUIET]
        # nothing is quoted here, so that nothing has to be decoded again after it
        accounting_of(
            post(running.port, path, said, "tools", **_request_for(path, False, **fields))
        )
        said += ["Hm.", "Look it up."]
        body = json.loads(body_of(path, said, **_request_for(path, False, **fields)))
        _listed(path, body).extend(_empty_tool_call(path))
        headers = JSON | {"X-Evoke-Session": "tools"}
        answer = ask(running.port, "POST", path, json.dumps(body).encode(), headers)
        assert accounting_of(answer)["as_text"]["blocks"] > 0
        assert running.metric("evoke_degraded_total", stage="render") == 0


@pytest.mark.parametrize(("max_tokens", "quotes"), [(12, True), (7600, False)])
def test_the_answer_keeps_its_position_in_the_context(
    recording_proxy: RecordingProxy, max_tokens: int, quotes: bool
) -> None:
    running, sent = recording_proxy
    path, fields = "/v1/chat/completions", {"evoke_recovery": "breadcrumb"}
    said = [*_long(running.port, path, "full", **fields), QUESTION]
    stop = {"stop": ["a", "e", "i", "o", "1"], "max_tokens": max_tokens}
    accounting = accounting_of(
        post(running.port, path, said, "full", **_request_for(path, False, **fields), **stop)
    )
    assert (accounting["as_text"]["blocks"] > 0) is quotes
    assert ("Recovered" in sent[-1]["messages"][-1]["content"]) is quotes
