"""The closing line of `make test` counts every test once, and never hides a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "run.py"
GOOD = "def test_good(): pass\n"
BAD = "def test_bad(): assert 0\n"
SKIPPED = "import pytest\n@pytest.mark.skip\ndef test_skipped(): pass\n"
TEARDOWN = (
    "import pytest\n@pytest.fixture\ndef resource():\n    yield\n    raise RuntimeError\n"
    "def test_passes_then_fails(resource): pass\n"
)
SETUP = "import pytest\n@pytest.fixture\ndef none(): raise OSError\ndef test_never(none): pass\n"
BROKEN = "import nothing_of_this_name\n"


@pytest.mark.parametrize(
    ("source", "line", "code"),
    [
        (GOOD, "1 passed, 0 failed", 0),
        (GOOD + BAD, "1 passed, 1 failed", 1),
        (GOOD + SKIPPED, "1 passed, 0 failed, 1 skipped", 0),
        (GOOD + TEARDOWN, "1 passed, 1 failed", 1),
        (GOOD + SETUP, "1 passed, 1 failed", 1),
        (BROKEN, "0 passed, 1 failed", 2),
        ("", "0 passed, 1 failed", 5),
        ("raise SystemExit(0)\n", "0 passed, 1 failed", 3),
    ],
)
def test_the_closing_line_counts_tests_and_reports_failures(
    tmp_path: Path, source: str, line: str, code: int
) -> None:
    (tmp_path / "test_sample.py").write_text(source)
    command = [sys.executable, str(RUN), "-q", "-p", "no:cacheprovider", "test_sample.py"]
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds to load
    done = subprocess.run(
        command, cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == line
    assert done.returncode == code
