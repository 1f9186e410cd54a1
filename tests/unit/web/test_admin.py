"""The paths of the proxy itself while its server is away."""

from __future__ import annotations

import json

import pytest
from app_fixtures import ask


def test_the_proxy_is_healthy_without_a_server_and_not_ready() -> None:
    assert ask("GET", "/evoke/health").status == 200
    answer = ask("GET", "/evoke/ready")
    stated = json.loads(answer.body)
    assert (answer.status, stated["status"]) == (503, "not_ready") and stated["failed"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/evoke/nothing", 404),
        ("DELETE", "/evoke/status", 405),
        ("POST", "/evoke/health", 405),
        ("POST", "/health", 405),
    ],
)
def test_paths_and_methods_of_the_proxy_that_do_not_exist_are_refused(
    method: str, path: str, status: int
) -> None:
    assert ask(method, path).status == status


def test_metrics_of_the_proxy_are_exposed_while_the_server_is_away() -> None:
    answer = ask("GET", "/metrics")
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain")
    assert b"evoke_requests_total" in answer.body


def test_the_host_name_of_another_site_is_refused_for_the_admin_api() -> None:
    hostile = {"Host": "evil.example"}
    assert ask("GET", "/evoke/sessions", headers=hostile).status == 403
    assert ask("GET", "/evoke/sessions").status == 200
