"""What the demo prints: on a terminal, without one, and without colours."""

from __future__ import annotations

import io

import pytest
from demo_fixtures import Model, fake_stack

from evoke_proxy.demo import console, report, runner
from evoke_proxy.demo.client import Reply, read_turn
from evoke_proxy.demo.runner import ARMS, run_session
from evoke_proxy.demo.session import draw


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_output(out: io.StringIO, model: Model) -> str:
    terminal = console.Terminal(out)
    script, runs = run_session(5, ARMS, fake_stack, terminal)
    terminal.verdict(report.build(script, runs, ["evoke: turn 3: peak"]))
    return out.getvalue()


def test_without_a_terminal_the_conversation_is_plain_lines(model: Model) -> None:
    text = terminal_output(io.StringIO(), model)
    assert "\x1b" not in text and "\r" not in text
    lines, script = text.splitlines(), draw(5)
    counts = "2,300 480 280 50".split()
    assert f"{script.fact.statement} {' '.join(counts)}" in " ".join(lines[6].split())
    assert [line.split()[-4:] for line in lines].count(counts) == len(script.turns)
    assert f"      Model: It is {script.fact.value}." in lines
    assert sum(line.startswith("discard ") and "forgotten" in line for line in lines) == 1
    assert "FAILED  evoke: turn 3: peak" in lines and "PASSED" not in text


def test_arms_that_were_not_run_are_no_failure(model: Model) -> None:
    out = io.StringIO()
    terminal = console.Terminal(out)
    script, runs = run_session(5, ("evoke", "no_eviction"), fake_stack, terminal)
    result = report.build(script, runs, [])
    terminal.verdict(result)
    assert not result["passed"]
    assert "Not run, so there is no verdict: discard, truncate." in out.getvalue()
    assert "FAILED" not in out.getvalue() and "PASSED" not in out.getvalue()


def test_the_conversation_says_when_the_fact_leaves_and_returns(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, sinks = [[0, 2300]], [[0, 16], [2200, 2300]]
    caches = iter([whole] * 3 + [sinks] * (len(draw(5).turns) - 4) + [whole] * 100)
    monkeypatch.setattr(runner, "resident_now", lambda _port: next(caches))
    lines = terminal_output(io.StringIO(), model).splitlines()
    left = lines.index("      the fact has left the cache: its rows are saved in host memory")
    back = lines.index("      the fact is back in the cache, by a copy")
    assert lines[left - 1].split()[0] == "4" and lines[back - 1].split()[0] == str(
        len(draw(5).turns)
    )
    assert left < back < lines.index(f"      Model: It is {draw(5).fact.value}.")


def test_the_gain_is_computed_from_both_arms() -> None:
    turns = [{"recovered": 700, "decoded": 900}]
    ours = {"peak_resident": 500, "recalled": True, "wall_s": 2.0, "turns": turns}
    whole = ours | {"peak_resident": 2000, "turns": [{"recovered": 0, "decoded": 950}]}
    cache, work, _ = console.gain({"evoke": ours, "no_eviction": whole})
    assert "500 tokens instead of 2,000, 4.0 times less, with the same answer" in cache
    assert "700 tokens were recovered by a copy and 900 were decoded" in work
    assert "without a budget 950 were decoded" in work
    lost = {"evoke": ours | {"recalled": False}, "no_eviction": whole}
    assert "with another answer" in next(iter(console.gain(lost)))
    assert list(console.gain({"evoke": ours})) == []


def test_on_a_terminal_a_waiting_line_is_written_over(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = terminal_output(Terminal(), model)
    assert " ...\x1b[0m\r\x1b[2K" in text and "\x1b[32m" in text


def test_no_color_disables_colours(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = terminal_output(Terminal(), model)
    assert "\x1b[32m" not in text and "\r\x1b[2K" in text


def test_missing_counts_are_dashes() -> None:
    turn = read_turn(1, Reply("Yes.", {"prompt_n": 100, "cache_n": 30}, {}, 2.5))
    assert report.turn_cells(1, report.turn_record(turn)) == [
        *"1 130 100 - 30 - 130 130 -".split(),
        "2.5 ms",
    ]
