"""A turn whose plan fails is answered without it, and the failure is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from conversation import FILLER, ChatClient, events
from fake_upstream import Behaviour, Exchange, FakeUpstream, fake_upstream, response
from harness import RunningProxy, ask, proxy

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Load, Plan
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.session.session import Session

JSON = {"Content-Type": "application/json", "X-Evoke-Session": "s"}
BODY = b'{"messages":[{"role":"user","content":"hi"}],"evoke_budget":300,"top_k":1.50}'
BODY_WITHOUT_FIELDS = b'{"messages":[{"role":"user","content":"hi"}],"top_k":1.50}'
SLOT = (
    b'{"id":0,"epoch":7,"n_tokens":0,"n_common":0,"resident":[],"n_free":999,"is_processing":false}'
)
RENDERED = (
    b'{"tokens":[1,2,3,4],"generation":3,"spans":[{"index":0,"role":"user","p0":0,"p1":3}],"slots":['
    + SLOT
    + b"]}"
)
REPLY = b'{"choices":[{"finish_reason":"stop","message":{"content":"fine"}}]}'
ERROR = b'{"error":{"code":500,"type":"server_error","message":"no"}}'


def _server(**answers: bytes) -> Behaviour:
    """A patched server that answers `render`, `plan`, `blocks` and `chat` with these replies."""
    json_type = b"application/json"

    async def behave(exchange: Exchange) -> None:
        target = exchange.head.split(b" ")[1]
        if target == b"/evoke/render":
            answer = answers.get("render", response(RENDERED, json_type))
        elif b"block-plan" in target:
            default = response(b'{"epoch":7,"results":[]}', json_type)
            answer = answers.get("plan", default)
        elif target.startswith(b"/slots/0/blocks"):
            answer = answers.get("blocks", response(SLOT, json_type))
        else:
            answer = answers.get("chat", response(REPLY, json_type))
        await exchange.send(answer)
        if not answer:
            exchange.writer.close()

    return behave


def _refusal(kind: bytes, status: bytes = b"409 Conflict") -> bytes:
    body = b'{"error":{"code":409,"type":"%s","message":"no","name":"x"}}' % kind
    return response(body, b"application/json", status)


@pytest.mark.parametrize(
    ("answers", "stage"),
    [
        ({"render": response(ERROR, b"application/json", b"500 Internal Server Error")}, "render"),
        ({"render": response(ERROR, b"application/json", b"404 Not Found")}, "render"),
        ({"render": response(ERROR, b"application/json", b"400 Bad Request")}, "render"),
        ({"render": response(b"not json")}, "render"),
        ({"render": response(b'{"tokens":"many"}')}, "render"),
        ({"render": b""}, "render"),
        ({"render": response(RENDERED.replace(b'"id":0', b'"id":1'))}, "slot"),
        ({"plan": _refusal(b"stale_epoch")}, "plan"),
        ({"plan": _refusal(b"no_free_cells", b"503 Service Unavailable")}, "plan"),
        ({"plan": response(b"[]")}, "plan"),
        ({"plan": response(b"{}")}, "plan"),
        ({"plan": _refusal(b"unknown_block"), "blocks": response(b"nonsense")}, "plan"),
    ],
)
def test_a_fault_before_forwarding_leads_to_an_answer_without_a_plan(
    answers: dict[str, bytes], stage: str
) -> None:
    with fake_upstream(_server(**answers), patched=True) as fake, proxy(fake.port) as running:
        answer = ask(running.port, "POST", "/v1/chat/completions", BODY, JSON)
        assert (answer.status, answer.body) == (200, REPLY)
        forwarded = [each for each in fake.requests if b"/v1/chat/completions" in each.head]
        assert [each.body for each in forwarded] == [BODY_WITHOUT_FIELDS]
        assert [name for name in answer.headers if name.startswith("x-evoke")] == []
        assert running.metric("evoke_degraded_total", stage=stage) == 1
        if b"409" in answers.get("plan", b""):
            reason = json.loads(answers["plan"].partition(b"\r\n\r\n")[2])["error"]["type"]
            assert running.metric("evoke_plan_failures_total", reason=reason) >= 1


def test_a_body_that_llama_server_refuses_counts_as_a_bypass() -> None:
    refused = response(ERROR.replace(b"500", b"400"), b"application/json", b"400 Bad Request")
    server = _server(render=refused, chat=refused)
    with (
        fake_upstream(server, patched=True) as fake,
        proxy(fake.port, policy__budget=512) as running,
    ):
        answer = ask(running.port, "POST", "/v1/chat/completions", BODY, JSON)
        assert answer.status == 400
        assert running.metric("evoke_bypass_total", reason="invalid") == 1
        assert running.metric("evoke_degraded_total", stage="render") == 0
        assert running.metric("evoke_budget_breach_total") == 0


@pytest.mark.parametrize(
    "wrong", [{"tools": "all"}, {"tools": [{}]}, {"reasoning_format": "x"}], ids=str
)
def test_a_wrong_field_that_llama_server_answers_with_500_is_no_failure_and_no_breach(
    patched_port: int, wrong: dict[str, Any]
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **wrong}).encode()
    with proxy(patched_port, policy__budget=512) as running:
        assert ask(running.port, "POST", "/v1/chat/completions", body, JSON).status == 500
        assert running.metric("evoke_bypass_total", reason="invalid") == 1
        assert running.metric("evoke_degraded_total", stage="render") == 0
        assert running.metric("evoke_budget_breach_total") == 0


def test_a_refused_plan_is_made_a_second_time() -> None:
    refusals = [_refusal(b"stale_epoch")]
    default_behaviour = _server()

    async def behave(exchange: Exchange) -> None:
        if b"block-plan" in exchange.head and refusals:
            await exchange.send(refusals.pop())
        else:
            await default_behaviour(exchange)

    with fake_upstream(behave, patched=True) as fake, proxy(fake.port) as running:
        assert ask(running.port, "POST", "/v1/chat/completions", BODY, JSON).status == 200
        sent = json.loads(next(s.body for s in fake.requests if b"/v1/chat" in s.head))
        assert (sent["id_slot"], sent["cache_prompt"], sent["evoke"]) == (0, True, {"epoch": 7})
        assert running.metric("evoke_plan_failures_total", reason="stale_epoch") == 1
        assert running.metric("evoke_degraded_total", stage="plan") == 0


def test_a_call_that_does_not_return_is_cancelled() -> None:
    async def behave(exchange: Exchange) -> None:
        if b"/evoke/render" not in exchange.head:
            await exchange.send(response(REPLY, b"application/json"))

    with (
        fake_upstream(behave, patched=True) as fake,
        proxy(fake.port, upstream__call_timeout_s=1.0) as running,
    ):
        assert ask(running.port, "POST", "/v1/chat/completions", BODY, JSON).body == REPLY
        assert running.metric("evoke_degraded_total", stage="render") == 1


def test_the_forwarded_body_has_the_plan_marker_and_its_original_bytes() -> None:
    with fake_upstream(_server(), patched=True) as fake, proxy(fake.port) as running:
        answer = ask(running.port, "POST", "/v1/chat/completions", BODY, JSON)
        assert answer.headers["x-evoke-session"] == "s"
        sent = next(request.body for request in fake.requests if b"/v1/chat" in request.head)
        marker = b'"id_slot":0,"cache_prompt":true,"evoke":{"epoch":7}'
        assert sent.startswith(b"{")
        assert marker in sent.replace(b": ", b":").replace(b", ", b",")
        assert sent.endswith(BODY_WITHOUT_FIELDS[1:])


def test_calls_of_the_proxy_have_the_credentials_of_the_client() -> None:
    with fake_upstream(_server(), patched=True) as fake, proxy(fake.port) as running:
        ask(
            running.port, "POST", "/v1/chat/completions", BODY, JSON | {"Authorization": "Bearer k"}
        )
        running.wait_until_idle()
        of_start = b"/slots/0/blocks?tenant=&since"  # asks for the disk tier, before any request
        others = (b"/v1/chat", of_start)
        calls = [each for each in fake.requests if not any(path in each.head for path in others)]
        assert len(calls) >= 2
        assert all(b"Authorization: Bearer k\r\n" in call.head for call in calls)
        plan = next(json.loads(call.body) for call in calls if b"block-plan" in call.head)
        assert plan["tenant"] not in ("", "k")


def _reply_with_accounting(**accounting: object) -> bytes:
    counts = {"n_prompt": 4, "decoded": 4, "recovered": 0, "resident_before": 0, "omitted": 0}
    evoke = {"marker": "ok", "n_resident_peak": 4, "auto_evicted": []} | counts | accounting
    return json.dumps(json.loads(REPLY) | {"timings": {"evoke": evoke}}).encode()


@pytest.mark.parametrize("n_refusals", [0, 1, 2])
def test_a_changed_prompt_is_counted_whichever_plan_runs(n_refusals: int) -> None:
    """The first plan, the second one, or the one that only holds the budget."""
    accounting = response(_reply_with_accounting(n_prompt=64, decoded=64), b"application/json")

    def server(last: int) -> Behaviour:
        """A server that renders a history with another last answer."""
        spans = enumerate(
            zip(("user", "assistant", "user"), (0, 20, 60), (20, 60, 63), strict=True)
        )
        rendered = {
            "tokens": [*range(1, 50), *[last] * 10, *range(60, 65)],
            "generation": 63,
            "spans": [
                {"index": i, "role": role, "p0": p0, "p1": p1} for i, (role, p0, p1) in spans
            ],
            "slots": [json.loads(SLOT)],
        }
        render = response(json.dumps(rendered).encode(), b"application/json")
        return _server(chat=accounting, render=render)

    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": "some text"} for role in roles]
    body = json.dumps({"messages": messages, "evoke_budget": 300}).encode()
    behaviour, refusals = server(100), list[bytes]()

    async def behave(exchange: Exchange) -> None:
        if b"block-plan" in exchange.head and refusals:
            await exchange.send(refusals.pop())
        else:
            await behaviour(exchange)

    with fake_upstream(behave, patched=True) as fake, proxy(fake.port) as running:
        assert ask(running.port, "POST", "/v1/chat/completions", body, JSON).status == 200
        behaviour, refusals = server(101), [_refusal(b"stale_epoch")] * n_refusals
        assert ask(running.port, "POST", "/v1/chat/completions", body, JSON).status == 200
        assert running.metric("evoke_plan_failures_total", reason="stale_epoch") == n_refusals
        families = running.gateway.metrics.registry.collect()
        samples = [sample for family in families for sample in family.samples]
        name = "evoke_prefix_divergence_total"
        assert sum(sample.value for sample in samples if sample.name == name) == 1


@pytest.mark.parametrize(
    ("accounting", "metric", "labels"),
    [
        ({"n_resident_peak": 301}, "evoke_budget_breach_total", {}),
        ({"marker": "stale"}, "evoke_plan_failures_total", {"reason": "books_differ"}),
        ({"decoded": 3, "omitted": 1}, "evoke_plan_failures_total", {"reason": "books_differ"}),
    ],
)
def test_accounting_that_differs_from_the_plan_is_counted_and_logged_in_words(
    accounting: dict[str, object],
    metric: str,
    labels: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for changes, count in (({}, 0), (accounting, 1)):
        reply = response(_reply_with_accounting(**changes), b"application/json")
        with fake_upstream(_server(chat=reply), patched=True) as fake, proxy(fake.port) as running:
            assert ask(running.port, "POST", "/v1/chat/completions", BODY, JSON).status == 200
            assert running.metric(metric, **labels) == count
    logged = [text for text in caplog.messages if "something else than planned" in text]
    assert len(logged) == bool(labels)
    for text in logged:
        assert "TokenAccounting" not in text
        assert "tokens" in text and "probably" in text and "evoke-proxy doctor" in text


def test_a_session_whose_rows_cannot_be_saved_still_releases_its_slot() -> None:
    rows = SLOT.replace(b'"resident":[]', b'"resident":[[0,3]]').replace(
        b'"n_tokens":0', b'"n_tokens":3'
    )
    render = response(RENDERED.replace(SLOT, rows), b"application/json")
    default_behaviour = _server(
        render=render, chat=response(_reply_with_accounting(), b"application/json")
    )

    async def behave(exchange: Exchange) -> None:
        refused = b'"op":"save"' in exchange.body
        await (exchange.send(_refusal(b"ram_budget")) if refused else default_behaviour(exchange))

    with fake_upstream(behave, patched=True) as fake, proxy(fake.port) as running:
        for name in ("one", "other"):
            headers = JSON | {"X-Evoke-Session": name}
            answer = ask(running.port, "POST", "/v1/chat/completions", BODY, headers)
            assert answer.headers["x-evoke-session"] == name
        assert running.metric("evoke_plan_failures_total", reason="ram_budget") == 1
        assert running.metric("evoke_degraded_total", stage="plan") == 0


def test_a_turn_with_an_internal_error_in_planning_is_answered_without_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Session, "plan", _raise_error)
    with fake_upstream(_server(), patched=True) as fake, proxy(fake.port) as running:
        answer = ask(running.port, "POST", "/v1/chat/completions", BODY, JSON)
        assert (answer.status, answer.body) == (200, REPLY)
        assert running.metric("evoke_degraded_total", stage="decide") == 1
        assert running.metric("evoke_budget_breach_total") == 0
        plans = [json.loads(s.body)["ops"] for s in fake.requests if b"block-plan" in s.head]
        sent = next(request.body for request in fake.requests if b"/v1/chat" in request.head)
    # llama-server keeps the budget itself.
    assert [[op["op"] for op in ops] for ops in plans] == [["stream"]]
    (stream,) = plans[0]
    assert (stream["budget"], stream["protect"], stream["order"]) == (300, [], [])
    assert json.loads(sent)["evoke"] == {"epoch": 7}


def _raise_error(*_: object) -> None:
    raise ZeroDivisionError("a defect")


def test_llama_server_keeps_the_budget_if_a_plan_is_refused_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _refuse_plans(monkeypatch)
    default_behaviour = _server()

    async def behave(exchange: Exchange) -> None:
        refusal = _refusal(b"unknown_block", b"404 Not Found")
        await (
            exchange.send(refusal) if b"nowhere" in exchange.body else default_behaviour(exchange)
        )

    with fake_upstream(behave, patched=True) as fake, proxy(fake.port) as running:
        answer = ask(running.port, "POST", "/v1/chat/completions", BODY, JSON)
        assert (answer.status, answer.body) == (200, REPLY)
        assert _forwarded(fake)["evoke"] == {"epoch": 7}
        assert running.metric("evoke_degraded_total", stage="plan") == 1
        assert running.metric("evoke_plan_failures_total", reason="unknown_block") == 2
        assert running.metric("evoke_budget_breach_total") == 0


def test_a_turn_is_forwarded_without_a_budget_if_holes_of_another_session_remain() -> None:
    holed = SLOT.replace(b'"resident":[]', b'"resident":[[0,1],[2,3]]')
    holed = holed.replace(b'"n_tokens":0,"n_common":0', b'"n_tokens":3,"n_common":3')
    render = response(RENDERED.replace(SLOT, holed), b"application/json")
    default_behaviour = _server(render=render)

    async def behave(exchange: Exchange) -> None:
        """Refuse to reuse only the rows before the holes."""
        is_reuse = b'"reuse"' in exchange.body
        await (
            exchange.send(_refusal(b"unavailable_error"))
            if is_reuse
            else default_behaviour(exchange)
        )

    with fake_upstream(behave, patched=True) as fake, proxy(fake.port) as running:
        answer = ask(running.port, "POST", "/v1/chat/completions", BODY, JSON)
        assert (answer.status, answer.body) == (200, REPLY)
        assert "evoke" not in _forwarded(fake)
        assert running.metric("evoke_degraded_total", stage="decide") == 1
        assert running.metric("evoke_budget_breach_total") == 1


def _forwarded(fake: FakeUpstream) -> dict[str, object]:
    sent: dict[str, object] = next(json.loads(s.body) for s in fake.requests if b"/v1/" in s.head)
    return sent


def _refuse_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add an operation with an unknown block to every plan of a session."""
    plan = Session.plan

    def invalid_plan(self: Session, turn: Turn) -> Plan:
        return replace(plan(self, turn), loads=(Load("nowhere", Span(0, 1)),))

    monkeypatch.setattr(Session, "plan", invalid_plan)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["refused", "defect"])
