"""Paths of llama-server as labels of metrics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.web import endpoints
from evoke_proxy.web.endpoints import endpoint_label


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/health", "/health"),
        ("/slots", "/slots"),
        ("/slots/3", "/slots/{id}"),
        ("/evoke", "/evoke/{path}"),
        ("/evoke/sessions/secret-name", "/evoke/{path}"),
        ("/evoke/ready", "/evoke/ready"),
        ("/evokes", "other"),
        ("/v1/chat/completions/", "other"),
        ("", "other"),
    ],
)
def test_a_path_has_its_label(path: str, label: str) -> None:
    assert endpoint_label(path) == label


@given(st.text(max_size=30).map("/".__add__) | st.sampled_from(["/slots/", "/evoke/"]))
def test_no_path_of_a_client_becomes_a_label(path: str) -> None:
    known = {"other", "/slots/{id}", "/evoke/{path}", *endpoints.ANSWER_PATHS}
    assert endpoint_label(path) in known | set(endpoints._OTHER_PATHS)


def test_each_path_is_handled_in_one_manner() -> None:
    groups = [
        set(endpoints.ANSWER_PATHS),
        set(endpoints.COUNT_PATHS),
        set(endpoints.JSON_PATHS),
        set(endpoints.FORM_PATHS),
        set(endpoints.HEALTH_PATHS),
        {endpoints.PREFETCH_PATH},
    ]
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert endpoints.TASK_PATHS <= endpoints.JSON_PATHS | endpoints.FORM_PATHS
