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
    ASKS,
    BUDGET,
    FACT,
    conversation_with_evicted_fact,
    events,
    fact_block,
    operate,
    recovered,
)
from conversation import FILLER, ChatClient
from harness import PATIENCE_S, RunningProxy, ask, proxy, unused_port
from stock_deployment import Chat, Deployment, long_chat

from evoke_proxy.core.session.block_map import STATES
from evoke_proxy.engine.admin.admin import Admin


def _one(running: RunningProxy) -> dict[str, Any]:
    (session,) = operate(running, "GET", "sessions")["sessions"]
    shown: dict[str, Any] = operate(running, "GET", f"sessions/{session['id']}")
    return shown


def test_the_block_map_covers_every_token(patched_proxy: RunningProxy) -> None:
    talk = conversation_with_evicted_fact(patched_proxy.port, "mapped")
    shown = _one(patched_proxy)
    edges = [(block["p0"], block["p1"]) for block in shown["blocks"]]
    assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])]
    assert shown["fresh"] and set(shown["totals"]) == set(STATES)
    last = shown["history"][-1]
    assert sum(shown["totals"].values()) >= last["prompt"]
    assert shown["totals"]["resident"] <= shown["resident"] <= BUDGET
    assert shown["totals"]["saved_ram"] > 0 == shown["totals"]["saved_disk"]
    assert fact_block(shown)["state"] == "saved_ram"
    assert all(0 <= block["score"] for block in shown["blocks"][:-1])
    accounting = recovered(talk).accounting
    shown = _one(patched_proxy)
    assert fact_block(shown)["state"] == "resident"
    last = shown["history"][-1]
    assert (last["path"], last["number"], last["budget"]) == ("recovered", 8, BUDGET)
    for kind in ("decoded", "recovered", "resident_before", "omitted"):
        assert last[kind] == accounting[kind]
    assert last["ttft_s"] > 0 and len(last["recovered_spans"]) > 0


def test_the_admin_api_shows_no_text_of_prompts(patched_port: int) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read_file"}}
    call["function"] = {"name": "read_file", "arguments": '{"path": "hush/meridian.py"}'}
    said = [
        {"role": "user", "content": FACT},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": FILLER},
    ]
    for names in (False, True):
        with proxy(patched_port, page__names=names) as running:
            talk = ChatClient(running.port, "hushed", {"evoke_budget": BUDGET}, list(said))
            talk.say(f"Go on. {FILLER}")
            running.quiet()
            session = operate(running, "GET", "sessions")["sessions"][0]["id"]
            told = b"".join(
                ask(running.port, "GET", f"/evoke/{path}").body
                for path in ("sessions", f"sessions/{session}", "status")
            )
            told += repr(running.engine.feed._recent).encode()
        for text in (b"Meridian", b"7741", b"quick brown"):
            assert text not in told
        assert (b"meridian.py" in told) is names


def test_an_operator_pins_blocks(patched_proxy: RunningProxy) -> None:
    talk = conversation_with_evicted_fact(patched_proxy.port, "pinned", turns=1)
    shown = _one(patched_proxy)
    path, block = f"sessions/{shown['id']}/blocks", fact_block(shown)
    where = {"p0": block["p0"], "p1": block["p1"]}
    shown = operate(patched_proxy, "POST", path, {"action": "pin", **where})
    assert fact_block(shown)["pinned"]
    for number in range(4):
        talk.say(f"Turn {number}. {FILLER}")
    assert fact_block(_one(patched_proxy))["state"] == "resident"
    shown = operate(patched_proxy, "POST", path, {"action": "unpin", **where})
    assert not fact_block(shown)["pinned"]
    for number in range(6):
        talk.say(f"And on, {number}. {FILLER}")
    assert fact_block(_one(patched_proxy))["state"] == "saved_ram"
    all_of_it = {"action": "pin", "p0": 0, "p1": shown["tokens"]}
    Admin(patched_proxy.engine).set_budget(shown["id"], BUDGET)
    refused = operate(patched_proxy, "POST", path, all_of_it, status=400)
    assert refused["error"]["code"] == "evoke_pin_budget_exceeded"
    nowhere = {"action": "pin", "p0": 10**6, "p1": 10**6 + 1}
    assert operate(patched_proxy, "POST", path, nowhere, status=404)


