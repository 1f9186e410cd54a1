"""The driver of benches: options, the record, and the exit status."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.driver import Bench, Report, Row, option, run_parts


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    yield from ({"size": size, "ms": 2.0 * size} for size in args.sizes)


def _report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    slow = [f"{row['size']} tokens" for row in rows if row["ms"] > args.most]
    return Report({"rows": len(rows)}, slow)


def _bench(name: str) -> Bench:
    options = (option("--sizes", (1, 2), "tokens"), option("--most", 10.0), option("--fast", False))
    return Bench(name, "What?", "--sizes 1", _rows, _report, ("size", "ms"), options)


def test_a_bench_records_its_rows_and_fails_on_a_missed_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made" / "x.json"
    assert _bench("example").main(["--out", str(path)]) == 0
    written = json.loads(path.read_text("utf-8"))
    assert written["rows"] == [{"size": 1, "ms": 2.0}, {"size": 2, "ms": 4.0}]
    assert written["summary"] == {"rows": 2}
    assert _bench("example").main(["--out", str(path), "--most", "3"]) == 1
    assert "missed: 2 tokens" in capsys.readouterr().out


def test_options_have_the_type_of_their_default() -> None:
    args = _bench("example").parse(["--sizes", "3", "4", "--fast"])
    assert (args.sizes, args.most, args.fast) == ([3, 4], 10.0, True)
    assert _bench("example").parse([]).sizes == [1, 2]


def test_one_part_runs_by_its_name_and_the_usual_ones_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = {name: _bench(f"example {name}") for name in ("one", "two", "three")}
    assert run_parts(parts, argv=["two", "--most", "1"]) == 1
    assert [path.name for path in Path("out/bench").iterdir()] == ["example_two.json"]
    assert run_parts(parts, ["one", "three"], []) == 0
    assert len(list(Path("out/bench").iterdir())) == 3


BENCHES = tuple(
    f"bench.{name}"
    for name in (
        *("latency", "limit", "overhead", "stall", "session", "placement"),
        *("growth", "restart", "soak", "support", "evidence.__main__", "tasks.__main__"),
        *("quality.__main__", "agent", "traces.__main__"),
    )
)


@pytest.mark.parametrize("name", BENCHES)
def test_each_bench_says_what_it_compares_with_and_when_it_fails(name: str) -> None:
    module = importlib.import_module(name)
    parts = [module.BENCH] if hasattr(module, "BENCH") else list(module.PARTS.values())
    for part in parts:
        assert part.about and part.about.partition("\n")[0].endswith("?")
        assert "*Against*" in part.about and "*Fails*" in part.about
        if name != "bench.soak" or part.name == "soak":  # the slopes need samples
            positional = [each.name for each in part.options if not each.name.startswith("--")]
            assert part.parse(["x" for _ in positional]).out is None
