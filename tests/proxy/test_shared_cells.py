"""Slots of a stock server that share their cells (unified KV), which two conversations exceed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conversation import endless_stream
from harness import RunningProxy, ask
from stock_deployment import Deployment, decoded, final_metric

N_CONVERSATIONS, N_TURNS, N_WORDS = 3, 3, 1000
WORDS = "alpha beta gamma delta rule never always price order item".split()
JSON = {"Content-Type": "application/json"}
SHARED = ("-np", "2", "-kvu", "-c", "4096")


def _message(seed: str, n_words: int = N_WORDS) -> dict[str, str]:
    rng = random.Random(seed)
    return {"role": "user", "content": " ".join(rng.choice(WORDS) for _ in range(n_words))}


def _ask(running: RunningProxy, messages: Sequence[Any], session: str) -> dict[str, Any]:
    fields = {"max_tokens": 4, "temperature": 0, "evoke_session": session}
    body = json.dumps({"messages": messages, **fields}).encode()
    answer = ask(running.port, "POST", "/v1/chat/completions", body, JSON)
    assert answer.status == 200, answer.body
    running.wait_for_background()
    reply: dict[str, Any] = json.loads(answer.body)
    return reply


@pytest.mark.parametrize("options", [("--cache-ram", "0"), ()], ids=["no RAM cache", "RAM cache"])
def test_idle_slots_give_their_cells_to_a_conversation_that_is_restored(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """llama-server alone refuses the restore, and decodes every turn from its start."""
    deployment = Deployment(tmp_path, "", SHARED + options)
    with deployment.server() as port, deployment.proxy(port) as running:
        talks: list[list[Any]] = [[_message(f"{i}")] for i in range(N_CONVERSATIONS)]
        n_prompt = 0
        for number in range(N_TURNS):
            for i, messages in enumerate(talks):
                reply = _ask(running, messages, f"s{i}")
                n_prompt = max(n_prompt, reply["usage"]["prompt_tokens"])
                messages.append(reply["choices"][0]["message"])
                messages.append(_message(f"{i}/{number}", 10))
        assert 2 * n_prompt > 4096
        # Each prompt once, and one again: a RAM cache is tried, too.
        assert decoded(port) < (N_CONVERSATIONS + 1.5) * n_prompt
        assert final_metric(running, "evoke_snapshot_restores_total", result="refused") == 0


def test_a_restore_without_free_cells_is_tried_again_later(tmp_path: Path) -> None:
    """The slot with most cells answers a request, so that it cannot be emptied."""
    deployment = Deployment(tmp_path, "", (*SHARED, "--cache-ram", "0"))
    with deployment.server() as port, deployment.proxy(port) as running:
        first, second = [_message("a")], [_message("b")]
        _ask(running, first, "a")
        _ask(running, second, "b")
        for _ in range(4):
            with endless_stream(running.port, "c", messages=[_message("c", 1000)]):
                # No cells are left for it, so that llama-server refuses or ends a request.
                body = json.dumps({"messages": first, "max_tokens": 1, "evoke_session": "a"})
                ask(running.port, "POST", "/v1/chat/completions", body.encode(), JSON)
            running.wait_for_background()
        assert final_metric(running, "evoke_snapshot_restores_total", result="crowded") > 0
        assert final_metric(running, "evoke_snapshot_restores_total", result="refused") == 0
        before = final_metric(running, "evoke_snapshot_restores_total", result="useful")
        _ask(running, [_message("d")], "d")
        _ask(running, second, "b")
        _ask(running, first, "a")
        assert final_metric(running, "evoke_snapshot_restores_total", result="useful") > before
