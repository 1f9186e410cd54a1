"""The files under .github: valid for the schemas that GitHub publishes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GITHUB = Path(__file__).parents[3] / ".github"
FORMS = sorted(path for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.name != "config.yml")


def _tool(name: str) -> str:
    """The path of a linter; skips the test if it is not installed."""
    tool = shutil.which(name, path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("needs the extra [docker]")
    return tool


def _check(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [_tool("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_issue_forms_match_the_schema(tmp_path: Path) -> None:
    assert len(FORMS) == 3
    done = _check("github-issue-forms", *FORMS)
    assert done.returncode == 0, done.stdout
    assert _check("github-issue-config", GITHUB / "ISSUE_TEMPLATE/config.yml").returncode == 0
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(FORMS[0].read_text("utf-8").replace("type: textarea", "type: essay"), "utf-8")
    assert _check("github-issue-forms", wrong).returncode != 0


def test_actionlint_accepts_the_workflow_and_finds_a_mistake(tmp_path: Path) -> None:
    tool, workflow = _tool("actionlint"), GITHUB / "workflows/ci.yml"
    done = subprocess.run([tool, str(workflow)], capture_output=True, text=True, cwd=GITHUB.parent)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(workflow.read_text("utf-8").replace("needs: test", "needs: tests"), "utf-8")
    assert subprocess.run([tool, str(wrong)], capture_output=True).returncode != 0


def test_the_workflow_runs_what_exists_and_publishes_nothing() -> None:
    text = (GITHUB / "workflows/ci.yml").read_text("utf-8")
    root = GITHUB.parent
    named = set(re.findall(r"[\w./-]*(?:release|docker|deploy|tests|\.ci)/[\w./-]*\w", text))
    assert len(named) >= 5
    assert [path for path in named if "$" not in path and not (root / path).exists()] == []
    assert "contents: read" in text and not re.search(
        r": write|twine|publish|--push|push: true", text
    )
