"""`evoke-proxy divergence` before it measures, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from evoke_proxy.cli.main import main
from evoke_proxy.divergence.cli import table

LINE = {
    "arm": "evoke",
    "answers": 8,
    "tokens": 384,
    "kl_mean": 0.01234,
    "kl_p95": 0.5,
    "top1_percent": 98.76,
    "low": 97.0,
    "high": 100.0,
    "answers_changed_percent": 12.5,
    "logprob_change": -0.01,
}


def test_the_table_is_aligned_and_rounds_each_figure() -> None:
    head, first, second = table([LINE, LINE | {"arm": "full", "tokens": 3_840_000}]).splitlines()
    assert len(head) == len(first) == len(second)
    assert first.split() == [
        *("evoke", "8", "384", "0.0123", "0.5000", "98.8", "97.0", "to", "100.0", "12", "-0.0100"),
    ]


@pytest.mark.parametrize(
    "options", [["--arms", "nothing"], ["--share", "0"], ["--tokens", "-1"], ["--budget", "x"]]
)
def test_wrong_options_are_refused_before_a_server_is_built(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, model = tmp_path / "log.jsonl", tmp_path / "m.gguf"
    with pytest.raises(SystemExit) as ended:
        main(["divergence", "--model", str(model), "--log", str(log), *options])
    assert ended.value.code == 2
    assert f"argument {options[0]}:" in capsys.readouterr().err


def test_a_missing_model_and_an_output_that_cannot_be_written_end_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, model = tmp_path / "log.jsonl", tmp_path / "m.gguf"
    words = ["divergence", "--model", str(model), "--log", str(log)]
    assert main(words) == 2
    assert "--model: " in capsys.readouterr().err
    model.write_bytes(b"GGUF")
    log.write_text(
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hm"}]}'
    )
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "--out: " in capsys.readouterr().err
