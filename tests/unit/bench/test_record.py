"""Records of benches: command, machine, rows and summary."""

from __future__ import annotations

import json
from pathlib import Path

from bench import record


def test_a_record_has_command_machine_rows_and_summary(tmp_path: Path) -> None:
    path = record.write("overhead", [{"a": 1}], {"b": 2.0}, tmp_path / "new" / "x.json")
    made = json.loads(path.read_text())
    assert made["command"].startswith("python -m bench.overhead") and made["machine"]
    assert made["rows"] == [{"a": 1}] and made["summary"] == {"b": 2.0}
