"""`evoke-proxy plan` and `up`: sizes, options, the server command, the table."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from evoke_proxy.cli.main import main
from evoke_proxy.cli.plan import (
    ServerOptions,
    add_plan_options,
    default_state,
    plan_options,
    server_command,
    size,
    table,
)
from evoke_proxy.core.servers.memory_plan import (
    LayerKv,
    Machine,
    ModelShape,
    PlanOptions,
    make_plan,
)
from evoke_proxy.errors import ConfigError
from evoke_proxy.models import bundled_model

GIB = 1 << 30
SHAPE = ModelShape("llama", (LayerKv(512, 512),) * 28, n_trained=131_072, weight_bytes=5 * GIB)
MACHINE = Machine(16 * GIB, 64 * GIB, 500 * GIB)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_plan_options(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("text", "number"),
    [("16GiB", 16 * GIB), ("512M", 512 << 20), ("4096", 4 * GIB), ("1.5g", 3 * GIB // 2)],
)
def test_a_size_is_read_with_its_unit_and_in_mib_without(text: str, number: int) -> None:
    assert size(text) == number


def test_a_size_without_a_number_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="16GiB"):
        size("much")


def test_options_of_llama_server_override_those_of_the_plan() -> None:
    server_options = ServerOptions(
        ("-c", "4096", "-np", "2", "--ctx-logical=65536", "-ctk", "q8_0")
    )
    found = plan_options(
        arguments("--sessions", "3", "--cells", "100", "--context", "9"), server_options
    )
    assert (found.sessions, found.cells, found.context) == (2, 2048, 65_536)
    assert (found.kv.k, found.kv.v) == ("q8_0", "f16")
    with pytest.raises(ConfigError, match="the types are f32"):
        plan_options(arguments(), ServerOptions(("-ctv", "q9")))


def test_the_plan_says_what_llama_server_does_with_a_context_beyond_the_trained_one() -> None:
    refused = plan_options(arguments(), ServerOptions(("--ctx-logical", "200000")))
    plan = make_plan(SHAPE, MACHINE, refused)
    (note,) = [text for text in plan.notes if "200000" in text]
    assert note.startswith("llama-server refuses --ctx-logical 200000") and "leave it out" in note
    assert plan.context == 131_072
    scaled = ServerOptions(("--rope-scaling", "yarn", "--ctx-logical", "200000"))
    plan = make_plan(SHAPE, MACHINE, plan_options(arguments(), scaled))
    assert plan.context == 200_000 and not [text for text in plan.notes if "200000" in text]
    unscaled = ServerOptions(("--rope-scaling", "none"))
    plan = make_plan(SHAPE, MACHINE, plan_options(arguments("--context", "200000"), unscaled))
    command = server_command("server", [], unscaled, Path("/state"), plan)
    assert "200000" not in command and plan.context == 131_072


def test_a_model_with_another_kind_of_attention_is_not_called_recurrent() -> None:
    plan = make_plan(ModelShape("deepseek4", (), n_trained=8192), MACHINE, PlanOptions())
    text = "\n".join(table(plan))
    assert "deepseek4, other" in text and "patches/SUPPORT.md" in text
    assert "recurrent" not in text


def test_the_command_has_every_option_once() -> None:
    plan = make_plan(SHAPE, MACHINE, PlanOptions(cells=16_384, sessions=2))
    server_options = ServerOptions(("--evoke-ram", "100", "-ngl", "20"))
    command = server_command("server", ["-m", "x.gguf"], server_options, Path("/state"), plan)
    assert command[:3] == ["server", "-m", "x.gguf"]
    assert command.count("--evoke-ram") == 1
    assert command[command.index("--ctx-size") + 1] == "32768"
    assert command[command.index("--ctx-logical") + 1] == "131072"
    assert command[command.index("--evoke-disk") + 1] == f"/state/blocks:{plan.disk_mib}"
    assert command[-4:] == ["--evoke-ram", "100", "-ngl", "20"]


def test_a_recurrent_model_gets_no_block_options() -> None:
    plan = make_plan(ModelShape("mamba", (), 4, 100, n_trained=8192), MACHINE, PlanOptions())
    command = server_command("server", ["-m", "x"], ServerOptions(()), Path("/state"), plan)
    assert not [word for word in command if "evoke" in word or "logical" in word]
    assert "nothing is evicted" in "\n".join(table(plan))


def test_host_memory_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 MiB"):
        plan_options(arguments("--ram", "1KiB"), ServerOptions(()))


def test_the_table_shows_what_each_of_several_sessions_has() -> None:
    plan = make_plan(
        SHAPE, MACHINE, PlanOptions(cells=16_384, sessions=2, ram_mib=100, disk_mib=300)
    )
    text = "\n".join(table(plan))
    assert "100 MiB for all sessions, 50 for each (--evoke-ram)" in text
    assert "300 MiB for all sessions, 150 for each (--evoke-disk)" in text
    large = PlanOptions(cells=16_384, sessions=4, ram_mib=12_800, disk_mib=102_400)
    text = "\n".join(table(make_plan(SHAPE, MACHINE, large)))
    assert "12.5 GiB for all sessions, 3200 MiB for each (--evoke-ram)" in text
    assert "100 GiB for all sessions, 25 for each (--evoke-disk)" in text


def test_the_table_shows_the_memory_that_eviction_saves() -> None:
    plan = make_plan(SHAPE, MACHINE, PlanOptions(cells=16_384))
    text = "\n".join(table(plan))
    assert "16384 for each session (-c 16384)" in text
    assert "16128 tokens for each session" in text
    assert "896.00 MiB for each session" in text
    assert "7.00 GiB there: eviction saves 6.12 GiB" in text


@pytest.mark.parametrize(
    "words", [("--evoke-ram", "0"), ("--evoke-ram=0", "-c", "2048"), ("--evoke-ram", "-1")]
)
def test_a_server_without_block_calls_gets_a_plan_without_eviction(words: tuple[str, ...]) -> None:
    server_options = ServerOptions(words)
    plan = make_plan(SHAPE, MACHINE, plan_options(arguments("--cells", "4096"), server_options))
    text = "\n".join(table(plan))
    assert "off: --evoke-ram 0 disables block calls" in text
    assert "host memory    none" in text and "disk           none" in text
    assert plan.context == plan.cells
    command = server_command("server", ["-m", "x"], server_options, Path("/state"), plan)
    assert not {"--ctx-logical", "--evoke-disk"} & set(command)


def test_the_table_shows_the_disk_that_an_option_of_llama_server_names() -> None:
    for value, mib in (("/blocks:77", 77), ("/blocks", 4096), ("/blo:cks", 4096)):
        found = plan_options(arguments("--disk", "1GiB"), ServerOptions(("--evoke-disk", value)))
        assert f"{mib} MiB for all sessions (--evoke-disk)" in "\n".join(
            table(make_plan(SHAPE, MACHINE, found))
        )


def test_the_table_names_the_option_that_would_evict_where_a_context_fits() -> None:
    plan = make_plan(SHAPE, MACHINE, PlanOptions(cells=32_768, context=32_768))
    text = "\n".join(table(plan))
    assert "off: the whole context fits the cells; --cells 8192 keeps a quarter" in text


def test_a_context_whose_quarter_is_less_than_a_slot_gets_no_advice() -> None:
    plan = make_plan(SHAPE, MACHINE, PlanOptions(cells=512, context=512))
    assert "--cells" not in "\n".join(table(plan))


@pytest.mark.parametrize("words", [["--cells", "512", "m", "--"], ["m", "--cells", "512", "--"]])
def test_options_of_llama_server_may_follow_any_option_of_plan(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(bundled_model())
    command = ["plan", *(model if word == "m" else word for word in words)]
    assert main([*command, "-np", "2", "-ngl", "20", "--"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "--ctx-size 1024" in last and last.endswith("-np 2 -ngl 20 --")


@pytest.mark.parametrize("words", [["-ngl", "20"], ["20"]])
def test_options_of_llama_server_without_dashes_before_them_are_refused_with_the_fix(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "model.gguf", *words])
    assert f"{' '.join(words)}; options for llama-server follow --" in capsys.readouterr().err


def test_the_plan_counts_the_draft_model_and_the_projector_of_llama_server(tmp_path: Path) -> None:
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(bytes(3 << 20))
    words = ("-md", str(bundled_model()), "-ctkd", "q8_0", "--mmproj", str(projector))
    found = plan_options(arguments(), ServerOptions(words))
    assert found.draft is not None and found.draft.architecture == "llama"
    assert (found.draft_kv.k, found.draft_kv.v) == ("q8_0", "f16")
    assert found.projector_bytes == 3 << 20
    lines = table(make_plan(SHAPE, MACHINE, found))
    assert "beside it (-md, --mmproj)" in lines[0]
    for missing in ("--mmproj", "-md"):
        with pytest.raises(ConfigError, match="missing"):
            plan_options(arguments(), ServerOptions((missing, str(tmp_path / "missing.gguf"))))


def test_the_model_may_be_named_as_for_up(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(bundled_model())
    assert main(["plan", "-m", model, "--cells", "512"]) == 0
    named = capsys.readouterr().out
    assert main(["plan", model, "--cells", "512"]) == 0
    assert capsys.readouterr().out == named
    assert str(default_state(model)) in named


@pytest.mark.parametrize("words", [[], ["a.gguf", "-m", "b.gguf"]])
def test_a_plan_is_for_one_model(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert capsys.readouterr().err == "evoke-proxy: plan: name one GGUF file\n"


def test_the_plan_and_up_use_the_same_directory_for_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").symlink_to(bundled_model())
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "model.gguf"]) == 0
    assert str(default_state(str(bundled_model().resolve()))) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wanted", "row"),
    [
        ("auto", "16128 tokens for each session"),
        (8192, "8192 tokens for each session"),
        (20_000, "20000 tokens have no effect, a session has fewer cells: --budget 16128"),
        (None, "off: no limit is configured; leave policy.budget (--budget) out to evict"),
    ],
)
def test_the_table_shows_the_configured_budget(wanted: int | str | None, row: str) -> None:
    plan = make_plan(SHAPE, MACHINE, PlanOptions(cells=16_384))
    assert f"budget          {row}" in table(plan, wanted)
