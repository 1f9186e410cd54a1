"""The OpenAPI description, compared with a running proxy: statuses, types, accepted bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from admin_client import admin_call, conversation_with_evicted_fact
from harness import RunningProxy, proxy
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra [clients]")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())
DOCUMENT: dict[str, Any] = json.loads((ROOT / "docs/openapi.json").read_text("utf-8"))
# The stream of events does not end.
OPERATIONS = [
    (method.upper(), path, mode)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    for mode in GenerationMode
    if path != "/evoke/events" and (mode is GenerationMode.POSITIVE or "requestBody" in operation)
]
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
# Why a body that matches the description may be refused: what the description cannot say.
REFUSALS = {
    "evoke_budget_too_small",
    "evoke_pin_budget_exceeded",
    "invalid_request",
    "draft_invalid",
}
EXAMPLES = 12


@pytest.fixture(scope="module")
def running(patched_port: int) -> Iterator[tuple[RunningProxy, str]]:
    """A proxy with a session that has evicted a block, and the id of that session."""
    with proxy(patched_port) as started:
        conversation_with_evicted_fact(started.port, "described", turns=2)
        (session,) = admin_call(started, "GET", "sessions")["sessions"]
        yield started, session["id"]


def _refused_within_reason(case: Any, answer: Any) -> bool:
    """Whether a refused body of the right types breaks a rule that no type can express."""
    if answer.status_code != 400:
        return False
    code = json.loads(answer.content)["error"]["code"]
    body = case.body or {}
    # JSON Schema takes 3.0 for an integer.
    has_fraction = any(isinstance(value, float) for value in body.values())
    is_empty_range = "p0" in body and body["p0"] >= body["p1"]
    return code in REFUSALS and (code != "invalid_request" or has_fraction or is_empty_range)


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_answers_are_as_described(
    running: tuple[RunningProxy, str], method: str, path: str, mode: Any
) -> None:
    started, session = running
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    operation = schema[path][method]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        # A session that exists, but for the call that would delete it.
        if "id" in (case.path_parameters or {}) and method != "DELETE":
            case.path_parameters["id"] = session
        answer = case.call(base_url=f"http://127.0.0.1:{started.port}")
        if mode is GenerationMode.POSITIVE and answer.status_code in (400, 415):
            assert _refused_within_reason(case, answer), answer.content
        case.validate_response(answer, checks=CHECKS)

    check()
    started.wait_until_idle()


def test_the_session_of_the_tests_was_shown_and_changed(
    running: tuple[RunningProxy, str],
) -> None:
    started, session = running
    shown = admin_call(started, "GET", f"sessions/{session}")
    assert shown["blocks"] and shown["history"] and shown["live"]