def test_a_dropped_block_is_not_recovered(patched_proxy: RunningProxy) -> None:
    talk = conversation_with_evicted_fact(patched_proxy.port, "dropped")
    shown = _one(patched_proxy)
    path, block = f"sessions/{shown['id']}/blocks", fact_block(shown)
    shown = operate(
        patched_proxy, "POST", path, {"action": "drop", "p0": block["p0"], "p1": block["p1"]}
    )
    assert fact_block(shown)["state"] == "omitted"
    inside = next(b for b in shown["blocks"][1:-2] if b["state"] == "resident" and b["p0"] > 20)
    span = {"p0": inside["p0"], "p1": inside["p1"]}
    shown = operate(patched_proxy, "POST", path, {"action": "drop", **span})
    assert {b["state"] for b in shown["blocks"] if b["p0"] == inside["p0"]} == {"omitted"}
    said = talk.say(ASKS)
    assert (
        sum(said.accounting[k] for k in ("decoded", "recovered", "resident_before", "omitted"))
        == (said.accounting["n_prompt"])
    )
    assert said.accounting["omitted"] >= block["p1"] - block["p0"]
    assert fact_block(_one(patched_proxy))["state"] == "omitted"
    assert patched_proxy.metric("evoke_degraded_total", stage="plan") == 0


def test_budgets_change_at_run_time(patched_proxy: RunningProxy) -> None:
    talk = ChatClient(patched_proxy.port, "growing")
    talk.say(f"First. {FILLER}")
    talk.say(f"Second. {FILLER * 3}")
    id = _one(patched_proxy)["id"]
    operate(patched_proxy, "PUT", "budget", {"budget": 512})
    talk.say(f"Third. {FILLER * 2}")
    assert _one(patched_proxy)["history"][-1]["budget"] == 512
    shown = operate(patched_proxy, "PATCH", f"sessions/{id}", {"budget": 256, "pinned": True})
    assert (shown["limit"], shown["own_budget"], shown["pinned"]) == (256, True, True)
    assert talk.say("Fourth.").accounting["n_resident"] <= 256
    assert _one(patched_proxy)["history"][-1]["budget"] == 256
    operate(patched_proxy, "PATCH", f"sessions/{id}", {"budget": "default"})
    talk.say("Fifth.")
    assert _one(patched_proxy)["history"][-1]["budget"] == 512
    for path, method in ((f"sessions/{id}", "PATCH"), ("budget", "PUT")):
        refused = operate(patched_proxy, method, path, {"budget": 3}, status=400)
        assert refused["error"]["code"] == "evoke_budget_too_small"


def test_deleting_a_session_removes_rows_copies_and_files(patched_proxy: RunningProxy) -> None:
    # No earlier session of this server has these messages, and could be continued in its place.
    talk = conversation_with_evicted_fact(patched_proxy.port, "gone", system="To be deleted.")
    shown = _one(patched_proxy)
    done = operate(patched_proxy, "DELETE", f"sessions/{shown['id']}")
    assert done == {"sessions": 1, "snapshots": 0, "left": []}
    assert operate(patched_proxy, "GET", "sessions") == {"sessions": []}
    assert operate(patched_proxy, "GET", f"sessions/{shown['id']}", status=404)
    slot = json.loads(ask(patched_proxy.port, "GET", "/slots/0/blocks").body)
    names = [block["name"] for block in slot["blocks"]]
    assert not [name for name in names if name.startswith(shown["id"])]
    assert slot["n_resident"] <= 1
    again = talk.say(ASKS)
    assert again.accounting["decoded"] == again.accounting["n_prompt"]


def test_wiping_a_tenant_keeps_the_sessions_of_others(patched_port: int) -> None:
    with proxy(patched_port, limits__sessions=8) as running:
        for key in ("one", "two"):
            body = json.dumps({"messages": [{"role": "user", "content": FACT + FILLER * 3}]})
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            fields = body[:-1].encode() + b', "max_tokens": 4, "evoke_budget": 320}'
            assert ask(running.port, "POST", "/v1/chat/completions", fields, headers).status == 200
            running.quiet()
        two, one = operate(running, "GET", "sessions")["sessions"]
        assert one["tenant"] != two["tenant"]
        assert operate(running, "DELETE", f"tenants/{one['tenant']}")["sessions"] == 1
        assert [s["id"] for s in operate(running, "GET", "sessions")["sessions"]] == [two["id"]]
        slots = f"/slots/0/blocks?tenant={one['tenant']}"
        assert json.loads(ask(running.port, "GET", slots).body)["blocks"] == []


def test_an_export_contains_the_session_and_its_snapshots(patched_proxy: RunningProxy) -> None:
    conversation_with_evicted_fact(patched_proxy.port, "taken", turns=2)
    shown = _one(patched_proxy)
    answer = ask(patched_proxy.port, "GET", f"/evoke/sessions/{shown['id']}/export")
    assert answer.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
        (entry,) = tar.getmembers()
        file = tar.extractfile(entry)
        assert file is not None
        manifest = json.load(file)
    session = manifest["session"]
    assert len(session["prompt"]) == shown["tokens"] and manifest["snapshots"] == []
    assert "user:1#0" in [block.get("name") for block in session["blocks"]]


