"""The demo with a simulated model: requests, accounting, redraws, tables, report, exit status."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evoke_proxy.demo import cli, console, report, runner
from evoke_proxy.demo.client import Reply, read_count, read_turn
from evoke_proxy.demo.runner import ARMS, RunObserver, run_arm, run_session
from evoke_proxy.demo.session import Script, draw
from evoke_proxy.server_build import BuildError

ACCOUNTING = {
    "n_prompt": 2300,
    "resident_before": 250,
    "recovered": 50,
    "decoded": 160,
    "omitted": 1840,
    "n_resident": 480,
    "n_resident_peak": 512,
    "auto_evicted": [[0, 64, "a"], [64, 100, "b"]],
}
HEADERS = {"x-evoke-evicted": "blocks=3;tokens=180", "x-evoke-recovered": "blocks=1;tokens=50"}


class Model:
    """Answers like the bundled model; arms in `forgetful` do not know the fact."""

    def __init__(self, forgetful: tuple[str, ...] = ("discard", "truncate")) -> None:
        self.forgetful = forgetful
        self.bodies: list[dict[str, Any]] = []
        self.sessions: list[str] = []

    def chat(self, port: int, body: dict[str, Any], headers: Mapping[str, str]) -> Reply:
        self.bodies.append(body)
        self.sessions.append(headers["X-Evoke-Session"])
        script = draw(int(headers["X-Evoke-Session"].rpartition("-")[2]))
        answer = "I see."
        if body["messages"][-1]["content"] == script.fact.question:
            lost = body["evoke_policy"] in self.forgetful
            answer = "I don't know." if lost else f"It is {script.fact.value}."
        return Reply(answer, {"evoke": ACCOUNTING}, HEADERS, 2.5)


@contextmanager
def fake_stack(seed: int, arm: str) -> Iterator[int]:
    yield 1


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    fake = Model()
    monkeypatch.setattr(runner, "chat", lambda *arguments: fake.chat(*arguments))
    return fake


def test_a_turn_has_the_accounting_of_the_server() -> None:
    turn = read_turn(4, Reply("Yes.", {"evoke": ACCOUNTING, "prompt_n": 9}, HEADERS, 2.5))
    assert (turn.prompt, turn.decoded, turn.recovered) == (2300, 160, 50)
    assert (turn.resident_before, turn.omitted) == (250, 1840)
    assert (turn.resident_peak, turn.resident_end) == (512, 480)
    assert turn.evicted == 180 + 100 and turn.evictions == 3 + 2 and turn.recoveries == 1
    assert turn.from_engine


def test_stock_timings_are_read_and_flagged() -> None:
    timings = {"prompt_n": 100, "cache_n": 30, "predicted_n": 5}
    turn = read_turn(1, Reply("Yes.", timings, {}, 2.5))
    assert (turn.prompt, turn.decoded, turn.resident_before) == (130, 100, 30)
    assert turn.resident_end == turn.resident_peak == 134
    assert not turn.from_engine


@pytest.mark.parametrize(
    ("header", "blocks", "tokens"),
    [
        ("blocks=3;tokens=180", 3, 180),
        (" tokens=180 ; blocks=3", 3, 180),
        ("blocks=3", 3, 0),
        ("", 0, 0),
        ("blocks=many;tokens=-1;other=5", 0, 0),
    ],
)
def test_a_plan_header_is_read_leniently(header: str, blocks: int, tokens: int) -> None:
    assert read_count(header) == {"blocks": blocks, "tokens": tokens}


def test_every_turn_sends_the_history_with_the_answers_received(model: Model) -> None:
    script = draw(3)
    run = run_arm(script, "evoke", 1, RunObserver())
    assert [len(body["messages"]) for body in model.bodies] == [
        2 * number for number in range(1, len(script.turns) + 1)
    ]
    history = model.bodies[-1]["messages"]
    assert history[0] == {"role": "system", "content": script.system}
    assert [message["content"] for message in history[1::2]] == list(script.turns)
    assert {message["content"] for message in history[2::2]} == {"I see."}
    assert run.recalled and run.peak_resident == 512
    assert run.evictions == 5 * len(script.turns) and run.recoveries == len(script.turns)


@pytest.mark.parametrize("arm", ARMS)
def test_every_request_has_the_policy_and_the_budget(model: Model, arm: str) -> None:
    run_arm(draw(3), arm, 1, RunObserver())
    for body in model.bodies:
        assert body["evoke_policy"] == arm and body["temperature"] == 0
        assert body.get("evoke_budget") == (None if arm == "no_eviction" else runner.BUDGET)
    assert set(model.sessions) == {f"{arm}-3"}


def test_all_arms_run_in_order_on_one_session(model: Model) -> None:
    script, runs = run_session(5, ARMS, fake_stack, RunObserver())
    assert script.seed == 5 and tuple(runs) == ARMS
    assert [run.recalled for run in runs.values()] == [True, False, True, False]


class Redraws(RunObserver):
    def __init__(self) -> None:
        self.seeds: list[int] = []

    def session_redrawn(self, seed: int, reason: str) -> None:
        self.seeds.append(seed)


def test_a_session_is_redrawn_at_most_three_times_if_the_model_fails_without_eviction(
    model: Model,
) -> None:
    model.forgetful = ARMS
    redraws = Redraws()
    script, runs = run_session(5, ARMS, fake_stack, redraws)
    assert redraws.seeds == [5, 6, 7] and script.seed == 7
    assert tuple(runs) == ("evoke", "discard", "no_eviction")


def test_a_fact_lost_only_by_evoke_causes_no_redraw(model: Model) -> None:
    model.forgetful = ("evoke", "discard", "truncate")
    redraws = Redraws()
    _, runs = run_session(5, ARMS, fake_stack, redraws)
    assert redraws.seeds == [] and not runs["evoke"].recalled


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


def test_the_report_has_the_promised_fields(model: Model) -> None:
    script, runs = run_session(5, ARMS, fake_stack, RunObserver())
    fake = json.loads(json.dumps(report.build(script, runs, [])))
    assert {"seed", "budget", "logical_tokens", "arms"} <= set(fake)
    assert fake["seed"] == 5 and fake["logical_tokens"] == 2300
    assert list(fake["arms"]) == list(ARMS)
    arm = {"recalled", "answer", "expected", "peak_resident", "evictions", "recoveries"}
    assert arm | {"wall_s", "turns"} <= set(fake["arms"]["evoke"])
    turn = {"prompt", "decoded", "recovered", "resident_before", "omitted"}
    turn |= {"resident_peak", "resident_end", "evicted", "ttft_ms"}
    assert turn <= set(fake["arms"]["evoke"]["turns"][0])


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(arguments)


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(cli, "ensure_server", lambda **_: Path("llama-server"))
    monkeypatch.setattr(cli, "stack", lambda *_: fake_stack(0, ""))
    return cli.run(parsed(*arguments))


def test_the_exit_status_is_0_only_when_every_arm_passes(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = ("--seed", "5", "--out", str(tmp_path))
    assert run_cli(monkeypatch, *out) == 0
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is True
    assert run_cli(monkeypatch, *out, "--arms", "evoke,no_eviction") == 1
    model.forgetful = ("evoke", "discard", "truncate")
    assert run_cli(monkeypatch, *out) == 1


def test_old_logs_are_deleted_unless_keep_logs_is_given(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "4-evoke-proxy.log"
    old.write_text("x")
    run_cli(monkeypatch, "--seed", "5", "--out", str(tmp_path), "--keep-logs")
    assert old.exists()
    run_cli(monkeypatch, "--seed", "5", "--out", str(tmp_path))
    assert not old.exists()


def test_without_a_seed_each_run_draws_another_session(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seeds = set()
    for _ in range(2):
        run_cli(monkeypatch, "--out", str(tmp_path))
        seeds.add(json.loads((tmp_path / "report.json").read_text())["seed"])
    assert len(seeds) == 2


def test_a_demo_that_cannot_run_prints_the_reason_and_deletes_the_old_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> Path:
        raise BuildError("cmake is missing")

    (tmp_path / "report.json").write_text("{}")
    monkeypatch.setattr(cli, "ensure_server", refuse)
    assert cli.run(parsed("--out", str(tmp_path))) == 2
    assert "could not run: cmake is missing" in capsys.readouterr().out
    assert not (tmp_path / "report.json").exists()


def test_an_unknown_arm_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--arms", "evoke,oracle")
    assert "unknown arm: oracle" in capsys.readouterr().err


def test_a_drawn_script_has_its_seed() -> None:
    assert isinstance(draw(6), Script) and draw(6).seed == 6
