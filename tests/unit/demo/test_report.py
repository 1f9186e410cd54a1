"""The demo's report page, and the token ranges that it draws."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.listening import Quiet, listening
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.demo.client import resident_now
from evoke_proxy.demo.processes import free_port
from evoke_proxy.demo.report import cache_ranges, page, write

VOID = {"meta", "path", "br"}


def turn(
    prompt: int, decoded: int, resident: list[list[int]] | None, **more: Any
) -> dict[str, Any]:
    counts = {"recovered": 0, "resident_before": 0, "omitted": 0, "resident_peak": 9}
    defaults = {"resident_end": 9, "evicted": 0, "ttft_ms": 1.5, "from_engine": True}
    fields = {"prompt": prompt, "decoded": decoded, "resident": resident}
    return {**counts, **defaults, **fields, **more}


def demo_report(*turns: dict[str, Any], **changed: Any) -> dict[str, Any]:
    arm = {"recalled": True, "answer": "It is <b>7</b>.", "expected": "7", "peak_resident": 512}
    arm |= {"evictions": 3, "recoveries": 2, "wall_s": 1.25, "turns": list(turns)}
    base = {"seed": 5, "budget": 512, "logical_tokens": 2300, "passed": True, "failures": []}
    return {**base, "not_run": [], "arms": {"evoke": arm}, **changed}


SESSION = (
    turn(100, 100, [[0, 110]]),
    turn(200, 90, [[0, 40], [110, 205]]),
    turn(300, 95, [[0, 80], [150, 280]]),
)


def test_each_range_of_a_prompt_has_the_kind_of_its_history() -> None:
    first, second, third = cache_ranges(SESSION)
    assert first == [(Span(0, 100), "decoded")]
    assert second == [
        (Span(0, 40), "before"),
        (Span(40, 110), "omitted"),
        (Span(110, 200), "decoded"),
    ]
    assert third == [
        (Span(0, 40), "before"),
        (Span(40, 80), "recovered"),
        (Span(80, 150), "omitted"),
        (Span(150, 205), "before"),
        (Span(205, 280), "decoded"),
        (Span(280, 300), "evicted"),
    ]


def test_ranges_of_a_turn_tile_its_prompt() -> None:
    for record, ranges in zip(SESSION, cache_ranges(SESSION), strict=True):
        edges = [0, *(span.end for span, _ in ranges)]
        assert [span.start for span, _ in ranges] == edges[:-1] and edges[-1] == record["prompt"]


def test_a_turn_without_reported_ranges_is_empty_and_resets_the_history() -> None:
    first, second = cache_ranges([turn(100, 100, None), turn(200, 90, [[0, 205]])])
    assert first == [] and second[0] == (Span(0, 110), "recovered")


class Balanced(HTMLParser):
    """Checks that every element is closed in the right order, and collects the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    text = page(demo_report(*SESSION))
    parser = Balanced()
    parser.feed(text)
    assert parser.open == [] and {"svg", "rect", "table", "details"} <= parser.tags
    assert not {"script", "link", "img", "iframe"} & parser.tags
    assert not re.search(r"https?:|url\(|@import|src=", text)
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_the_models_answer_is_escaped() -> None:
    text = page(demo_report(*SESSION))
    assert "It is &lt;b&gt;7&lt;/b&gt;." in text and "<b>" not in text


def test_the_page_has_the_verdict_and_the_token_accounting() -> None:
    text = page(demo_report(*SESSION))
    assert "PASSED" in text and "2300 tokens on a budget of 512" in text
    assert "<td>300</td><td>95</td>" in text
    failed = page(demo_report(*SESSION, passed=False, failures=["evoke: peak <600>"]))
    assert "PASSED" not in failed and "<li>evoke: peak &lt;600&gt;</li>" in failed
    partial = page(demo_report(*SESSION, passed=False, not_run=["discard"]))
    assert "FAILED" not in partial and "Not run, so there is no verdict: discard." in partial


def test_missing_counts_are_dashes_and_missing_ranges_are_explained() -> None:
    text = page(demo_report(turn(100, 100, None, from_engine=False)))
    assert "did not report which tokens were in the cache" in text and "<svg" not in text
    assert "<td>100</td><td>100</td><td>-</td><td>0</td><td>-</td>" in text


def test_the_fact_is_not_drawn_when_messages_were_dropped() -> None:
    assert "M100 0V3" in page(demo_report(*SESSION))
    shorter = page(demo_report(turn(100, 100, [[0, 99]]), turn(80, 60, [[0, 79]])))
    assert 'class="fact"' not in shorter


def test_a_report_replaces_that_of_an_earlier_run(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    write(folder, demo_report(*SESSION))
    write(folder, demo_report(*SESSION, seed=77))
    assert "--seed 77" in (folder / "report.html").read_text()
    assert json.loads((folder / "report.json").read_text())["seed"] == 77


@pytest.fixture(params=[b'{"resident":[[0,4],[9,12]]}', b'{"resident":7}', b"[]", b"no"])
def slots(request: pytest.FixtureRequest) -> Iterator[tuple[int, bytes]]:
    class Slots(Quiet):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/slots/0/blocks" else 404)
            self.end_headers()
            self.wfile.write(request.param)

    with listening(Slots) as port:
        yield port, request.param


def test_resident_now_is_none_for_an_unexpected_answer(slots: tuple[int, bytes]) -> None:
    port, answer = slots
    expected = [[0, 4], [9, 12]] if b"[[" in answer else None
    assert resident_now(port) == expected


def test_resident_now_is_none_without_a_server() -> None:
    assert resident_now(free_port()) is None