def test_live_and_stored_sessions_of_a_stock_server_are_listed(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    with deployment.server() as port:
        chat = Chat([{"role": "user", "content": f"{FACT} {FILLER * 4}"}])
        with deployment.proxy(port, min_tokens=64) as running:
            chat.ask(running.port)
            running.settled()  # what is decoded ahead would be called off, and the slot with it
            chat.hear()
            chat.ask(running.port, f"Second. {FILLER * 2}")
            shown = _one(running)
            assert shown["live"] and shown["snapshots"] and shown["blocks"] == []
            assert [turn["path"] for turn in shown["history"]] == ["decoded", "resident"]
            assert operate(running, "PATCH", f"sessions/{shown['id']}", {"pinned": True})["pinned"]
        with deployment.proxy(port, min_tokens=64) as running:
            on_disk = _one(running)
            assert (on_disk["id"], on_disk["live"]) == (shown["id"], False)
            assert on_disk["pinned"]
            export = ask(running.port, "GET", f"/evoke/sessions/{on_disk['id']}/export").body
            with tarfile.open(fileobj=io.BytesIO(export)) as tar:
                files = {item.name: item.size for item in tar.getmembers()}
            assert all(files[path.name] == path.stat().st_size for path in deployment.files())
            operate(running, "PUT", f"sessions/{on_disk['id']}", status=405)
            left = operate(running, "DELETE", "tenants/-")["left"]
            assert any("RAM" in line for line in left)
            assert (
                deployment.files() == [] and operate(running, "GET", "sessions")["sessions"] == []
            )


def test_deleting_a_session_keeps_the_rows_of_another_in_its_slot(tmp_path: Path) -> None:
    deployment, chats = (
        Deployment(tmp_path, "", ("--cache-ram", "0")),
        [long_chat(300), long_chat(300, 5)],
    )
    with deployment.server() as port, deployment.proxy(port, min_tokens=100_000) as running:
        for chat in chats:  # in the only slot, one after the other
            chat.ask(running.port, "Begin.")
            running.settled()
        gone = operate(running, "GET", "sessions")["sessions"][-1]["id"]
        assert operate(running, "DELETE", f"sessions/{gone}")["sessions"] == 1
        chats[1].hear()
        cached, new = chats[1].ask(running.port, "Go on.")
        assert cached > 900 > 64 > new
        running.settled()
        (left,) = operate(running, "GET", "sessions")["sessions"]
        operate(running, "DELETE", f"sessions/{left['id']}")
        assert chats[1].ask(running.port)[0] < 64


def test_events_report_turns_as_they_happen(patched_proxy: RunningProxy) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    seen = threading.Event()

    def listening() -> None:
        with contextlib.closing(events(patched_proxy.port, {"Last-Event-ID": "0"})) as heard:
            for kind, facts in heard:
                told.append((kind, facts))
                if kind == "answer" and facts["number"] == 8:
                    seen.set()
                    return

    thread = threading.Thread(target=listening, daemon=True)
    thread.start()
    recovered(conversation_with_evicted_fact(patched_proxy.port, "told"))
    assert seen.wait(PATIENCE_S)
    thread.join()
    answers = [facts for kind, facts in told if kind == "answer"]
    assert [facts["number"] for facts in answers] == list(range(1, 9))
    assert any(facts["evicted"] for facts in answers)
    last = [facts for kind, facts in told if kind == "turn"][-1]
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
def test_wrong_admin_requests_get_an_error_that_says_why(
    alone: RunningProxy, method: str, path: str, body: Any, status: int
) -> None:
    answer = operate(alone, method, path, body, status)
    if status == 200:
        assert "error" not in answer
    else:
        assert answer["error"]["code"] and answer["error"]["message"], answer


@pytest.fixture(scope="module")
def alone() -> Any:
    """A proxy whose llama-server is away."""
    with proxy(unused_port()) as running:
        yield running


def test_requests_from_pages_of_other_sites_are_refused(alone: RunningProxy) -> None:
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
        assert ask(alone.port, "DELETE", "/evoke/tenants/-", None, headers).status == 403
        assert ask(alone.port, "GET", "/evoke/sessions", None, headers).status == 403
    plain = {"Content-Type": "text/plain"}
    path, body = "/evoke/budget", b'{"budget": null}'
    assert ask(alone.port, "PUT", path, body, plain).status == 415
