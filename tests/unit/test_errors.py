"""The error tree: codes, statuses, and the fields of each error."""

from __future__ import annotations

import inspect
import json

import pytest

from evoke_proxy import errors


def error_classes() -> list[type[errors.EvokeError]]:
    found = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    return [value for value in found if issubclass(value, errors.EvokeError)]


def tree_lines() -> dict[str, tuple[int, list[str]]]:
    lines = {}
    for line in (errors.__doc__ or "").splitlines():
        words = line.split()
        if words and (words[0].endswith("Error") or words[0] in vars(errors)):
            lines[words[0]] = (len(line) - len(line.lstrip()), words[1:])
    return lines


@pytest.mark.parametrize("cls", error_classes())
def test_the_module_docstring_lists_each_class_with_its_status_and_code(
    cls: type[errors.EvokeError],
) -> None:
    _, words = tree_lines()[cls.__name__]
    if cls is errors.UpstreamRejected:
        assert words[:2] == ["as", "sent"]
    else:
        assert words[:2] == [str(cls.status), cls.code]


def test_the_module_docstring_indents_each_class_below_its_base() -> None:
    ancestors: list[tuple[int, str]] = []
    for name, (indent, _) in tree_lines().items():
        ancestors = [entry for entry in ancestors if entry[0] < indent]
        base = getattr(errors, name).__base__
        assert (ancestors[-1][1] if ancestors else "Exception") == base.__name__
        ancestors.append((indent, name))


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in error_classes()]
    assert len(codes) == len(set(codes))


def test_a_request_error_may_have_its_own_code_and_status() -> None:
    error = errors.RequestError("too long", "request_too_large", 413)
    assert (str(error), error.code, error.status) == ("too long", "request_too_large", 413)
    plain = errors.RequestError("no")
    assert (plain.code, plain.status) == ("invalid_request", 400)


def test_a_budget_error_names_both_budgets() -> None:
    error = errors.BudgetTooSmall(64, 100)
    assert (error.status, error.code) == (400, "evoke_budget_too_small")
    assert "64" in str(error) and "100" in str(error)


def test_a_pin_error_has_its_own_code_and_both_token_counts() -> None:
    error = errors.PinBudgetExceeded(700, 600)
    assert (error.pinned_tokens, error.pin_cap) == (700, 600)
    assert error.code == "evoke_pin_budget_exceeded"


def test_capacity_errors_have_a_retry_after() -> None:
    assert errors.SlotsBusy("queue full", retry_after=12).retry_after == 12
    assert errors.CapacityError("full").retry_after > 0


def test_a_rejection_has_the_status_and_body_of_the_server() -> None:
    body = json.dumps({"error": {"code": 404, "type": "unknown_block", "message": "gone"}}).encode()
    error = errors.UpstreamRejected(404, body)
    assert (error.status, error.body) == (404, body)
    assert error.error["type"] == "unknown_block"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"error":"text"}', b"\xff"])
def test_a_rejection_without_an_error_object_has_an_empty_one(body: bytes) -> None:
    assert errors.UpstreamRejected(500, body).error == {}


def test_a_refused_plan_names_the_op_and_the_label() -> None:
    error = {"code": 404, "type": "unknown_block", "message": "gone", "op": 2, "name": "s/0-64"}
    rejected = errors.UpstreamRejected(404, json.dumps({"error": error}).encode())
    refused = errors.PlanRefused.of(rejected)
    assert (refused.type, refused.op, refused.name) == ("unknown_block", 2, "s/0-64")
    assert str(refused) == "unknown_block: gone"


def test_a_refusal_without_an_error_object_has_the_status_as_its_type() -> None:
    refused = errors.PlanRefused.of(errors.UpstreamRejected(503, b"busy"))
    assert (refused.type, refused.op, refused.name) == ("503", None, None)
    assert str(refused) == "503"


def test_an_error_of_llama_server_has_its_message() -> None:
    body = b'{"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}'
    assert str(errors.UpstreamRejected(503, body)) == "llama-server answered 503: Loading model"
    assert str(errors.UpstreamRejected(502, b"<html>")) == "llama-server answered 502: <html>"
