"""Session identity: sessions are distinguished by their tokens; a hint only helps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.session.identity import (
    SOURCES,
    Hint,
    find,
    find_edited,
    hint_of,
    history_key,
)

UUID = "4a5c0e4b-98c1-4f0e-a0a5-0c9d1a0c7a11"


@dataclass
class Session:
    id: str
    tokens: Tokens
    tenant: str = ""
    hint: Hint | None = None
    head: int = 0
    last_user_end: int = 0
    n_users: int = 0
    head_start: int = 0

    @property
    def generation(self) -> int:
        return len(self.tokens) - 2


def prompt(*parts: int) -> Tokens:
    """A prompt with 50 tokens for each number."""
    return np.concatenate([np.arange(50, dtype=np.int32) + part * 1000 for part in parts])


def named(text: str) -> Hint:
    return Hint(text, "X-Session-Id")


def person(text: str) -> Hint:
    return Hint(text, "user", weak=True)


SYSTEM, ONE, TWO, MORE = 1, 2, 3, 4


def test_a_longer_prompt_continues_the_session_of_the_shorter() -> None:
    sessions = [Session("a", prompt(SYSTEM, ONE)), Session("b", prompt(SYSTEM, TWO))]
    assert find(sessions, None, "", prompt(SYSTEM, TWO, MORE)) == "b"
    assert find(sessions, None, "", prompt(SYSTEM, ONE, MORE)) == "a"


def test_a_shared_system_prompt_does_not_identify_a_session() -> None:
    sessions = [Session("a", prompt(SYSTEM, SYSTEM, ONE, ONE, ONE))]
    assert find(sessions, None, "", prompt(SYSTEM, SYSTEM, TWO)) is None


@pytest.mark.parametrize("hint", [None, named("h"), named("new"), person("u")])
def test_a_long_shared_system_prompt_does_not_identify_a_session(hint: Hint | None) -> None:
    # 450 of 500 tokens are the same, but the first question is another.
    sessions = [Session("a", prompt(*[SYSTEM] * 9, ONE), hint=named("h"), head=498)]
    assert find(sessions, hint, "", prompt(*[SYSTEM] * 9, TWO)) is None
    assert find(sessions, hint, "", prompt(*[SYSTEM] * 9, TWO, MORE, MORE)) is None


def test_the_session_with_the_longest_common_prefix_is_found_and_short_ones_do_not_count() -> None:
    sessions = [Session("a", prompt(SYSTEM, ONE)), Session("b", prompt(SYSTEM, ONE, TWO))]
    assert find(sessions, None, "", prompt(SYSTEM, ONE, TWO, MORE)) == "b"
    assert find([Session("c", prompt(SYSTEM))], None, "", prompt(SYSTEM, TWO)) is None


def test_with_a_hint_short_prompts_match() -> None:
    sessions = [Session("a", prompt(SYSTEM), hint=named("h")), Session("b", prompt(SYSTEM))]
    assert find(sessions, named("h"), "", prompt(SYSTEM, ONE)) == "a"


def test_a_session_continues_when_earlier_thinking_was_stripped() -> None:
    # One user message and many tool calls: 150 of the 450 tokens are no longer rendered.
    worked = Session("a", prompt(SYSTEM, ONE, *[TWO] * 7), head=100, last_user_end=100, n_users=1)
    stripped = prompt(SYSTEM, ONE, *[MORE] * 6)
    assert find([worked], None, "", stripped, 2) == "a"
    # Without a new user message it is another conversation with the same first question.
    assert find([worked], None, "", stripped, 1) is None
    assert find([worked], named("other"), "", stripped, 1) is None
    # Part of the text before the last user message is missing.
    asked_twice = Session(
        "a", prompt(SYSTEM, ONE, *[TWO] * 7), head=100, last_user_end=150, n_users=2
    )
    assert find([asked_twice], None, "", stripped, 3) is None


def test_with_its_name_a_session_is_found_after_going_back_to_the_first_message() -> None:
    session = Session("a", prompt(SYSTEM, ONE, *[TWO] * 7), hint=named("h"), head=100, n_users=1)
    assert find([session], named("h"), "", prompt(SYSTEM, ONE, MORE), 1) == "a"
    assert find([session], named("h"), "", prompt(SYSTEM, MORE, MORE), 1) is None


def test_a_new_hint_does_not_hide_a_session() -> None:
    sessions = [Session("a", prompt(SYSTEM, ONE), head=90)]
    assert find(sessions, named("new"), "", prompt(SYSTEM, ONE, MORE)) == "a"
    assert find(sessions, person("u"), "", prompt(SYSTEM, ONE, MORE)) == "a"
    assert find(sessions, named("new"), "", prompt(SYSTEM, TWO, MORE)) is None
    assert find([Session("s", prompt(SYSTEM))], named("new"), "", prompt(SYSTEM, MORE)) is None


def test_a_resumed_conversation_is_found_under_its_new_name() -> None:
    sessions = [Session("a", prompt(SYSTEM, ONE, TWO), hint=named("old"), head=90)]
    assert find(sessions, named("new"), "", prompt(SYSTEM, ONE, TWO, MORE)) == "a"
    # The same prompt or a branch under another name belongs to another conversation.
    assert find(sessions, named("new"), "", prompt(SYSTEM, ONE, TWO)) is None
    assert find(sessions, named("new"), "", prompt(SYSTEM, ONE, MORE, MORE)) is None
    # Under its own name a session may go back to an earlier point.
    assert find(sessions, named("old"), "", prompt(SYSTEM, ONE, MORE, MORE)) == "a"


def test_a_wrong_hint_does_not_match_another_session() -> None:
    sessions = [Session("a", prompt(SYSTEM, ONE), hint=named("h")), Session("b", prompt(TWO, TWO))]
    assert find(sessions, named("h"), "", prompt(MORE, MORE, MORE)) is None
    assert find(sessions, named("h"), "", prompt(TWO, TWO, MORE)) == "b"


def test_one_hint_may_have_branches() -> None:
    sessions = [
        Session("a", prompt(SYSTEM, ONE, ONE), hint=named("h"), head=100),
        Session("b", prompt(SYSTEM, TWO, TWO), hint=named("h"), head=100),
    ]
    assert find(sessions, named("h"), "", prompt(SYSTEM, ONE, ONE, MORE)) == "a"
    assert find(sessions, named("h"), "", prompt(SYSTEM, TWO, TWO, MORE)) == "b"
    assert find(sessions, named("h"), "", prompt(SYSTEM, MORE, MORE)) is None


def test_a_user_name_only_decides_between_equal_matches() -> None:
    sessions = [
        Session("a", prompt(SYSTEM, ONE), hint=person("ann")),
        Session("b", prompt(SYSTEM, ONE), hint=person("bob")),
        Session("c", prompt(SYSTEM, ONE, TWO), hint=person("bob")),
    ]
    assert find(sessions, person("ann"), "", prompt(SYSTEM, ONE, MORE)) == "a"
    assert find(sessions, person("bob"), "", prompt(SYSTEM, ONE, MORE)) in ("b", "c")
    assert find(sessions, person("ann"), "", prompt(SYSTEM, ONE, TWO, MORE)) == "c"
    assert find(sessions, person("ann"), "", prompt(MORE, TWO, TWO)) is None


def test_sessions_of_another_tenant_are_never_found() -> None:
    sessions = [Session("a", prompt(SYSTEM, ONE), tenant="x", hint=named("h"))]
    assert find(sessions, None, "y", prompt(SYSTEM, ONE, MORE)) is None
    assert find(sessions, named("h"), "y", prompt(SYSTEM, ONE, MORE)) is None


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), max_size=5),
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.sampled_from([None, named("0"), named("1"), named("new"), person("0")]),
)
def test_two_conversations_are_never_one_session_whatever_the_hint(
    conversations: list[list[int]], request: list[int], hint: Hint | None
) -> None:
    sessions = [
        Session(str(i), prompt(SYSTEM, *parts), hint=named(str(i % 2)), head=100)
        for i, parts in enumerate(conversations)
    ]
    found = find(sessions, hint, "", prompt(SYSTEM, *request))
    assert found is None or conversations[int(found)][0] == request[0]


@pytest.mark.parametrize(
    ("headers", "body", "text"),
    [
        ({"X-Claude-Code-Session-Id": UUID}, {}, UUID),
        ({}, {"metadata": {"user_id": f"user_0a1b_account_9_session_{UUID}"}}, UUID),
        ({}, {"metadata": {"user_id": f'{{"device_id":"d","session_id":"{UUID}"}}'}}, UUID),
        ({"x-session-affinity": "ses_1"}, {}, "ses_1"),
        ({"X-Session-Id": "ses_2"}, {}, "ses_2"),
        ({"x-opencode-session": "ses_3"}, {}, "ses_3"),
        ({"session_id": "codex"}, {"prompt_cache_key": "other"}, "codex"),
        ({"session-id": "codex"}, {}, "codex"),
        ({}, {"prompt_cache_key": "codex"}, "codex"),
        ({"X-OpenWebUI-Chat-Id": "c1", "X-OpenWebUI-User-Id": "u"}, {"user": "u"}, "c1"),
        ({"X-Conversation-Id": "conv"}, {}, "conv"),
        ({"x-litellm-session-id": "lite"}, {}, "lite"),
        ({}, {"session_id": "s"}, "s"),
        ({}, {"conversation_id": "c"}, "c"),
        ({}, {"user": "ann"}, "ann"),
        ({"X-EVOKE-SESSION": "ours", "X-Session-Id": "theirs"}, {}, "ours"),
        ({"X-Evoke-Session": "header"}, {"evoke_session": "field"}, "field"),
    ],
)
def test_the_hint_of_a_request_is_read_from_its_headers_and_fields(
    headers: dict[str, str], body: dict[str, Any], text: str
) -> None:
    hint = hint_of(headers, body)
    assert hint is not None
    assert (hint.text, hint.weak) == (text, text == "ann")
    assert hint.ours == (text in ("ours", "field", "header"))


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {}),
        ({"X-Session-Id": ""}, {}),
        ({"X-Session-Id": "two\r\nlines"}, {}),
        ({"X-Session-Id": "x" * 257}, {}),
        ({}, {"user": 3, "session_id": None, "prompt_cache_key": ["a"]}),
        ({}, {"metadata": "text"}),
        ({}, {"metadata": {"user_id": "user_of_somebody"}}),
        ({}, {"metadata": {"user_id": "{broken"}}),
        ({}, {"metadata": {"user_id": "{" * 100_000}}),
        ({}, {"metadata": {"user_id": f'{{"x":"{"x" * 4096}","session_id":"{UUID}"}}'}}),
        ({}, {"metadata": {"user_id": '{"session_id":7}'}}),
    ],
)
def test_an_invalid_name_gives_no_hint(headers: dict[str, str], body: dict[str, Any]) -> None:
    assert hint_of(headers, body) is None


def test_after_an_invalid_name_the_next_source_is_used() -> None:
    hint = hint_of({"X-Session-Id": "\u00fc"}, {"prompt_cache_key": "key"})
    assert hint is not None and hint.source == "prompt_cache_key"


def test_only_the_user_field_is_a_weak_hint_and_it_is_the_last_source() -> None:
    assert [name for _, name, weak in SOURCES if weak] == ["user"]
    assert SOURCES[-1][1] == "user"


def test_a_named_session_continues_when_its_system_prompt_differs_in_a_few_tokens() -> None:
    before = prompt(SYSTEM, ONE, TWO)
    session = Session("a", before, hint=named("h"), head=100, head_start=50)
    clock, counter, rewritten, asked = (before.copy() for _ in range(4))
    clock[[3, 5]] = counter[20:28] = rewritten[20:29] = asked[60] = 9999
    assert find([session], named("h"), "", clock) == "a"
    assert find([session], named("h"), "", counter) == "a"
    assert find([session], named("h"), "", rewritten) is None
    assert find([session], named("h"), "", asked) is None
    assert find([session], named("other"), "", clock) is None
    assert find([session], None, "", clock) is None
    unknown = Session("b", before, hint=named("h"), head=100)
    assert find([unknown], named("h"), "", clock) is None


EDITED = 5
# A system prompt, a first message of 100 tokens, and 150 tokens that answer and continue it.
BEGUN = Session("a", prompt(SYSTEM, ONE, TWO, MORE, MORE, MORE), "", named("h"), 150, head_start=50)


def edited(
    tokens: Tokens, n_first: int = 100, session: Session = BEGUN, hint: Hint | None = None
) -> bool:
    """Whether a prompt whose first message has `n_first` tokens continues a session."""
    first = Span(50, 50 + n_first)
    return find_edited([session], hint or named("h"), tokens, first) == session.id


def test_a_session_continues_when_the_end_of_its_first_message_was_edited() -> None:
    history = (MORE, MORE, MORE, EDITED)
    assert edited(prompt(SYSTEM, ONE, EDITED, *history))
    assert edited(prompt(SYSTEM, ONE, EDITED, EDITED, *history)[:-20], 150) is False  # 1/3 is left
    longer = np.insert(prompt(SYSTEM, ONE, TWO, *history), 140, [7] * 20)
    assert edited(longer, 120)
    key = history_key(BEGUN.tokens, BEGUN.head, BEGUN.generation)
    assert key and key == history_key(longer, 170, len(longer))


def test_conversations_that_only_begin_alike_are_not_joined_by_an_edit() -> None:
    """Sub-agents, titles and repeated tasks: what follows the first message differs, or nothing."""
    assert not edited(prompt(SYSTEM, ONE, EDITED))
    assert not edited(prompt(SYSTEM, ONE, EDITED, MORE))
    assert not edited(prompt(SYSTEM, ONE, EDITED, MORE, TWO, MORE, MORE))
    assert not edited(prompt(SYSTEM, EDITED, TWO, MORE, MORE, MORE))  # another task
    assert not edited(prompt(EDITED, ONE, EDITED, MORE, MORE, MORE))  # another agent
    short = replace(BEGUN, tokens=prompt(SYSTEM, ONE, TWO, MORE))
    assert not edited(prompt(SYSTEM, ONE, EDITED, MORE, MORE), session=short)
    assert history_key(short.tokens, 150, short.generation) == b""
    unknown = replace(BEGUN, head_start=0)
    assert not edited(prompt(SYSTEM, ONE, EDITED, MORE, MORE, MORE), session=unknown)


def test_an_edit_joins_only_requests_of_one_name() -> None:
    """Without it, two conversations whose answers are alike differ as an edit does."""
    tokens = prompt(SYSTEM, ONE, EDITED, MORE, MORE, MORE)
    first = Span(50, 150)
    assert find_edited([BEGUN], named("h"), tokens, first) == "a"
    assert find_edited([BEGUN], named("other"), tokens, first) is None
    assert find_edited([BEGUN], None, tokens, first) is None
    person_s = replace(BEGUN, hint=person("u"))
    assert find_edited([person_s], person("u"), tokens, first) is None
    assert find_edited([replace(BEGUN, hint=None)], named("h"), tokens, first) is None
