"""`evoke-proxy divergence` on real servers: the bundled model, and one model of each memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.quality.sessions import scripts
from bench.random_models import SHAPES, ensure
from evoke_proxy.cli.main import main
from evoke_proxy.models import bundled_model

MEMORIES = ("tiny-dense", "tiny-gemma", "tiny-lfm2")


def _log(folder: Path, seed: int, count: int) -> Path:
    path = folder / "chat.jsonl"
    sessions = scripts(seed, "facts5", 1500, count)
    lines = [json.dumps({"messages": list(session.messages)}) for session in sessions]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _measured(model: Path, log: Path, *options: str) -> dict[str, Any]:
    out = log.with_suffix(".json")
    words = ["divergence", "--model", str(model), "--log", str(log), "--out", str(out), *options]
    # The host memory that `divergence` chooses would all be written at the start of each server.
    assert main([*words, "--", "-t", "1", "--evoke-ram", "64"]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    return {line["arm"]: line for line in report["summary"]} | {"rows": report["rows"]}


def test_the_default_agrees_with_the_full_cache_and_discard_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _measured(bundled_model(), _log(tmp_path, 88_001, 2), "--answers", "4")
    arms = ("default", "discard", "random", "oracle")
    default, discard, chance, oracle = (found[arm] for arm in arms)
    assert {found[arm]["answers"] for arm in arms} == {8}
    assert default["top1_percent"] >= 0.98 * oracle["top1_percent"]
    assert default["kl_mean"] < 0.1
    # Without recovery, and with blocks chosen by chance, planted values are not in the cache.
    assert discard["top1_percent"] < 80 and discard["kl_mean"] > 1
    assert chance["top1_percent"] < 80 and chance["kl_mean"] > 1
    assert found["truncate"]["top1_percent"] < 80
    rows = [row for row in found["rows"] if row["arm"] == "default"]
    assert all(row["omitted"] > 0.5 * row["prompt"] for row in rows)
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["arm", "answers", "tokens"]


@pytest.mark.parametrize("shape", MEMORIES)
def test_every_memory_is_measured(shape: str, tmp_path: Path) -> None:
    options = ("--arms", "default,random,oracle", "--answers", "3", "--tokens", "12")
    found = _measured(ensure(SHAPES[shape]), _log(tmp_path, 88_002, 1), *options)
    assert {found[arm]["answers"] for arm in ("default", "random", "oracle")} == {3}
    # The most probable token of flat distributions says nothing: `random` is as good as the oracle.
    assert 0 < found["default"]["kl_mean"] < 0.1
    assert 0 < found["random"]["kl_mean"] < 0.1


def test_policies_of_further_modules_are_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVOKE_POLICY_MODULES", "bench.policies")
    options = ("--arms", "breadcrumb,random", "--answers", "2", "--tokens", "12")
    found = _measured(bundled_model(), _log(tmp_path, 88_005, 1), *options)
    assert found["breadcrumb"]["answers"] == found["random"]["answers"] == 2


def test_without_evictions_there_is_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _log(tmp_path, 88_003, 1)
    words = ["divergence", "--model", str(bundled_model()), "--log", str(log)]
    assert main([*words, "--budget", "4000", "--arms", "default"]) == 1
    assert "smaller --budget" in capsys.readouterr().err


def test_wrong_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = _log(tmp_path, 88_004, 1)
    assert main(["divergence", "--model", str(tmp_path / "no.gguf"), "--log", str(log)]) == 2
    assert "no.gguf is not a file" in capsys.readouterr().err
    assert main(["divergence", "--model", str(log), "--log", str(tmp_path / "none")]) == 2
    words = ["divergence", "--model", str(log), "--log", str(log)]
    assert main([*words, "--out", str(tmp_path / "no folder" / "out.json")]) == 2
    assert "out.json cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["divergence", "--model", str(log), "--log", str(log), "--arms", "no_policy"])
    assert "is not an arm" in capsys.readouterr().err
