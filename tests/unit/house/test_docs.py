"""Checks of docs/: its commands parse or run; its settings, metrics, files and links exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.cli.main import build_parser, main
from evoke_proxy.config import keys

ROOT = Path(__file__).parents[3]
DOCS = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {path.name: path.read_text() for path in DOCS}
COMMANDS = [
    line.strip()
    for text in TEXTS.values()
    for line in re.findall(r"^ {4}((?:evoke-proxy|make) .*)$", text, re.MULTILINE)
]


def test_the_expected_pages_and_commands_exist() -> None:
    required = {"operate.md", "clients.md", "tune.md", "architecture.md", "admin-api.md"}
    assert required <= set(TEXTS) and len(COMMANDS) >= 7


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_docs_parses(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "evoke-proxy":
        build_parser(arguments).parse_args(arguments)
        return
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (name,) = re.findall(r"-m bench\.(\w+)", done.stdout)
    module = ROOT / "bench" / f"{name}.py"
    assert module.exists() or module.with_suffix("").is_dir()


def test_the_commands_for_keys_work_as_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    run = [command for command in COMMANDS if re.match("evoke-proxy (keys|check-config)", command)]
    assert len(run) == 6
    for command in run:
        arguments = shlex.split(command.replace("/etc/evoke-proxy", str(tmp_path)))[1:]
        assert main(arguments) == 0, command
    assert "alice  research" in capsys.readouterr().out


@pytest.mark.parametrize("name", TEXTS)
def test_settings_metrics_and_files_exist(name: str) -> None:
    text, settings = TEXTS[name], set(keys())
    sections = {key.split(".")[0] for key in settings if "." in key}
    named = re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_]+)`", text)
    assert [key for key in named if key not in settings and f"{key}." not in str(settings)] == []
    exported = Metrics().exposition().decode()
    missing = [
        m
        for m in re.findall(r"`(evoke_[a-z_]+_(?:total|seconds|depth|up))", text)
        if m not in exported
    ]
    assert missing == []
    paths = re.findall(
        r"`((?:evoke_proxy|tests|deploy|bench|recipes|patches|config|docker)/[\w./-]*\w)`", text
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_the_walk_of_a_request_names_modules_that_exist_in_about_fifteen_steps() -> None:
    walk = TEXTS["architecture.md"].partition("open these files in this order:")[2].split("```")[1]
    modules = {f"/{path.relative_to(ROOT)}" for path in (ROOT / "evoke_proxy").rglob("*.py")}
    steps, package = set[str](), ""
    for line in walk.splitlines():
        package = line.split()[0] if line[:1].strip() else package
        for name in re.findall(r"[\w/]+\.py", line):
            folder = "/evoke_proxy/" if name.startswith("engine/") else f"/evoke_proxy/{package}/"
            assert [it for it in modules if it.startswith(folder) and it.endswith(f"/{name}")], name
            steps.add(name)
    assert 15 <= len(steps) <= 24, steps


def test_every_stage_of_a_failed_turn_is_documented() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "evoke_proxy").rglob("*.py")]
    stages = {name for text in sources for name in re.findall(r'\bstage ?= ?"(\w+)"', text)}
    described = TEXTS["requests.md"].partition("`STAGE`, a label")[2]
    assert {"plan", "share", "restore"} <= stages
    assert stages <= set(re.findall(r"`(\w+)`", described))


def test_configurations_for_clients_are_valid() -> None:
    text = TEXTS["clients.md"]
    (config,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    options = json.loads(config)["provider"]["evoke"]
    written = (ROOT / "tests/clients/test_opencode.py").read_text()
    assert options["npm"] in written and '"baseURL"' in written and set(options) <= {
        "npm", "name", "options", "models"
    }  # fmt: skip
    (codex,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert tomllib.loads(codex)["model_provider"] == "evoke"
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line][1:]
    for row in rows:
        tested = row.rstrip("| ").rpartition("| ")[2].strip("` ")
        assert tested == "**not run**" or (ROOT / tested).exists(), row


def test_faults_that_are_not_reported_are_in_no_published_page_or_package() -> None:
    """Faults of other projects stay unpublished until a person has reported them."""
    write_ups = sorted((ROOT / "patches/upstream").glob("*.md"))
    assert write_ups
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    hooks = (ROOT / "docs/site_hooks.py").read_text("utf-8")
    outside = {*re.findall(r'"([\w/.-]+\.md)"', hooks)}
    outside |= {*re.findall(r": ([\w/.-]+\.md)$", navigation, re.MULTILINE)}
    pages = {*ROOT.glob("*.md"), *DOCS, *ROOT.glob("*/README.md"), ROOT / "mkdocs.yml"}
    pages |= {ROOT / name for name in outside if (ROOT / name).is_file()}
    assert len(pages) > 25 and pages.isdisjoint(write_ups)
    texts = {page.name: page.read_text("utf-8") for page in pages}
    for name in ("patches/upstream", *(write_up.stem for write_up in write_ups)):
        assert [page for page, text in texts.items() if name in text] == []
    package = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    for kind in ("wheel", "sdist"):
        assert "/patches/upstream" in package["targets"][kind]["exclude"]
    assert "patches/upstream" in (ROOT / ".dockerignore").read_text("utf-8").splitlines()


def test_the_write_up_of_a_fault_has_no_working_request() -> None:
    for write_up in (ROOT / "patches/upstream").glob("*.md"):
        text = write_up.read_text("utf-8")
        assert "Not reported yet" in text
        request = r"HTTP/1\.|^ *[A-Z]+ /\S*|Authorization:|Host:|\\r\\n|curl |nc \S+ \d+"
        assert re.findall(request, text, re.MULTILINE) == [], write_up.name


def test_the_site_has_every_document() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = set(re.findall(r": ([\w/.-]+\.md)$", navigation, re.MULTILINE))
    outside = {name for name in pages if not (ROOT / "docs" / name).is_file()}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == pages - outside
    assert all((ROOT / name).is_file() for name in outside)
