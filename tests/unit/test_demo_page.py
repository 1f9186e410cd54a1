"""The page of a demo run: which range is shown as what, and that it needs nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.listening import Quiet, listening
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.demo import page
from evoke_proxy.demo.processes import free_port
from evoke_proxy.demo.residency import pictured, resident_now

VOID = {"meta", "path", "br"}


def turn(
    prompt: int, decoded: int, resident: list[list[int]] | None, **more: Any
) -> dict[str, Any]:
    books = {"recovered": 0, "resident_before": 0, "omitted": 0, "resident_peak": 9}
    rest = {"resident_end": 9, "evicted": 0, "ttft_ms": 1.5, "from_engine": True}
    given = {"prompt": prompt, "decoded": decoded, "resident": resident}
    return {**books, **rest, **given, **more}


def report(*turns: dict[str, Any], **changed: Any) -> dict[str, Any]:
    arm = {"recalled": True, "answer": "It is <b>7</b>.", "expected": "7", "peak_resident": 512}
    arm |= {"evictions": 3, "recoveries": 2, "wall_s": 1.25, "turns": list(turns)}
    made = {"seed": 5, "budget": 512, "logical_tokens": 2300, "passed": True, "failures": []}
    return {**made, "arms": {"evoke": arm}, **changed}


SESSION = (
    turn(100, 100, [[0, 110]]),
    turn(200, 90, [[0, 40], [110, 205]]),
    turn(300, 95, [[0, 80], [150, 280]]),
)


def test_each_range_is_shown_by_how_it_came_there() -> None:
    first, second, third = pictured(SESSION)
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
        (Span(280, 300), "again"),
    ]


def test_ranges_of_a_turn_tile_its_prompt() -> None:
    for said, ranges in zip(SESSION, pictured(SESSION), strict=True):
        edges = [0, *(span.end for span, _ in ranges)]
        assert [span.start for span, _ in ranges] == edges[:-1] and edges[-1] == said["prompt"]


def test_a_turn_nobody_saw_is_empty_and_the_next_has_no_earlier_rows() -> None:
    first, second = pictured([turn(100, 100, None), turn(200, 90, [[0, 205]])])
    assert first == [] and second[0] == (Span(0, 110), "recovered")


class Balanced(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_but_itself() -> None:
    text = page.build(report(*SESSION))
    parser = Balanced()
    parser.feed(text)
    assert parser.open == [] and {"svg", "rect", "table", "details"} <= parser.seen
    assert not {"script", "link", "img", "iframe"} & parser.seen
    assert not re.search(r"https?:|url\(|@import|src=", text)
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_what_the_model_said_is_no_markup() -> None:
    text = page.build(report(*SESSION))
    assert "It is &lt;b&gt;7&lt;/b&gt;." in text and "<b>" not in text


def test_verdict_and_books_stand_in_it() -> None:
    text = page.build(report(*SESSION))
    assert "PASSED" in text and "2300 tokens on a budget of 512" in text
    assert "<td>300</td><td>95</td>" in text
    failed = page.build(report(*SESSION, passed=False, failures=["evoke: peak <600>"]))
    assert "PASSED" not in failed and "<li>evoke: peak &lt;600&gt;</li>" in failed


def test_books_nobody_sent_are_dashes_and_unknown_ranges_are_said_so() -> None:
    text = page.build(report(turn(100, 100, None, from_engine=False)))
    assert "did not say what it held" in text and "<svg" not in text
    assert "<td>100</td><td>100</td><td>-</td><td>0</td><td>-</td>" in text


def test_the_line_of_the_fact_goes_when_messages_were_dropped() -> None:
    assert "M100 0V3" in page.build(report(*SESSION))
    shorter = page.build(report(turn(100, 100, [[0, 99]]), turn(80, 60, [[0, 79]])))
    assert 'class="fact"' not in shorter


def test_an_old_page_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    page.write(path, report(*SESSION))
    page.write(path, report(*SESSION, seed=77))
    assert "--seed 77" in path.read_text()


@pytest.fixture(params=[b'{"resident":[[0,4],[9,12]]}', b'{"resident":7}', b"[]", b"no"])
def slots(request: pytest.FixtureRequest) -> Iterator[tuple[int, bytes]]:
    class Slots(Quiet):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/slots/0/blocks" else 404)
            self.end_headers()
            self.wfile.write(request.param)

    with listening(Slots) as port:
        yield port, request.param


def test_a_slot_is_asked_and_anything_odd_means_nobody_knows(slots: tuple[int, bytes]) -> None:
    port, answer = slots
    expected = [[0, 4], [9, 12]] if b"[[" in answer else None
    assert resident_now(port) == expected


def test_no_server_means_nobody_knows() -> None:
    assert resident_now(free_port()) is None
