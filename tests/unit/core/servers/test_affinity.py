"""Where a conversation is, as far as its requests tell before any server has rendered them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.servers.affinity import Affinity, Route, prefix_hashes

LONG = "the quick brown fox jumps over the lazy dog. " * 8


def _trail(*texts: str) -> list[bytes]:
    """Of a system prompt all have in common, and messages of a user and a model in turn."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": "You are a helpful assistant. " * 20}]
    messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return list(prefix_hashes(parse_chat("chat", {"messages": messages}).messages))


def _said(affinity: Affinity, known: Route, name: str | None, trail: list[bytes]) -> Route:
    with affinity.track_request(known, "t", name, trail):
        pass
    return known


def test_a_conversation_without_a_name_is_known_by_what_was_said() -> None:
    affinity = Affinity(2, 10)
    first = _said(affinity, affinity.bind(1), None, _trail(LONG))
    longer = _trail(LONG, "answer", "and now?")
    assert affinity.find("t", None, longer) is first
    assert affinity.find("other", None, longer) is None
    assert affinity.find("t", None, _trail("Something else. " + LONG)) is None
    assert affinity.find("t", None, []) is None
    _said(affinity, first, None, longer)
    assert affinity.find("t", None, _trail(LONG, "answer", "said otherwise")) is first


def test_one_that_shares_only_the_beginning_is_another() -> None:
    affinity = Affinity(1, 10)
    known = affinity.bind(0)
    _said(affinity, known, None, _trail(LONG, *[f"turn {i}" for i in range(20)]))
    assert affinity.find("t", None, _trail(LONG, "a new one")) is None
    assert affinity.find("t", None, _trail(LONG, *[f"turn {i}" for i in range(12)])) is known


def test_a_name_wins_and_bears_any_change() -> None:
    affinity = Affinity(2, 10)
    named = _said(affinity, affinity.bind(1), "one", _trail(LONG))
    assert affinity.find("t", "one", _trail("compacted")) is named
    assert affinity.find("t", "two", _trail("compacted")) is None
    assert affinity.find("u", "one", _trail(LONG)) is None
    _said(affinity, named, "one", _trail("compacted " + LONG))
    assert affinity.find("t", None, _trail(LONG)) is None, "that is forgotten"


def test_it_has_one_name_the_latest() -> None:
    affinity = Affinity(1, 10)
    known = _said(affinity, affinity.bind(0), "n0", _trail(LONG))
    for number in range(1, 200):
        assert affinity.find("t", f"n{number}", _trail(LONG)) is known
        _said(affinity, known, f"n{number}", _trail(LONG))
        _said(affinity, known, None, _trail(LONG))
    assert affinity.find("t", "n199", []) is known and affinity.find("t", "n198", []) is None
    assert len(known.keys) == len(affinity._routes) == 2


def test_nobody_without_a_name_speaks_twice_at_once() -> None:
    affinity = Affinity(2, 10)
    known = affinity.bind(0)
    with affinity.track_request(known, "t", "name", _trail(LONG)):
        assert affinity.find("t", None, _trail(LONG)) is None
        assert affinity.find("t", "name", _trail(LONG)) is known
    assert affinity.find("t", None, _trail(LONG)) is known


def test_short_requests_leave_no_trail() -> None:
    request = parse_chat("chat", {"messages": [{"role": "user", "content": "Hi"}]})
    assert list(prefix_hashes(request.messages)) == []


def test_a_prompt_that_only_the_system_has_said_leaves_none() -> None:
    assert _trail() == []
    assert len(_trail("Hi")) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 1)), max_size=60))
def test_counts_are_those_of_the_conversations_there_are(
    requests: list[tuple[int, int, int]],
) -> None:
    affinity = Affinity(2, 5)
    for talk, turns, server in requests:
        name = f"n{talk}" if talk % 2 else None
        trail = _trail(f"{talk} {LONG}", *[f"turn {i}" for i in range(turns)])
        known = affinity.find("t", name, trail) or affinity.bind(server)
        affinity.move(known, server)
        _said(affinity, known, name, trail)
        live = list(affinity._by_use.values())
        assert len(live) <= 5
        assert affinity.bound == [sum(k.server == i for k in live) for i in range(2)]
        assert all(k in live for k in affinity._routes.values())
        assert affinity.find("t", name, trail) is known


def test_a_flood_of_one_tenant_leaves_where_the_conversations_of_another_are() -> None:
    affinity = Affinity(2, 8)
    quiet = [affinity.bind(number % 2) for number in range(3)]
    for number, known in enumerate(quiet):
        with affinity.track_request(known, "quiet", f"q{number}", ()):
            pass
    for number in range(100):
        with affinity.track_request(affinity.bind(0), "loud", f"l{number}", ()):
            pass
    assert [affinity.find("quiet", f"q{number}", ()) for number in range(3)] == quiet
    assert affinity.find("loud", "l99", ()) is not None and sum(affinity.bound) == 8
