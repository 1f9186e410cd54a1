"""docs/openapi.json is current and describes every call of the admin API."""

from __future__ import annotations

import json
from pathlib import Path

from evoke_proxy.web import admin
from evoke_proxy.web.openapi import text

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())


def test_the_description_equals_the_output_of_the_generator() -> None:
    page = (ROOT / "docs/openapi.json").read_text("utf-8")
    assert page == text(), "run: python -m evoke_proxy.web.openapi > docs/openapi.json"


def test_every_route_of_the_proxy_is_described_but_the_page_and_the_metrics() -> None:
    routes = admin.routes(None)  # type: ignore[arg-type]
    served = {
        (route.method, route.path)
        for route in routes
        if not route.path.startswith(("/evoke/page", "/evoke/{path"))
    } - {("GET", "/evoke"), ("GET", "/evoke/"), ("GET", "/metrics")}
    described = {
        (method.upper(), path)
        for path, methods in json.loads(text())["paths"].items()
        for method in methods
    }
    assert described == served


def test_each_reference_has_a_schema_and_each_call_its_own_name() -> None:
    document = json.loads(text())
    operations = [each for path in document["paths"].values() for each in path.values()]
    names = [each["operationId"] for each in operations]
    assert len(names) == len(set(names)) and all(each["summary"] for each in operations)
    referenced = {part.split('"')[0] for part in text().split("#/components/schemas/")[1:]}
    assert referenced == set(document["components"]["schemas"])
