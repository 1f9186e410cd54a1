"""Measuring the structure of JSON bodies: exact, in pieces of any size, in linear time."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import pytest
from cpu_time import exponent

from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.request import json_shape
from evoke_proxy.core.request.json_shape import measure
from evoke_proxy.errors import RequestError

_UNLIMITED = LimitsConfig(
    json_depth=30_000,
    json_keys=10**9,
    json_values=10**9,
    json_number_chars=10**9,
)
_TEXTS = ('a"b\\', "\\\\", "{[,:]}", "\n", "é語😀", "x" * 40, "\\" * 7, '\\"', "")


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth > 6 or kind < 0.3:
        return rng.choice([*_TEXTS, 1, -2.5e-7, 10**30, None, True])
    if kind < 0.65:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    names = (rng.choice(_TEXTS) + str(i) for i in range(rng.randrange(6)))
    return {name: _value(rng, depth + 1) for name in names}


def _counted(value: Any) -> tuple[int, int, int, int]:
    """Depth, keys of the largest object, values and commas, counted in the parsed value."""
    if not isinstance(value, dict | list):
        return 0, 0, 0, 0
    inside = [_counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return (
        1 + max((one[0] for one in inside), default=0),
        max([keys, *(one[1] for one in inside)]),
        1 + keys + sum(one[2] for one in inside),
        max(0, len(value) - 1) + sum(one[3] for one in inside),
    )


def test_the_measured_shape_equals_that_of_the_parsed_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(7)
    for _ in range(250):
        value = {"top": _value(rng, 0)}
        monkeypatch.setattr(json_shape, "_PIECE_BYTES", rng.choice((1, 2, 3, 5, 16, 64, 1024)))
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))
        found = measure(text.encode(), _UNLIMITED)
        counted = (found.depth, found.keys, found.values, found.elements)
        assert counted == _counted(value), text


@pytest.mark.parametrize("piece", (1, 2, 7, 64, 4096))
@pytest.mark.parametrize(
    ("limits", "text", "allowed"),
    (
        (LimitsConfig(json_depth=5), lambda n: "[" * n + "]" * n, 5),
        (LimitsConfig(json_depth=5), lambda n: '{"a":[' + '{"b":' * (n - 2) + "1", 5),
        (LimitsConfig(json_keys=6), lambda n: "[{},{" + ",".join(['"k":{"x":1}'] * n) + "}]", 6),
        (LimitsConfig(json_values=8), lambda n: "[" + ",".join(["[]"] * (n - 1)) + "]", 8),
        (LimitsConfig(json_values=2), lambda n: "[" + ",".join("1" * (n + 1)) + "]", 10),
        (LimitsConfig(json_number_chars=50), lambda n: '{"a": -' + "1" * (n - 1) + " }", 50),
        (LimitsConfig(json_number_chars=50), lambda n: "7" * n, 50),
        (
            LimitsConfig(json_number_chars=50),
            lambda n: '["' + "1" * 999 + '", 1' + "0" * (n - 1) + "]",
            50,
        ),
    ),
)
def test_each_limit_is_exact(
    piece: int, limits: LimitsConfig, text: Any, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_shape, "_PIECE_BYTES", piece)
    measure(text(allowed).encode(), limits)
    with pytest.raises(RequestError) as refused:
        measure(text(allowed + 1).encode(), limits)
    assert refused.value.status == 400
    assert "limits.json_" in str(refused.value)


def test_long_white_space_and_long_strings_do_not_count_as_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for piece in (1, 3, 4096):
        monkeypatch.setattr(json_shape, "_PIECE_BYTES", piece)
        text = '{"a":' + " \n" * 400 + '"' + "1" * 900 + '"' + " " * 900 + "}" + "\t" * 900
        shape = measure(text.encode(), LimitsConfig(json_number_chars=50))
        assert (shape.depth, shape.keys) == (1, 1)


@pytest.mark.parametrize(
    "text", ("", "}", "]]]]", '"', '"\\', "\\", "{]", ',,::"', "\xff\xfe", '{"a":1}}}}', "1" * 30)
)
def test_a_text_that_is_not_json_has_one_shape_for_any_piece_size(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = set()
    for piece in (1, 2, 4096):
        monkeypatch.setattr(json_shape, "_PIECE_BYTES", piece)
        shapes.add(measure(text.encode("latin-1"), LimitsConfig()))
    assert len(shapes) == 1


@pytest.mark.parametrize(
    "unit", (b"{},", b"[", b"]", b'"', b"\\", b'\\"', b'""', b",", b":", b"1", b" ", b'"a":{', b"x")
)
def test_measuring_takes_linear_time(unit: bytes) -> None:
    def run(n: int) -> None:
        with suppress(RequestError):  # too deep: the rest is not read
            measure(unit * n, _UNLIMITED)

    assert exponent(run, 512 * 1024) < 1.3
