"""The reference page of the settings: it is generated and complete."""

from __future__ import annotations

from pathlib import Path

from evoke_proxy.config.reference import reference
from evoke_proxy.config.schema import env_name, settings

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
