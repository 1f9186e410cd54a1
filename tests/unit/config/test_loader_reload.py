"""Reloading the configuration: which changes a running proxy applies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoke_proxy.config import Config, LimitsConfig, LogConfig, PolicySettings, UpstreamConfig, keys
from evoke_proxy.config.loader import reloaded


def test_reload_applies_reloadable_settings_and_lists_the_others() -> None:
    changed_config = Config(
        listen=("0.0.0.0:1",),
        upstream=UpstreamConfig(url="http://other:1"),
        limits=LimitsConfig(queue=3, body_bytes=9),
        policy=PolicySettings(budget=512, name="discard"),
        log=LogConfig(level="debug"),
    )
    result = reloaded(Config(), changed_config)
    assert result.applied == ("limits.queue", "policy.name", "policy.budget", "log.level")
    assert result.waiting == ("listen", "upstream.url", "limits.body_bytes")
    assert result.config == Config(
        limits=LimitsConfig(queue=3), policy=changed_config.policy, log=changed_config.log
    )


def test_reload_of_an_unchanged_file_applies_nothing() -> None:
    result = reloaded(Config(), Config())
    assert (result.config, result.applied, result.waiting) == (Config(), (), ())


@pytest.mark.parametrize("key", [key for key in keys() if key.startswith(("upstream.", "embed"))])
def test_settings_of_the_upstream_and_the_embedder_are_not_reloadable(key: str) -> None:
    section, name = key.split(".")
    part = replace(getattr(Config(), section), **{name: "other"})
    result = reloaded(Config(), replace(Config(), **{section: part}))
    assert (result.config, result.waiting) == (Config(), (key,))
