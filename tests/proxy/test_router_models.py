"""A llama-server in router mode: conversations keep their cache when their model is reloaded."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from admin_client import admin_call
from harness import RunningProxy, ask, bare_llama_server, proxy, server_binary
from stock_deployment import SAVE_ALWAYS, Chat, final_metric, long_chat

from bench.random_models import SHAPES, ensure

NEW, SLACK = "And what comes after that?", 64


def test_a_conversation_is_restored_when_its_model_is_reloaded(tmp_path: Path) -> None:
    models, slots = tmp_path / "models", tmp_path / "slots"
    models.mkdir()
    slots.mkdir()
    for shape in ("tiny-dense", "tiny-moe"):
        (models / f"{shape}.gguf").symlink_to(ensure(SHAPES[shape]))
    options = ["--models-dir", str(models), "--models-max", "1", "--slot-save-path", str(slots)]
    options += ["-np", "1", "-c", "8192", "-t", "1", "--metrics"]
    settings = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()}
    settings["snapshots__directory"] = str(slots)
    with bare_llama_server(server_binary(patched=False), *options) as port:
        with proxy(port, **settings) as running:
            chats = {}
            for shape in ("tiny-dense", "tiny-moe"):
                chats[shape] = long_chat(400)  # the same text for both models
                chats[shape].fields = {"model": shape}
                cached, new = chats[shape].ask(running.port, "So what is it?")
                assert cached + new > 1500
                running.wait_for_background()
                chats[shape].add_reply()
            for chat in chats.values():
                cached, new = chat.ask(running.port, NEW)
                assert cached > 1500 and new <= SLACK
                running.wait_for_background()
                chat.add_reply()
            assert final_metric(running, "evoke_snapshot_restores_total", result="useful") == 2
            _check_admin_calls(running, *chats.values())
            unknown = json.dumps({"model": "none", "messages": chats["tiny-moe"].messages}).encode()
            answer = ask(running.port, "POST", "/v1/chat/completions", unknown)
            assert answer.status == 400 and b"not found" in answer.body


def _check_admin_calls(running: RunningProxy, dense: Chat, moe: Chat) -> None:
    """Check admin calls about sessions of both models.

    Both are listed, displayed, pinned and exported. The one whose model is not loaded is deleted.
    """
    listed = admin_call(running, "GET", "sessions")["sessions"]
    of_dense, of_moe = (row["id"] for row in sorted(listed, key=lambda row: row["used"]))
    for id in (of_dense, of_moe):
        details = admin_call(running, "GET", f"sessions/{id}")
        assert (details["id"], details["live"], details["turns"]) == (id, True, 2)
        assert details["snapshots"] and details["history"][-1]["path"] == "restored"
        pinned = admin_call(running, "PATCH", f"sessions/{id}", {"pinned": True})
        assert pinned["pinned"] and all(item["pinned"] for item in pinned["snapshots"])
        export = ask(running.port, "GET", f"/evoke/sessions/{id}/export")
        with tarfile.open(fileobj=io.BytesIO(export.body)) as tar:
            names = tar.getnames()
        assert names[0] == "manifest.json" and len(names) == 1 + len(details["snapshots"])
    deleted = admin_call(running, "DELETE", f"sessions/{of_dense}")
    assert deleted["sessions"] == 1 and deleted["snapshots"] >= 1 and deleted["left"] == []
    assert [s["id"] for s in admin_call(running, "GET", "sessions")["sessions"]] == [of_moe]
    assert admin_call(running, "GET", f"sessions/{of_dense}", status=404)
    # Nothing of the deleted session is left in a slot or file. The other one is unchanged.
    for chat, kept in ((dense, False), (moe, True)):
        chat.messages.pop()
        chat.ask(running.port)
        running.wait_for_background()
        rows = admin_call(running, "GET", "sessions")["sessions"]
        (id,) = [row["id"] for row in rows if (row["id"] == of_moe) is kept]
        latest = admin_call(running, "GET", f"sessions/{id}")["history"][-1]
        assert latest["path"] == ("restored" if kept else "decoded")
        assert latest["decoded"] <= SLACK if kept else latest["decoded"] > 1500
