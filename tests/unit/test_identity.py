"""Sessions are told apart by their tokens; a hint only helps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evoke_proxy.core.identity import find, hint_of
from evoke_proxy.core.rendered import Tokens


@dataclass
class Session:
    id: str
    tokens: Tokens
    tenant: str = ""
    hint: str | None = None


def prompt(*parts: int) -> Tokens:
    """Runs of 50 tokens, one a number."""
    return np.concatenate([np.arange(50, dtype=np.int32) + part * 1000 for part in parts])


SYSTEM, ONE, TWO, MORE = 1, 2, 3, 4


def test_a_longer_prompt_goes_on_from_the_shorter() -> None:
    sessions = [Session("a", prompt(SYSTEM, ONE)), Session("b", prompt(SYSTEM, TWO))]
    assert find(sessions, None, "", prompt(SYSTEM, TWO, MORE)) == "b"
    assert find(sessions, None, "", prompt(SYSTEM, ONE, MORE)) == "a"


def test_a_shared_system_prompt_is_not_a_conversation() -> None:
    sessions = [Session("a", prompt(SYSTEM, SYSTEM, ONE, ONE, ONE))]
    assert find(sessions, None, "", prompt(SYSTEM, SYSTEM, TWO)) is None


def test_the_longest_prefix_wins_and_short_ones_do_not_count() -> None:
    sessions = [Session("a", prompt(SYSTEM, ONE)), Session("b", prompt(SYSTEM, ONE, TWO))]
    assert find(sessions, None, "", prompt(SYSTEM, ONE, TWO, MORE)) == "b"
    assert find([Session("c", prompt(SYSTEM))], None, "", prompt(SYSTEM, TWO)) is None


def test_a_hint_lets_short_prompts_match() -> None:
    sessions = [Session("a", prompt(SYSTEM), hint="h"), Session("b", prompt(SYSTEM))]
    assert find(sessions, "h", "", prompt(SYSTEM, ONE)) == "a"


def test_a_wrong_hint_makes_a_new_session_and_takes_nobody_elses() -> None:
    sessions = [Session("a", prompt(SYSTEM, ONE), hint="h"), Session("b", prompt(TWO, TWO))]
    assert find(sessions, "h", "", prompt(TWO, TWO, MORE)) is None
    assert find(sessions, "unknown", "", prompt(SYSTEM, ONE, MORE)) is None


def test_one_hint_may_have_branches() -> None:
    sessions = [
        Session("a", prompt(SYSTEM, ONE, ONE), hint="h"),
        Session("b", prompt(SYSTEM, TWO, TWO), hint="h"),
    ]
    assert find(sessions, "h", "", prompt(SYSTEM, TWO, TWO, MORE)) == "b"


def test_tenants_never_meet() -> None:
    sessions = [Session("a", prompt(SYSTEM, ONE), tenant="x", hint="h")]
    assert find(sessions, None, "y", prompt(SYSTEM, ONE, MORE)) is None
    assert find(sessions, "h", "y", prompt(SYSTEM, ONE, MORE)) is None


def test_our_field_goes_before_our_header() -> None:
    assert hint_of({"X-Evoke-Session": "header"}, "field") == "field"
    assert hint_of({"X-Evoke-Session": "header"}, None) == "header"
    assert hint_of({}, None) is None
