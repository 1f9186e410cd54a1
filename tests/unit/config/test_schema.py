"""The settings: descriptions, defaults, removed keys, variables and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from evoke_proxy.config import Config, env_name, keys, load, parse_listen
from evoke_proxy.config.loader import risks_of
from evoke_proxy.config.schema import REMOVED, REMOVED_VALUES, all_fields, settings
from evoke_proxy.errors import ConfigError


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "evoke.yaml"
    path.write_text(text)
    return path


def test_every_setting_has_a_description_and_a_valid_default() -> None:
    for key, item in settings().items():
        assert item.doc.endswith("."), key
        load(None, {}, {key: item.default})


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_is_refused_with_what_replaces_it(key: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=f"^{key}: was removed, .*; delete the key$"):
        load(_file(tmp_path, f"{section}: {{{name}: 1}}\n"))
    with pytest.raises(ConfigError, match=f"^{env_name(key)}: {key} was removed, .*; unset the"):
        load(None, {env_name(key): "1"})
    assert key not in keys()


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in REMOVED_VALUES.items() for value in values]
)
def test_a_removed_value_is_refused_with_what_replaces_it(
    key: str, value: str, tmp_path: Path
) -> None:
    section, name = key.split(".")
    expected = f"^{key}: '{value}' was removed, {settings()[key].default} replaces it"
    with pytest.raises(ConfigError, match=expected):
        load(_file(tmp_path, f"{section}: {{{name}: {value}}}\n"))
    with pytest.raises(ConfigError, match=expected):
        load(None, {env_name(key): value})


@pytest.mark.parametrize("key", [key for key, item in all_fields().items() if item.is_tuning])
def test_tuning_values_can_be_set_only_by_an_override_in_code(key: str, tmp_path: Path) -> None:
    default = all_fields()[key].default
    assert load(None, {}, {key: default}) == Config()
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=key):
        load(_file(tmp_path, f"{section}: {{{name}: 1}}\n"))


def test_a_listen_address_may_have_ipv6_brackets_or_no_host() -> None:
    assert parse_listen("[::1]:80") == ("::1", 80)
    assert parse_listen(":80") == ("0.0.0.0", 80)
    with pytest.raises(ConfigError):
        parse_listen("host:99999")


def test_the_variable_of_a_setting_is_its_key_in_capitals() -> None:
    assert env_name("upstream.url") == "EVOKE_UPSTREAM_URL"


@pytest.mark.parametrize(
    "address",
    ["127.evil.example:1", "127.0.0.1.evil.example:1", "0.0.0.0:1", ":1", "[::]:1", "evil:1"],
)
def test_the_admin_api_needs_a_token_outside_loopback(address: str) -> None:
    with pytest.raises(ConfigError, match="set security.admin_token_file"):
        load(None, {}, {"security.admin_listen": [address]})
    load(None, {}, {"security.admin_listen": [address], "security.admin_token_file": "token"})


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.1.2.3:1", "localhost:1", "[::1]:1"])
def test_the_admin_api_needs_no_token_on_loopback(address: str) -> None:
    assert load(None, {}, {"security.admin_listen": [address]}).security.admin_listen == (address,)


def test_keys_with_a_shared_admin_address_need_an_admin_token() -> None:
    shared = {"security.admin_listen": [], "security.keys_file": "keys"}
    with pytest.raises(ConfigError, match="security.admin_listen: is empty, so that every client"):
        load(None, {}, shared)
    assert load(None, {}, shared | {"security.admin_token_file": "token"})
    assert load(None, {}, {"security.admin_listen": []})


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "[::1]:1", "localhost:1"])
def test_an_address_of_this_machine_is_no_risk(listen: str) -> None:
    assert risks_of(load(None, {}, {"listen": [listen]})) == ()


@pytest.mark.parametrize(("budget", "name"), [("auto", "auto"), ("off", "off"), (2048, None)])
def test_whole_prompts_without_a_smaller_budget_are_a_risk(
    budget: str | int, name: str | None
) -> None:
    settings = {"policy.budget": budget}
    assert risks_of(load(None, {}, settings)) == ()
    risks = risks_of(load(None, {}, settings | {"policy.within_turn": "full"}))
    assert len(risks) == (name is not None)
    assert all(f"policy.budget: {name}, because" in risk for risk in risks)


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", ":1", "proxy.example:1"])
def test_an_open_address_without_keys_is_a_risk(listen: str) -> None:
    safe = {"security.admin_token_file": "/token"}
    (risk,) = risks_of(load(None, {}, {"listen": ["127.0.0.1:2", listen], **safe}))
    assert listen in risk and "127.0.0.1:2" not in risk
    assert "security.keys_file" in risk
    assert risks_of(load(None, {}, {"listen": [listen], "security.keys_file": "/k"})) == ()


def test_an_address_for_clients_and_operators_is_refused() -> None:
    both = {"listen": ["127.0.0.1:9000"], "security.admin_listen": ["127.0.0.1:9000"]}
    with pytest.raises(ConfigError, match=r"security.admin_listen: 127.0.0.1:9000 is in `listen`"):
        load(None, {}, both)
    # Port 0 is another one for each; the default admin address yields to `listen`.
    load(None, {}, {"listen": ["127.0.0.1:0"], "security.admin_listen": ["127.0.0.1:0"]})
    load(None, {}, {"listen": ["127.0.0.1:18090"]})
