"""Messages that a client removes from its conversation are quoted where a question needs them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from harness import Answer, RunningProxy, ask, llama_server, proxy, server_binary

from bench.model import vocab
from evoke_proxy.core.policy.past_quotes import HEADING
from evoke_proxy.demo.session import number, paragraph, word_pair

JSON = {"Content-Type": "application/json"}
BUDGET = 1024
SUMMARY = (
    "This session is being continued from a previous conversation that ran out of context. The"
    " conversation is summarized below:\nThe user said several things about themselves. The"
    " assistant took note of all of them.\nPlease continue with the last task."
)
"""A message as Claude Code sends it after `/compact`."""
SYSTEM = "You are a small assistant. Be brief."
Message = dict[str, str]


def facts(count: int) -> list[tuple[str, str, str]]:
    """Return statements with their questions and values, all about different attributes."""
    rng = random.Random(20)
    numbers = {f"My {name} is": name for name in vocab.NUMBER_ATTRIBUTES}
    pairs = {f"My {name} is": name for name in vocab.PAIR_ATTRIBUTES}
    result: list[tuple[str, str, str]] = []
    for start, name in rng.sample([*numbers.items(), *pairs.items()], count):
        value = number(rng) if start in numbers else word_pair(rng)
        result.append((f"{start} {value}.", f"What is my {name}?", value))
    return result


FACTS = facts(20)


def after_compaction(client: str) -> list[Message]:
    """The history that a client sends instead of the conversation it has summarised."""
    if client == "claude code":
        return [{"role": "user", "content": SUMMARY}, {"role": "assistant", "content": "I see."}]
    return [
        {"role": "user", "content": "What did we do so far?"},
        {"role": "assistant", "content": "The user said several things, and I took note."},
    ]


def post(port: int, client: str, history: Sequence[Message], session: str) -> Answer:
    """Send a request as Claude Code or as opencode does."""
    common = {"max_tokens": 16, "temperature": 0}
    if client == "claude code":
        body = {**common, "system": SYSTEM, "messages": list(history)}
        headers = JSON | {"X-Claude-Code-Session-Id": session}
        answer = ask(port, "POST", "/v1/messages", json.dumps(body).encode(), headers)
    else:
        body = {**common, "messages": [{"role": "system", "content": SYSTEM}, *history]}
        headers = JSON | {"x-opencode-session": session}
        answer = ask(port, "POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    assert answer.status == 200, answer.body
    return answer


def text_of(answer: Answer) -> str:
    """Return the text of an answer of either dialect."""
    body = json.loads(answer.body)
    if "content" in body:
        return "".join(part.get("text", "") for part in body["content"])
    text: str = body["choices"][0]["message"]["content"]
    return text


def state_facts(port: int, client: str, session: str) -> list[Message]:
    """Run the conversation before the compaction; returns its messages."""
    history: list[Message] = []
    rng = random.Random(session)
    for statement, _, _ in FACTS:
        history.append({"role": "user", "content": f"{statement} {paragraph(rng, 4)}"})
        post(port, client, history, session)
        history.append({"role": "assistant", "content": "Noted."})
    return history


def ask_all(port: int, client: str, session: str) -> int:
    """Compact, then ask for each fact; returns how many answers have its value."""
    history, n_right = after_compaction(client), 0
    for _, question, value in FACTS:
        history.append({"role": "user", "content": question})
        text = text_of(post(port, client, history, session))
        n_right += value in text
        history.append({"role": "assistant", "content": "Noted."})
    return n_right


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a patched llama-server."""
    options = ("-np", "1", "-c", "8192", "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


@contextmanager
def quoting(port: int, past: str = "quote") -> Iterator[RunningProxy]:
    with proxy(port, policy__past=past, policy__budget=BUDGET) as running:
        yield running


@pytest.mark.parametrize("client", ["claude code", "opencode"])
def test_all_facts_that_a_summary_drops_are_recalled(port: int, client: str) -> None:
    with quoting(port) as running:
        state_facts(running.port, client, "compacted")
        assert ask_all(running.port, client, "compacted") == len(FACTS)
        assert running.metric("evoke_recoveries_total", reason="past") >= len(FACTS)
        assert running.metric("evoke_budget_breach_total") == 0
        assert running.metric("evoke_plan_failures_total", reason="books_differ") == 0


@pytest.mark.parametrize("client", ["claude code", "opencode"])
def test_none_of_them_is_recalled_without_the_setting(port: int, client: str) -> None:
    with quoting(port, past="off") as running:
        state_facts(running.port, client, "forgotten")
        assert ask_all(running.port, client, "forgotten") == 0


def last_text(running: RunningProxy) -> str:
    """Return the newest text of the only conversation's prompt, as it was decoded."""
    (conversation,) = [each for server in running.servers for each in server.conversations]
    layout = conversation.session.layout
    blocks = [block for block in layout.blocks if block.message == layout.blocks[-1].message]
    return "".join(block.text for block in blocks)


def test_a_question_about_nothing_removed_is_forwarded_unchanged(port: int) -> None:
    with quoting(port) as running:
        state_facts(running.port, "opencode", "unrelated")
        history = after_compaction("opencode")
        history.append({"role": "user", "content": "Zzz yyy xxx qqq vvv kkk?"})
        post(running.port, "opencode", history, "unrelated")
        assert running.metric("evoke_recoveries_total", reason="past") == 0
        assert HEADING not in last_text(running)


def test_the_oldest_messages_of_a_sliding_window_are_quoted(port: int) -> None:
    with quoting(port) as running:
        history = state_facts(running.port, "opencode", "window")
        history = [*history[-6:], {"role": "user", "content": FACTS[0][1]}]
        assert FACTS[0][2] in text_of(post(running.port, "opencode", history, "window"))
        assert HEADING in last_text(running)


def test_messages_that_the_user_goes_back_behind_are_not_quoted(port: int) -> None:
    """The user corrects a statement and says nothing of the later ones again."""
    with quoting(port) as running:
        history = state_facts(running.port, "opencode", "edited")
        history = [*history[:4], {"role": "user", "content": FACTS[9][1]}]
        assert FACTS[9][2] not in text_of(post(running.port, "opencode", history, "edited"))
        assert running.metric("evoke_recoveries_total", reason="past") == 0


def test_other_conversations_and_tenants_quote_nothing(port: int) -> None:
    with quoting(port) as running:
        state_facts(running.port, "opencode", "mine")
        for session, key in (("other", ""), ("mine", "another key")):
            messages = [
                {"role": "system", "content": SYSTEM},
                *after_compaction("opencode"),
                {"role": "user", "content": FACTS[0][1]},
            ]
            body = json.dumps({"messages": messages, "max_tokens": 16, "temperature": 0}).encode()
            headers = JSON | {"x-opencode-session": session}
            headers |= {"Authorization": f"Bearer {key}"} if key else {}
            answer = ask(running.port, "POST", "/v1/chat/completions", body, headers)
            assert answer.status == 200 and FACTS[0][2] not in text_of(answer)
        assert running.metric("evoke_recoveries_total", reason="past") == 0


def test_what_the_proxy_quotes_is_no_change_by_the_client(port: int) -> None:
    with quoting(port) as running:
        state_facts(running.port, "claude code", "drift")
        assert ask_all(running.port, "claude code", "drift") == len(FACTS)
        assert running.metric("evoke_prefix_divergence_total", cause="compacted") == 1
        assert running.metric("evoke_prefix_divergence_total", cause="edited_history") == 0


def test_the_reply_says_what_was_quoted(port: int) -> None:
    with quoting(port) as running:
        history = state_facts(running.port, "opencode", "verbose")
        messages = [
            {"role": "system", "content": SYSTEM},
            *after_compaction("opencode"),
            {"role": "user", "content": FACTS[3][1]},
        ]
        assert len(history) > len(messages)
        body = {"messages": messages, "max_tokens": 16, "temperature": 0, "evoke_recover": []}
        headers = JSON | {"x-opencode-session": "verbose"}
        answer = ask(
            running.port, "POST", "/v1/chat/completions", json.dumps(body).encode(), headers
        )
        usage = json.loads(answer.body)["usage"]["evoke"]
        assert usage["past"]["blocks"] > 0 and usage["past"]["tokens"] > 0
        accounting = json.loads(answer.body)["timings"]["evoke"]
        parts = ("decoded", "recovered", "resident_before", "omitted")
        assert sum(accounting[part] for part in parts) == accounting["n_prompt"]
        assert accounting["n_resident_peak"] <= BUDGET
