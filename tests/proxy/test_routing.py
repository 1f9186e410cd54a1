"""A llama-server that routes to several models: each conversation keeps its cache in its own, and
gets it back when the router has unloaded that model for another."""

from __future__ import annotations

import json
from pathlib import Path

from keeping import QUICK, long_chat, quiet_metric, settled
from running import any_server, ask, proxy, server_binary

from bench.random_models import SHAPES, ensure

NEW, SLACK = "And what comes after that?", 64


def test_what_the_router_unloads_comes_back_with_its_model(tmp_path: Path) -> None:
    models, slots = tmp_path / "models", tmp_path / "slots"
    models.mkdir()
    slots.mkdir()
    for shape in ("tiny-dense", "tiny-moe"):
        (models / f"{shape}.gguf").symlink_to(ensure(SHAPES[shape]))
    options = ["--models-dir", str(models), "--models-max", "1", "--slot-save-path", str(slots)]
    options += ["-np", "1", "-c", "8192", "-t", "1", "--metrics"]
    settings = {f"snapshots__{key}": value for key, value in QUICK.items()}
    settings["snapshots__directory"] = str(slots)
    with any_server(server_binary(patched=False), *options) as port:
        with proxy(port, **settings) as running:
            chats = {}
            for shape in ("tiny-dense", "tiny-moe"):
                chats[shape] = long_chat(400)  # the same words: the model makes them another chat
                chats[shape].fields = {"model": shape}
                cached, new = chats[shape].ask(running.port, "So what is it?")
                assert cached + new > 1500
                settled(running)
                chats[shape].hear()
            for chat in chats.values():
                cached, new = chat.ask(running.port, NEW)
                assert cached > 1500 and new <= SLACK
                settled(running)
                chat.hear()
            assert quiet_metric(running, "evoke_snapshot_restores_total", result="useful") == 2
            sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
            assert len(sessions) == 2
            unknown = json.dumps({"model": "none", "messages": chats["tiny-moe"].messages}).encode()
            answer = ask(running.port, "POST", "/v1/chat/completions", unknown)
            assert answer.status == 400 and b"not found" in answer.body
