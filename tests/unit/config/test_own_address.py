"""An upstream that is the proxy itself is refused at start; other addresses are not."""

from __future__ import annotations

import pytest

from evoke_proxy.cli.main import main
from evoke_proxy.config import load
from evoke_proxy.config.own_address import check_upstreams, own_address
from evoke_proxy.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "listen"),
    [
        ("http://127.0.0.1:8093", "127.0.0.1:8093"),
        ("http://localhost:8093/", "127.0.0.1:8093"),
        ("http://localhost.:8093", "127.0.0.1:8093"),
        ("http://127.1:8093", "127.0.0.1:8093"),
        ("http://2130706433:8093", "0.0.0.0:8093"),
        ("http://[::1]:8093", "localhost:8093"),
        ("http://localhost:8093", "0.0.0.0:8093"),
        ("http://127.0.0.1:8093", "localhost:8093"),
        ("http://127.0.0.1:8093", "0.0.0.0:8093"),
        ("http://127.0.0.9:8093", ":8093"),
        ("http://[::1]:8093", "[::]:8093"),
        ("http://[::ffff:127.0.0.1]:8093", "127.0.0.1:8093"),
        ("http://0.0.0.0:8093", "127.0.0.1:8093"),
        ("http://GPU-1:8093", "gpu-1:8093"),
        ("http://10.0.0.5:8093", "10.0.0.5:8093"),
        ("http://127.0.0.1", "127.0.0.1:80"),
    ],
)
def test_an_address_of_the_proxy_is_recognised(url: str, listen: str) -> None:
    assert own_address(load(overrides={"listen": [listen]}), url) == ("listen", listen)


@pytest.mark.parametrize(
    ("url", "listen"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8093"),
        ("http://127.0.0.1:8093", "127.0.0.2:8093"),
        ("http://127.0.0.1:8093", "[::1]:8093"),
        ("http://127.0.0.1:8093", "10.0.0.5:8093"),
        ("http://gpu-1:8093", "0.0.0.0:8093"),
        ("http://127.2:8093", "127.0.0.1:8093"),
        # llama-server may listen at 127.0.0.1.
        ("http://localhost:8093", "[::1]:8093"),
        ("http://localhost:8093", "[::]:8093"),
        ("http://10.0.0.6:8093", "10.0.0.5:8093"),
        ("https://127.0.0.1", "127.0.0.1:80"),
        ("http://127.0.0.1:8093", "127.0.0.1:0"),
    ],
)
def test_another_address_is_none_of_the_proxy(url: str, listen: str) -> None:
    assert own_address(load(overrides={"listen": [listen]}), url) is None


def test_servers_of_a_pool_and_the_admin_address_are_checked() -> None:
    own = ["a=http://10.0.0.1:80", "b=http://127.0.0.1:8090"]
    with pytest.raises(ConfigError, match=r"^pool.upstreams: http://127.0.0.1:8090 is this proxy"):
        check_upstreams(load(overrides={"pool.upstreams": own}))
    admin = {"security.admin_listen": ["127.0.0.1:9000"], "upstream.url": "http://127.0.0.1:9000"}
    with pytest.raises(ConfigError, match=r"another one in security.admin_listen"):
        check_upstreams(load(overrides=admin))
    unused = {"upstream.url": "http://127.0.0.1:8090", "pool.upstreams": ["http://10.0.0.1:80"]}
    check_upstreams(load(overrides=unused))


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_the_command_ends_with_2_and_names_the_setting(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:8093"
    assert main([command, "--upstream", url, "--listen", "127.0.0.1:8093"]) == 2
    assert f"upstream.url: {url} is this proxy's own address" in capsys.readouterr().err
