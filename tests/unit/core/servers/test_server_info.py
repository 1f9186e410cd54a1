"""What is known of a server from its /props reply."""

from __future__ import annotations

from typing import Any

import pytest

from evoke_proxy.core.servers.server_info import UNKNOWN_SERVER, ServerInfo

FEATURES = ["blocks", "plan", "render", "reuse", "stream", "something-new"]


@pytest.mark.parametrize(
    ("props", "obstacle", "reason"),
    [
        ({}, "unpatched", "not patched"),
        ({"evoke": None}, "unpatched", "--evoke-ram"),
        ({"evoke": {}}, "unsupported", "it lacks blocks, plan, render, reuse, stream"),
        ({"evoke": {"features": 3}}, "unsupported", "it lacks blocks"),
        ({"evoke": {"features": FEATURES[1:]}}, "unsupported", "it lacks blocks"),
        ({"evoke": {"features": [], "unsupported": "iswa"}}, "unsupported", "iswa"),
        ({"evoke": {"features": FEATURES}}, "", ""),
    ],
)
def test_the_reason_names_the_missing_features(
    props: dict[str, Any], obstacle: str, reason: str
) -> None:
    info = ServerInfo.parse(props)
    assert (info.obstacle, info.patched) == (obstacle, not obstacle)
    assert reason in info.reason
    assert bool(info.reason) == bool(reason)


def test_a_server_without_the_adopt_feature_is_still_patched() -> None:
    for features, adopts in ((FEATURES, False), ([*FEATURES, "adopt"], True)):
        info = ServerInfo.parse({"evoke": {"features": features}})
        assert (info.patched, info.can_adopt) == (True, adopts)


def test_other_fields_have_defaults() -> None:
    info = ServerInfo.parse({"total_slots": 4, "is_sleeping": True, "build_info": "b1"})
    assert (info.n_slots, info.sleeping, info.build) == (4, True, "b1")
    info = ServerInfo.parse({"total_slots": None})
    assert (info.n_slots, info.sleeping, info.build) == (1, False, "")
    assert not UNKNOWN_SERVER.patched


@pytest.mark.parametrize(
    ("evoke", "layers"),
    [
        ({"limits": {"attention": {"layers": [1, 3], "max_layers": 16}}}, (1, 3)),
        ({"limits": {"attention": {}}}, ()),
        ({"limits": 3}, ()),
        (None, ()),
    ],
)
def test_the_capturable_layers_are_parsed(evoke: object, layers: tuple[int, ...]) -> None:
    assert ServerInfo.parse({"evoke": evoke}).capturable == layers


@pytest.mark.parametrize(
    ("evoke", "n_ctx"),
    [
        ({"limits": {"n_ctx_logical": 70_000, "n_cells": 8192}}, 70_000),
        ({"limits": {"n_ctx_logical": "70000"}}, None),
        ({"limits": {"n_ctx_logical": 0}}, None),
        ({"limits": {}}, None),
        ({"limits": None}, None),
        (None, None),
    ],
)
def test_the_context_of_a_slot_is_the_reported_logical_context(
    evoke: object, n_ctx: int | None
) -> None:
    assert ServerInfo.parse({"evoke": evoke}).n_ctx == n_ctx


def test_the_cells_of_a_slot_default_to_all_cells() -> None:
    limits = {"n_cells": 8192, "n_slot_cells": 2048}
    info = ServerInfo.parse({"evoke": {"limits": limits}})
    assert (info.n_cells, info.n_slot_cells) == (8192, 2048)
    info = ServerInfo.parse({"evoke": {"limits": {"n_cells": 8192}}})
    assert (info.n_cells, info.n_slot_cells) == (8192, 8192)
    assert ServerInfo.parse({}).n_slot_cells is None


def test_a_server_with_the_find_feature_can_find_sessions() -> None:
    for features, can_find in ((FEATURES, False), ([*FEATURES, "find"], True)):
        assert ServerInfo.parse({"evoke": {"features": features}}).can_find is can_find


def test_a_server_with_the_behind_feature_renders_behind_a_prompt() -> None:
    for features, can in ((FEATURES, False), ([*FEATURES, "behind"], True)):
        assert ServerInfo.parse({"evoke": {"features": features}}).can_render_behind is can


def test_a_server_with_the_media_feature_holds_images() -> None:
    features = ["blocks", "plan", "render", "reuse", "stream"]
    assert not ServerInfo.parse({"evoke": {"features": features}}).can_hold_media
    assert ServerInfo.parse({"evoke": {"features": [*features, "media"]}}).can_hold_media
