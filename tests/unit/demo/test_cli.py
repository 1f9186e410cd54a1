"""The demo command: exit status, seeds, logs and the report that is left."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from demo_fixtures import Model, fake_stack

from evoke_proxy.demo import cli
from evoke_proxy.server_build import BuildError


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
