"""Connections whose other end may vanish without a word: a host that lost its power or its network.

An answer may take as long as it takes, so that no time of ours tells; that nobody is there does.
"""

from __future__ import annotations

import socket

from aiohttp import AddrInfoType

# Silence on a connection is asked about after so long, so often, so many times; what was sent and
# is not acknowledged is given up after as long in all. A kernel answers for a program that is busy.
_ASKED_AFTER_S, _ASKED_EVERY_S, _TIMES = 10, 5, 4
VANISHED_S = _ASKED_AFTER_S + _TIMES * _ASKED_EVERY_S
_OPTIONS = (
    ("TCP_KEEPIDLE", _ASKED_AFTER_S),
    ("TCP_KEEPINTVL", _ASKED_EVERY_S),
    ("TCP_KEEPCNT", _TIMES),
    ("TCP_USER_TIMEOUT", VANISHED_S * 1000),
)


def noticing(address: AddrInfoType) -> socket.socket:
    """A socket for this address that ends with an error, `VANISHED_S` after its other end has
    vanished."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS:
        if hasattr(socket, name):  # Linux has all of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
