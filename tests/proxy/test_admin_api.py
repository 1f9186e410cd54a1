"""The admin API: sessions, blocks, budgets, deletion, export, events."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from admin_client import (
    BUDGET,
    FACT,
    QUESTION,
    admin_call,
    admin_events,
    ask_for_fact,
    conversation_with_evicted_fact,
    fact_block,
)
from conversation import FILLER, ChatClient
from harness import TIMEOUT_S, RunningProxy, ask, proxy, unused_port
from stock_deployment import Chat, Deployment, long_chat

from evoke_proxy.core.session.block_map import STATES
from evoke_proxy.engine.admin.admin import Admin


def _only_session(running: RunningProxy) -> dict[str, Any]:
    """Return the details of the only session."""
    (session,) = admin_call(running, "GET", "sessions")["sessions"]
    details: dict[str, Any] = admin_call(running, "GET", f"sessions/{session['id']}")
    return details


def test_the_block_map_covers_every_token(patched_proxy: RunningProxy) -> None:
    client = conversation_with_evicted_fact(patched_proxy.port, "mapped")
    session = _only_session(patched_proxy)
    edges = [(block["p0"], block["p1"]) for block in session["blocks"]]
    assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])]
    assert session["fresh"] and set(session["totals"]) == set(STATES)
    last = session["history"][-1]
    assert sum(session["totals"].values()) >= last["prompt"]
    assert session["totals"]["resident"] <= session["resident"] <= BUDGET
    assert session["totals"]["saved_ram"] > 0 == session["totals"]["saved_disk"]
    assert fact_block(session)["state"] == "saved_ram"
    assert all(0 <= block["score"] for block in session["blocks"][:-1])
    accounting = ask_for_fact(client).accounting
    session = _only_session(patched_proxy)
    assert fact_block(session)["state"] == "resident"
    last = session["history"][-1]
    assert (last["path"], last["number"], last["budget"]) == ("recovered", 8, BUDGET)
    for kind in ("decoded", "recovered", "resident_before", "omitted"):
        assert last[kind] == accounting[kind]
    assert last["ttft_s"] > 0 and len(last["recovered_spans"]) > 0


def test_saved_blocks_are_shown_as_saved_whichever_session_has_the_slot(
    patched_proxy: RunningProxy,
) -> None:
    for name in ("first", "second"):
        conversation_with_evicted_fact(patched_proxy.port, name, system=f" This is the {name}.")
    ids = [row["id"] for row in admin_call(patched_proxy, "GET", "sessions")["sessions"]]
    assert len(ids) == 2
    for id in ids * 2:
        session = admin_call(patched_proxy, "GET", f"sessions/{id}")
        assert fact_block(session)["state"] == "saved_ram"
        assert session["totals"]["omitted"] == 0 < session["totals"]["saved_ram"]


def test_the_admin_api_exposes_no_text_of_prompts(patched_port: int) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read_file"}}
    call["function"] = {"name": "read_file", "arguments": '{"path": "hush/meridian.py"}'}
    messages = [
        {"role": "user", "content": FACT},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": FILLER},
    ]
    for names in (False, True):
        with proxy(patched_port, page__names=names) as running:
            client = ChatClient(running.port, "hushed", {"evoke_budget": BUDGET}, list(messages))
            client.say(f"Go on. {FILLER}")
            running.wait_until_idle()
            session = admin_call(running, "GET", "sessions")["sessions"][0]["id"]
            exposed = b"".join(
                ask(running.port, "GET", f"/evoke/{path}").body
                for path in ("sessions", f"sessions/{session}", "status")
            )
            exposed += repr(running.gateway.feed._recent).encode()
        for text in (b"Meridian", b"7741", b"quick brown"):
            assert text not in exposed
        assert (b"meridian.py" in exposed) is names


def test_an_operator_pins_blocks(patched_proxy: RunningProxy) -> None:
    client = conversation_with_evicted_fact(patched_proxy.port, "pinned", turns=1)
    session = _only_session(patched_proxy)
    path, block = f"sessions/{session['id']}/blocks", fact_block(session)
    span = {"p0": block["p0"], "p1": block["p1"]}
    session = admin_call(patched_proxy, "POST", path, {"action": "pin", **span})
    assert fact_block(session)["pinned"]
    for number in range(4):
        client.say(f"Turn {number}. {FILLER}")
    assert fact_block(_only_session(patched_proxy))["state"] == "resident"
    session = admin_call(patched_proxy, "POST", path, {"action": "unpin", **span})
    assert not fact_block(session)["pinned"]
    for number in range(6):
        client.say(f"And on, {number}. {FILLER}")
    assert fact_block(_only_session(patched_proxy))["state"] == "saved_ram"
    whole_prompt = {"action": "pin", "p0": 0, "p1": session["tokens"]}
    Admin(patched_proxy.gateway).set_budget(session["id"], BUDGET)
    refused = admin_call(patched_proxy, "POST", path, whole_prompt, status=400)
    assert refused["error"]["code"] == "evoke_pin_budget_exceeded"
    beyond_prompt = {"action": "pin", "p0": 10**6, "p1": 10**6 + 1}
    assert admin_call(patched_proxy, "POST", path, beyond_prompt, status=404)


def test_a_dropped_block_is_not_recovered(patched_proxy: RunningProxy) -> None:
    client = conversation_with_evicted_fact(patched_proxy.port, "dropped")
    session = _only_session(patched_proxy)
    path, block = f"sessions/{session['id']}/blocks", fact_block(session)
    session = admin_call(
        patched_proxy, "POST", path, {"action": "drop", "p0": block["p0"], "p1": block["p1"]}
    )
    assert fact_block(session)["state"] == "omitted"
    other = next(b for b in session["blocks"][1:-2] if b["state"] == "resident" and b["p0"] > 20)
    span = {"p0": other["p0"], "p1": other["p1"]}
    session = admin_call(patched_proxy, "POST", path, {"action": "drop", **span})
    assert {b["state"] for b in session["blocks"] if b["p0"] == other["p0"]} == {"omitted"}
    turn = client.say(QUESTION)
    assert (
        sum(turn.accounting[k] for k in ("decoded", "recovered", "resident_before", "omitted"))
        == (turn.accounting["n_prompt"])
    )
    assert turn.accounting["omitted"] >= block["p1"] - block["p0"]
    assert fact_block(_only_session(patched_proxy))["state"] == "omitted"
    assert patched_proxy.metric("evoke_degraded_total", stage="plan") == 0


def test_an_operator_changes_budgets_at_run_time(patched_proxy: RunningProxy) -> None:
    client = ChatClient(patched_proxy.port, "growing")
    client.say(f"First. {FILLER}")
    client.say(f"Second. {FILLER * 3}")
    id = _only_session(patched_proxy)["id"]
    admin_call(patched_proxy, "PUT", "budget", {"budget": 512})
    client.say(f"Third. {FILLER * 2}")
    assert _only_session(patched_proxy)["history"][-1]["budget"] == 512
    session = admin_call(patched_proxy, "PATCH", f"sessions/{id}", {"budget": 256, "pinned": True})
    assert (session["limit"], session["own_budget"], session["pinned"]) == (256, True, True)
    assert client.say("Fourth.").accounting["n_resident"] <= 256
    assert _only_session(patched_proxy)["history"][-1]["budget"] == 256
    admin_call(patched_proxy, "PATCH", f"sessions/{id}", {"budget": "default"})
    client.say("Fifth.")
    assert _only_session(patched_proxy)["history"][-1]["budget"] == 512
    for path, method in ((f"sessions/{id}", "PATCH"), ("budget", "PUT")):
        refused = admin_call(patched_proxy, method, path, {"budget": 3}, status=400)
        assert refused["error"]["code"] == "evoke_budget_too_small"


def test_deleting_a_session_removes_rows_copies_and_files(patched_proxy: RunningProxy) -> None:
    # The system prompt is unique, so that no earlier session of this server is continued.
    client = conversation_with_evicted_fact(patched_proxy.port, "gone", system="To be deleted.")
    session = _only_session(patched_proxy)
    result = admin_call(patched_proxy, "DELETE", f"sessions/{session['id']}")
    assert result == {"sessions": 1, "snapshots": 0, "left": []}
    assert admin_call(patched_proxy, "GET", "sessions") == {"sessions": []}
    assert admin_call(patched_proxy, "GET", f"sessions/{session['id']}", status=404)
    slot = json.loads(ask(patched_proxy.port, "GET", "/slots/0/blocks").body)
    names = [block["name"] for block in slot["blocks"]]
    assert not [name for name in names if name.startswith(session["id"])]
    assert slot["n_resident"] <= 1
    turn = client.say(QUESTION)
    assert turn.accounting["decoded"] == turn.accounting["n_prompt"]


def test_wiping_a_tenant_keeps_the_sessions_of_others(patched_port: int) -> None:
    with proxy(patched_port, limits__sessions=8) as running:
        for key in ("one", "two"):
            body = json.dumps({"messages": [{"role": "user", "content": FACT + FILLER * 3}]})
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            fields = body[:-1].encode() + b', "max_tokens": 4, "evoke_budget": 320}'
            assert ask(running.port, "POST", "/v1/chat/completions", fields, headers).status == 200
            running.wait_until_idle()
        two, one = admin_call(running, "GET", "sessions")["sessions"]
        assert one["tenant"] != two["tenant"]
        assert admin_call(running, "DELETE", f"tenants/{one['tenant']}")["sessions"] == 1
        assert [s["id"] for s in admin_call(running, "GET", "sessions")["sessions"]] == [two["id"]]
        slots = f"/slots/0/blocks?tenant={one['tenant']}"
        assert json.loads(ask(running.port, "GET", slots).body)["blocks"] == []


def test_an_export_contains_the_session_and_its_snapshots(patched_proxy: RunningProxy) -> None:
    conversation_with_evicted_fact(patched_proxy.port, "taken", turns=2)
    session = _only_session(patched_proxy)
    answer = ask(patched_proxy.port, "GET", f"/evoke/sessions/{session['id']}/export")
    assert answer.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
        (entry,) = tar.getmembers()
        file = tar.extractfile(entry)
        assert file is not None
        manifest = json.load(file)
    exported = manifest["session"]
    assert len(exported["prompt"]) == session["tokens"] and manifest["snapshots"] == []
    assert "user:1#0" in [block.get("name") for block in exported["blocks"]]


def test_live_and_stored_sessions_of_a_stock_server_are_listed(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    with deployment.server() as port:
        chat = Chat([{"role": "user", "content": f"{FACT} {FILLER * 4}"}])
        with deployment.proxy(port, min_tokens=64) as running:
            chat.ask(running.port)
            # The next request would cancel the look-ahead, and lose the slot's rows with it.
            running.wait_for_background()
            chat.add_reply()
            chat.ask(running.port, f"Second. {FILLER * 2}")
            session = _only_session(running)
            assert session["live"] and session["snapshots"] and session["blocks"] == []
            assert [turn["path"] for turn in session["history"]] == ["decoded", "resident"]
            assert admin_call(running, "PATCH", f"sessions/{session['id']}", {"pinned": True})[
                "pinned"
            ]
        with deployment.proxy(port, min_tokens=64) as running:
            on_disk = _only_session(running)
            assert (on_disk["id"], on_disk["live"]) == (session["id"], False)
            assert on_disk["pinned"]
            export = ask(running.port, "GET", f"/evoke/sessions/{on_disk['id']}/export").body
            with tarfile.open(fileobj=io.BytesIO(export)) as tar:
                files = {item.name: item.size for item in tar.getmembers()}
            assert all(files[path.name] == path.stat().st_size for path in deployment.files())
            admin_call(running, "PUT", f"sessions/{on_disk['id']}", status=405)
            left = admin_call(running, "DELETE", "tenants/-")["left"]
            assert any("RAM" in line for line in left)
            assert (
                deployment.files() == []
                and admin_call(running, "GET", "sessions")["sessions"] == []
            )


def test_deleting_a_session_keeps_the_rows_of_another_in_its_slot(tmp_path: Path) -> None:
    deployment, chats = (
        Deployment(tmp_path, "", ("--cache-ram", "0")),
        [long_chat(300), long_chat(300, 5)],
    )
    with deployment.server() as port, deployment.proxy(port, min_tokens=100_000) as running:
        for chat in chats:  # both use the only slot, one after the other
            chat.ask(running.port, "Begin.")
            running.wait_for_background()
        deleted = admin_call(running, "GET", "sessions")["sessions"][-1]["id"]
        assert admin_call(running, "DELETE", f"sessions/{deleted}")["sessions"] == 1
        chats[1].add_reply()
        cached, new = chats[1].ask(running.port, "Go on.")
        assert cached > 900 > 64 > new
        running.wait_for_background()
        (left,) = admin_call(running, "GET", "sessions")["sessions"]
        admin_call(running, "DELETE", f"sessions/{left['id']}")
        assert chats[1].ask(running.port)[0] < 64


def test_events_report_each_turn(patched_proxy: RunningProxy) -> None:
    received: list[tuple[str, dict[str, Any]]] = []
    last_answer = threading.Event()

    def receive() -> None:
        headers = {"Last-Event-ID": "0"}
        with contextlib.closing(admin_events(patched_proxy.port, headers)) as events:
            for kind, data in events:
                received.append((kind, data))
                if kind == "answer" and data["number"] == 8:
                    last_answer.set()
                    return

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    ask_for_fact(conversation_with_evicted_fact(patched_proxy.port, "told"))
    assert last_answer.wait(TIMEOUT_S)
    thread.join()
    answers = [data for kind, data in received if kind == "answer"]
    assert [data["number"] for data in answers] == list(range(1, 9))
    assert any(data["evicted"] for data in answers)
    last = [data for kind, data in received if kind == "turn"][-1]
    assert _positions(last["recovered"]) == _positions(answers[-1]["recovered_spans"]) != set()


def _positions(spans: list[list[int]]) -> set[int]:
    return {position for start, end in spans for position in range(start, end)}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "sessions/nobody", None, 404),
        ("GET", "sessions/..%2f..%2fetc", None, 404),
        ("DELETE", "sessions/nobody", None, 404),
        ("PATCH", "sessions/nobody", {"pinned": True}, 404),
        ("PATCH", "sessions/nobody", {"pinned": 1}, 400),
        ("PATCH", "sessions/nobody", {"budget": True}, 400),
        ("PATCH", "sessions/nobody", {"other": 1}, 400),
        ("PUT", "budget", {"budget": -1}, 400),
        ("PUT", "budget", {"budget": "default"}, 400),
        ("POST", "sessions/nobody/blocks", {"action": "pin", "p0": 3, "p1": 3}, 400),
        ("POST", "sessions/nobody/blocks", {"action": "burn", "p0": 1, "p1": 3}, 400),
        ("DELETE", "tenants/nobody", None, 200),
        ("GET", "nothing", None, 404),
        ("PUT", "sessions/nobody", {"pinned": True}, 405),
        ("DELETE", "sessions", None, 405),
        ("POST", "health", None, 405),
    ],
)
def test_an_invalid_admin_request_gets_an_error_with_its_reason(
    unconnected_proxy: RunningProxy, method: str, path: str, body: Any, status: int
) -> None:
    answer = admin_call(unconnected_proxy, method, path, body, status)
    if status == 200:
        assert "error" not in answer
    else:
        assert answer["error"]["code"] and answer["error"]["message"], answer


def test_the_error_of_a_wrong_budget_names_the_words_of_its_call(
    unconnected_proxy: RunningProxy,
) -> None:
    calls = (("PATCH", "sessions/nobody", '"default"'), ("PUT", "budget", '"auto"'))
    for method, path, word in calls:
        answer = admin_call(unconnected_proxy, method, path, {"budget": "none"}, 400)
        expected = f"budget: must be a positive number of tokens, {word}, or null for no limit"
        assert answer["error"]["message"] == expected


@pytest.fixture(scope="module")
def unconnected_proxy() -> Any:
    """A proxy whose llama-server does not run."""
    with proxy(unused_port()) as running:
        yield running


def test_requests_from_pages_of_other_sites_are_refused(unconnected_proxy: RunningProxy) -> None:
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
        assert (
            ask(unconnected_proxy.port, "DELETE", "/evoke/tenants/-", None, headers).status == 403
        )
        assert ask(unconnected_proxy.port, "GET", "/evoke/sessions", None, headers).status == 403
    host = f"127.0.0.1:{unconnected_proxy.port}"
    # A browser that sends no Sec-Fetch-Site. A form or a file has the origin `null`.
    for origin in ("http://evil.example", f"http://{host}.evil.example", "null", "", "http://"):
        headers = {"Origin": origin}
        for method, path in (("DELETE", "/evoke/tenants/-"), ("GET", "/evoke/sessions")):
            assert ask(unconnected_proxy.port, method, path, None, headers).status == 403, origin
    for headers in ({"Origin": f"http://{host}"}, {"Sec-Fetch-Site": "same-origin"}):
        assert ask(unconnected_proxy.port, "GET", "/evoke/sessions", None, headers).status == 200
    plain = {"Content-Type": "text/plain"}
    path, body = "/evoke/budget", b'{"budget": null}'
    assert ask(unconnected_proxy.port, "PUT", path, body, plain).status == 415
