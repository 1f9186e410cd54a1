"""What a running proxy takes over of a changed file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoke_proxy.config import Config, LimitsConfig, LogConfig, PolicyConfig, UpstreamConfig, keys
from evoke_proxy.config.loader import reloaded


def test_safe_keys_are_taken_over_and_the_others_wait() -> None:
    wanted = Config(
        listen=("0.0.0.0:1",),
        upstream=UpstreamConfig(url="http://other:1"),
        limits=LimitsConfig(queue=3, body_bytes=9),
        policy=PolicyConfig(budget=512, name="discard"),
        log=LogConfig(level="debug"),
    )
    found = reloaded(Config(), wanted)
    assert found.applied == ("limits.queue", "policy.name", "policy.budget", "log.level")
    assert found.waiting == ("listen", "upstream.url", "limits.body_bytes")
    assert found.config == Config(
        limits=LimitsConfig(queue=3), policy=wanted.policy, log=wanted.log
    )


def test_nothing_new_is_nothing_to_do() -> None:
    found = reloaded(Config(), Config())
    assert (found.config, found.applied, found.waiting) == (Config(), (), ())


@pytest.mark.parametrize("key", [key for key in keys() if key.startswith(("upstream.", "embed"))])
def test_what_connections_and_models_are_made_from_is_never_swapped(key: str) -> None:
    section, name = key.split(".")
    part = replace(getattr(Config(), section), **{name: "other"})
    found = reloaded(Config(), replace(Config(), **{section: part}))
    assert (found.config, found.waiting) == (Config(), (key,))
