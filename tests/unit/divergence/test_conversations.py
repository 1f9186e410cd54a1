"""Logs of conversations in three formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evoke_proxy.divergence.conversations import read_log
from evoke_proxy.errors import ConfigError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "There."},
]


def written(folder: Path, *lines: object) -> Path:
    path = folder / "chat.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_conversation_a_line(tmp_path: Path) -> None:
    found = read_log(written(tmp_path, {"messages": CHAT}, {"messages": CHAT[:3]}))
    assert [talk.messages for talk in found] == [CHAT, CHAT[:3]]
    assert [talk.answers() for talk in found] == [[2, 4], [2]]
    assert found[1].name == "chat.jsonl 2"


def test_share_gpt_names_of_roles(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hello."}, {"from": "gpt", "value": "Hi."}]
    (talk,) = read_log(written(tmp_path, {"conversations": turns}))
    assert talk.messages == CHAT[1:3]


def test_a_message_a_line_begins_anew_with_a_system_message(tmp_path: Path) -> None:
    found = read_log(written(tmp_path, *CHAT, *CHAT[:3]))
    assert [talk.messages for talk in found] == [CHAT, CHAT[:3]]


def test_answers_are_texts_that_follow_a_message(tmp_path: Path) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": []}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]}
    blank = {"role": "assistant", "content": " "}
    (talk,) = read_log(written(tmp_path, {"messages": [CHAT[2], calls, parts, blank, *CHAT[1:3]]}))
    assert talk.answers() == [5]


@pytest.mark.parametrize(
    "line", ["no json", "[]", "3", '{"other": 1}', '{"role": 3}', '{"messages": [{"content": ""}]}']
)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + line, encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        read_log(path)


def test_a_log_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no conversation"):
        read_log(written(tmp_path, {"messages": CHAT[:2]}))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_log(tmp_path / "missing.jsonl")
