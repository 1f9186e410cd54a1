"""Malformed usage and timings in a reply raise no error and give valid counts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evoke_proxy.core.model.counts import MAX_TOKENS, token_count
from evoke_proxy.core.policy.probe import DecodeSpeed
from evoke_proxy.core.reply.observer import ReplyObserver
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.core.snapshots.costs import cost_of, is_odd

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
_USAGE_KEYS = (
    "input_tokens_details",
    "input_tokens",
    "output_tokens",
    "cache_read_input_tokens",
)
_TIMING_KEYS = ("cache_n", "prompt_n", "predicted_n", "prompt_ms", "evoke")
_ACCOUNTING_KEYS = ("decoded", "n_prompt", "epoch", "marker", "auto_evicted", "n_resident_peak")


def _objects(keys: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(keys, _JSON))


_LINES = st.sampled_from(
    [
        b"data: ",
        b"event: error",
        b"[DONE]",
        b"\n",
        b"\n\n",
        b"\r\n",
        b'{"usage":',
        b'{"timings": {',
        b"}",
        b":",
        b"[",
    ]
)


@given(st.lists(_LINES | st.binary(max_size=8), max_size=30), st.integers(1, 9))
def test_any_bytes_in_any_pieces_raise_no_error_and_give_an_outcome(
    parts: list[bytes], size: int
) -> None:
    data = b"".join(parts)
    for head in (b"", b"data: "):
        observer = ReplyObserver()
        for start in range(0, len(head + data), size):
            observer.feed((head + data)[start : start + size])
        observer.close()
        assert isinstance(observer.done, bool)
        assert observer.usage is None or isinstance(observer.usage, dict)
        cost_of(observer.timings or {}, observer.usage or {})
        TokenAccounting.parse(observer.timings)


@given(_objects(_TIMING_KEYS), _objects(_USAGE_KEYS))
def test_any_usage_gives_three_counts(timings: dict[str, Any], usage: dict[str, Any]) -> None:
    for stated in (timings, {}):
        counts = cost_of(stated, usage)
        assert all(isinstance(count, int) and 0 <= count <= MAX_TOKENS for count in counts)
        is_odd(stated, usage)


@given(_objects(("prompt_n", "prompt_ms", "predicted_n", "predicted_ms")))
@example({"prompt_n": 5, "prompt_ms": 10**400})
@example({"prompt_n": 10**12, "prompt_ms": 1e-300})
def test_any_timings_give_a_valid_decode_speed(timings: dict[str, Any]) -> None:
    speed = DecodeSpeed()
    speed.note(timings)
    speed.note({"prompt_n": 5, "prompt_ms": 10.0, "predicted_n": 5, "predicted_ms": 10.0})
    assert 0 <= speed.seconds(100, 10) < math.inf


@given(_objects(_ACCOUNTING_KEYS))
def test_any_token_accounting_is_parsed_or_refused(stated: dict[str, Any]) -> None:
    accounting = TokenAccounting.parse({"evoke": stated})
    if accounting is not None:
        assert 0 <= accounting.decoded <= MAX_TOKENS


@pytest.mark.parametrize(
    "details", [[1], "many", 3, -1, {"cached_tokens": [1]}, {"cached_tokens": -5}, 10**400, True]
)
def test_invalid_details_do_not_affect_the_other_counts(details: Any) -> None:
    usage = {"input_tokens_details": details, "input_tokens": 9, "output_tokens": 2}
    assert cost_of({}, usage) == (0, 9, 2)
    assert is_odd({}, usage)


def test_the_usage_of_a_real_server_is_not_odd() -> None:
    usage = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
    assert cost_of({}, usage) == (4, 5, 2) and not is_odd({}, usage)
    assert not is_odd({}, {}) and not is_odd({"cache_n": 0, "prompt_n": 1}, {})


@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN", "1" * 4000, "-7", "0.5", '"5"', "[[]]"])
def test_invalid_numbers_are_not_counted(text: str) -> None:
    observer = ReplyObserver()
    observer.feed(b'{"usage":{"input_tokens":%b}}' % text.encode())
    observer.close()
    stated = (observer.usage or {}).get("input_tokens")
    assert stated is not None, "json reads it"
    assert token_count(stated) == 0 or (isinstance(stated, float) and math.isfinite(stated))
    json.dumps(token_count(stated))
