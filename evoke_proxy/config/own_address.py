"""Refuses an upstream that is the proxy itself: each request would be forwarded without end."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from evoke_proxy.config.schema import Config, parse_listen
from evoke_proxy.errors import ConfigError

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PORTS = {"http": 80, "https": 443}
_LOCALHOST = frozenset(map(ipaddress.ip_address, ("127.0.0.1", "::1")))


def check_upstreams(config: Config) -> None:
    """Raise ConfigError when an upstream is an address at which the proxy listens."""
    upstreams = [("pool.upstreams", url) for url in config.pool.servers.values()]
    for key, url in upstreams or [("upstream.url", config.upstream.url)]:
        if found := own_address(config, url):
            setting, address = found
            raise ConfigError(
                f"{key}: {url} is this proxy's own address ({setting} has {address}): name the"
                f" address of llama-server here, or another one in {setting}"
            )


def own_address(config: Config, url: str) -> tuple[str, str] | None:
    """Return the setting and the HOST:PORT with which the proxy listens at a URL; None if it does
    not.

    Names other than `localhost` are compared as texts: nothing is looked up. So the address of this
    machine in its network is not recognised where the proxy listens at 0.0.0.0 or [::].
    """
    parts = urlsplit(url)
    port = parts.port or _PORTS[parts.scheme]
    named = {"listen": config.listen, "security.admin_listen": config.security.admin_listen}
    for setting, addresses in named.items():
        for address in addresses:
            host, own_port = parse_listen(address)
            if own_port == port and _reaches(parts.hostname or "", host):
                return setting, address
    return None


def _reaches(host: str, listening: str) -> bool:
    """Whether connections to `host` arrive at a program that listens at `listening`."""
    if host.lower() == listening.lower():
        return True
    targets, own = _addresses(host), _addresses(listening)
    if len(targets) > 1:  # llama-server may be at the IPv4 one, where only [::1] is the proxy's
        targets = [to for to in targets if to.version == 4]
    # All addresses of its kind; of those only loopback ones are certainly this machine.
    if any(it.is_unspecified and it.version == to.version for it in own for to in targets):
        return any(to.is_loopback or to.is_unspecified for to in targets)
    # A connection to 0.0.0.0 or [::] goes to this machine.
    return any(to in own or (to.is_unspecified and _LOCALHOST & set(own)) for to in targets)


def _addresses(host: str) -> Collection[_Address]:
    """The IP addresses that a host stands for; empty for a name that would have to be looked up."""
    if host.lower().rstrip(".") == "localhost":
        return _LOCALHOST
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _short_form(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address,)


def _short_form(host: str) -> Collection[_Address]:
    """The IPv4 address of a text such as `127.1` or `0x7f000001`; empty for any other text."""
    try:
        return (ipaddress.IPv4Address(socket.inet_aton(host)),)
    except (OSError, ValueError):
        return ()
