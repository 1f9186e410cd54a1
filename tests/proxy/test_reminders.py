"""What coding agents add to messages: it takes no room when the user's words come back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversation import FILLER
from harness import RunningProxy, ask
from recovery_texts import FACT, QUESTION

from evoke_proxy.core.model.block_table import BlockTable
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


def _blocks_and_states(running: RunningProxy) -> tuple[BlockTable, dict[int, str]]:
    """Return the blocks of the only conversation, and the state of each by its first position."""
    (conversation,) = (each for each in running.gateway.server.conversations)
    detail = ask(running.port, "GET", f"/evoke/sessions/{conversation.id}").body
    states = {each["p0"]: each["state"] for each in json.loads(detail)["blocks"]}
    return conversation.session.layout.blocks, states


def _check_resident(running: RunningProxy, word: str) -> None:
    """Check that the text with a word is in the cache, and that other text has left it."""
    blocks, states = _blocks_and_states(running)
    asked = [states[each.span.start] for each in blocks if word in each.text]
    assert asked and set(asked) == {"resident"}
    assert "saved_ram" in states.values()


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
    all_blocks, states = _blocks_and_states(patched_proxy)
    blocks = [each for each in all_blocks if each.role is Role.USER]
    (fact,) = (each for each in blocks if each.text == FACT)
    assert states[fact.span.start] == "resident"
    after = next(each for each in blocks if each.span.start == fact.span.end)
    assert after.is_reminder and states[after.span.start] != "resident"
    assert "CLAUDE.md" in blocks[0].aliases
    assert states[blocks[0].span.start] == "resident"
    assert patched_proxy.metric("evoke_budget_breach_total") == 0


def test_files_that_change_during_a_task_do_not_replace_what_the_user_asked_for(
    patched_proxy: RunningProxy,
) -> None:
    """Claude Code tells of each change of a file in a message of its own after results of tools."""
    task = "Rename the variable kappa7 in each file of the repository, and keep a list of them."
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Hello. {FILLER}"}]
    messages.append({"role": "assistant", "content": f"Hello. {FILLER}"})
    messages.append({"role": "user", "content": task})
    for number in range(8):
        call = {"name": "read", "arguments": json.dumps({"path": f"src/part{number}.py"})}
        made = {"id": f"call{number}", "type": "function", "function": call}
        messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        result = {"role": "tool", "tool_call_id": made["id"], "content": f"{number}. {FILLER}"}
        note = f"Note: /repo/src/part{number}.py was modified by a linter.\n{number}: {FILLER}"
        changed = f"<system-reminder>\n{note}\n</system-reminder>"
        messages += [result, {"role": "user", "content": changed}]
        _ask(patched_proxy, "/v1/chat/completions", messages)
    _check_resident(patched_proxy, "kappa7")


def test_results_of_tools_called_in_text_do_not_replace_what_the_user_asked_for(
    patched_proxy: RunningProxy,
) -> None:
    """Cline and Roo Code send them as messages of the user, each with the state of the editor."""
    task = "Rename the variable kappa8 in each file of the repository, and keep a list of them."
    state = "<environment_details>\n# Open Tabs\nsrc/app.py, src/part.py, README.md\n# Current Mode"
    state += "\nAct mode, at ten in the morning of a Monday in November.\n</environment_details>"
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Hello. {FILLER}"}]
    messages.append({"role": "assistant", "content": f"Hello. {FILLER}"})
    messages.append({"role": "user", "content": f"<task>\n{task}\n</task>\n{state}"})
    for number in range(16):
        path = f"src/part{number}.py"
        called = f"<read_file>\n<path>{path}</path>\n</read_file>"
        messages.append({"role": "assistant", "content": called})
        result = f"[read_file for '{path}'] Result:\n{number}. {FILLER}\n{state}"
        messages.append({"role": "user", "content": result})
        _ask(patched_proxy, "/v1/chat/completions", messages)
    _check_resident(patched_proxy, "kappa8")
