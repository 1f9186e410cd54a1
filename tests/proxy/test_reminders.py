"""What coding agents add to messages: it takes no room when the user's words come back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversation import FILLER
from harness import RunningProxy, ask
from recovery_texts import FACT, QUESTION

from evoke_proxy.core.model.blocks import Role

JSON = {"Content-Type": "application/json"}
BUDGET = 512
RULES = (
    "<system-reminder>\nUse the following context.\n# claudeMd\nContents of /repo/CLAUDE.md"
    " (project instructions):\n\nRun the linter before each commit."
    " Never push to main.\n</system-reminder>"
)
REMINDER = (
    "<system-reminder>\nThe list of tasks is empty. Do not mention this to the user. Use the tool"
    " for tasks if that helps with the current work, and ignore this reminder if it does"
    " not.\nToday is Monday, the working directory is /repo, and its branch is main."
    "\n</system-reminder>"
)


def _ask(running: RunningProxy, path: str, messages: list[dict[str, Any]]) -> None:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "evoke_budget": BUDGET}
    data = json.dumps(body | {"evoke_session": path}).encode()
    answer = ask(running.port, "POST", path, data, JSON)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("path", ("/v1/chat/completions", "/v1/messages"))
def test_the_words_of_the_user_come_back_without_the_reminder_beside_them(
    patched_proxy: RunningProxy, path: str
) -> None:
    """Rules that came with the first message stay in the cache."""

    def said(*texts: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}

    messages = [said(RULES, f"Hello. {FILLER}"), {"role": "assistant", "content": "Hello."}]
    messages += [said(FACT, REMINDER), {"role": "assistant", "content": "Noted."}]
    for number in range(6):
        messages.append(said(f"Turn {number}. {FILLER}", REMINDER))
        _ask(patched_proxy, path, messages)
        messages.append({"role": "assistant", "content": f"Noted {number}."})
    messages.append(said(QUESTION, REMINDER))
    _ask(patched_proxy, path, messages)
    (conversation,) = (each for each in patched_proxy.gateway.server.conversations)
    detail = ask(patched_proxy.port, "GET", f"/evoke/sessions/{conversation.id}").body
    states = {each["p0"]: each["state"] for each in json.loads(detail)["blocks"]}
    blocks = [each for each in conversation.session.layout.blocks if each.role is Role.USER]
    (fact,) = (each for each in blocks if each.text == FACT)
    assert states[fact.span.start] == "resident"
    after = next(each for each in blocks if each.span.start == fact.span.end)
    assert after.is_reminder and states[after.span.start] != "resident"
    assert "CLAUDE.md" in blocks[0].aliases
    assert states[blocks[0].span.start] == "resident"
    assert patched_proxy.metric("evoke_budget_breach_total") == 0
