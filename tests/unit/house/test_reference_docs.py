"""Reference pages list every field, header, error code, decision, stage and log key of the code."""

from __future__ import annotations

import re
from pathlib import Path

from evoke_proxy.core.request.converters import MESSAGE_FIELDS
from evoke_proxy.core.request.options import TOP_LEVEL_FIELDS

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())
TEXT = (ROOT / "docs/requests.md").read_text("utf-8")
SOURCE = "\n".join(path.read_text("utf-8") for path in (ROOT / "evoke_proxy").rglob("*.py"))


def _missing(names: set[str]) -> list[str]:
    return sorted(name for name in names if f"`{name}`" not in TEXT)


def test_every_field_of_the_proxy_is_documented() -> None:
    assert _missing({*TOP_LEVEL_FIELDS, *MESSAGE_FIELDS}) == []


def test_every_header_of_the_proxy_is_documented() -> None:
    headers = {header.lower() for header in re.findall(r'"(X-Evoke-[A-Za-z-]+)"', SOURCE)}
    assert len(headers) >= 7
    assert sorted(header for header in headers if f"`{header}`" not in TEXT.lower()) == []


def test_every_error_code_is_documented() -> None:
    codes = set(re.findall(r'^    code(?:: str)? = "([a-z_]+)"', SOURCE, re.MULTILINE))
    codes |= set(re.findall(r'RequestError\([^)]*?"([a-z]+(?:_[a-z]+)+)"', SOURCE))
    fields = re.compile(r"evoke_[a-z]+_invalid")
    assert len(codes) >= 30
    assert _missing({code for code in codes if not fields.fullmatch(code)}) == []


def test_every_stage_and_decision_is_documented() -> None:
    stages = set(re.findall(r'trace\.stage = "([a-z]+)"', SOURCE))
    decisions = set(re.findall(r'"?decision"?(?:=|: )"([a-z]+)"', SOURCE))
    assert len(stages) >= 12 and {"relay", "refused", "restored"} <= decisions
    assert _missing(stages | decisions) == []


def test_every_key_of_a_log_line_is_documented() -> None:
    golden = (ROOT / "tests/golden/data/log.txt").read_text("utf-8")
    keys = set(re.findall(r"^ +([a-z_-]+): ", golden, re.MULTILINE))
    text = (ROOT / "docs/admin-api.md").read_text("utf-8")
    assert {"own_ms", "decision", "omitted"} <= keys
    assert sorted(key for key in keys if f"`{key}`" not in text) == []