def test_a_turn_without_a_plan_stays_in_its_budget(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch, fault: str, stream: bool
) -> None:
    budget = 320
    client = ChatClient(patched_proxy.port, "unplanned", {"evoke_budget": budget})
    client.say("The access code of the Meridian vault is 7741.")
    for number in range(5):
        client.say(f"Turn {number}. {FILLER}")
    with monkeypatch.context() as patch:
        _refuse_plans(patch) if fault == "refused" else patch.setattr(Session, "plan", _raise_error)
        client.messages.append({"role": "user", "content": f"Now long. {FILLER * 3}"})
        fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = client.post(max_tokens=60, ignore_eos=True, **fields)
        reply = next(reversed([*events(answer.body)])) if stream else json.loads(answer.body)
        accounting = reply["usage"]["evoke"]
        assert accounting["budget"] == budget
        assert accounting["decoded"] > budget / 2
        assert accounting["resident_peak"] <= budget
        stage = "plan" if fault == "refused" else "decide"
        assert patched_proxy.metric("evoke_degraded_total", stage=stage) == 1
    client.messages.append({"role": "assistant", "content": "Noted."})
    turn = client.say("What is the access code of the Meridian vault?")
    assert turn.accounting["marker"] == "ok"
    assert turn.accounting["recovered"] > 0
    assert turn.accounting["n_resident_peak"] <= budget
    assert patched_proxy.metric("evoke_plan_failures_total", reason="books_differ") == 0
    assert patched_proxy.metric("evoke_budget_breach_total") == 0


def test_other_internal_errors_are_500_in_the_clients_dialect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    with fake_upstream(_server(), patched=True) as fake, proxy(fake.port) as running:
        monkeypatch.setattr(running.gateway, "exchange", failing)
        answer = ask(running.port, "POST", "/v1/chat/completions", BODY, JSON)
    assert answer.status == 500
    assert json.loads(answer.body)["error"]["message"] == "evoke-proxy failed; see its log"


def test_a_request_with_an_image_bypasses_the_budget() -> None:
    image = (
        b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}'
    )
    with fake_upstream(_server(), patched=True) as fake, proxy(fake.port) as running:
        ask(running.port, "POST", "/v1/chat/completions", image, JSON)
        # The slot is added; a request with a plan would also have "evoke".
        bodies = [request.body for request in fake.requests if request.head.startswith(b"POST")]
        assert bodies == [b'{"id_slot":0,' + image[1:]]
        assert running.metric("evoke_bypass_total", reason="media") == 1
