"""Request bodies that crash or hang a real llama-server are refused before they reach it."""

from __future__ import annotations

import functools
import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Answer, RunningProxy, ask, llama_server, process_on, proxy, server_binary

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.core.tenants.api_keys import Caller, key_of, line_of

KEY = key_of(b"checked".ljust(32, b"."))
_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
_DEEP = "[" * 100_000 + "]" * 100_000
_GRAMMAR = "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000
_HUGE = {"repeat_last_n": 2**31 - 1, "dry_penalty_last_n": 2**31 - 1, "dry_multiplier": 1.0}
_HUGE |= {"repeat_penalty": 1.1}
_TRIGGERS = {
    "grammar": 'root ::= "a"',
    "grammar_lazy": True,
    "grammar_triggers": [{"type": 2, "value": "(" * 60_000 + ")" * 60_000}],
}


def _body(more: dict[str, Any] | None = None, raw: str = "") -> bytes:
    """Return a body that every path accepts, with `more` members and a member `z` of raw JSON."""
    body = {"messages": _MESSAGES, "input": "hello", "prompt": "hello", "content": "hello"}
    text = json.dumps({**body, "max_tokens": 1, "query": "a", "documents": ["b"], **(more or {})})
    return (text[:-1] + (f', "z": {raw}' if raw else "") + "}").encode()


