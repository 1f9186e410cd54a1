"""Affinity: the server of a conversation, found before its prompt is rendered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.servers.affinity import Affinity, Route, prefix_hashes

LONG = "the quick brown fox jumps over the lazy dog. " * 8


def _hashes(*texts: str) -> list[bytes]:
    """Prefix hashes of a conversation: a fixed system prompt, then user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": "You are a helpful assistant. " * 20}]
    messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return list(prefix_hashes(parse_chat("chat", {"messages": messages}).messages))


def _track(affinity: Affinity, route: Route, name: str | None, hashes: list[bytes]) -> Route:
    """Tracks one request that begins and ends at once; returns the route."""
    with affinity.track_request(route, "t", name, hashes):
        pass
    return route


def test_a_conversation_without_a_name_is_found_by_its_messages() -> None:
    affinity = Affinity(2, 10)
    first = _track(affinity, affinity.bind(1), None, _hashes(LONG))
    longer = _hashes(LONG, "answer", "and now?")
    assert affinity.find("t", None, longer) is first
    assert affinity.find("other", None, longer) is None
    assert affinity.find("t", None, _hashes("Something else. " + LONG)) is None
    assert affinity.find("t", None, []) is None
    _track(affinity, first, None, longer)
    assert affinity.find("t", None, _hashes(LONG, "answer", "said otherwise")) is first


def test_a_conversation_that_shares_only_the_beginning_is_another_one() -> None:
    affinity = Affinity(1, 10)
    route = affinity.bind(0)
    _track(affinity, route, None, _hashes(LONG, *[f"turn {i}" for i in range(20)]))
    assert affinity.find("t", None, _hashes(LONG, "a new one")) is None
    assert affinity.find("t", None, _hashes(LONG, *[f"turn {i}" for i in range(12)])) is route


def test_a_named_conversation_is_found_whatever_its_messages() -> None:
    affinity = Affinity(2, 10)
    named = _track(affinity, affinity.bind(1), "one", _hashes(LONG))
    assert affinity.find("t", "one", _hashes("compacted")) is named
    assert affinity.find("t", "two", _hashes("compacted")) is None
    assert affinity.find("u", "one", _hashes(LONG)) is None
    _track(affinity, named, "one", _hashes("compacted " + LONG))
    assert affinity.find("t", None, _hashes(LONG)) is None, "the earlier messages must be forgotten"


def test_a_conversation_is_found_only_by_its_latest_name() -> None:
    affinity = Affinity(1, 10)
    route = _track(affinity, affinity.bind(0), "n0", _hashes(LONG))
    for number in range(1, 200):
        assert affinity.find("t", f"n{number}", _hashes(LONG)) is route
        _track(affinity, route, f"n{number}", _hashes(LONG))
        _track(affinity, route, None, _hashes(LONG))
    assert affinity.find("t", "n199", []) is route and affinity.find("t", "n198", []) is None
    assert len(route.keys) == len(affinity._routes) == 2


def test_a_conversation_without_a_name_is_not_found_while_its_request_runs() -> None:
    affinity = Affinity(2, 10)
    route = affinity.bind(0)
    with affinity.track_request(route, "t", "name", _hashes(LONG)):
        assert affinity.find("t", None, _hashes(LONG)) is None
        assert affinity.find("t", "name", _hashes(LONG)) is route
    assert affinity.find("t", None, _hashes(LONG)) is route


def test_a_short_request_has_no_prefix_hashes() -> None:
    request = parse_chat("chat", {"messages": [{"role": "user", "content": "Hi"}]})
    assert list(prefix_hashes(request.messages)) == []


def test_a_system_prompt_alone_has_no_prefix_hashes() -> None:
    assert _hashes() == []
    assert len(_hashes("Hi")) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 1)), max_size=60))
def test_the_counts_per_server_match_the_tracked_conversations(
    requests: list[tuple[int, int, int]],
) -> None:
    affinity = Affinity(2, 5)
    for number, turns, server in requests:
        name = f"n{number}" if number % 2 else None
        hashes = _hashes(f"{number} {LONG}", *[f"turn {i}" for i in range(turns)])
        route = affinity.find("t", name, hashes) or affinity.bind(server)
        affinity.move(route, server)
        _track(affinity, route, name, hashes)
        live = list(affinity._by_use.values())
        assert len(live) <= 5
        assert affinity.bound == [sum(k.server == i for k in live) for i in range(2)]
        assert all(k in live for k in affinity._routes.values())
        assert affinity.find("t", name, hashes) is route


def test_many_conversations_of_one_tenant_do_not_displace_those_of_another() -> None:
    affinity = Affinity(2, 8)
    quiet = [affinity.bind(number % 2) for number in range(3)]
    for number, route in enumerate(quiet):
        with affinity.track_request(route, "quiet", f"q{number}", ()):
            pass
    for number in range(100):
        with affinity.track_request(affinity.bind(0), "loud", f"l{number}", ()):
            pass
    assert [affinity.find("quiet", f"q{number}", ()) for number in range(3)] == quiet
    assert affinity.find("loud", "l99", ()) is not None and sum(affinity.bound) == 8
