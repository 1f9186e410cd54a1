"""Records of benches: command, machine, rows and summary."""

from __future__ import annotations

import json
from pathlib import Path

from bench import record


def test_a_record_has_command_machine_rows_and_summary(tmp_path: Path) -> None:
    path = record.write("overhead", [{"a": 1}], {"b": 2.0}, tmp_path / "new" / "x.json")
    written = json.loads(path.read_text())
    assert written["command"].startswith("python -m bench.overhead") and written["machine"]
    assert written["rows"] == [{"a": 1}] and written["summary"] == {"b": 2.0}
