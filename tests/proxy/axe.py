"""Checks the accessibility of a page with axe-core."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import pytest
from chromium import Page
from npm_packages import NotInstalled, installed_file

_VERSION = "4.14.1"
_RUN = """axe.run(document, {resultTypes: ["violations"]}).then((result) =>
    result.violations.flatMap((rule) => rule.nodes.map((node) =>
        `${rule.id}: ${node.html}: ${node.failureSummary}`)))"""


def axe_script() -> str:
    """Return the source of axe-core; skips the test if it cannot be installed."""
    try:
        return installed_file("axe-core", _VERSION, "axe.min.js").read_text(encoding="utf-8")
    except NotInstalled as error:
        if "BROWSER_TESTS" in os.environ:
            raise
        pytest.skip(f"axe-core cannot be installed: {error}")


async def violations(page: Page, script: str) -> list[str]:
    """Return the violations that axe-core finds on a page in its present state, by all rules."""
    await page.evaluate(f"window.axe || (() => {{ {script} }})(); Boolean(window.axe)")
    found: list[str] = await page.evaluate(_RUN)
    return found


EVERY_VIEW = ((1280, False), (1280, True), (390, False), (390, True))
TWO_VIEWS = ((1280, False), (390, True))


async def violations_in(views: Sequence[tuple[int, bool]], page: Page, script: str) -> list[str]:
    """Return the violations in several views, and the views in which the page is too wide.

    A view is a width in pixels, and whether the colour scheme is dark.
    """
    found = []
    for width, dark in views:
        await page.set_viewport(width, 844, dark)
        label = json.dumps({"width": width, "dark": dark})
        found += [f"{label} {one}" for one in await violations(page, script)]
        scrolled = await page.evaluate("document.documentElement.scrollWidth")
        found += [f"{label} is {scrolled} pixels wide"] if scrolled > width else []
    await page.set_viewport(1280, 844)
    return found
