"""Warnings about risky but valid configurations."""

from __future__ import annotations

import pytest

from evoke_proxy.config import load
from evoke_proxy.config.risks import risks_of


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "[::1]:1", "localhost:1"])
def test_listening_on_loopback_is_not_a_risk(listen: str) -> None:
    assert risks_of(load(None, {}, {"listen": [listen]})) == ()


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", ":1", "proxy.example:1"])
def test_an_open_address_without_keys_is_a_risk(listen: str) -> None:
    safe = {"security.admin_token_file": "/token"}
    (risk,) = risks_of(load(None, {}, {"listen": ["127.0.0.1:2", listen], **safe}))
    assert listen in risk and "127.0.0.1:2" not in risk
    assert "security.keys_file" in risk
    assert risks_of(load(None, {}, {"listen": [listen], "security.keys_file": "/k"})) == ()
