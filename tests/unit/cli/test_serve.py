"""The options of `evoke-proxy serve` for one or several servers."""

from __future__ import annotations

import pytest

from evoke_proxy.cli.main import build_parser, main
from evoke_proxy.cli.serve import overrides


def test_several_servers_can_be_given_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    several = ["--upstream", "a=http://one:1", "--upstream", "http://two:2"]
    assert main(["check-config", *several]) == 0
    assert "upstream  a at http://one:1, two:2 at http://two:2\n" in capsys.readouterr().out
    assert main(["check-config", "--upstream", "only=http://one:1"]) == 0
    assert "upstream  only at http://one:1\n" in capsys.readouterr().out
    assert main(["check-config", "--upstream", "http://one:1"]) == 0
    assert "upstream  http://one:1\n" in capsys.readouterr().out
    assert main(["check-config", *several, "--upstream", "a=http://three:3"]) == 2
    assert main(["doctor", "--upstream", "http://127.0.0.1:9"]) == 2


def test_one_server_on_the_command_line_overrides_the_pool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVOKE_POOL_UPSTREAMS", "a=http://one:1, b=http://two:2")
    assert main(["check-config"]) == 0
    assert "a at http://one:1, b at http://two:2" in capsys.readouterr().out
    assert main(["check-config", "--upstream", "http://three:3"]) == 0
    assert "upstream  http://three:3\n" in capsys.readouterr().out
    assert main(["doctor"]) == 2
    assert "pool.upstreams names several" in capsys.readouterr().err


def test_each_option_overrides_its_setting_and_absent_ones_override_nothing() -> None:
    words = "serve --listen :1 --listen [::1]:2 --budget off --policy discard --log-level debug"
    arguments = build_parser(words.split()).parse_args(words.split())
    assert {key: value for key, value in overrides(arguments).items() if value is not None} == {
        "listen": [":1", "[::1]:2"],
        "policy.budget": "off",
        "policy.name": "discard",
        "log.level": "debug",
    }


def test_a_budget_that_is_no_number_and_no_word_is_refused() -> None:
    for word in ("many", "", "1.5"):
        with pytest.raises(SystemExit):
            build_parser(["serve"]).parse_args(["serve", "--budget", word])