# Each of these crashed llama-server or kept it busy for minutes, in the pinned version.
ATTACKS: dict[str, Callable[[], bytes]] = {
    "nested 100,000 deep": lambda: _body(raw=_DEEP),
    "nested in a schema": lambda: _body(raw='{"schema":' * 50_000 + "1" + "}" * 50_000),
    "a grammar of 20,000 parentheses": lambda: _body({"grammar": _GRAMMAR}),
    "penalties over 2^31 tokens": lambda: _body(_HUGE),
    "380,000 keys": lambda: _body({f"k{i}": 0 for i in range(380_000)}),
    "a trigger of 60,000 parentheses": lambda: _body(_TRIGGERS),
    "5,000 samplers": lambda: _body(
        {"samplers": "d" * 5000, **_HUGE, "dry_penalty_last_n": 262_144}
    ),
    "2,000 optional properties": lambda: _body(
        {"json_schema": {"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}}
    ),
    "125 optional parts": lambda: _body({"grammar": 'root ::= ("a"? "b"?){0,125} "b"'}),
    "a pattern with optional parts": lambda: _body(
        {"json_schema": {"pattern": f"^{'a?' * 1000}$"}}
    ),
    "an enumeration of 20,000": lambda: _body({"json_schema": {"enum": list(range(20_000))}}),
    "a number of 10,000 digits": lambda: _body(raw="1" * 10_000),
    "a million messages": lambda: b'{"messages":[' + b"{}," * 340_000 + b"{}]}",
}


@functools.cache
def _attack(name: str) -> bytes:
    """Return the body of that name, made once: that of 380,000 keys takes a second."""
    return ATTACKS[name]()


# All paths that tenants may POST to with keys.
PATHS = (
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/completion"),
    *("/infill", "/apply-template", "/tokenize", "/detokenize", "/embeddings", "/v1/embeddings"),
    *("/rerank", "/v1/chat/completions/input_tokens", "/v1/messages/count_tokens"),
)


@pytest.fixture(scope="module", params=("stock", "patched"))
def upstream(request: pytest.FixtureRequest) -> Iterator[int]:
    binary = server_binary(patched=request.param == "patched")
    with llama_server(binary, "-np", "2") as port:
        yield port


@pytest.fixture(scope="module", params=("keys", "no keys"))
def running(
    request: pytest.FixtureRequest, upstream: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningProxy]:
    settings: dict[str, object] = {}
    if request.param == "keys":
        path: Path = tmp_path_factory.mktemp("keys") / "keys"
        write_secret(path, line_of(Caller("a", "a"), KEY))
        settings["security__keys_file"] = str(path)
    with proxy(upstream, **settings) as checking_proxy:
        yield checking_proxy


def _ask(running: RunningProxy, path: str, body: bytes) -> Answer:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    return ask(running.port, "POST", path, body, headers)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_excessive_body_is_refused_on_every_path(
    running: RunningProxy, upstream: int, attack: str
) -> None:
    process, body = process_on(upstream), _attack(attack)
    for path in PATHS:
        answer = _ask(running, path, body)
        error = json.loads(answer.body)["error"]
        assert answer.status == 400, path
        # It names what is too large, and the setting or the number that bounds it.
        bound = r"limits\.\w+|(allows at most|allows|deeper than) \d+|patterns"
        assert re.search(bound, error["message"]), error["message"]
        if path.startswith("/v1/messages"):
            assert json.loads(answer.body)["type"] == "error"
            assert error["type"] == "invalid_request_error"
        else:
            assert error["code"] in ("parameter_too_large", "request_too_complex")
    assert process_on(upstream) == process, "llama-server was restarted"
    assert ask(upstream, "GET", "/health").status == 200
    assert len(running.gateway.conversations) == 0, "a refused request became a conversation"


def test_arguments_of_tool_calls_are_checked_as_json(running: RunningProxy) -> None:
    function = {"name": "run", "arguments": '{"a":' + _DEEP + "}"}
    call = {"id": "1", "type": "function", "function": function}
    messages = [*_MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for path in ("/v1/chat/completions", "/apply-template"):
        assert _ask(running, path, _body({"messages": messages})).status == 400


def test_ordinary_bodies_pass_the_checks(running: RunningProxy) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    more = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "dry_multiplier": 0.8,
        "dry_penalty_last_n": 4096,
        "repeat_last_n": 4096,
        "stop": ["###"],
    }
    answer = _ask(running, "/v1/chat/completions", _body(more))
    assert answer.status == 200, answer.body
    logprobs = {"logprobs": True, "top_logprobs": 20}
    assert _ask(running, "/v1/chat/completions", _body(logprobs)).status == 200
    tools = [{"type": "function", "function": {"name": "run", "parameters": schema}}]
    assert _ask(running, "/v1/chat/completions", _body({"tools": tools})).status == 200
    assert _ask(running, "/tokenize", b'{"content": "' + b"word " * 100_000 + b'"}').status == 200
    body = _body({"grammar": 'root ::= ("a" | "b")+', "n_probs": 100})
    assert _ask(running, "/completion", body).status == 200


def test_a_body_that_is_not_json_gets_the_error_of_llama_server(
    running: RunningProxy, upstream: int
) -> None:
    for invalid in (b"", b"[", b'{"content": ', b"\xff", b"[]"):
        direct = ask(upstream, "POST", "/tokenize", invalid, {"Content-Type": "application/json"})
        assert _ask(running, "/tokenize", invalid).status == direct.status


def test_a_body_above_a_limit_is_refused_before_its_end(running: RunningProxy) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (KEY.encode(), 60 * 1024 * 1024)
    )
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as client:
        client.sendall(head + b'{"messages":[' + b"{}," * 200_000)  # the rest is not sent
        assert client.recv(65536).startswith(b"HTTP/1.1 400 ")


# Bodies and headers with which llama-server might read an excessive body that the proxy does not.
_FORM = (
    b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--x\r\n%s\r\n\r\n'
    + _GRAMMAR.encode()
    + b"\r\n--x--\r\n"
)
_FIELD = b'Content-Disposition: form-data; name="grammar"'
_GRAMMAR_BODY = _body({"grammar": _GRAMMAR})
DISGUISED: dict[str, tuple[bytes, list[tuple[str, str]]]] = {
    "a NUL behind it": (_GRAMMAR_BODY + b"\0", []),
    "text behind a NUL": (_GRAMMAR_BODY + b"\0}", []),
    "another kind of multipart": (
        _GRAMMAR_BODY,
        [("Content-Type", "multipart/mixed; boundary=x")],
    ),
    "a form in capitals": (_GRAMMAR_BODY, [("Content-Type", "Multipart/Form-Data; boundary=x")]),
    "two types": (
        _GRAMMAR_BODY,
        [("Content-Type", "application/json"), ("Content-Type", "multipart/form-data; boundary=x")],
    ),
    "two types, the form first": (
        _GRAMMAR_BODY,
        [("Content-Type", "multipart/form-data; boundary=x"), ("Content-Type", "application/json")],
    ),
    "an unknown coding": (_GRAMMAR_BODY, [("Content-Encoding", "utf-8")]),
    "two codings": (
        _GRAMMAR_BODY,
        [("Content-Encoding", "gzip"), ("Content-Encoding", "identity")],
    ),
    "a field of a form": (_FORM % _FIELD, [("Content-Type", "multipart/form-data; boundary=x")]),
    "a file without a name": (
        _FORM % (_FIELD + b'; filename=""'),
        [("Content-Type", "multipart/form-data; boundary=x")],
    ),
    "a file by another header": (
        _FORM % (_FIELD + b"\r\nX-Other: a; filename=b"),
        [("Content-Type", "multipart/form-data; boundary=x")],
    ),
    "two boundaries": (
        _FORM % _FIELD,
        [("Content-Type", "multipart/form-data; xboundary=y; boundary=x")],
    ),
}


@pytest.mark.parametrize("path", ("/completion", "/v1/audio/transcriptions", "/apply-template"))
@pytest.mark.parametrize("disguise", DISGUISED)
def test_content_type_and_coding_do_not_bypass_the_checks(
    running: RunningProxy, upstream: int, disguise: str, path: str
) -> None:
    process = process_on(upstream)
    body, headers = DISGUISED[disguise]
    if not any(name == "Content-Type" for name, _ in headers):
        headers = [*headers, ("Content-Type", "application/json")]
    answer = _post(running, path, body, headers)
    assert answer.status == 400
    code = json.loads(answer.body)["error"]["code"]
    assert isinstance(code, str), "llama-server refused it, not the proxy"
    assert process_on(upstream) == process, "llama-server was restarted"
    assert ask(upstream, "GET", "/health").status == 200


@pytest.mark.parametrize("path", ("/lora-adapters", "/slots/0?action=x", "/nowhere"))
@pytest.mark.parametrize("before", (b"", b"\xef\xbb\xbf", b" \r\n"))
def test_every_path_refuses_an_object_of_a_million_keys(
    running: RunningProxy, upstream: int, path: str, before: bytes
) -> None:
    body = before + _attack("380,000 keys")
    assert _ask(running, path, body).status in (400, 403)
    assert ask(upstream, "GET", "/health").status == 200


def test_a_number_out_of_range_is_a_client_error(running: RunningProxy) -> None:
    triggers = b'"grammar_triggers":[{"type":1e999,"value":"x"}]'
    for member in (triggers, b'"repeat_last_n":-1e999', b'"z":"\\ud800",' + triggers):
        body = b'{"prompt":"a","n_predict":1,' + member + b"}"
        answer = _ask(running, "/completion", body)
        assert b"evoke_error" not in answer.body


def _post(running: RunningProxy, path: str, body: bytes, headers: list[tuple[str, str]]) -> Answer:
    """Send a request whose headers may contain duplicates."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    try:
        connection.putrequest("POST", path, skip_accept_encoding=True)
        key = ("Authorization", f"Bearer {KEY}")
        for name, value in [*headers, key, ("Content-Length", str(len(body)))]:
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        received = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, response.reason, received, response.read())
    finally:
        connection.close()
