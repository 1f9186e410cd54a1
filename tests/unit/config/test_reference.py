"""The reference page of the settings: it is generated and complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from evoke_proxy.config.loader import load, read_file
from evoke_proxy.config.reference import reference, schema
from evoke_proxy.config.schema import env_name, settings
from evoke_proxy.errors import ConfigError

# Settings whose numbers have a rule that depends on others.
RULES = {"policy.budget", "limits.bodies_mib", "limits.body_bytes"}
ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())


def test_the_page_equals_the_output_of_the_generator() -> None:
    page = (ROOT / "docs/configuration.md").read_text("utf-8")
    assert page == reference(), (
        "run: python -m evoke_proxy.config.reference > docs/configuration.md"
    )


def test_the_page_has_every_setting_with_its_variable() -> None:
    text = reference()
    for key in settings():
        assert f"### `{key}`\n" in text and f"`{env_name(key)}`" in text


def test_the_schema_equals_the_output_of_the_generator() -> None:
    committed = json.loads((ROOT / "config/evoke.schema.json").read_text("utf-8"))
    command = "python -m evoke_proxy.config.reference schema > config/evoke.schema.json"
    assert committed == schema(), f"run: {command}"


def test_the_example_names_its_schema_and_matches_it() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra [docker]")
    example = ROOT / "config/evoke.example.yaml"
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", example.read_text("utf-8"))
    assert named is not None and (example.parent / named[1]).is_file()
    jsonschema.validate(read_file(example), schema())
    for wrong in ({"polcy": {}}, {"policy": {"budgett": 1}}, {"limits": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema())


@pytest.mark.parametrize("value", [True, False, -1, 0, 1, 0.5, 2**50, None, "off", "x", [], {}])
def test_the_schema_and_the_loader_accept_the_same_types(value: object, tmp_path: Path) -> None:
    """The loader also checks what a type cannot express, which are mostly texts."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra [docker]")
    validator, file = jsonschema.Draft202012Validator(schema()), tmp_path / "evoke.yaml"
    for key, item in settings().items():
        section, _, name = key.rpartition(".")
        tree = {section: {name: value}} if section else {name: value}
        is_valid = validator.is_valid(tree)
        file.write_text(json.dumps(tree), "utf-8")
        try:
            load(file, {})
            is_loaded = True
        except ConfigError:
            is_loaded = False
        assert is_valid or not is_loaded, (key, value)
        if is_valid and not is_loaded:
            is_text = item.type is str or item.type == tuple[str, ...]
            assert is_text or key in RULES, (key, value)
